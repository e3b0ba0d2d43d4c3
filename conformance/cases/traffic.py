"""What the properties of traffic share: groups, messages, and collective calls in flight.

Everything here is plain torch.distributed, on any backend. What a rank must receive is made again on
the rank that receives it, from the recipe and the number of the sender: never by communication.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from hypothesis import reject

import smp_core.torch as smp
from conformance.cases.draws import MOST_RANKS, share
from conformance.cases.tensor_oracle import difference, made
from conformance.requirements.registry import Capability
from conformance.session.verdicts import not_supported
from pytest_smp import strategies
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import TensorSpec, same
from pytest_smp.strategies.numbers import ALL, NUMBERS

Tensor = torch.Tensor

#: For properties whose examples are programs of many calls: one example tells a lot.
few = share(0.2)

#: For properties whose examples differ in little beside the dtype, or take long.
once = share(0)

#: How a call refuses what cannot be. torch's documentation says RuntimeError where torch raises
#: ValueError, and TypeError where the error is that an argument is missing.
REFUSALS = (ValueError, RuntimeError, TypeError)


REFUSED_BY = "ValueError, RuntimeError or TypeError"


def is_refused(call: Callable[[], object]) -> bool:
    """Whether the call raises one of REFUSALS."""
    try:
        call()
    except REFUSALS:
        return True
    return False


def check(got: object, expected: object, what: str, rank: int | None = None) -> None:
    """Raise AssertionError if the two are not the same to the last bit.

    Raised by hand: pytest explains the asserts of test modules only.

    Args:
        got: what there is.
        expected: what there must be.
        what: the operation, group and dtype, and of which tensor or object.
        rank: whose it is; the calling rank's, if not given.
    """
    if same(got, expected):
        return
    if rank is None and dist.is_initialized():
        rank = dist.get_rank()
    where = what if rank is None else f"rank {rank}: {what}"
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        raise AssertionError(f"{where} {difference(got, expected)}")
    raise AssertionError(f"{where}: got {got}, expected {expected}")


def check_ranks(got: Sequence[object], expected: Sequence[object], what: str) -> None:
    """``check`` what each rank returned."""
    for rank, (each, want) in enumerate(zip(got, expected, strict=True)):
        check(each, want, what, rank)


def check_refused(refused: object, on: int, what: str) -> None:
    """Raise AssertionError if a call was not refused on a rank."""
    if refused is not True:
        raise AssertionError(f"rank {on}: {what} was not refused: {REFUSED_BY} was expected")


# ---- What the backend claims ---------------------------------------------------------------------


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def claimed_dtypes(smp_world: SmpWorld) -> list[torch.dtype]:
    """Dtypes that the backend moves."""
    return [dtype for dtype in ALL if _name(dtype) in smp_world.capabilities.dtypes]


def dtypes(smp_world: SmpWorld) -> st.SearchStrategy[torch.dtype]:
    """Draw a dtype that the backend moves by messages."""
    moved = smp_world.capabilities.moves(Capability.POINT_TO_POINT)
    found = [dtype for dtype in ALL if _name(dtype) in moved]
    return st.sampled_from(found or not_supported("no dtype of messages is claimed"))


#: The dtype of what is not about dtypes: whoever moves tensors for training moves this one.
PLAIN = torch.float32


# ---- Sizes of objects ----------------------------------------------------------------------------

#: Bytes that an object carries beside what is looked at: what is large may go another way.
paddings = st.sampled_from([0, 5_000, 200_000])


# ---- Groups --------------------------------------------------------------------------------------

Ranks = tuple[int, ...]  # of a group, in its order


@contextlib.contextmanager
def new_groups(groups: Sequence[Ranks | None]) -> Iterator[list[Any]]:
    """This rank's handles on new groups of these ranks, destroyed at the end; None is the world.

    Called by every rank. No rank destroys a group that another may be using, hence the barrier; it
    is one of the object transport, so that what is tested is not disturbed.
    """
    handles = [
        dist.group.WORLD if ranks is None else dist.new_group(list(ranks), sort_ranks=False)
        for ranks in groups
    ]
    yield handles
    if any(ranks is not None for ranks in groups):
        smp.barrier()
    for ranks, handle in zip(groups, handles, strict=True):
        if ranks is not None and dist.get_rank() in ranks:
            dist.destroy_process_group(handle)


def groups(
    smp_world: SmpWorld, ranks: int, least: int = 1, most: int | None = None
) -> st.SearchStrategy[Ranks]:
    """Groups of a world of so many ranks, in any order if the backend claims that, else ascending."""
    return strategies.groups(ranks, min_size=least, max_size=most).map(_order(smp_world))


def _order(smp_world: SmpWorld) -> Callable[[Sequence[int]], Ranks]:
    """What makes of ranks a group whose order the backend can keep."""
    if Capability.GROUP_ORDER in smp_world.capabilities:
        return tuple
    return lambda ranks: tuple(sorted(ranks))


def groups_of_all(smp_world: SmpWorld, ranks: Sequence[int]) -> st.SearchStrategy[Ranks]:
    """Groups of all these ranks, in any order that the backend can keep."""
    return st.permutations(ranks).map(_order(smp_world))


def groups_of(smp_world: SmpWorld, ranks: int, least: int = 1) -> st.SearchStrategy[Ranks | None]:
    """As ``groups``; the world only, if the backend does not claim what ``new_groups`` needs."""
    if not {Capability.GROUPS, Capability.OBJECTS} <= smp_world.capabilities.claims:
        return st.none()
    return groups(smp_world, ranks, least)


def is_member(handle: Any) -> bool:
    """Whether this rank is in the group."""
    return bool(handle != dist.GroupMember.NON_GROUP_MEMBER)


def overlapping_groups(
    smp_world: SmpWorld, ranks: int, least: int = 2
) -> st.SearchStrategy[list[Ranks]]:
    """Groups of a world of so many ranks, drawn apart: many overlap."""
    return st.lists(groups(smp_world, ranks), min_size=least, max_size=4)


# ---- Messages ------------------------------------------------------------------------------------


#: The largest is the one up to which MPI promises tags; there are two pairs that 8 bits cannot tell
#: apart.
TAGS = (0, 1, 2, 7, 100, 256, 257, 2**15 - 1)


def tags(smp_world: SmpWorld, among: Sequence[int] = TAGS) -> st.SearchStrategy[int]:
    """Tags among these; 0 only, if the backend claims no others."""
    return st.sampled_from(among) if Capability.TAGS in smp_world.capabilities else st.just(0)


class GroupMessage(NamedTuple):
    """One tensor that goes from one position of a group to another."""

    src: int
    dest: int
    tag: int = 0
    numel: int = 1


def content(message: GroupMessage, number: int, of: int, dtype: torch.dtype) -> Tensor:
    """What the ``number``-th of so many messages brings."""
    return made(TensorSpec((message.numel,), dtype), number, of)


def in_order(numbers: Sequence[int], messages: Sequence[GroupMessage]) -> list[int]:
    """These numbers of messages, with those of one sender, receiver and tag in ascending order."""
    waiting: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number in sorted(numbers):
        waiting[messages[number][:3]].append(number)
    return [waiting[messages[number][:3]].pop(0) for number in numbers]


class GroupExchange(NamedTuple):
    """Messages of one group, and in which orders each rank posts them and waits for them.

    Attributes:
        posts: for each position the numbers of all messages, in an order that ``in_order`` leaves.
        waits: the same, in any order.
        blocking: whether ranks post their sends only, and then receive by calls that block.
    """

    messages: list[GroupMessage]
    posts: list[list[int]]
    waits: list[list[int]]
    blocking: bool
    dtype: torch.dtype


@st.composite
def exchanges(
    draw: st.DrawFn,
    positions: int,
    messages: st.SearchStrategy[list[GroupMessage]],
    dtypes: st.SearchStrategy[torch.dtype],
    blocking: bool | None = None,
) -> GroupExchange:
    """Exchanges among so many ranks; ``blocking`` is drawn if not given."""
    drawn = draw(messages)
    orders = st.permutations(range(len(drawn)))
    return GroupExchange(
        drawn,
        [in_order(draw(orders), drawn) for _ in range(positions)],
        [list(draw(orders)) for _ in range(positions)],
        draw(st.booleans()) if blocking is None else blocking,
        draw(dtypes),
    )


def post(message: GroupMessage, me: int, tensor: Tensor, group: Any) -> Any:
    """Post this rank's side of the message; its work."""
    if me == message.src:
        return dist.isend(tensor, group_dst=message.dest, group=group, tag=message.tag)
    return dist.irecv(tensor, group_src=message.src, group=group, tag=message.tag)


