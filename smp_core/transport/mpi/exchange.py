"""The operations behind a work handle: a collective call, a send, a receive; tensors as bytes and
back.

Each has ``done`` and, once done, ``values``: one flat tensor per output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from smp_core.errors import CollectiveMismatchError
from smp_core.reduction import reduce_tensors
from smp_core.transport.messages import group_text
from smp_core.transport.mpi.matching import Meetings, Receive
from smp_core.transport.mpi.messenger import Buffer, Outgoing
from smp_core.transport.mpi.routes import MemberPart, Route, Tensors
from smp_core.transport.protocols import Group

Tensor = torch.Tensor

# An all_reduce of more bytes goes in two rounds, so that a member sends and gets twice the bytes
# whatever the size of the group: slices to be reduced, then the results. Below, one round is faster.
LARGE = 32 * 1024


class MpiOperation(Protocol):
    """The exchanges that a work waits for."""

    @property
    def done(self) -> bool:
        """True if all has been sent and has come."""

    def values(self) -> list[Tensor]:
        """The value of each output. Raises CollectiveMismatchError if ranks made different calls."""


def to_bytes(tensors: Tensors) -> memoryview:
    """Flat tensors, one behind the other. Their own memory if it is one."""
    parts = [tensor.view(torch.uint8) for tensor in tensors]
    block = (
        parts[0]
        if len(parts) == 1
        else torch.cat(parts)
        if parts
        else torch.empty(0, dtype=torch.uint8)
    )
    array: memoryview = block.numpy().data
    return array


def bytes_of(tensors: Tensors) -> int:
    """The number of bytes that tensors take."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def from_bytes(payload: Buffer, like: Tensors) -> list[Tensor]:
    """Flat tensors of the dtypes and numbers of elements of ``like``, in the payload's memory."""
    values, at = [], 0
    for tensor in like:
        count = tensor.numel()
        if count:
            values.append(torch.frombuffer(payload, dtype=tensor.dtype, count=count, offset=at))
        else:
            values.append(torch.empty(0, dtype=tensor.dtype))
        at += count * tensor.itemsize
    return values


class CollectiveOperation:
    """One member's part in a collective call: everything that it brings is sent at once."""

    def __init__(
        self,
        group: Group,
        meetings: Meetings,
        number: int,
        route: Route,
        part: MemberPart,
        note: str,
    ) -> None:
        self._group, self._number, self._note = group, number, note
        self._route, self._part = route, part
        ranks = group.ranks
        whole = None  # most often the same goes to everybody
        self._sent: list[Outgoing] = []
        for step in range(1, part.size):  # each begins with its neighbour: not all with rank 0
            member = (part.me + step) % part.size
            goes = route.goes(part, member)
            if goes is not None:
                if goes is part.brings:
                    payload = whole = to_bytes(goes) if whole is None else whole
                else:
                    payload = to_bytes(goes)
                self._sent.append(meetings.send(ranks[member], number, payload, note))
        self._like = [
            None if member == part.me else route.comes(part, member) for member in range(part.size)
        ]
        sources = [ranks[member] for member, like in enumerate(self._like) if like is not None]
        self._gathering = meetings.expect(number, sources, note)

    @property
    def done(self) -> bool:
        """See MpiOperation."""
        if self._sent:
            self._sent = [outgoing for outgoing in self._sent if not outgoing.done]
        return self._gathering.done and (not self._sent or self._gathering.strange is not None)

    def values(self) -> list[Tensor]:
        """See MpiOperation."""
        part = self._part
        came = [
            [] if like is None else self._came(member, like)
            for member, like in enumerate(self._like)
        ]
        came[part.me] = list(self._route.goes(part, part.me) or ())
        return self._route.values(part, came)

    def _came(self, member: int, like: Tensors) -> list[Tensor]:
        strange = self._gathering.strange
        ranks = self._group.ranks
        if strange is not None:
            raise self._mismatch("", strange[0], strange[1], self._note)
        message = self._gathering.messages[ranks[member]]
        sent, expected = memoryview(message.payload).nbytes, bytes_of(like)
        if sent != expected:
            raise self._mismatch(
                " in size",
                ranks[member],
                f"{self._note} brings {sent} bytes for rank {ranks[self._part.me]}",
                f"{self._note} expects {expected} bytes from rank {ranks[member]}",
            )
        return from_bytes(message.payload, like)

    def _mismatch(self, what: str, rank: int, theirs: str, ours: str) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"mismatch: call {self._number} on group {group_text(self._group.name, self._group.ranks)} differs{what}\n"
            f"  rank {self._group.ranks[self._part.me]}: {ours}\n"
            f"  rank {rank}: {theirs}"
        )


