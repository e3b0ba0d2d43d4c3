"""Trying mutants: each in a process of its own, on properties that should catch it.

The process is forked from one that has collected the properties and run none of them. So a mutant
is planted before there are ranks, leaves nothing behind, and may hang, crash or end its process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol  # private; plugins that run a test again use it, too
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import HypothesisException

from conformance.mutants.folder import temporary_folder
from conformance.mutants.protocol import Mutant
from pytest_smp.ranks.processes.fork_server import die_with_parent
from smp_core import runtime, topology

#: Numbers of examples: few are enough for most mutants, so every property gets a few first. (A
#: property that asks for fewer by itself gets those.)
FEW, MANY = 6, 60

#: What a property may take: so many times its seconds on the reference, and some more. So slowness
#: of the machine kills no mutant. (One run on ranks has --smp-timeout.)
TIMES, MORE = 20.0, 5.0

#: Seconds for a property on the reference.
REFERENCE_LIMIT = 120.0

#: Seconds for what a process does before its first property: it plants a mutant.
START_LIMIT = 30.0

#: Seconds that a process gets when the limit of a property is over, in case it cannot be raised in
#: it: a loop in C.
GRACE = 10.0


def limit(cost: float, own: int) -> float:
    """The seconds that a property gets on a mutant, by those of FEW examples on the reference.

    With few examples it gets no fewer than with many: a run on ranks that ends by its time limit may be run again.
    ``own`` is the number of examples that the property asks for by itself (`own_examples`).
    """
    return TIMES * cost * min(MANY, own) / min(FEW, own) + MORE


def own_examples(item: pytest.Item) -> int:
    """How many examples a property asks for by itself; one, if it is no property of Hypothesis."""
    test: Any = getattr(item, "obj", None)
    if not hasattr(test, "hypothesis"):
        return 1
    examples: int = test._hypothesis_internal_use_settings.max_examples  # what @settings sets
    return examples


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One property, run with at most so many examples."""

    nodeid: str
    examples: int


#: Says that a property starts now: its limit in seconds, and the attempt.
Tell = Callable[[float, Attempt], None]
Job = Callable[[Tell], Any]


class DidNotEnd(BaseException):
    """Raised when a property runs for too long outside of the ranks; no ``except Exception`` of the
    code under test may catch it.
    """


class TrialResult(enum.StrEnum):
    """What became of a mutant."""

    KILLED = "killed"  #: a property failed as the mutant says it does
    SURVIVED = "survived"  #: every property passed
    HARNESS_ONLY = "harness only"  #: properties failed, but only by what our harness detects
    BROKEN = "broken"  #: it could not be planted, or a property failed in another way
    LEFT_OUT = "left out"  #: every property was skipped: the backend or the number of ranks


@dataclasses.dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What became of a mutant, or of the reference, and by which property."""

    result: TrialResult
    detail: str = ""  #: the property and the exception
    by: str = ""  #: the kind of exception that killed it
    attempt: Attempt | None = None  #: what killed it


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A mutant, and the properties that it is tried on."""

    mutant: Mutant
    properties: Sequence[pytest.Item]
    costs: Mapping[pytest.Item, float]  #: seconds of FEW examples on the reference

    def __call__(self, tell: Tell) -> TrialOutcome:
        """Plant the mutant and run the properties until one kills it."""
        with contextlib.ExitStack() as planted:
            forget()
            try:
                planted.enter_context(self.mutant.plant())
            except Exception as error:
                return TrialOutcome(TrialResult.BROKEN, f"cannot be planted: {shown(error)}")
            return self._tried(tell)

    def _tried(self, tell: Tell) -> TrialOutcome:
        skipped, no_kill = 0, TrialOutcome(TrialResult.SURVIVED)
        for examples in (FEW, MANY):
            for item in self.properties:
                allowed = limit(self.costs[item], own_examples(item))
                attempt = Attempt(item.nodeid, examples)
                tell(allowed, attempt)
                error = run(item, examples, allowed)
                if error is None:
                    continue
                if isinstance(error, pytest.skip.Exception):
                    skipped += 1
                    continue
                result = judged(error, self.mutant)
                outcome = TrialOutcome(result, f"{item.name}: {shown(error)}", kind(error), attempt)
                if result is TrialResult.KILLED or not self.mutant.but:
                    return outcome
                # Another property may kill it by what a third party sees.
                if no_kill.result is not TrialResult.BROKEN:
                    no_kill = outcome
            if no_kill.result is not TrialResult.SURVIVED:
                return no_kill  # each has had its chance; more examples mostly fail the same way
        if skipped and skipped == 2 * len(self.properties):
            return TrialOutcome(TrialResult.LEFT_OUT, "its properties are skipped")
        return no_kill


def judged(error: BaseException, mutant: Mutant) -> TrialResult:
    """What it says of the mutant that a property failed by this error."""
    errors = parts(error)
    if mutant.but and any(isinstance(each, HypothesisException) for each in (error, *errors)):
        return TrialResult.BROKEN  # no example, or a flaky one: it may come from the property
    if mutant.but and all(isinstance(each, mutant.but) for each in errors):
        return TrialResult.HARNESS_ONLY
    return TrialResult.KILLED if is_one_of(error, mutant.by) else TrialResult.BROKEN


def forget() -> None:
    """Drop remembered configurations and layouts: they were made without the mutant."""
    for memory in (runtime._parse_cached, runtime._topology, topology._lay_out):
        memory.cache_clear()


def is_one_of(error: BaseException, types: tuple[type[BaseException], ...]) -> bool:
    """Whether the error, or each of a group's, is of these types. (Hypothesis reports in groups
    what fails in one run of an example and in another not.)
    """
    if isinstance(error, types) or not isinstance(error, BaseExceptionGroup):
        return isinstance(error, types)
    return all(is_one_of(each, types) for each in error.exceptions)


