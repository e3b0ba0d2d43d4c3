"""Bugs of tensor point-to-point: matching, buffers, waits, ranks and groups."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from conformance.mutants.blocks import PerRun
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from pytest_smp.ranks.sim import mailbox
from pytest_smp.ranks.sim.mailbox import Mailbox, Post
from pytest_smp.ranks.sim.process_group import SharedGroup, SimProcessGroup
from pytest_smp.ranks.sim.work import SimWork
from smp_core.errors import RankError, UnsupportedError, VerdictError
from smp_core.transport import current_rank
from smp_core.transport.memory import InFlightBuffer
from smp_core.transport.peers import ANY, Source

BUGS = Bugs("point-to-point")

Tensor = torch.Tensor

#: The exceptions that a wrong match causes: wrong values, or a verdict on the world.
EITHER = (*ASSERTION, VerdictError)


class FinishedWork(dist.Work):
    """A work that has completed from the start."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


def wrap_dist(patch: Patch, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``torch.distributed.name`` by a function that gets the original first."""
    patch.setattr(dist, name, functools.partial(wrapper, getattr(dist, name)))


def posted(
    patch: Patch,
    change: Callable[[SimProcessGroup, str, Tensor, Any, int], tuple[Tensor, Source, int]],
) -> None:
    """Make every send and receive use the tensor, peer and tag that ``change`` returns."""
    post = SimProcessGroup._post

    def changed(
        self: SimProcessGroup, verb: str, tensors: list[Tensor], peer: Source, tag: int
    ) -> Any:
        tensor, peer, tag = change(self, verb, tensors[0], peer, tag)
        return post(self, verb, [tensor], peer, tag)

    patch.setattr(SimProcessGroup, "_post", changed)


def delivered(patch: Patch, change: Callable[[Post, Tensor], Tensor]) -> None:
    """Change what a receive gets."""
    values = Post.values

    def changed(self: Post, rank: int) -> list[Tensor]:
        return [change(self, value) for value in values(self, rank)]

    patch.setattr(Post, "values", changed)


# ---- Values and buffers --------------------------------------------------------------------------


@BUGS.enter("P2P-VALUE", kind="collectives and layout")
def through_float32(patch: Patch) -> None:
    """numbers of 64 bits pass through float32"""

    def narrow(post: Post, value: Tensor) -> Tensor:
        real = value.dtype.itemsize == 8 and not value.dtype.is_complex
        return value.to(torch.float32).to(value.dtype) if real else value

    delivered(patch, narrow)


@BUGS.enter("P2P-VALUE", kind="collectives and layout")
def last_element_lost(patch: Patch) -> None:
    """the last element of an odd number of elements is not sent"""

    def cut(post: Post, value: Tensor) -> Tensor:
        flat = value.clone().reshape(-1)
        if len(flat) % 2 and len(flat) > 1:
            flat[-1] = flat[0]
        return flat.reshape(value.shape)

    delivered(patch, cut)


@BUGS.enter("P2P-ZERO-SIZE", VerdictError, origin="B013", kind="collectives and layout")
def empty_receive_skipped(patch: Patch) -> None:
    """a receive without elements takes no message"""
    recv = SimProcessGroup.recv

    def skip(self: SimProcessGroup, tensors: list[Tensor], src: int, tag: int) -> Any:
        return recv(self, tensors, src, tag) if tensors[0].numel() else FinishedWork()

    patch.setattr(SimProcessGroup, "recv", skip)


def from_the_start(self: Any, verb: str, tensor: Tensor, peer: int, tag: int) -> Any:
    """The same shape, from the start of the storage."""
    return torch.as_strided(tensor, tensor.shape, tensor.stride(), 0), peer, tag


@BUGS.enter("P2P-OFFSET", origin="B008", kind="collectives and layout")
def offset_of_the_sent_ignored(patch: Patch) -> None:
    """a send reads from the start of the storage"""
    posted(
        patch,
        lambda group, verb, tensor, peer, tag: (
            from_the_start(group, verb, tensor, peer, tag)
            if verb == "send"
            else (tensor, peer, tag)
        ),
    )


@BUGS.enter("P2P-OFFSET", origin="B008", kind="collectives and layout")
def offset_of_the_received_ignored(patch: Patch) -> None:
    """a receive writes to the start of the storage"""
    posted(
        patch,
        lambda group, verb, tensor, peer, tag: (
            from_the_start(group, verb, tensor, peer, tag)
            if verb == "recv"
            else (tensor, peer, tag)
        ),
    )


@BUGS.enter("P2P-NON-CONTIGUOUS", origin="B001", kind="collectives and layout")
def views_as_if_dense(patch: Patch) -> None:
    """a send reads a view as if its elements lay densely from the first one on"""

    def dense(group: Any, verb: str, tensor: Tensor, peer: int, tag: int) -> Any:
        if verb == "send" and not tensor.is_contiguous():
            strides = torch.empty(tensor.shape).stride()
            tensor = torch.as_strided(tensor, tensor.shape, strides, tensor.storage_offset())
        return tensor, peer, tag

    posted(patch, dense)


@BUGS.enter("P2P-LARGE", origin="B148", kind="errors, hangs, pickling and resources")
def buffer_of_a_million_elements(patch: Patch) -> None:
    """only the first million elements of a message are sent"""

    def cut(post: Post, value: Tensor) -> Tensor:
        whole = value.clone().reshape(-1)
        whole[10**6 :] = whole[0]
        return whole.reshape(value.shape)

    delivered(patch, cut)


@BUGS.enter("P2P-LARGE", kind="errors, hangs, pickling and resources")
def last_element_of_middle_sizes(patch: Patch) -> None:
    """messages of 2,000 to 10,000 elements lose the last: between two ways of sending"""

    def cut(post: Post, value: Tensor) -> Tensor:
        whole = value.clone().reshape(-1)
        if 2_000 <= len(whole) <= 10_000:
            whole[-1] = whole[0]
        return whole.reshape(value.shape)

    delivered(patch, cut)


@BUGS.enter("P2P-ORDER", origin="B055")
def messages_of_the_first_size(patch: Patch) -> None:
    """every message of a pair has the size of its first; what lies behind is not written"""
    sizes = PerRun(dict)

    def cut(post: Post, value: Tensor) -> Tensor:
        first = sizes().setdefault((post.context.rank, post.peer), value.numel())
        whole = value.clone().reshape(-1)
        whole[first:] = 0
        return whole.reshape(value.shape)

    delivered(patch, cut)


@BUGS.enter("P2P-REUSE", origin="B026", kind="asynchronous work")
def sent_without_a_copy(patch: Patch) -> None:
    """a send returns at once, and the receiver reads the tensor when it comes"""
    post = SimProcessGroup._post

    def send(self: SimProcessGroup, tensors: list[Tensor], dest: int, tag: int) -> Any:
        work = post(self, "send", tensors, dest, tag)
        if not work._operation.done:
            work.in_flight.inputs = tensors
        self._context.fabric.unwaited.pop(id(work), None)
        return FinishedWork()

    patch.setattr(SimProcessGroup, "send", send)


def landing_twice(patch: Patch) -> None:
    """Make an operation also write its outputs over those of this rank's operation before."""
    before = PerRun(dict)
    land = InFlightBuffer.land

    def again(self: InFlightBuffer, values: Any) -> None:
        context = current_rank.current()
        assert context is not None
        land(self, values)
        shapes = tuple((each.shape, each.dtype) for each in self.outputs)
        earlier = before().get((context.rank, shapes), [])
        for old, new in zip(earlier, self.outputs, strict=False):
            old.data.copy_(new)
        before()[context.rank, shapes] = self.outputs

    patch.setattr(InFlightBuffer, "land", again)


@BUGS.enter("P2P-SEPARATE", origin="B059", kind="collectives and layout")
def one_receive_buffer(patch: Patch) -> None:
    """a receive overwrites the tensor of the receive before"""
    landing_twice(patch)


# ---- Matching ------------------------------------------------------------------------------------


def newest_first(patch: Patch, applies: Callable[[Post], bool]) -> None:
    """Match these posts with the newest that fits."""
    post = Mailbox.post

    def turned(self: Mailbox, new: Post) -> None:
        sends: Any = new.peer  # of a receive it may be ANY
        candidates = self._receives[sends] if new.verb == "send" else self._sends[new.me]
        if not applies(new):
            return post(self, new)
        candidates.reverse()
        post(self, new)
        candidates.reverse()

    patch.setattr(Mailbox, "post", turned)


@BUGS.enter("P2P-ORDER", *EITHER)
def newest_message_first(patch: Patch) -> None:
    """the newest of several messages is received first"""
    newest_first(patch, lambda post: True)


@BUGS.enter("P2P-ANY-SOURCE-ORDER", *EITHER)
def newest_from_any_source(patch: Patch) -> None:
    """a receive without a source takes the newest message"""
    newest_first(patch, lambda post: post.peer is ANY)


@BUGS.enter("P2P-TAG", origin="B052")
def tag_ignored(patch: Patch) -> None:
    """messages match by partner only, not by tag"""
    posted(patch, lambda group, verb, tensor, peer, tag: (tensor, peer, 0))


@BUGS.enter("P2P-TAG", *EITHER)
def tags_of_8_bits(patch: Patch) -> None:
    """tags that differ by a multiple of 256 are one"""
    posted(patch, lambda group, verb, tensor, peer, tag: (tensor, peer, tag % 256))


@BUGS.enter("P2P-SELF", RankError)
def nothing_to_myself(patch: Patch) -> None:
    """isend and irecv refuse the rank that calls them"""

    def refuse(group: SimProcessGroup, verb: str, tensor: Tensor, peer: int, tag: int) -> Any:
        if peer == group._position:
            raise RankError(f"{verb}: rank {peer} calls, and cannot be the partner")
        return tensor, peer, tag

    posted(patch, refuse)


@BUGS.enter("P2P-SELF", *EITHER)
def to_myself_through_one_buffer(patch: Patch) -> None:
    """a rank receives from itself the last message that it has sent to itself"""
    last = PerRun(dict)

    def remember(group: SimProcessGroup, verb: str, tensor: Tensor, peer: int, tag: int) -> Any:
        if verb == "send" and peer == group._position:
            last()[peer, tensor.shape, tensor.dtype] = tensor.clone()
        return tensor, peer, tag

    def newest(post: Post, value: Tensor) -> Tensor:
        found: Tensor = last().get((post.me, value.shape, value.dtype), value)
        return found if post.peer == post.me else value

    posted(patch, remember)
    delivered(patch, newest)


@BUGS.enter("P2P-PEER")
def partner_ignored(patch: Patch) -> None:
    """a receive takes what came first, from any rank"""
    posted(
        patch,
        lambda group, verb, tensor, peer, tag: (tensor, ANY if verb == "recv" else peer, tag),
    )


@BUGS.enter("P2P-BOTH-WAYS", origin="B052")
def direction_ignored(patch: Patch) -> None:
    """a receive from a rank gives what was sent to it last"""
    sent = PerRun(dict)

    def remember(group: SimProcessGroup, verb: str, tensor: Tensor, peer: int, tag: int) -> Any:
        if verb == "send":
            sent()[group._context.rank, peer, tag] = tensor.clone()
        return tensor, peer, tag

    def own(post: Post, value: Tensor) -> Tensor:
        mine: Tensor = sent().get((post.context.rank, post.peer, post.tag), value)
        return mine if mine.numel() == value.numel() else value

    posted(patch, remember)
    delivered(patch, own)


@BUGS.enter("P2P-BOTH-WAYS", VerdictError, origin="B047")
def asynchronous_send_blocks(patch: Patch) -> None:
    """isend returns when the message is received, so two ranks that send first never receive"""
    post = SimProcessGroup._post

    def send(self: SimProcessGroup, tensors: list[Tensor], dest: int, tag: int) -> Any:
        work = post(self, "send", tensors, dest, tag)
        work.wait()
        return work

    patch.setattr(SimProcessGroup, "send", send)


@BUGS.enter("P2P-WAIT-OWN", VerdictError, origin="B049")
def wait_for_all(patch: Patch) -> None:
    """a wait waits for every operation that the rank has issued"""
    wait = SimWork.wait

    def wait_all(self: SimWork, timeout: Any = None) -> bool:
        for work in list(self._context.fabric.unwaited.values()):
            wait(work)
        return wait(self)

    patch.setattr(SimWork, "wait", wait_all)


@BUGS.enter("P2P-COMPLETED", kind="asynchronous work")
def messages_never_complete(patch: Patch) -> None:
    """is_completed of a send or receive is False, waited for or not"""
    completed = SimWork.is_completed
    patch.setattr(
        SimWork,
        "is_completed",
        lambda self: not isinstance(self._operation, Post) and completed(self),
    )


# ---- Ranks and groups ----------------------------------------------------------------------------


@BUGS.enter("P2P-SOURCE", kind="groups, roots and rank mapping")
def recv_returns_the_receiver(patch: Patch) -> None:
    """recv returns the rank that received"""

    def own(recv: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        recv(*args, **kwargs)
        return dist.get_rank()

    wrap_dist(patch, "recv", own)


@BUGS.enter("P2P-GROUP", *EITHER, ValueError, origin="B031", kind="groups, roots and rank mapping")
def world_rank_as_position(patch: Patch) -> None:
    """a world rank that could be a position in the group is taken for one"""
    canonical = c10d._canonicalize_group_rank

    def mixed(group: Any, global_rank: Any = None, group_rank: Any = None, *args: Any) -> Any:
        if global_rank is not None and group_rank is None and global_rank < group.size():
            return global_rank
        return canonical(group, global_rank, group_rank, *args)

    patch.setattr(c10d, "_canonicalize_group_rank", mixed)


@BUGS.enter("P2P-GROUP-RANK", *EITHER, origin="B041", kind="groups, roots and rank mapping")
def position_among_the_sorted(patch: Patch) -> None:
    """positions count in the ascending list of the group's ranks"""

    def other(group: SimProcessGroup, verb: str, tensor: Tensor, peer: Any, tag: int) -> Any:
        ranks = group._shared.group.ranks
        return tensor, peer if peer is ANY else ranks.index(sorted(ranks)[peer]), tag

    posted(patch, other)


@BUGS.enter("P2P-GROUP-ASYNC", *EITHER)
def tags_in_the_world_only(patch: Patch) -> None:
    """on a group that was made, messages match by partner only, not by tag"""

    def world_only(group: SimProcessGroup, verb: str, tensor: Tensor, peer: int, tag: int) -> Any:
        return tensor, peer, tag if group is dist.group.WORLD else 0

    posted(patch, world_only)


@BUGS.enter("P2P-GROUP-APART", *EITHER, kind="groups, roots and rank mapping")
def mailbox_of_the_members(patch: Patch) -> None:
    """groups of the same ranks have one mailbox"""
    boxes = PerRun(dict)
    init = SharedGroup.__init__

    def shared(self: SharedGroup, group: Any) -> None:
        init(self, group)
        self.mailbox = boxes().setdefault(group.ranks, self.mailbox)

    patch.setattr(SharedGroup, "__init__", shared)


@BUGS.enter("P2P-ANY-SOURCE", *ASSERTION, ValueError)
def source_is_always_0(patch: Patch) -> None:
    """a receive without a source says that rank 0 sent"""
    patch.setattr(SimWork, "_source_rank", lambda self: 0)


@BUGS.enter("P2P-ANY-SOURCE")
def any_source_in_float32_only(patch: Patch) -> None:
    """a receive without a source gives zeros, but for float32"""

    def lose(post: Post, value: Tensor) -> Tensor:
        kept = post.peer != ANY or value.dtype is torch.float32
        return value if kept else torch.zeros_like(value)

    delivered(patch, lose)


@BUGS.enter("P2P-ANY-SOURCE", kind="asynchronous work")
def any_source_gives_the_first(patch: Patch) -> None:
    """all receives without a source that are in flight together give the first message"""
    first = PerRun(dict)
    flying = PerRun(set)

    def irecv(original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = original(tensor, *args, **kwargs)
        if not args and not {"src", "group_src"} & set(kwargs) and work is not None:
            flying().add(id(work._operation))
        return work

    def stale(post: Post, value: Tensor) -> Tensor:
        if post.peer != ANY or id(post) not in flying():
            return value
        found: Tensor = first().setdefault(post.context.rank, value)
        return found

    wrap_dist(patch, "irecv", irecv)
    delivered(patch, stale)


@BUGS.enter("P2P-ANY-SOURCE", *EITHER)
def any_source_takes_twice(patch: Patch) -> None:
    """every second receive without a source gives the message before once more"""
    last = PerRun(dict)
    counts = PerRun(lambda: defaultdict(int))

    def again(post: Post, value: Tensor) -> Tensor:
        if post.peer != ANY:
            return value
        counts()[post.context.rank] += 1
        if counts()[post.context.rank] % 2:
            last()[post.context.rank] = value
        old: Tensor = last()[post.context.rank]
        return old if old.numel() == value.numel() else value

    delivered(patch, again)


@BUGS.enter("P2P-ANY-SOURCE-GROUP", origin="B035", kind="groups, roots and rank mapping")
def any_source_gives_a_position(patch: Patch) -> None:
    """recv without a source returns the sender's position in the group"""

    def position(recv: Callable[..., int], tensor: Tensor, *args: Any, **kwargs: Any) -> int:
        sender = recv(tensor, *args, **kwargs)
        if args or {"src", "group_src"} & set(kwargs) or sender < 0:
            return sender
        ranks = dist.get_process_group_ranks(kwargs.get("group"))
        return ranks.index(sender)

    wrap_dist(patch, "recv", position)


@BUGS.enter("P2P-ANY-SOURCE-TAG")
def any_source_any_tag(patch: Patch) -> None:
    """a receive without a source takes messages of any tag"""
    fit = mailbox._fit

    def loose(one: Post, other: Post) -> bool:
        return ANY in (one.peer, other.peer) or fit(one, other)

    patch.setattr(mailbox, "_fit", loose)


# ---- Batches -------------------------------------------------------------------------------------


def issued(operation: Any) -> Any:
    """The operation of a batch, issued."""
    peer = "group_dst" if operation.op is dist.isend else "group_src"
    return operation.op(
        operation.tensor,
        group=operation.group,
        tag=operation.tag,
        **{peer: operation.group_peer},
    )


@BUGS.enter("P2P-BATCH", VerdictError, origin="B050")
def batch_one_by_one(patch: Patch) -> None:
    """a batch waits for each operation before it issues the next"""

    def batch(original: Any, operations: list[Any]) -> list[Any]:
        works = []
        for operation in operations:
            works.append(issued(operation))
            works[-1].wait()
        return works

    wrap_dist(patch, "batch_isend_irecv", batch)


@BUGS.enter("P2P-BATCH-ORDER")
def batch_receives_backwards(patch: Patch) -> None:
    """a batch issues its receives from the last to the first"""

    def batch(original: Any, operations: list[Any]) -> list[Any]:
        order = sorted(range(len(operations)), key=lambda at: (operations[at].op is dist.irecv, at))
        sends = sum(operation.op is dist.isend for operation in operations)
        works = {at: issued(operations[at]) for at in [*order[:sends], *order[sends:][::-1]]}
        return [works[at] for at in range(len(operations))]

    wrap_dist(patch, "batch_isend_irecv", batch)


@BUGS.enter("P2P-BATCH-WAIT", kind="asynchronous work")
def first_request_stands_for_all(patch: Patch) -> None:
    """all requests of a batch but the first wait for nothing"""

    def batch(original: Any, operations: list[Any]) -> list[Any]:
        first, *others = original(operations)
        return [first, *(FinishedWork() for _ in others)]

    wrap_dist(patch, "batch_isend_irecv", batch)


@BUGS.enter("P2P-BATCH-GROUP", *EITHER, RankError, kind="groups, roots and rank mapping")
def batch_by_world_rank(patch: Patch) -> None:
    """a batch on a group takes the world ranks of its partners for positions"""

    def batch(original: Any, operations: list[Any]) -> list[Any]:
        for operation in operations:
            operation.group_peer = operation.peer
        return list(original(operations))

    wrap_dist(patch, "batch_isend_irecv", batch)


@BUGS.enter("P2P-BATCH-GROUP", UnsupportedError, kind="groups, roots and rank mapping")
def batch_in_the_world_only(patch: Patch) -> None:
    """a batch on a group of fewer ranks than the world is refused"""

    def batch(original: Any, operations: list[Any]) -> list[Any]:
        if dist.get_world_size(operations[0].group) < dist.get_world_size():
            raise UnsupportedError("batch_isend_irecv: on the world only")
        return list(original(operations))

    wrap_dist(patch, "batch_isend_irecv", batch)


# ---- Errors --------------------------------------------------------------------------------------


@BUGS.enter("P2P-ERROR-SELF", kind="errors, hangs, pickling and resources")
def send_to_myself_ignored(patch: Patch) -> None:
    """a send to oneself does nothing"""

    def send(original: Any, tensor: Tensor, dst: Any = None, **kwargs: Any) -> None:
        own = dist.get_rank(kwargs.get("group") or dist.group.WORLD)
        if own not in (dst, kwargs.get("group_dst")):
            original(tensor, dst, **kwargs)

    wrap_dist(patch, "send", send)


@BUGS.enter("P2P-ERROR-RANK", *EITHER, kind="errors, hangs, pickling and resources")
def partners_wrap_around(patch: Patch) -> None:
    """a partner beyond the last rank counts from the first again"""
    posted(
        patch,
        lambda group, verb, tensor, peer, tag: (
            tensor,
            peer if peer is ANY else peer % group.size(),
            tag,
        ),
    )


@BUGS.enter("P2P-ERROR-NEGATIVE", *EITHER, kind="errors, hangs, pickling and resources")
def partners_count_from_the_last(patch: Patch) -> None:
    """a negative partner counts from the last rank, as an index does"""

    def index(group: SimProcessGroup, verb: str, tensor: Tensor, peer: Any, tag: int) -> Any:
        return tensor, peer if peer is ANY or peer >= 0 else peer % group.size(), tag

    posted(patch, index)


@BUGS.enter("P2P-ERROR-NEGATIVE", *EITHER, kind="errors, hangs, pickling and resources")
def minus_one_is_any_source(patch: Patch) -> None:
    """a receive from rank -1 takes a message of any rank"""

    def anybody(group: SimProcessGroup, verb: str, tensor: Tensor, peer: Any, tag: int) -> Any:
        return tensor, ANY if verb == "recv" and peer == -1 else peer, tag

    posted(patch, anybody)


@BUGS.enter(
    "P2P-ERROR-MEMBER", *EITHER, origin="B034", kind="errors, hangs, pickling and resources"
)
def outsiders_are_the_first(patch: Patch) -> None:
    """a partner outside the group is taken for its first rank"""
    canonical = c10d._canonicalize_group_rank

    def lenient(group: Any, global_rank: Any = None, group_rank: Any = None, *args: Any) -> Any:
        if global_rank is not None and global_rank not in dist.get_process_group_ranks(group):
            return 0
        return canonical(group, global_rank, group_rank, *args)

    patch.setattr(c10d, "_canonicalize_group_rank", lenient)


@BUGS.enter("P2P-ERROR-BOTH", *EITHER, kind="errors, hangs, pickling and resources")
def position_wins(patch: Patch) -> None:
    """the position counts if both a world rank and a position are given"""
    canonical = c10d._canonicalize_group_rank

    def lenient(group: Any, global_rank: Any = None, group_rank: Any = None, *args: Any) -> Any:
        world = global_rank if group_rank is None else None
        return canonical(group, world, group_rank, *args)

    patch.setattr(c10d, "_canonicalize_group_rank", lenient)


@BUGS.enter("P2P-NON-MEMBER", kind="errors, hangs, pickling and resources", origin="G16")
def outsiders_receive_from_0(patch: Patch) -> None:
    """recv returns 0 to a rank that is not in the group"""
    wrap_dist(patch, "recv", lambda recv, *args, **kwargs: max(recv(*args, **kwargs), 0))
