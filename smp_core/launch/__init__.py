"""Launching: a script starts on as many ranks as it asks for, on this machine (``smp-run``, ``LocalEstimator``).

``command`` is the command line, ``estimator`` the dictionaries of SageMaker's estimators; both make a ``job``.
``backends`` has the ways to start one. ``processes`` starts rank processes and follows them, ``rank`` is the program of
each, ``script`` runs the script itself, and ``output`` says which rank has written a line.
"""
