"""Backends: how ranks come to exist (executor) and what they exchange data through (fabric).

The table of names, and how other people's backends are found: by entry point (group
``smp.backends``), or as ``module:attribute``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import operator
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from pytest_smp.ranks.capabilities import MOVED_BY_CALLS, Capabilities
from pytest_smp.ranks.protocols import PROTOCOL_VERSION, Backend, Executor, ExecutorOptions, Factory
from pytest_smp.ranks.torch_backends import PREFIX as TORCH
from pytest_smp.ranks.torch_backends import torch_named
from pytest_smp.ranks.torch_claims import GLOO
from smp_core.errors import BackendError, SmpError
from smp_core.transport import torch_parts
from smp_core.transport.protocols import SMDDP

ENTRY_POINTS = "smp.backends"
EXTERNAL = "external"


# pytest leaves these frames out below an error that we raise on purpose; a bug of ours shows them.
__tracebackhide__ = operator.methodcaller("errisinstance", SmpError)


def _open_sim() -> Executor:
    torch_parts.require("the sim backend")  # first: the next import looks these parts up
    from pytest_smp.ranks.sim.fabric import open_executor

    return open_executor()


_GLOO = Factory("pytest_smp.ranks.processes.torch_fabric:open_gloo")
_SMDDP = Factory(
    "pytest_smp.ranks.processes.torch_fabric:open_torch", (SMDDP, "smp_core.transport.smddp")
)
_MPI = Factory("smp_core.transport.mpi:open_fabric", loses_tensors=True)


def _open_gloo() -> Executor:
    from pytest_smp.ranks.processes.executor import ProcessExecutor
    from pytest_smp.ranks.processes.fork_pool import LocalPool

    return ProcessExecutor(LocalPool, _GLOO, synchronous_sends=True)


def _open_smddp() -> Executor:
    from pytest_smp.ranks.processes.executor import ProcessExecutor
    from pytest_smp.ranks.processes.fork_pool import LocalPool

    torch_parts.require("the smddp backend")
    return ProcessExecutor(LocalPool, _SMDDP, synchronous_sends=True, ordered_receives=True)


def _open_mpi() -> Executor:
    from pytest_smp.ranks.mpi.mpiexec import MpiexecPool
    from pytest_smp.ranks.processes.executor import ProcessExecutor

    return ProcessExecutor(MpiexecPool, _MPI, synchronous_sends=True, ordered_receives=True)


#: The fabrics that a launcher's ranks can exchange data through, by name.
_LAUNCHED = {"gloo": _GLOO, "mpi": _MPI}


def _external(name: str) -> Backend:
    """The backend ``external``, or ``external:NAME``: a launcher's ranks, and the fabric of NAME."""
    fabric = name.removeprefix(EXTERNAL).removeprefix(":")
    if not fabric:
        external = sys.modules.get("pytest_smp.ranks.processes.external")
        job = None if external is None else external.ExternalJob.current
        fabric = "mpi" if job is None else job.fabric
    if fabric not in _LAUNCHED:
        raise BackendError(
            f"backend {name!r}: a launcher's ranks exchange data through "
            f"{' or '.join(_LAUNCHED)}: --smp-backend=external:gloo"
        )

    def open_executor() -> Executor:
        from pytest_smp.ranks.processes.executor import ProcessExecutor
        from pytest_smp.ranks.processes.external import ExternalPool

        return ProcessExecutor(
            ExternalPool,
            _LAUNCHED[fabric],
            synchronous_sends=True,
            ordered_receives=fabric == "mpi",
        )

    known = BACKENDS[fabric]
    return dataclasses.replace(
        known,
        name=name,
        summary=f"ranks that a launcher started, and {fabric}",
        open_executor=open_executor,
    )


def _open_external() -> Executor:
    return _external(EXTERNAL).open_executor()


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "sim", "simulated ranks: threads of this process, one running at a time", _open_sim
        ),
        Backend(
            "gloo",
            "local processes that stay warm, and torch's Gloo",
            _open_gloo,
            GLOO,
            "conformance:expected/gloo.toml",
        ),
        Backend(SMDDP, "local processes that stay warm, and shared memory", _open_smddp),
        Backend(EXTERNAL, "ranks that a launcher started: mpiexec, torchrun, srun", _open_external),
        Backend(
            "mpi",
            "processes of an MPI job, and a process group over mpi4py",
            _open_mpi,
            MOVED_BY_CALLS,
        ),
    )
}


