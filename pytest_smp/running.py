"""Running a body on ranks: what the controller does for a marked test, for ``smp_world``, and for
each example.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import operator
import sys
import time
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from hypothesis import control, reporting
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.strategies import DataObject

from pytest_smp import readiness, replicas, results
from pytest_smp.coverage import Coverage
from pytest_smp.faults import among as faults_among
from pytest_smp.proxies import TmpPath
from pytest_smp.rank_raises import accept_consequences
from pytest_smp.ranks import serialization
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.call_records import CALLS, CommunicationCall
from pytest_smp.ranks.faults import Fault, unreached
from pytest_smp.ranks.faults import check as check_faults
from pytest_smp.ranks.protocols import (
    Executor,
    ExecutorOptions,
    Job,
    Outcome,
    OutcomeKind,
    Report,
    VerdictKind,
)
from pytest_smp.ranks.schedule import ROUND_ROBIN, Schedule
from pytest_smp.ranks.sim.executor import ThreadExecutor
from pytest_smp.settings import Settings
from pytest_smp.strategies.schedules import schedules
from pytest_smp.time_limits import TimeLimits
from smp_core import runtime
from smp_core.errors import (
    ArgumentError,
    BackendError,
    FaultNotReachedError,
    PayloadError,
    SmpError,
    StuckError,
    UnsupportedError,
)
from smp_core.transport.current_rank import current
from smp_core.transport.payload import Payload, plain_dumps

if TYPE_CHECKING:
    from pytest_smp.script_runs import ScriptRun

# pytest leaves these frames out below an error that we raise on purpose; a bug of ours shows them.
__tracebackhide__ = operator.methodcaller("errisinstance", SmpError)

_SKIPS = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)
#: The exceptions after which a test, or an example of it, counts neither as passed nor as failed.
_PASSED_OVER = (*_SKIPS, UnsatisfiedAssumption)


class GroupLeftWarning(UserWarning):
    """A run ended with a process group that nobody destroyed (an error with --smp-strict)."""


def _dumps(obj: object) -> bytes:
    """Pickle an object, one that pickle refuses (a closure, a local class) in the form for rank processes."""
    try:
        return plain_dumps(obj)
    except Exception:
        return serialization.dumps(obj)


class Arguments:
    """A body's arguments, copied for each rank."""

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str] = ()
    ) -> None:
        # st.data() draws in the controller's one example; on simulated ranks it can be shared.
        self._shared = {
            name: value for name, value in kwargs.items() if isinstance(value, DataObject)
        }
        copied = {name: value for name, value in kwargs.items() if name not in self._shared}
        try:
            self._payload = Payload((tuple(args), copied), "arguments of the ranks", _dumps)
        except PayloadError:
            positions = [*names, *map(str, range(len(names), len(args)))]
            self._name_culprit([*zip(positions, args, strict=True), *copied.items()])
            raise

    @staticmethod
    def _name_culprit(arguments: Sequence[tuple[str, Any]]) -> None:
        for name, value in arguments:
            try:
                Payload(value, f"argument {name!r}", _dumps)
            except PayloadError as error:
                raise PayloadError(
                    f"{error} A test's arguments, fixtures among them, are copied for every rank; "
                    "make what cannot be copied inside the body"
                ) from None

    def __getstate__(self) -> Any:
        if self._shared:
            (name, *_) = self._shared
            raise UnsupportedError(
                f"argument {name!r} is st.data(), which draws in the controller, and the ranks of "
                "this backend are processes of their own: draw in @given instead, or run on sim"
            )
        return {"_shared": {}, "_payload": self._payload}

    def __call__(self, rank: int) -> tuple[Sequence[Any], Mapping[str, Any]]:
        args, kwargs = self._payload.thaw()
        return args, {**kwargs, **self._shared}


