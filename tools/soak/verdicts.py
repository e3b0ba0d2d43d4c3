"""Drawing of faults, and checks of the reports of runs that they struck."""

from __future__ import annotations

import dataclasses
import errno
import random
import signal
from collections.abc import Callable, Collection
from typing import Any

from pytest_smp.ranks.faults import (
    SIGNALS,
    Claim,
    Corrupt,
    Drop,
    Exit,
    Fault,
    FullDisk,
    Kill,
    Raise,
    Stall,
    Unpicklable,
)
from pytest_smp.ranks.protocols import OutcomeKind, Report, VerdictKind
from smp_core.errors import InjectedError, PayloadError
from tools.soak import programs
from tools.soak.differing import Differing
from tools.soak.inside import Inside
from tools.soak.programs import SoakStep


@dataclasses.dataclass(frozen=True)
class SoakCase:
    """A program, a fault that it comes to, and where its ranks write.

    A fault of the kind Inside or Differing is the program's own doing; the others are injected.
    ``checked``: there is a deadlock verdict, so that a run in which ranks only wait soon ends.
    """

    steps: tuple[SoakStep, ...]
    fault: Any  # a Fault, Inside or Differing
    kind: str
    size: int
    folder: str
    checked: bool = True

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the body."""
        if isinstance(self.fault, Inside):
            return self.steps, self.folder, self.fault
        if isinstance(self.fault, Differing):
            return self.steps, self.folder, None, self.fault
        return self.steps, self.folder

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults that are injected."""
        return () if isinstance(self.fault, Inside | Differing) else (self.fault,)

    @property
    def lasts(self) -> bool:
        """True if the run may last until its time is up."""
        return self.kind == "stall" or (self.kind == "drop" and not self.checked)


def draw(
    seed: str, size: int, claims: Collection[Claim], folder: str, checked: bool = True
) -> SoakCase:
    """The case of this seed, on an executor that can do so much."""
    rng = random.Random(seed)
    while True:
        steps, rank = programs.draw(rng), rng.randrange(size)
        if Claim.PROCESSES in claims:  # on `sim` all ranks stand still in a pause
            steps = programs.with_pauses(rng, steps, size)
        kind = rng.choices([*_WEIGHTS], [*_WEIGHTS.values()])[0]
        if kind == "inside":
            if Claim.PROCESSES in claims:
                inside = Inside.draw(rng, rank, size, len(steps), seed)
                return SoakCase(steps, inside, kind, size, folder, checked)
            continue
        if kind == "mismatch":
            if checked and size > 2:  # of two ranks none is the odd one
                differing = Differing.draw(rng, rank, len(steps))
                return SoakCase(steps, differing, kind, size, folder, checked)
            continue
        fault = _DRAW[kind](rng, rank, _Calls(programs.calls(steps, rank, size), steps, folder))
        if fault is not None and fault.needs <= set(claims):
            return SoakCase(steps, fault, kind, size, folder, checked)


@dataclasses.dataclass(frozen=True)
class _Calls:
    counts: Any
    steps: tuple[SoakStep, ...]
    folder: str

    def place(self, rng: random.Random, *moments: str) -> dict[str, Any]:
        """Draw the call or moment to strike at: ``at``, ``nth`` and ``when``."""
        name = rng.choice([*sorted(self.counts), *moments])
        if name in moments:
            return {"at": name}
        nth = rng.randint(1, self.counts[name])
        return {"at": name, "nth": nth, "when": rng.choice(("before", "after"))}

    def message(self, rng: random.Random) -> dict[str, Any] | None:
        """A message to hit. None if this rank sends none."""
        names = sorted({"smp.send", "smp.broadcast", "dist.send"} & set(self.counts))
        if not names:
            return None
        name = rng.choice(names)
        return {"at": name, "nth": rng.randint(1, self.counts[name])}


def _hit(cls: type[Drop | Corrupt]) -> Callable[[random.Random, int, _Calls], Fault | None]:
    def drawn(rng: random.Random, rank: int, calls: _Calls) -> Fault | None:
        where = calls.message(rng)
        return None if where is None else cls(rank=rank, **where)

    return drawn


