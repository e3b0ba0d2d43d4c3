"""The native object transport of `mpi`.

A send is a message whose receipt is awaited. A collective of a group runs over a tree of its
members, up and down again: a rank wakes for each message that it takes, and a tree needs the
fewest.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from smp_core.errors import CollectiveMismatchError
from smp_core.transport.messages import group_text
from smp_core.transport.mpi.matching import Gathering, Meetings, MpiMailbox
from smp_core.transport.mpi.messenger import Messenger, Outgoing
from smp_core.transport.payload import Payload, plain_dumps
from smp_core.transport.protocols import Group, RankEnvironment

_BRANCHES = 8  # of the tree: so many members come and go by one hop


def _dumps(obj: object) -> bytes:
    return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)


def _frozen(obj: object, call: str) -> bytes:
    """The bytes of a Payload, without an object of that class, whose own pickling took longer than that
    of most payloads.
    """
    try:
        data = plain_dumps(obj)
    except Exception:
        Payload(obj, call)  # says which part cannot be pickled
        raise
    return _dumps((call, data))


def _thawed(frozen: Any) -> Any:
    call, data = pickle.loads(frozen)
    try:
        return pickle.loads(data)
    except Exception:
        return Payload([], call, lambda _: data).thaw()  # raises an error that names the part


class MpiObjects:
    """One rank's object transport. See ObjectTransport."""

    def __init__(self, environment: RankEnvironment, messenger: Messenger) -> None:
        self._rank, self._board, self._messenger = environment.rank, environment.board, messenger
        self._world = Group("WORLD", tuple(range(environment.size)))
        self.open()

    def open(self) -> None:
        """Begin a run: its calls and messages count from the first."""
        self._mailbox = MpiMailbox(self._messenger, "objects")
        self._trees: dict[Group, _Tree] = {}

    def send(self, obj: object, dest: int) -> None:
        """See ObjectTransport."""
        data = _frozen(obj, f"smp.send(world rank {dest})")
        with self._board.call("smp.send", self._world, to=(dest,)):
            self._deliver(data, (dest,))

    def broadcast(self, obj: object, group: Group) -> None:
        """See ObjectTransport."""
        data = _frozen(obj, f"smp.broadcast(group {group.name})")
        dests = [rank for rank in group.ranks if rank != self._rank]
        with self._board.call("smp.broadcast", group, to=dests):
            self._deliver(data, dests)

    def _deliver(self, data: bytes, dests: Sequence[int]) -> None:
        sent: list[Outgoing] = [self._mailbox.send(dest, 0, data) for dest in dests]
        self._messenger.wait(lambda: all(outgoing.done for outgoing in sent))

    def recv_from(self, src: int) -> Any:
        """See ObjectTransport."""
        with self._board.call("smp.recv_from", self._world, source=src):
            receive = self._mailbox.receive(src, 0)
            self._messenger.wait(lambda: receive.done)
        assert receive.message is not None
        return _thawed(receive.message.payload)

    def allgather(self, obj: object, group: Group) -> list[Any]:
        """See ObjectTransport."""
        data = _frozen(obj, "smp.allgather")
        with self._board.call("smp.allgather", group):
            gathered = self._tree(group).meet("smp.allgather", data)
        return [_thawed(each) for each in gathered]

    def barrier(self, group: Group) -> None:
        """See ObjectTransport."""
        with self._board.call("smp.barrier", group):
            self._tree(group).meet("smp.barrier", b"")

    def _tree(self, group: Group) -> _Tree:
        tree = self._trees.get(group)
        if tree is None:
            tree = self._trees[group] = _Tree(group, self._rank, self._messenger)
        return tree


class _Tree:
    """A collective of a group: up a tree of its members, and down again.

    Places in the tree are counted from its root: place i hangs below place (i - 1) // _BRANCHES.
    The root does most of the work. Each call has another root, in turn, so ranks that share a core get equal
    shares of it whatever they compute.
    """

    def __init__(self, group: Group, rank: int, messenger: Messenger) -> None:
        self._group, self._messenger = group, messenger
        self._meetings = Meetings(messenger, f"objects {group.name} {group.ranks}")
        self._me = group.ranks.index(rank)

    def meet(self, call: str, data: bytes) -> list[bytes]:
        """Every member's data, in the order of the group, once all have called."""
        number, ranks = self._meetings.number(), self._group.ranks
        size, root = len(ranks), (number - 1) % len(ranks)
        place = (self._me - root) % size
        first = _BRANCHES * place + 1
        below = [ranks[(child + root) % size] for child in range(first, size)[:_BRANCHES]]
        # Up: the data of this member and of those below it. Numbers of the way up are negative.
        branch = {self._me: data}
        for payload in self._gathered(-number, below, call):
            branch.update(pickle.loads(payload))
        if place:
            above = ranks[((place - 1) // _BRANCHES + root) % size]
            self._send([above], -number, _dumps(branch), call)
            (whole,) = self._gathered(number, [above], call)
            gathered: list[bytes] = pickle.loads(whole)
        else:
            gathered = [branch[member] for member in range(size)]
            whole = _dumps(gathered)
        self._send(below, number, whole, call)
        return gathered

    def _gathered(self, number: int, sources: Sequence[int], call: str) -> list[Any]:
        gathering: Gathering = self._meetings.expect(number, sources, call)
        self._messenger.wait(lambda: gathering.done)
        if gathering.strange is not None:
            rank, theirs = gathering.strange
            raise CollectiveMismatchError(
                f"mismatch: call {abs(number)} on group {group_text(self._group.name, self._group.ranks)} "
                "differs in operation\n"
                f"  rank {self._group.ranks[self._me]}: {call}\n"
                f"  rank {rank}: {theirs}"
            )
        return [gathering.messages[source].payload for source in sources]

    def _send(self, dests: Sequence[int], number: int, data: Any, call: str) -> None:
        sent = [self._meetings.send(dest, number, data, call) for dest in dests]
        self._messenger.wait(lambda: all(outgoing.done for outgoing in sent))
