"""Reduction over replicas: the order of the sum, what is divided, who has a gradient, and overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pytest_smp import replay
from smp_core import runtime
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.execution.accumulation import Ledger
from smp_core.torch.reduction.buckets import fill_bytes
from smp_core.torch.reduction.policy import Options
from smp_core.torch.reduction.reducer import GradientReducer, deposit
from smp_core.torch.reduction.replicas import GradBucket
from smp_core.torch.reduction.shards import WholeGradients

SHAPES = [(3, 5), (), (0, 4), (7,), (2, 2, 2), (1,)]


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    made = {
        f"p{n}": nn.Parameter(torch.zeros(shape, dtype=dtype)) for n, shape in enumerate(SHAPES)
    }
    made["frozen"] = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
    return made


def values_of(
    rank: int, dtype: torch.dtype, missing: Mapping[int, set[str]] | None = None, step: int = 0
) -> dict[str, torch.Tensor | None]:
    """The gradients of a replica, of sizes at which the order of a sum shows."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    made: dict[str, torch.Tensor | None] = {}
    for number, shape in enumerate(SHAPES):
        name = f"p{number}"
        value = torch.randn(shape, generator=generator, dtype=torch.float64) * 1000.0**rank
        made[name] = None if name in (missing or {}).get(rank, ()) else value.to(dtype)
    return made


def gradients_of(
    named: Mapping[str, nn.Parameter], values: Mapping[str, torch.Tensor | None]
) -> dict[nn.Parameter, torch.Tensor]:
    return {named[name]: value for name, value in values.items() if value is not None}


def world() -> tuple[runtime.Runtime, int]:
    here = runtime.current("test")
    return here, here.rank


def reducer(
    here: runtime.Runtime, named: Mapping[str, nn.Parameter], options: Options
) -> GradientReducer:
    """The reducer of plain data parallelism."""
    return GradientReducer(here, named, options, WholeGradients(here))


def check(named: Mapping[str, nn.Parameter], expected: Mapping[str, torch.Tensor | None]) -> None:
    for name, value in expected.items():
        grad = named[name].grad
        if value is None:
            assert grad is None, name
        else:
            assert grad is not None, name
            assert grad.dtype is value.dtype
            assert torch.equal(grad, value), name
    assert named["frozen"].grad is None


@pytest.mark.smp(ranks=[1, 3, 4], microbatches=2)
@pytest.mark.parametrize(
    ("dtype", "cap"),
    [
        ("float32", 25),
        ("float32", 1e-5),
        ("float32", 4e-5),
        ("bfloat16", 2e-5),
        ("float64", 25),
        ("complex64", 25),
    ],
)
def test_every_bucket_size_gives_the_tree_over_ranks_divided_once(
    smp: Any, dtype: str, cap: float
) -> None:
    here, rank = world()
    kind = getattr(torch, dtype)
    named = parameters(kind)
    missing = {0: {"p0", "p4"}, 1: {"p4", "p3"}, 2: {"p4"}, 3: {"p4", "p0"}}
    gradients = reducer(here, named, Options(bucket_cap_mb=cap))
    gradients.begin_step()
    values = values_of(rank, kind, missing)
    assert gradients.end_step(gradients_of(named, values), None) is None
    everybody = [values_of(other, kind, missing) for other in range(here.size)]
    check(named, replay.reduce(everybody, divisor=2 * here.size))


@pytest.mark.smp(ranks=3)
@pytest.mark.parametrize("views", [True, False])
def test_gradients_are_added_to_what_is_there(smp: Any, views: bool) -> None:
    here, rank = world()
    named = parameters()
    gradients = reducer(here, named, Options(gradient_as_bucket_view=views))
    seen: list[float] = []
    named["p1"].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))  # type: ignore[union-attr]
    for step in range(2):
        gradients.begin_step()
        gradients.end_step(gradients_of(named, values_of(rank, torch.float32, step=step)), None)
    once, again = (
        replay.reduce([values_of(other, torch.float32, step=step) for other in range(3)], 3)
        for step in range(2)
    )
    check(named, {name: once[name] + again[name] for name in once})  # type: ignore[operator]
    assert seen == [once["p1"].item(), named["p1"].grad.item()]  # type: ignore[union-attr]


