"""Trying mutants: each in a process of its own, on properties that should catch it.

The process is forked from one that has collected the properties and run none of them. So a mutant
is planted before there are ranks, leaves nothing behind, and may hang, crash or end its process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol  # private; plugins that run a test again use it, too
from hypothesis import HealthCheck, Phase, settings

from conformance.mutants.protocol import Mutant
from smp_core import runtime, topology

#: Numbers of examples: few are enough for most mutants, so every property gets a few first. (A
#: property that asks for fewer by itself gets those.)
FEW, MANY = 6, 60

#: Seconds for one property; the slowest takes a tenth of it. (One run on ranks has --smp-timeout.)
PROPERTY_LIMIT = 20.0

#: Seconds for a whole process, in case the limit above cannot be raised in it: a loop in C.
PROCESS_LIMIT = 120.0


class DidNotEnd(BaseException):
    """Raised when a property runs for too long outside of the ranks; no ``except Exception`` of the
    code under test may catch it.
    """


class Result(enum.StrEnum):
    """What became of a mutant."""

    KILLED = "killed"  #: a property failed as the mutant says it does
    SURVIVED = "survived"  #: every property passed
    BROKEN = "broken"  #: it could not be planted, or a property failed in another way
    LEFT_OUT = "left out"  #: every property was skipped: the backend or the number of ranks


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant, or of the reference, and by which property."""

    result: Result
    detail: str = ""  #: the property and the exception
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A mutant, and the properties that it is tried on."""

    mutant: Mutant
    properties: Sequence[pytest.Item]

    def __call__(self) -> Outcome:
        """Plant the mutant and run the properties until one fails."""
        start = time.monotonic()
        with contextlib.ExitStack() as planted:
            forget()
            try:
                planted.enter_context(self.mutant.plant())
            except Exception as error:
                return Outcome(Result.BROKEN, f"cannot be planted: {shown(error)}")
            result, detail = self._tried()
        return Outcome(result, detail, time.monotonic() - start)

    def _tried(self) -> tuple[Result, str]:
        skipped = 0
        for examples in (FEW, MANY):
            for item in self.properties:
                error = run(item, examples)
                if error is None:
                    continue
                if isinstance(error, pytest.skip.Exception):
                    skipped += 1
                    continue
                detail = f"{item.name}: {shown(error)}"
                return (
                    Result.KILLED if is_one_of(error, self.mutant.by) else Result.BROKEN
                ), detail
        if skipped and skipped == 2 * len(self.properties):
            return Result.LEFT_OUT, "its properties are skipped"
        return Result.SURVIVED, ""


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


def run(item: pytest.Item, examples: int) -> BaseException | None:
    """Run a property with at most so many examples, the same every time. Returns how it failed."""
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
        stack.enter_context(_time_limit(PROPERTY_LIMIT))
        try:
            runtestprotocol(item, log=False, nextitem=None)
        except (DidNotEnd, pytest.exit.Exception) as error:
            return error
        return watch.error


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise DidNotEnd(f"the property did not end within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Processes.


def in_processes(
    jobs: Sequence[Callable[[], Any]], config: pytest.Config
) -> Iterator[tuple[int, Any]]:
    """Run each job in a forked process, as many at a time as there are cores.

    Yields the job's index and what it returned, as the processes end; a string, in words, for a
    process that was lost.
    """
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # made once, not by each
    with tempfile.TemporaryDirectory(prefix="smp-mutants-") as folder:
        running: dict[int, tuple[BaseProcess, Connection, float]] = {}
        waiting = list(enumerate(jobs))[::-1]
        try:
            while waiting or running:
                while waiting and len(running) < len(os.sched_getaffinity(0)):
                    index, job = waiting.pop()
                    running[index] = (*_start(job, config, Path(folder) / str(index)), _now())
                ends = [connection for _, connection, _ in running.values()]
                wait(ends, timeout=1.0)
                for index, (process, connection, since) in list(running.items()):
                    late = _now() - since > PROCESS_LIMIT
                    if late:
                        process.kill()
                    if late or connection.poll():
                        yield index, _answer(process, connection, late)
                        del running[index]
                        shutil.rmtree(Path(folder) / str(index), ignore_errors=True)
        finally:
            for process, connection, _ in running.values():
                process.kill()
                process.join()
                connection.close()


_now = time.monotonic


def _start(
    job: Callable[[], Any], config: pytest.Config, folder: Path
) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, config, folder, sending), daemon=True)
    with warnings.catch_warnings():
        # From 3.12 on Python warns of a fork beside other threads; none of them runs in the child.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sending.close()
    return process, receiving


def _answer(process: BaseProcess, connection: Connection, late: bool) -> Any:
    try:
        return connection.recv()
    except EOFError:
        process.join()
        how = f"ended with exit code {process.exitcode}"
        return f"its process {f'did not end within {PROCESS_LIMIT:.0f} s' if late else how}"
    finally:
        process.join()
        connection.close()


def _work(job: Callable[[], Any], config: pytest.Config, folder: Path, answer: Connection) -> None:
    # The parent's capture, terminal and temporary folder are the parent's.
    capture = config.pluginmanager.get_plugin("capturemanager")
    config.pluginmanager.unregister(capture)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    folder.mkdir()
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    answer.send(job())
    answer.close()
    os._exit(0)  # threads of ranks that never came back must not be waited for