class Controller:
    """Opens the backend when the first run needs it, and runs bodies on its ranks.

    One per session.
    """

    def __init__(
        self,
        settings: Settings,
        capture: bool,
        prelude: Callable[[], Any] | None = None,
        coverage: Coverage | None = None,
        preloaded: Sequence[str] = (),
    ) -> None:
        self.settings = settings
        self.capture = capture
        self._prelude = prelude
        self._preloaded = preloaded  # modules that every process of ranks imports first
        self.coverage = coverage  # of lines on rank processes
        self.debugging = False  # a debugger is open: time stands still
        self.timed_out = 0  # runs that did not end
        #: True if no body of the test skips it or rejects its example: a backend does that raises so.
        self.counts_every_example = False
        self._limits = TimeLimits()
        self.decisions = 0  # of the last run
        self.faults: tuple[Fault, ...] = ()  # of the test that runs
        self.records_calls = False  # for the test that runs
        self.compares_replicas = False  # for the test that runs
        self.calls: list[CommunicationCall] = []  # of its last run, by rank
        self.tmp_path: TmpPath | None = None
        self._last: Report | None = None
        self._executor: Executor | None = None

    def open(self) -> Executor:
        """The backend's executor, opened at the first call."""
        if self._executor is None:
            options = ExecutorOptions(
                ranks=self.settings.ranks,
                mpiexec=self.settings.mpiexec,
                capture=self.capture,
                check=self.settings.check,
                prelude=self._prelude,
            )
            self._executor = open_backend(self.settings.backend, options)
            for name in self._preloaded if self._executor.steady else ():
                with contextlib.suppress(
                    ImportError
                ):  # ranks of this process; a body may not need it
                    importlib.import_module(name)
        return self._executor

    @property
    def explores(self) -> bool:
        """True if schedules are drawn for a test that gives none."""
        return self.settings.explore > 0 and self.settings.schedule is None

    def report(
        self,
        body: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        ranks: int,
        config: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        automatic_init: bool = True,
        show_output: bool = False,
        schedule: Schedule | None = None,
        faults: tuple[Fault, ...] = (),
    ) -> Report:
        """Run ``body`` on ``ranks`` ranks and say how it ended, without raising for it.

        Raises FaultNotReachedError if it ended well, and a fault did not strike.
        """
        runtime.validate(config, ranks)
        executor = self.open()
        faults = (*self.faults, *faults)
        if faults:
            check_faults(faults, ranks, executor.injects, self.settings.backend)
        compares = self.compares_replicas or self.settings.replicas
        asked = timeout or self.settings.timeout
        limit = self._limits.of(body, asked)
        origin = "--smp-timeout" if timeout is None else "timeout= of the call"
        if limit < asked:
            origin = f"an example before has hung for the whole {asked:g} s of {origin}"
        job = Job(
            body=replicas.ReplicaBody(body) if compares else body,
            arguments=Arguments(args, kwargs, _leading_names(body, args)),
            parameters=config,
            automatic_init=automatic_init,
            timeout=limit,
            timeout_origin=origin,
            patience=lambda: self.debugging,
            seed=self.settings.seed,
            strict=self.settings.strict,
            capture=self.capture,
            skips=_SKIPS,
            context=_hypothesis_context(),
            schedule=self._schedule(schedule),
            faults=faults,
            records_calls=self.records_calls,
            simulated_timeouts=self.settings.timeouts == "simulated",
        )
        self.calls = []
        started = time.monotonic()
        try:
            report = executor.open(ranks).run(job)
        except _PASSED_OVER as error:
            raise _not_passed_over(f"the executor of {self.settings.backend}", error) from error
        if self.counts_every_example:
            _refuse_passing_over(report)
        accept_consequences(report)
        if compares:
            replicas.judge(report)
        if self.records_calls:
            self.calls = [
                call for outcome in report.outcomes for call in outcome.records.get(CALLS, ())
            ]
        if self.coverage is not None:
            self.coverage.add(report.outcomes)
        if report.verdict is VerdictKind.PASSED:
            self._limits.passed(body, time.monotonic() - started)
        self._last, self.decisions = report, report.decisions
        if show_output:
            _show_output(report)
        if faults and report.verdict is VerdictKind.PASSED:
            _check_reached(faults, report)
        for outcome in report.outcomes:
            for incident in outcome.incidents:
                incident.repeat(outcome.rank)
        for text in report.warnings if report.error is None else ():
            warnings.warn(text, GroupLeftWarning, stacklevel=2)
        return report

    def new_test(self) -> None:
        """Called before every test, before its fixtures: nothing of the last test's is in force."""
        self._limits.new_test()
        self.faults, self.calls = (), []
        self.records_calls = self.compares_replicas = self.counts_every_example = False
        if self.tmp_path is not None:
            self.tmp_path.renew()

    @property
    def abandons(self) -> bool:
        """True if ranks that do not end are left behind and go on, as threads are."""
        return self._executor is None or self._executor.steady

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of the last run, in rank order."""
        return [] if self._last is None else self._last.outcomes

    def around_threads(self, body: ScriptRun) -> contextlib.AbstractContextManager[None]:
        """Entered around a script's run: prepares this process, if the ranks are threads of it."""
        threads = isinstance(self.open(), ThreadExecutor)
        return body.around_threads() if threads else contextlib.nullcontext()

    @contextlib.contextmanager
    def prepared(self, function: Any, ranks: int | None = None) -> Iterator[None]:
        """Entered around a property whose examples run on ranks: all that there are, if not given."""
        __tracebackhide__ = True
        executor = self.open()
        ranks = self.settings.ranks if ranks is None else ranks
        readiness.prepare(executor, ranks, function, self.settings.timeout)
        with readiness.deadline_in_force(executor, function):
            yield

    def _schedule(self, asked: Schedule | None) -> Schedule:
        """--smp-schedule, else what the test asks for, else drawn (--smp-explore), else round-robin."""
        if self.settings.schedule is not None:
            return self.settings.schedule
        if asked is not None:
            return asked
        example = _current_example() if self.explores else None
        return ROUND_ROBIN if example is None else example.draw(schedules())

    def run(
        self,
        body: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        example_of: str | None = None,
        **how: Any,
    ) -> list[Any]:
        """Run ``body`` and return its values in rank order.

        Raises the root cause of a run that failed. ``example_of`` names the property that
        ``kwargs`` is an example of.
        """
        __tracebackhide__ = True
        with _untraced():
            report = self.report(body, args, kwargs, **how)
            if report.verdict is VerdictKind.TIMED_OUT:
                if not self.abandons:
                    self._limits.hung(body)
                    report.error = StuckError(str(report.error))
                    results.conclude(report, self.settings.backend, how.get("config"))
                self.timed_out += 1
                if example_of is not None and report.error is not None:
                    # Not Hypothesis's to shrink, so not its to show.
                    example = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
                    report.error.add_note(f"in the example {example_of}({example})")
            results.conclude(report, self.settings.backend, how.get("config"))
            return report.values

    @property
    def lost(self) -> str:
        """The reason why no further run is possible, in words; empty while runs are possible."""
        return "" if self._executor is None else self._executor.lost

    def take_last(self) -> Report | None:
        """The report of the last run since this was last called."""
        last, self._last = self._last, None
        return last

    def close(self) -> None:
        """End the ranks."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()


def _check_reached(faults: tuple[Fault, ...], report: Report) -> None:
    if any(outcome.kind is not OutcomeKind.RETURNED for outcome in report.outcomes):
        return  # a rank that skips need not reach its fault
    struck = {index for outcome in report.outcomes for index in outcome.struck}
    texts = unreached(faults, struck)
    if texts:
        raise FaultNotReachedError("\n".join(["the run ended well, and", *texts]))


def _show_output(report: Report) -> None:
    """Pass the ranks' output on to the test's own, rank by rank."""
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        for outcome in report.outcomes:
            text: str = getattr(outcome, name)
            if text:
                stream.write(f"--- rank {outcome.rank}, {name}\n{text}")
                stream.write("" if text.endswith("\n") else "\n")


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Keep Hypothesis's explanation to the user's lines: it traces the controller, which runs ours."""
    trace = sys.gettrace()
    if not type(getattr(trace, "__self__", None)).__module__.startswith("hypothesis"):
        yield
        return
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)


