"""The native object transport of `sim`: one operation of the scheduler per call.

A send waits until its receiver has taken the object, so at most one message lies between a sender
and a receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_smp.ranks.sim.matching import Call, Channel
from pytest_smp.ranks.sim.rank_context import RankContext
from smp_core.transport import messages
from smp_core.transport.payload import Payload
from smp_core.transport.protocols import Group
from smp_core.transport.stack_frames import is_called_by_body, user_line


class _Message:
    """An object on its way to one or more receivers.

    An Operation of the scheduler: done when all have taken it.
    """

    __slots__ = ("call", "done", "outstanding", "payload", "src", "thread_states")

    def __init__(self, context: RankContext, call: str, payload: Payload, dests: set[int]) -> None:
        self.src, self.thread_states = context.rank, context.scheduler.thread_states
        self.call, self.payload = call, payload
        self.outstanding = dests
        self.done = not dests

    def describe(self, rank: int) -> str:
        return self.call

    def missing(self, rank: int) -> Sequence[int]:
        return sorted(self.outstanding)

    @property
    def hint(self) -> str | None:
        """The frequent mistake behind a message that is never taken, if the receivers' waits show it."""
        waits = [self.thread_states[rank].waiting for rank in self.outstanding]
        others: dict[str, list[int]] = {}
        for wait in waits:
            if isinstance(wait, _Message):
                others.setdefault(wait.call, []).extend(wait.outstanding)
        return messages.object_hint(self.call, self.src, others)


class _Receive:
    """A rank that waits for an object. An Operation of the scheduler."""

    __slots__ = ("done", "payload", "src")

    def __init__(self, src: int) -> None:
        self.src = src
        self.payload: Payload | None = None
        self.done = False

    def describe(self, rank: int) -> str:
        return f"smp.recv_from(world rank {self.src})"

    def missing(self, rank: int) -> Sequence[int]:
        return (self.src,)


class ObjectRouter:
    """The state that the object transports of a world's ranks share."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int], _Message] = {}
        self.receives: dict[tuple[int, int], _Receive] = {}
        self.channels: dict[Group, Channel] = {}

    def channel(self, group: Group) -> Channel:
        """The collective object calls of a group."""
        channel = self.channels.get(group)
        if channel is None:
            channel = self.channels[group] = Channel(group)
        return channel


def _all(calls: list[Call]) -> tuple[list[Payload], list[Any] | None]:
    """The payloads, and their objects if nobody can tell whether those are shared or copied: then each of n ranks
    copies a list, and does not thaw n payloads.
    """
    payloads = [call.data for call in calls]
    atoms = all(payload.is_atom for payload in payloads)
    return payloads, [payload.thaw() for payload in payloads] if atoms else None


def _nothing(calls: list[Call]) -> None:
    return None


class SimObjects:
    """One rank's object transport."""

    __slots__ = ("_context", "_router")

    def __init__(self, context: RankContext, router: ObjectRouter) -> None:
        self._context, self._router = context, router

    def send(self, obj: object, dest: int) -> None:
        """See ObjectTransport."""
        call = f"smp.send(world rank {dest})"
        self._check(call, "smp.send", (self._context.rank, dest))
        self._post(call, Payload(obj, call), {dest})

    def broadcast(self, obj: object, group: Group) -> None:
        """See ObjectTransport."""
        call = f"smp.broadcast(group {messages.group_text(group.name, group.ranks)})"
        self._check(call, "smp.broadcast", group.ranks)
        self._post(call, Payload(obj, call), set(group.ranks) - {self._context.rank})

    def _check(self, call: str, operation: str, group: tuple[int, ...]) -> None:
        """Begin a call of these ranks."""
        context = self._context
        context.check(call)
        if context.job.records_calls and is_called_by_body():
            context.record_call(operation, group)

    def _post(self, call: str, payload: Payload, dests: set[int]) -> None:
        context, router = self._context, self._router
        context.scheduler.call_lines.called(context.rank, user_line(2))
        message = _Message(context, call, payload, dests)
        for dest in sorted(dests):  # the order of waking is part of the run: never a set's
            receive = router.receives.pop((context.rank, dest), None)
            if receive is None:
                router.messages[context.rank, dest] = message
                continue
            receive.payload, receive.done = payload, True
            message.outstanding.discard(dest)
            context.scheduler.wake(dest, receive)
        message.done = not message.outstanding
        context.scheduler.wait(context.thread_state, message)

    def recv_from(self, src: int) -> Any:
        """See ObjectTransport."""
        context, router = self._context, self._router
        self._check("smp.recv_from", "smp.recv_from", (context.rank, src))
        context.scheduler.call_lines.called(context.rank, user_line(1))
        message = router.messages.pop((src, context.rank), None)
        if message is not None:
            message.outstanding.discard(context.rank)
            if not message.outstanding:
                message.done = True
                context.scheduler.wake(src, message)
            return message.payload.thaw()
        receive = router.receives[src, context.rank] = _Receive(src)
        context.scheduler.wait(context.thread_state, receive)
        assert receive.payload is not None
        return receive.payload.thaw()

    def allgather(self, obj: object, group: Group) -> list[Any]:
        """See ObjectTransport."""
        context = self._context
        self._check("smp.allgather", "smp.allgather", group.ranks)
        call = Call("smp.allgather", (), Payload(obj, "smp.allgather"))
        meeting = self._router.channel(group).join(context, call, _all)
        context.scheduler.wait(context.thread_state, meeting)
        payloads, atoms = meeting.result
        return [payload.thaw() for payload in payloads] if atoms is None else list(atoms)

    def barrier(self, group: Group) -> None:
        """See ObjectTransport."""
        context = self._context
        self._check("smp.barrier", "smp.barrier", group.ranks)
        meeting = self._router.channel(group).join(context, Call("smp.barrier", (), None), _nothing)
        context.scheduler.wait(context.thread_state, meeting)
