"""Training in 16 bits, with float32 masters (API 1.8, AWS Sharded Data Parallelism)."""
