"""Backends that torch knows by a name: ``torch:NAME``, or ``torch:NAME@package.module`` where a
module has to be imported for torch to know it.

A process group that registers itself by an entry point of torch's own (group ``torch.backends``) is
there as soon as torch is imported, and needs no module.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

from pytest_smp.ranks.capabilities import EVERYTHING, Capabilities
from pytest_smp.ranks.protocols import Backend, Executor, Factory
from pytest_smp.ranks.torch_claims import GLOO
from smp_core.errors import BackendError

PREFIX = "torch:"


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """The facts about one of torch's process groups. By default every capability is claimed, and so tested."""

    capabilities: Capabilities = EVERYTHING
    expectations: str | None = None
    module: str = ""  # of torch's, which registers it
    synchronous_sends: bool = False


_KNOWN = {
    "gloo": _Known(GLOO, "conformance:expected/gloo.toml", synchronous_sends=True),
    "fake": _Known(module="torch.testing._internal.distributed.fake_pg"),
}
#: torch's process group for ranks that are threads. Rank processes cannot form it.
_REMOVED = "threaded"


def torch_named(name: str) -> Backend:
    """The backend ``torch:NAME`` or ``torch:NAME@package.module``.

    Imports nothing yet. Raises BackendError if NAME or the module is left out, or if NAME is one
    that was removed.
    """
    plain, at, module = name.removeprefix(PREFIX).partition("@")
    if not plain or (at and not module):
        raise BackendError(
            f"backend {name!r}: write torch:NAME, or torch:NAME@package.module where importing a "
            "module is what makes the name known to torch"
        )
    if plain.lower() == _REMOVED:
        raise BackendError(
            f"backend {name!r} was removed: it is a process group of torch's own test suite, for ranks "
            "that are threads. For ranks that are threads of this process take --smp-backend=sim; for "
            "rank processes and a process group of torch take --smp-backend=gloo"
        )
    known = _KNOWN.get(plain.lower(), _Known())
    return _backend(name, f"the process group that torch knows as {plain}", plain, module, known)


def torch_backend(
    name: str,
    *,
    summary: str,
    registers: str = "",
    capabilities: Capabilities = EVERYTHING,
    expectations: Path | str | None = None,
    synchronous_sends: bool = False,
) -> Backend:
    """Make a third party's backend around a process group that torch knows as ``name``, on the `pool`
    executor. An entry point of the group ``smp.backends`` may name the returned backend.

    Args:
        name: the process group's name in torch, and the backend's.
        summary: a description in one line.
        registers: a module whose import calls ``torch.distributed.Backend.register_backend``. Every
            rank imports the module after it was forked.
        capabilities: the backend's claims.
        expectations: the backend's file of expected failures. See Backend.
        synchronous_sends: True if every send ends only when its receive has been posted. Leave it False
            if only some do: the board then takes no send for a wait.
    """
    known = _Known(capabilities, synchronous_sends=synchronous_sends)
    made = _backend(name, summary, name, registers, known)
    return dataclasses.replace(made, expectations=expectations)


def _backend(name: str, summary: str, plain: str, module: str, known: _Known) -> Backend:
    def open_executor() -> Executor:
        _check(plain, module or known.module)
        from pytest_smp.ranks.processes.executor import ProcessExecutor
        from pytest_smp.ranks.processes.fork_pool import LocalPool

        factory = Factory(
            "pytest_smp.ranks.processes.torch_fabric:open_torch",
            (plain.lower(), module or known.module),
        )
        return ProcessExecutor(LocalPool, factory, synchronous_sends=known.synchronous_sends)

    return Backend(name, summary, open_executor, known.capabilities, known.expectations)


def _check(plain: str, module: str) -> None:
    """Raise BackendError if torch does not know the name, or was built without it."""
    import torch.distributed as dist

    if module:
        importlib.import_module(module)
    built = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "ucc": dist.is_ucc_available,
        "mpi": dist.is_mpi_available,
        "xccl": dist.is_xccl_available,
    }
    listed = [each for each in dist.Backend.backend_list if each != dist.Backend.UNDEFINED]
    there = sorted({each for each in listed if built.get(each, lambda: True)()} | set(_KNOWN))
    if plain.lower() in there:
        return
    if plain.lower() in listed:
        raise BackendError(f"this torch was built without {plain}; it has {', '.join(there)}")
    after = f" after the import of {module}" if module else ""
    hint = f". If a module registers it, name that, too: {PREFIX}{plain}@package.module"
    raise BackendError(
        f"torch knows no backend {plain!r}{after}; it has {', '.join(there)}{'' if module else hint}"
    )
