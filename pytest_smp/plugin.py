"""The pytest plugin: hooks and fixtures only, which call the modules beside this one.

A session without marked tests imports neither torch nor Hypothesis nor any other heavy module.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_smp import launch, moved, settings, summary, supervision

if TYPE_CHECKING:
    from pytest_smp.calls import SmpCalls
    from pytest_smp.faults import SmpFaults
    from pytest_smp.marker import Request
    from pytest_smp.proxies import Smp, SmpWorld, TmpPath
    from pytest_smp.replicas import SmpReplicas
    from pytest_smp.running import Controller

_SETTINGS = pytest.StashKey[settings.Settings]()
_CONTROLLER: pytest.StashKey[Controller] = pytest.StashKey()
_REQUEST: pytest.StashKey[Request] = pytest.StashKey()
#: Modules that other plugins want imported in the fork server; read when the backend is opened.
PRELOAD: pytest.StashKey[tuple[str, ...]] = pytest.StashKey()
_RANKS = "_smp_ranks"

pytest_addoption = settings.add_options

moved.install()  # now: a conftest or a plugin of others may import from an old address


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    status = launch.split(config)
    if status is None:
        supervision.supervise(config)
    return status


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "smp(ranks=N or [N, ...], **config): run the test on N ranks, initialised with the configuration",
    )
    config.addinivalue_line(
        "markers", "smp_faults(*faults): what is to go wrong in the test's runs (pytest_smp.faults)"
    )
    config.stash[_SETTINGS] = settings.read(config)
    config.pluginmanager.register(_TimedOut(config), "smp-timed-out")
    config.pluginmanager.register(_Properties(), "smp-properties")
    if launch.job_size() is not None:  # the other ranks wait, whether a test uses them or not
        controller_of(config).open()


def pytest_report_header(config: pytest.Config) -> str | None:
    chosen = config.stash[_SETTINGS]
    return f"smp: {chosen.ranks} ranks on {chosen.backend}" if settings.chosen(config) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    summary.write(terminalreporter)
    summary.write_idle(terminalreporter, terminalreporter.config.stash[_SETTINGS].ranks)


def pytest_unconfigure(config: pytest.Config) -> None:
    controller = config.stash.get(_CONTROLLER, None)
    if controller is not None:
        controller.close()


def controller_of(config: pytest.Config) -> Controller:
    """The session's one controller."""
    controller = config.stash.get(_CONTROLLER, None)
    if controller is None:
        from pytest_smp.coverage import Coverage
        from pytest_smp.rank_side import Prelude
        from pytest_smp.running import Controller

        capture = config.getoption("capture", "fd") != "no"
        preloaded: tuple[str, ...] = config.stash.get(PRELOAD, ())
        coverage = Coverage(str(config.invocation_params.dir))
        controller = config.stash[_CONTROLLER] = Controller(
            config.stash[_SETTINGS],
            capture,
            Prelude.of(config, preloaded, coverage.ranks),
            coverage,
            preloaded,
        )
    return controller


# Collection.


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("smp") is None:
        return
    from pytest_smp.marker import request_of

    try:
        request = request_of(metafunc.definition, metafunc.config.stash[_SETTINGS])
    except pytest.Collector.CollectError:
        return  # told below, with all others
    if request is not None and request.many:
        if _RANKS not in metafunc.fixturenames:
            metafunc.fixturenames.append(_RANKS)
        metafunc.parametrize(
            _RANKS, request.ranks, ids=[f"ranks={count}" for count in request.ranks]
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # They say by themselves on how many ranks they run.
        if "smp_world" in getattr(item, "fixturenames", ()):
            item.user_properties.append((summary.RANKS, 0))
    marked = [item for item in items if item.get_closest_marker("smp") is not None]
    users = {*marked, *(item for item in items if "smp_world" in getattr(item, "fixturenames", ()))}
    if users:
        from pytest_smp import readiness

        modules = {item.module for item in users if isinstance(item, pytest.Function)}
        config.stash[PRELOAD] = (*config.stash.get(PRELOAD, ()), *readiness.modules_for(modules))
    if not marked:
        return
    from pytest_smp.marker import problems, request_of_item, why_skipped

    chosen = config.stash[_SETTINGS]
    found = problems(marked, chosen, _RANKS)
    # One error for each file, and all of them: not the first, and not only of files before it.
    for file, texts in found.by_file.items():
        report = pytest.CollectReport(file, "failed", "\n".join(texts), [])
        config.hook.pytest_collectreport(report=report)
    items[:] = [item for item in items if item not in found.items]
    for item in marked:
        if item in found.items:
            continue
        request = item.stash[_REQUEST] = request_of_item(item, chosen, _RANKS)
        if request.many:  # tells Hypothesis that a method's instances differ for a reason
            item.add_marker(pytest.mark.parametrize(_RANKS, request.ranks))
        (count,) = request.ranks
        item.user_properties.append((summary.RANKS, count))
        reason = why_skipped(request, chosen)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason))


# Running.


