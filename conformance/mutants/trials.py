"""Trials of mutants: each mutant runs in a process of its own, on the properties that should catch it.

The process is forked from one that has collected the properties and run none of them. So a mutant
is planted before ranks exist, leaves nothing behind, and may hang, crash or end its process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import importlib
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
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import HypothesisException
from hypothesis.strategies import DataObject, characters, data, integers, lists, sampled_from

from conformance.mutants.folder import temporary_folder
from conformance.mutants.protocol import Mutant
from pytest_smp.ranks.processes.fork_server import die_with_parent
from smp_core import runtime, topology

#: Numbers of examples. A few examples are enough for most mutants, so every property gets FEW first. A
#: property whose own settings ask for fewer gets those.
FEW, MANY = 6, 60

#: The limit of a property on a mutant: TIMES its seconds on the reference, and MORE seconds. With such a
#: limit a slow machine kills no mutant. A single run on ranks is limited by --smp-timeout.
TIMES, MORE = 20.0, 5.0

#: Seconds for a property on the reference.
REFERENCE_LIMIT = 120.0

#: Seconds that a process may take before its first property, for planting the mutant.
START_LIMIT = 30.0

#: Seconds until a process is ended after the limit of a property: in a loop in C no exception can be raised.
GRACE = 10.0


def limit(cost: float, own: int) -> float:
    """The seconds that a property may take on a mutant.

    FEW examples get the same limit as MANY, because a run on ranks that exceeds its time limit may be
    repeated.

    Args:
        cost: the seconds of FEW examples on the reference.
        own: the number of examples in the property's own settings (`own_examples`).
    """
    return TIMES * cost * min(MANY, own) / min(FEW, own) + MORE


def own_examples(item: pytest.Item) -> int:
    """The number of examples in a property's own settings; one for a test without Hypothesis."""
    test: Any = getattr(item, "obj", None)
    if not hasattr(test, "hypothesis"):
        return 1
    examples: int = test._hypothesis_internal_use_settings.max_examples  # what @settings sets
    return examples


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a property, with at most so many examples."""

    nodeid: str
    examples: int


#: Reports the start of a property: its limit in seconds, and the attempt.
Tell = Callable[[float, Attempt], None]
Job = Callable[[Tell], Any]


class DidNotEnd(BaseException):
    """Raised when a property runs for too long outside of the ranks.

    A BaseException, so that no ``except Exception`` of the code under test catches it.
    """


class TrialResult(enum.StrEnum):
    """The result of a mutant's trial."""

    KILLED = "killed"  #: a property failed by one of the mutant's exceptions
    SURVIVED = "survived"  #: every property passed
    HARNESS_ONLY = "harness only"  #: properties failed only by exceptions of this project's harness
    BROKEN = "broken"  #: the mutant could not be planted, or a property failed by another exception
    LEFT_OUT = "left out"  #: every property was skipped, for the backend or the number of ranks


@dataclasses.dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The result of a mutant's trial, with the property and the exception that decided it."""

    result: TrialResult
    detail: str = ""  #: the property and the exception
    by: str = ""  #: the kind of exception that decided
    attempt: Attempt | None = None  #: the attempt that decided


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A job that tries a mutant on properties."""

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
                # Another property may kill the mutant by an exception that every backend shows.
                if no_kill.result is not TrialResult.BROKEN:
                    no_kill = outcome
            if no_kill.result is not TrialResult.SURVIVED:
                return no_kill  # every property was tried; more examples mostly fail the same way
        if skipped and skipped == 2 * len(self.properties):
            return TrialOutcome(TrialResult.LEFT_OUT, "its properties are skipped")
        return no_kill


def judged(error: BaseException, mutant: Mutant) -> TrialResult:
    """The result of a mutant on which a property failed by this error."""
    errors = parts(error)
    if mutant.but and any(isinstance(each, HypothesisException) for each in (error, *errors)):
        return TrialResult.BROKEN  # no example, or a flaky one: the property may be to blame
    if mutant.but and all(isinstance(each, mutant.but) for each in errors):
        return TrialResult.HARNESS_ONLY
    return TrialResult.KILLED if is_one_of(error, mutant.by) else TrialResult.BROKEN


def forget() -> None:
    """Clear the caches of configurations and layouts, which were filled without the mutant."""
    for memory in (runtime._parse_cached, runtime._topology, topology._lay_out):
        memory.cache_clear()


def is_one_of(error: BaseException, types: tuple[type[BaseException], ...]) -> bool:
    """Return whether the error, or each error of a group, is of these types.

    Hypothesis raises groups for examples that fail in one run and not in another.
    """
    if isinstance(error, types) or not isinstance(error, BaseExceptionGroup):
        return isinstance(error, types)
    return all(is_one_of(each, types) for each in error.exceptions)


def parts(error: BaseException) -> list[BaseException]:
    """The errors of a group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [part for each in error.exceptions for part in parts(each)]
    return [error]


