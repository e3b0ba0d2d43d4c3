"""Properties of process groups: members, creation and destruction, errors, and lists of objects."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from hypothesis import given

import smp_core.torch as smp
from conformance.cases import traffic
from conformance.cases.draws import divisors, pairs, sizes
from conformance.cases.traffic import (
    PLAIN,
    Ranks,
    calls,
    check,
    check_ranks,
    check_refused,
    few,
    groups,
    groups_of,
    is_member,
    is_refused,
    issue,
    new_groups,
    overlapping_groups,
)
from conformance.requirements.catalogue import requirement
from conformance.requirements.registry import Capability
from pytest_smp import strategies
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import objects

# ---- Who is in a group ---------------------------------------------------------------------------


def of_world() -> tuple[bool, int, int, list[int]]:
    """The default group's is_initialized, this rank's number, the size and the ranks."""
    ranks = dist.get_process_group_ranks(None)
    return dist.is_initialized(), dist.get_rank(), dist.get_world_size(), ranks


@requirement("PG-WORLD")
@given(data=st.data())
@few
def test_the_default_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    seen = smp_world.run(of_world, ranks=ranks)
    want = [(True, rank, ranks, list(range(ranks))) for rank in range(ranks)]
    check_ranks(seen, want, "is_initialized, rank, size and ranks of the default group")


def say_ranks(ranks: list[int] | None, sort: bool | None) -> tuple[list[int], int, int] | None:
    """Make a group; return its members, this rank's position and its size, or None on other ranks.

    Args:
        ranks: the first argument of new_group.
        sort: the value of ``sort_ranks``; None leaves the argument out.
    """
    handle = dist.new_group(ranks) if sort is None else dist.new_group(ranks, sort_ranks=sort)
    if not is_member(handle):
        return None
    seen = (
        dist.get_process_group_ranks(handle),
        dist.get_rank(handle),
        dist.get_world_size(handle),
    )
    dist.destroy_process_group(handle)
    return seen


@requirement("PG-RANKS")
@given(data=st.data())
@few
def test_members_of_a_new_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    sorts = [None, True, False]
    if Capability.GROUP_ORDER not in smp_world.capabilities:
        sorts.remove(False)
    sort = data.draw(st.sampled_from(sorts), "sort_ranks")
    every = st.permutations(range(ranks))  # finds the most bugs: there is an order to lose
    drawn = every | strategies.groups(ranks).map(list) | st.none()
    listed = data.draw(drawn, "listed")
    seen = smp_world.run(say_ranks, listed, sort, ranks=ranks)
    group = list(range(ranks)) if listed is None else list(listed)
    if sort is not False:
        group = sorted(group)
    want = [
        (group, group.index(rank), len(group)) if rank in group else None for rank in range(ranks)
    ]
    check_ranks(seen, want, f"ranks, position and size in new_group({listed}, sort_ranks={sort})")


def say_outside(ranks: Ranks) -> tuple[bool, int, int]:
    """Make a group; return whether this rank is outside, its rank in the group, and the group's size."""
    with new_groups([ranks]) as (handle,):
        outside = handle == dist.GroupMember.NON_GROUP_MEMBER
        return outside, dist.get_rank(handle), dist.get_world_size(handle)


@requirement("PG-NON-MEMBER")
@given(data=st.data())
@few
def test_ranks_outside_a_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    group = data.draw(groups(smp_world, ranks), "group")
    want = [
        (False, group.index(rank), len(group)) if rank in group else (True, -1, -1)
        for rank in range(ranks)
    ]
    seen = smp_world.run(say_outside, group, ranks=ranks)
    check_ranks(seen, want, f"whether it is outside, rank and size, of the group {group}")


def translate(ranks: Ranks | None, world: int) -> tuple[list[int | None], list[int | None]] | None:
    """Translate all numbers of the world by get_group_rank, and by get_global_rank, on a new group.

    A refused number gives None. Returns None on a rank outside the group.
    """

    def each(function: Any, handle: Any) -> list[int | None]:
        found: list[int | None] = []
        for number in range(world):
            try:
                found.append(function(handle, number))
            except traffic.REFUSALS:
                found.append(None)
        return found

    with new_groups([ranks]) as (handle,):
        if not is_member(handle):
            return None
        return each(dist.get_group_rank, handle), each(dist.get_global_rank, handle)


