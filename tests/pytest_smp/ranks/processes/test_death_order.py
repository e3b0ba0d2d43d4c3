"""A rank's death is the cause of whatever its peers see, and a mismatch that of the death, in whichever
order the controller hears of it: from the peers' errors, the rank's two connections, and whoever waits for
the process.

A run's real controller hears a drawn order of these from sockets; no process is started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import selectors
import signal
from multiprocessing import Pipe

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_smp.ranks import serialization
from pytest_smp.ranks.board import Board, BoardRecorder
from pytest_smp.ranks.board.recorder import Description
from pytest_smp.ranks.processes import run as run_module
from pytest_smp.ranks.processes.process_status import ProcessStatus
from pytest_smp.ranks.processes.run import Run
from pytest_smp.ranks.processes.tasks import Done
from pytest_smp.ranks.processes.worker_pool import Ended, RankProcess, WorkerPool
from pytest_smp.ranks.protocols import Job, Outcome, OutcomeKind, VerdictKind
from smp_core.errors import StepAbortedError
from smp_core.transport.protocols import Group

RESET = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection reset by peer"
NUMBER = 5  # of the run


class Rank:
    """A rank process's end of its connections, and what it writes there."""

    def __init__(self, slot: int, size: int) -> None:
        control, self.control = Pipe()
        line, self.line = Pipe()
        os.set_blocking(line.fileno(), False)
        self.process = RankProcess(slot, 1_000_000 + slot, "here", "/nowhere", control, line)
        self.sent = 0
        self.recorder = BoardRecorder(slot, self._write)
        self.recorder.begin(NUMBER)
        self._group = self.recorder.group("torch", "WORLD", "WORLD", 0, range(size))
        self._world = Group("WORLD", tuple(range(size)))

    def _write(self, data: bytes) -> None:
        self.sent += len(data)
        if not self.line.closed:
            os.write(self.line.fileno(), data)

    def enters(self, call: str, size: int = 1) -> None:
        """Be in a collective: of a tensor with so many elements, or (``smp.``) of objects."""
        self._number = self._object = None
        if call.startswith("smp."):
            self._object = self.recorder.call(call, self._world)
            self._object.__enter__()
        else:
            what = Description(call, (("elements", size),))
            self._number = self.recorder.collective(self._group, (call, size), lambda: what)
            self.recorder.waits([self._number])

    def leaves(self) -> None:
        """The collective is over."""
        if self._object is not None:
            self._object.__exit__(None, None, None)
        else:
            self.recorder.done([self._number])

    def fails(self) -> RuntimeError:
        """The collective raises this."""
        error = RuntimeError(RESET)
        if self._object is not None:
            with contextlib.suppress(RuntimeError):
                self._object.__exit__(RuntimeError, error, None)
        else:
            self.recorder.failed([self._number])
        return error

    def sends_result(self, error: Exception | None) -> None:
        self.recorder.end()
        slot = self.process.slot
        outcome = Outcome(slot, OutcomeKind.RETURNED if error is None else OutcomeKind.RAISED)
        packed = None if error is None else serialization.dump_error(error)
        done = Done(NUMBER, outcome, packed, None, [], [], self.sent)
        self.control.send_bytes(done.packed())


