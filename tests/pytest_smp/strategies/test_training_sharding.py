"""Cases of sharded training: what is drawn is valid and certain, and both references are what they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.errors import InvalidArgument

from pytest_smp import replay
from pytest_smp.strategies import (
    Block,
    Model,
    ShardedTraining,
    sharded_trainings,
    sharding_configurations,
)
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training_lattice import certified
from pytest_smp.strategies.training_models import KINDS, build
from pytest_smp.strategies.training_replay import replayed
from pytest_smp.strategies.training_script import Seen, compare
from pytest_smp.strategies.training_sharding import DTYPES, HUGE, NO_CLIPPING, sharded_features
from smp_core.config import Config
from tools.profiles.sharding import WANTED

Drawn = Callable[..., list[Any]]

quick = settings(deadline=None, database=None, max_examples=20)


def seen(case: ShardedTraining, results: oracle.Results) -> list[Seen]:
    """Ranks that saw just this."""
    return [
        Seen(at, results.losses[at], results.outputs[at], results.gradients, results.parameters)
        for at in range(case.dp)
    ]


# ---- What is drawn


@given(case=sharded_trainings(8, dtypes=DTYPES))
@quick
def test_exact_cases_are_valid_and_certified(case: ShardedTraining) -> None:
    assert case.ranks <= 8
    assert case.dp % case.sharding == 0
    assert certified(case)
    Config(**case.config).check_world(case.ranks)
    # The published order gives the same bits where nothing rounds.
    compare(oracle.plain(case), seen(case, replayed(case)), none=True)


@given(config=sharding_configurations(8))
@quick
def test_configurations_are_valid(config: dict[str, Any]) -> None:
    Config(**config)


def test_every_kind_of_parameter_and_limit_is_drawn(drawn: Drawn) -> None:
    rows: set[str] = set()
    kinds: set[str] = set()
    for case in drawn(sharded_trainings(8, real=True, dtypes=DTYPES), 400):
        rows |= sharded_features(case)
        kinds |= case.model.kinds()
    assert kinds == set(KINDS)
    assert {f"degree {number}" for number in range(1, 9)} <= rows
    assert set(WANTED) | {"dropout"} <= rows


def test_what_is_asked_for_is_drawn(drawn: Drawn) -> None:
    strategy = sharded_trainings(4, sharding=(2,), without=("gain", "route"), clip=1.0, passes=2)
    for case in drawn(strategy, 20):
        assert (case.sharding, case.clip, case.passes) == (2, 1.0, 2)
        assert not case.model.kinds() & {"gain", "route"}
    assert {case.dp - case.sharding for case in drawn(sharded_trainings(8, whole=True), 20)} == {0}


def test_a_case_prints_as_code() -> None:
    case = ShardedTraining(Model(Block("gain")), dp=4, sharding=2, threshold=3, clip=0.5)
    assert (
        repr(case)
        == "ShardedTraining(Model(Block('gain')), dp=4, sharding=2, threshold=3, clip=0.5)"
    )
    assert eval(repr(case)) == case


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (lambda: sharded_trainings(0), "ranks=0"),
        (lambda: sharded_trainings(4, real=1), "real=1"),  # type: ignore[arg-type]
        (lambda: sharded_trainings(4, sharding=(3,)), "no degree fits"),
        (lambda: sharded_trainings(4, without=("gains",)), "gains: there is no such kind"),
        (lambda: sharded_trainings(4, dtypes=("int8",)), "int8: there is no such dtype"),
        (lambda: sharded_trainings(4, sharded=2), "sharded: ShardedTraining has no such field"),
    ],
)
def test_bad_arguments_are_refused_at_once(strategy: Callable[[], Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        strategy()


def test_clipping_comes_with_sharding() -> None:
    case = ShardedTraining(dp=2, sharding=2, clip=0.5)
    assert case.most == 0.5
    assert dataclasses.replace(case, sharding=1).most is None
    assert dataclasses.replace(case, clip=NO_CLIPPING).most is None


def test_a_parameter_as_large_as_the_threshold_is_split() -> None:
    case = ShardedTraining(dp=2, sharding=2, threshold=5)
    assert [case.splits(elements) for elements in (4, 5, 6)] == [False, True, True]
    assert not dataclasses.replace(case, sharding=1).splits(HUGE)


# ---- The references, against numbers of one's own


def test_a_clipped_step_has_the_norm_that_is_asked_for() -> None:
    case = ShardedTraining(Model(inputs=2), dp=2, sharding=2, clip=0.5, seed=1)
    before = oracle.parameters(oracle.make(case))
    found = oracle.plain(case)
    steps = [(before[name].detach() - after) / 0.125 for name, after in found.parameters.items()]
    assert oracle.norm(found.gradients[0]) > 0.5
    assert torch.cat([each.flatten() for each in steps]).norm() == pytest.approx(0.5, rel=1e-5)
    free = oracle.plain(dataclasses.replace(case, clip=1e9))
    for name, gradient in free.gradients[0].items():
        assert gradient is not None
        assert torch.equal(free.parameters[name], before[name] - 0.125 * gradient)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_parameters_are_masters_rounded_once(dtype: str) -> None:
    kind = getattr(torch, dtype)
    case = ShardedTraining(Model(Block("linear"), 3, 4, 2), dtype=dtype, windows=2, real=True)
    wide = dataclasses.replace(case, dtype="float32")
    reference = oracle.Reference(case)
    assert {each.dtype for each in reference.masters.values()} == {torch.float32}
    found = oracle.plain(case)
    assert {each.dtype for each in found.parameters.values()} == {kind}
    assert {g.dtype for g in found.gradients[0].values() if g is not None} == {torch.float32}
    assert found.outputs[0][0][0].dtype is torch.float32
    assert not torch.equal(found.outputs[0][0][0], oracle.plain(wide).outputs[0][0][0])
    # One window of one microbatch, by hand.
    module = build(case.model)
    module.load_state_dict(oracle.state(case))
    module.to(kind)
    x, y = next(iter(oracle.microbatches(case, 0, 0)))
    oracle.loss_of(case, module(x.to(kind)).float(), y).backward()  # type: ignore[no-untyped-call]
    once = oracle.plain(dataclasses.replace(case, windows=1))
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        assert torch.equal(gradient, once.gradients[0][name]), name  # type: ignore[arg-type]
        master = oracle.state(case)[name].to(kind).float() - 0.125 * gradient
        assert torch.equal(once.parameters[name], master.to(kind)), name


def test_sharded_sums_are_folded_over_blocks_per_step() -> None:
    big, one = 2.0**24, 1.0
    # By rank and step; ((a0 + b0) + (a1 + b1)) of each block, then the blocks.
    given_ = [[big, one], [one, one], [one, one], [one, one]]
    ranks = [[{"p": torch.tensor([each])} for each in steps] for steps in given_]
    assert replay.reduce_sharded(ranks, 2, 1)["p"] == big + 2 + 4  # big + one is big
    assert replay.reduce_sharded(ranks, 1, 1)["p"] == (big + 2) + 4  # big + one is big, twice
    assert replay.reduce_sharded(ranks, 4, 1)["p"] == (big + 2) + 4
    assert replay.reduce_sharded(ranks, 4, 2)["p"] == (big + 6) / 2


def test_what_one_rank_lacks_counts_as_zeros() -> None:
    one: list[dict[str, torch.Tensor | None]] = [{"p": None, "q": None}]
    ranks = [one, [{"p": torch.ones(2, dtype=torch.bfloat16), "q": None}]]
    reduced = replay.reduce_sharded(ranks, 2, 2)
    assert reduced["q"] is None
    assert torch.equal(reduced["p"], torch.full((2,), 0.5))  # type: ignore[arg-type]


def test_the_norm_is_added_up_by_parts() -> None:
    gradients = {"a": torch.tensor([[3.0, 0.0, 4.0]]), "b": None, "c": torch.tensor(12.0)}
    assert [replay.norm(gradients, sharding) for sharding in (1, 2, 5)] == [13.0] * 3


def test_masters_start_as_what_16_bits_hold() -> None:
    reference = oracle.Reference(ShardedTraining(dp=2, sharding=2, dtype="bfloat16", real=True))
    for name, held in reference.module.named_parameters():
        assert held.dtype is torch.bfloat16
        assert torch.equal(reference.masters[name], held.float())
