"""Cases: what the properties draw, run on ranks, and compare with values that are made another way."""
