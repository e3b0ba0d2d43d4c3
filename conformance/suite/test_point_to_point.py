"""Properties of messages: values, order, tags, partners, groups, any source, batches, errors."""

from __future__ import annotations

import dataclasses
import warnings
from collections import defaultdict
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from conformance.cases import traffic
from conformance.cases.draws import CHUNKS, around, needs, on_ranks, pairs, sizes
from conformance.cases.traffic import (
    PLAIN,
    GroupExchange,
    GroupMessage,
    Ranks,
    check,
    check_refused,
    exchanges,
    few,
    groups,
    groups_of_all,
    in_order,
    is_member,
    is_refused,
    new_groups,
    tags,
    take_part,
)
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import TensorSpec, lengths, shapes, tensors

# ---- One message ---------------------------------------------------------------------------------


def pass_on(specs: list[TensorSpec], src: int, dest: int, asynchronous: bool) -> None:
    """Send the tensors of recipes from one rank to another, and check each one on the receiver."""
    me, world = dist.get_rank(), dist.get_world_size()
    for spec in specs:
        if me not in (src, dest):
            return
        tensor = spec.make(src, world) if me == src else spec.blank()
        if asynchronous:
            work = dist.isend(tensor, dest) if me == src else dist.irecv(tensor, src)
            assert work is not None
            work.wait()
        elif me == src:
            dist.send(tensor, dest)
        else:
            dist.recv(tensor, src)
        what = f"{'isend, irecv' if asynchronous else 'send, recv'} from {src} to {dest}: {spec}"
        check(tensor, spec.make(src, world), what)
        check(spec.damaged_guards(tensor), (), f"{what}: places written outside of the tensor")


def check_pass_on(
    smp_world: SmpWorld, data: st.DataObject, specs: st.SearchStrategy[TensorSpec], most: int = 3
) -> None:
    """Draw recipes and two ranks, and check that the tensors arrive, by blocking calls or others."""
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    drawn = data.draw(st.lists(specs, min_size=1, max_size=most), "specs")
    asynchronous = data.draw(st.booleans(), "asynchronous")
    smp_world.run(pass_on, drawn, src, dest, asynchronous, ranks=ranks)


def dense(spec: TensorSpec) -> TensorSpec:
    """The recipe of a contiguous tensor of the same shape and dtype, without an offset."""
    return TensorSpec(spec.shape, spec.dtype)


@requirement("P2P-VALUE")
@given(data=st.data())
@on_ranks
def test_values(smp_world: SmpWorld, data: st.DataObject) -> None:
    drawn = tensors(dtype=traffic.dtypes(smp_world), layout="contiguous").map(dense)
    check_pass_on(smp_world, data, drawn)


@requirement("P2P-ZERO-SIZE")
@given(data=st.data())
@few
def test_messages_without_elements(smp_world: SmpWorld, data: st.DataObject) -> None:
    shape = st.sampled_from([(0,), (1,), (0, 3), (2, 0), (2,)])
    drawn = tensors(dtype=traffic.dtypes(smp_world), layout="contiguous", shape=shape).map(dense)
    check_pass_on(smp_world, data, drawn, most=6)


@requirement("P2P-OFFSET")
@given(data=st.data())
@few
def test_parts_of_a_storage(smp_world: SmpWorld, data: st.DataObject) -> None:
    drawn = tensors(dtype=traffic.dtypes(smp_world), layout="contiguous")
    shifted = drawn.map(lambda spec: dataclasses.replace(spec, offset=spec.offset + 1))
    check_pass_on(smp_world, data, shifted)


def pass_view(spec: TensorSpec, src: int, dest: int, sparse: tuple[bool, bool]) -> None:
    """Send a view and check the received elements.

    ``sparse`` says for sender and receiver whether the tensor is the view, or contiguous.
    """
    me, world = dist.get_rank(), dist.get_world_size()
    if me not in (src, dest):
        return
    value = spec.make(src, world)
    lies = spec if sparse[me == dest] else dense(spec)
    if me == src:
        dist.send(value if lies is spec else value.contiguous(), dest)
        return
    got = lies.blank()
    dist.recv(got, src)
    what = f"send, recv from {src} to {dest}: {lies}"
    check(got, value, what)
    check(lies.damaged_guards(got), (), f"{what}: places written outside of the tensor")


