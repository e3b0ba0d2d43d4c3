"""Scripts on simulated ranks (``smp-run --backend sim``): each rank thread runs the script with names of its own.

Modules that the script imports are shared by all ranks, as everything else that a process has once.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn, TextIO
from unittest import mock

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Job, Report, VerdictKind
from pytest_smp.ranks.sim.executor import ThreadExecutor
from pytest_smp.results import conclude
from smp_core.launch import script
from smp_core.launch.job import ScriptJob
from smp_core.launch.output import OutputStyle, RankOutput
from smp_core.launch.runner import RUNNER_VERSION, ScriptRunner
from smp_core.transport import current_rank
from smp_core.transport.launchers import remove_variables

#: The descriptors of a process's standard output and error.
_DESCRIPTORS = {"stdout": 1, "stderr": 2}
#: Seconds between two looks for an interruption while a rank waits for its threads.
_SLICE = 0.1


class ScriptExit(Exception):
    """Raised on a rank whose script has called ``sys.exit`` with something else than 0."""

    def __init__(self, said: object) -> None:
        super().__init__(said)
        # A process's exit code has eight bits: 256 would be a 0.
        self.code = (said & 0xFF or 1) if isinstance(said, int) else 1

    def __str__(self) -> str:
        said = self.args[0]
        return f"exit code {said}" if isinstance(said, int) else str(said)


class SimulatedScripts(ScriptRunner):
    """The backend ``sim`` of ``smp-run``.

    A deadlock, a mismatch, a leak and a race are failures, whose verdict is shown.
    """

    protocol = RUNNER_VERSION

    def __call__(self, job: ScriptJob, output: RankOutput) -> int:
        """Run a script on simulated ranks; return the exit code of the first rank that failed, or 0."""
        return _run_job(job, output)


run = SimulatedScripts()


def _run_job(job: ScriptJob, output: RankOutput) -> int:
    code = job.code()
    ranks = [script.namespace_of(job.script) for _ in range(job.ranks)]
    executor = open_backend("sim")
    assert isinstance(executor, ThreadExecutor)
    executor.guards_exit = False
    # Held-back lines would be lost with the child that wrote them.
    style = OutputStyle.PREFIX if output.style is OutputStyle.GROUP else output.style
    children = RankOutput(style, job.ranks)
    background = _Background()

    def run_rank(rank: int) -> None:
        # Kept, as Python keeps sys.__stdout__: a wrapper that is collected closes the buffer, which others may share.
        streams = [_stream(output, children, rank, name) for name in _DESCRIPTORS]
        sys.stdout, sys.stderr = streams
        _run(code, ranks[rank], rank, background)

    body = Job(
        body=run_rank,
        arguments=lambda rank: ((rank,), {}),
        automatic_init=False,
    )
    try:
        with (
            mock.patch.dict(os.environ, job.variables()),
            script_modules(job, RankMain(ranks)),
            background.entered(),
            _Handlers().entered(),
            script.prepare(job, job.ranks),
        ):
            report = executor.open(job.ranks).run(body)
    except KeyboardInterrupt:
        output.end()
        output.say("smp-run: interrupted")
        return 128 + signal.SIGINT
    finally:
        executor.close()
    output.end()
    if report.error is None:
        return 0
    output.say(_told(report, code))
    return report.error.code if isinstance(report.error, ScriptExit) else 1


@contextlib.contextmanager
def script_modules(job: ScriptJob, main: ModuleType) -> Iterator[None]:
    """While entered, ``main`` is the module ``__main__``. Afterwards modules that the script has imported from its own
    folders are gone: another script may have other ones by these names. Libraries stay, many cannot be imported twice.
    """
    before = dict(sys.modules)
    folders = {Path(job.script).resolve().parent}
    if job.folder:
        folders.add(Path(job.folder).resolve())
    sys.modules["__main__"] = main
    try:
        yield
    finally:
        sys.modules["__main__"] = before["__main__"]
        new = {name: module for name, module in sys.modules.items() if name not in before}
        own = {name for name, module in new.items() if _folder_of(module) in folders}
        for name in new:
            if name.partition(".")[0] in own:
                del sys.modules[name]


def _folder_of(module: ModuleType) -> Path | None:
    """The folder in which a module, or a package, was found."""
    path = next(iter(getattr(module, "__path__", ())), None) or getattr(module, "__file__", None)
    return Path(path).resolve().parent if isinstance(path, str) else None


def _run(code: CodeType, names: dict[str, Any], rank: int, background: _Background) -> None:
    """The body of one rank. A child that the script has forked ends here: it has no other thread."""
    remove_variables(os.environ)
    process = os.getpid()
    try:
        with background.inherited():
            execute_script(code, names)
        background.wait(rank)
    finally:
        _flush()
        if os.getpid() != process:
            _end_child(sys.exception(), code)


def execute_script(code: CodeType, names: dict[str, Any]) -> None:
    """Run the script's code; raise ScriptExit where it ends by an exit code other than 0."""
    try:
        exec(code, names)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise ScriptExit(error.code).with_traceback(error.__traceback__) from None


