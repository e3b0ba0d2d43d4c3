"""Groups on `sim`: ``new_group`` in any rank order, without rank 0, of one; device meshes; destroying
and making again.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smp_core.errors import RankError, UnsupportedError


def tensor(rank: int) -> torch.Tensor:
    return torch.tensor([1.0, 2.0]) + 10 * rank


def numbers(rank: int) -> list[float]:
    return [1.0 + 10 * rank, 2.0 + 10 * rank]


MEMBERS = [[0, 1, 2, 3], [3, 1], [2, 0, 3], [1], [0], [5, 4, 3, 2, 1, 0], [4, 1, 5]]


@pytest.mark.parametrize("members", MEMBERS, ids=str)
def test_group_ranks_follow_the_list(smp_world: Any, members: list[int]) -> None:
    """G17, B037: the order given is the order of group ranks, of all_gather, of scatter's
    pieces, and roots are world ranks."""

    def body() -> Any:
        rank, root = dist.get_rank(), members[-1]
        group = dist.new_group(members, sort_ranks=False)
        if rank not in members:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            return None
        position = dist.get_rank(group)
        assert dist.get_world_size(group) == len(members)
        assert dist.get_process_group_ranks(group) == members
        assert dist.get_group_rank(group, rank) == position
        assert dist.get_global_rank(group, position) == rank
        gathered = [torch.zeros(2) for _ in members]
        dist.all_gather(gathered, tensor(rank), group=group)
        told = tensor(rank)
        dist.broadcast(told, src=root, group=group)
        dealt = torch.zeros(2)
        pieces = [tensor(100 + slot) for slot in range(len(members))] if rank == root else None
        dist.scatter(dealt, pieces, src=root, group=group)
        collected = [torch.zeros(2) for _ in members] if rank == root else None
        dist.gather(tensor(rank), collected, dst=root, group=group)
        scattered = torch.zeros(2)
        flat = torch.cat([tensor(slot) for slot in range(len(members))])
        dist.reduce_scatter_single(scattered, flat, group=group)
        dist.destroy_process_group(group)
        return (
            position,
            [each.tolist() for each in gathered],
            told.tolist(),
            dealt.tolist(),
            None if collected is None else [each.tolist() for each in collected],
            scattered.tolist(),
        )

    for rank, got in enumerate(smp_world.run(body, ranks=6)):
        if rank not in members:
            assert got is None
            continue
        position = members.index(rank)
        everyone = [numbers(member) for member in members]
        assert got == (
            position,
            everyone,
            everyone[-1],
            numbers(100 + position),
            everyone if rank == members[-1] else None,
            [number * len(members) for number in numbers(position)],
        )


def test_new_group_sorts_by_default_as_torch_does(smp_world: Any) -> None:
    def body() -> tuple[list[int], int]:
        group = dist.new_group([1, 0])
        result = dist.get_process_group_ranks(group), dist.get_rank(group)
        dist.destroy_process_group(group)
        return result

    assert smp_world.run(body, ranks=2) == [([0, 1], 0), ([0, 1], 1)]


def test_a_root_may_be_given_as_group_rank(smp_world: Any) -> None:
    """B032: converted once."""

    def body() -> list[float] | None:
        rank = dist.get_rank()
        group = dist.new_group([3, 1, 2], sort_ranks=False)
        if rank == 0:
            return None
        mine = tensor(rank)
        dist.broadcast(mine, group=group, group_src=1)
        objects = [f"from {rank}"]
        dist.broadcast_object_list(objects, group=group, group_src=2)
        assert objects == ["from 2"]
        dist.destroy_process_group(group)
        result: list[float] = mine.tolist()
        return result

    assert smp_world.run(body, ranks=4) == [None] + [numbers(1)] * 3


def test_overlapping_groups_are_used_together(smp_world: Any) -> None:
    """Two groups of the same members are two groups: calls are matched within each."""

    def body() -> list[list[float]]:
        rank = dist.get_rank()
        groups = [dist.new_group(range(4)), dist.new_group(range(4)), None]
        mine = [tensor(rank), 2 * tensor(rank), 3 * tensor(rank)]
        order = [0, 1, 2] if rank % 2 == 0 else [2, 0, 1]
        works: list[Any] = [
            dist.all_reduce(mine[index], group=groups[index], async_op=True) for index in order
        ]
        for work in works:
            work.wait()
        for group in groups[:2]:
            dist.destroy_process_group(group)
        return [each.tolist() for each in mine]

    total = [sum(column) for column in zip(*map(numbers, range(4)), strict=True)]
    expected = [[factor * number for number in total] for factor in (1, 2, 3)]
    assert smp_world.run(body, ranks=4) == [expected] * 4


def test_a_call_by_a_rank_outside_the_group_does_nothing_and_warns(smp_world: Any) -> None:
    """G16: torch's own behaviour, which `sim` leaves alone."""

    def body() -> list[float]:
        rank = dist.get_rank()
        group = dist.new_group([0, 1])
        mine = tensor(rank)
        if rank == 2:
            with pytest.warns(UserWarning, match="does not belong to"):
                dist.all_reduce(mine, group=group)
        else:
            dist.all_reduce(mine, group=group)
            dist.destroy_process_group(group)
        result: list[float] = mine.tolist()
        return result

    assert smp_world.run(body, ranks=3) == [[12.0, 14.0], [12.0, 14.0], numbers(2)]


