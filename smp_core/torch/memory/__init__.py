"""Activations between a forward pass and its backward pass: which are computed again."""
