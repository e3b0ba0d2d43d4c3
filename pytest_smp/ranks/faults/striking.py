"""A rank's faults in one run: counting its calls, and striking when one is due.

``Effects`` is the part that differs between simulated ranks and rank processes: the ways to end a rank
and to let it stand still.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pytest_smp.ranks.faults import (
    ALWAYS,
    Corrupt,
    Drop,
    Exit,
    Fault,
    FullDisk,
    Garbled,
    Kill,
    Raise,
    Stall,
    Unpicklable,
    _AtCall,
    _OfMessage,
)
from pytest_smp.ranks.faults.disk import Quota
from pytest_smp.ranks.faults.operations import matches
from smp_core.errors import InjectedError
from smp_core.transport.payload import Payload
from smp_core.transport.protocols import Group, ObjectTransport


class Effects(Protocol):
    """The effects of faults on a rank of one kind: a simulated rank or a rank process."""

    def end(self, code: int, text: str) -> None:
        """The rank ends with this exit status (negative is a signal). Does not return.

        ``text`` says in words that a fault did it.
        """

    def stand_still(self, seconds: float | None, text: str) -> None:
        """The rank stands still for ``seconds``, or for ever if that is None."""


@dataclasses.dataclass(eq=False)
class _Due:
    """One fault of this rank, and the number of calls of its operation so far."""

    index: int
    fault: Fault
    count: int = 0


Later = list[_Due]


class Strikes:
    """The faults of one rank in one run."""

    def __init__(self, faults: Sequence[Fault], rank: int, effects: Effects) -> None:
        self._effects, self._rank = effects, rank
        self._all = [_Due(index, each) for index, each in enumerate(faults) if each.rank == rank]
        at_calls = [due for due in self._all if isinstance(due.fault, _AtCall)]
        self._messages = [due for due in at_calls if isinstance(due.fault, _OfMessage)]
        self._calls = [due for due in at_calls if due not in self._messages]
        self.struck: set[int] = set()  # which of the run's faults, by number

    @property
    def of_tensors(self) -> bool:
        """True if a fault strikes at calls of torch.distributed."""
        return any(not due.fault.at.startswith("smp.") for due in [*self._calls, *self._messages])  # type: ignore[attr-defined]

    # Calls.

    def before(self, operation: str) -> Later:
        """The rank is about to make a call; return the faults that strike once the call is over."""
        later = []
        for due, fault in _counted(self._calls, operation):
            if fault.when == "after":
                later.append(due)
            else:
                self._strike(due)
        return later

    def after(self, later: Later) -> None:
        """The rank has learnt that the call is over."""
        for due in later:
            self._strike(due)

    def message(self, operation: str) -> list[Drop | Corrupt]:
        """Count the message that this call sends; return the faults that strike it."""
        hits: list[Drop | Corrupt] = []
        for due, fault in _counted(self._messages, operation):
            self.struck.add(due.index)
            assert isinstance(fault, Drop | Corrupt)
            hits.append(fault)
        return hits

    def moment(self, name: str) -> None:
        """A moment of the run that is no call: ``start``, ``end``, ``sent``."""
        self.before(name)

    def _strike(self, due: _Due) -> None:
        self.struck.add(due.index)
        fault = due.fault
        assert isinstance(fault, _AtCall)
        _EFFECTS[type(fault)](self._effects, fault, f"{fault.verb} {fault.moment()}")

    # The body.

    def body(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """The body, wrapped so that faults strike before it, in it and after it."""

        def struck_body(*args: Any, **kwargs: Any) -> Any:
            self.struck.update(due.index for due in self._all if isinstance(due.fault, ALWAYS))
            with Quota([due.fault for due in self._all if isinstance(due.fault, FullDisk)]):
                self.moment("start")
                value = body(*args, **kwargs)
            self.moment("end")
            for due in self._all:
                if isinstance(due.fault, Unpicklable):
                    self.struck.add(due.index)
                    value = _Unpicklable()
                elif isinstance(due.fault, _AtCall) and due.fault.at == "sent":
                    self.struck.add(due.index)  # now: the result is sent before the fault strikes
            return value

        return struck_body


def _counted(dues: list[_Due], operation: str) -> list[tuple[_Due, _AtCall]]:
    """Count the call for each of them; those whose turn has come."""
    come = []
    for due in dues:
        fault = due.fault
        assert isinstance(fault, _AtCall)
        if matches(fault.at, operation):
            due.count += 1
            if due.count == fault.nth:
                come.append((due, fault))
    return come


def _raise(effects: Effects, fault: Any, text: str) -> None:
    error = fault.error
    if error is None:
        raise InjectedError(f"rank {fault.rank}: {fault.moment()} (smp_faults)")
    # A copy: raising adds notes and a traceback, which are this run's.
    error = copy.copy(error) if isinstance(error, BaseException) else error()
    error.add_note(f"smp_faults: {text}")
    raise error


_EFFECTS: dict[type[_AtCall], Callable[[Effects, Any, str], None]] = {
    Kill: lambda effects, fault, text: effects.end(-fault.signal, text),
    Exit: lambda effects, fault, text: effects.end(fault.code, text),
    Stall: lambda effects, fault, text: effects.stand_still(fault.seconds, text),
    Raise: _raise,
}


class _Unpicklable:
    """The value that a body returns under an Unpicklable fault."""

    def __reduce__(self) -> Any:
        raise TypeError("smp_faults made it so")


def damaged(obj: object, fault: Corrupt) -> object:
    """The object that arrives in place of ``obj`` if ``fault`` damages its message."""
    if fault.how is not None:
        return fault.how(obj)
    return Garbled(f"rank {fault.rank}, {fault.moment()}")


class FaultyObjects:
    """An object transport whose calls are struck. See ObjectTransport."""

    def __init__(self, transport: ObjectTransport, strikes: Strikes) -> None:
        self._transport, self._strikes = transport, strikes

    def send(self, obj: object, dest: int) -> None:
        """See ObjectTransport."""
        self._message("smp.send", obj, lambda each: self._transport.send(each, dest))

    def broadcast(self, obj: object, group: Group) -> None:
        """See ObjectTransport."""
        self._message("smp.broadcast", obj, lambda each: self._transport.broadcast(each, group))

    def recv_from(self, src: int) -> Any:
        """See ObjectTransport."""
        return self._call("smp.recv_from", lambda: self._transport.recv_from(src))

    def allgather(self, obj: object, group: Group) -> list[Any]:
        """See ObjectTransport."""
        gathered: list[Any] = self._call(
            "smp.allgather", lambda: self._transport.allgather(obj, group)
        )
        return gathered

    def barrier(self, group: Group) -> None:
        """See ObjectTransport."""
        self._call("smp.barrier", lambda: self._transport.barrier(group))

    def _call(self, operation: str, make: Callable[[], Any]) -> Any:
        later = self._strikes.before(operation)
        result = make()
        self._strikes.after(later)
        return result

    def _message(self, operation: str, obj: object, deliver: Callable[[object], None]) -> None:
        later = self._strikes.before(operation)
        for hit in self._strikes.message(operation):
            if isinstance(hit, Drop):
                Payload(obj, operation)  # raises for an object that cannot be pickled
                break
            obj = damaged(obj, hit)
        else:
            deliver(obj)
        self._strikes.after(later)
