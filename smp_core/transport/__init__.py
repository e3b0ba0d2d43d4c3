"""How ranks exchange data: under torchrun, mpiexec or srun, alone, and what the harness's backends share with these."""