def take_part(exchange: GroupExchange, group: Any) -> None:
    """Play this rank's part; every message is looked at after its own wait, and again at the end."""
    me, total = dist.get_rank(group), len(exchange.messages)
    works: dict[int, Any] = {}
    held: dict[int, tuple[Tensor, Tensor]] = {}
    received = []
    for number in exchange.posts[me]:
        message = exchange.messages[number]
        if me not in message[:2]:
            continue
        value = content(message, number, total, exchange.dtype)
        tensor = value.clone() if me == message.src else value.new_zeros(value.shape)
        held[number] = tensor, value
        if me == message.dest and exchange.blocking:
            received.append(number)
        else:
            works[number] = post(message, me, tensor, group)
    for number in received:
        message = exchange.messages[number]
        dist.recv(held[number][0], group_src=message.src, group=group, tag=message.tag)
        check(*held[number], f"{message} of {_name(exchange.dtype)} after recv")
    for number in exchange.waits[me]:
        if number in works:
            works[number].wait()
            what = f"{exchange.messages[number]} of {_name(exchange.dtype)}"
            check(*held[number], f"{what} after its wait")
    for number, (tensor, value) in held.items():
        what = f"{exchange.messages[number]} of {_name(exchange.dtype)}"
        check(tensor, value, f"{what} at the end")