@pytest.mark.parametrize("ranks", [[0, 9], [0, 0], [-1, 0]], ids=str)
def test_bad_lists_of_ranks_are_refused(smp_world: Any, ranks: list[int]) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=r"out of range|duplicate"):
            dist.new_group(ranks)

    smp_world.run(body, ranks=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda mine: dist.broadcast(mine, src=7),
        lambda mine: dist.reduce(mine, dst=7),
        lambda mine: dist.scatter(mine, None, src=7),
        lambda mine: dist.gather(mine, None, dst=7),
    ],
    ids=["broadcast", "reduce", "scatter", "gather"],
)
def test_a_root_outside_the_group_is_refused(smp_world: Any, call: Any) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="root 7 is not in the group; group ranks are 0 to 1"):
            call(tensor(0))

    smp_world.run(body, ranks=2)


def test_a_root_that_only_the_process_group_can_check(smp_world: Any) -> None:
    def body() -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 2
        group: Any = dist.group.WORLD
        group.broadcast([torch.ones(1)], options)

    report = smp_world.report(body, ranks=2)
    assert isinstance(report.error, RankError)
    assert "root 2 is not in the group; group ranks are 0 to 1" in str(report.error)


# Meshes.


def test_a_mesh_of_one_dimension(smp_world: Any) -> None:
    def body() -> tuple[int, list[float]]:
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("data",))
        mine = tensor(dist.get_rank())
        dist.all_reduce(mine, group=mesh.get_group())
        result = mesh.get_local_rank(), mine.tolist()
        dist.destroy_process_group()
        return result

    total = [sum(column) for column in zip(*map(numbers, range(8)), strict=True)]
    assert smp_world.run(body, ranks=8) == [(rank, total) for rank in range(8)]


def test_a_mesh_of_two_dimensions(smp_world: Any) -> None:
    def body() -> tuple[Any, ...]:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        rank = dist.get_rank()
        sums = []
        for name in ("replicate", "shard"):
            mine = tensor(rank)
            dist.all_reduce(mine, group=mesh.get_group(name))
            sums.append(mine.tolist())
        result = *mesh.get_coordinate(), *sums  # type: ignore[misc]
        dist.destroy_process_group()
        return result

    for rank, got in enumerate(smp_world.run(body, ranks=8)):
        row, column = divmod(rank, 4)
        down = [sum(c) for c in zip(*(numbers(4 * r + column) for r in range(2)), strict=True)]
        along = [sum(c) for c in zip(*(numbers(4 * row + c) for c in range(4)), strict=True)]
        assert got == (row, column, down, along)