_WEIGHTS = {
    "kill": 40,
    "inside": 40,
    "mismatch": 40,
    "exit": 16,
    "raise": 16,
    "delay": 8,
    "drop": 6,
    "corrupt": 6,
    "unpicklable": 3,
    "full disk": 3,
    "stall": 2,
}
_ENDS = ("start", "end", "sent")
_DRAW: dict[str, Callable[[random.Random, int, _Calls], Fault | None]] = {
    "kill": lambda rng, rank, calls: Kill(
        rank=rank,
        signal=rng.choice((signal.SIGKILL, signal.SIGKILL, *SIGNALS)),
        **calls.place(rng, *_ENDS),
    ),
    "exit": lambda rng, rank, calls: Exit(
        rank=rank, code=rng.choice((0, 1, 7, 255)), **calls.place(rng, *_ENDS)
    ),
    "raise": lambda rng, rank, calls: Raise(rank=rank, **calls.place(rng, "start", "end")),
    "delay": lambda rng, rank, calls: Stall(
        rank=rank, seconds=rng.choice((0.001, 0.01, 0.05)), **calls.place(rng, "start", "end")
    ),
    "stall": lambda rng, rank, calls: Stall(rank=rank, **calls.place(rng, "start", "end")),
    "drop": _hit(Drop),
    "corrupt": _hit(Corrupt),
    "unpicklable": lambda rng, rank, calls: Unpicklable(rank=rank),
    "full disk": lambda rng, rank, calls: (
        FullDisk(rank=rank, below=calls.folder, after=rng.randrange(programs.SIZE))
        if any(step.kind == "write" for step in calls.steps)
        else None
    ),
}


# ---- Verdicts ------------------------------------------------------------------------------------


def complaints(case: SoakCase, report: Report, processes: bool) -> list[str]:
    """The statements that the report lacks, in words. ``processes``: time passes on these ranks."""
    return [text for fits, text in _JUDGE[case.kind](case, report, processes) if not fits]


Checks = list[tuple[bool, str]]


def _differ(case: SoakCase, report: Report, processes: bool) -> Checks:
    return [
        _is(report, VerdictKind.MISMATCH),
        _root(case, report),
        _says(report, f"odd one out: rank {case.fault.rank}"),
    ]


def _is(report: Report, *kinds: VerdictKind) -> tuple[bool, str]:
    return report.verdict in kinds, f"verdict {report.verdict}, not {' or '.join(kinds)}"


def _root(case: SoakCase, report: Report) -> tuple[bool, str]:
    return report.root == case.fault.rank, f"root {report.root}, not {case.fault.rank}"


def _outcome(report: Report, rank: int, *kinds: OutcomeKind) -> tuple[bool, str]:
    kind = report.outcomes[rank].kind
    return kind in kinds, f"rank {rank} has {kind}, not {' or '.join(kinds)}"


def _says(report: Report, text: str) -> tuple[bool, str]:
    return text in str(report.error), f"the error does not say {text!r}"


def how(fault: Fault) -> str:
    """The end of a rank that this fault kills, in words."""
    if isinstance(fault, Kill):
        return f"killed by {signal.Signals(fault.signal).name} (signal {int(fault.signal)})"
    assert isinstance(fault, Exit)
    return f"exit code {fault.code}"


def after_the_run(case: SoakCase, report: Report) -> str | None:
    """The warning that the next run must give if this one ended well before the rank did; else None."""
    late = isinstance(case.fault, Kill | Exit) and case.fault.at == "sent"
    if not late or report.verdict is not VerdictKind.PASSED:
        return None
    rank = case.fault.rank
    return f"the process of rank {rank} ended after its last run ({how(case.fault)}"  # and a hint


def _crash(case: SoakCase, report: Report, processes: bool) -> Checks:
    if after_the_run(case, report) is not None:
        return []
    return [
        _is(report, VerdictKind.CRASHED),
        _root(case, report),
        _outcome(report, case.fault.rank, OutcomeKind.CRASHED),
        _says(report, f"rank {case.fault.rank} crashed: {how(case.fault)}"),
        _says(report, f"smp_faults: {case.fault.verb} {case.fault.moment()}"),
        *_spared(case, report),
    ]


def _killed_inside(case: SoakCase, report: Report, processes: bool) -> Checks:
    rank = case.fault.rank
    return [
        _is(report, VerdictKind.CRASHED),
        _root(case, report),
        _outcome(report, rank, OutcomeKind.CRASHED),
        _says(report, f"rank {rank} crashed: killed by SIGKILL (signal 9)"),
        *_spared(case, report),
    ]


