"""Fabrics: what ranks exchange data through."""
