"""Faults that a test asks for: the kind of error, the rank, and the call.

A fault is a value, and strikes when its rank reaches an operation for the n-th time in a run; counts
begin anew with each run. No module here imports torch. The other modules (``striking`` on the rank,
``simulated`` and ``process`` for the two kinds of ranks) are not imported before a run has a fault.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import os
import signal
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

from pytest_smp.ranks.faults.operations import AMBIGUOUS, MOMENTS, SENDS, canonical
from smp_core.errors import ArgumentError, ArgumentTypeError, RankError, UnsupportedError


class Claim(enum.StrEnum):
    """The abilities of an executor that faults need to strike on its ranks."""

    STRIKES = "strikes"  #: calls can be counted and interfered with
    PROCESSES = "processes"  #: ranks are processes: they send results, and receive none
    TENSORS = "tensors"  #: point-to-point messages of tensors can be lost and damaged


#: The signals by which a rank can be killed.
SIGNALS = (
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTERM,
)


def _whole(fault: Fault, name: str, least: int, most: int | None = None) -> None:
    value = getattr(fault, name)
    if type(value) is not int:
        raise ArgumentTypeError(f"{fault.verb}: {name} must be an int, not {value!r}")
    if value < least or (most is not None and value > most):
        span = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ArgumentError(f"{fault.verb}: {name}={value}: must be {span}")


def _renewed(error: BaseException | type[BaseException]) -> None:
    """Refuse what a rank could not raise anew: it gets a copy, or makes one."""
    try:
        copied = error() if isinstance(error, type) else copy.copy(error)
    except Exception as reason:
        what = f"{_code(error)} cannot be {'made' if isinstance(error, type) else 'copied'}"
        raise ArgumentError(
            f"raise_: error={what} ({type(reason).__name__}: {reason}): give an exception that "
            "copy.copy copies, whose __init__ takes its args"
        ) from None
    if not isinstance(error, type) and repr(copied.args) != repr(error.args):
        raise ArgumentError(
            f"raise_: error={error!r} becomes {copied!r} when it is copied: its __init__ must take its "
            "args, or it needs a __reduce__"
        )


def _code(value: object) -> str:
    if isinstance(value, signal.Signals):
        return f"signal.{value.name}"
    return value.__qualname__ if isinstance(value, type) else repr(value)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Fault:
    """The base class of faults.

    Attributes:
        rank: the world rank that the fault strikes.
        required: a run that ends well without the fault having struck fails (FaultNotReachedError).

    Raises:
        ArgumentError, ArgumentTypeError: a value is out of range, or of the wrong type; an
            operation is unknown (the nearest is named).
    """

    verb: ClassVar[str]  # its name in messages, and of the method of ``smp_faults``

    rank: int
    required: bool = True

    def __post_init__(self) -> None:
        _whole(self, "rank", 0)
        if type(self.required) is not bool:
            raise ArgumentTypeError(f"{self.verb}: required must be a bool, not {self.required!r}")

    @property
    def needs(self) -> frozenset[Claim]:
        """The abilities of an executor that this fault needs."""
        return frozenset({Claim.STRIKES})

    def moment(self) -> str:
        """The moment at which the fault strikes, in words."""
        return "in the body"

    def __repr__(self) -> str:
        """The fault as code, without arguments that have their default."""
        said = [
            f"{field.name}={_code(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        said.sort(key=lambda text: not text.startswith("rank="))
        return f"{type(self).__name__}({', '.join(said)})"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _AtCall(Fault):
    """Strikes at a call.

    Attributes:
        at: an operation of the API (``allgather``, or ``smp.allgather`` where torch has one of that
            name, too) or of torch.distributed (``all_reduce``; ``dist.send``), or a moment:
            ``start`` (before the body), ``end`` (after it, before the result is sent), ``sent``
            (after that; ranks that are processes).
        nth: which of the rank's calls of it in a run, from 1.
        when: ``before`` the call or ``after`` it: once the rank has learnt that it is over.
    """

    at: str = "start"
    nth: int = 1
    when: str = "before"

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole(self, "nth", 1)
        object.__setattr__(self, "at", canonical(self.verb, self.at))
        if self.when not in ("before", "after"):
            raise ArgumentError(f"{self.verb}: when={self.when!r}: must be 'before' or 'after'")
        if self.at in MOMENTS and (self.nth, self.when) != (1, "before"):
            raise ArgumentError(
                f"{self.verb}: at={self.at!r} comes once in a run: leave nth and when out"
            )

    @property
    def needs(self) -> frozenset[Claim]:
        return super().needs | ({Claim.PROCESSES} if self.at == "sent" else frozenset())

    def moment(self) -> str:
        if self.at in MOMENTS:
            return MOMENTS[self.at]
        return f"{self.when} call {self.nth} of {self.at}"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Kill(_AtCall):
    """The rank dies of a signal.

    Attributes:
        signal: one of SIGKILL, SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGTERM.
    """

    verb = "kill"
    signal: int = signal.SIGKILL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signal not in SIGNALS:
            names = ", ".join(each.name for each in SIGNALS)
            raise ArgumentError(f"kill: signal={self.signal!r}: must be one of {names}")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Exit(_AtCall):
    """The rank's process ends at once, as by ``os._exit(code)``; 0 is a crash like the others.

    Attributes:
        code: from 0 to 255.
    """

    verb = "exit"
    code: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole(self, "code", 0, 255)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Stall(_AtCall):
    """The rank stands still.

    Attributes:
        seconds: for so long; None is for ever. On `sim` no time passes: a rank that stands still for
            some seconds goes on when no other can.
    """

    verb = "stall"
    seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        value = self.seconds
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(f"stall: seconds must be a number or None, not {value!r}")
        if not 0 <= value < 10**6:  # false for nan
            raise ArgumentError(f"stall: seconds={value!r}: must be at least 0, or None for ever")
        if self.at == "sent" and value is not None:
            raise ArgumentError("stall: a rank that stands still after its result harms nobody")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Raise(_AtCall):
    """The rank raises.

    Attributes:
        error: an exception that can be copied, or the class of one that needs no arguments;
            InjectedError, which says where, if None.
    """

    verb = "raise_"
    error: BaseException | type[BaseException] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at == "sent":
            raise ArgumentError("raise_: after its result was sent a rank has no body to raise in")
        error = self.error
        fits = isinstance(error, type) and issubclass(error, BaseException)
        if error is not None and not fits and not isinstance(error, BaseException):
            raise ArgumentTypeError(
                f"raise_: error must be an exception or a class of them, not {error!r}"
            )
        if error is not None:
            _renewed(error)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _OfMessage(_AtCall):
    """A fault of a message that the rank sends.

    Attributes:
        at: the sending call. ``send`` and ``broadcast`` are those of the API; a tensor is sent by
            ``dist.send`` or ``isend``.
    """

    at: str = "send"

    def __post_init__(self) -> None:
        if self.at in AMBIGUOUS:
            object.__setattr__(self, "at", f"smp.{self.at}")
        super().__post_init__()
        if self.at not in SENDS:
            raise ArgumentError(
                f"{self.verb}: at={self.at!r} is no call that sends a message: "
                f"{', '.join(sorted(SENDS))} are"
            )
        if self.when != "before":
            raise ArgumentError(f"{self.verb}: when={self.when!r}: a message is hit on its way")

    @property
    def needs(self) -> frozenset[Claim]:
        return super().needs | (frozenset() if self.at.startswith("smp.") else {Claim.TENSORS})

    def moment(self) -> str:
        return f"on the message of call {self.nth} of {self.at}"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Drop(_OfMessage):
    """A message is lost: its sender goes on as if it had been taken."""

    verb = "drop"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Corrupt(_OfMessage):
    """A message arrives damaged.

    Attributes:
        how: makes what arrives of what was sent (an object, or a copy of the tensor). If None, a
            Garbled arrives instead of an object, and every bit of the tensor's first element is
            turned.
    """

    verb = "corrupt"
    how: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.how is not None and not callable(self.how):
            raise ArgumentTypeError(f"corrupt: how must be callable, not {self.how!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Unpicklable(Fault):
    """The body's return value cannot be pickled.

    Needs ranks that are processes: simulated ranks return their values without pickling.
    """

    verb = "unpicklable"

    @property
    def needs(self) -> frozenset[Claim]:
        return super().needs | {Claim.PROCESSES}

    def moment(self) -> str:
        return "on the result"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FullDisk(Fault):
    """The disk is full for files below a folder that the rank's body writes.

    A write by Python raises OSError (ENOSPC); ``torch.save``, which writes from C++, raises its own error
    for a full disk. Files keep the bytes that were written before, as on a real disk. The fault counts as
    reached in every run.

    Attributes:
        below: the folder.
        after: the number of bytes that still find room.
    """

    verb = "full_disk"
    below: str | os.PathLike[str]
    after: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole(self, "after", 0)
        below: object = self.below
        if not isinstance(below, str) and not isinstance(below, os.PathLike):
            raise ArgumentTypeError(f"full_disk: below must be a path, not {self.below!r}")


#: Strikes as soon as the body starts, so that it is always reached.
ALWAYS = (FullDisk,)


class Garbled:
    """Arrives instead of an object whose message was damaged; no comparison with it is true."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<garbled: {self.text}>"


