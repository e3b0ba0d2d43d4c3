"""The engines: ways to train a model on ranks, which the training requirements test."""
