"""Instrumentation that records the calls of torch.distributed, on any process group, while installed.

Process groups keep their classes: methods are wrapped on the classes that define them, torch's own and
every Python subclass. Calls that reach a process group in C++ (DDP's reducer, functional collectives)
pass no method; ``dispatched`` records those.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from pytest_smp.ranks.board import dispatched, fingerprint
from pytest_smp.ranks.board.backward_passes import BackwardPasses
from pytest_smp.ranks.board.futures import Futures
from pytest_smp.ranks.board.groups import GroupRegistry, Known
from pytest_smp.ranks.board.native import NativeMethod, native_call
from pytest_smp.ranks.board.recorder import BoardRecorder
from pytest_smp.ranks.board.stores import Stores
from pytest_smp.ranks.board.works import Works
from smp_core.transport.peers import ANY

Method = Callable[..., Any]


class _Coalescing(threading.local):
    """The calls since this thread's ``_start_coalescing``, or None."""

    numbers: list[int] | None = None


class Instrument:
    """Wraps and unwraps. One is installed at a time."""

    def __init__(self, recorder: BoardRecorder) -> None:
        self._recorder = recorder
        self._registry = GroupRegistry(recorder)
        passes = BackwardPasses(recorder)
        self._futures = Futures(recorder, passes)
        self._works = Works(recorder, self._futures, passes)
        self._dispatched = dispatched.Dispatched(recorder, self._registry, passes)
        self._stores = Stores(recorder)
        self._coalescing = _Coalescing()
        self._undo: list[tuple[Any, str, Any]] = []
        self._seen: weakref.WeakSet[type] = weakref.WeakSet()

    def install(self) -> None:
        """Begin. Again and again does no harm: classes that came to be meanwhile are covered."""
        for cls in _family(dist.ProcessGroup):
            self._cover(cls, self._group_method)
        for cls in _family(dist.Work):
            self._cover(cls, self._works.method)
        for cls in _family(vars(dist)["Store"]):
            self._cover(cls, self._stores.method)
        for cls in _family(torch._C.Future):
            self._cover(cls, self._futures.method)
        if not any(owner is c10d for owner, _, _ in self._undo):
            for name, wrap in (
                ("_new_group_with_tag", self._new_group),
                ("_register_pg_in_world", self._register),
            ):
                self._replace(c10d, name, wrap(vars(c10d)[name]))
            for owner, name, wrapper in self._futures.wrappers():
                self._replace(owner, name, wrapper)
            self._dispatched.install()

    def uninstall(self) -> None:
        """End: every class and function is as it was."""
        for owner, name, original in reversed(self._undo):
            setattr(owner, name, original)
        self._undo.clear()
        self._seen.clear()
        self._dispatched.uninstall()

    def _cover(self, cls: type, wrapper: Callable[[str, Method], Method | None]) -> None:
        if cls in self._seen:
            return
        self._seen.add(cls)
        for name, original in [*vars(cls).items()]:
            if callable(original):
                native = not isinstance(original, types.FunctionType)
                wrapped = wrapper(name, native_call(original) if native else original)
                if wrapped is not None:
                    method = NativeMethod(original, wrapped) if native else wrapped
                    self._replace(cls, name, method)

    def _replace(self, owner: Any, name: str, wrapped: object) -> None:
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, wrapped)

    # Methods of process groups.

    def _group_method(self, name: str, original: Method) -> Method | None:
        if name in fingerprint.COLLECTIVES:
            return self._collective(name, original, fingerprint.COLLECTIVES[name])
        if name in _POSTS:
            return self._post(original, *_POSTS[name])
        if name == "_start_coalescing":
            return self._start(original)
        if name == "_end_coalescing":
            return self._end(original)
        return None

    def _collective(self, name: str, original: Method, key_of: Method) -> Method:
        recorder, registry = self._recorder, self._registry

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            group = registry.known(self) if recorder.active else None
            if group is None:
                return original(self, *args, **kwargs)
            number = _collective_number(recorder, group, name, key_of, args, kwargs)
            opts = args[-1] if args else kwargs.get("opts")
            # Of a call of torch's own; others may wait whenever they like.
            waits = not getattr(opts, "asyncOp", True) and sys._getframe(1).f_globals is _C10D
            return call(number, waits, original, self, args, kwargs)

        call = self._call
        return method

    def _post(self, original: Method, sends: bool, anybody: bool) -> Method:
        recorder, registry, works = self._recorder, self._registry, self._works

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            group = registry.known(self) if recorder.active else None
            if group is None:
                return original(self, *args, **kwargs)
            try:
                tensors, *numbers = _in_order(args, kwargs) if kwargs else args
                *named, tag = map(int, numbers)
                peer = ANY if anybody else named[0]
            except (
                TypeError,
                ValueError,
                IndexError,
            ):  # the backend will refuse it, in its own words
                return original(self, *args, **kwargs)
            number = fingerprint.record_post(recorder, group.number, sends, tensors, peer, tag)
            if anybody:
                works.from_anybody(number)
            return call(number, False, original, self, args, kwargs)

        call = self._call
        return method

    def _call(
        self, number: int, synchronous: bool, original: Method, group: Any, args: Any, kwargs: Any
    ) -> Any:
        recorder = self._recorder
        inside = recorder.inside
        inside.depth += 1
        try:
            work = original(group, *args, **kwargs)
        except BaseException:
            recorder.withdrawn(number)
            raise
        finally:
            inside.depth -= 1
        if work is None:
            recorder.done((number,))  # it blocks until it is over
            return work
        if not synchronous:  # else the wait follows at once, which says as much
            recorder.returned(number)
        self._works.add(work, [number])
        if self._coalescing.numbers is not None:
            self._coalescing.numbers.append(number)
        return work

    # Coalescing: calls made between start and end, waited for as one.

    def _start(self, original: Method) -> Method:
        coalescing = self._coalescing

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            coalescing.numbers = []
            return original(self, *args, **kwargs)

        return method

    def _end(self, original: Method) -> Method:
        coalescing, works = self._coalescing, self._works

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            numbers, coalescing.numbers = coalescing.numbers, None
            work = original(self, *args, **kwargs)
            if numbers and work is not None:
                works.add(work, numbers)
            return work

        return method

    # Making groups.

    def _new_group(self, original: Method) -> Method:
        recorder, registry = self._recorder, self._registry

        @functools.wraps(original)
        def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            world = registry.known(c10d._world.default_pg) if recorder.active else None
            local = kwargs.get("use_local_synchronization", False)
            members = None if world is None else _members(ranks, world, kwargs)
            if world is None or members is None or local:
                return original(ranks, *args, **kwargs)
            number = recorder.collective(
                registry.makers(world),
                ("new_group", members),
                lambda: fingerprint.making(members),
            )
            try:
                with recorder.quiet():
                    group = original(ranks, *args, **kwargs)
            except RuntimeError:
                # The call has met other ranks, whose calls may make other groups: a mismatch is then the cause.
                recorder.failed((number,))
                raise
            except BaseException:
                recorder.withdrawn(number)
                raise
            recorder.done((number,))
            return group

        return new_group

    def _register(self, original: Method) -> Method:
        registry = self._registry

        @functools.wraps(original)
        def register(pg: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(pg, *args, **kwargs)
            registry.made(pg)
            return result

        return register


_C10D = vars(c10d)


def _in_order(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Tensors, peer if there is one, and tag, however they were given."""
    places = {"tensors": 0, "tag": 2}
    names = sorted(kwargs, key=lambda name: places.get(name, 1))
    return [*args, *(kwargs[name] for name in names)]


_POSTS = {"send": (True, False), "recv": (False, False), "recv_anysource": (False, True)}


def _collective_number(
    recorder: BoardRecorder, group: Known, name: str, key_of: Method, args: Any, kwargs: Any
) -> int:
    try:
        key = key_of(*args, **kwargs).with_tensor(sys._getframe(2))
        hash(key)
    except Exception:  # arguments that torch takes and we do not know, or that it will refuse
        return recorder.collective(group.number, name, lambda: fingerprint.unknown(name))
    return recorder.collective(
        group.number, (key, len(group.ranks)), lambda: fingerprint.describe(key, len(group.ranks))
    )


def _members(ranks: Any, world: Known, kwargs: Any) -> tuple[int, ...] | None:
    """The members that new_group will make a group of; None where it will refuse."""
    try:
        members = tuple(map(int, world.ranks if ranks is None else ranks))
    except (TypeError, ValueError):
        return None
    if not set(members) <= set(range(len(world.ranks))) or len(set(members)) != len(members):
        return None
    return members if kwargs.get("sort_ranks", True) is False else tuple(sorted(members))


def _family(cls: Any) -> Iterator[type]:
    yield cls
    for child in type.__subclasses__(cls):
        yield from _family(child)
