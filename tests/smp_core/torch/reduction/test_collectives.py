"""Collectives: values by position, the tree over the order of the group, and bytes counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch

from smp_core import runtime
from smp_core.config import Config
from smp_core.topology import GroupKind, Topology
from smp_core.torch.reduction.collectives import Collectives
from smp_core.torch.reduction.traffic import Sum, TrafficKind
from smp_core.torch.tensor_parallel.exchange import TensorGroup

SHARDING, REPLICATION = GroupKind.SHARDING, GroupKind.REPLICATION
FOUR: dict[str, Any] = {"ddp": True, "sharded_data_parallel_degree": 4}


def collectives() -> Collectives:
    return Collectives(runtime.current("test"))


def positions(count: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """Values that say where they belong."""
    return torch.arange(start, start + count).to(dtype)


def real_values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of sizes at which the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (drawn * 1000.0 ** (seed % 3)).to(dtype)


def tree(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, neighbours first, in plain words of its own."""
    if len(values) == 1:
        return values[0]
    half = 1
    while half * 2 < len(values):
        half *= 2
    return tree(values[:half]) + tree(values[half:])


@pytest.mark.smp(ranks=[1, 2, 3, 4])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float64", "complex64", "int64", "bool", "uint8"]
)
def test_parts_come_in_the_order_of_the_group(smp: Any, dtype: str) -> None:
    here = runtime.current("test")
    gathers = Collectives(here, GroupKind.RDP, None)
    kind = getattr(torch, dtype)
    for part in (3, 1, 0):
        mine = positions(part, kind, here.rank * part)
        whole = gathers.all_gather(mine).result()
        assert whole.dtype is kind
        assert whole.shape == (here.size * part,)
        assert torch.equal(whole, positions(here.size * part, kind))


LENGTHS = [[3], [2, 1], [0, 3, 0, 2], [1, 1, 1], [0], [0, 0], [70_000, 0, 41, 70_000]]


def check_parts(gathers: Collectives, lengths: list[int], dtype: torch.dtype) -> None:
    """Element i of a rank's shard is i + 1000 times the rank, as far as the dtype tells them apart."""
    count = sum(lengths)
    shards = [positions(count, dtype, 1000 * rank) for rank in range(gathers.size)]
    parts = gathers.all_gather_parts(shards[gathers.rank], lengths).result()
    for number, part in enumerate(parts):
        begin = sum(lengths[:number])
        expected = torch.stack([each[begin : begin + lengths[number]] for each in shards])
        assert part.dtype is dtype
        assert torch.equal(part, expected), (lengths, number)
        part.zero_()  # changes no other part, and no shard
    assert torch.equal(shards[gathers.rank], positions(count, dtype, 1000 * gathers.rank))


