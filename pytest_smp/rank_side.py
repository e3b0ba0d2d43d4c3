"""The part of pytest on rank processes: importing test modules as the controller did, rewriting and
explaining asserts, loading conftest modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_smp.coverage import LinesOfRanks


@dataclasses.dataclass(frozen=True)
class Prelude:
    """Makes a pytest configuration like the controller's in the process that rank processes come from.

    Plugins and conftest modules are imported there once more, as in xdist's workers. Unlike there, no
    hook of a session is called, so they configure nothing.
    """

    args: tuple[str, ...]
    directory: str
    path: tuple[str, ...]
    must_rewrite: frozenset[str]
    modules: tuple[str, ...] = ()  # imported last
    lines: LinesOfRanks | None = None  # measures coverage, if the controller does

    @classmethod
    def of(
        cls, config: pytest.Config, modules: Iterable[str] = (), lines: LinesOfRanks | None = None
    ) -> Prelude:
        """The controller's configuration, as far as ranks need it."""
        from _pytest.assertion.rewrite import assertstate_key

        called_in = config.invocation_params.dir
        args = [str(called_in / each.partition("::")[0]) for each in config.args]
        args = [each for each in args if os.path.exists(each)]
        args += [
            f"--rootdir={config.rootpath}",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:terminalreporter",
        ]
        if config.inipath is not None:
            args += ["-c", str(config.inipath)]
        # This very module is imported already, and a project may turn warnings into errors.
        args += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        args.append(f"--import-mode={config.getoption('importmode')}")
        if config.option.confcutdir:
            args.append(f"--confcutdir={config.option.confcutdir}")
        verbose = config.getoption("verbose")
        args += ["-" + ("v" if verbose > 0 else "q") * abs(verbose)] if verbose else []
        for override in config.getoption("override_ini") or ():
            args += ["-o", override]
        state: Any = config.stash.get(assertstate_key, None)
        for name in config.getoption("plugins") or ():
            args += ["-p", name]
        hook = getattr(state, "hook", None)
        marked = frozenset(
            (
                *getattr(hook, "_must_rewrite", ()),
                # Modules that pytest rewrites by their names or as arguments of the command line.
                *(
                    name
                    for name, module in list(sys.modules.items())
                    if hook is not None
                    and getattr(getattr(module, "__spec__", None), "loader", None) is hook
                ),
            )
        )
        return cls(tuple(args), os.getcwd(), tuple(sys.path), marked, tuple(modules), lines)

    def __call__(self) -> None:
        from _pytest.assertion import truncate, util
        from _pytest.assertion.rewrite import assertstate_key
        from _pytest.config import get_config
        from _pytest.pathlib import import_path

        from pytest_smp.ranks import serialization
        from pytest_smp.ranks.processes import measuring

        os.chdir(self.directory)
        sys.path[:] = self.path
        config = get_config(list(self.args))
        config.parse(list(self.args))
        hook: Any = config.stash[assertstate_key].hook
        if hook is not None:
            hook.mark_rewrite(*self.must_rewrite - set(sys.modules))

        def load(name: str, file: str) -> ModuleType:
            with contextlib.suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(name)
                if spec is not None and spec.origin is not None and _same(spec.origin, file):
                    return importlib.import_module(name)
            import_path(
                Path(file),
                mode=config.getoption("importmode"),
                root=config.rootpath,
                consider_namespace_packages=config.getini("consider_namespace_packages"),
            )
            return sys.modules[name]

        def explain(op: str, left: object, right: object) -> str | None:
            for lines in config.hook.pytest_assertrepr_compare(
                config=config, op=op, left=left, right=right
            ):
                if lines:
                    kept = truncate.materialize_with_truncation(lines, config)
                    if kept:
                        text = "\n~".join(line.replace("\n", "\\n") for line in kept)
                        return text.replace("%", "%%")
            return None

        serialization.Importer.load = staticmethod(load)
        util._reprcompare, util._config = explain, config
        import pytest_smp.running  # noqa: F401  what arguments come packed in

        for module in self.modules:
            importlib.import_module(module)
        if self.lines is not None:
            self.lines.prepare()
            measuring.install(self.lines)


def _same(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.samefile(one, other)