def _hypothesis_context() -> Callable[[], contextlib.AbstractContextManager[Any] | None]:
    """The context in which ``st.data()``, ``assume``, ``note``, ``target`` and ``event`` work inside a
    rank thread.

    Raises BackendError if this version of Hypothesis keeps its build context elsewhere.
    """
    variable = getattr(control, "_current_build_context", None)  # private
    if variable is None or not hasattr(variable, "with_value"):
        raise BackendError(
            "this version of Hypothesis keeps its build context elsewhere; install the pinned one"
        )
    build = variable.value
    if build is None:
        return lambda: None
    reporter = reporting.reporter.value

    def report_of_rank(text: str) -> None:
        rank = current() if text.startswith("Draw ") else None  # each rank draws for itself
        reporter(text if rank is None else f"rank {rank.rank}: {text}")

    return lambda: _Entered(((variable, build), (reporting.reporter, report_of_rank)))


class _Entered:
    """While entered, Hypothesis's variables have these values in this thread.

    Hypothesis's own ``with_value`` does the same more slowly, which every rank of every example would pay.
    """

    __slots__ = ("_before", "_values")

    def __init__(self, values: Sequence[tuple[Any, Any]]) -> None:
        self._values = values

    def __enter__(self) -> None:
        self._before = [variable.value for variable, _ in self._values]
        for variable, value in self._values:
            variable.value = value

    def __exit__(self, *_: object) -> None:
        for (variable, _), value in zip(self._values, self._before, strict=True):
            variable.value = value


