"""Real models on every kind of parallelism against plain PyTorch, as a table (docs/models.md)."""
