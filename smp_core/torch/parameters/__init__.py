"""Single parameters of a model: delayed values, the owning rank, shared memory and registered uses."""
