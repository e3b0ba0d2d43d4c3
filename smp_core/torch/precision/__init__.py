"""Training in 16 bits, with float32 masters (SMP_API.md 1.8, seed 004)."""