@pytest.mark.smp(ranks=2, microbatches=4)
@pytest.mark.parametrize("average", [True, False])
def test_steps_accumulate_until_the_boundary(smp: Any, average: bool) -> None:
    here, rank = world()
    named = parameters()
    options = Options(backward_passes_per_step=3, average_grads_across_microbatches=average)
    gradients = reducer(here, named, options)
    missing = [{0: {"p0"}, 1: {"p0", "p3"}}, {0: {"p0", "p3"}, 1: {"p0"}}, {0: {"p0"}, 1: {"p0"}}]
    for step in range(3):
        assert all(parameter.grad is None for parameter in named.values())
        assert gradients.boundary == (step == 2)
        gradients.begin_step()
        values = values_of(rank, torch.float32, missing[step], step)
        gradients.end_step(gradients_of(named, values), None)
    sums = [
        replay.accumulate([values_of(other, torch.float32, missing[s], s) for s in range(3)])
        for other in range(2)
    ]
    check(named, replay.reduce(sums, divisor=2 * (4 if average else 1)))
    assert not gradients.boundary


@pytest.mark.smp(ranks=3)
def test_a_failure_of_one_is_the_failure_of_all_and_changes_nothing(smp: Any) -> None:
    here, rank = world()
    named = parameters()
    gradients = reducer(here, named, Options(backward_passes_per_step=2))
    gradients.begin_step()
    gradients.end_step(gradients_of(named, values_of(rank, torch.float32)), None)
    gradients.begin_step()
    failure = None if rank == 0 else f"of rank {rank}"
    totals = gradients_of(named, values_of(rank, torch.float32, step=9)) if rank == 0 else {}
    assert gradients.end_step(totals, failure) == "of rank 1"
    assert all(parameter.grad is None for parameter in named.values())
    gradients.begin_step()
    gradients.end_step(gradients_of(named, values_of(rank, torch.float32, step=1)), None)
    sums = [
        replay.accumulate([values_of(other, torch.float32, step=s) for s in (0, 1)])
        for other in range(3)
    ]
    check(named, replay.reduce(sums, divisor=3))


class Progress:
    """Gradients that come in a given order during the step, as backward brings them."""

    def __init__(self, gradients: GradientReducer, named: Mapping[str, nn.Parameter]) -> None:
        self.gradients, self.named = gradients, named
        self.ledger = Ledger(1, gradients)

    def bring(self, values: Mapping[str, torch.Tensor | None], names: Sequence[str]) -> None:
        for name in names:
            value = values[name]
            if value is not None:
                self.ledger.expect(0, self.named[name])
                self.ledger.add(0, self.named[name], value.clone())
                self.gradients.advance()

    def end(self, failure: Any = None) -> Any:
        if failure is None:
            self.ledger.close(0)
        return self.gradients.end_step(self.ledger.totals() if failure is None else {}, failure)


BACKWARD = [f"p{number}" for number in reversed(range(len(SHAPES)))]


@pytest.mark.smp(ranks=3)
@pytest.mark.parametrize("missing", [{}, {1: {"p3"}}, {0: {"p5"}, 2: {"p1"}}])
def test_overlap_gives_the_same_bits_however_far_each_replica_got(
    smp: Any, missing: dict[int, set[str]]
) -> None:
    here, rank = world()
    named = parameters()
    gradients = reducer(here, named, Options(bucket_cap_mb=4e-5))
    gradients.begin_step()
    progress = Progress(gradients, named)
    order = BACKWARD if rank else [*BACKWARD[2:], *BACKWARD[:2]]
    progress.bring(values_of(rank, torch.float32, missing), order)
    assert progress.end() is None
    everybody = [values_of(other, torch.float32, missing) for other in range(3)]
    check(named, replay.reduce(everybody, divisor=3))


@pytest.mark.smp(ranks=2)
def test_what_comes_after_a_bucket_has_set_out_is_not_lost(smp: Any) -> None:
    here, rank = world()
    named = parameters()
    gradients = reducer(here, named, Options(bucket_cap_mb=1e-5))
    gradients.begin_step()
    progress = Progress(gradients, named)
    values = values_of(rank, torch.float32)
    progress.bring(values, BACKWARD)
    if rank == 1:
        progress.bring(values_of(7, torch.float32), ["p5", "p2"])
    progress.end()
    other = values_of(1, torch.float32)
    for name in ("p5", "p2"):
        other[name] = other[name] + values_of(7, torch.float32)[name]  # type: ignore[operator]
    check(named, replay.reduce([values_of(0, torch.float32), other], divisor=2))


