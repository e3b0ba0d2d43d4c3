"""Cases: drawn inputs of properties, functions that run them on ranks, and oracles for the results."""