def test_a_mesh_of_ranks_in_any_order(smp_world: Any) -> None:
    table = [[5, 2, 0], [1, 4, 3]]

    def body() -> list[list[float]]:
        mesh = DeviceMesh("cpu", torch.tensor(table), mesh_dim_names=("down", "along"))
        results = []
        for name in ("down", "along"):
            group = mesh.get_group(name)
            gathered = [torch.zeros(2) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, tensor(dist.get_rank()), group=group)
            results.append(sorted(each[0].item() for each in gathered))
        dist.destroy_process_group()
        return results

    for rank, (down, along) in enumerate(smp_world.run(body, ranks=6)):
        row = next(index for index, ranks in enumerate(table) if rank in ranks)
        column = table[row].index(rank)
        assert along == sorted(numbers(other)[0] for other in table[row])
        assert down == sorted(numbers(ranks[column])[0] for ranks in table)


def test_subgroups_by_enumeration(smp_world: Any) -> None:
    def body() -> list[float]:
        mine = tensor(dist.get_rank())
        own, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        dist.all_reduce(mine, group=own)
        dist.destroy_process_group()
        result: list[float] = mine.tolist()
        return result

    assert smp_world.run(body, ranks=4) == [[32, 34]] * 4


def test_subgroups_of_a_size(smp_world: Any) -> None:
    def body() -> list[float]:
        mine = tensor(dist.get_rank())
        own, _ = dist.new_subgroups(group_size=2)
        dist.all_reduce(mine, group=own)
        dist.destroy_process_group()
        result: list[float] = mine.tolist()
        return result

    assert smp_world.run(body, ranks=4) == [[12, 14]] * 2 + [[52, 54]] * 2


# Life cycle.


def test_the_default_group_is_there_without_being_made(smp_world: Any) -> None:
    def body() -> tuple[Any, ...]:
        assert dist.is_initialized()
        return dist.get_rank(), dist.get_world_size(), dist.get_backend()

    assert smp_world.run(body, ranks=3) == [(rank, 3, "sim") for rank in range(3)]


def test_a_destroyed_group_cannot_be_used(smp_world: Any) -> None:
    """B154."""

    def body() -> None:
        group: Any = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        for call in (group.barrier, lambda: dist.all_reduce(torch.ones(1), group=group)):
            with pytest.raises(RuntimeError, match="has been destroyed"):
                call()

    smp_world.run(body, ranks=2)


def test_the_default_group_can_be_destroyed_and_made_again(smp_world: Any) -> None:
    def body() -> tuple[list[float], list[float]]:
        first, second = tensor(dist.get_rank()), tensor(dist.get_rank())
        dist.all_reduce(first)
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("sim", rank=smp_rank(), world_size=3, store=dist.HashStore())
        dist.all_reduce(second)
        return first.tolist(), second.tolist()

    def smp_rank() -> int:
        import smp_core.torch as smp

        return smp.rank()

    total = [sum(column) for column in zip(*map(numbers, range(3)), strict=True)]
    assert smp_world.run(body, ranks=3) == [(total, total)] * 3


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 3), (0, 1)])
def test_the_default_group_is_made_again_for_the_rank_itself(
    smp_world: Any, rank: int, size: int
) -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            dist.destroy_process_group()
            with pytest.raises(RankError, match="but this is rank 0 of 2"):
                dist.init_process_group("sim", rank=rank, world_size=size, store=dist.HashStore())

    smp_world.run(body, ranks=2)


@pytest.mark.parametrize(
    ("backend", "method"),
    [("gloo", "tcp://127.0.0.1:29500"), ("sim", "file:///nonexistent/torch")],
)
def test_ranks_do_not_wait_for_processes(smp_world: Any, backend: str, method: str) -> None:
    """A world of another size than the run's cannot meet: ranks are threads."""

    def body() -> None:
        rank = dist.get_rank()
        dist.destroy_process_group()
        with pytest.raises(UnsupportedError, match="ranks of sim are threads"):
            dist.init_process_group(backend, init_method=method, rank=rank, world_size=3)

    smp_world.run(body, ranks=2)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", None])
