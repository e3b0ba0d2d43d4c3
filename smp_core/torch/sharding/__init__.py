"""Sharded data parallelism: the training state split over the ranks of a shard group (API 4.3)."""
