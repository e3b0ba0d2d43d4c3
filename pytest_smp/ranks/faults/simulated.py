"""Faults on a rank that is a thread of `sim`: what a process would do, told to the scheduler.

No time passes on `sim`. A rank that stands still for ever is one that waits for nobody, which makes
a deadlock of the run; one that stands still for a while goes on when no other rank can.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

from pytest_smp.ranks.faults import messages
from pytest_smp.ranks.faults.striking import FaultyObjects, Later, Strikes
from pytest_smp.ranks.processes.worker_pool import describe_exit
from pytest_smp.ranks.protocols import Job, Outcome
from pytest_smp.ranks.sim.process_group import SimProcessGroup
from pytest_smp.ranks.sim.rank_context import RankContext
from pytest_smp.ranks.sim.scheduler import Scheduler, ThreadState
from pytest_smp.ranks.sim.work import SimWork
from smp_core.errors import Cancelled


class _Standing:
    """The operation that a rank waits for if it stands still for ever. An Operation of the scheduler."""

    done = False

    def __init__(self, rank: int, text: str) -> None:
        self._text = text
        self.hint = f"rank {rank} stands still because the test asks for it (smp_faults: {text})"

    def describe(self, rank: int) -> str:
        return f"smp_faults: {self._text}"

    def missing(self, rank: int) -> Sequence[int]:
        return ()


class FaultyRun:
    """One run with faults: makes its ranks, and sees their process groups while entered."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.slow: set[ThreadState] = set()  # those that stand still until no other can go on
        self._stack = contextlib.ExitStack()

    def context(self, rank: int, size: int, job: Job, scheduler: Scheduler, thread: Any) -> Any:
        """A RankContext."""
        return FaultyContext(self, rank, size, job, scheduler, thread)

    def __enter__(self) -> None:
        self._stack.enter_context(messages.struck(lambda group: group._context.strikes))
        for owner, name, replacement in (
            (SimProcessGroup, "_issued", _issued),
            (SimProcessGroup, "new_group", _new_group),
            (SimWork, "_land", _land),
        ):
            original = vars(owner)[name]
            self._stack.callback(setattr, owner, name, original)
            setattr(owner, name, functools.partialmethod(replacement, original))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class FaultyContext(RankContext):
    """One rank of a run with faults; its own striking.Effects."""

    def __init__(
        self, run: FaultyRun, rank: int, size: int, job: Job, scheduler: Scheduler, thread: Any
    ) -> None:
        self.strikes = strikes = Strikes(job.faults, rank, self)
        body = strikes.body(job.body)

        def struck_body(*args: Any, **kwargs: Any) -> Any:
            self.fabric.objects = FaultyObjects(self.fabric.objects, strikes)
            return body(*args, **kwargs)

        super().__init__(rank, size, dataclasses.replace(job, body=struck_body), scheduler, thread)
        self.issued: Later = []  # faults that strike after the call being issued
        self.later: dict[int, Later] = {}  # the same, by the work that was issued
        self._run = run

    def check(self, call: str, what: str = "call") -> None:
        """See RankContext. Calls of the object transport are struck by FaultyObjects."""
        super().check(call, what)
        if what == "process group":
            self.issued = self.strikes.before(f"dist.{call}")

    def finished_outcome(self) -> Outcome:
        """See RankContext."""
        outcome = super().finished_outcome()
        outcome.struck = tuple(sorted(self.strikes.struck))
        return outcome

    # Effects.

    def end(self, code: int, text: str) -> NoReturn:
        """The run ends with this rank's crash, and the thread unwinds."""
        self.crash(describe_exit(code), f"\nit wrote last:\n    smp_faults: {text}")
        raise Cancelled(text)

    def stand_still(self, seconds: float | None, text: str) -> None:
        """Without time: for ever, or until no other rank can go on."""
        scheduler, thread_state, slow = self.scheduler, self.thread_state, self._run.slow
        if seconds is None:
            scheduler.wait(thread_state, _Standing(self.rank, text))
        slow.add(thread_state)
        try:
            while scheduler.others_ready(slow):
                scheduler.give_way(thread_state)
        finally:
            slow.discard(thread_state)


def _context_of(group_or_work: Any) -> FaultyContext:
    context: FaultyContext = group_or_work._context
    return context


def _issued(group: Any, original: Any, work: Any) -> Any:
    context = _context_of(group)
    later, context.issued = context.issued, []
    if later:
        context.later[id(work)] = later
    return original(group, work)


def _land(work: Any, original: Any) -> None:
    context = _context_of(work)
    later = context.later.pop(id(work), []) if id(work) in context.fabric.unwaited else []
    original(work)
    context.strikes.after(later)


def _new_group(group: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    made = original(group, *args, **kwargs)
    context = _context_of(group)
    later, context.issued = context.issued, []
    context.strikes.after(later)
    return made
