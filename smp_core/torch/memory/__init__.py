"""Activations between a forward pass and its backward pass: computed again, or offloaded."""