def _spared(case: SoakCase, report: Report) -> Checks:
    """Check that the other ranks have no error but that of a Gloo call whose partner has died."""
    checks = []
    for rank in range(case.size):
        error = report.outcomes[rank].error
        consequence = (type(error) is RuntimeError and "gloo" in str(error)) or (
            type(error).__name__ == "DistBackendError"  # of smddp, which names who has ended
            and f"cannot end: rank {case.fault.rank}: its process" in str(error)
        )
        if rank != case.fault.rank and not consequence:
            fine = OutcomeKind.RETURNED, OutcomeKind.CANCELLED
            checks.append(_outcome(report, rank, *fine))
            checks.append((error is None, f"rank {rank}: {error!r}"))
    return checks


def _raised(kind: type[BaseException], text: str) -> Callable[[SoakCase, Report, bool], Checks]:
    def judge(case: SoakCase, report: Report, processes: bool) -> Checks:
        error = report.error
        return [
            _is(report, VerdictKind.FAILED),
            _root(case, report),
            _outcome(report, case.fault.rank, OutcomeKind.RAISED),
            (type(error) is kind, f"the error is {type(error).__name__}, not {kind.__name__}"),
            _says(report, text or f"rank {case.fault.rank}: {case.fault.moment()}"),
        ]

    return judge


def _full(case: SoakCase, report: Report, processes: bool) -> Checks:
    number = getattr(report.error, "errno", None)
    return [
        *_raised(OSError, "No space left")(case, report, processes),
        (number == errno.ENOSPC, f"errno {number}"),
    ]


def _stalled(case: SoakCase, report: Report, processes: bool) -> Checks:
    rank = case.fault.rank
    if not processes:
        return [
            _is(report, VerdictKind.DEADLOCK),
            _root(case, report),
            _outcome(report, rank, OutcomeKind.STUCK),
            _says(report, f"rank {rank} stands still"),
        ]
    lines = str(report.error).splitlines()[1:]
    # Without the board nobody knows that the others wait.
    blamed = lines[:1] if case.checked else lines
    wrote = f"smp_faults: stall {case.fault.moment()}"
    return [
        _is(report, VerdictKind.TIMED_OUT),
        _outcome(report, rank, OutcomeKind.STUCK),
        (f"rank {rank} never came back" in blamed, f"the first to blame is {blamed}"),
        (wrote in report.outcomes[rank].stderr, f"rank {rank} did not write {wrote!r}"),
    ]


def _late(case: SoakCase, report: Report, processes: bool) -> Checks:
    struck = report.outcomes[case.fault.rank].struck
    return [_is(report, VerdictKind.PASSED), (struck == (0,), f"struck {struck}")]


def _receivers(case: SoakCase) -> list[int]:
    """The ranks that the message was for."""
    assert isinstance(case.fault, Drop | Corrupt)
    rank = case.fault.rank
    if case.fault.at == "smp.broadcast":
        return [each for each in range(case.size) if each != rank]
    return [(rank + 1) % case.size]


def _lost(case: SoakCase, report: Report, processes: bool) -> Checks:
    """A receiver waits for ever, or takes a later message and finds what it did not expect."""
    kinds = {report.outcomes[rank].kind for rank in _receivers(case)}
    harmed = bool(kinds & {OutcomeKind.STUCK, OutcomeKind.RAISED})
    waiting = VerdictKind.DEADLOCK if case.checked else VerdictKind.TIMED_OUT
    return [
        _is(report, waiting, VerdictKind.FAILED),
        (harmed, f"no receiver was harmed: {sorted(kinds)}"),
    ]


def _damaged(case: SoakCase, report: Report, processes: bool) -> Checks:
    receivers = _receivers(case)
    return [
        _is(report, VerdictKind.FAILED),
        (report.root in receivers, f"root {report.root}, not one of {receivers}"),
        (type(report.error) is AssertionError, f"the error is {report.error!r}"),
    ]


_JUDGE: dict[str, Callable[[SoakCase, Report, bool], Checks]] = {
    "kill": _crash,
    "inside": _killed_inside,
    "mismatch": _differ,
    "exit": _crash,
    "raise": _raised(InjectedError, ""),
    "delay": _late,
    "stall": _stalled,
    "drop": _lost,
    "corrupt": _damaged,
    "unpicklable": _raised(PayloadError, "cannot be pickled"),
    "full disk": _full,
}