def _slices(block: Tensor, size: int) -> list[Tensor]:
    return list(torch.tensor_split(block, size))


class LargeAllReduce:
    """An all_reduce in two rounds: member i gets everybody's i-th slice, and sends the reduction of
    it to all.

    The bits are those of one round: a reduction works element by element.
    """

    def __init__(
        self, group: Group, meetings: Meetings, number: int, part: MemberPart, note: str
    ) -> None:
        self._group, self._meetings, self._number = group, meetings, number
        self._part, self._note = part, note
        self._sizes = [tensor.numel() for tensor in part.brings]
        block = torch.cat(list(part.brings)) if len(part.brings) > 1 else part.brings[0]
        self._slices = _slices(block, part.size)
        slices = MemberPart(part.me, part.size, self._slices, self._slices, part.op, part.root)
        self._error: CollectiveMismatchError | None = None
        self._lock = meetings.lock
        self._rounds = [CollectiveOperation(group, meetings, number, _SLICES, slices, note)]

    def step(self) -> bool:
        """Begin the second round when the first is done; return whether there is no more to begin.

        Called in any wait of the rank, so an error is kept for the wait for this operation.
        """
        if len(self._rounds) == 1 and self._error is None and self._rounds[0].done:
            part = self._part
            try:
                own = self._rounds[0].values()
            except CollectiveMismatchError as error:
                self._error = error
                return True
            second = MemberPart(part.me, part.size, own, self._slices, part.op, part.root)
            number = -self._number  # apart from the numbers of calls
            self._rounds.append(
                CollectiveOperation(
                    self._group, self._meetings, number, _RESULTS, second, self._note
                )
            )
        return len(self._rounds) == 2 or self._error is not None

    @property
    def done(self) -> bool:
        """See MpiOperation."""
        with self._lock:  # another thread may be moving messages
            return self.step() and (self._error is not None or self._rounds[1].done)

    def values(self) -> list[Tensor]:
        """See MpiOperation."""
        if self._error is not None:
            raise self._error
        return list(torch.split(torch.cat(self._rounds[1].values()), self._sizes))


# Of slices each member has one: it is told apart by the member's position.
_SLICES = Route(
    goes=lambda part, member: [part.brings[member]],
    comes=lambda part, member: [part.gets[part.me]],
    values=lambda part, came: [reduce_tensors([each[0] for each in came], part.op)],
)
_RESULTS = Route(
    goes=lambda part, member: part.brings,
    comes=lambda part, member: [part.gets[member]],
    values=lambda part, came: [each[0] for each in came],
)


class SendOperation:
    """A send: done when its receive has taken it."""

    def __init__(self, outgoing: Outgoing, payload: object) -> None:
        self._outgoing, self._payload = outgoing, payload

    @property
    def done(self) -> bool:
        """See MpiOperation."""
        return self._outgoing.done

    def values(self) -> list[Tensor]:
        """See MpiOperation."""
        return []


class ReceiveOperation:
    """A receive of one tensor."""

    def __init__(self, group: Group, me: int, receive: Receive, like: Tensor) -> None:
        self._group, self._me, self._receive, self._like = group, me, receive, like

    @property
    def done(self) -> bool:
        """See MpiOperation."""
        return self._receive.done

    def values(self) -> list[Tensor]:
        """See MpiOperation."""
        message = self._receive.message
        assert message is not None
        theirs, ours = message.note.decode(), tensor_note(self._like)
        if theirs != ours:
            raise CollectiveMismatchError(
                f"mismatch: a send and its receive on group {group_text(self._group.name, self._group.ranks)} differ\n"
                f"  rank {message.source}: send of {theirs}\n"
                f"  rank {self._group.ranks[self._me]}: recv of {ours}"
            )
        return from_bytes(message.payload, [self._like])

    @property
    def source(self) -> int:
        """The position in the group of the sender, once done."""
        assert self._receive.message is not None
        return self._group.ranks.index(self._receive.message.source)


def tensor_note(tensor: Tensor) -> str:
    """The properties that a send and its receive must agree in, in words."""
    return f"{tensor.numel()} elements of {str(tensor.dtype).removeprefix('torch.')}"


def flat_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors' elements now, each flat and dense in memory of its own, apart from autograd."""
    return [
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        for tensor in tensors
    ]
