"""Tensor parallelism: modules whose parameters are split over the ranks of a TP group (API 1.9, 1.10).

``wishes`` holds the contexts by which a script says which modules, ``registry`` the distributed module for each class,
``replacement`` puts them into the tree, ``takeover`` gives them the marks of the originals, ``translation`` the entries
of the originals' states. ``exchange`` has the changes of layout that they compute with, ``random_stream`` the random
numbers of split activations, ``full_parameters`` whole parameters for states.
"""
