"""The order of the ranks' turns, drawn."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pytest_smp.strategies.arguments import check_int
from smp_core.backends.schedule import Schedule


def schedules(*, max_deviations: int = 5, horizon: int = 100) -> SearchStrategy[Schedule]:
    """Draw orders of the ranks' turns on `sim`: round-robin, and where a run deviates from it.

    An argument of a marked test that is a ``Schedule`` is the schedule of the run (at most one may
    be). Shrinks towards few deviations that come early, and so towards round-robin.

    Args:
        max_deviations: most deviations in one schedule.
        horizon: deviations are at one of so many first decisions of a run. A run makes about one
            for each communication call of each rank.

    Raises:
        InvalidArgument: no ints of at least 0 and 1.
    """
    check_int("max_deviations", max_deviations, at_least=0)
    check_int("horizon", horizon, at_least=1)
    deviation = st.tuples(st.integers(0, horizon - 1), st.integers(1, 7))
    return st.lists(deviation, max_size=max_deviations, unique_by=lambda pair: pair[0]).map(
        lambda pairs: Schedule(tuple(sorted(pairs)))
    )
