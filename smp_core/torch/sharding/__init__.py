"""Sharded data parallelism: the training state split over the ranks of a sharding group (API 4.3)."""