@requirement("PG-TRANSLATE")
@given(data=st.data())
@few
def test_ranks_are_translated(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    group = data.draw(st.none() | groups(smp_world, ranks), "group")
    order = tuple(range(ranks)) if group is None else group
    for rank, seen in enumerate(smp_world.run(translate, group, ranks, ranks=ranks)):
        if seen is not None:
            positions, members = seen
            check(tuple(members[: len(order)]), order, f"get_global_rank of {order}", rank)
            got = [positions[each] for each in order]
            check(got, list(range(len(order))), f"get_group_rank of {order}", rank)


@requirement("PG-ERROR-TRANSLATE")
@given(data=st.data())
@few
def test_ranks_outside_are_not_translated(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    group = data.draw(groups(smp_world, ranks, most=ranks - 1), "group")
    outside = [rank for rank in range(ranks) if rank not in group]
    refused = [None] * len(outside)
    for rank, seen in enumerate(smp_world.run(translate, group, ranks, ranks=ranks)):
        if seen is not None:
            positions, members = seen
            got = [positions[each] for each in outside]
            check(
                got, refused, f"get_group_rank of {outside}, not in {group} (None: refused)", rank
            )
            beyond = members[len(group) :]
            check(beyond, refused, f"get_global_rank beyond {group} (None: refused)", rank)


def cut(parts: list[list[int]] | int) -> tuple[list[int], list[bool], list[int] | None]:
    """Divide the world into subgroups.

    Returns the ranks of the caller's group, for each group whether the caller is a member, and the ranks
    that the caller's group gathers, or None without a group.
    """
    if isinstance(parts, int):
        own, every = dist.new_subgroups(parts)  # type: ignore[no-untyped-call]
    else:
        own, every = dist.new_subgroups_by_enumeration(parts)  # type: ignore[no-untyped-call]
    inside = [is_member(each) for each in every]
    ranks = dist.get_process_group_ranks(own) if own is not None else []
    seen = None
    if own is not None:
        gathered: list[Any] = [None] * len(ranks)
        dist.all_gather_object(gathered, dist.get_rank(), group=own)
        seen = gathered
    smp.barrier()
    for each in every:
        if is_member(each):
            dist.destroy_process_group(each)
    return ranks, inside, seen


@requirement("PG-SUBGROUPS")
@given(data=st.data())
@few
def test_parts_of_the_world(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    parts: list[list[int]] | int
    if data.draw(st.booleans(), "by enumeration"):
        order = data.draw(st.permutations(range(ranks)), "order")
        cuts = data.draw(st.lists(st.integers(1, ranks), max_size=3), "cuts")
        # The ranks after the last cut are in no group, or in the last one.
        ends = sorted({0, *cuts, data.draw(st.sampled_from([1, ranks]), "end")})
        parts = expected = [sorted(order[a:b]) for a, b in itertools.pairwise(ends)]
    else:
        parts = size = data.draw(st.sampled_from(divisors(ranks)), "size")
        expected = [list(range(at, at + size)) for at in range(0, ranks, size)]
    for rank, (own, inside, seen) in enumerate(smp_world.run(cut, parts, ranks=ranks)):
        check(inside, [rank in part for part in expected], f"whether it is in {expected}", rank)
        want = next((part for part in expected if rank in part), [])
        check(own, want, f"its own part of {expected}", rank)
        check(seen, own or None, f"what all_gather_object gathers in {own}", rank)


def make_locally(groups: list[Ranks], program: list[traffic.GroupCall]) -> list[list[int] | None]:
    """Make groups with new_group called by members only, and make a collective call on each group.

    Returns the ranks of each group on its members, and None on other ranks.
    """
    seen: list[list[int] | None] = []
    made = []
    for number, (ranks, call) in enumerate(zip(groups, program, strict=True)):
        if dist.get_rank() not in ranks:
            seen.append(None)
            continue
        handle = dist.new_group(list(ranks), use_local_synchronization=True)
        made.append(handle)
        seen.append(dist.get_process_group_ranks(handle))
        issue(call, number, len(program), handle).finish()
    smp.barrier()
    for handle in made:
        dist.destroy_process_group(handle)
    return seen


@requirement("PG-LOCAL")
@given(data=st.data())
@few
def test_groups_made_by_their_members(smp_world: SmpWorld, data: st.DataObject) -> None:
    # torch names such a group by its ranks and the caller's number of groups, so every rank must have made
    # equally many groups before.
    ranks = data.draw(sizes(smp_world), "ranks")
    groups: list[Ranks] = []
    for _ in range(data.draw(st.integers(1, 2), "rounds")):
        order = data.draw(st.permutations(range(ranks)), "order")
        at = data.draw(st.integers(0, ranks - 1), "cut")
        groups += [tuple(part) for part in (order[:at], order[at:]) if part]
    program = [data.draw(calls(smp_world, [len(group)]), "call") for group in groups]
    seen = smp_world.run(make_locally, groups, program, ranks=ranks)
    for rank, lists in enumerate(seen):
        want = [sorted(group) if rank in group else None for group in groups]
        check(lists, want, "ranks of groups made with use_local_synchronization", rank)


# ---- Life ----------------------------------------------------------------------------------------


def live(groups: list[Ranks], steps: list[int], program: list[traffic.GroupCall]) -> None:
    """Make all groups, and destroy them in the order of ``steps``.

    Before the first destruction and after each one, every remaining group and the world make a call.
    """
    handles: dict[int, Any] = {
        index: dist.new_group(list(ranks), sort_ranks=False) for index, ranks in enumerate(groups)
    }
    total, number = (len(groups) + 1) * (len(groups) + 1), itertools.count()
    for gone in [None, *steps]:
        if gone is not None:
            smp.barrier()
            handle = handles.pop(gone)
            if is_member(handle):
                dist.destroy_process_group(handle)
        for index in [*handles, -1]:
            handle = handles.get(index)
            at = next(number)
            if index == -1 or is_member(handle):
                issue(program[index], at, total, handle).finish()


def check_life(smp_world: SmpWorld, data: st.DataObject, drawn: Any) -> None:
    """Draw groups of a drawn world, and check that they work while others are destroyed in a drawn order."""
    ranks = data.draw(sizes(smp_world), "ranks")
    made = data.draw(drawn(smp_world, ranks), "groups")
    steps = data.draw(st.permutations(range(len(made))), "steps")
    sizes_ = [*map(len, made), ranks]
    program = [data.draw(calls(smp_world, [size], moving=True), "call") for size in sizes_]
    smp_world.run(live, made, list(steps), program, ranks=ranks)


@requirement("PG-DESTROY")
@given(data=st.data())
@few
def test_other_groups_live_on(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_life(smp_world, data, overlapping_groups)


@st.composite
def repeated_groups(draw: st.DrawFn, smp_world: SmpWorld, ranks: int, count: int) -> list[Ranks]:
    """Draw a group, so many times; of a mapped lambda Hypothesis prints the source."""
    return [draw(groups(smp_world, ranks))] * count


@requirement("PG-SAME-MEMBERS")
@given(data=st.data(), count=st.integers(2, 3))
@few
def test_groups_of_the_same_ranks(smp_world: SmpWorld, data: st.DataObject, count: int) -> None:
    check_life(
        smp_world,
        data,
        lambda smp_world, ranks: repeated_groups(smp_world, ranks, count),
    )


def make_again(group: Ranks, program: list[traffic.GroupCall]) -> None:
    """Make the group, use it and destroy it, once for each call."""
    for number, call in enumerate(program):
        with new_groups([group]) as (handle,):
            if is_member(handle):
                issue(call, number, len(program), handle).finish()


@requirement("PG-AGAIN")
@given(data=st.data(), rounds=st.integers(2, 12))
@few
def test_groups_are_made_again(smp_world: SmpWorld, data: st.DataObject, rounds: int) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    group = data.draw(groups(smp_world, ranks), "group")
    call = data.draw(calls(smp_world, [len(group)], moving=True), "call")
    smp_world.run(make_again, group, [call] * rounds, ranks=ranks)


#: Calls of each capability on a group, with no other question to torch about the group.
PLAIN_CALLS: Mapping[Capability, Callable[[Any, int], object]] = {
    Capability.ALL_REDUCE: lambda group, size: dist.all_reduce(torch.ones(2), group=group),
    Capability.BROADCAST: lambda group, size: dist.broadcast(
        torch.ones(2), group_src=size - 1, group=group
    ),
    Capability.ALL_GATHER: lambda group, size: dist.all_gather(
        [torch.zeros(2) for _ in range(size)], torch.ones(2), group=group
    ),
    Capability.BARRIER: lambda group, size: dist.barrier(group),
}


def use_after(group: Ranks, call: Capability) -> tuple[bool, bool] | None:
    """Destroy a group, use it and destroy it again; then make a call on the world.

    Returns whether the use and the second destruction are refused, or None outside the group.
    """
    handle = dist.new_group(list(group), sort_ranks=False)
    use, refused = PLAIN_CALLS[call], None
    if is_member(handle):
        use(handle, len(group))
    smp.barrier()
    if is_member(handle):
        dist.destroy_process_group(handle)
        # All members call, so a group that still works completes the call and no member waits for ever.
        refused = (
            is_refused(lambda: use(handle, len(group))),
            is_refused(lambda: dist.destroy_process_group(handle)),
        )
    smp.barrier()
    go_on()
    return refused


@requirement("PG-DESTROYED")
@given(data=st.data())
@few
def test_a_destroyed_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    # Two ranks at least: in a group of one a call needs no communication, and may do nothing at all.
    group = data.draw(groups(smp_world, ranks, least=2), "group")
    claimed = [each for each in PLAIN_CALLS if each in smp_world.capabilities]
    call = data.draw(st.sampled_from(claimed), "call")
    for rank, refused in enumerate(smp_world.run(use_after, group, call, ranks=ranks)):
        what = f"whether {call} on the destroyed group {group} is refused, and destroying it again"
        check(refused, (True, True) if rank in group else None, what, rank)


# ---- Errors --------------------------------------------------------------------------------------


def go_on() -> None:
    """Gather the numbers of all ranks, to check that the next call after a refused one works."""
    ranks = list(range(dist.get_world_size()))
    gathered: list[Any] = [None for _ in ranks]
    dist.all_gather_object(gathered, dist.get_rank())
    check(gathered, ranks, "what is gathered after the refused call")


def make_wrongly(ranks: list[int]) -> bool:
    """Call new_group with these ranks and then gather; return whether new_group was refused."""
    refused = is_refused(lambda: dist.new_group(ranks))
    go_on()
    return refused


@requirement("PG-ERROR-RANKS")
@given(data=st.data())
@few
def test_ranks_that_make_no_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(sizes(smp_world), "world")
    group = list(data.draw(strategies.groups(world), "group"))
    beyond = st.integers(world, world + 3) | st.integers(-3, -1)
    wrong = data.draw(st.sampled_from(group) | beyond, "wrong")
    ranks = data.draw(st.permutations([*group, wrong]), "ranks")
    for rank, refused in enumerate(smp_world.run(make_wrongly, ranks, ranks=world)):
        check_refused(refused, rank, f"new_group({ranks}) in a world of {world}")


def gather_wrongly(on: int, count: int, then: bool = False) -> bool:
    """Call all_gather with a list of a wrong length on rank ``on`` alone; return whether it was refused.

    Args:
        on: the calling rank.
        count: the length of the list.
        then: whether all ranks gather afterwards.
    """
    refused = False
    if dist.get_rank() == on:
        value = torch.ones(2, dtype=PLAIN)
        outputs = [torch.zeros_like(value) for _ in range(count)]
        refused = is_refused(lambda: dist.all_gather(outputs, value))
    if then:
        go_on()
    return refused


def check_length(smp_world: SmpWorld, data: st.DataObject, then: bool) -> None:
    """Check that a list that is too short or too long is refused."""
    ranks = data.draw(sizes(smp_world), "ranks")
    on = data.draw(st.integers(0, ranks - 1), "on")
    lengths = [length for length in range(1, ranks + 3) if length != ranks]
    count = data.draw(st.sampled_from(lengths), "count")
    refused = smp_world.run(gather_wrongly, on, count, then, ranks=ranks)[on]
    check_refused(refused, on, f"all_gather into a list of {count} in a group of {ranks}")


@requirement("PG-ERROR-LENGTH")
@given(data=st.data())
@few
def test_a_list_of_the_wrong_length(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_length(smp_world, data, then=False)


@requirement("PG-ERROR-LENGTH-THEN")
@given(data=st.data())
@few
def test_calls_after_a_list_of_the_wrong_length(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_length(smp_world, data, then=True)


def split_wrongly(
    on: int, splits: tuple[list[int], list[int]], rows: int, then: bool = False
) -> bool:
    """Call all_to_all_single with wrong splits on rank ``on`` alone; return whether it was refused.

    Args:
        on: the calling rank.
        splits: the split sizes of output and input.
        rows: the rows of both tensors.
        then: whether all ranks gather afterwards.
    """
    refused = False
    if dist.get_rank() == on:
        value = torch.ones(rows, dtype=PLAIN)
        output = torch.zeros_like(value)
        refused = is_refused(lambda: dist.all_to_all_single(output, value, *splits))
    if then:
        go_on()
    return refused


def check_splits(smp_world: SmpWorld, data: st.DataObject, then: bool) -> None:
    """Check that splits of one side that do not add up to the rows are refused."""
    ranks = data.draw(sizes(smp_world), "ranks")
    on = data.draw(st.integers(0, ranks - 1), "on")
    side = st.lists(st.integers(1, 3), min_size=ranks, max_size=ranks)
    right = data.draw(side, "right")
    wrong = [*right[:-1], right[-1] + data.draw(st.sampled_from([-1, 1, 5]), "more")]
    splits = data.draw(st.sampled_from([(wrong, right), (right, wrong)]), "splits")
    refused = smp_world.run(split_wrongly, on, splits, sum(right), then, ranks=ranks)[on]
    output, input = splits
    what = f"all_to_all_single of {sum(right)} rows, output splits {output}, input splits {input}"
    check_refused(refused, on, what)


@requirement("PG-ERROR-SPLITS")
@given(data=st.data())
@few
def test_splits_that_do_not_add_up(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_splits(smp_world, data, then=False)


@requirement("PG-ERROR-SPLITS-THEN")
@given(data=st.data())
@few
def test_calls_after_splits_that_do_not_add_up(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_splits(smp_world, data, then=True)


# ---- Objects -------------------------------------------------------------------------------------

#: The objects of members, of very different sizes, so that a buffer of one size does not fit another.
brought = st.sampled_from(["", "x" * 1000, None, b"y" * 2**16, b"z" * (2**17 + 1)]) | objects(
    tensors=False, max_leaves=3
)


def carry(call: str, group: Ranks | None, root: int, own: list[Any]) -> list[Any] | None:
    """Make a call of lists of objects; return this rank's list afterwards, or None outside the group.

    The member at position i passes ``own[i]``.
    """
    with new_groups([group]) as (handle,):
        if not is_member(handle):
            return None
        me, size = dist.get_rank(handle), dist.get_world_size(handle)
        got: list[Any] = ["empty"] * size
        match call:
            case "all_gather":
                dist.all_gather_object(got, own[me], group=handle)
            case "gather":
                got = ["empty"] * size if me == root else []
                dist.gather_object(own[me], got or None, group_dst=root, group=handle)
            case "broadcast":
                got = list(own) if me == root else ["empty"] * len(own)
                dist.broadcast_object_list(got, group_src=root, group=handle)
            case "scatter":
                got = ["empty"]
                given = list(own) if me == root else None
                dist.scatter_object_list(got, given, group_src=root, group=handle)
        return got


def check_carried(smp_world: SmpWorld, data: st.DataObject, call: str) -> None:
    """Draw objects and a group, and check each rank's list after a call."""
    ranks = data.draw(sizes(smp_world), "ranks")
    group = data.draw(groups_of(smp_world, ranks) | st.none(), "group")
    order = tuple(range(ranks)) if group is None else group
    root = data.draw(st.integers(0, len(order) - 1), "root")
    own = data.draw(st.lists(brought, min_size=len(order), max_size=len(order)), "objects")
    for rank, got in enumerate(smp_world.run(carry, call, group, root, own, ranks=ranks)):
        want: list[Any] | None = own
        if rank not in order:
            want = None
        elif call == "scatter":
            want = [own[order.index(rank)]]
        elif call == "gather" and rank != order[root]:
            want = []
        check(got, want, f"the list after {call} of objects in {order}, root {order[root]}", rank)


@requirement("PG-OBJECTS-ALL-GATHER")
@given(data=st.data())
@few
def test_all_gather_object(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_carried(smp_world, data, "all_gather")


@requirement("PG-OBJECTS-GATHER")
@given(data=st.data())
@few
def test_gather_object(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_carried(smp_world, data, "gather")


@requirement("PG-OBJECTS-BROADCAST")
@given(data=st.data())
@few
def test_broadcast_object_list(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_carried(smp_world, data, "broadcast")


@requirement("PG-OBJECTS-SCATTER")
@given(data=st.data())
@few
def test_scatter_object_list(smp_world: SmpWorld, data: st.DataObject) -> None:
    check_carried(smp_world, data, "scatter")


def send_lists(
    group: Ranks | None, src: int, dest: int, lists: list[list[Any]]
) -> list[tuple[int, list[Any]]]:
    """Send lists of objects between two positions; return the received lists with their senders."""
    got = []
    with new_groups([group]) as (handle,):
        me = dist.get_rank(handle) if is_member(handle) else None
        for each in lists:
            if me == src:
                dist.send_object_list(list(each), group_dst=dest, group=handle)
            elif me == dest:
                received: list[Any] = ["empty"] * len(each)
                sender = dist.recv_object_list(received, group_src=src, group=handle)
                got.append((sender, received))
    return got


@requirement("PG-OBJECTS-SEND")
@given(data=st.data(), lists=st.lists(st.lists(brought, min_size=1, max_size=3), max_size=3))
@few
def test_send_object_list(smp_world: SmpWorld, data: st.DataObject, lists: list[list[Any]]) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    group = data.draw(groups_of(smp_world, ranks, least=2) | st.none(), "group")
    order = tuple(range(ranks)) if group is None else group
    src, dest = data.draw(pairs(len(order)), "src, dest")
    seen = smp_world.run(send_lists, group, src, dest, lists, ranks=ranks)
    want = [(order[src], each) for each in lists]
    check(
        seen[order[dest]], want, f"sender and objects of recv_object_list in {order}", order[dest]
    )


def carry_outside(group: Ranks) -> list[list[Any]]:
    """Call the functions for lists of objects on ranks outside a group; return the lists afterwards.

    Members make no call and return an empty list.
    """
    with new_groups([group]) as (handle,):
        if is_member(handle):
            return []
        lists: list[list[Any]] = [["mine"] for _ in range(4)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of each
            dist.all_gather_object(lists[0], "given", group=handle)
            dist.gather_object("given", lists[1], group_dst=0, group=handle)
            dist.broadcast_object_list(lists[2], group_src=0, group=handle)
            dist.scatter_object_list(lists[3], ["given"], group_src=0, group=handle)
        return lists


@requirement("PG-OBJECTS-OUTSIDER")
@given(data=st.data())
@few
def test_objects_from_outside_the_group(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    group = data.draw(groups(smp_world, ranks, most=ranks - 1), "group")
    for rank, lists in enumerate(smp_world.run(carry_outside, group, ranks=ranks)):
        want = [] if rank in group else [["mine"]] * 4
        check(lists, want, f"lists of objects after calls outside of the group {group}", rank)