@pytest.hookimpl(wrapper=True, trylast=True)  # below pytest-cov's, which saves the data at its end
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        controller = session.config.stash.get(_CONTROLLER, None)
        if controller is not None and controller.coverage is not None:
            controller.coverage.merge()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    __tracebackhide__ = True
    if pyfuncitem.get_closest_marker("smp") is None:
        return None
    from pytest_smp import results
    from pytest_smp.marker import request_of_item, why_skipped
    from pytest_smp.running import MarkedTest

    chosen = pyfuncitem.config.stash[_SETTINGS]
    request = pyfuncitem.stash.get(_REQUEST, None)
    if request is None:  # marked after collection, by somebody's conftest
        request = request_of_item(pyfuncitem, chosen, _RANKS)
        reason = why_skipped(request, chosen)
        if reason is not None:
            pytest.skip(reason)
    controller = controller_of(pyfuncitem.config)
    controller.take_last()
    error: BaseException | None = None
    try:
        if request.fresh:
            controller.open().renew()
        MarkedTest(pyfuncitem, request.ranks[0], request.config).run(controller)
    except BaseException as raised:
        error = raised
        raise
    finally:
        report = controller.take_last()
        if controller.lost:
            pyfuncitem.session.shouldstop = controller.lost
        if report is not None:
            results.add_to_item(
                pyfuncitem, report, chosen.backend, error, abandoned=controller.abandons
            )
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    controller = item.config.stash.get(_CONTROLLER, None)
    if controller is not None:
        controller.new_test()
    if item.get_closest_marker("smp_faults") is not None:
        from pytest_smp import faults

        controller_of(item.config).faults = faults.of_markers(item)
    if "smp_calls" in getattr(item, "fixturenames", ()):
        controller_of(item.config).records_calls = True
    if "smp_replicas" in getattr(item, "fixturenames", ()):
        controller_of(item.config).compares_replicas = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    made = yield
    if call.excinfo is None or item.config.stash.get(_CONTROLLER, None) is None:
        return made
    from pytest_smp import results

    error = call.excinfo.value
    if hasattr(made, "wasxfail"):
        results.refuse_xfail(made, item, error)
    if not any(name == "smp" for name, _ in made.user_properties):  # it started its runs itself
        summary = results.summary_of(error)
        if summary is not None:
            made.user_properties.append(("smp", summary))
    results.shorten(made, error)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_exception_interact(call: pytest.CallInfo[Any]) -> Generator[None, object, object]:
    from pytest_smp import failures

    error = None if call.excinfo is None else call.excinfo.value
    failure = None if error is None else failures.of(error)
    if error is None or failure is None:
        return (yield)
    from pytest_smp import post_mortem

    with post_mortem.of(failure, error):
        return (yield)


def pytest_enter_pdb(config: pytest.Config) -> None:
    controller = config.stash.get(_CONTROLLER, None)
    if controller is None:
        return
    controller.debugging = True
    from smp_core.transport.current_rank import current

    rank = current()
    if rank is not None:
        from _pytest.config import create_terminal_writer

        who = f"rank {rank.rank} of {rank.size} ({config.stash[_SETTINGS].backend})"
        create_terminal_writer(config).sep(">", who)


def pytest_leave_pdb(config: pytest.Config) -> None:
    controller = config.stash.get(_CONTROLLER, None)
    if controller is not None:
        controller.debugging = False


class _Properties:
    """Gets ready what a property that uses ``smp_world`` needs, before its first example is drawn."""

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        __tracebackhide__ = True
        marked = pyfuncitem.get_closest_marker("smp") is not None
        is_property = hasattr(pyfuncitem.obj, "hypothesis")
        if marked or not is_property or "smp_world" not in pyfuncitem.fixturenames:
            return (yield)
        with controller_of(pyfuncitem.config).prepared(pyfuncitem.obj):
            return (yield)


class _TimedOut:
    """Counts runs that did not end: an expected failure must not hide ranks that compute for ever."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reported = 0  # by tests on ranks, those of xdist's workers too

    def _count(self) -> int:
        controller = self._config.stash.get(_CONTROLLER, None)
        return max(self._reported, 0 if controller is None else controller.timed_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        summary = dict(report.user_properties).get("smp") if report.when == "call" else None
        if summary is None:
            return
        told = json.loads(str(summary))
        self._reported += told["verdict"] == "timed out" and told["abandoned"]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if self._count() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        yield

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        count = self._count()
        if count:
            runs = "1 run" if count == 1 else f"{count} runs"
            terminalreporter.write_line(
                f"smp: {runs} did not end within the time limit (--smp-timeout); "
                "their threads were given up, and the session fails",
                red=True,
            )


# Fixtures.


@pytest.fixture(scope="session")
def smp() -> Smp:
    """The API, on the rank that uses it."""
    from pytest_smp.proxies import the_smp

    return the_smp()


@pytest.fixture(scope="session")
def smp_world(pytestconfig: pytest.Config) -> SmpWorld:
    """Runs functions on ranks, from a test that is not marked itself."""
    from pytest_smp.proxies import SmpWorld

    return SmpWorld(controller_of(pytestconfig))


@pytest.fixture(scope="session")
def smp_faults(pytestconfig: pytest.Config) -> SmpFaults:
    """Says what is to go wrong in the runs of a test; each test begins without."""
    from pytest_smp.faults import SmpFaults

    return SmpFaults(controller_of(pytestconfig))


@pytest.fixture(scope="session")
def smp_calls(pytestconfig: pytest.Config) -> SmpCalls:
    """The communications of the last run as data; on a rank, its own so far."""
    from pytest_smp.calls import SmpCalls

    return SmpCalls(controller_of(pytestconfig))


@pytest.fixture(scope="session")
def smp_replicas() -> SmpReplicas:
    """Replicas are compared after each optimizer's step; ``watch`` takes further modules."""
    from pytest_smp.replicas import SmpReplicas

    return SmpReplicas()


@pytest.fixture(scope="session")
def smp_tmp_path(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> TmpPath:
    """One folder for all ranks: new for each test, and for each example of a marked property."""
    from pytest_smp.proxies import TmpPath

    controller = controller_of(pytestconfig)
    if controller.tmp_path is None:
        controller.tmp_path = TmpPath(tmp_path_factory)
    return controller.tmp_path


@pytest.fixture
def _smp_ranks(request: Any) -> int:
    """The number of ranks of a test whose marker gives a list."""
    return int(request.param)
