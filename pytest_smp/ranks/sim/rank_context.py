"""A rank of `sim`: what its thread (executor.py) and the fabric keep for one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pytest_smp.ranks.protocols import Job, Outcome, OutcomeKind
from pytest_smp.ranks.sim.scheduler import Scheduler, ThreadState
from smp_core.errors import Cancelled, CrashError, ThreadError
from smp_core.transport import current_rank

if TYPE_CHECKING:
    import torch


class RankContext:
    """One rank of one run, as its own thread sees it."""

    __slots__ = (
        "crashed",
        "fabric",
        "job",
        "outcome",
        "rank",
        "records",
        "runtime",
        "scheduler",
        "size",
        "thread",
        "thread_state",
    )

    def __init__(self, rank: int, size: int, job: Job, scheduler: Scheduler, thread: Any) -> None:
        self.rank, self.size, self.job = rank, size, job
        self.scheduler, self.thread = scheduler, thread
        # Of the body's thread, or of another thread of the rank while that one has the turn.
        self.thread_state = scheduler.thread_states[rank]
        self.outcome: Outcome | None = None
        self.crashed = ""  # how the rank's process would have ended before its body
        self.runtime: Any = None  # built by smp.init
        self.records: dict[str, Any] = {}  # see protocols.RecordingRank
        self.fabric: Any = None  # built by the fabric's `rank_fabric`, when the rank starts

    @property
    def body_state(self) -> ThreadState:
        """The place of the thread that runs the body in the scheduler."""
        return self.scheduler.thread_states[self.rank]

    def finished_outcome(self) -> Outcome:
        """The outcome of the rank, once its part has ended: a crash even if the body has caught its exception."""
        if self.crashed:
            detail = f"crashed: {self.crashed}"
            self.outcome = Outcome(self.rank, OutcomeKind.CRASHED, detail=detail)
        assert self.outcome is not None
        self.outcome.records = self.records
        return self.outcome

    def release(self) -> None:
        """Let go of what refers to this rank, after the run: no garbage collection is needed to free both."""
        self.fabric = self.runtime = None

    def crash(self, how: str, where: str) -> None:
        """End the run with this rank's crash.

        Args:
            how: the end of the process in words, such as "exit code 0".
            where: the rest of the message, after ``how``.

        Raises:
            Cancelled: in the rank's own thread, to unwind its body.
        """
        self.crashed = how
        error = CrashError(f"rank {self.rank} crashed: {how}{where}")
        if self.scheduler.threads is not None:
            self.scheduler.threads.fail(self, error)
        else:
            self.scheduler.fail(self.thread_state, error)
        if current_rank.current() is self:
            raise Cancelled(f"rank {self.rank} crashed: {how}")

    def record_call(
        self,
        operation: str,
        group: Sequence[int],
        specs: Iterable[tuple[torch.dtype, Sequence[int]]] = (),
    ) -> None:
        """Record a communication; called where ``job.records_calls``. ``specs``: dtypes and shapes."""
        from pytest_smp.ranks.call_records import CALLS, call_record  # it imports torch

        calls = self.records.setdefault(CALLS, [])
        calls.append(call_record(self.rank, operation, group, specs))

    def record(self, name: str, value: Any) -> None:
        """See protocols.RecordingRank."""
        self.records[name] = value

    def check(self, call: str, what: str = "call") -> None:
        """Every communication call starts here: unwinds the rank if the run has ended."""
        self.check_thread(call, what)
        self.scheduler.enter(self.thread_state)

    def check_thread(self, call: str, what: str = "call") -> None:
        """Return when the calling thread may make a communication call of this rank.

        Raises ThreadError in a thread of another rank, which would be put to sleep in the place of this one.
        """
        if current_rank.current() is not self:
            raise ThreadError(
                f"{call}: this {what} belongs to rank {self.rank}, and another thread used it. "
                "What a default argument or a module global captured is another rank's"
            )
        if self.scheduler.threads is not None:
            self.scheduler.threads.take_turn(self)