def _flush() -> None:
    """Flush the standard streams that the script has left, as Python does at its end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # it is None, or closed
            stream.flush()


def _end_child(error: BaseException | None, code: CodeType) -> NoReturn:
    """End a forked child as Python ends a script: an error is shown, and is the exit code."""
    status = 1
    try:
        if error is None:
            status = 0
        elif isinstance(error, ScriptExit):
            status = error.code
            if not isinstance(error.args[0], int):
                print(error, file=sys.stderr, flush=True)
        else:
            trace = script.below(error.__traceback__, code)
            traceback.print_exception(type(error), error, trace)
            _flush()
    finally:
        os._exit(status)


def _told(report: Report, code: CodeType) -> str:
    """The failure as it is shown: who failed, the script's part of the traceback, and what became of the others."""
    error = report.error
    assert error is not None
    with contextlib.suppress(BaseException):
        conclude(report, "sim")  # notes on the other ranks
    if report.verdict is VerdictKind.FAILED:
        head = f"smp-run: rank {report.root} failed"
        if isinstance(error, ScriptExit):
            return "\n".join([f"{head}: {error}", *error.__notes__])
    else:
        head = f"smp-run: {report.verdict}"
    trace = script.below(error.__traceback__, code)
    return "".join([head, "\n", *traceback.format_exception(type(error), error, trace)]).rstrip()


def _rank() -> int | None:
    """The rank that this thread is, or that has started it."""
    context = current_rank.current()
    return current_rank.parent_rank() if context is None else context.rank


class RankMain(ModuleType):
    """Stands in for the module ``__main__``, whose names are those of the rank that asks.

    Pickles look there for the script's classes; dataclasses and typing, for the meaning of annotations.
    """

    __slots__ = ("_ranks",)

    def __init__(self, ranks: list[dict[str, Any]]) -> None:
        super().__init__("__main__")
        super().__setattr__("_ranks", ranks)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """The rank's names. C code that calls PyModule_GetDict does not see them."""
        ranks: list[dict[str, Any]] = super().__getattribute__("_ranks")
        return ranks[_rank() or 0]

    def __getattribute__(self, name: str) -> Any:
        if name != "__dict__":
            with contextlib.suppress(KeyError):
                return vars(self)[name]
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: object) -> None:
        vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        if vars(self).pop(name, self) is self:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")


