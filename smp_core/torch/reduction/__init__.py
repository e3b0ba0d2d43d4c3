"""Gradients of replicas: exchanged in an order that is published, folded, and compared."""