def check(faults: Iterable[Fault], size: int, claims: Collection[Claim], backend: str) -> None:
    """Refuse faults that cannot strike in a world of ``size`` ranks, before it starts.

    Raises RankError for a rank that there is not, UnsupportedError for what the backend cannot do.
    """
    for fault in faults:
        if fault.rank >= size:
            raise RankError(
                f"{fault.verb}: rank={fault.rank} is out of range: the run has ranks 0 to {size - 1}"
            )
        missing = sorted(fault.needs - set(claims))
        if missing:
            raise UnsupportedError(f"{fault!r}: {_WHY[missing[0]]} (--smp-backend={backend})")


_WHY = {
    Claim.STRIKES: "the executor of this backend injects no faults",
    Claim.PROCESSES: "the ranks of this backend are no processes: their results are not sent",
    Claim.TENSORS: (
        "messages of tensors belong to torch on this backend, and cannot be lost or damaged by us; "
        "those of smp.send and smp.broadcast can"
    ),
}


def unreached(faults: Iterable[Fault], struck: Collection[int]) -> list[str]:
    """The required faults that are not among those that struck, in words."""
    return [
        f"{fault!r} was not reached: rank {fault.rank} did not come to it ({fault.moment()})"
        for index, fault in enumerate(faults)
        if fault.required and index not in struck
    ]