@pytest.mark.smp(ranks=2)
def test_a_failure_during_overlap_leaves_no_message_behind(smp: Any) -> None:
    here, rank = world()
    named = parameters()
    gradients = reducer(here, named, Options(bucket_cap_mb=1e-5))
    for attempt in range(2):
        gradients.begin_step()
        progress = Progress(gradients, named)
        values = values_of(rank, torch.float32)
        failing = attempt == 0 and rank == 1
        progress.bring(values, BACKWARD[:1] if failing else BACKWARD)
        assert progress.end("broken" if failing else None) == (None if attempt else "broken")
        assert attempt or named["p0"].grad is None
    check(named, replay.reduce([values_of(r, torch.float32) for r in range(2)], divisor=2))


@pytest.mark.smp(ranks=3)
def test_sparse_gradients_of_replicas_stay_sparse(smp: Any) -> None:
    here, rank = world()
    weight = nn.Parameter(torch.zeros(6, 2))
    gradients = reducer(here, {"w": weight}, Options())
    gradients.begin_step()
    rows = [[0, 0, 5], [], [5, 3]][rank]
    given = torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64),
        torch.ones(len(rows), 2) * (rank + 1),
        (6, 2),
        check_invariants=True,
    )
    gradients.end_step({weight: given} if rows else {}, None)
    assert weight.grad is not None
    assert weight.grad.is_sparse
    assert weight.grad.coalesce().indices().tolist() == [[0, 3, 5]]
    sums = torch.tensor([2.0, 0.0, 0.0, 3.0, 0.0, 4.0])
    assert torch.equal(weight.grad.to_dense()[:, 0], sums / 3)


@pytest.mark.smp(ranks=2)
def test_a_gradient_that_is_sparse_on_one_replica_only_becomes_dense(smp: Any) -> None:
    here, rank = world()
    weight = nn.Parameter(torch.zeros(2, 2))
    gradients = reducer(here, {"w": weight}, Options())
    gradients.begin_step()
    gradients.end_step({weight: torch.eye(2).to_sparse() if rank else torch.ones(2, 2)}, None)
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1.0, 0.5], [0.5, 1.0]]


@pytest.mark.smp(ranks=4, pipeline_parallel_degree=2)
def test_replicas_are_those_of_the_same_partition(smp: Any) -> None:
    here, rank = world()
    weight = nn.Parameter(torch.zeros(1))
    gradients = reducer(here, {"w": weight}, Options())
    gradients.begin_step()
    gradients.end_step({weight: torch.tensor([float(rank)])}, None)
    assert weight.grad is not None
    assert weight.grad.item() == sum(smp.get_dp_group()) / 2


@pytest.mark.smp(ranks=3)
def test_buffers_and_parameters_are_those_of_one_replica(smp: Any) -> None:
    here, rank = world()
    for source, broadcast in ((0, True), (2, True), (0, False)):
        tensors = [
            torch.full((2, 3), float(rank)).t(),
            torch.tensor(rank),
            torch.tensor([True, rank == 2]),
            torch.zeros(0),
            torch.full((3,), rank, dtype=torch.bfloat16),
            nn.Parameter(torch.tensor([rank + 0.5], dtype=torch.float64)),
        ]
        gradients = reducer(here, {}, Options(broadcast_buffers=broadcast))
        gradients.begin_step(tensors, source)
        by = source if broadcast else rank
        assert tensors[0].tolist() == [[by] * 2] * 3
        assert [tensors[1].item(), tensors[2].tolist()] == [by, [True, by == 2]]
        assert tensors[4].tolist() == [by] * 3
        assert tensors[5].item() == by + 0.5


