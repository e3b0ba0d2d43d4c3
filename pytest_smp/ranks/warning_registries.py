"""The warnings that were shown once and are not shown again: a process has them, and on `sim` each rank its own.

Python notes them in ``__warningregistry__`` of a module's globals, with the version of the filters. A change of the
filters raises the version, and a registry of another version counts as empty. So at a hand-over the contents of the
registries are exchanged, and have the version that the filters have by then.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

_Registry = dict[Any, Any]


class WarningRegistries:
    """The registries in which ranks of one run have warnings, and their contents by rank; the controller is None."""

    def __init__(self) -> None:
        self._registries: list[_Registry] = []
        self._version = 0  # that of the filters, once there is a registry
        self._contents: dict[int | None, list[_Registry]] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While entered, warnings that are shown and changes of filters are noticed."""
        module: Any = warnings
        show, mutated = module._showwarnmsg, module._filters_mutated

        def show_and_note(message: warnings.WarningMessage) -> None:
            self._note_registries()
            show(message)

        def raise_version() -> None:
            mutated()
            self._version += 1

        module._showwarnmsg, module._filters_mutated = show_and_note, raise_version
        try:
            yield
        finally:
            module._showwarnmsg, module._filters_mutated = show, mutated

    def switch(self, leaving: int | None, entering: int | None) -> None:
        """Put away what ``leaving`` has been shown, and put back what ``entering`` has."""
        if not self._registries:
            return
        self._contents[leaving] = [
            dict(registry) if registry.get("version") == self._version else {}
            for registry in self._registries
        ]
        wanted = self._contents.get(entering, [])
        missing: _Registry = {}  # of registries that were noted after the last turn of ``entering``
        for registry, content in itertools.zip_longest(self._registries, wanted, fillvalue=missing):
            registry.clear()
            registry.update(content, version=self._version)

    def _note_registries(self) -> None:
        """Note the registries of the modules on the stack: one of them has the warning that is shown, by any
        ``stacklevel``.
        """
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            registry = frame.f_globals.get("__warningregistry__")
            if registry is not None:
                self._version = max(self._version, registry.get("version", 0))
                if not any(registry is known for known in self._registries):
                    self._registries.append(registry)
            frame = frame.f_back