@requirement("P2P-NON-CONTIGUOUS")
@given(data=st.data())
@few
def test_views(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    dtypes, shape = traffic.dtypes(smp_world), shapes(min_dims=2, max_side=4)
    layouts = ["strided", "sliced", "transposed"]
    spec = data.draw(tensors(dtype=dtypes, shape=shape, layout=layouts), "spec")
    sparse = data.draw(st.sampled_from([(True, False), (False, True), (True, True)]), "sparse")
    smp_world.run(pass_view, spec, src, dest, sparse, ranks=ranks)


@requirement("P2P-LARGE")
@pytest.mark.parametrize("chunk", CHUNKS)
@given(data=st.data())
@traffic.once
def test_large_messages(smp_world: SmpWorld, data: st.DataObject, chunk: int) -> None:
    needs(smp_world, 2)
    there, back = data.draw(around(chunk), "there"), data.draw(around(chunk), "back")
    messages = [GroupMessage(0, 1, numel=there), GroupMessage(1, 0, numel=back)]
    drawn = exchanges(2, st.just(messages), traffic.dtypes(smp_world))
    smp_world.run(take_part, data.draw(drawn, "exchange"), None, ranks=2)


# ---- Several messages ----------------------------------------------------------------------------


def check_exchange(
    smp_world: SmpWorld,
    data: st.DataObject,
    ranks: int,
    messages: st.SearchStrategy[GroupMessage],
    least: int = 2,
    most: int = 8,
    blocking: bool | None = None,
) -> None:
    """Draw messages among the ranks of a world, with orders of posts and waits, and check that they arrive."""
    lists = st.lists(messages, min_size=least, max_size=most)
    dtypes = traffic.dtypes(smp_world)
    exchange = data.draw(exchanges(ranks, lists, dtypes, blocking), "exchange")
    smp_world.run(take_part, exchange, None, ranks=ranks)


@st.composite
def _messages(draw: st.DrawFn, ranks: int, dest: int | None = None) -> GroupMessage:
    """Draw a message without a tag; to ``dest`` if given, unless ``dest`` is the sender."""
    src, to = draw(pairs(ranks))
    if dest is not None and src != dest:
        to = dest
    return GroupMessage(src, to, numel=draw(lengths(3)))


@requirement("P2P-ORDER")
@given(data=st.data())
@few
def test_messages_keep_their_order(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    message = st.builds(GroupMessage, st.just(src), st.just(dest), tags(smp_world, [3]), st.just(2))
    check_exchange(smp_world, data, ranks, message)


@requirement("P2P-ORDER")
@given(data=st.data())
@few
def test_sizes_may_change_from_one_to_the_next(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    message = st.builds(GroupMessage, st.just(src), st.just(dest), st.just(0), st.integers(0, 9))
    check_exchange(smp_world, data, ranks, message)


@requirement("P2P-ORDER")
@given(data=st.data())
@traffic.once
def test_hundreds_of_messages(smp_world: SmpWorld, data: st.DataObject) -> None:
    needs(smp_world, 2)
    messages = [GroupMessage(number % 2, (number + 1) % 2, numel=2) for number in range(300)]
    posts = in_order(range(300), messages)
    waits = data.draw(st.sampled_from([range(300), range(299, -1, -1)]), "waits")
    dtype = data.draw(traffic.dtypes(smp_world), "dtype")
    blocking = data.draw(st.booleans(), "blocking")
    exchange = GroupExchange(messages, [posts] * 2, [list(waits)] * 2, blocking, dtype)
    smp_world.run(take_part, exchange, None, ranks=2)


@requirement("P2P-TAG")
@given(data=st.data())
@few
def test_tags_match(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    message = st.builds(GroupMessage, st.just(src), st.just(dest), tags(smp_world), st.just(2))
    check_exchange(smp_world, data, ranks, message)


@requirement("P2P-PEER")
@given(data=st.data())
@few
def test_partners_match(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=3), "ranks")
    dest = data.draw(st.integers(0, ranks - 1), "dest")
    message = _messages(ranks, dest).map(lambda each: each._replace(numel=2))
    check_exchange(smp_world, data, ranks, message)


@requirement("P2P-BOTH-WAYS")
@given(data=st.data())
@few
def test_both_ways_at_once(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    one, other = data.draw(pairs(ranks), "pair")
    ends = st.sampled_from([(one, other), (other, one)])
    message = st.builds(
        lambda way, tag: GroupMessage(way[0], way[1], tag, 2), ends, tags(smp_world, [0, 1])
    )
    check_exchange(smp_world, data, ranks, message)


def send_and_overwrite(spec: TensorSpec, rounds: int, src: int, dest: int, flying: bool) -> None:
    """Send one tensor several times, overwritten with new values after each send."""
    me, got = dist.get_rank(), [spec.blank() for _ in range(rounds)]
    if me == src:
        tensor, works = spec.blank(), []
        for number in range(rounds):
            tensor.copy_(spec.make(number, rounds + 1))
            if flying:
                works.append(dist.isend(tensor.clone(), dest))
            else:
                dist.send(tensor, dest)
            tensor.copy_(spec.make(rounds, rounds + 1))
        for work in works:
            assert work is not None
            work.wait()
    elif me == dest:
        for tensor in got:
            dist.recv(tensor, src)
        call = "isend" if flying else "send"
        for number, tensor in enumerate(got):
            what = (
                f"{call} from {src}, whose tensor changes afterwards: message {number} of {rounds}"
            )
            check(tensor, spec.make(number, rounds + 1), what)


@requirement("P2P-REUSE")
@given(data=st.data(), rounds=st.integers(1, 4), flying=st.booleans())
@few
def test_a_sent_tensor_may_be_changed(
    smp_world: SmpWorld, data: st.DataObject, rounds: int, flying: bool
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    spec = TensorSpec((3,), data.draw(traffic.dtypes(smp_world), "dtype"))
    smp_world.run(send_and_overwrite, spec, rounds, src, dest, flying, ranks=ranks)


def receive_into(parts: int, spec: TensorSpec, src: int, dest: int, flying: bool) -> None:
    """Receive messages into parts of one tensor, the last part first, and check all parts after each."""
    me = dist.get_rank()
    values = [spec.make(number, parts) for number in range(parts)]
    if me == src:
        for value in values:
            dist.send(value, dest)
    elif me == dest:
        whole = torch.zeros(parts * spec.numel, dtype=spec.dtype)
        places = list(reversed(whole.reshape(parts, spec.numel).unbind()))
        works = [dist.irecv(place, src) for place in places] if flying else []
        for number, place in enumerate(places):
            if flying:
                work = works[number]
                assert work is not None
                work.wait()
            else:
                dist.recv(place, src)
            for at in range(number + 1):
                what = (
                    f"message {at} from {src} ({spec.dtype}), after message {number} was received"
                )
                check(places[at].clone(), values[at], what)


@requirement("P2P-SEPARATE")
@given(data=st.data(), parts=st.integers(2, 5), flying=st.booleans())
@few
def test_received_tensors_stay(
    smp_world: SmpWorld, data: st.DataObject, parts: int, flying: bool
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    spec = TensorSpec((2,), data.draw(traffic.dtypes(smp_world), "dtype"))
    smp_world.run(receive_into, parts, spec, src, dest, flying, ranks=ranks)


def send_to_myself(
    messages: list[GroupMessage], order: list[int], sends_first: bool, dtype: torch.dtype
) -> None:
    """Send messages from every rank to itself, and receive them in this order."""
    me, count = dist.get_rank(), len(messages)
    total = count * dist.get_world_size()
    sent = [traffic.content(each, me * count + n, total, dtype) for n, each in enumerate(messages)]
    got = [torch.zeros_like(value) for value in sent]

    def send() -> list[Any]:
        return [
            dist.isend(value.clone(), me, tag=each.tag)
            for value, each in zip(sent, messages, strict=True)
        ]

    def receive() -> list[Any]:
        return [dist.irecv(got[number], me, tag=messages[number].tag) for number in order]

    works = [*send(), *receive()] if sends_first else [*receive(), *send()]
    for work in works:
        work.wait()
    check(got, sent, "what was sent to oneself")


@requirement("P2P-SELF")
@given(data=st.data(), sends_first=st.booleans())
@few
def test_messages_to_oneself(smp_world: SmpWorld, data: st.DataObject, sends_first: bool) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    message = st.builds(GroupMessage, st.just(0), st.just(0), tags(smp_world), lengths(3))
    messages = data.draw(st.lists(message, min_size=1, max_size=4), "messages")
    order = in_order(data.draw(st.permutations(range(len(messages))), "order"), messages)
    dtype = data.draw(traffic.dtypes(smp_world), "dtype")
    smp_world.run(send_to_myself, messages, order, sends_first, dtype, ranks=ranks)


def skip_a_stage(order: list[int], before: bool, dtype: torch.dtype) -> None:
    """Exchange messages between three ranks: the first sends after the last has answered the second.

    The last rank has two open receives. If the wait for one waited for both, the ranks would deadlock.
    """
    first, second, last = order
    me, spec = dist.get_rank(), TensorSpec((2,), dtype)
    values = [spec.make(number, 3) for number in range(3)]
    if me == first:
        answer = spec.blank()
        dist.recv(answer, last)
        check(answer, values[1], "the answer")
        dist.send(values[2], last)
    elif me == second:
        dist.send(values[0], last)
    elif me == last:
        got, skipped = spec.blank(), spec.blank()
        if before:  # the receive that completes last is issued first
            late, early = dist.irecv(skipped, first), dist.irecv(got, second)
        else:
            early, late = dist.irecv(got, second), dist.irecv(skipped, first)
        assert early is not None
        assert late is not None
        early.wait()
        check(got, values[0], "the second rank's")
        dist.send(values[1], first)
        late.wait()
        check(skipped, values[2], "the first rank's")


@requirement("P2P-WAIT-OWN")
@given(data=st.data(), before=st.booleans())
@few
def test_a_wait_is_for_one_operation(
    smp_world: SmpWorld, data: st.DataObject, before: bool
) -> None:
    ranks = data.draw(sizes(smp_world, least=3), "ranks")
    order = data.draw(st.permutations(range(ranks)), "order")[:3]
    dtype = data.draw(traffic.dtypes(smp_world), "dtype")
    smp_world.run(skip_a_stage, order, before, dtype, ranks=ranks)


def wait_and_ask(src: int, dest: int, dtype: torch.dtype) -> None:
    """Exchange two messages, and check that is_completed is True after each wait."""
    me, spec = dist.get_rank(), TensorSpec((2,), dtype)
    works = []
    if me == src:
        works = [dist.isend(spec.make(number, 2), dest) for number in range(2)]
    elif me == dest:
        works = [dist.irecv(spec.blank(), src) for _ in range(2)]
    for work in reversed(works):
        assert work is not None
        work.wait()
        check(work.is_completed(), True, "is_completed of a message that was waited for")


@requirement("P2P-COMPLETED")
@given(data=st.data())
@few
def test_completed_after_the_wait(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    dtype = data.draw(traffic.dtypes(smp_world), "dtype")
    smp_world.run(wait_and_ask, src, dest, dtype, ranks=ranks)


def receive_from(src: int, dest: int, by_position: bool, dtype: torch.dtype) -> object:
    """Send a message, and return the result of recv on ``dest``."""
    me, spec = dist.get_rank(), TensorSpec((2,), dtype)
    if me == src:
        dist.send(spec.make(), dest)
    elif me == dest:
        if by_position:
            return dist.recv(spec.blank(), group_src=src)
        return dist.recv(spec.blank(), src)
    return None


@requirement("P2P-SOURCE")
@given(data=st.data(), by_position=st.booleans())
@few
def test_recv_returns_the_sender(
    smp_world: SmpWorld, data: st.DataObject, by_position: bool
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    dtype = data.draw(traffic.dtypes(smp_world), "dtype")
    returned = smp_world.run(receive_from, src, dest, by_position, dtype, ranks=ranks)[dest]
    check(returned, src, f"what recv of {dtype} returned", dest)


# ---- Groups --------------------------------------------------------------------------------------


def send_in_group(
    group: Ranks, hops: list[tuple[int, int]], positions: bool, spec: TensorSpec
) -> list[int]:
    """Send one message after the other along pairs of positions in a group.

    Returns the results of recv on this rank, in order.
    """
    returned = []
    with new_groups([group]) as (handle,):
        for number, (src, dest) in enumerate(hops):
            value, me = spec.make(number, len(hops)), dist.get_rank()
            to = {"group_dst": dest} if positions else {"dst": group[dest]}
            of = {"group_src": src} if positions else {"src": group[src]}
            if me == group[src]:
                dist.send(value, group=handle, **to)
            elif me == group[dest]:
                got = spec.blank()
                returned.append(dist.recv(got, group=handle, **of))
                named = "positions" if positions else "world ranks"
                what = f"send, recv by {named} in the group {group}: hop {number} from {group[src]}"
                check(got, value, what)
    return returned


def check_send_in_group(smp_world: SmpWorld, data: st.DataObject, positions: bool) -> None:
    """Draw messages in a drawn group, and check that they arrive and recv returns the sender's world rank."""
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    group = data.draw(groups(smp_world, ranks, least=2), "group")
    hops = data.draw(st.lists(pairs(len(group)), min_size=1, max_size=4), "hops")
    spec = TensorSpec((2,), data.draw(traffic.dtypes(smp_world), "dtype"))
    seen = smp_world.run(send_in_group, group, hops, positions, spec, ranks=ranks)
    for rank, returned in enumerate(seen):
        senders = [group[src] for src, dest in hops if group[dest] == rank]
        check(returned, senders, f"what recv returned in the group {group}", rank)


@requirement("P2P-GROUP")
@given(data=st.data())
@few
def test_world_ranks_in_a_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_send_in_group(smp_world, data, positions=False)


@requirement("P2P-GROUP-RANK")
@given(data=st.data())
@few
def test_positions_in_a_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_send_in_group(smp_world, data, positions=True)


def take_part_in_group(exchange: GroupExchange, group: Ranks | None) -> None:
    """Make a group, and send and receive this rank's messages of the exchange in it."""
    with new_groups([group]) as (handle,):
        if is_member(handle):
            take_part(exchange, handle)


@requirement("P2P-GROUP-ASYNC")
@given(data=st.data())
@few
def test_messages_in_flight_in_a_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    group = data.draw(groups(smp_world, ranks, least=2), "group")
    # Many messages between one pair of positions, which differ by tag and order only, and some among all.
    pair = data.draw(pairs(len(group)), "pair")
    ends = st.just(pair) | pairs(len(group))
    message = st.builds(
        lambda ends, tag: GroupMessage(ends[0], ends[1], tag, 2), ends, tags(smp_world)
    )
    lists = st.lists(message, min_size=2, max_size=8)
    drawn = exchanges(len(group), lists, traffic.dtypes(smp_world))
    smp_world.run(take_part_in_group, data.draw(drawn, "exchange"), group, ranks=ranks)


def exchange_on(groups: list[Ranks | None], pair: tuple[int, int], order: list[int]) -> None:
    """Send from one rank to another on every group, and receive in another order of groups."""
    me, (src, dest) = dist.get_rank(), pair
    spec = TensorSpec((2,), PLAIN)
    with new_groups(groups) as handles:
        values = [spec.make(number, len(groups)) for number in range(len(groups))]
        if me == src:
            works = [
                dist.isend(value, dest, group=handle)
                for value, handle in zip(values, handles, strict=True)
            ]
            for work in works:
                assert work is not None
                work.wait()
        elif me == dest:
            for number in order:
                got = spec.blank()
                dist.recv(got, src, group=handles[number])
                ranks = groups[number] or "the world"
                check(got, values[number], f"the message of rank {src} on group {number}, {ranks}")


@requirement("P2P-GROUP-APART")
@given(data=st.data())
@few
def test_groups_do_not_mix(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    pair = data.draw(pairs(ranks), "src, dest")
    both = groups_of_all(smp_world, pair)
    every = groups_of_all(smp_world, range(ranks))
    made = data.draw(st.lists(both | every, min_size=1, max_size=3), "made")
    on = data.draw(st.permutations([None, *made]), "groups")
    order = data.draw(st.permutations(range(len(on))), "order")
    smp_world.run(exchange_on, on, pair, order, ranks=ranks)


# ---- Any source ----------------------------------------------------------------------------------


Content = list[int]  # the bytes of a message


def bytes_of(tensor: torch.Tensor) -> Content:
    """The bytes of a tensor, as a list, which can be sorted."""
    numbers: list[int] = tensor.view(torch.uint8).tolist()
    return numbers


class FanIn(NamedTuple):
    """Messages of all positions of a group to one of them.

    Attributes:
        counts: the number of messages from each position.
        dest: the position of the receiver.
        tag: the tag of all messages.
        spec: the recipe of all messages.
        asynchronous: whether they are received by irecv, which does not return the sender.
    """

    counts: list[int]
    dest: int
    tag: int
    spec: TensorSpec
    asynchronous: bool

    def sent(self, position: int) -> list[torch.Tensor]:
        """The tensors that a position sends, in order."""
        numbers = range(sum(self.counts[:position]), sum(self.counts[: position + 1]))
        return [self.spec.make(number, sum(self.counts)) for number in numbers]


def fan_in(program: FanIn, group: Ranks | None) -> list[tuple[int | None, Content]]:
    """Send and receive this rank's messages.

    Returns senders and contents in the order of receipt; the sender is None for messages by irecv.
    """
    got: list[tuple[int | None, Content]] = []
    with new_groups([group]) as (handle,):
        if not is_member(handle):
            return got
        me, tag = dist.get_rank(handle), program.tag
        tensors = [program.spec.blank() for _ in range(sum(program.counts))]
        if me != program.dest:
            sent = program.sent(me)
            works = [dist.isend(t, group_dst=program.dest, group=handle, tag=tag) for t in sent]
        elif program.asynchronous:
            works = [dist.irecv(tensor, group=handle, tag=tag) for tensor in tensors]
        else:
            works = []
            for tensor in tensors:
                sender = dist.recv(tensor, group=handle, tag=tag)
                got.append((sender, bytes_of(tensor)))
        for work in works:
            assert work is not None
            work.wait()
        if me == program.dest and program.asynchronous:
            got = [(None, bytes_of(tensor)) for tensor in tensors]
    return got


def check_fan_in(
    smp_world: SmpWorld,
    data: st.DataObject,
    ranks: int,
    group: Ranks | None,
    in_order: bool = False,
) -> None:
    """Check that each message is received once, with its sender; with ``in_order`` also in order."""
    order = group or tuple(range(ranks))
    dest = data.draw(st.integers(0, len(order) - 1), "dest")
    counts = [
        data.draw(st.integers(0, 3), "count") if position != dest else 0
        for position in range(len(order))
    ]
    spec = TensorSpec(
        (data.draw(st.integers(1, 7), "numel"),), data.draw(traffic.dtypes(smp_world), "dtype")
    )
    asynchronous = not in_order and data.draw(st.booleans(), "asynchronous")
    program = FanIn(counts, dest, data.draw(tags(smp_world), "tag"), spec, asynchronous)
    got = smp_world.run(fan_in, program, group, ranks=ranks)[order[dest]]
    received: dict[int | None, list[Content]] = defaultdict(list)
    for sender, content in got:
        received[sender].append(content)
    expected: dict[int | None, list[Content]] = defaultdict(list)
    for position, count in enumerate(counts):
        if count:
            sender = None if asynchronous else order[position]
            expected[sender] += [bytes_of(tensor) for tensor in program.sent(position)]
    assert set(received) == set(expected), "what recv returned is not who sent"
    for sender, contents in expected.items():
        what = f"{'irecv' if asynchronous else 'recv'} without a source: what rank {sender} sent"
        got_here, sent = received[sender], contents
        if not in_order:
            got_here, sent = sorted(got_here), sorted(sent)
        check(got_here, sent, what, order[dest])


@requirement("P2P-ANY-SOURCE")
@given(data=st.data())
@few
def test_any_source(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_fan_in(smp_world, data, data.draw(sizes(smp_world, least=2), "ranks"), None)


@requirement("P2P-ANY-SOURCE-GROUP")
@given(data=st.data())
@few
def test_any_source_in_a_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    group = data.draw(traffic.groups_of(smp_world, ranks, least=2), "group")
    check_fan_in(smp_world, data, ranks, group)


@requirement("P2P-ANY-SOURCE-ORDER")
@given(data=st.data())
@few
def test_any_source_keeps_the_order(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    check_fan_in(smp_world, data, ranks, None, in_order=True)


def receive_tags(src: int, dest: int, sent: list[int], received: list[int]) -> list[float]:
    """Send messages of these tags, and receive them in another order of tags, without a source.

    Returns the received values.
    """
    me, got = dist.get_rank(), []
    if me == src:
        works = [dist.isend(torch.tensor([tag], dtype=PLAIN), dest, tag=tag) for tag in sent]
        for work in works:
            assert work is not None
            work.wait()
    elif me == dest:
        for tag in received:
            tensor = torch.zeros(1, dtype=PLAIN)
            dist.recv(tensor, tag=tag)
            got.append(tensor.item())
    return got


@requirement("P2P-ANY-SOURCE-TAG")
@given(data=st.data())
@few
def test_any_source_of_a_tag(smp_world: SmpWorld, data: st.DataObject) -> None:
    unique = st.lists(tags(smp_world), min_size=1, max_size=4, unique=True)
    sent = data.draw(unique, "sent")
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src, dest = data.draw(pairs(ranks), "src, dest")
    received = data.draw(st.permutations(sent), "received")
    got = smp_world.run(receive_tags, src, dest, sent, received, ranks=ranks)[dest]
    check(list(map(int, got)), received, f"tags received from any source, sent as {sent}", dest)


# ---- Batches -------------------------------------------------------------------------------------


class MessageBatch(NamedTuple):
    """Messages of a group, exchanged by one batch on each of its ranks.

    Attributes:
        messages: the messages; a message's number is its index.
        orders: the numbers of messages for each position, in the order of the batch's list.
        waits: the indices of requests for each position, in the order of waits.
        dtype: the dtype of all tensors.
        positions: whether partners are named by position; otherwise by world rank.
    """

    messages: list[GroupMessage]
    orders: list[list[int]]
    waits: list[list[int]]
    dtype: torch.dtype
    positions: bool


def exchange_by_batch(batch: MessageBatch, group: Ranks | None) -> None:
    """Make a group, and exchange this rank's messages of the batch in it."""
    with new_groups([group]) as (handle,):
        if is_member(handle):
            take_part_in_batch(batch, handle)


def take_part_in_batch(batch: MessageBatch, group: Any) -> None:
    """Issue this rank's batch, wait for all requests, and check all tensors."""
    me, total = dist.get_rank(group), len(batch.messages)
    operations, held = [], []
    for number in batch.orders[me]:
        message = batch.messages[number]
        if me not in message[:2]:
            continue
        value = traffic.content(message, number, total, batch.dtype)
        tensor = value.clone() if me == message.src else value.new_zeros(value.shape)
        held.append((tensor, value, message))
        action, at = (dist.isend, message.dest) if me == message.src else (dist.irecv, message.src)
        peer = {"group_peer": at} if batch.positions else {"peer": dist.get_global_rank(group, at)}
        operations.append(dist.P2POp(action, tensor, group=group, tag=message.tag, **peer))
    works = dist.batch_isend_irecv(operations) if operations else []
    # A backend may return fewer requests than there are operations, such as one for the whole batch.
    for number in batch.waits[me]:
        if number < len(works):
            works[number].wait()
    for tensor, value, message in held:
        check(tensor, value, f"{message} after all waits")


def check_batch(
    smp_world: SmpWorld,
    data: st.DataObject,
    ranks: int,
    messages: list[GroupMessage],
    group: Ranks | None = None,
) -> None:
    """Draw the orders of a batch, and check that its messages arrive.

    All ranks of the group take part, because torch demands that of the first call of a group.
    """
    order, members = st.permutations(range(len(messages))), len(group or range(ranks))
    orders = [in_order(data.draw(order, "order"), messages) for _ in range(members)]
    waits = [list(data.draw(order, "waits")) for _ in range(members)]
    dtype = data.draw(traffic.dtypes(smp_world), "dtype")
    batch = MessageBatch(messages, orders, waits, dtype, data.draw(st.booleans(), "positions"))
    smp_world.run(exchange_by_batch, batch, group, ranks=ranks)


def ring(ranks: int, numel: int = 2) -> list[GroupMessage]:
    """Messages from each rank to the next, so that all ranks take part."""
    return [GroupMessage(rank, (rank + 1) % ranks, 0, numel) for rank in range(ranks)]


@requirement("P2P-BATCH")
@given(data=st.data(), count=st.integers(1, 4))
@few
def test_a_ring_in_both_directions(smp_world: SmpWorld, data: st.DataObject, count: int) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    # With two ranks the next and the previous rank are the same, and only order and direction differ.
    back = [GroupMessage(rank, (rank - 1) % ranks, 0, count) for rank in range(ranks)]
    check_batch(smp_world, data, ranks, [*ring(ranks, count), *back])


@requirement("P2P-BATCH-ORDER")
@given(data=st.data(), count=st.integers(2, 5))
@few
def test_a_batch_keeps_the_order_of_a_pair(
    smp_world: SmpWorld, data: st.DataObject, count: int
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    pair = data.draw(pairs(ranks), "pair")
    check_batch(smp_world, data, ranks, [*ring(ranks), *([GroupMessage(*pair, 0, 2)] * count)])


@requirement("P2P-BATCH-WAIT")
@given(data=st.data())
@few
def test_requests_of_a_batch_in_any_order(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    more = data.draw(st.lists(_messages(ranks), max_size=6), "more")
    check_batch(smp_world, data, ranks, [*ring(ranks), *more])


@requirement("P2P-BATCH-GROUP")
@given(data=st.data())
@few
def test_a_batch_on_a_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    group = data.draw(traffic.groups_of(smp_world, ranks, least=2), "group")
    size = ranks if group is None else len(group)
    more = data.draw(st.lists(_messages(size), max_size=4), "more")
    check_batch(smp_world, data, ranks, [*ring(size), *more], group)


# ---- Errors --------------------------------------------------------------------------------------


def go_on() -> None:
    """Send a message around all ranks, to check that calls after a refused one work."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return
    got, spec = torch.zeros(2, dtype=PLAIN), TensorSpec((2,), PLAIN)
    work = dist.isend(spec.make(me, ranks), (me + 1) % ranks)
    dist.recv(got, (me - 1) % ranks)
    assert work is not None
    work.wait()
    check(got, spec.make((me - 1) % ranks, ranks), "the message after the refused call")


def call_with(call: str, on: int, arguments: dict[str, int], group: Ranks | None) -> bool:
    """Make a call on rank ``on``, and then send a message around all ranks.

    Returns whether the call was refused on this rank.
    """
    refused = False
    with new_groups([group]) as (handle,):
        if dist.get_rank() == on:
            tensor = torch.zeros(2, dtype=PLAIN)
            what: Any = getattr(dist, call)
            refused = is_refused(lambda: what(tensor, group=handle, **arguments))
        go_on()
    return refused


@requirement("P2P-ERROR-SELF")
@given(data=st.data(), by_position=st.booleans())
@few
def test_a_send_to_oneself_is_refused(
    smp_world: SmpWorld, data: st.DataObject, by_position: bool
) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    on = data.draw(st.integers(0, ranks - 1), "on")
    arguments = {"group_dst" if by_position else "dst": on}
    refused = smp_world.run(call_with, "send", on, arguments, None, ranks=ranks)[on]
    check_refused(refused, on, f"send to oneself, {arguments}")


@requirement("P2P-ERROR-RANK")
@given(data=st.data(), call=st.sampled_from(["send", "recv", "isend", "irecv"]))
@few
def test_a_partner_out_of_range_is_refused(
    smp_world: SmpWorld, data: st.DataObject, call: str
) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    on = data.draw(st.integers(0, ranks - 1), "on")
    partner = data.draw(st.integers(ranks, ranks + 9), "partner")
    name = "dst" if call.endswith("send") else "src"
    refused = smp_world.run(call_with, call, on, {name: partner}, None, ranks=ranks)[on]
    check_refused(refused, on, f"{call} with {name}={partner} in a world of {ranks}")


@requirement("P2P-ERROR-NEGATIVE")
@given(
    data=st.data(),
    call=st.sampled_from(["recv", "send", "irecv", "isend"]),
    by_position=st.booleans(),
)
@few
def test_a_negative_partner_is_refused(
    smp_world: SmpWorld, data: st.DataObject, call: str, by_position: bool
) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    on = data.draw(st.integers(0, ranks - 1), "on")
    partner = data.draw(st.sampled_from([-1, -ranks, -ranks - 1]) | st.integers(-99, -1), "partner")
    name = "dst" if call.endswith("send") else "src"
    arguments = {f"group_{name}" if by_position else name: partner}
    assert smp_world.run(call_with, call, on, arguments, None, ranks=ranks)[on]


@requirement("P2P-ERROR-MEMBER")
@given(data=st.data(), call=st.sampled_from(["send", "recv", "isend", "irecv"]))
@few
def test_a_partner_outside_the_group_is_refused(
    smp_world: SmpWorld, data: st.DataObject, call: str
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    group = data.draw(groups(smp_world, ranks, most=ranks - 1), "group")
    on = data.draw(st.sampled_from(group), "on")
    outside = data.draw(st.sampled_from([r for r in range(ranks) if r not in group]), "outside")
    name = "dst" if call.endswith("send") else "src"
    refused = smp_world.run(call_with, call, on, {name: outside}, group, ranks=ranks)[on]
    check_refused(refused, on, f"{call} with {name}={outside} in the group {group}")


@requirement("P2P-ERROR-BOTH")
@given(data=st.data(), call=st.sampled_from(["send", "recv", "isend", "irecv"]))
@few
def test_a_partner_given_twice_is_refused(
    smp_world: SmpWorld, data: st.DataObject, call: str
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    on, partner = data.draw(pairs(ranks), "on, partner")
    end = "dst" if call.endswith("send") else "src"
    arguments = {end: partner, f"group_{end}": partner}
    refused = smp_world.run(call_with, call, on, arguments, None, ranks=ranks)[on]
    check_refused(refused, on, f"{call} with {arguments}")


def call_from_outside(group: Ranks) -> list[object]:
    """Call isend, irecv and recv on ranks outside a group, and return the results.

    Members make no call and return an empty list.
    """
    with new_groups([group]) as (handle,):
        if is_member(handle):
            return []
        tensor = torch.zeros(2, dtype=PLAIN)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of each
            return [
                dist.isend(tensor, group_dst=0, group=handle),
                dist.irecv(tensor, group_src=0, group=handle),
                dist.recv(tensor, group_src=0, group=handle),
            ]


@requirement("P2P-NON-MEMBER")
@given(data=st.data())
@few
def test_calls_from_outside_the_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    group = data.draw(groups(smp_world, ranks, most=ranks - 1), "group")
    for rank, returned in enumerate(smp_world.run(call_from_outside, group, ranks=ranks)):
        want = [] if rank in group else [None, None, -1]
        check(returned, want, f"isend, irecv, recv outside of the group {group}", rank)