def parts(error: BaseException) -> list[BaseException]:
    """The errors of a group, or the one."""
    if isinstance(error, BaseExceptionGroup):
        return [part for each in error.exceptions for part in parts(each)]
    return [error]


def kind(error: BaseException) -> str:
    """The kind of exception, as the score counts them."""
    first = parts(error)[0]
    if isinstance(first, DidNotEnd):
        return "time limit"
    return type(first).__name__


def shown(error: BaseException) -> str:
    """The error in one line of at most 200 characters."""
    try:
        text = str(error).partition("\n")[0]
    except Exception as broken:
        text = f"<its text cannot be made: {type(broken).__name__}>"
    return f"{type(error).__name__}: {text}"[:200].rstrip(": ")


# Running one property. In a process of its own, because it changes what pytest does with reports.


class _Watch:
    """Keeps the first exception; reports are not wanted."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> pytest.TestReport:
        error = None if call.excinfo is None else call.excinfo.value
        self.error = self.error or error
        outcome = "passed" if error is None else "failed"
        return pytest.TestReport(item.nodeid, item.location, {}, outcome, None, call.when)  # type: ignore[arg-type]


def run(item: pytest.Item, examples: int, seconds: float) -> BaseException | None:
    """Run a property with at most so many examples, the same every time, for at most so many
    seconds. Returns how it failed.
    """
    test: Any = getattr(item, "obj", None)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if hasattr(test, "hypothesis"):
            own = test._hypothesis_internal_use_settings  # what @settings sets
            chosen = settings(
                own,
                max_examples=min(examples, own.max_examples),
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.explicit, Phase.generate],  # the first failure is enough
                suppress_health_check=list(HealthCheck),
            )
            patch.setattr(test, "_hypothesis_internal_use_settings", chosen)
        watch = _Watch()
        item.config.pluginmanager.register(watch)
        stack.callback(item.config.pluginmanager.unregister, watch)
        # What a property warns of is no failure, whatever the session makes of warnings.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_time_limit(seconds))
        try:
            runtestprotocol(item, log=False, nextitem=None)
        except (DidNotEnd, pytest.exit.Exception) as error:
            return error
        return watch.error


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise DidNotEnd(f"the property did not end within {seconds:.3g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Processes.


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """A process that gave no answer."""

    how: str
    started: bool  #: it had said that a property starts: this ended it, or did not end
    attempt: Attempt | None = None  #: which property with how many examples


@dataclasses.dataclass(slots=True)
class _Child:
    process: BaseProcess
    answers: Connection
    deadline: float
    attempt: Attempt | None = None

    def heard(self) -> Any:
        """Its answer, or Lost; None as long as there is none."""
        while self.answers.poll():
            try:
                answer = self.answers.recv()
            except EOFError:
                self.process.join()
                return self._lost(f"ended with exit code {self.process.exitcode}")
            if not isinstance(answer, _Started):
                return answer
            self.attempt, self.deadline = answer.attempt, _now() + answer.seconds + GRACE
        if _now() > self.deadline:
            return self._lost("did not end in time")
        return None

    def _lost(self, how: str) -> Lost:
        started = self.attempt is not None
        when = "in a property" if started else "before its first property"
        return Lost(f"its process {how}, {when}", started, self.attempt)

    def end(self) -> None:
        """Whether it has answered or not: its answer is the last that it does."""
        self.process.kill()
        self.process.join()
        self.answers.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Started:
    seconds: float
    attempt: Attempt


_now = time.monotonic


def in_processes(jobs: Sequence[Job], config: pytest.Config) -> Iterator[tuple[int, Any]]:
    """Run each job in a forked process, as many at a time as there are cores.

    Yields the job's index and what it returned, as the processes end; :class:`Lost` for a process
    that ended, or had to be ended, before it answered.
    """
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # made once, not by each
    with temporary_folder("smp-mutants-") as folder:
        running: dict[int, _Child] = {}
        waiting = list(enumerate(jobs))[::-1]
        # A child's collector would look through all that is imported here, and copy these pages for it.
        gc.collect()
        gc.freeze()
        try:
            while waiting or running:
                while waiting and len(running) < len(os.sched_getaffinity(0)):
                    index, job = waiting.pop()
                    running[index] = _start(job, config, folder / str(index))
                wait([child.answers for child in running.values()], timeout=1.0)
                for index, child in list(running.items()):
                    answer = child.heard()
                    if answer is not None:
                        child.end()
                        del running[index]
                        shutil.rmtree(folder / str(index), ignore_errors=True)
                        yield index, answer
        finally:
            gc.unfreeze()
            for child in running.values():
                child.end()


def _start(job: Job, config: pytest.Config, folder: Path) -> _Child:
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    args = job, config, folder, sending, os.getpid()
    process = context.Process(target=_work, args=args, daemon=True)
    with warnings.catch_warnings():
        # From 3.12 on Python warns of a fork beside other threads; none of them runs in the child.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sending.close()
    return _Child(process, receiving, _now() + START_LIMIT)


def _work(job: Job, config: pytest.Config, folder: Path, answer: Connection, parent: int) -> None:
    die_with_parent(parent)
    # The parent's capture, terminal and temporary folder are the parent's.
    capture = config.pluginmanager.get_plugin("capturemanager")
    config.pluginmanager.unregister(capture)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    folder.mkdir()
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    try:
        found = job(lambda *started: answer.send(_Started(*started)))
    except BaseException as error:  # a bug of ours, and no fact about a mutant
        found = Lost(f"its trial raised {shown(error)}", started=False)
    answer.send(found)
    answer.close()
    os._exit(0)  # threads of ranks that never came back must not be waited for
