"""Drawn faults of a rank."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from pytest_smp.ranks.faults import Exit, Fault, Kill, Raise, Stall
from pytest_smp.ranks.faults.operations import MOMENTS, canonical
from pytest_smp.strategies.arguments import check_int
from smp_core.errors import SmpError

#: The strategies of each kind's own values, by name.
_KINDS: dict[str, Callable[[], dict[str, SearchStrategy[Any]]]] = {
    "kill": lambda: {"signal": st.sampled_from((signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM))},
    "exit": lambda: {"code": st.sampled_from((1, 0, 7, 255))},
    "stall": lambda: {"seconds": st.none()},
    "delay": lambda: {"seconds": st.sampled_from((0.0, 0.01, 0.05))},
    "raise_": lambda: {"error": st.none()},
}
_CLASSES: dict[str, type[Fault]] = {
    "kill": Kill,
    "exit": Exit,
    "stall": Stall,
    "delay": Stall,
    "raise_": Raise,
}


def faults(
    *,
    ranks: int,
    at: Sequence[str] = ("start", "allgather", "end"),
    kinds: Sequence[str] = ("kill", "exit", "raise_", "delay"),
    max_nth: int = 3,
) -> SearchStrategy[Fault]:
    """Draw one fault of a run on ``ranks`` ranks.

    An argument of a marked test that is a fault applies to its run. Not required: a program may not
    come to what is drawn. Shrinks towards a kill of rank 0 at the first of ``at``.

    Args:
        ranks: the world's size.
        at: operations and moments; see faults.Fault.
        kinds: of ``kill``, ``exit``, ``raise_``, ``delay``, ``stall``. A stall takes a run's whole
            time limit on real ranks.
        max_nth: the last call of an operation that it may strike at.

    Raises:
        InvalidArgument: a value is none of those.
    """
    check_int("ranks", ranks, at_least=1)
    check_int("max_nth", max_nth, at_least=1)
    if not kinds or not set(kinds) <= set(_KINDS):
        raise InvalidArgument(f"kinds={kinds!r}: must be some of {', '.join(_KINDS)}")
    if not at:
        raise InvalidArgument("at is empty: name an operation")
    try:
        places = [canonical("faults", each) for each in at]
    except SmpError as error:
        raise InvalidArgument(str(error)) from None
    return st.one_of(*(_of(kind, ranks, places, max_nth) for kind in kinds))


def _of(kind: str, ranks: int, places: list[str], max_nth: int) -> SearchStrategy[Fault]:
    fitting = [each for each in places if each != "sent" or kind in ("kill", "exit")]
    if not fitting:
        raise InvalidArgument(f"at={places!r}: no {kind} is possible there")

    def at_place(place: str) -> SearchStrategy[Fault]:
        once, make = place in MOMENTS, _CLASSES[kind]
        values = st.fixed_dictionaries(
            {
                "rank": st.integers(0, ranks - 1),
                "required": st.just(False),
                "at": st.just(place),
                "nth": st.just(1) if once else st.integers(1, max_nth),
                "when": st.just("before") if once else st.sampled_from(("before", "after")),
                **_KINDS[kind](),
            }
        )
        # Not `st.builds`: Hypothesis would show that call, and the repr of a signal is no code.
        return values.map(lambda said: make(**said))

    return st.sampled_from(fitting).flatmap(at_place)
