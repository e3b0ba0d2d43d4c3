"""Data exchange between ranks: under torchrun, mpiexec or srun, alone, and the parts that the harness shares."""