class Scene(WorkerPool):
    """Ranks, and what happens to them: one event whenever the controller looks.

    A WorkerPool and, for the run, its executor and its clock.
    """

    final = prepares = False
    limit = None
    restarts_together = False
    ended_by_launcher: frozenset[int] = frozenset()
    threads_end_at = 0.0  # on the clock: until then the dead rank's other threads go on

    def __init__(self, size: int, dead: int) -> None:
        self.ranks = [Rank(slot, size) for slot in range(size)]
        self.dead, self.events = self.ranks[dead].process, []
        self._real = selectors.DefaultSelector()
        for rank in self.ranks:
            self._real.register(rank.process.control, selectors.EVENT_READ, rank.process)
        self.dies = self.told = False
        self._news: list[Ended] = []
        self._now = 0.0

    # Events.

    def death(self) -> None:
        self.dies = True

    def control_closes(self) -> None:
        self.ranks[self.dead.slot].control.close()

    def line_closes(self) -> None:
        self.ranks[self.dead.slot].line.close()

    def is_waited_for(self) -> None:
        self.told = True
        self._news.append(Ended(self.dead.slot, self.dead.pid, -signal.SIGKILL))

    def _next(self) -> None:
        if self.events:
            self.events.pop(0)()

    # WorkerPool, executor, selector, clock.

    def state(self, rank):
        ends = rank.slot in self.ended_by_launcher or (self.dies and rank is self.dead)
        if ends and self.threads_end_at > self._now:
            return ProcessStatus(main_thread_ended=True)
        return ProcessStatus(exists=not self.told, ends=ends)

    def written(self, rank):
        return "", ""

    def stacks(self, ranks):
        return {}

    def ended(self):
        return []

    def start(self, slots):
        return slots

    def kill(self, ranks):
        pass

    def close(self):
        self._real.close()
        for rank in self.ranks:
            for end in (rank.control, rank.line, rank.process.control, rank.process.line):
                with contextlib.suppress(OSError):
                    end.close()

    @property
    def selector(self):
        return self

    def select(self, timeout):
        self._now += timeout
        self._next()
        return self._real.select(0)

    def unregister(self, what):
        self._real.unregister(what)

    def ends(self):
        self._next()
        news, self._news = self._news, []
        return news

    def unclaimed(self, ended):
        raise AssertionError(ended)

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """One drawn death.

    Attributes:
        call: the collective in which the rank dies.
        other: the call of a body that has caught an error of the first.
        peers: the effect of the death on each rank's call: raise, return, wait, or raise into a
            body that catches the error and calls something else.
        order: the events, each with its rank.
        odd: the rank whose tensor has another size, of which the other one dies.
    """

    size: int
    dead: int
    call: str
    other: str
    peers: tuple[str, ...]
    order: tuple[tuple[str, int], ...]
    odd: int | None = None


CALLS = "all_reduce", "barrier", "smp.allgather()", "smp.barrier()"
PEERS = "raises", "returns", "waits", "cleans up"
ENDS = "control_closes", "line_closes", "is_waited_for"


@st.composite
def plans(draw) -> Plan:
    """Ranks enter a collective at different times or never; one of them dies; whoever was in the
    collective by then, or enters it later, may see that before the controller does.
    """
    size = draw(st.integers(2, 4))
    dead = draw(st.integers(0, size - 1))
    late = draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    peers = [draw(st.sampled_from(PEERS)) for _ in range(size)]
    after = [*((what, dead) for what in ENDS), *(("peer", slot) for slot in range(size))]
    after += [("enters", slot) for slot in late if slot != dead]
    before = [("enters", slot) for slot in range(size) if slot not in late]
    order = [*before, ("death", dead), *draw(st.permutations(after))]
    call, other = draw(st.sampled_from(CALLS)), draw(st.sampled_from(CALLS))
    return Plan(size, dead, call, other, tuple(peers), tuple(order))


def _events(scene: Scene, plan: Plan):
    """All that happens, in order, as functions."""
    inside = set()

    def enters(slot):
        inside.add(slot)
        scene.ranks[slot].enters(plan.call, 1 + (slot == plan.odd))

    def peer(slot):
        rank, does = scene.ranks[slot], plan.peers[slot]
        if slot == plan.dead or slot not in inside or does == "waits":
            return
        if does == "returns":
            rank.leaves()
            rank.sends_result(None)
        elif does == "raises":
            rank.sends_result(rank.fails())
        else:
            rank.fails()
            rank.enters(plan.other)

    for what, slot in plan.order:
        if what in ("enters", "peer"):
            yield functools.partial({"enters": enters, "peer": peer}[what], slot)
        else:
            yield getattr(scene, what)


def _report(scene):
    """Run to the end of the events."""
    job = Job(body=print, arguments=lambda rank: ((), {}), timeout=60.0)
    board = Board(len(scene.ranks))
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(scene):
        patch.setattr(run_module, "time", scene)
        processes = [rank.process for rank in scene.ranks]
        return Run(scene, scene, processes, job, NUMBER, board).report(lambda rank: b"task")


@given(plans())
def test_a_death_is_the_cause_of_what_its_peers_see(plan):
    scene = Scene(plan.size, plan.dead)
    scene.events = [*_events(scene, plan)]
    report = _report(scene)
    assert report.verdict is VerdictKind.CRASHED, report.error
    assert report.root == plan.dead
    assert "killed by SIGKILL (signal 9)" in str(report.error)
    assert report.outcomes[plan.dead].kind is OutcomeKind.CRASHED


