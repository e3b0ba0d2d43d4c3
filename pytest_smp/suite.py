"""The entry of the conformance suite: its options, and its plugin once a session needs it.

The suite's package has a plain name, `conformance`, and a project may have a package of that name.
So pytest loads only this module in every session. The suite's plugin is imported when an option, an
argument or a collected file asks for it. If Python finds another package of the name, the suite is
not loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_NAME = "conformance"
_INSTALLED = Path(__file__).parents[1] / _NAME
HERE = _INSTALLED  #: a test below it belongs to the suite
LISTENER = "smp-conformance"  #: the name of the plugin by which the suite hears reports
OUTPUT = "smp_conformance"  #: the key of the suite's data in the output of xdist's workers
REQUIREMENT = "requirement"  #: the property of a report that tells which requirement was tested


def _options() -> ModuleType:
    """The suite's module of options, by its file: its package must not be imported here."""
    where = importlib.util.spec_from_file_location(
        "pytest_smp._suite_options", _INSTALLED / "session" / "options.py"
    )
    assert where is not None
    assert where.loader is not None
    module = sys.modules[where.name] = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


_OPTIONS = _options()
pytest_addoption = _OPTIONS.add_options


@pytest.hookimpl(tryfirst=True)  # --smp-selftest changes an option of the ranks before it is read
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "requirement(id): the requirement that a property of `conformance` tests"
    )
    _register_profile(str(config.getoption("--hypothesis-profile", None)))
    door = _Door(config)
    config.pluginmanager.register(door, "smp-conformance-door")
    if config.getoption("smp_report") and not hasattr(config, "workerinput"):
        from pytest_smp.report import Writer

        config.pluginmanager.register(Writer(config, lambda: door.is_open), "smp-report")
    _follow_moved_files(config)
    given = _OPTIONS.given(config)
    if given or any(leads_in(config, argument) for argument in config.args):
        door.open(given or _NAME)


#: Modules beside the suite's properties that make assertions for them.
REWRITTEN = [f"{_NAME}.cases.{name}" for name in ("keras_script", "precision_runs", "tensors")]

#: Profiles of Hypothesis: the number of examples, and whether all sessions draw the same ones.
PROFILES = {"smp-quick": (20, True), "smp-certify": (400, False)}


def _register_profile(name: str) -> None:
    """Register a profile of the suite that the session asks for, before Hypothesis's own plugin loads it."""
    if name in PROFILES:
        from hypothesis import settings  # not at the top: a session without properties does without

        examples, derandomize = PROFILES[name]
        # The profile of CI=true is derandomised and has no database.
        parent = settings.get_profile("default")
        settings.register_profile(
            name, parent, max_examples=examples, derandomize=derandomize, print_blob=True
        )


def _follow_moved_files(config: pytest.Config) -> None:
    """Replace the former address of a file, ``conformance.test_x`` or ``conformance/test_x.py``, by today's, and warn
    of it once.
    """
    for at, argument in enumerate(config.args):
        now = _moved_module(config, argument) or _moved_path(config, argument)
        if now is not None:
            config.args[at] = now
            if not hasattr(config, "workerinput"):
                what = f"--pyargs {argument}" if config.option.pyargs else argument
                moved = f"{what} has moved: use {now}"
                try:
                    config.issue_config_time_warning(DeprecationWarning(moved), stacklevel=2)
                except DeprecationWarning:  # where warnings are errors, as in a clone
                    raise pytest.UsageError(moved) from None


def _moved_module(config: pytest.Config, argument: str) -> str | None:
    package, _, rest = argument.partition(".")
    moved = rest.startswith("test_") and _by_name(config, argument) and _other() is None
    return f"{package}.suite.{rest}" if moved else None


def _moved_path(config: pytest.Config, argument: str) -> str | None:
    name, colons, test = argument.partition("::")
    path = config.invocation_params.dir / name
    if path.parent != HERE or path.exists() or not (HERE / "suite" / path.name).is_file():
        return None
    return f"{Path(name).parent / 'suite' / path.name}{colons}{test}"


def leads_in(config: pytest.Config, argument: str) -> bool:
    """Return whether an argument of the command line names the suite or a file in it."""
    name = argument.partition("::")[0]
    if _by_name(config, argument):
        return _other() is None
    return (config.invocation_params.dir / name).is_relative_to(HERE)


def _by_name(config: pytest.Config, argument: str) -> bool:
    name = argument.partition("::")[0]
    return bool(config.option.pyargs) and name.partition(".")[0] == _NAME


class _Door:
    """Loads the suite's plugin at the first sign that the session needs it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._plugin: Any = None

    @property
    def is_open(self) -> bool:
        """True if the suite's plugin is loaded."""
        return self._plugin is not None

    def open(self, why: str) -> Any:
        """The suite's plugin, loaded at the first call.

        Raises pytest.UsageError if the package of its name is another.
        """
        if self._plugin is not None:
            return self._plugin
        other = _other()
        if other is not None:
            raise pytest.UsageError(
                f"{why}: pytest-smp's suite is the package {_NAME!r}, and {other}: run the suite from "
                f"another folder, by `pytest` and not by `python -m pytest`, without PYTHONPATH"
            )
        # The asserts of these modules must also hold under `python -O`. pytest rewrites an installed
        # plugin's modules by itself, and those of a working copy only when told.
        pytest.register_assert_rewrite(*REWRITTEN)
        manager = self._config.pluginmanager
        manager.register(importlib.import_module(f"{_NAME}.mutants.command"), "smp-selftest")
        self._plugin = importlib.import_module(f"{_NAME}.session.plugin")
        if not manager.is_registered(self._plugin):
            manager.register(self._plugin, "smp-conformance-plugin")
        return self._plugin

    def pytest_report_header(self) -> str | None:
        asked = any(_by_name(self._config, argument) for argument in self._config.args)
        if self._plugin is not None or not asked:
            return None
        return f"{_NAME}: {_other()}; the suite of pytest-smp stands back"

    # Late signs: pytest has already listed the plugins that it calls, without the suite's.

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        path = getattr(collector, "path", None)
        if self._plugin is None and path is not None and path.is_relative_to(HERE):
            plugin = self.open(str(path))
            plugin.pytest_sessionstart(collector.session)
            plugin.pytest_collectstart(collector)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = getattr(report, "user_properties", ())
        if self._plugin is None and any(name == REQUIREMENT for name, _ in properties):
            self._listener().pytest_runtest_logreport(report)

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if self._plugin is None and OUTPUT in getattr(node, "workeroutput", {}):
            self._listener().pytest_testnodedown(node)

    def _listener(self) -> Any:
        """The listener to reports of xdist's workers; this process did not collect the suite itself."""
        self.open("a worker of xdist").started(self._config)
        return self._config.pluginmanager.get_plugin(LISTENER)


def _other() -> str | None:
    """A sentence on the package that Python finds under the suite's name; None if the package is the suite."""
    try:
        found = importlib.util.find_spec(_NAME)
    except (ImportError, ValueError):
        found = None
    if found is None:
        return f"Python finds no package {_NAME!r}"
    places = [*(found.submodule_search_locations or ()), *([found.origin] if found.origin else ())]
    if any(Path(place).resolve() == _INSTALLED.resolve() for place in places):
        return None
    return f"Python finds {found.origin or places[0]} under that name"
