"""Calls of modules on other ranks of the pipeline, and the messages that carry them."""
