"""The changes of `sim` to torch's private parts (smp_core/transport/torch_parts.py lists them).

torch.distributed keeps its state once per process (``distributed_c10d._world`` and a C++ registry
of group names). While a run lasts, rank threads get a state each; every other thread keeps the
process's own, so that a user's own torch.distributed tests in the same session are left alone.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import urllib.parse
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import _rendezvous_handlers as rendezvous_handlers

from pytest_smp.ranks.module_loads import ModuleLoads
from pytest_smp.ranks.sim import profiling
from smp_core.errors import ThreadError, UnsupportedError
from smp_core.transport import current_rank, native_calls
from smp_core.transport.torch_imports import install_import_defaults
from smp_core.transport.torch_world import RankWorld, install_joining

DEFAULT_NAME = "0"  # torch's own for the default process group: names are numbers

set_thread_isolation_mode = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
unregister_all_process_groups = c10d._unregister_all_process_groups  # type: ignore[attr-defined]
unregister_process_group = c10d._unregister_process_group  # type: ignore[attr-defined]
register_process_group = c10d._register_process_group  # type: ignore[attr-defined]
resolve_process_group = c10d._resolve_process_group  # type: ignore[attr-defined]
GroupName = c10d.GroupName
register_in_world = c10d._register_pg_in_world


class _OwnGroups(dict[Any, Any]):
    """A rank's groups; torch asks it first, and another rank's is refused by name, not as unknown."""

    def __contains__(self, group: object) -> bool:
        if not super().__contains__(group):
            context = getattr(group, "_context", None)
            if context is not None:
                context.check_thread("torch.distributed", "process group")
            return False
        return True

    def __missing__(self, group: object) -> Any:
        _ = group in self  # raises for another rank's
        raise KeyError(group)

    def get(self, group: object, default: Any = None) -> Any:
        return super().get(group, default) if group in self else default


class SimRankWorld(RankWorld):
    """torch.distributed's state, for one simulated rank, which refuses the groups of other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.pg_map, self.pg_group_ranks = _OwnGroups(), _OwnGroups()
        self._place = rank, size
        self.wait_timeout: timedelta | None = None  # that of init_process_group

    def place(self) -> tuple[int, int]:
        return self._place

    def rejoin(self, make: Callable[..., None]) -> None:
        rank, size = self._place
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        make("sim", rank=rank, world_size=size, store=store)

    def limit_waits(self, timeout: timedelta | None) -> None:
        self.wait_timeout = timeout


class _Router:
    """Stands in for ``_world``: each attribute is that of the calling thread's own state."""

    __slots__ = ("_original",)

    def __init__(self, original: Any) -> None:
        object.__setattr__(self, "_original", original)

    def _target(self) -> Any:
        context: Any = current_rank.current()
        if context is not None:
            world = context.fabric.torch_world()
            if context.scheduler.threads is not None:
                context.scheduler.threads.register_groups(context)
            return world
        current_rank.refuse_child_thread()
        return self._original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target(), name, value)


_exception_log = logging.getLogger(c10d_logger._c10d_logger.name)


def _not_on_ranks(record: logging.LogRecord) -> bool:
    """Drop what torch logs, arguments and all, when an exception passes through a call of a rank's.

    The exception is in the report; a line per rank and call would bury it.
    """
    return current_rank.current() is None


_full_message = c10d_logger._get_msg_dict