@pytest.mark.smp(ranks=2, ddp=True, microbatches=2)
def test_a_communication_hook_reduces_instead(smp: Any) -> None:
    here, rank = world()
    named = parameters()
    gradients = reducer(here, named, Options(bucket_cap_mb=4e-5))
    seen: list[tuple[int, bool, int]] = []

    def hook(state: Any, bucket: GradBucket) -> Any:
        seen.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        assert [one.shape for one in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        bucket.set_buffer(bucket.buffer() / 4)
        work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
        assert work is not None
        return work.get_future()

    gradients.register_comm_hook(smp.get_dp_process_group(), hook)
    with pytest.raises(UnsupportedTrainingError, match="there is a hook already"):
        gradients.register_comm_hook(None, hook)
    gradients.begin_step()
    values = {
        name: torch.full(shape, 4.0 * rank)
        for name, shape in zip(BACKWARD[::-1], SHAPES, strict=True)
    }
    gradients.end_step(gradients_of(named, values), None)
    for name in values:
        assert torch.equal(named[name].grad, torch.ones_like(named[name]))  # type: ignore[arg-type]
    assert [index for index, _, _ in seen] == list(range(len(seen)))
    assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
    assert sum(count for _, _, count in seen) == len(SHAPES)
    assert len(seen) > 1


@pytest.mark.smp(ranks=2, ddp=True, microbatches=2)
def test_a_window_whose_hook_failed_may_be_tried_again(smp: Any) -> None:
    here, _ = world()
    named = parameters()
    gradients = reducer(here, named, Options())
    calls: list[int] = []

    def hook(state: Any, bucket: GradBucket) -> Any:
        calls.append(bucket.index())
        if len(calls) == 1:
            return None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    gradients.register_comm_hook(None, hook)
    values = {name: torch.ones(shape) for name, shape in zip(BACKWARD[::-1], SHAPES, strict=True)}
    gradients.begin_step()
    with pytest.raises(TypeError):
        gradients.end_step(gradients_of(named, values), None)
    assert all(named[name].grad is None for name in values)
    gradients.begin_step()
    gradients.end_step(gradients_of(named, values), None)
    assert gradients.reductions == 1
    for name, value in values.items():
        assert torch.equal(named[name].grad, value)  # type: ignore[arg-type]


@pytest.mark.smp(ranks=1)
def test_a_communication_hook_needs_ddp_and_overlap(smp: Any) -> None:
    gradients = reducer(world()[0], {}, Options())
    with pytest.raises(UnsupportedTrainingError, match="ddp=True"):
        gradients.register_comm_hook(None, lambda state, bucket: None)


def test_buckets_are_filled_in_reverse_order_and_hold_one_dtype() -> None:
    made = [
        nn.Parameter(torch.zeros(size, dtype=dtype))
        for size, dtype in [
            (100, torch.float32),
            (1, torch.float32),
            (4, torch.float64),
            (0, torch.float32),
            (2, torch.float32),
            (3, torch.float32),
        ]
    ]
    numbers = {parameter: number for number, parameter in enumerate(made)}
    filled = fill_bytes(made, cap=20)
    assert [[numbers[one] for one in bucket] for bucket in filled] == [[5, 4, 3], [2], [1], [0]]


def test_a_deposit_keeps_sparse_and_dense_apart_or_adds_them() -> None:
    sparse, dense = torch.eye(2).to_sparse(), torch.ones(2, 2)
    for first, second in ((sparse, dense), (dense, sparse), (sparse, sparse)):
        parameter = nn.Parameter(torch.zeros(2, 2))
        deposit(parameter, first.clone())
        deposit(parameter, second.clone())
        assert parameter.grad is not None
        expected = first.to_dense() + second.to_dense()
        assert torch.equal(parameter.grad.to_dense(), expected)


def test_hooks_of_parameters_run_in_the_order_of_the_parameters(smp_world: Any) -> None:
    assert smp_world.run(order_of_hooks, ranks=2, config={"ddp": True}) == [BACKWARD[::-1]] * 2


def order_of_hooks() -> list[str]:
    named = parameters()
    gradients = reducer(world()[0], named, Options())
    seen: list[str] = []
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    values = {name: torch.ones(shape) for name, shape in zip(BACKWARD[::-1], SHAPES, strict=True)}
    gradients.begin_step()
    gradients.end_step(gradients_of(named, values), None)
    return seen
