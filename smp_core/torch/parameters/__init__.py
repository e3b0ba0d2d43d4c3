"""Facts of single parameters: delayed values, the owning rank, ties and registered uses."""