class _Background:
    """Threads, and tasks of pools, that go on when a rank's script has ended.

    Python waits for them at the end of a process: for threads that are no daemons, and for all tasks. The threads of
    pools themselves go on for the next task, and a library's pool is that of all ranks.
    """

    def __init__(self) -> None:
        # By process too: a forked child has none of its parent's threads.
        self._threads: dict[tuple[int, int | None], set[threading.Thread]]
        self._threads = collections.defaultdict(set)
        self._tasks: dict[tuple[int, int | None], set[concurrent.futures.Future[Any]]]
        self._tasks = collections.defaultdict(set)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """While entered, threads and tasks are noted."""
        with contextlib.ExitStack() as stack:
            start = self._noting_start(threading.Thread.start)
            stack.enter_context(mock.patch.object(threading.Thread, "start", start))
            for pool in (
                concurrent.futures.ThreadPoolExecutor,
                concurrent.futures.ProcessPoolExecutor,
            ):
                submit = self._noting_submit(pool.submit)
                stack.enter_context(mock.patch.object(pool, "submit", submit))
            yield

    @contextlib.contextmanager
    def inherited(self, daemon: bool = False) -> Iterator[None]:
        """While entered, a thread that this one makes is a daemon or not, unless it is told.

        A rank thread is a daemon, and a thread's default is what its maker is.
        """
        thread: Any = threading.current_thread()
        before, thread._daemonic = thread._daemonic, daemon
        try:
            yield
        finally:
            thread._daemonic = before

    def wait(self, rank: int) -> None:
        """Return when all of a rank's threads and tasks have ended."""
        key = os.getpid(), rank
        threads, tasks = self._threads[key], self._tasks[key]
        while tasks or threads:
            for thread in list(threads):
                with contextlib.suppress(RuntimeError):  # another thread is about to start it
                    thread.join(_SLICE)  # Ctrl-C reaches a rank thread between two slices
            concurrent.futures.wait(list(tasks), _SLICE)

    def _noting_start(self, start: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(start)
        def noting(thread: Any) -> None:
            rank = current_rank.parent_rank(thread)
            if rank is None or thread.daemon:
                start(thread)
                return
            threads, run = self._threads[os.getpid(), rank], thread.run

            def run_noted() -> None:
                thread._daemonic = False
                try:
                    run()
                finally:
                    threads.discard(thread)

            threads.add(thread)
            # A daemon to the interpreter: it would wait for the thread after Ctrl-C, too.
            thread._daemonic, thread.run = True, run_noted
            try:
                start(thread)
            finally:
                thread._daemonic = False  # it may not run yet
                if not thread.is_alive():  # it could not be started
                    threads.discard(thread)

        return noting

    def _noting_submit(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(submit)
        def noting(*args: Any, **kwargs: Any) -> Any:
            rank = _rank()
            if rank is None:
                return submit(*args, **kwargs)
            with self.inherited(daemon=True):  # the pool's threads
                task = submit(*args, **kwargs)
            tasks = self._tasks[os.getpid(), rank]
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return task

        return noting


class _Handlers:
    """The signal handlers that ranks have set. None is ever called: Python has them in its main thread alone, which no
    rank thread is.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, dict[int, Any]] = collections.defaultdict(dict)
        self._signal, self._getsignal = signal.signal, signal.getsignal

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """While entered, ``signal.signal`` and ``signal.getsignal`` are a rank's own in its thread."""
        with (
            mock.patch.object(signal, "signal", self._set),
            mock.patch.object(signal, "getsignal", self._get),
        ):
            yield

    def _set(self, signalnum: int, handler: Any, /) -> Any:
        own = self._own()
        if own is None:
            return self._signal(signalnum, handler)
        before = self._get(signalnum)
        if not callable(handler) and handler not in (signal.SIG_DFL, signal.SIG_IGN):
            raise TypeError(
                "signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object"
            )
        own[signalnum] = handler
        return before

    def _get(self, signalnum: int, /) -> Any:
        handler = self._getsignal(signalnum)
        own = self._own()
        return handler if own is None else own.get(signalnum, handler)

    def _own(self) -> dict[int, Any] | None:
        """The handlers of the rank that this thread is; None in others, and in a forked child, which sets real ones."""
        context: Any = current_rank.current()
        if context is None or threading.current_thread() is not context.thread.thread:
            return None
        return self._ranks[context.rank]


def _stream(output: RankOutput, children: RankOutput, rank: int, name: str) -> TextIO:
    """The standard output or error of one rank."""
    stream: Any = io.TextIOWrapper(
        _Bytes(output, children, rank, name),
        encoding="utf-8",
        errors="replace",
        write_through=True,
    )
    stream.mode = "w"
    return stream  # type: ignore[no-any-return]


class _Bytes(io.RawIOBase):
    """The binary part of a rank's standard output or error."""

    def __init__(self, output: RankOutput, children: RankOutput, rank: int, name: str) -> None:
        self._output, self._children, self._rank, self._name = output, children, rank, name
        self._process = os.getpid()
        self.name = f"<{name}>"

    def write(self, data: Any, /) -> int:
        """Hand bytes to the output."""
        text = bytes(data)
        output = self._output if os.getpid() == self._process else self._children
        output.take(self._rank, self._name, text)
        return len(text)

    def flush(self) -> None:
        """Show a forked child's last line, which its parent never sees."""
        if os.getpid() != self._process:
            self._children.end()

    def writable(self) -> bool:
        """True."""
        return True

    def fileno(self) -> int:
        """The descriptor of the process, to which child processes write: without a rank."""
        return _DESCRIPTORS[self._name]