def _refuse_passing_over(report: Report) -> None:
    """Raise BackendError for a run that would not count, unless it has failed: that is told as it is."""
    error = report.error
    if error is not None and not isinstance(error, _PASSED_OVER):
        return
    ends = [*((f"rank {each.rank}", each.error) for each in report.outcomes), ("the run", error)]
    for origin, end in ends:
        if isinstance(end, _PASSED_OVER):
            raise _not_passed_over(origin, end) from end


def _not_passed_over(origin: str, error: BaseException) -> BackendError:
    text = f"{origin} has raised {type(error).__name__}, after which the test would not count"
    return BackendError(f"{text}: {error}")


def _current_example() -> ConjectureData | None:
    """Hypothesis's source of choices for the example that runs now; None for an explicit example."""
    build = control._current_build_context.value
    if build is None or build.data.max_choices == 0:
        return None
    return build.data


def _schedule_among(arguments: Iterable[Any]) -> Schedule | None:
    """The schedule that is one of a test's arguments. Raises ArgumentError if there are two."""
    given = [value for value in arguments if isinstance(value, Schedule)]
    if len(given) > 1:
        raise ArgumentError("a run has one schedule, and two arguments of the test are one each")
    return given[0] if given else None


def _explore(run: Callable[[Schedule], None], controller: Controller, name: str) -> None:
    """Run round-robin, and then under drawn schedules, which deviate anywhere in that run."""
    __tracebackhide__ = True
    folder = controller.tmp_path
    kept = None if folder is None else folder.kept()
    run(ROUND_ROBIN)
    count, horizon = controller.settings.explore, max(1, controller.decisions)

    def explored(schedule: Schedule) -> None:
        __tracebackhide__ = True
        if folder is not None and kept is not None:
            folder.again(kept)
        run(schedule)

    explored.__name__ = explored.__qualname__ = name
    settings = hypothesis.settings(max_examples=count, deadline=None, database=None)
    settings(hypothesis.given(schedule=schedules(horizon=horizon))(explored))()


def _leading_names(body: Callable[..., Any], args: Sequence[Any]) -> Sequence[str]:
    """The names of the body's first parameters, for the error about an argument that cannot be copied."""
    code = getattr(body, "__code__", None)
    return () if code is None else code.co_varnames[: min(len(args), code.co_argcount)]


@dataclasses.dataclass(slots=True)
class MarkedTest:
    """One marked test item, and what its marker asks for."""

    item: pytest.Function
    ranks: int
    config: Mapping[str, Any]

    def run(self, controller: Controller) -> None:
        """Run the test on its ranks: once, or once for each of Hypothesis's examples."""
        __tracebackhide__ = True
        item, function = self.item, self.item.obj
        arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
        how: dict[str, Any] = {"ranks": self.ranks, "config": self.config}
        handle = getattr(function, "hypothesis", None)
        if handle is None:
            bound: tuple[Any, ...] = ()
            if inspect.ismethod(function):  # self is copied for each rank, like every argument
                bound, function = (function.__self__,), function.__func__
            schedule = _schedule_among(arguments.values())
            how["faults"] = faults_among(arguments)

            def once(schedule: Schedule | None = schedule) -> None:
                __tracebackhide__ = True
                values = controller.run(function, bound, arguments, schedule=schedule, **how)
                _no_value(item, values)

            if schedule is not None or not controller.explores:
                once()
            else:
                _explore(once, controller, item.name)
            return
        inner = handle.inner_test

        @functools.wraps(inner)  # the database's key is a digest of source and signature
        def on_ranks(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if controller.tmp_path is not None:
                controller.tmp_path.renew()
            schedule = _schedule_among(kwargs.values())
            if schedule is not None and controller.settings.schedule is not None:
                schedule = controller.settings.schedule  # and the body is told the one in force
                kwargs = {
                    name: schedule if isinstance(value, Schedule) else value
                    for name, value in kwargs.items()
                }
            values = controller.run(
                inner,
                args,
                kwargs,
                example_of=item.name,
                schedule=schedule,
                faults=faults_among(kwargs),
                **how,
            )
            # Hypothesis refuses a test that returns something: it was meant to assert it.
            return next((value for value in values if value is not None), None)

        handle.inner_test = on_ranks
        try:
            with controller.prepared(function, self.ranks):
                function(**arguments)
        finally:
            handle.inner_test = inner


def _no_value(item: pytest.Function, values: list[Any]) -> None:
    """Warn of a test that returns a value and was meant to assert it, as pytest does for a plain test."""
    if any(value is not None for value in values):
        kind = type(next(value for value in values if value is not None)).__name__
        warnings.warn(
            pytest.PytestReturnNotNoneWarning(
                f"{item.nodeid} returned {kind} on a rank; did you mean to use assert instead of return?"
            ),
            stacklevel=2,
        )
