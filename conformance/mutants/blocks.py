"""Building blocks of mutants: a transport that does not wait, state that lasts for one run."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import smp_core.torch as smp
from conformance.mutants.protocol import Patch
from pytest_smp.ranks.sim.objects import SimObjects
from smp_core import runtime
from smp_core.transport import current_rank
from smp_core.transport.payload import Payload
from smp_core.transport.protocols import Group


class PerRun:
    """State that is made anew for every run; a call returns the state of the current run."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._job: object = None
        self._state: Any = None

    def __call__(self) -> Any:
        context = current_rank.current()
        assert context is not None
        if self._job is not context.job:
            self._job, self._state = context.job, self._make()
        return self._state


def wrap(patch: Patch, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``smp.name`` by a function that gets the original first."""
    patch.setattr(smp, name, functools.partial(wrapper, getattr(smp, name)))


def mailbox(
    patch: Patch,
    take: int = 0,
    any_source: bool = False,
    broadcast_first: bool = False,
    wait_for_first: bool = False,
) -> None:
    """Replace the object transport of ``sim`` by one that waits for no receiver.

    Args:
        patch: undoes the replacement at the end of the trial.
        take: the index of the waiting object to receive: the oldest (0) or the newest (-1).
        any_source: whether a receive takes objects of any sender.
        broadcast_first: whether broadcasts overtake sends.
        wait_for_first: whether a broadcast waits until the first receiver has taken the object.
    """
    boxes = PerRun(lambda: defaultdict(list))

    def box(src: int, dest: int) -> list[Payload]:
        found: list[Payload] = boxes()[None if any_source else src, dest]
        return found

    def send(self: SimObjects, obj: object, dest: int) -> None:
        box(self._context.rank, dest).append(Payload(obj, "smp.send"))

    def broadcast(self: SimObjects, obj: object, group: Group) -> None:
        me, others = self._context.rank, [r for r in group.ranks if r != self._context.rank]
        for dest in others:
            waiting = box(me, dest)
            waiting.insert(0 if broadcast_first else len(waiting), Payload(obj, "smp.broadcast"))
        while wait_for_first and others and box(me, others[0]):
            self._context.scheduler.give_way(self._context.thread_state)

    def recv_from(self: SimObjects, src: int) -> Any:
        while not box(src, self._context.rank):
            self._context.scheduler.give_way(self._context.thread_state)
        return box(src, self._context.rank).pop(take).thaw()

    for call in (send, broadcast, recv_from):
        patch.setattr(SimObjects, call.__name__, call)


def members(group: smp.CommGroup) -> tuple[int, ...]:
    """The world ranks of the caller's group of a kind."""
    return runtime.current("the mutant").group(group.value).ranks


def parse_without(patch: Patch, forget: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a script's parameters by ``forget`` before the configuration is checked."""
    parse = runtime._parse
    patch.setattr(
        runtime,
        "_parse",
        lambda given, launcher: parse(None if given is None else forget(dict(given)), launcher),
    )
