"""Sharded data parallelism: the training state split over the ranks of a sharding group (seed 004)."""