@pytest.mark.smp(ranks=[1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64"])
def test_a_gather_of_parts_gives_each_by_itself(smp: Any, dtype: str) -> None:
    gathers = Collectives(runtime.current("test"), GroupKind.RDP, None)
    for lengths in LENGTHS:
        check_parts(gathers, lengths, getattr(torch, dtype))


@pytest.mark.smp(ranks=4, **FOUR, ranks_per_node=2, sdp_hierarchical_allgather=True)
def test_a_gather_of_parts_in_two_hops(smp: Any) -> None:
    for lengths in LENGTHS:
        check_parts(collectives(), lengths, torch.float32)


@pytest.mark.smp(ranks=4, **FOUR)
def test_a_gather_of_parts_counts_as_one_of_the_whole(smp: Any) -> None:
    gathers = collectives()
    with gathers.traffic.recorded() as log:
        gathers.all_gather_parts(torch.ones(5), [2, 3]).result()
        gathers.all_gather(torch.ones(5)).result()
    assert log[0] == log[1]


@pytest.mark.smp(ranks=4, **FOUR)
def test_a_gather_of_other_parts_than_the_shard_has_is_refused(smp: Any) -> None:
    gathers = collectives()
    with gathers.traffic.recorded() as log:
        for lengths in ([1, 1], [2, 3], []):
            with pytest.raises(
                ValueError, match=re.escape(f"4 elements have no parts of {lengths}")
            ):
                gathers.all_gather_parts(torch.ones(4), lengths)
    assert not log
    gathers.settle()


@pytest.mark.smp(ranks=4, **FOUR)
def test_an_operation_that_failed_is_not_waited_for(smp: Any) -> None:
    gathers = collectives()
    gathers._shard_group.process_group = None  # has no gather
    with pytest.raises(AttributeError):
        gathers.all_gather(torch.ones(2))
    gathers.settle()


@pytest.mark.smp(ranks=4, **FOUR)
def test_an_operation_whose_exchange_failed_is_done(smp: Any) -> None:
    """Its error is raised to each who asks for its result, and nobody waits for it again."""

    class Group:
        waits = 0

        def _allgather_base(self, *_: Any) -> Any:
            return self

        def wait(self) -> None:
            self.waits += 1
            raise RuntimeError("the exchange failed")

    gathers = collectives()
    gathers._shard_group.process_group = group = Group()
    pending = gathers.all_gather(torch.ones(2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the exchange failed"):
            pending.result()
    gathers.settle()
    assert group.waits == 1


@pytest.mark.smp(ranks=4, **FOUR)
def test_signs_and_payloads_of_not_a_number_survive(smp: Any) -> None:
    bits = torch.tensor([-(2**31), 0x7FC00001, 1], dtype=torch.int32) + runtime.current("t").rank
    whole = collectives().all_gather(bits.view(torch.float32)).result()
    expected = [base + rank for rank in range(4) for base in (-(2**31), 0x7FC00001, 1)]
    assert whole.view(torch.int32).tolist() == expected


NODES = [(4, 2), (6, 2), (6, 3), (5, 2), (6, 4), (3, 1), (4, 4), (8, 2)]


@pytest.mark.smp(ranks=8, ddp=True)
@pytest.mark.parametrize(("size", "per_node"), NODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_hops_give_the_bytes_of_one(smp: Any, size: int, per_node: int, dtype: str) -> None:
    world = runtime.current("test")
    kind = getattr(torch, dtype)
    for hierarchical in (True, False):
        here = part_of_world(world, size, per_node, hierarchical)
        if here is None:
            continue
        gathers = Collectives(here)
        two_hops = hierarchical and 1 < per_node < size and not size % per_node
        for part in (3, 1, 0):
            whole = gathers.all_gather(positions(part, kind, here.rank * part)).result()
            assert torch.equal(whole, positions(size * part, kind))
        assert gathers.traffic.calls(None, "all_gather") == (0 if two_hops else 3)
        assert gathers.traffic.calls(None, "all_gather between nodes") == (3 if two_hops else 0)
        assert gathers.traffic.calls(None, "all_gather within nodes") == (3 if two_hops else 0)


@pytest.mark.smp(
    ranks=4,
    ddp=True,
    tensor_parallel_degree=4,
    ranks_per_node=2,
    sdp_hierarchical_allgather=True,
)
def test_a_plan_that_is_given_counts_more_than_the_configurations(smp: Any) -> None:
    here = runtime.current("test")
    of_state = Collectives(here, GroupKind.TP, None)
    flat = Collectives(here, GroupKind.TP, None, plan="flat")
    of_activations = TensorGroup(here)
    part = positions(2, start=2 * here.rank)
    for gathers in (of_state, flat, of_activations):
        gathered = gathers.all_gather(part)
        whole = gathered if isinstance(gathered, torch.Tensor) else gathered.result()
        assert torch.equal(whole.flatten(), positions(8))
    calls = [each.traffic.calls(None, "all_gather") for each in (of_state, flat, of_activations)]
    assert calls == [0, 1, 1]


def part_of_world(
    world: runtime.Runtime, size: int, per_node: int, hierarchical: bool
) -> runtime.Runtime | None:
    """A world of the first ``size`` ranks, all of one shard group; None on the others."""
    if world.rank >= size:
        return None
    config = Config.parse(
        {
            "ddp": True,
            "sharded_data_parallel_degree": size,
            "ranks_per_node": per_node,
            "sdp_hierarchical_allgather": hierarchical,
        }
    )
    made = runtime.Runtime(config, Topology(size, sharding=size), world.fabric)
    made.size = size
    return made


@pytest.mark.smp(ranks=4, **FOUR, ranks_per_node=2)
def test_several_gathers_under_way_may_be_asked_for_in_any_order(smp: Any) -> None:
    gathers = collectives()
    parts = [positions(2, start=100 * number + 2 * gathers.rank) for number in range(3)]
    pending = [gathers.all_gather(part) for part in parts]
    for number in (2, 0, 1, 0) if gathers.rank else (0, 1, 2, 2):
        assert torch.equal(pending[number].result(), positions(8, start=100 * number))
    assert pending[1].result() is pending[1].result()


@pytest.mark.smp(ranks=8, ddp=True, sharded_data_parallel_degree=4, ranks_per_node=2)
@pytest.mark.parametrize("operation", ["all_gather", "all_reduce"])
def test_a_rank_may_ask_for_a_result_before_another_has_begun_the_next(
    smp: Any, operation: str
) -> None:
    both = collectives()
    begin = getattr(both, operation)
    given = [torch.full((3,), float(number)) for number in range(3)]
    if both.rank % 2:
        pending = [begin(given[0]), begin(given[1])]
        if operation == "all_gather":  # of a reduction all ask in the same order
            pending[1].result()
        pending.append(begin(given[2]))
    else:
        pending = [begin(given[0])]
        pending[0].result()
        pending += [begin(given[1]), begin(given[2])]
    times = both.replicas if operation == "all_reduce" else 1
    for number, one in enumerate(pending):
        assert one.result().unique().tolist() == [float(number * times)]


@pytest.mark.smp(ranks=3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_is_divided_once(smp: Any, dtype: str) -> None:
    """16-bit values are folded and divided in float32, and rounded at the end."""
    here, kind = runtime.current("test"), getattr(torch, dtype)
    both = Collectives(here, GroupKind.SHARDING, GroupKind.RDP)
    given = [real_values(rank, 5, dtype=kind) for rank in range(3)]
    wanted = (tree([each.float() for each in given]) / 3).to(kind)
    assert torch.equal(both.all_reduce(given[here.rank], 3).result(), wanted)


@pytest.mark.smp(ranks=2)
def test_reductions_that_have_begun_go_on_together(smp: Any) -> None:
    both = Collectives(runtime.current("test"), GroupKind.SHARDING, GroupKind.RDP)
    pending = [both.all_reduce(torch.full((2,), float(number))) for number in range(3)]
    assert both.traffic.calls(None, "all_reduce, handed out") == 0
    assert pending[0].result().tolist() == [0.0, 0.0]
    assert both.traffic.calls(None, "all_reduce, handed out") == 3
    pending.append(both.all_reduce(torch.full((2,), 3.0)))
    assert [each.result().tolist() for each in pending[1:]] == [[2.0] * 2, [4.0] * 2, [6.0] * 2]


@pytest.mark.smp(ranks=2)
def test_reductions_are_handed_out_in_the_order_in_which_they_began(smp: Any) -> None:
    both = Collectives(runtime.current("test"), GroupKind.SHARDING, GroupKind.RDP)
    pending = [both.all_reduce(torch.full((2,), float(number))) for number in range(3)]
    order = (2, 0, 1) if runtime.current("test").rank else (0, 1, 2)
    for number in order:
        assert pending[number].result().tolist() == [2.0 * number] * 2


@pytest.mark.smp(ranks=[1, 2, 3, 5, 6])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_each_rank_gets_the_tree_of_its_rows(smp: Any, dtype: str) -> None:
    here = runtime.current("test")
    reduces = Collectives(here, GroupKind.RDP, None)
    kind = getattr(torch, dtype)
    for count in (4, 1, 0):
        all_ = [real_values(rank, here.size, count, dtype=kind) for rank in range(here.size)]
        given = all_[here.rank].clone()
        for columns in ([given], [given[:, :1].clone(), given[:, 1:].clone()]):
            mine = reduces.reduce_scatter(columns).result()
            assert mine.dtype is kind
            assert torch.equal(mine, tree([rows[here.rank] for rows in all_]))
        mine = reduces.reduce_scatter([given]).result()
        assert torch.equal(given, all_[here.rank])
        given.zero_()
        assert torch.equal(mine, tree([rows[here.rank] for rows in all_]))


@pytest.mark.smp(ranks=[1, 2, 3, 5, 6])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_all_get_the_tree_over_those_that_hold_the_same(smp: Any, dtype: str) -> None:
    here = runtime.current("test")
    reduces = Collectives(here, GroupKind.SHARDING, GroupKind.RDP)
    assert reduces.replicas == here.size
    kind = getattr(torch, dtype)
    for count in (7, 6, 1, 0):
        all_ = [real_values(rank, count, dtype=kind) for rank in range(here.size)]
        given = all_[here.rank].clone()
        total = reduces.all_reduce(given).result()
        assert total.shape == (count,)
        assert torch.equal(total, tree(all_))
        assert torch.equal(given, all_[here.rank])
        given.zero_()
        assert torch.equal(total, tree(all_))


@pytest.mark.smp(ranks=6, ddp=True, sharded_data_parallel_degree=3)
def test_groups_are_those_of_the_topology(smp: Any) -> None:
    both = collectives()
    rank = runtime.current("test").rank
    assert (both.size, both.rank, both.replicas) == (3, rank % 3, 2)
    mine = torch.tensor([float(rank)])
    assert both.all_gather(mine).result().tolist() == [rank // 3 * 3 + each for each in range(3)]
    rows = torch.tensor([[1.0], [10.0], [100.0]]) * 2.0**rank
    among = sum(2.0**each for each in range(6) if each // 3 == rank // 3)
    assert both.reduce_scatter([rows]).result().tolist() == [among * 10 ** (rank % 3)]
    assert both.all_reduce(mine).result().tolist() == [2 * (rank % 3) + 3]


@pytest.mark.smp(ranks=[1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_what_would_be_rounded_on_the_way_is_refused(smp: Any, dtype: str) -> None:
    both = Collectives(runtime.current("test"), GroupKind.RDP, GroupKind.RDP)
    values = torch.ones(both.size, 2, dtype=getattr(torch, dtype))
    with pytest.raises(TypeError, match=rf"reduce_scatter: torch.{dtype} would be rounded"):
        both.reduce_scatter([values])
    if dtype == "int32":
        with pytest.raises(TypeError, match=r"all_reduce: torch.int32 would be rounded"):
            both.all_reduce(values[0])


@pytest.mark.smp(ranks=4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_all_reduce_folds_16_bits_in_32_and_rounds_once(smp: Any, dtype: torch.dtype) -> None:
    both = Collectives(runtime.current("test"), GroupKind.SHARDING, GroupKind.RDP)
    # 256 + 1 needs 9 bits: a sum in bfloat16 would lose each 1. In float16 the same is true of 2048 + 1.
    large = 256.0 if dtype is torch.bfloat16 else 2048.0
    local = torch.tensor([large if smp.rank() == 0 else 1.0, 3.0], dtype=dtype)
    found = both.all_reduce(local, 3).result()
    assert found.dtype is dtype
    assert found.tolist() == torch.tensor([(large + 3) / 3, 4.0]).to(dtype).tolist()


@pytest.mark.smp(ranks=4, **FOUR, ranks_per_node=2)
def test_values_are_gathered_exactly(smp: Any) -> None:
    gathers = collectives()
    values = [0.1 + gathers.rank, float("inf"), 2.0**-1074]
    told = gathers.all_gather_values(values)
    assert told == [[0.1 + rank, float("inf"), 2.0**-1074] for rank in range(4)]
    assert gathers.all_gather_values([]) == [[], [], [], []]


@pytest.mark.smp(ranks=1)
def test_alone_nothing_is_sent_and_results_have_memory_of_their_own(smp: Any) -> None:
    alone = collectives()
    given = positions(3)
    results = [
        alone.all_gather(given).result(),
        alone.reduce_scatter([given[None]]).result(),
        alone.all_reduce(given).result(),
    ]
    expected = positions(3)
    given.fill_(-1)
    assert all(torch.equal(result, expected) for result in results)
    assert alone.all_gather_values([0.5]) == [[0.5]]
    sums = alone.traffic.since()
    assert {kind.operation for kind in sums} >= {"all_gather", "reduce_scatter", "all_reduce"}
    assert alone.traffic.bytes() == 0


@pytest.mark.smp(ranks=6, ddp=True, sharded_data_parallel_degree=3, ranks_per_node=2)
def test_bytes_are_those_that_leave_the_rank(smp: Any) -> None:
    both = collectives()
    rank = runtime.current("test").rank
    both.all_gather(positions(5, torch.bfloat16)).result()
    both.reduce_scatter([torch.ones(3, 5)]).result()
    both.all_reduce(torch.ones(5, dtype=torch.float64)).result()
    node = [each // 2 for each in range(6)]
    group = [each for each in range(6) if each // 3 == rank // 3]
    following = group[(group.index(rank) + 1) % 3]
    other = (rank + 3) % 6
    elsewhere = sum(node[each] != node[rank] for each in group)
    assert both.traffic.since() == {
        TrafficKind("all_gather", SHARDING, torch.bfloat16): Sum(
            1, 15, 2 * 5 * 2, 2 * 5 * 2 if node[following] != node[rank] else 0
        ),
        TrafficKind("reduce_scatter", SHARDING, torch.float32): Sum(
            1, 15, 2 * 5 * 4, elsewhere * 5 * 4
        ),
        # Padded to a multiple of two.
        TrafficKind("all_reduce", REPLICATION, torch.float64): Sum(1, 6, 3 * 8, 3 * 8),
        TrafficKind("all_reduce, handed out", REPLICATION, torch.float64): Sum(1, 6, 3 * 8, 3 * 8),
    }
    assert node[other] != node[rank]


@pytest.mark.smp(ranks=4, **FOUR)
@pytest.mark.parametrize(("nodes", "leave"), [(4, 3), (1, 0)])
def test_parts_that_each_goes_on_its_own_leave_the_node_or_do_not(
    smp: Any, nodes: int, leave: int
) -> None:
    here = part_of_world(runtime.current("test"), 4, 4 // nodes, True)
    assert here is not None
    gathers = Collectives(here)
    gathers.all_gather(positions(5, torch.float64)).result()
    (counted,) = gathers.traffic.since().values()
    assert counted == Sum(1, 20, 3 * 5 * 8, leave * 5 * 8)


@pytest.mark.smp(ranks=8, ddp=True)
@pytest.mark.parametrize(("p", "k"), [(8, 2), (8, 4), (6, 3), (4, 2)])
def test_what_leaves_a_node_is_the_formula(smp: Any, p: int, k: int) -> None:
    world = runtime.current("test")
    for hierarchical, formula in ((False, Fraction(p - 1, p)), (True, Fraction(p - k, p))):
        here = part_of_world(world, p, k, hierarchical)
        left = 0
        if here is not None:
            gathers = Collectives(here)
            gathers.all_gather(positions(3)).result()
            sums = gathers.traffic.since().values()
            assert sum(each.bytes for each in sums) == 4 * 3 * (p - 1)  # whatever the order
            left = sum(each.between_nodes for each in sums)
        told = smp.allgather(left, smp.WORLD)
        for node in range(p // k):
            assert sum(told[node * k : node * k + k]) == formula * 4 * 3 * p