def kind(error: BaseException) -> str:
    """The kind of an exception in the score: its type, or "time limit"."""
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


# Running one property. The process must run nothing else, because the plugin below replaces all reports.


class _Watch:
    """A plugin that keeps the first exception and makes empty reports."""

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
    """Run a property with the same examples every time; return its exception, or None if it passed.

    Args:
        item: the property.
        examples: the most examples.
        seconds: the time limit, after which the exception is DidNotEnd.
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
        # Hypothesis shows the failure, which reads and parses source for longer than many properties take.
        patch.setattr(item, "repr_failure", _no_text, raising=False)
        watch = _Watch()
        item.config.pluginmanager.register(watch)
        stack.callback(item.config.pluginmanager.unregister, watch)
        # Warnings of a property must not fail it, even if the session turns warnings into errors.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_time_limit(seconds))
        try:
            runtestprotocol(item, log=False, nextitem=None)
        except (DidNotEnd, pytest.exit.Exception) as error:
            return error
        return watch.error


def _no_text(*_: object) -> str:
    return ""


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
    started: bool  #: whether a property had started, which then ended the process or did not end
    attempt: Attempt | None = None  #: the property that had started


@dataclasses.dataclass(slots=True)
class _Child:
    process: BaseProcess
    answers: Connection
    deadline: float
    attempt: Attempt | None = None

    def heard(self) -> Any:
        """The process's answer, or Lost; None while there is no answer yet."""
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
        """Kill the process; one that has answered has nothing left to do."""
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

    Yields each job's index and its result, in the order of answers. The result is :class:`Lost` for a
    process that ended, or had to be ended, before an answer.
    """
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # made once, not by each
    with temporary_folder("smp-mutants-") as folder:
        running: dict[int, _Child] = {}
        waiting = list(enumerate(jobs))[::-1]
        # Garbage collection in a child would touch all imported objects, and so copy their pages.
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


def warm_up() -> None:
    """Do once, before any fork, what each process would do before its first example. No rank comes into being."""
    for name in _IMPORTED_LATE:
        with contextlib.suppress(ImportError):  # torch's own modules move between versions
            importlib.import_module(name)
    # Hypothesis reads the source of all modules for constants at its first draw, and imports some of its own.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _drawn_from_nothing()


#: Modules that examples import.
_IMPORTED_LATE = (
    "hypothesis.extra",
    "numpy.random",
    "pytest_smp.marker",
    "pytest_smp.post_mortem",
    "smp_core.torch",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
)


@settings(max_examples=2, derandomize=True, database=None, deadline=None)
@given(number=integers(), text=characters(), choice=sampled_from((1, 2)), later=data())
def _drawn_from_nothing(number: int, text: str, choice: int, later: DataObject) -> None:
    later.draw(lists(integers()))


def _start(job: Job, config: pytest.Config, folder: Path) -> _Child:
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    args = job, config, folder, sending, os.getpid()
    process = context.Process(target=_work, args=args, daemon=True)
    with warnings.catch_warnings():
        # From 3.12 on Python warns of a fork beside other threads, but no other thread runs in the child.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sending.close()
    return _Child(process, receiving, _now() + START_LIMIT)


def _work(job: Job, config: pytest.Config, folder: Path, answer: Connection, parent: int) -> None:
    die_with_parent(parent)
    # The child must not use the parent's capture, terminal and temporary folder.
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
    except BaseException as error:  # a bug of the selftest, which says nothing about the mutant
        found = Lost(f"its trial raised {shown(error)}", started=False)
    answer.send(found)
    answer.close()
    os._exit(0)  # threads of ranks that never came back must not be waited for
