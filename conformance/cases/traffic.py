"""Helpers of the properties of traffic: groups, messages, and collective calls in flight.

Everything here is plain torch.distributed, on any backend. The receiving rank makes the expected tensor
itself, from the sender's recipe and number, and never by communication.
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

#: Settings of properties whose examples are programs of many calls: few examples show much.
few = share(0.2)

#: Settings of properties whose examples take long, or differ in little beside the dtype.
once = share(0)

#: The exceptions by which a call may refuse its arguments. The torch docs say RuntimeError where torch
#: raises ValueError, and TypeError where an argument is missing.
REFUSALS = (ValueError, RuntimeError, TypeError)


REFUSED_BY = "ValueError, RuntimeError or TypeError"


def is_refused(call: Callable[[], object]) -> bool:
    """Return whether the call raises one of REFUSALS."""
    try:
        call()
    except REFUSALS:
        return True
    return False


def check(got: object, expected: object, what: str, rank: int | None = None) -> None:
    """Raise AssertionError unless the two values are the same to the last bit.

    There is no assert statement here, because pytest explains only those of test modules.

    Args:
        got: the actual value.
        expected: the expected value.
        what: the name of the value for the message: operation, group, dtype, tensor or object.
        rank: the rank that got the value; by default the calling rank.
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
    """``check`` the results of all ranks, in the order of ranks. Raises AssertionError."""
    for rank, (each, want) in enumerate(zip(got, expected, strict=True)):
        check(each, want, what, rank)


def check_refused(refused: object, on: int, what: str) -> None:
    """Raise AssertionError unless ``refused`` is True, for a call on rank ``on``."""
    if refused is not True:
        raise AssertionError(f"rank {on}: {what} was not refused: {REFUSED_BY} was expected")


# ---- What the backend claims ---------------------------------------------------------------------


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def claimed_dtypes(smp_world: SmpWorld) -> list[torch.dtype]:
    """The dtypes that the backend moves."""
    return [dtype for dtype in ALL if _name(dtype) in smp_world.capabilities.dtypes]


def dtypes(smp_world: SmpWorld) -> st.SearchStrategy[torch.dtype]:
    """Draw a dtype that the backend moves by messages."""
    moved = smp_world.capabilities.moves(Capability.POINT_TO_POINT)
    found = [dtype for dtype in ALL if _name(dtype) in moved]
    return st.sampled_from(found or not_supported("no dtype of messages is claimed"))


#: The dtype of properties that are not about dtypes: every backend for training moves this one.
PLAIN = torch.float32


# ---- Sizes of objects ----------------------------------------------------------------------------

#: Bytes that an object carries beside the compared value: large objects may take another path.
paddings = st.sampled_from([0, 5_000, 200_000])


# ---- Groups --------------------------------------------------------------------------------------

Ranks = tuple[int, ...]  # the ranks of a group, in the group's order


@contextlib.contextmanager
def new_groups(groups: Sequence[Ranks | None]) -> Iterator[list[Any]]:
    """Make groups of these ranks, give this rank's handles on them, and destroy the groups at the end.

    None stands for the world. Every rank must enter. A barrier before the end keeps ranks from destroying
    a group that another rank still uses. The barrier is the object transport's, because one of the
    process groups could hide a fault of the calls under test.
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
    """Draw a group of a world of so many ranks: in any order if the backend claims that, else ascending."""
    return strategies.groups(ranks, min_size=least, max_size=most).map(_order(smp_world))


def _order(smp_world: SmpWorld) -> Callable[[Sequence[int]], Ranks]:
    """The function from ranks to a group: the identity, or sorting if the backend claims no group order."""
    if Capability.GROUP_ORDER in smp_world.capabilities:
        return tuple
    return lambda ranks: tuple(sorted(ranks))


def groups_of_all(smp_world: SmpWorld, ranks: Sequence[int]) -> st.SearchStrategy[Ranks]:
    """Draw a group of all these ranks, in any order that the backend can keep."""
    return st.permutations(ranks).map(_order(smp_world))


def groups_of(smp_world: SmpWorld, ranks: int, least: int = 1) -> st.SearchStrategy[Ranks | None]:
    """Draw a group like ``groups``; None, the world, if the backend lacks a claim that ``new_groups`` needs."""
    if not {Capability.GROUPS, Capability.OBJECTS} <= smp_world.capabilities.claims:
        return st.none()
    return groups(smp_world, ranks, least)


def is_member(handle: Any) -> bool:
    """Return whether this rank is in the group."""
    return bool(handle != dist.GroupMember.NON_GROUP_MEMBER)


def overlapping_groups(
    smp_world: SmpWorld, ranks: int, least: int = 2
) -> st.SearchStrategy[list[Ranks]]:
    """Draw ``least`` to 4 groups of a world of so many ranks, independently, so that many overlap."""
    return st.lists(groups(smp_world, ranks), min_size=least, max_size=4)


# ---- Messages ------------------------------------------------------------------------------------


#: The largest one is the largest tag that MPI promises. 0 and 256, and 1 and 257, are equal in 8 bits.
TAGS = (0, 1, 2, 7, 100, 256, 257, 2**15 - 1)


def tags(smp_world: SmpWorld, among: Sequence[int] = TAGS) -> st.SearchStrategy[int]:
    """Draw one of these tags; only 0 if the backend does not claim tags."""
    return st.sampled_from(among) if Capability.TAGS in smp_world.capabilities else st.just(0)


class GroupMessage(NamedTuple):
    """One tensor that goes from one position of a group to another."""

    src: int
    dest: int
    tag: int = 0
    numel: int = 1


def content(message: GroupMessage, number: int, of: int, dtype: torch.dtype) -> Tensor:
    """The tensor of the message with this number, among ``of`` messages."""
    return made(TensorSpec((message.numel,), dtype), number, of)


def in_order(numbers: Sequence[int], messages: Sequence[GroupMessage]) -> list[int]:
    """Reorder numbers of messages so that those of one sender, receiver and tag ascend."""
    waiting: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number in sorted(numbers):
        waiting[messages[number][:3]].append(number)
    return [waiting[messages[number][:3]].pop(0) for number in numbers]


class GroupExchange(NamedTuple):
    """Messages of one group, with the orders in which each rank posts them and waits for them.

    Attributes:
        messages: the messages; a message's number is its index.
        posts: the numbers of all messages for each position, in an order that ``in_order`` allows.
        waits: the numbers of all messages for each position, in any order.
        blocking: whether ranks post only their sends, and then receive by blocking calls.
        dtype: the dtype of all tensors.
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
    """Draw an exchange of a group with so many positions; ``blocking`` is drawn if it is None."""
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
    """Post this rank's side of the message, and return the work."""
    if me == message.src:
        return dist.isend(tensor, group_dst=message.dest, group=group, tag=message.tag)
    return dist.irecv(tensor, group_src=message.src, group=group, tag=message.tag)


