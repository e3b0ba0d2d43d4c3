"""The calls by which torch's C++ goes past a process group, or a work, that is a Python class.

torch calls most operations of a Python process group by name. Some operations are looked up in a C++ backend
that such a group does not have ("No backend type associated with device type cpu"), and one is asked
of a work whose Python half may be gone by then. ``install`` mends each, for this project's groups only: all
others keep torch's own kernels.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from smp_core.transport.checked_group import CheckedGroup

Tensor = torch.Tensor
_c10d: Any = torch._C._distributed_c10d
_resolve: Any = c10d._resolve_process_group  # type: ignore[attr-defined]
_NAMESPACE = "_c10d_functional"


def _group(name: str) -> Any:
    return _resolve(c10d.GroupName(name))


def _all_gather_into_tensor_out(
    input: Tensor, group_size: int, name: str, *, out: Tensor
) -> Tensor:
    options = _c10d.AllgatherOptions()
    options.asyncOp = True
    _c10d._register_work(out, _group(name)._allgather_base(out, input, options))
    return out


def _batch_p2p_ops(
    operations: Sequence[str],
    peers: Sequence[int],
    tags: Sequence[int],
    tensors: Sequence[Tensor],
    name: str,
) -> list[Tensor]:
    group, results = _group(name), []
    for operation, peer, tag, tensor in zip(operations, peers, tags, tensors, strict=True):
        if operation == "isend":
            work, result = group.send([tensor], peer, tag), tensor.new_empty(0)  # torch's token
        else:
            work, result = group.recv([tensor], peer, tag), tensor
        _c10d._register_work(result, work)
        results.append(result)
    return results


# The operations that torch's kernel looks up in a C++ backend: by name, with the position of the group's name.
_OPERATIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "all_gather_into_tensor_out": (_all_gather_into_tensor_out, 2),
    "batch_p2p_ops": (_batch_p2p_ops, 4),
}


def _operation(name: str, ours: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Ours for our groups, torch's own kernel for all others."""
    packet = getattr(getattr(torch.ops, _NAMESPACE), name).default
    kernel = torch.library.get_kernel(f"{_NAMESPACE}::{name}", "CPU")

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(_group(args[at]), CheckedGroup):
            return ours(*args, **kwargs)
        return kernel.call_boxed(keys, *args, **kwargs)

    call.__name__ = packet.__name__
    return call


# Works that C++ holds and asks for more than once, by their holder. The Python half of a work
# answers, and ends with its last reference in Python.
_held: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _hold_forward_work() -> None:
    """DDP with ``join`` gives the reducer a work, which waits for it and then asks its future."""
    set_handle = _c10d.Reducer._set_forward_pass_work_handle

    @functools.wraps(set_handle)
    def set_and_hold(reducer: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
        _held[reducer] = work
        return set_handle(reducer, work, *args, **kwargs)

    _c10d.Reducer._set_forward_pass_work_handle = set_and_hold


def _allow_monitored_barrier() -> None:
    """torch's function knows Gloo by its name and refuses all others."""
    native = c10d.monitored_barrier

    @functools.wraps(native)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> Any:
        chosen = dist.group.WORLD if group is None else group
        if isinstance(chosen, CheckedGroup):
            return chosen.monitored_barrier(timeout, wait_all_ranks)
        return native(group, timeout, wait_all_ranks)

    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


@functools.cache
def install() -> Any:
    """Make these operations work for this project's process groups; called once per process."""
    library: Any = torch.library.Library(_NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    for name, (ours, at) in _OPERATIONS.items():
        library.impl(name, _operation(name, ours, at), "CPU", with_keyset=True)
    _hold_forward_work()
    _allow_monitored_barrier()
    return library  # its registrations live as long as it does
