"""Figures of speed and size, side by side in one run: ``python -m benchmarks``."""