def take_part(exchange: GroupExchange, group: Any) -> None:
    """Send and receive this rank's messages, and check each one after its wait and again at the end."""
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
    numel: int = 1  #: of the part that one rank has for another
    root: int = 0  #: a position in the group
    group: int = 0  #: an index of a list of groups


class Side(NamedTuple):
    """One rank's side of a call."""

    call: GroupCall
    number: int  #: of the call in its program; calls of different numbers have different values
    of: int  #: the number of calls in the program
    group: Any
    asynchronous: bool

    @property
    def position(self) -> int:
        """This rank's position in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return dist.get_world_size(self.group)

    @property
    def is_root(self) -> bool:
        """True if this rank is the root."""
        return self.position == self.call.root

    def part(self, src: int, dest: int = 0) -> Tensor:
        """The tensor that position ``src`` has for position ``dest``; sums over all ranks are exact."""
        bound = min(2**11, NUMBERS[self.call.dtype].largest_bound // MOST_RANKS)
        spec = TensorSpec((self.call.numel,), self.call.dtype, bound=bound)
        number = (self.number * self.size + src) * self.size + dest
        return spec.make(number, self.of * self.size * self.size)

    def parts(self) -> list[Tensor]:
        """The tensors that this rank has for each position."""
        return [self.part(self.position, dest) for dest in range(self.size)]

    def from_all(self, dest: int = 0) -> list[Tensor]:
        """The tensors that each position has for ``dest``."""
        return [self.part(src, dest) for src in range(self.size)]

    def total(self, dest: int = 0) -> Tensor:
        """The sum of the tensors that each position has for ``dest``."""
        wide = torch.complex128 if self.call.dtype.is_complex else torch.float64
        return (
            torch.stack([part.to(wide) for part in self.from_all(dest)]).sum(0).to(self.call.dtype)
        )

    def blank(self, parts: int = 1) -> Tensor:
        """Make a tensor with room for so many parts."""
        return torch.zeros(parts * self.call.numel, dtype=self.call.dtype)

    @property
    def how(self) -> dict[str, Any]:
        """The arguments that all calls take."""
        return {"group": self.group, "async_op": self.asynchronous}


class IssuedCall(NamedTuple):
    """The work of an issued call, the tensors that the call writes, and their expected values."""

    side: Side
    work: Any
    outputs: list[Tensor]
    expected: list[Tensor]

    def look(self, when: str) -> None:
        """Raise AssertionError unless the outputs have their expected values."""
        call, ranks = self.side.call, dist.get_process_group_ranks(self.side.group)
        what = (
            f"{call.kind} of {call.numel} {_name(call.dtype)}, root at {call.root} of the group "
            f"{ranks}, call {self.side.number} of {self.side.of}"
        )
        for at, (got, expected) in enumerate(zip(self.outputs, self.expected, strict=True)):
            check(got, expected, f"{what}, {when}: output {at}")

    def finish(self) -> None:
        """Wait for the call, and check its outputs. Raises AssertionError."""
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
    """Issue this rank's side of the call."""
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
    """Draw a call that the backend claims, on one of the groups of these sizes.

    Args:
        draw: Hypothesis's.
        smp_world: the backend.
        sizes: the number of ranks of each group.
        moving: whether to leave out barriers and calls without elements, whose outputs are empty.
        kind: a name in COLLECTIVES that must be called; empty allows all.
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
    """Reject the example if the kind of call may be claimed in another dtype; otherwise end the property."""
    if kind and COLLECTIVES[kind].capability in smp_world.capabilities:
        reject()
    not_supported(f"the backend does not claim {kind or 'a collective that fits'}")


def programs(
    smp_world: SmpWorld, sizes: Sequence[int], least: int = 2, most: int = 6
) -> st.SearchStrategy[list[GroupCall]]:
    """Draw calls on groups of these sizes, in the order in which every rank issues them."""
    return st.lists(calls(smp_world, sizes), min_size=least, max_size=most)


def issue_all(program: Sequence[GroupCall], handles: Sequence[Any]) -> dict[int, IssuedCall]:
    """Issue this rank's calls of a program, and return them by number."""
    return {
        number: issue(call, number, len(program), handles[call.group])
        for number, call in enumerate(program)
        if is_member(handles[call.group])
    }
