"""SMP's own import names, ``smdistributed.modelparallel.torch`` and its like, for modules of this package (API 1.1).
Those of SMDDP, which register its backend with torch, are among them.

A script that was written for SMP imports ``smdistributed``. After ``install_import_names()`` its imports give the very
modules that ``import smp_core.torch`` gives: a name is an entry of ``sys.modules`` beside that of the module, so no
module is executed twice and each class exists once. Nothing is imported before the script imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from smp_core.errors import ImportNameError, RealInstallationError

__all__ = ["import_names_are_installed", "install_import_names", "remove_import_names"]

_ROOT = "smdistributed"
_SMP = "smdistributed.modelparallel"
_SMDDP = "smdistributed.dataparallel"

#: The packages above the modules, which are made, with their attributes. Clients compare ``__version__`` with 1.10 and
#: 1.15, the last one with news of the API that is described.
PACKAGES: Mapping[str, Mapping[str, object]] = {
    _ROOT: {},
    _SMP: {"__version__": "1.15.0"},
    f"{_SMP}.backend": {},
    _SMDDP: {},
    f"{_SMDDP}.torch": {},
}

#: The modules of this package by import name, each below those that it is in.
MODULES: Mapping[str, str] = {
    f"{_SMP}.backend.exceptions": "smp_core.errors",
    f"{_SMP}.torch": "smp_core.torch",
    f"{_SMP}.tensorflow": "smp_core.tensorflow",
    **{
        f"{_SMP}.tensorflow.{name}": f"smp_core.tensorflow.{name}"
        for name in ("checkpoint", "core", "model", "step", "utils")
    },
    f"{_SMDDP}.torch.torch_smddp": "smp_core.transport.smddp",
    f"{_SMDDP}.torch.distributed": "smp_core.transport.smddp.distributed",
    f"{_SMDDP}.torch.parallel": "smp_core.transport.smddp.parallel",
    f"{_SMDDP}.torch.parallel.distributed": "smp_core.transport.smddp.parallel.distributed",
    **{
        f"{_SMP}.torch.{name}": f"smp_core.torch.{name}"
        for name in (
            "amp",
            "exceptions",
            "model",
            "nn",
            "nn.huggingface",
            "nn.huggingface.bert",
            "nn.huggingface.gpt2",
            "nn.huggingface.gptj",
            "nn.huggingface.gptneo",
            "nn.huggingface.roberta",
            "optimizers",
            "patches",
            "patches.checkpoint",
            "state_mod",
            "step",
            "utils",
        )
    },
}


#: The name by which scripts with ``"horovod": True`` import Horovod, and the module that is it where none is installed.
HOROVOD = "horovod.tensorflow", "smp_core.horovod"


class _HorovodNames(MetaPathFinder, Loader):
    """Finds Horovod's names where no finder before it does, so that an installed Horovod wins.

    Code that only asks whether there is Horovod finds none.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        above, _, _ = HOROVOD[0].rpartition(".")
        if name not in (above, HOROVOD[0]) or (name != above and not _stands_in_for_horovod()):
            return None
        return None if _only_asks() else ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name, target = HOROVOD
        if module.__name__ == name:
            sys.modules[name] = importlib.import_module(target)


class _Names(MetaPathFinder, Loader):
    """Finds the import names, and no other; imports of ``smdistributed`` go no further than here."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != _ROOT:
            return None
        if name in PACKAGES or name in MODULES:
            return ModuleSpec(name, self, is_package=name in PACKAGES)
        if name.rpartition(".")[0] in PACKAGES and _only_asks():
            return None  # no other finder finds it, these packages have no folder
        # The next finder would look into the folder of the module above, and load ours a second time.
        raise ImportNameError(f"{name}: there is no such module here. See docs/spec/api.md#1.1")

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in PACKAGES:
            vars(module).update(PACKAGES[name])
            return
        # With all below it: an import of torch.step alone would make smp.step, the decorator, the module.
        below = [each for each in MODULES if f"{each}.".startswith(f"{name}.")]
        sys.modules.update({each: importlib.import_module(MODULES[each]) for each in below})


def install_import_names() -> None:
    """Have imports of ``smdistributed.modelparallel`` give the modules of this package, in this process, until
    ``remove_import_names()``, and ``horovod.tensorflow`` a stand-in where Horovod is not installed.
    Installing twice is the same as once.

    Raises RealInstallationError, and changes nothing, if there is another ``smdistributed``: imported, installed, or a
    folder of that name on ``sys.path``.
    """
    if any(isinstance(finder, _Names) for finder in sys.meta_path):
        return
    _refuse("smp_core.install_import_names", _another())
    sys.meta_path.insert(0, _Names())
    if not any(isinstance(finder, _HorovodNames) for finder in sys.meta_path):
        sys.meta_path.append(_HorovodNames())


def check_import_path(call: str, path: Sequence[str]) -> None:
    """Raise RealInstallationError if imports from the folders of ``path`` would find another ``smdistributed``; the
    message names ``call``.
    """
    _refuse(call, _place(PathFinder.find_spec(_ROOT, path)))


def remove_import_names() -> None:
    """Take the import names back; modules that were imported by them stay what they are. Without them, do nothing."""
    finders = (_Names, _HorovodNames)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, finders)]
    if _stands_in_for_horovod():
        for name in (HOROVOD[0].partition(".")[0], HOROVOD[0]):
            sys.modules.pop(name, None)
    if _is_ours(sys.modules.get(_ROOT)):
        for name in (*PACKAGES, *MODULES):
            sys.modules.pop(name, None)


def import_names_are_installed() -> bool:
    """Return whether an import name leads to a module of this package, also if only some are left in
    ``sys.modules``.
    """
    here = any(isinstance(finder, _Names) for finder in sys.meta_path)
    return here or _is_ours(sys.modules.get(_ROOT))


def _stands_in_for_horovod() -> bool:
    module = sys.modules.get(HOROVOD[0].partition(".")[0])
    return isinstance(getattr(module, "__loader__", None), _HorovodNames)


def _only_asks() -> bool:
    """True if ``importlib.util.find_spec`` has called the finder that has called this, and not an import.

    Both call ``_find_spec`` of the import system, and this calls the finders.
    """
    asking = sys._getframe(2).f_back
    return asking is not None and asking.f_globals.get("__name__") == importlib.util.__name__


def _refuse(call: str, place: str | None) -> None:
    """Raise RealInstallationError for another ``smdistributed`` at this place, if there is one."""
    if place is not None:
        raise RealInstallationError(
            f"{call}: there is another {_ROOT} already: {place}. Remove it, or take an "
            "environment without it; or import smp_core.torch as smp in the script"
        )


def _is_ours(module: ModuleType | None) -> bool:
    return isinstance(getattr(module, "__loader__", None), _Names)


def _another() -> str | None:
    """The place of a ``smdistributed`` that is not of this module, in words; None if there is none."""
    module = sys.modules.get(_ROOT)
    if _is_ours(module):
        return None  # the finder alone was taken out of sys.meta_path
    if module is not None:
        return f"{module!r} has been imported"
    return _place(importlib.util.find_spec(_ROOT))


def _place(spec: ModuleSpec | None) -> str | None:
    if spec is None:
        return None
    return spec.origin or ", ".join(spec.submodule_search_locations or ()) or repr(spec)