# ---- Collective calls ----------------------------------------------------------------------------


class GroupCall(NamedTuple):
    """One collective call of a group."""

    kind: str  #: a name in COLLECTIVES
    dtype: torch.dtype
    numel: int = 1  #: of what one rank has for another
    root: int = 0  #: a position in the group
    group: int = 0  #: an index of a list of groups


class Side(NamedTuple):
    """One rank's side of a call."""

    call: GroupCall
    number: int  #: of the call in its program: calls bring different values
    of: int  #: how many calls the program has
    group: Any
    asynchronous: bool

    @property
    def position(self) -> int:
        """In the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Of the group."""
        return dist.get_world_size(self.group)

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.position == self.call.root

    def part(self, src: int, dest: int = 0) -> Tensor:
        """What one position has for another. Sums over all ranks are exact."""
        bound = min(2**11, NUMBERS[self.call.dtype].largest_bound // MOST_RANKS)
        spec = TensorSpec((self.call.numel,), self.call.dtype, bound=bound)
        number = (self.number * self.size + src) * self.size + dest
        return spec.make(number, self.of * self.size * self.size)

    def parts(self) -> list[Tensor]:
        """What this rank has for each position."""
        return [self.part(self.position, dest) for dest in range(self.size)]

    def from_all(self, dest: int = 0) -> list[Tensor]:
        """What each position has for ``dest``."""
        return [self.part(src, dest) for src in range(self.size)]

    def total(self, dest: int = 0) -> Tensor:
        """The sum of what each position has for ``dest``."""
        wide = torch.complex128 if self.call.dtype.is_complex else torch.float64
        return (
            torch.stack([part.to(wide) for part in self.from_all(dest)]).sum(0).to(self.call.dtype)
        )

    def blank(self, parts: int = 1) -> Tensor:
        """A tensor to write so many parts to."""
        return torch.zeros(parts * self.call.numel, dtype=self.call.dtype)

    @property
    def how(self) -> dict[str, Any]:
        """The arguments that all calls take."""
        return {"group": self.group, "async_op": self.asynchronous}


class IssuedCall(NamedTuple):
    """What a call returned, the tensors that it writes, and what must be in them once it is done."""

    side: Side
    work: Any
    outputs: list[Tensor]
    expected: list[Tensor]

    def look(self, when: str) -> None:
        """Raise AssertionError if the outputs are not as expected."""
        call, ranks = self.side.call, dist.get_process_group_ranks(self.side.group)
        what = (
            f"{call.kind} of {call.numel} {_name(call.dtype)}, root at {call.root} of the group "
            f"{ranks}, call {self.side.number} of {self.side.of}"
        )
        for at, (got, expected) in enumerate(zip(self.outputs, self.expected, strict=True)):
            check(got, expected, f"{what}, {when}: output {at}")

    def finish(self) -> None:
        """Wait, and look at the outputs."""
        self.work.wait()
        self.look("after its wait")


def _barrier(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    return dist.barrier(**at.how), [], []


def _broadcast(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    tensor = at.part(at.call.root) if at.is_root else at.blank()
    work = dist.broadcast(tensor, group_src=at.call.root, **at.how)
    return work, [tensor], [at.part(at.call.root)]


def _all_reduce(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    tensor = at.part(at.position)
    return dist.all_reduce(tensor, **at.how), [tensor], [at.total()]


def _reduce(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    tensor = at.part(at.position)
    work = dist.reduce(tensor, group_dst=at.call.root, **at.how)
    return (work, [tensor], [at.total()]) if at.is_root else (work, [], [])


def _all_gather(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    outputs = [at.blank() for _ in range(at.size)]
    return dist.all_gather(outputs, at.part(at.position), **at.how), outputs, at.from_all()


def _all_gather_single(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    output = at.blank(at.size)
    work = dist.all_gather_single(output, at.part(at.position), **at.how)
    return work, [output], [torch.cat(at.from_all())]


def _gather(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    outputs = [at.blank() for _ in range(at.size)] if at.is_root else []
    work = dist.gather(at.part(at.position), outputs or None, group_dst=at.call.root, **at.how)
    return work, outputs, at.from_all() if at.is_root else []


def _scatter(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    output = at.blank()
    work = dist.scatter(
        output, at.parts() if at.is_root else None, group_src=at.call.root, **at.how
    )
    return work, [output], [at.part(at.call.root, at.position)]


def _reduce_scatter(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    output = at.blank()
    return dist.reduce_scatter(output, at.parts(), **at.how), [output], [at.total(at.position)]


def _reduce_scatter_single(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    output = at.blank()
    work = dist.reduce_scatter_single(output, torch.cat(at.parts()), **at.how)
    return work, [output], [at.total(at.position)]


def _all_to_all(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    outputs = [at.blank() for _ in range(at.size)]
    return dist.all_to_all(outputs, at.parts(), **at.how), outputs, at.from_all(at.position)


def _all_to_all_single(at: Side) -> tuple[Any, list[Tensor], list[Tensor]]:
    output = at.blank(at.size)
    work = dist.all_to_all_single(output, torch.cat(at.parts()), **at.how)
    return work, [output], [torch.cat(at.from_all(at.position))]


class CallKind(NamedTuple):
    """A kind of collective call: the capability that it needs, and one rank's side of it."""

    capability: Capability
    issue: Callable[[Side], tuple[Any, list[Tensor], list[Tensor]]]
    reduces: bool = False


COLLECTIVES: Mapping[str, CallKind] = {
    "all_gather": CallKind(Capability.ALL_GATHER, _all_gather),
    "all_reduce": CallKind(Capability.ALL_REDUCE, _all_reduce, reduces=True),
    "broadcast": CallKind(Capability.BROADCAST, _broadcast),
    "reduce": CallKind(Capability.REDUCE, _reduce, reduces=True),
    "all_gather_single": CallKind(Capability.ALL_GATHER_SINGLE, _all_gather_single),
    "gather": CallKind(Capability.GATHER, _gather),
    "scatter": CallKind(Capability.SCATTER, _scatter),
    "reduce_scatter": CallKind(Capability.REDUCE_SCATTER, _reduce_scatter, reduces=True),
    "reduce_scatter_single": CallKind(
        Capability.REDUCE_SCATTER_SINGLE, _reduce_scatter_single, reduces=True
    ),
    "all_to_all": CallKind(Capability.ALL_TO_ALL, _all_to_all),
    "all_to_all_single": CallKind(Capability.ALL_TO_ALL_SINGLE, _all_to_all_single),
    "barrier": CallKind(Capability.BARRIER, _barrier),
}


def issue(
    call: GroupCall, number: int, of: int, group: Any, asynchronous: bool = True
) -> IssuedCall:
    """Make this rank's side of the call."""
    side = Side(call, number, of, group, asynchronous)
    return IssuedCall(side, *COLLECTIVES[call.kind].issue(side))


@st.composite
def calls(
    draw: st.DrawFn,
    smp_world: SmpWorld,
    sizes: Sequence[int],
    moving: bool = False,
    kind: str = "",
) -> GroupCall:
    """A call that the backend claims, on one of the groups of these sizes.

    Args:
        moving: leave out the barrier, and calls without elements: what has nothing to look at.
        kind: a name in COLLECTIVES, which is called; any, if empty.
    """
    claimed = smp_world.capabilities
    summed = claimed.reductions.get("SUM", frozenset())
    choice = [
        dtype
        for dtype in claimed_dtypes(smp_world)
        if NUMBERS[dtype].largest_bound >= 8 * MOST_RANKS
    ]
    dtype = draw(st.sampled_from(choice or not_supported("no dtype with room for sums is claimed")))
    kinds = [
        name
        for name, each in COLLECTIVES.items()
        if each.capability in claimed
        and (
            each.capability is Capability.BARRIER or _name(dtype) in claimed.moves(each.capability)
        )
        and (not each.reduces or _name(dtype) in summed)
        and not (moving and name == "barrier")
        and kind in ("", name)
    ]
    group = draw(st.integers(0, len(sizes) - 1))
    return GroupCall(
        draw(st.sampled_from(kinds or _none_fits(smp_world, kind))),
        dtype,
        draw(st.integers(1, 5) if moving else st.integers(1, 5) | st.just(0)),
        draw(st.integers(0, sizes[group] - 1)),
        group,
    )


def _none_fits(smp_world: SmpWorld, kind: str) -> NoReturn:
    """End the example: in another dtype the call may be claimed; or the property, where it is not."""
    if kind and COLLECTIVES[kind].capability in smp_world.capabilities:
        reject()
    not_supported(f"the backend does not claim {kind or 'a collective that fits'}")


def programs(
    smp_world: SmpWorld, sizes: Sequence[int], least: int = 2, most: int = 6
) -> st.SearchStrategy[list[GroupCall]]:
    """Calls on groups of these sizes, in the order in which every rank issues them."""
    return st.lists(calls(smp_world, sizes), min_size=least, max_size=most)


def issue_all(program: Sequence[GroupCall], handles: Sequence[Any]) -> dict[int, IssuedCall]:
    """Issue this rank's calls; by their numbers."""
    return {
        number: issue(call, number, len(program), handles[call.group])
        for number, call in enumerate(program)
        if is_member(handles[call.group])
    }
