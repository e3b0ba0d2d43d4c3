"""Simulated ranks: threads of one process, of which one runs at a time, and their fabric."""
