"""How ranks of a test come to exist, and what simulated ones exchange data through."""
