"""Backends: how ranks come to exist (host) and what they exchange data through (fabric).

The table of names.
"""

from __future__ import annotations

import difflib

from smp_core.backends.base import PROTOCOL_VERSION, Backend, Host
from smp_core.errors import BackendError


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
    """The backend of this name. Raises BackendError, naming the nearest, if there is none."""
    backend = BACKENDS.get(name)
    if backend is None:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BackendError(
            f"unknown backend {name!r}; there is {', '.join(map(repr, BACKENDS))}{hint}"
        )
    return backend


def open_backend(name: str) -> Host:
    """Open the host of the backend of this name.

    Raises BackendError if there is none, or it is not for us.
    """
    host = find_backend(name).open_host()
    if host.protocol != PROTOCOL_VERSION:
        raise BackendError(
            f"backend {name!r} was written for protocol {host.protocol}; this version has {PROTOCOL_VERSION}"
        )
    return host