def find_backend(name: str) -> Backend:
    """The backend of this name: one of ours, one of an entry point, or ``module:attribute``.

    Raises BackendError if there is none (naming the nearest), if its module cannot be imported, or
    if what is found is no Backend, or one whose fields are of wrong types.
    """
    if name == EXTERNAL or name.startswith(f"{EXTERNAL}:"):
        return _external(name)
    backend = BACKENDS.get(name)
    if backend is not None:
        return backend
    if name.startswith(TORCH):
        return torch_named(name)
    if ":" in name:
        return _load(name, name)
    theirs = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
    if name in theirs:
        return _load(name, theirs[name])
    known = [*BACKENDS, *theirs]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise BackendError(
        f"unknown backend {name!r}; there is {', '.join(map(repr, known))}, "
        f"torch:NAME, and module:attribute{hint}"
    )


@contextlib.contextmanager
def _blaming(what: str, *passed: type[Exception]) -> Iterator[None]:
    """Turn whatever other people's code raises into a BackendError, which says what failed.

    Not only Exceptions: a module may end in ``sys.exit``, or in a test framework's ``skip``.
    ``passed`` are left alone.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, *passed)):
            raise
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # a broken __str__
            text = type(error).__name__
        raise BackendError(f"{what}: {text}") from error


#: A Backend's fields, each with the check of a value and the expected kind in words.
_FIELDS = (
    ("name", lambda value: isinstance(value, str) and value.strip(), "a text"),
    ("summary", lambda value: isinstance(value, str), "a text"),
    ("open_executor", callable, "callable"),
    ("capabilities", lambda value: isinstance(value, Capabilities), "a Capabilities"),
    (
        "expectations",
        lambda value: value is None or isinstance(value, (str, Path)),
        "a path, a text or None",
    ),
)


def _load(name: str, reference: str) -> Backend:
    module_name, _, attribute = reference.partition(":")
    with _blaming(f"backend {name!r}: module {module_name!r} cannot be imported"):
        found: object = importlib.import_module(module_name)
    for part in attribute.split("."):
        try:
            with _blaming(f"backend {name!r}: {reference} cannot be looked up", AttributeError):
                found = getattr(found, part)
        except AttributeError:
            raise BackendError(
                f"backend {name!r}: module {module_name!r} has no attribute {attribute!r}"
            ) from None
    if not isinstance(found, Backend):
        raise BackendError(
            f"backend {name!r}: {reference} is {type(found).__name__}, not a "
            "pytest_smp.ranks.protocols.Backend"
        )
    for field, fits, wanted in _FIELDS:
        value = getattr(found, field)
        if not fits(value):
            raise BackendError(
                f"backend {name!r}: the {field} of {reference} is not {wanted}, but of the type "
                f"{type(value).__name__}"
            )
    return found


def open_backend(name: str, options: ExecutorOptions | None = None) -> Executor:
    """Open the executor of the backend of this name, and give it the options.

    Raises BackendError if there is none, it cannot be opened, what it opens is no executor, or it was
    written for another version of the protocol. An executor that is refused is closed. Warns with
    UnknownTorchWarning, once, of a torch that was not tried.
    """
    backend = find_backend(name)
    torch_parts.warn()
    with _blaming(f"backend {name!r} cannot be opened", BackendError):
        executor = backend.open_executor()
    with _blaming(f"backend {name!r}: what it opens is no executor"):
        refused = _why_refused(executor)
    if refused is None:
        executor.configure(options or ExecutorOptions())
        return executor
    with contextlib.suppress(BackendError), _blaming("it is refused anyway"):
        executor.close()
    raise BackendError(f"backend {name!r}: what it opens {refused}")


_INHERIT = "; inherit from pytest_smp.ranks.protocols.Executor, which has the defaults"


def _why_refused(executor: object) -> str | None:
    protocol = getattr(executor, "protocol", None)
    if protocol is None:
        return f"is no executor: it names no protocol; this version has {PROTOCOL_VERSION}"
    if protocol != PROTOCOL_VERSION:
        return (
            f"was written for version {protocol} of the protocol; this one has {PROTOCOL_VERSION}: see "
            "docs/changelog.md"
        )
    for part in ("open", "close", "configure"):
        if not callable(getattr(executor, part, None)):
            return f"is no executor: it has no method {part}{_INHERIT}"
    for part in ("injects", "steady", "lost"):
        if not hasattr(executor, part):
            return f"is no executor: it has no {part}{_INHERIT}"
    return None
