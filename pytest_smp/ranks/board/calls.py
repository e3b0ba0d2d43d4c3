"""Calls as the board keeps them, and the ranks that each call still needs.

There are two strengths of needing. A call *surely* needs a rank if no correct backend can end the call
without that rank: an all_reduce needs every member's value, a receive needs its send. A call *wants* a
rank if it would wait for that rank on `sim`, where every operation waits for all ranks that take part.
Another backend may end such a call earlier: a buffered send, the root's part in a broadcast.

Note [Late refusals]

A backend may also end a call by refusing it. Some backends judge a collective in a thread of their own,
when its turn has come and the rank already waits. Gloo (torch 2.13) does so for dtypes that it lacks
(int16), reduce ops that do not fit the dtype (BAND of floats, PREMUL_SUM) and split sizes that do not
add up. So a collective surely needs ranks only if no backend has a reason to refuse it: its dtypes and
reduce op are plain, and its arguments are consistent. Any other collective only wants them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence

from pytest_smp.ranks.board.recorder import UNKNOWN, Description
from smp_core.errors import RankError
from smp_core.transport import messages, peers
from smp_core.transport.handled import while_handling
from smp_core.transport.stack_frames import Place

_NOTHING = Description("", None)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupKey:
    """The identity of a group, which is the same on all of its members."""

    kind: str
    name: str
    generation: int
    ranks: tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Issued:
    """A call of one rank.

    ``taken``: the call counts for sure, because the backend has taken it or the rank waits for it; until
    then the call may be withdrawn. ``waited``: the rank has learnt that the call is over. ``raised``: the
    wait has raised; some backends refuse arguments only there. ``late``: an earlier call of its rank had
    raised, and the body went on: what it calls then may follow from another rank's death. ``exception``: what
    its rank handled meanwhile, in words. ``has_future``: the body has asked for its future.
    """

    rank: int
    number: int
    group: GroupKey
    shown: str  # the group's name in messages
    place: Place | None
    description: Description = _NOTHING
    taken: bool = False
    waited: bool = False
    raised: bool = False
    late: bool = False
    exception: str = ""
    has_future: bool = False

    def text(self) -> str:
        """The call in words."""
        raise NotImplementedError

    def wants(self) -> list[int]:
        """The world ranks that the call would still wait for on `sim`."""
        raise NotImplementedError

    def needs(self) -> list[int]:
        """The world ranks without which the call surely cannot end."""
        raise NotImplementedError

    def blocked(self) -> bool:
        """Return whether the call could not end on `sim` with the calls made so far."""
        return bool(self.wants())

    def met_text(self) -> str:
        """The state of the partners of a call that waits for none of them, in words."""
        return ", which all have joined"

    @property
    def may_end(self) -> bool:
        """True if a correct backend may end the call without other ranks: see Note [Late refusals]."""
        return False

    def described(self) -> str:
        """The call, its group and number, in words."""
        return f"{self.text()} [group {self.shown}]"

    def made(self) -> messages.Made:
        """The call as messages list it."""
        return self.rank, self.text() + while_handling(self.exception), self.place


# ---- Collectives ---------------------------------------------------------------------------------


class BoardMeeting:
    """The recorded calls of one number in a group: one per member that has called, by world rank."""

    __slots__ = ("calls", "compared", "group", "number", "verdict")

    def __init__(self, group: GroupKey, number: int) -> None:
        self.group, self.number = group, number
        self.calls: dict[int, Joined] = {}
        self.compared = False  # pairs of members, once all have come

    @property
    def complete(self) -> bool:
        """True if every member has called."""
        return len(self.calls) == len(self.group.ranks)

    def missing(self) -> list[int]:
        """The members that have not called."""
        return [rank for rank in self.group.ranks if rank not in self.calls]


#: The ranks that surely need others: with "all" every member needs all, with "root takes" the root needs
#: all, with "root gives" all need the root.
_FLOWS = {
    "barrier": "all",
    "all_reduce": "all",
    "all_reduce_coalesced": "all",
    "all_gather": "all",
    "all_gather_coalesced": "all",
    "all_gather_single": "all",
    "all_gather_single_coalesced": "all",
    "reduce_scatter": "all",
    "reduce_scatter_single": "all",
    "reduce_scatter_single_coalesced": "all",
    "reduce": "root takes",
    "gather": "root takes",
    "broadcast": "root gives",
    "scatter": "root gives",
    "smp.allgather": "all",
    "smp.barrier": "all",
    "smp.process_group": "all",  # makes one of the API's own
}


_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
_INTEGERS = frozenset({"int64", "int32", "int8", "uint8", "bool"})
_ARITHMETIC = frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX"})
_BITWISE = frozenset({"BAND", "BOR", "BXOR"})


def _is_plain(description: Description) -> bool:
    """Return whether no backend has a reason to refuse the call: see Note [Late refusals]."""
    fields = dict(description.fields or ())
    dtypes = set(str(fields.get("dtype", "")).split())
    if not dtypes <= _FLOATS | _INTEGERS:
        return False
    op = fields.get("reduce op", "SUM")
    return op in _ARITHMETIC or (op in _BITWISE and dtypes <= _INTEGERS)


@dataclasses.dataclass(slots=True, eq=False)
class Joined(Issued):
    """A call that all members of the group join."""

    meeting: BoardMeeting | None = None

    def text(self) -> str:
        """See Issued."""
        if self.description.fields is None:
            return self.description.operation
        fields = [
            field
            for field in (*self.description.fields, *self.description.told)
            if field[1] != UNKNOWN
        ]
        return messages.call_text(self.description.operation, fields)

    def described(self) -> str:
        """See Issued."""
        assert self.meeting is not None
        return f"{self.text()} [group {self.shown}, call {self.meeting.number}]"

    def wants(self) -> list[int]:
        """See Issued."""
        assert self.meeting is not None
        if self.description.operation == "new_group" and not self._is_member():
            return []
        return self.meeting.missing()

    def met_text(self) -> str:
        """See Issued. A rank outside of a new group does not wait for the others."""
        assert self.meeting is not None
        return "" if self.meeting.missing() else ", which all have joined"

    @property
    def may_end(self) -> bool:
        """See Issued. A call without elements need not send anything."""
        return not self.description.elements or not _is_plain(self.description)

    def _is_member(self) -> bool:
        return self.rank in self.description.expected

    def needs(self) -> list[int]:
        """See Issued."""
        assert self.meeting is not None
        missing = self.meeting.missing()
        if not missing or self.may_end:
            return []
        if self.description.operation.startswith("all_to_all"):
            return self._pairs(missing)
        flow = _FLOWS.get(self.description.operation)
        if flow == "all":
            return missing
        root = dict(self.description.fields or ()).get("root")
        if flow is None or not isinstance(root, int) or not 0 <= root < len(self.group.ranks):
            return []
        root = self.group.ranks[root]
        if flow == "root takes":
            return missing if self.rank == root else []
        return [root] if root in missing and self.rank != root else []

    def _pairs(self, missing: list[int]) -> list[int]:
        expected = self.description.expected
        if len(expected) != len(self.group.ranks):
            return []
        sources = zip(self.group.ranks, expected, strict=True)
        return [rank for rank, size in sources if messages.elements(size) and rank in missing]


# ---- Point-to-point ------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class BoardPost(Issued):
    """A send or a receive.

    ``peer``: the other rank's number in the world, None for a receive from any source. ``meets``: True
    if a send, too, surely ends only with its receive.
    """

    sends: bool = False
    peer: int | None = None
    tag: int = 0
    box: Box | None = None
    partner: BoardPost | None = None
    meets: bool = False
    source: int | None = None  # the sender, for a receive from any source that is over, if known

    def text(self) -> str:
        """See Issued."""
        said = dict((*(self.description.fields or ()), *self.description.told))
        return messages.post_text(
            self.sends, self.peer, said.get("dtype"), said.get("shape"), self.tag
        )

    def wants(self) -> list[int]:
        """See Issued."""
        assert self.box is not None
        return [] if self.partner is not None or self.box.may_match(self) else self._partners()

    def needs(self) -> list[int]:
        """See Issued."""
        early = (self.sends and not self.meets) or not self.description.elements
        return [] if early else self.wants()

    def uncertain(self) -> bool:
        """Return whether the call may be over or not: the backend decides which receive takes which message."""
        return self.partner is None and not self.wants()

    def met_text(self) -> str:
        """See Issued. The partner may have gone on, and need not carry the message out."""
        if self.uncertain():
            return ", which may have met another call: there is a receive from any rank"
        if self.partner is None or self.partner is self:
            return ""
        return f", whose {'recv' if self.sends else 'send'} rank {self.partner.rank} has issued"

    def who(self) -> int | None:
        """The only rank that a receive can have met, or None."""
        return self.source if self.peer is None else self.peer

    def _partners(self) -> list[int]:
        if self.peer is None:
            return [rank for rank in self.group.ranks if rank != self.rank]
        return [self.peer]


@dataclasses.dataclass(slots=True, eq=False)
class Stray(Issued):
    """A send or a receive that names a member which the group does not have.

    ``peer`` is the number that the caller gave, no world rank. Most backends refuse such a call; one
    that takes it has nobody to carry it out with.
    """

    sends: bool = False
    peer: int = 0
    tag: int = 0

    def text(self) -> str:
        """See Issued."""
        said = dict(self.description.fields or ())
        return messages.post_text(
            self.sends, self.peer, said.get("dtype"), said.get("shape"), self.tag
        )

    def wants(self) -> list[int]:
        """See Issued."""
        return []

    def needs(self) -> list[int]:
        """See Issued. The backend may refuse it late."""
        return []

    def blocked(self) -> bool:
        """See Issued."""
        return True

    @property
    def may_end(self) -> bool:
        """See Issued."""
        return True

    def met_text(self) -> str:
        """See Issued."""
        return f": {self.why()}"

    def why(self) -> str:
        """The reason why the call can meet no rank, in words."""
        return peers.absent("rank", self.peer, len(self.group.ranks))

    def error(self) -> RankError:
        """The error that its rank should have got."""
        verb = "send" if self.sends else "recv"
        lines = [peers.refusal(verb, "rank", self.peer, len(self.group.ranks))]
        lines += messages.merged([self.made()])
        lines.append(
            f"hint: the backend took the call on group {self.shown}, and no rank can ever meet it"
        )
        return RankError("\n".join(lines))


class Box:
    """The posts to one receiver with one tag on one group, in order.

    Named partners meet in the order of posting. Once the receiver has received from any source, the pairs
    depend on the backend, so posts are only counted. ``ordered``: a message goes to the oldest receive that fits.
    """

    __slots__ = ("ordered", "posts", "wild")

    def __init__(self, ordered: bool = False) -> None:
        self.ordered, self.wild = ordered, False
        self.posts: list[BoardPost] = []  # those that have met no other

    def add(self, post: BoardPost) -> BoardPost | None:
        """Take a post; return the post that it meets, or None."""
        self.wild = self.wild or post.peer is None
        if not self.wild:
            for other in self.posts:
                if other.sends != post.sends and _sender(other) == _sender(post):
                    self.posts.remove(other)
                    post.partner, other.partner = other, post
                    return other
        self.posts.append(post)
        return None

    def withdraw(self, post: BoardPost) -> None:
        """Forget a post; the post that it had met waits again."""
        other = post.partner
        if other is None:
            self.posts.remove(post)
        elif other is not post:
            other.partner = post.partner = None
            later = [each for each in self.posts if _is_later(each, other)]
            at = self.posts.index(later[0]) if later else len(self.posts)
            self.posts.insert(at, other)

    def may_match(self, post: BoardPost) -> bool:
        """Return whether a post that has met no other may be over all the same."""
        if not self.wild:
            return False
        if post.sends:
            earlier = [
                each
                for each in self.posts
                if each.sends and each.rank == post.rank and each.number <= post.number
            ]
            takers = [
                each for each in self.posts if not each.sends and each.who() in (None, post.rank)
            ]
            return len(takers) >= len(earlier)
        if self.ordered:
            return self._reaches(post)
        sends = [each for each in self.posts if each.sends and post.peer in (None, each.rank)]
        taken = [
            each
            for each in self.posts
            if not each.sends and each.waited and post.peer in (None, each.who())
        ]
        return len(sends) > len(taken)

    def _reaches(self, receive: BoardPost) -> bool:
        """Return whether a message may be left for a receive by those that were posted before."""
        sends = collections.Counter(each.rank for each in self.posts if each.sends)
        earlier = [
            each
            for each in self.posts
            if not each.sends and not each.raised and each.number < receive.number
        ]
        takers = collections.Counter(each.who() for each in earlier)
        anybody = [each.number for each in earlier if each.who() is None]
        # A named receive behind one from any source may go without, and leave its sender to that one.
        certain = collections.Counter(
            each.who() for each in earlier if each.waited or each.number < min(anybody, default=0)
        )
        free = {rank: max(0, count - certain[rank]) for rank, count in sends.items()}
        for rank in sends if receive.peer is None else (receive.peer,):
            left = sends[rank] - takers[rank]
            if left > 0 and len(anybody) < left + sum(free.values()) - free[rank]:
                return True
        return False

    def settle(self) -> None:
        """Start anew once every send has been received and every receive is over."""
        receives = [post for post in self.posts if not post.sends]
        if 2 * len(receives) == len(self.posts) and all(post.waited for post in receives):
            for post in self.posts:
                post.partner = post  # over; the partner does not matter
            self.wild, self.posts = False, []

    def left(self) -> list[BoardPost]:
        """The posts that nothing has met, as far as one can tell."""
        if not self.wild:
            return self.posts
        sends = [each for each in self.posts if each.sends]
        receives = sorted(
            (each for each in self.posts if not each.sends), key=lambda each: each.who() is None
        )
        left = []
        for receive in receives:
            fitting = (each for each in sends if receive.who() in (None, each.rank))
            send = next(fitting, None)
            if send is None:
                left.append(receive)
            else:
                sends.remove(send)
        return [*sends, *left]


def _sender(post: BoardPost) -> int | None:
    return post.rank if post.sends else post.peer


def _is_later(post: BoardPost, than: BoardPost) -> bool:
    return post.rank == than.rank and post.sends == than.sends and post.number > than.number


# ---- Objects -------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class Handover(Issued):
    """An object sent to ``open`` ranks that have not taken it, or received from such a rank."""

    call: str = ""
    sends: bool = False
    open: list[int] = dataclasses.field(default_factory=list)

    def text(self) -> str:
        """See Issued."""
        return self.call

    def described(self) -> str:
        """See Issued."""
        return self.call

    def wants(self) -> list[int]:
        """See Issued."""
        return sorted(self.open)

    needs = wants  # every call of the object transport is acknowledged

    def met_text(self) -> str:
        """See Issued."""
        return ", which all have taken" if self.sends else ", which has been sent"


class Objects:
    """The objects on their way, and the ranks that wait for one, by sender and receiver."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], collections.deque[Handover]] = {}

    def add(self, new: Handover, partners: Sequence[int]) -> None:
        """Let a call meet the oldest one that fits, with each partner."""
        for partner in partners:
            key = (new.rank, partner) if new.sends else (partner, new.rank)
            queue = self._waiting.setdefault(key, collections.deque())
            if queue and queue[0].sends != new.sends:
                other = queue.popleft()
                other.open.remove(new.rank)
                continue
            new.open.append(partner)
            queue.append(new)

    def withdraw(self, call: Handover) -> None:
        """Forget a call, as far as nobody has met it."""
        for queue in self._waiting.values():
            if call in queue:
                queue.remove(call)
        call.open.clear()


# ---- Stores --------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class KeyWait(Issued):
    """A wait for keys of the world's store, which any rank may set.

    Attributes:
        keys: those that the rank waits for, as it names them.
        set_keys: the keys that ranks have set or are about to set in this run, as they name them.
    """

    keys: tuple[str, ...] = ()
    set_keys: Collection[str] = ()

    def text(self) -> str:
        """See Issued. As `sim` has it."""
        return f"store.wait for {', '.join(map(repr, self.keys))}"

    def described(self) -> str:
        """See Issued."""
        return self.text()

    def wants(self) -> list[int]:
        """See Issued. No rank in particular."""
        return []

    needs = wants

    def met_text(self) -> str:
        """See Issued."""
        return ""

    def blocked(self) -> bool:
        """See Issued. Prefixes are not known, so that a key behind any prefix counts."""
        return not all(any(_may_be(key, named) for named in self.set_keys) for key in self.keys)


def _may_be(key: str, named: str) -> bool:
    return key == named or key.endswith(f"/{named}") or named.endswith(f"/{key}")
