"""How well drawn cases cover what they must, counted while each is run."""
