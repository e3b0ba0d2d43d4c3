"""The fixture ``smp_calls``: the communications of a run, as a sequence of `CommunicationCall`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, overload

from pytest_smp.ranks.call_records import CALLS, CommunicationCall
from smp_core.transport import current_rank

__all__ = ["CommunicationCall", "SmpCalls"]


class Recording(Protocol):
    """The holder of the last run's calls: the controller (running.py)."""

    calls: list[CommunicationCall]


class SmpCalls(Sequence[CommunicationCall]):
    """The calls of the test's last run, rank by rank; on a rank, its own so far, in the order of issue."""

    def __init__(self, controller: Recording | None = None) -> None:
        self._controller = controller

    def _calls(self) -> Sequence[CommunicationCall]:
        rank: Any = current_rank.current()
        if rank is not None:
            calls: list[CommunicationCall] = rank.records.get(CALLS, [])
            return calls
        return () if self._controller is None else self._controller.calls

    @overload
    def __getitem__(self, index: int) -> CommunicationCall: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[CommunicationCall]: ...

    def __getitem__(self, index: int | slice) -> CommunicationCall | Sequence[CommunicationCall]:
        return self._calls()[index]

    def __len__(self) -> int:
        return len(self._calls())

    def __repr__(self) -> str:
        return "smp_calls"

    def __reduce__(self) -> tuple[Any, ...]:
        return SmpCalls, ()
