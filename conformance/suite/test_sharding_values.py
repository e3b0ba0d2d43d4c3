"""Properties of sharded data parallelism, compared with one process: bit for bit where nothing rounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from conformance.cases.training import (
    STEPS,
    blocks_of_two,
    check,
    claimed,
    results,
    several_steps,
    sharded_cases,
    trials,
)
from conformance.engines.capabilities import EngineCapability
from conformance.engines.names import find_engine
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training_models import Block, Model
from pytest_smp.strategies.training_replay import replayed
from pytest_smp.strategies.training_script import Seen, compare
from pytest_smp.strategies.training_sharding import (
    HUGE,
    NO_CLIPPING,
    ShardedTraining,
    divisors,
)

Data = st.DataObject


def holds(smp_world: SmpWorld, smp_engine: str, data: Data, **fixed: Any) -> list[Seen]:
    """Draw a case, train it, compare all ranks with plain PyTorch, and return the results."""
    __tracebackhide__ = True
    told = {name: fixed.pop(name) for name in ("none", "salted") if name in fixed}
    case = data.draw(sharded_cases(smp_world, smp_engine, **fixed), "case")
    return check(smp_world, smp_engine, case, **told)


#: A model of two layers, which are units of their own.
TWO = Model(Block("chain", (Block("linear"), Block("linear"))), inputs=2, width=2)


@requirement("SHARD-EQUALS-PLAIN")
@given(data=st.data())
@trials(16)
def test_any_degree_equals_one_process(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    holds(smp_world, smp_engine, data)


@requirement("SHARD-EQUALS-PLAIN")
@given(data=st.data())
@trials(3)
def test_many_ranks_equal_one_process(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    claims = claimed(smp_world, smp_engine)
    # On eight ranks these degrees make four shard groups, two, and one.
    degrees = (2, 4, 8) if EngineCapability.BLOCKS in claims else (8,)
    if EngineCapability.SHARDING not in claims:
        degrees = (1,)
    drawn = sharded_cases(smp_world, smp_engine, least=8, most=8, sharding=degrees)
    check(smp_world, smp_engine, data.draw(drawn.filter(lambda case: case.dp == 8), "case"))


@requirement("SHARD-STEPS")
@given(data=st.data(), steps=st.sampled_from(STEPS))
@trials(12)
def test_each_of_several_steps_follows_the_one_before(
    smp_world: SmpWorld, smp_engine: str, data: Data, steps: tuple[Model, str, int]
) -> None:
    fixed = {"clip": NO_CLIPPING, "checkpointing": False, **several_steps(*steps)}
    holds(smp_world, smp_engine, data, least=2, sharding=(2, 4), **fixed)


@requirement("SHARD-DEGREE")
@given(data=st.data())
@trials(3)
def test_degrees_agree(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    # Clipping is off, because only degrees above 1 clip.
    drawn = sharded_cases(smp_world, smp_engine, least=4, sharding=(4,), clip=1e30)
    case = data.draw(drawn, "case")
    for degree in divisors(case.dp):
        check(smp_world, smp_engine, dataclasses.replace(case, sharding=degree))


@requirement("SHARD-ACCUMULATION")
@given(data=st.data(), passes=st.integers(2, 3))
@trials(4)
def test_passes_are_summed(smp_world: SmpWorld, smp_engine: str, data: Data, passes: int) -> None:
    fixed: dict[str, Any] = {"passes": passes, "windows": 2, "model": TWO}
    case = data.draw(blocks_of_two(smp_world, smp_engine, **fixed), "case")
    for sharding in sorted({case.sharding, case.dp}):  # several shard groups, then one
        check(smp_world, smp_engine, dataclasses.replace(case, sharding=sharding))


@requirement("SHARD-FROZEN")
@given(
    data=st.data(), body=st.sampled_from((Block("linear", frozen=True), Block("mlp", frozen=True)))
)
@trials(4)
def test_what_is_frozen_stays(
    smp_world: SmpWorld, smp_engine: str, data: Data, body: Block
) -> None:
    model = Model(Block("chain", (body, Block("linear"))), inputs=2, width=3)
    seen = holds(
        smp_world, smp_engine, data, least=2, sharding=(2, 4), model=model, optimizer="adamw"
    )
    for rank in seen:
        for gradients in rank.gradients:
            frozen = [g for name, g in gradients.items() if name.startswith("body.0")]
            assert frozen == [None] * len(frozen)


#: Models whose parameters are used several times.
SHARING = (
    Block("repeat", (Block("linear"),), 2),
    Block("chain", (Block("shared", size=1), Block("relu"), Block("shared", size=1))),
    Block("branches", (Block("tied", size=1), Block("tied", size=1, bias=False))),
    Block("residual", (Block("chain", (Block("tied", size=1), Block("tied", size=1))),)),
)


@requirement("SHARD-SHARED")
@given(data=st.data(), body=st.sampled_from(SHARING), tied=st.booleans())
@trials(6)
def test_every_use_counts(
    smp_world: SmpWorld, smp_engine: str, data: Data, body: Block, tied: bool
) -> None:
    model = Model(body, inputs=0 if tied else 2, width=3, outputs=3 if tied else 1, tied=tied)
    holds(smp_world, smp_engine, data, least=2, sharding=(2, 4), model=model)


#: Models with parameters that no call uses, or only some microbatches and ranks.
SPARSE = (
    Block("unused", (Block("relu"), Block("linear"))),
    Block("chain", (Block("unused", (Block("linear"), Block("mlp"))), Block("linear"))),
    Block("route", (Block("linear"), Block("linear"))),
    Block("chain", (Block("route", (Block("linear"), Block("relu"))), Block("linear"))),
)


@requirement("SHARD-UNUSED")
@given(data=st.data(), body=st.sampled_from(SPARSE), passes=st.integers(1, 2))
@trials(8)
def test_what_is_not_used_is_zero(
    smp_world: SmpWorld, smp_engine: str, data: Data, body: Block, passes: int
) -> None:
    model = Model(body, inputs=2, width=2)
    # With one microbatch, ranks differ in the parameters that they use.
    fixed = {"model": model, "microbatches": 1, "passes": passes, "windows": 1}
    holds(smp_world, smp_engine, data, least=2, sharding=(2, 4), none=True, **fixed)


@requirement("SHARD-UNUSED")
@given(data=st.data(), seed=st.integers(0, 99), groups=st.integers(1, 2))
@trials(8)
def test_what_an_earlier_pass_used_counts(
    smp_world: SmpWorld, smp_engine: str, data: Data, seed: int, groups: int
) -> None:
    model = Model(SPARSE[-1], inputs=2, width=2)
    # With few ranks and microbatches, passes differ in the parameters that they use.
    fixed = {"model": model, "microbatches": 1, "rows": 1, "passes": 3, "windows": 1, "seed": seed}
    if groups == 1 or smp_world.ranks < 4:
        drawn = sharded_cases(smp_world, smp_engine, least=2, most=2, sharding=(2,), **fixed)
    else:
        drawn = blocks_of_two(smp_world, smp_engine, **fixed)
    check(smp_world, smp_engine, data.draw(drawn, "case"), none=True)


@requirement("SHARD-ANY-PARAMETER")
@given(data=st.data(), width=st.integers(1, 3))
@trials(6)
def test_parameters_may_have_any_shape(
    smp_world: SmpWorld, smp_engine: str, data: Data, width: int
) -> None:
    kinds = ("gain", "empty", "transposed", "linear")
    model = Model(Block("chain", tuple(map(Block, kinds))), inputs=2, width=width)
    threshold = data.draw(st.sampled_from([0, 1, 2, 5]), "threshold")
    fixed = {"model": model, "threshold": threshold}
    holds(smp_world, smp_engine, data, least=2, sharding=(2, 4), **fixed)


@requirement("SHARD-OUTSIDE")
@given(data=st.data(), kind=st.sampled_from(("borrow", "hold")), threshold=st.sampled_from([0, 9]))
@trials(6)
def test_a_module_may_use_what_another_one_has(
    smp_world: SmpWorld, smp_engine: str, data: Data, kind: str, threshold: int
) -> None:
    model = Model(Block("chain", (Block(kind), Block("relu"))), inputs=2, width=3)
    fixed = {"model": model, "threshold": threshold, "registered": True}
    holds(smp_world, smp_engine, data, least=2, sharding=(2, 4), **fixed)


@requirement("SHARD-INIT")
@given(data=st.data())
@trials(3)
def test_rank_0_has_the_weights(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    drawn = sharded_cases(smp_world, smp_engine, least=2, sharding=(2, 4), model=TWO)
    case = data.draw(drawn, "case")
    for threshold in (0, HUGE):  # all parameters sharded, then none
        check(smp_world, smp_engine, dataclasses.replace(case, threshold=threshold), salted=True)


@requirement("SHARD-REPLAYED")
@given(data=st.data())
@trials(12)
def test_real_values_are_those_of_the_published_order(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    case = data.draw(sharded_cases(smp_world, smp_engine, real=True), "case")
    compare(replayed(case), results(smp_world, smp_engine, case), what="the published order")


# ---- Clipping ------------------------------------------------------------------------------------


@requirement("SHARD-CLIP-ONE-PROCESS")
@given(data=st.data(), tied=st.booleans())
@trials(4)
def test_a_step_clips_as_one_process_does(
    smp_world: SmpWorld, smp_engine: str, data: Data, tied: bool
) -> None:
    fixed: dict[str, Any] = {"optimizer": "sgd", "windows": 1}
    if tied:
        fixed["model"] = Model(Block("linear"), inputs=0, width=2, outputs=3, tied=True)
    drawn = sharded_cases(smp_world, smp_engine, least=2, sharding=(2, 4), **fixed)
    whole = data.draw(drawn, "case")
    for clip in (0.25, 1024.0):
        case = dataclasses.replace(whole, clip=clip)
        if EngineCapability.REPLAYED in find_engine(smp_engine).capabilities:
            check(smp_world, smp_engine, case)
        else:
            clips_within_rounding(smp_engine, case, results(smp_world, smp_engine, case))


@requirement("SHARD-REPLAYED")
@given(data=st.data())
@trials(4)
def test_real_values_are_clipped_in_the_published_order(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    fixed: dict[str, Any] = {"real": True, "clip": 0.25, "optimizer": "sgd"}
    drawn = sharded_cases(smp_world, smp_engine, least=2, sharding=(2, 4), **fixed)
    case = data.draw(drawn, "case")
    compare(replayed(case), results(smp_world, smp_engine, case), what="the published order")


def clips_within_rounding(engine: str, case: ShardedTraining, seen: list[Seen]) -> None:
    """Check parameters within the bound of a norm that is summed in float32 in any order.

    ENGINES 2.2, tier B, has the bound.
    """
    expected = oracle.plain(case, find_engine(engine).conventions.divisor(case))
    before = {name: each.detach() for name, each in oracle.make(case).named_parameters()}
    elements = sum(each.numel() for each in before.values())
    # Roundings of squares and their sum, of one root for each parameter and one for all, and of division,
    # product and update.
    count = elements + 2 * len(before) + 8
    gamma = count * 2.0**-24 / (1 - count * 2.0**-24)
    for rank, each in enumerate(seen):
        for name, got in each.parameters.items():
            want = expected.parameters[name]
            bound = gamma * ((want - before[name]).abs() + want.abs())
            assert bool(((got - want).abs() <= bound).all()), f"rank {rank}, {name}: {got}, {want}"


# ---- 16 bits -------------------------------------------------------------------------------------


@requirement("SHARD-BF16")
@given(data=st.data())
@trials(5)
def test_bf16_rounds_once(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    holds(smp_world, smp_engine, data, least=2, sharding=(2, 4), dtypes=("bfloat16",))


@requirement("SHARD-FP16")
@given(data=st.data())
@trials(5)
def test_fp16_rounds_once(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    holds(smp_world, smp_engine, data, dtypes=("float16",))
