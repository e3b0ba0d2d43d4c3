"""torch's number of compute threads, on which the last bits of some kernels depend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_compute_thread() -> Iterator[None]:
    """Compute on the calling thread alone, as ranks do; also a decorator.

    An oracle that promises bits uses this: the process may have as many threads as cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
