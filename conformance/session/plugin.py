"""The hooks of the suite's pytest plugin; the modules beside this one do the work.

pytest_smp/suite.py loads this module in sessions that collect the suite or use its options.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.pathlib import bestrelpath

from conformance.session import options
from pytest_smp import suite as door

if TYPE_CHECKING:
    from conformance.session.session import SuiteSession

_SESSION: pytest.StashKey[SuiteSession] = pytest.StashKey()
_STARTED: pytest.StashKey[bool] = pytest.StashKey()


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.is_registered(
        door
    ):  # `-p conformance.session.plugin`, before or without entry points
        pluginmanager.register(door, "smp-suite")


def pytest_configure(config: pytest.Config) -> None:
    main = not hasattr(config, "workerinput")
    config.pluginmanager.register(_Listener(config) if main else _Worker(), door.LISTENER)
    if options.given(config):
        _session(config)


def _session(config: pytest.Config) -> SuiteSession:
    session = config.stash.get(_SESSION, None)
    if session is None:
        from conformance.session.session import SuiteSession

        session = config.stash[_SESSION] = SuiteSession(config)
        config.pluginmanager.register(_Running(session), "smp-conformance-running")
        if config.stash.get(_STARTED, False):
            session.start()
    return session


def _with_suite(config: pytest.Config) -> SuiteSession:
    """The suite session of a pytest session that collects the suite, so that ini keys count too."""
    session = _session(config)
    session.found()
    return session


def _used(config: pytest.Config) -> SuiteSession | None:
    return config.stash.get(_SESSION, None)


@contextlib.contextmanager
def _refusing(config: pytest.Config) -> Iterator[None]:
    """Pass an xdist worker's UsageError on, so that the main process refuses the session with it."""
    try:
        yield
    except pytest.UsageError as error:
        if hasattr(config, "workeroutput"):
            config.workeroutput[door.OUTPUT] = {"refused": str(error)}
        raise


def pytest_report_header(config: pytest.Config) -> str | None:
    suite = _used(config)
    return None if suite is None else suite.header()


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    if any(door.leads_in(session.config, argument) for argument in session.config.args):
        _with_suite(session.config)
    started(session.config)


def started(config: pytest.Config) -> None:
    """Note the start of the main process's session, and check that its output files can be written."""
    config.stash[_STARTED] = True
    suite = _used(config)
    if suite is not None:
        suite.start()


# Collection.


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    # pytest's ids of a file outside the root folder lack the path, so they would be no use as arguments
    # of the next command line.
    root = parent.config.rootpath
    if not module_path.is_relative_to(door.HERE) or module_path.is_relative_to(root):
        return None
    nodeid = bestrelpath(root, module_path).replace(os.sep, "/")
    module: pytest.Module = pytest.Module.from_parent(parent, path=module_path, nodeid=nodeid)
    return module


def pytest_collectstart(collector: pytest.Collector) -> None:
    path = getattr(collector, "path", None)
    if path is not None and path.is_relative_to(door.HERE):
        with _refusing(collector.config):
            # Requirements that cannot be used end the session here.
            _with_suite(collector.config).collects(collector)


@pytest.hookimpl(tryfirst=True)  # before anything is deselected
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    suite = _used(session.config)
    if suite is not None:
        with _refusing(session.config):
            suite.collected(session, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    suite = _used(session.config)
    if suite is not None:
        suite.selected(session.items)
        # Modules and items stay to the end: a full search for garbage need not go through them, time and again.
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    suite = _used(session.config)
    if suite is not None and session.items and not session.config.option.collectonly:
        with _refusing(session.config):
            suite.open_backend(session.items)


# Running.


@pytest.fixture(scope="session")
def smp_engine(request: pytest.FixtureRequest) -> str:
    """The name by which every rank finds the engine under test (--smp-engine)."""
    # A process's first optimizer imports torch._dynamo for seconds, which would count against a run's limit.
    import torch._dynamo  # noqa: F401

    gc.freeze()  # as after collection
    return _session(request.config).options.engine


class _Running:
    """The wrappers around the phases of a test.

    A wrapper is visible in tracebacks, so only sessions of the suite register these.
    """

    def __init__(self, suite: SuiteSession) -> None:
        self._suite = suite

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        with self._suite.adjusted(item), self._suite.watched(item, "call"):
            return (yield)

    # Innermost, as below.

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        with self._suite.watched(item, "setup"):
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        __tracebackhide__ = True
        with self._suite.watched(item, "teardown"):
            return (yield)


# Innermost, because a verdict must not depend on hooks of others, such as a conftest's that turns failures
# into passes.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    suite = _used(item.config)
    if suite is not None:
        suite.tell(item, call, report)
    return report


# Hooks of the main process: reports of its own items or of xdist's workers, and the end.


class _Listener:
    """The main process's hooks that need the config and get none from pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = getattr(report, "user_properties", ())
        if any(name == door.REQUIREMENT for name, _ in properties):
            _with_suite(self._config).logged(report)
        elif (suite := _used(self._config)) is not None:
            suite.logged(report)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._interrupted(str(excinfo.value) or excinfo.typename)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._interrupted(f"internal error: {excinfo.exconly()}")

    def _interrupted(self, why: str) -> None:
        suite = _used(self._config)
        if suite is not None:
            suite.interrupted = why

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {}).get(door.OUTPUT)
        if output is not None:
            if "refused" in output:
                raise pytest.UsageError(output["refused"])
            suite = _with_suite if output["properties"] else _session
            suite(self._config).worker_told(output)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        suite = _used(self._config)
        if suite is not None:
            suite.finish(session)

    @pytest.hookimpl(trylast=True)  # the verdicts stand at the very end
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int
    ) -> None:
        suite = _used(self._config)
        if suite is None or not suite.tells(exitstatus):
            return
        terminalreporter.section(suite.heading())
        for line in suite.summary(terminalreporter._tw.fullwidth):
            terminalreporter.write_line(line)


class _Worker:
    """The hook of an xdist worker's end: sends its results to the main process."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        suite = _used(session.config)
        if suite is not None:
            suite.close_backend()
            session.config.workeroutput.setdefault(door.OUTPUT, suite.worker_output())  # type: ignore[attr-defined]
