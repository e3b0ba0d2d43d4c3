"""The old addresses of what backends of others import: `smp_core.backends` and what was public below it.

They work for one version, with a DeprecationWarning that names the new address. ``install`` is
called by the plugin, so a module that pytest loads finds them.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

_RANKS = "pytest_smp.ranks"
_TRANSPORT = "smp_core.transport"

#: Where the names of an old module are now, in the order in which they are looked up.
MODULES = {
    "smp_core.backends": (f"{_RANKS}.backends", f"{_RANKS}.torch_backends"),
    "smp_core.backends.base": (f"{_RANKS}.protocols", f"{_TRANSPORT}.protocols"),
    "smp_core.backends.capabilities": (f"{_RANKS}.capabilities",),
    "smp_core.backends.faults": (f"{_RANKS}.faults",),
    "smp_core.backends.schedule": (f"{_RANKS}.schedule",),
}

#: Names of old modules that have another name now: the new module, and the name there.
RENAMED = {
    "smp_core.backends.base": {
        "Host": (f"{_RANKS}.protocols", "Executor"),
        "HostOptions": (f"{_RANKS}.protocols", "ExecutorOptions"),
        "Recorder": (f"{_TRANSPORT}.protocols", "CallRecorder"),
        "Seat": (f"{_TRANSPORT}.protocols", "RankEnvironment"),
    },
}


class _Old(MetaPathFinder, Loader):
    """Finds the old modules and makes them: empty ones that look names up in the new ones."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name == "smp_core.backends")

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__

        def find(attribute: str) -> Any:
            if not attribute.startswith("__"):
                same = [(address, attribute) for address in MODULES[name]]
                renamed = RENAMED.get(name, {}).get(attribute)
                for address, today in [renamed] if renamed else same:
                    new = importlib.import_module(address)
                    if hasattr(new, today):
                        warnings.warn(
                            f"{name}.{attribute} is {address}.{today} now; the old address goes "
                            "with the next version",
                            DeprecationWarning,
                            stacklevel=2,
                        )
                        return getattr(new, today)
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

        module.__getattr__ = find  # type: ignore[method-assign]


def install() -> None:
    """Have the old addresses found, once."""
    if not any(isinstance(finder, _Old) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Old())  # before empty folders that an older version left
