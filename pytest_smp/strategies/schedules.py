"""The order of the ranks' turns, drawn."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pytest_smp.ranks.schedule import Schedule
from pytest_smp.strategies.arguments import check_int


def schedules(*, max_deviations: int = 5, horizon: int = 1000) -> SearchStrategy[Schedule]:
    """Draw orders of the ranks' turns on `sim`: round-robin, and where a run deviates from it.

    An argument of a marked test that is a ``Schedule`` is the schedule of the run (at most one may
    be). Shrinks towards few deviations that come early, and so towards round-robin.

    Args:
        max_deviations: most deviations in one schedule.
        horizon: deviations are at one of so many first decisions of a run, early ones more often. A
            run makes up to two for each communication call of each rank; ``Report.decisions`` counts.

    Raises:
        InvalidArgument: no ints of at least 0 and 1.
    """
    check_int("max_deviations", max_deviations, at_least=0)
    check_int("horizon", horizon, at_least=1)
    # Evenly over a thousand decisions, those of a short program would hardly ever be drawn.
    decisions = st.one_of(
        *(
            st.integers(0, last)
            for last in sorted({min(each, horizon) - 1 for each in (16, 128, horizon)})
        )
    )
    deviation = st.tuples(decisions, st.integers(1, 7))
    return st.lists(deviation, max_size=max_deviations, unique_by=lambda pair: pair[0]).map(
        lambda pairs: Schedule(tuple(sorted(pairs)))
    )