def test_ranks_do_not_wait_for_each_other_at_a_store(smp_world: Any, backend: str | None) -> None:
    """Gloo would wait in C++ with the turn in hand, until the time limit."""

    def body() -> int:
        rank = dist.get_rank()
        dist.destroy_process_group()
        with pytest.raises(UnsupportedError, match="ranks of sim are threads"):
            dist.init_process_group(backend, rank=rank, world_size=3, store=dist.HashStore())
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        return dist.get_world_size()

    assert smp_world.run(body, ranks=2, timeout=30) == [1, 1]


#: Arguments with which scripts call init_process_group. Rank and size are in the environment.
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"backend": "nccl"},
    {"backend": "cpu:gloo,cuda:nccl", "init_method": "env://"},
    {"backend": "gloo", "init_method": "tcp://127.0.0.1:29500"},
    {"backend": "a backend of tomorrow", "device_id": torch.device("cuda:0")},
    {"backend": "sim", "timeout": datetime.timedelta(seconds=1)},
]


@given(
    visits=st.lists(st.tuples(st.sampled_from(ARGUMENTS), st.booleans()), max_size=3),
    ranks=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_init_process_group_joins_the_ranks_that_are_there(
    smp_world: Any, visits: list[tuple[dict[str, Any], bool]], ranks: int
) -> None:
    """A script joins and leaves as often as it likes; with its rank and size in arguments or without."""

    def body() -> list[float]:
        sums = []
        for arguments, told in visits:
            place = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
            dist.init_process_group(
                **arguments,
                **(dict(zip(("rank", "world_size"), place, strict=True)) if told else {}),
            )
            assert (dist.get_rank(), dist.get_world_size()) == place
            with pytest.raises(ValueError, match="initialize the default process group twice"):
                dist.init_process_group(**arguments)
            group = dist.new_group([0])
            for each in (dist.group.WORLD, group):
                if each is not dist.GroupMember.NON_GROUP_MEMBER:
                    value = torch.ones(1)
                    dist.all_reduce(value, group=each)
                    sums.append(value.item())
            dist.destroy_process_group()
            assert not dist.is_initialized()
        return sums

    first, *others = smp_world.run(body, ranks=ranks)
    assert first == [float(ranks), 1.0] * len(visits)
    assert others == [[float(ranks)] * len(visits)] * (ranks - 1)


def test_init_process_group_of_another_place_is_refused(smp_world: Any) -> None:
    def body() -> None:
        for place in ({"rank": 2}, {"world_size": 8}):
            with pytest.raises(
                RankError, match=r"but this is rank \d of 2, which are there before"
            ):
                dist.init_process_group("nccl", **place)

    smp_world.run(body, ranks=2)


def test_a_rank_may_meet_itself(smp_world: Any, tmp_path: Path) -> None:
    """Nobody else is waited for; afterwards the process meets others again."""

    def meets(size: int) -> tuple[int, int]:
        address = f"file://{tmp_path / 'store'}"
        _, *place = next(dist.rendezvous(address, 0, size))  # type: ignore[attr-defined]
        return tuple(place)

    assert smp_world.run(lambda: meets(1), ranks=2) == [(0, 1)] * 2
    assert meets(2) == (0, 2)


def test_the_same_names_serve_run_after_run(smp_world: Any) -> None:
    """Names count from 0 in every run: nothing of the last run's groups is left."""

    def body() -> str:
        group: Any = dist.new_group([0, 1])
        name = str(group.group_name)
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        return name

    names = [smp_world.run(body, ranks=2) for _ in range(3)]
    assert names[0] == names[1] == names[2]


def test_group_description_and_repr(smp_world: Any) -> None:
    def body() -> tuple[str, str]:
        group: Any = dist.new_group([1, 0], group_desc="pair", sort_ranks=False)
        result = group.group_desc, repr(group)
        dist.destroy_process_group(group)
        return result

    (description, text), _ = smp_world.run(body, ranks=2)
    assert description == "pair"
    assert "rank 0" in text
    assert "ranks (1, 0)" in text
