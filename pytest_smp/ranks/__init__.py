"""The executors that make ranks exist, and the fabric of simulated ranks."""