def _message(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The content of torch's log record; on a rank the function's name alone, since the full content
    describes the group, and a group of another rank refuses that.
    """
    if current_rank.current() is None:
        return _full_message(name, *args, **kwargs)
    return {"func_name": name}


@functools.lru_cache(maxsize=16)  # each run asks for the same ones
def _refusing(meet: Callable[..., Any]) -> Callable[..., Any]:
    """A way in which torch's processes find each other, refused where it would wait for other ranks.

    The wait would be in C++ with the turn in hand, so the other ranks would never come.
    """

    @functools.wraps(meet)
    def met(url: str, *args: Any, **kwargs: Any) -> Any:
        address = urllib.parse.urlsplit(url)
        told = dict(urllib.parse.parse_qsl(address.query))
        size = told.get("world_size", os.environ.get("WORLD_SIZE"))  # env:// says it there
        if current_rank.current() is not None and size != "1":
            raise UnsupportedError(
                f"init_process_group: {address.scheme}:// waits for other processes. {_REMEDY}"
            )
        return meet(url, *args, **kwargs)

    return met


_REMEDY = (
    "The ranks of sim are threads of one process. Their default process group is there from the start, and "
    "init_process_group with the rank and the size of the run joins it. "
    "For a process group of another backend run the ranks as processes (--smp-backend=gloo)"
)
#: Backends that wait in C++, while they are made, until all ranks have come.
_MEET = frozenset({"gloo", "nccl", "mpi", "ucc", "xccl", "undefined"})
make_group = c10d._new_process_group_helper


@functools.wraps(make_group)
def _made_alone(
    group_size: int, group_rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make a process group of any backend, unless that would wait for other ranks (UnsupportedError)."""
    # One name, or one for each kind of device: "cpu:gloo,cuda:nccl".
    names = str(backend).lower()
    meets = any(each.rpartition(":")[2] in _MEET for each in names.split(","))
    if meets and group_size != 1 and current_rank.current() is not None:
        raise UnsupportedError(
            f"init_process_group: a group of {group_size} ranks of backend {names!r} waits for other processes. "
            f"{_REMEDY}"
        )
    return make_group(group_size, group_rank, ranks, backend, *args, **kwargs)


def register_once(name: Any, group: Any) -> None:
    """Enter a group in torch's registry of the calling thread, unless it is there: a rank may have several threads."""
    try:
        resolve_process_group(name)
    except RuntimeError:
        register_process_group(name, group)


_PROCESS_CHECKPOINTS = "torch.distributed.checkpoint._async_process_executor"


def _refuse_process_checkpoints() -> None:
    """Let a rank make no process that saves: torch keeps one for all ranks of the process."""
    module = sys.modules.get(_PROCESS_CHECKPOINTS)
    executor: Any = getattr(module, "_ProcessBasedAsyncCheckpointExecutor", None)
    if executor is None or hasattr(executor.__init__, "__wrapped__"):
        return
    make = executor.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if current_rank.current() is not None:
            raise UnsupportedError(
                "async_save with AsyncCheckpointerType.PROCESS: the ranks of sim are threads of one process, and "
                "torch keeps one saving process for all of them. Save by AsyncCheckpointerType.THREAD, or run "
                "the ranks as processes (--smp-backend=gloo)"
            )
        make(self, *args, **kwargs)

    executor.__init__ = made


class rank_worlds:
    """While entered, rank threads have a torch.distributed state each."""

    def __init__(self) -> None:
        self._loads = ModuleLoads({_PROCESS_CHECKPOINTS}, _refuse_process_checkpoints)

    def enter(self) -> None:
        _refuse_process_checkpoints()
        self._loads.__enter__()
        install_joining()
        install_import_defaults()
        self._world, self._excepthook = c10d._world, sys.excepthook
        c10d._world = _Router(self._world)  # type: ignore[assignment]
        set_thread_isolation_mode(True)
        _exception_log.addFilter(_not_on_ranks)
        self._handlers = dict(rendezvous_handlers)
        rendezvous_handlers.update({name: _refusing(it) for name, it in self._handlers.items()})
        c10d_logger._get_msg_dict = _message  # type: ignore[assignment]
        c10d._new_process_group_helper = _made_alone  # type: ignore[assignment]
        c10d._register_process_group = register_once  # type: ignore[attr-defined, assignment]
        profiling.enter()

    def leave(self) -> None:
        self._loads.__exit__()
        profiling.leave()
        c10d_logger._get_msg_dict = _full_message
        c10d._new_process_group_helper = make_group
        c10d._register_process_group = register_process_group  # type: ignore[attr-defined]
        rendezvous_handlers.update(self._handlers)
        _exception_log.removeFilter(_not_on_ranks)
        set_thread_isolation_mode(False)
        c10d._world = self._world
        sys.excepthook = self._excepthook  # init_process_group wraps it at every call


def _create(options: Any, backend_options: Any) -> Any:
    """Make the default group for ``init_process_group("sim")``, after the rank has destroyed the former one."""
    context = current_rank.current()
    if context is None:
        raise ThreadError(
            "the sim backend exists on the ranks of a sim world; run the code with smp_world.run"
        )
    return context.fabric.remade_default(options.group_rank, options.group_size)


def register_backend() -> None:
    """Make ``sim`` a backend name that torch knows.

    Does not change which backend a device gets by default.
    """
    native_calls.install()
    if "SIM" not in c10d.Backend._plugins:
        c10d.Backend.register_backend("sim", _create, extended_api=True, devices=["cpu"])
