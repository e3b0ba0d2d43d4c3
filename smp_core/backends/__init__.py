"""Backends: how ranks come to exist (host) and what they exchange data through (fabric).

The table of names, and how other people's backends are found: by entry point (group
``smp.backends``), or as ``module:attribute``.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import entry_points

from smp_core.backends.base import PROTOCOL_VERSION, Backend, Host
from smp_core.errors import BackendError

ENTRY_POINTS = "smp.backends"


def _open_sim() -> Host:
    from smp_core.backends.fabrics.sim import open_host

    return open_host()


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "sim", "simulated ranks: threads of this process, one running at a time", _open_sim
        ),
    )
}


def find_backend(name: str) -> Backend:
    """The backend of this name: one of ours, one of an entry point, or ``module:attribute``.

    Raises BackendError if there is none (naming the nearest), if its module cannot be imported, or
    if what is found is no Backend.
    """
    backend = BACKENDS.get(name)
    if backend is not None:
        return backend
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
        f"and module:attribute{hint}"
    )


def _load(name: str, reference: str) -> Backend:
    module_name, _, attribute = reference.partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        raise BackendError(
            f"backend {name!r}: module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise BackendError(
                f"backend {name!r}: module {module_name!r} has no attribute {attribute!r}"
            ) from None
    if not isinstance(found, Backend):
        raise BackendError(
            f"backend {name!r}: {reference} is {type(found).__name__}, not a "
            "smp_core.backends.base.Backend"
        )
    return found


def open_backend(name: str) -> Host:
    """Open the host of the backend of this name.

    Raises BackendError if there is none, it cannot be opened, or it was written for another version
    of the protocol.
    """
    try:
        host = find_backend(name).open_host()
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(
            f"backend {name!r} cannot be opened: {type(error).__name__}: {error}"
        ) from error
    protocol = getattr(host, "protocol", None)
    if protocol != PROTOCOL_VERSION:
        written = (
            "is no host: it names no" if protocol is None else f"was written for {protocol} of the"
        )
        raise BackendError(
            f"backend {name!r}: what it opens {written} protocol; this version has {PROTOCOL_VERSION}"
        )
    return host
