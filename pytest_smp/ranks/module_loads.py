"""A call each time that one of some modules is loaded, before the code that imports it goes on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ModuleLoads(MetaPathFinder):
    """While entered, ``act()`` is called after a module of these names has been loaded."""

    def __init__(self, names: Collection[str], act: Callable[[], None]) -> None:
        self._names, self._act = names, act

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # a body may have put another list in its place
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as the finders behind this one do, with a loader that calls."""
        if fullname not in self._names:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = load  # a reload, and a run that has ended, call nothing
                load(module)
                self._act()

            loader.exec_module = exec_module
        return spec
