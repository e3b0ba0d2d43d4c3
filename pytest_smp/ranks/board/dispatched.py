"""Calls that reach a process group in C++: DDP's reducer, functional collectives.

Torch sends each of them through its dispatcher on the way to the backend. A kernel in front of the
backends' sees the call, records it and passes it on. The reduce op of such a call cannot be read from
Python, so it is not compared.

Note [Waits in C++]

The caller in C++ also waits in C++, where we see nothing. Three kinds of waits are known. Functional
collectives wait in ``wait_tensor``, an operator too. Some functions wait for their own calls, such as
DDP's broadcast of buffers (see _WAIT_THEMSELVES). DDP's reducer waits for its buckets when the backward
pass is over (backward_passes). Any other caller in C++ is taken to go on, so that no verdict follows from
its calls alone.

A function that waits for its own calls may issue another one before it waits. Verdicts stay right, because its
calls are on one group and in order, so a rank that the next one helps has got past those before.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.multiprocessing import reductions

from pytest_smp.ranks.board import fingerprint
from pytest_smp.ranks.board.backward_passes import BackwardPasses
from pytest_smp.ranks.board.fingerprint import Key, specs
from pytest_smp.ranks.board.groups import GroupRegistry, Known
from pytest_smp.ranks.board.recorder import UNKNOWN, BoardRecorder
from smp_core.transport.peers import ANY

# Parts of torch that have no types.
_Library: Any = torch.library.Library
_StorageWeakRef: Any = reductions.StorageWeakRef
_Reducer: Any = vars(dist)["Reducer"]

#: By name of the operator: the position of its process group, and the key of the call.
_COLLECTIVES: dict[str, tuple[int, Callable[[Any], Key]]] = {
    "barrier": (1, lambda a: Key("barrier", None, None, ())),
    "monitored_barrier_": (1, lambda a: Key("monitored_barrier", None, None, ())),
    "broadcast_": (1, lambda a: Key("broadcast", None, a[2], specs(a[0]))),
    "allreduce_": (1, lambda a: Key("all_reduce", UNKNOWN, None, specs(a[0]))),
    "allreduce_coalesced_": (1, lambda a: Key("all_reduce_coalesced", UNKNOWN, None, specs(a[0]))),
    "reduce_": (1, lambda a: Key("reduce", UNKNOWN, a[3], specs(a[0]))),
    "allgather_": (2, lambda a: Key("all_gather", None, None, specs(a[1]), specs(a[0]))),
    "allgather_coalesced_": (2, lambda a: fingerprint.COLLECTIVES["allgather_coalesced"](*a[:2])),
    "_allgather_base_": (
        2,
        lambda a: Key("all_gather_single", None, None, specs(a[1]), specs(a[0])),
    ),
    "allgather_into_tensor_coalesced_": (
        2,
        lambda a: Key("all_gather_single_coalesced", None, None, specs(a[1]), specs(a[0])),
    ),
    "reduce_scatter_": (2, lambda a: Key("reduce_scatter", UNKNOWN, None, specs(a[1]))),
    "_reduce_scatter_base_": (
        2,
        lambda a: Key("reduce_scatter_single", UNKNOWN, None, specs(a[1])),
    ),
    "reduce_scatter_tensor_coalesced_": (
        2,
        lambda a: Key("reduce_scatter_single_coalesced", UNKNOWN, None, specs(a[1])),
    ),
    "gather_": (2, lambda a: Key("gather", None, a[3], specs(a[1]))),
    "scatter_": (2, lambda a: Key("scatter", None, a[3], specs(a[0]))),
    "alltoall_": (2, lambda a: Key("all_to_all", None, None, specs(a[1]), specs(a[0]))),
    "alltoall_base_": (
        2,
        lambda a: Key(
            "all_to_all_single", None, None, specs(a[1]), specs(a[0]), (tuple(a[4]), tuple(a[3]))
        ),
    ),
}
#: By name of the operator: whether it sends, and whether it names its peer.
_POSTS = {"send": (True, True), "recv_": (False, True), "recv_any_source_": (False, False)}

#: Looked up when this is imported, which is once for all ranks that are forked afterwards: torch takes
#: milliseconds to make them.
_OPERATORS = {
    **{name: getattr(torch.ops.c10d, name).default for name in (*_COLLECTIVES, *_POSTS)},
    "wait_tensor": torch.ops._c10d_functional.wait_tensor.default,
}

_MOST_TRACKED = 256  # calls whose tensors are looked through for those that are gone


#: Functions of torch, in C++, that return once their calls are over, by owner and name.
_WAIT_THEMSELVES: tuple[tuple[Any, str], ...] = (
    (dist, "_verify_params_across_processes"),
    (dist, "_broadcast_coalesced"),
    (_Reducer, "_rebuild_buckets"),
)


class _Thread(threading.local):
    """The calls of this thread that the function of _WAIT_THEMSELVES that it is in has issued, or None."""

    awaited: list[int] | None = None


class Dispatched:
    """Puts the kernels in place and takes them away."""

    def __init__(
        self, recorder: BoardRecorder, registry: GroupRegistry, passes: BackwardPasses
    ) -> None:
        self._recorder, self._registry, self._passes = recorder, registry, passes
        self._libraries: list[Any] = []
        self._undo: list[tuple[Any, str, Any]] = []
        self._thread = _Thread()
        self._tracked: dict[int, tuple[Any, int]] = {}  # by storage
        self._run = -1

    def install(self) -> None:
        """Put the kernels in place, so that calls through the dispatcher are recorded."""
        library = _Library("c10d", "IMPL")
        for name, (at, key_of) in _COLLECTIVES.items():
            issue = functools.partial(self._collective, at, key_of)
            self._put(library, name, functools.partial(self._seen, issue))
        for name, (sends, named) in _POSTS.items():
            issue = functools.partial(self._post, sends, named)
            self._put(library, name, functools.partial(self._seen, issue))
        functional = _Library("_c10d_functional", "IMPL")
        self._put(functional, "wait_tensor", self._wait_tensor)
        self._libraries = [library, functional]
        waiting = [
            (owner, name, self._waiting(vars(owner)[name])) for owner, name in _WAIT_THEMSELVES
        ]
        for owner, name, wrapper in (*waiting, *self._passes.wrappers()):
            self._undo.append((owner, name, vars(owner)[name]))
            setattr(owner, name, wrapper)

    def uninstall(self) -> None:
        """Take the kernels away."""
        for library in self._libraries:
            library._destroy()
        self._libraries = []
        for owner, name, original in self._undo:
            setattr(owner, name, original)
        self._undo.clear()

    def _put(self, library: Any, name: str, kernel: Callable[..., Any]) -> None:
        operator = _OPERATORS[name]
        # Always among the keys of a call, in every thread and mode, and just above the backends'.
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        recorder = self._recorder

        def dispatch(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active:  # as within every call that a method has recorded
                return operator.redispatch(keyset & after, *args, **kwargs)
            return kernel(lambda: operator.redispatch(keyset & after, *args, **kwargs), args)

        library.impl(name, dispatch, "BackendSelect", with_keyset=True)

    # Calls.

    def _seen(
        self, issue: Callable[[Any, bool], int | None], go_on: Callable[[], Any], args: Any
    ) -> Any:
        recorder = self._recorder
        by_reducer = self._passes.calls(2)
        number = issue(args, by_reducer)
        if number is None:
            return go_on()
        try:
            with recorder.quiet():
                result = go_on()
        except BaseException:
            recorder.withdrawn(number)
            raise
        recorder.returned(number)
        self._track(number, args[0])
        awaited = self._thread.awaited
        if awaited is not None:
            awaited.append(number)
            recorder.waits(awaited)
        elif by_reducer:
            self._passes.awaits((number,))
        return result

    def _collective(
        self, at: int, key_of: Callable[[Any], Key], args: Any, by_reducer: bool
    ) -> int | None:
        group = self._group(args[at])
        if group is None:
            return None
        key, size = key_of(args).with_tensor(sys._getframe(1)), len(group.ranks)
        if by_reducer and key.op is UNKNOWN:
            key = key._replace(op="SUM")  # it divides by itself
        return self._recorder.collective(
            group.number, (key, size), lambda: fingerprint.describe(key, size)
        )

    def _post(self, sends: bool, named: bool, args: Any, by_reducer: bool) -> int | None:
        group = self._group(args[1])
        if group is None:
            return None
        peer, tag = args[2:4] if named else (ANY, args[2])
        return fingerprint.record_post(self._recorder, group.number, sends, args[0], peer, tag)

    def _group(self, boxed: Any) -> Known | None:
        return self._registry.known(ProcessGroup.unbox(boxed))

    # Waits: see Note [Waits in C++].

    def _track(self, number: int, outputs: Any) -> None:
        if self._run != self._recorder.run:
            self._run = self._recorder.run
            self._tracked.clear()
        if len(self._tracked) >= _MOST_TRACKED:
            gone = [key for key, (storage, _) in self._tracked.items() if storage.expired()]
            numbers = [self._tracked.pop(key)[1] for key in gone]
            if numbers:
                self._recorder.done(numbers)
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._tracked[storage._cdata] = _StorageWeakRef(storage), number

    def _wait_tensor(self, go_on: Callable[[], Any], args: Any) -> Any:
        recorder = self._recorder
        entry = self._tracked.pop(args[0].untyped_storage()._cdata, None)
        if entry is None or entry[0].expired() or self._run != recorder.run:
            return go_on()
        with recorder.waiting((entry[1],)):
            return go_on()

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        thread, recorder = self._thread, self._recorder

        @functools.wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
            numbers: list[int] = []
            thread.awaited = numbers
            try:
                return original(*args, **kwargs)
            finally:
                thread.awaited = None
                if numbers and recorder.active:
                    recorder.done(numbers)

        return wait
