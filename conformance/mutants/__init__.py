"""Planted bugs: each must be caught by the requirement that it names."""
