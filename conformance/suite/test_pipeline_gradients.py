"""Properties of gradients of replicas and pipelines, which are compared with a plain loop bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import assume, given

from conformance.cases.training import (
    STEPS,
    cases,
    check,
    degrees,
    results,
    several_steps,
    trials,
)
from conformance.engines.names import find_engine
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import features
from pytest_smp.strategies.training_models import Block, Model, build
from pytest_smp.strategies.training_replay import replayed
from pytest_smp.strategies.training_script import Seen, compare, merged

Data = st.DataObject


def holds(smp_world: SmpWorld, smp_engine: str, data: Data, **fixed: Any) -> list[Seen]:
    """Draw a case, train it, compare all ranks with plain PyTorch, and return the results."""
    __tracebackhide__ = True
    none = fixed.pop("none", False)
    salted = fixed.pop("salted", False)
    case = data.draw(cases(smp_world, smp_engine, **fixed), "case")
    return check(smp_world, smp_engine, case, none=none, salted=salted)


@requirement("GRAD-PLAIN")
@given(data=st.data())
@trials(10)
def test_replicas_equal_a_plain_loop(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    holds(smp_world, smp_engine, data, pipeline=(1,))


@requirement("GRAD-STEPS")
@given(data=st.data(), steps=st.sampled_from(STEPS))
@trials(12)
def test_each_of_several_steps_follows_the_one_before(
    smp_world: SmpWorld, smp_engine: str, data: Data, steps: tuple[Model, str, int]
) -> None:
    pipeline = tuple(each for each in degrees(smp_world, smp_engine) if each <= 2)
    fixed = {"pipeline": pipeline, "automatic": False, **several_steps(*steps)}
    holds(smp_world, smp_engine, data, **fixed)


@requirement("PIPE-EQUALS-PLAIN")
@given(data=st.data())
@trials(30)
def test_a_pipeline_equals_a_plain_loop(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    holds(smp_world, smp_engine, data, least=2, automatic=False, pipeline=(2, 3, 4))


@requirement("PIPE-EQUALS-PLAIN")
@given(data=st.data())
@trials(4)
def test_replicas_of_pipelines_equal_a_plain_loop(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    holds(smp_world, smp_engine, data, least=4, most=8, automatic=False, pipeline=(2,), dp=2)


@requirement("PIPE-AUTOMATIC")
@given(data=st.data())
@trials(6)
def test_any_partition_of_the_library_is_right(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    holds(
        smp_world,
        smp_engine,
        data,
        least=2,
        pipeline=(2, 3),
        partition=None,
        tracing=True,
        default=0,
    )


#: Models whose parameters are used several times, by shared modules and by repeated calls.
SHARING = (
    Block("repeat", (Block("linear"),), 2),
    Block("chain", (Block("shared", size=1), Block("relu"), Block("shared", size=1))),
    Block("branches", (Block("tied", size=1), Block("tied", size=1, bias=False))),
    Block("residual", (Block("chain", (Block("tied", size=1), Block("tied", size=1))),)),
    Block("nested", (Block("repeat", (Block("nested", (Block("linear"),)),), 2),)),
)


@requirement("PIPE-SHARED")
@given(data=st.data(), body=st.sampled_from(SHARING), tied=st.booleans())
@trials(10)
def test_every_use_counts(
    smp_world: SmpWorld, smp_engine: str, data: Data, body: Block, tied: bool
) -> None:
    model = Model(body, inputs=0 if tied else 2, width=2, outputs=3 if tied else 1, tied=tied)
    drawn = cases(smp_world, smp_engine, least=2, pipeline=(2, 3), automatic=False, model=model)
    case = data.draw(drawn, "case")
    paths = [path for path, module in build(model).named_modules() if path and path[-5:] != "parts"]
    moved = data.draw(st.lists(st.sampled_from(paths), unique=True, max_size=3), "moved")
    partition = tuple((path, 1) for path in paths if path in moved)
    check(smp_world, smp_engine, dataclasses.replace(case, partition=partition))


@requirement("PIPE-SHARED")
@given(data=st.data())
@trials(4)
def test_every_call_from_another_rank_has_its_own_input(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    model = Model(Block("repeat", (Block("linear"),), 2), inputs=2, width=2)
    there = (("body.parts.0", 1),)
    fixed: dict[str, Any] = {"model": model, "partition": there, "automatic": False}
    holds(smp_world, smp_engine, data, least=2, pipeline=(2,), **fixed)


@requirement("GRAD-ACCUMULATION")
@given(data=st.data(), passes=st.integers(2, 3))
@trials(6)
def test_passes_are_summed(smp_world: SmpWorld, smp_engine: str, data: Data, passes: int) -> None:
    holds(smp_world, smp_engine, data, passes=passes, windows=2)


@requirement("GRAD-REPLICAS")
@given(data=st.data())
@trials(6)
def test_replicas_are_averaged(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    seen = holds(smp_world, smp_engine, data, least=2, pipeline=(1,), dp=2)
    held = [each.gradients[-1] for each in seen]
    for name, gradient in held[0].items():
        other = held[1][name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or (other is not None and torch.equal(gradient, other)), name


#: Models with parameters that no call uses, or only some microbatches and replicas.
SPARSE = (
    Block("unused", (Block("relu"), Block("linear"))),
    Block("route", (Block("linear"), Block("linear"))),
    Block("route", (Block("relu"), Block("mlp", size=2))),
    Block("chain", (Block("route", (Block("linear"), Block("relu"))), Block("linear"))),
)


@requirement("GRAD-UNUSED")
@given(data=st.data(), body=st.sampled_from(SPARSE), passes=st.integers(1, 3))
@trials(10)
def test_what_is_not_used_is_zero(
    smp_world: SmpWorld, smp_engine: str, data: Data, body: Block, passes: int
) -> None:
    model = Model(body, inputs=2, width=2)
    holds(smp_world, smp_engine, data, model=model, passes=passes, automatic=False, none=True)


@requirement("GRAD-UNUSED")
@given(data=st.data(), seed=st.integers(0, 99))
@trials(8)
def test_what_an_earlier_pass_used_counts(
    smp_world: SmpWorld, smp_engine: str, data: Data, seed: int
) -> None:
    model = Model(SPARSE[1], inputs=2, width=2)
    # With one microbatch, passes differ in the parameters that they use.
    fixed = {"model": model, "microbatches": 1, "passes": 2, "windows": 1, "seed": seed}
    holds(smp_world, smp_engine, data, pipeline=(1,), dp=1, none=True, **fixed)


@requirement("GRAD-UNUSED")
@given(data=st.data(), body=st.sampled_from(SPARSE[1:]), seed=st.integers(0, 99))
@trials(8)
def test_what_one_replica_uses_all_have(
    smp_world: SmpWorld, smp_engine: str, data: Data, body: Block, seed: int
) -> None:
    model = Model(body, inputs=2, width=2)
    # With one microbatch, replicas differ in the parameters that they use.
    fixed = {"model": model, "microbatches": 1, "passes": 1, "windows": 1, "seed": seed}
    holds(smp_world, smp_engine, data, least=2, pipeline=(1,), dp=2, none=True, **fixed)


@requirement("GRAD-FROZEN")
@given(
    data=st.data(), body=st.sampled_from((Block("linear", frozen=True), Block("mlp", frozen=True)))
)
@trials(4)
def test_what_is_frozen_stays(
    smp_world: SmpWorld, smp_engine: str, data: Data, body: Block
) -> None:
    model = Model(body, inputs=2, width=2, frozen=data.draw(st.booleans(), "stem"))
    case = data.draw(cases(smp_world, smp_engine, model=model, automatic=False), "case")
    parameters = oracle.parameters(oracle.make(case))
    frozen = {name: each for name, each in parameters.items() if not each.requires_grad}
    # Bits of the others are GRAD-PLAIN's.
    for rank, seen in enumerate(results(smp_world, smp_engine, case)):
        for window, gradients in enumerate(seen.gradients):
            given = {name: gradients[name] for name in frozen if gradients.get(name) is not None}
            assert not given, f"rank {rank}, window {window}: gradients of frozen parameters"
        for name in frozen:
            if name in seen.parameters:
                assert torch.equal(seen.parameters[name], frozen[name]), (
                    f"rank {rank}: {name} changed"
                )


@requirement("GRAD-BUCKETS")
@given(data=st.data(), bucket=st.sampled_from([0.000001, 0.00002, 1]), overlapping=st.booleans())
@trials(5)
def test_buckets_change_no_bit(
    smp_world: SmpWorld, smp_engine: str, data: Data, bucket: float, overlapping: bool
) -> None:
    pipeline = tuple(degree for degree in degrees(smp_world, smp_engine) if degree <= 2)
    case = data.draw(
        cases(smp_world, smp_engine, least=4, automatic=False, dp=2, pipeline=pipeline)
    )
    other = dataclasses.replace(case, bucket=bucket, overlapping=overlapping)
    first = results(smp_world, smp_engine, case)
    compare(merged(first, case.dp), results(smp_world, smp_engine, other), what="another run")


@requirement("GRAD-BOUNDED")
@given(data=st.data())
@trials(4)
def test_real_values_are_within_the_bound_of_their_sum(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    case = data.draw(cases(smp_world, smp_engine, pipeline=(1,), real=True, windows=1), "case")
    # An engine may add the gradients of several uses within a microbatch in another order than the oracle.
    assume(not features(case) & {"dropout", "shared parameters", "reused modules"})
    assume(not features(case) & {"branches and skips"})
    seen = results(smp_world, smp_engine, case)
    divisor = find_engine(smp_engine).conventions.divisor(case)
    parts = oracle.parts(case)
    for rank in seen:
        for name, gradient in rank.gradients[0].items():
            given_ = [part[name] for part in parts if part[name] is not None]
            if gradient is None or not given_:
                continue
            stacked = torch.stack([g.double() for g in given_ if g is not None])
            count = len(stacked) + 2  # the roundings of additions and divisions (ENGINES 2.2)
            gamma = count * 2.0**-24 / (1 - count * 2.0**-24)
            bound = gamma * stacked.abs().sum(0) / divisor + count * 2.0**-149
            error = (gradient.double() - stacked.sum(0) / divisor).abs()
            assert bool((error <= bound).all()), f"{name}: {error} above {bound}"


@requirement("MODEL-BROADCAST")
@given(data=st.data())
@trials(6)
def test_rank_0_has_the_weights(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    holds(smp_world, smp_engine, data, least=2, salted=True, automatic=False)


@requirement("PIPE-AVERAGE")
@given(data=st.data(), average=st.booleans(), microbatches=st.sampled_from([2, 4]))
@trials(6)
def test_microbatches_are_averaged_if_asked(
    smp_world: SmpWorld, smp_engine: str, data: Data, average: bool, microbatches: int
) -> None:
    holds(
        smp_world,
        smp_engine,
        data,
        average=average,
        microbatches=microbatches,
        automatic=False,
    )


@requirement("PIPE-EVERYWHERE")
@given(data=st.data(), microbatches=st.integers(2, 5))
@trials(5)
def test_results_are_on_every_rank_in_order(
    smp_world: SmpWorld, smp_engine: str, data: Data, microbatches: int
) -> None:
    holds(
        smp_world,
        smp_engine,
        data,
        least=2,
        pipeline=(2, 3),
        automatic=False,
        average=False,
        microbatches=microbatches,
    )


@requirement("PIPE-FIRST-RANK")
@given(data=st.data())
@trials(5)
def test_other_ranks_may_have_no_data(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    holds(smp_world, smp_engine, data, least=2, pipeline=(2, 3), dummies=True)


@requirement("PIPE-LOCAL")
@given(data=st.data())
@trials(6)
def test_each_rank_holds_its_own_parameters(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    from pytest_smp.strategies.training import owners

    case = data.draw(
        cases(smp_world, smp_engine, least=2, pipeline=(2, 3), dp=1, automatic=False), "case"
    )
    seen = check(smp_world, smp_engine, case)
    module = build(case.model)
    at = owners(case)
    expected: list[set[str]] = [set() for _ in range(case.pp)]
    for name, _ in module.named_parameters():
        path = name.rpartition(".")[0]
        expected[at[path]].add(name)
    assert [set(each.parameters) for each in seen] == expected


@requirement("PIPE-REPLAYED")
@given(data=st.data())
@trials(10)
def test_real_values_are_those_of_the_published_order(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    case = data.draw(cases(smp_world, smp_engine, real=True), "case")
    compare(replayed(case), results(smp_world, smp_engine, case), what="the published order")


@requirement("PIPE-REPLAYED")
@given(data=st.data(), at=st.integers(0, 1))
@trials(4)
def test_random_numbers_do_not_depend_on_the_rank(
    smp_world: SmpWorld, smp_engine: str, data: Data, at: int
) -> None:
    parts = (Block("linear"), Block("dropout"), Block("nested", (Block("dropout"),)))
    drawn = cases(
        smp_world,
        smp_engine,
        least=2,
        pipeline=(2,),
        real=True,
        automatic=False,
        model=Model(Block("chain", parts), inputs=3, width=4),
        default=0,
        partition=(("body.1", at), ("body.2", 1)),
    )
    case = data.draw(drawn, "case")
    compare(replayed(case), results(smp_world, smp_engine, case), what="the published order")


@requirement("PIPE-REPLAYED")
@given(data=st.data(), pp=st.integers(1, 3), schedule=st.sampled_from(["simple", "interleaved"]))
@trials(6)
def test_no_choice_changes_a_bit(
    smp_world: SmpWorld, smp_engine: str, data: Data, pp: int, schedule: str
) -> None:
    case = data.draw(cases(smp_world, smp_engine, least=3, real=True, dp=1), "case")
    other = dataclasses.replace(
        case,
        pp=pp,
        default=0,
        partition=tuple((path, at % pp) for path, at in case.partition or ()),
        schedule=schedule,
        active=data.draw(st.none() | st.integers(1, 4), "active"),
        tracing=not case.tracing if pp > 1 and case.partition is not None else True,
    )
    first = results(smp_world, smp_engine, case)
    compare(merged(first, 1), results(smp_world, smp_engine, other), what="another choice")


@requirement("PIPE-REPEATABLE")
@given(data=st.data())
@trials(3)
def test_the_same_run_gives_the_same_bits(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    case = data.draw(cases(smp_world, smp_engine, least=2, real=True), "case")
    first = results(smp_world, smp_engine, case)
    compare(merged(first, case.dp), results(smp_world, smp_engine, case), what="the first run")
