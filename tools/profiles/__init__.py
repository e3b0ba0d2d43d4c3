"""Coverage of the required features by drawn cases, counted while each case runs."""
