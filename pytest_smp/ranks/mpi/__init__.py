"""Ranks of an MPI job that the harness starts by mpiexec."""
