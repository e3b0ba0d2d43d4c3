"""A pytest plugin that gives a test its ranks: ``pytest --smp-ranks=8``, ``@pytest.mark.smp``,
strategies.
"""