@st.composite
def mismatches(draw) -> Plan:
    """A tensor of the wrong size ends a rank that was in the collective with the one that sent it. Of the others
    one at least was there as well; the rest comes late or never.
    """
    size = draw(st.integers(3, 4))
    dead, odd, early, *others = draw(st.permutations(range(size)))
    late = [slot for slot in others if draw(st.booleans())]
    peers = [draw(st.sampled_from(("raises", "waits", "cleans up"))) for _ in range(size)]
    after = [*((what, dead) for what in ENDS), *(("peer", slot) for slot in range(size))]
    after += [("enters", slot) for slot in late]
    before = [("enters", slot) for slot in (dead, odd, early)]
    order = [*draw(st.permutations(before)), ("death", dead), *draw(st.permutations(after))]
    other = draw(st.sampled_from(CALLS))
    return Plan(size, dead, "all_reduce", other, tuple(peers), tuple(order), odd)


@given(mismatches())
def test_a_mismatch_is_the_cause_of_the_death_that_it_brings(plan):
    scene = Scene(plan.size, plan.dead)
    scene.events = [*_events(scene, plan)]
    report = _report(scene)
    assert report.verdict is VerdictKind.MISMATCH, report.error
    assert report.root == plan.odd
    assert f"odd one out: rank {plan.odd}" in str(report.error)


@pytest.mark.parametrize("rounds", [1, 100])
def test_the_rank_that_raised_comes_before_those_that_were_told(rounds):
    """However long its result takes: the run waits for it."""
    scene = Scene(3, 0)
    remote = StepAbortedError("because rank 2 raised")
    remote.raised_by = 2
    scene.events = [
        functools.partial(scene.ranks[0].sends_result, remote),
        functools.partial(scene.ranks[1].enters, "all_reduce"),
        *[lambda: None] * rounds,
        functools.partial(scene.ranks[2].sends_result, ValueError("bad batch")),
    ]
    report = _report(scene)
    assert (report.verdict, report.root) == (VerdictKind.FAILED, 2), report.error
    assert type(report.error) is ValueError


def test_what_ranks_raise_when_they_are_told_to_end_is_no_cause():
    """Where they are asked to end, rather than killed, a body can catch that and raise."""
    scene = Scene(2, 0)
    scene.restarts_together = True
    one, other = scene.ranks
    scene.events = [
        functools.partial(one.enters, "smp.allgather()"),
        functools.partial(other.enters, "all_reduce"),
        *[lambda: None] * 60,  # until the board is sure
        functools.partial(one.sends_result, ValueError("Cancelled: the run has ended")),
        functools.partial(other.sends_result, None),
    ]
    report = _report(scene)
    assert report.verdict is VerdictKind.DEADLOCK, report.error


def test_threads_that_end_a_moment_later_are_no_end_of_the_main_thread_alone():
    scene = Scene(2, 1)
    scene.threads_end_at = 0.2
    scene.events = [
        *(functools.partial(rank.enters, "barrier") for rank in scene.ranks),
        scene.death,
        functools.partial(scene.ranks[0].sends_result, RuntimeError(RESET)),
        *[lambda: None] * 10,
        scene.control_closes,
        scene.is_waited_for,
    ]
    report = _report(scene)
    assert (report.verdict, report.root) == (VerdictKind.CRASHED, 1), report.error
    assert "killed by SIGKILL (signal 9)" in str(report.error)


def test_of_ranks_that_a_launcher_ends_no_news_are_awaited():
    """The launcher ends their supervisors, too, which would tell of their ends."""
    scene = Scene(3, 1)
    scene.restarts_together, scene.ended_by_launcher = True, frozenset({0, 2})
    scene.events = [
        *(functools.partial(rank.enters, "barrier") for rank in scene.ranks),
        scene.death,
        scene.control_closes,
        scene.is_waited_for,
        *(rank.control.close for rank in scene.ranks if rank is not scene.ranks[1]),
    ]
    report = _report(scene)
    assert (report.verdict, report.root) == (VerdictKind.CRASHED, 1), report.error
    assert scene.monotonic() < 2.0  # on the scene's clock
