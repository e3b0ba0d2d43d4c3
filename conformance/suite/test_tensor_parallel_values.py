"""Properties of distributed layers, compared with one process: bit for bit where nothing rounds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from conformance.cases.training import (
    check,
    claimed,
    results,
    several_steps,
    tensor_cases,
    trials,
)
from conformance.engines.capabilities import EngineCapability
from conformance.engines.names import find_engine
from conformance.engines.protocol import Exchange, ShardedSession
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training_models import Block, Model, build
from pytest_smp.strategies.training_replay import replayed
from pytest_smp.strategies.training_script import Seen, compare, train
from pytest_smp.strategies.training_tensor import TensorTraining, candidates, splits

Data = st.DataObject

#: One step: what several steps and sums of passes add, one property of each requirement draws.
ONE: dict[str, Any] = {"windows": 1, "passes": 1}


def holds(smp_world: SmpWorld, smp_engine: str, data: Data, **fixed: Any) -> list[Seen]:
    """Draw a case, train it, compare all ranks with plain PyTorch, and return the results."""
    __tracebackhide__ = True
    case = data.draw(tensor_cases(smp_world, smp_engine, **fixed), "case")
    return check(smp_world, smp_engine, case)


def as_replayed(smp_world: SmpWorld, smp_engine: str, data: Data, **fixed: Any) -> None:
    """Draw a case of real values, and compare all ranks with the published order."""
    __tracebackhide__ = True
    case = data.draw(tensor_cases(smp_world, smp_engine, real=True, **fixed), "case")
    compare(replayed(case), results(smp_world, smp_engine, case), what="the published order")


@requirement("TP-EQUALS-PLAIN")
@given(data=st.data())
@trials(6)
def test_one_batch_for_a_group_equals_one_process(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    holds(smp_world, smp_engine, data, prescaled=(True,), windows=1)


@requirement("TP-OWN-BATCHES")
@given(data=st.data())
@trials(6)
def test_own_batches_equal_one_process(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    holds(smp_world, smp_engine, data, prescaled=(False,), windows=1)


@requirement("TP-EQUALS-PLAIN")
@given(data=st.data(), width=st.sampled_from([2, 4]))
@trials(6)
def test_embeddings_of_one_batch_equal_one_process(
    smp_world: SmpWorld, smp_engine: str, data: Data, width: int
) -> None:
    embeds(smp_world, smp_engine, data, width, prescaled=True)


@requirement("TP-OWN-BATCHES")
@given(data=st.data(), width=st.sampled_from([2, 4]))
@trials(6)
def test_embeddings_of_own_batches_equal_one_process(
    smp_world: SmpWorld, smp_engine: str, data: Data, width: int
) -> None:
    embeds(smp_world, smp_engine, data, width, prescaled=False)


def embeds(smp_world: SmpWorld, smp_engine: str, data: Data, width: int, prescaled: bool) -> None:
    """Train a model whose embedding alone is distributed, and compare with plain PyTorch."""
    __tracebackhide__ = True
    fixed: dict[str, Any] = {"model": Model(Block("relu"), 0, width, 3), "distributed": ("stem",)}
    fixed |= {"tensor": (2,), "microbatches": 1, **ONE}
    holds(smp_world, smp_engine, data, prescaled=(prescaled,), **fixed)


@requirement("TP-PIPELINE")
@given(data=st.data())
@trials(6)
def test_a_pipeline_equals_one_process(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    holds(smp_world, smp_engine, data, least=4, tensor=(2,), pipeline=(2,), **ONE)


@requirement("TP-SHARDED")
@given(data=st.data())
@trials(6)
def test_sharding_equals_one_process(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    fixed = {"tensor": (2,), "sharding": (2,), "windows": 1}
    holds(smp_world, smp_engine, data, least=4, **fixed)


@requirement("TP-COMBINATIONS")
@given(data=st.data())
@trials(6)
def test_all_degrees_equal_one_process(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    size = 8 if smp_world.ranks >= 8 else 4
    degrees = {"tensor": (2, 4), "pipeline": (1, 2), "sharding": (1, 2), "size": size}
    fixed: dict[str, Any] = {"model": FOUR, "microbatches": 1, **degrees, **ONE}
    holds(smp_world, smp_engine, data, least=4, most=size, **fixed)


#: Models, optimizers and windows whose every step is exact, with layers of two channels and more.
HEAD = Model(Block("chain", (Block("relu"),)), inputs=2, width=2, frozen=True)
TWO = Model(Block("relu"), inputs=2, width=2, outputs=2)
FOUR = Model(Block("linear"), inputs=4, width=4, outputs=2)
LAYERS = Model(Block("chain", (Block("linear"), Block("linear"))), inputs=2, width=2)
STEPS: tuple[tuple[Model, str, int], ...] = (
    (HEAD, "adam", 3),
    (HEAD, "decayed", 3),
    (LAYERS, "momentum", 2),
)


@requirement("TP-STEPS")
@given(data=st.data(), steps=st.sampled_from(STEPS))
@trials(6)
def test_each_step_follows_the_one_before(
    smp_world: SmpWorld, smp_engine: str, data: Data, steps: tuple[Model, str, int]
) -> None:
    fixed = {"tensor": (2,), "checkpointing": False, **several_steps(*steps)}
    fixed["distributed"] = candidates(steps[0], prescaled=False)
    holds(smp_world, smp_engine, data, **fixed)


@requirement("TP-CLIP")
@given(data=st.data(), clip=st.sampled_from([0.5, 4.0]))
@trials(6)
def test_the_norm_is_that_of_one_process(
    smp_world: SmpWorld, smp_engine: str, data: Data, clip: float
) -> None:
    fixed: dict[str, Any] = {"model": LAYERS, "clip": clip, "microbatches": 1, **ONE}
    fixed["distributed"] = data.draw(st.sampled_from([("body.0",), ("stem", "body.1", "head")]))
    holds(smp_world, smp_engine, data, least=4, tensor=(2,), sharding=(2,), **fixed)


@requirement("TP-REPLAYED")
@given(data=st.data())
@trials(6)
def test_real_values_are_those_of_the_published_order(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    as_replayed(smp_world, smp_engine, data, tensor=(4, 2, 3), windows=1)


@requirement("TP-REPLAYED")
@given(data=st.data())
@trials(6)
def test_real_values_in_combinations_are_those_of_the_published_order(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    claims = claimed(smp_world, smp_engine)
    degrees: list[dict[str, Any]] = [{"size": 4}]
    if EngineCapability.PIPELINE in claims:
        degrees.append({"pipeline": (2,)})
    if {EngineCapability.SHARDING, EngineCapability.BLOCKS} <= claims:
        degrees.append({"sharding": (2,), "clip": 0.25})
    fixed = data.draw(st.sampled_from(degrees), "degrees")
    as_replayed(smp_world, smp_engine, data, least=4, tensor=(2,), **fixed, **ONE)


def train_seeded_apart(engine: str, case: TensorTraining) -> Seen:
    """Train a case whose ranks above tp rank 0 have random states of their own."""
    found: Any = find_engine(engine)
    session, replica = opened(engine, case)
    if found.namespace().tp_rank() > 0:
        torch.manual_seed(10**6 + found.namespace().rank())
    return train(session, case, replica)


@requirement("TP-RANDOM")
@given(data=st.data())
@trials(6)
def test_ranks_of_one_batch_draw_the_same_numbers(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    model = Model(Block("chain", (Block("linear"), Block("dropout"))), inputs=4, width=4)
    fixed: dict[str, Any] = {"model": model, "tensor": (2, 4), "prescaled": (True,), "real": True}
    case = data.draw(tensor_cases(smp_world, smp_engine, **fixed, **ONE), "case")
    seen = smp_world.run(train_seeded_apart, smp_engine, case, ranks=case.ranks, config=case.config)
    compare(replayed(case), seen, what="the seed of tp rank 0")


@requirement("TP-FP16")
@given(data=st.data(), real=st.booleans())
@trials(6)
def test_fp16_is_rounded_once(smp_world: SmpWorld, smp_engine: str, data: Data, real: bool) -> None:
    replays = EngineCapability.REPLAYED in claimed(smp_world, smp_engine)
    run = as_replayed if real and replays else holds
    fixed: dict[str, Any] = {"dtypes": ("float16",), "tensor": (4, 2), "model": FOUR, **ONE}
    run(smp_world, smp_engine, data, **fixed)


@requirement("TP-BF16")
@given(data=st.data(), real=st.booleans())
@trials(6)
def test_bf16_is_rounded_once(smp_world: SmpWorld, smp_engine: str, data: Data, real: bool) -> None:
    replays = EngineCapability.REPLAYED in claimed(smp_world, smp_engine)
    run = as_replayed if real and replays else holds
    fixed: dict[str, Any] = {"dtypes": ("bfloat16",), "tensor": (2,), "sharding": (2,), **ONE}
    fixed |= {"model": LAYERS, "microbatches": 1}
    run(smp_world, smp_engine, data, least=4, **fixed)


# ---- Slices --------------------------------------------------------------------------------------


def opened(engine: str, case: TensorTraining) -> tuple[ShardedSession, int]:
    """Build the engine's session of this rank; return the session and the number of its replica."""
    found = find_engine(engine)
    replica = found.replica(case)
    session: Any = found.build(case)
    oracle.seed(case, replica)
    return session, replica


def held_on_rank(engine: str, case: TensorTraining) -> list[Tensor]:
    """Train all windows, with a step after each, and copy the parameters that this rank holds."""
    session, replica = opened(engine, case)
    for number in range(case.windows):
        session.zero_grad()
        session.backward(oracle.batch(case, replica, number), boundary=True)
        session.step()
    held = [each.detach().clone() for each in session.state()["parameters"]]
    session.close()
    return held


#: An embedding and layers of channels that two ranks and four divide.
WIDE = Model(Block("linear"), inputs=4, width=8, outputs=2)
TOKENS = Model(Block("chain", (Block("linear"), Block("mlp", size=4))), 0, 4, 4)


@requirement("TP-LAYOUT")
@given(data=st.data(), model=st.sampled_from([TOKENS, WIDE]))
@trials(6)
def test_each_rank_has_its_slices(
    smp_world: SmpWorld, smp_engine: str, data: Data, model: Model
) -> None:
    fixed: dict[str, Any] = {"model": model, "placement": "cluster", "tensor": (2, 4), "windows": 0}
    case = data.draw(tensor_cases(smp_world, smp_engine, real=True, **fixed), "case")
    held = smp_world.run(held_on_rank, smp_engine, case, ranks=case.ranks, config=case.config)
    axes, whole = splits(case), oracle.parameters(oracle.make(case))
    for rank, parameters in enumerate(held):
        for (name, value), own in zip(whole.items(), parameters, strict=True):
            expected = value.detach()
            if name in axes:
                expected = expected.chunk(case.tensor, axes[name])[rank % case.tensor]
            assert torch.equal(own, expected), f"rank {rank}: {name} is {own}, not {expected}"


@requirement("TP-REPLICAS")
@given(data=st.data())
@trials(6)
def test_replicas_stay_equal_over_ten_steps(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    fixed: dict[str, Any] = {"placement": "cluster", "windows": 10, "passes": 1, "rows": 1}
    fixed |= {"microbatches": 1, "tensor": (2,), "model": TWO, "checkpointing": False}
    case = data.draw(tensor_cases(smp_world, smp_engine, least=4, real=True, size=4, **fixed))
    held = smp_world.run(held_on_rank, smp_engine, case, ranks=case.ranks, config=case.config)
    names, axes = list(oracle.parameters(build(case.model))), splits(case)
    for rank, parameters in enumerate(held):
        for name, own, *others in zip(names, parameters, *held, strict=True):
            other = others[rank % case.tensor if name in axes else 0]
            same = (own == other) | (own.isnan() & other.isnan())
            assert bool(same.all()), f"rank {rank}: {name} is {own}, and {other}"


# ---- Exchanges -----------------------------------------------------------------------------------


def exchanges_on_rank(engine: str, case: TensorTraining) -> list[Exchange]:
    """The exchanges of one step on this rank, those with nobody else left out."""
    session, replica = opened(engine, case)
    session.zero_grad()
    session.traffic()
    session.backward(oracle.batch(case, replica, 0), boundary=True)
    found = session.traffic()
    session.close()
    return [each for each in found if len(each.ranks) > 1]


def observed(
    smp_world: SmpWorld, smp_engine: str, data: Data, **degrees: Any
) -> tuple[TensorTraining, list[list[Exchange]]]:
    """Draw a case of one step, and return it with the exchanges of each rank."""
    tokens = data.draw(st.booleans(), "tokens")
    width = data.draw(st.sampled_from([4, 8]), "width")
    model = Model(Block("linear"), 0 if tokens else 4, width, data.draw(st.integers(2, 5)))
    fixed: dict[str, Any] = {"model": model, "passes": 1, "windows": 1, "checkpointing": False}
    fixed |= {"placement": "cluster", "tensor": (2, 4), "real": True, **degrees}
    paths = ("stem", "body", "head")
    fixed["distributed"] = tuple(
        path for path in paths if data.draw(st.booleans(), path) or path == "body"
    )
    case = data.draw(tensor_cases(smp_world, smp_engine, **fixed), "case")
    held = smp_world.run(exchanges_on_rank, smp_engine, case, ranks=case.ranks, config=case.config)
    return case, held


def formula(case: TensorTraining) -> Counter[tuple[str, int, int]]:
    """The exchanges of one microbatch in a TP group: operation, elements, and bytes that leave a rank.

    A rank has n rows of its own. Local activations are (n, C); sliced ones (t n, C / t), or (n, C / t) if the batch is
    prescaled; partial ones (t n, C), or (n, C).
    """
    t, n = case.tensor, case.rows * case.length
    model, found = case.model, Counter[tuple[str, int, int]]()

    def exchange(operation: str, elements: int, size: int = 4) -> None:
        found[operation, elements, elements * size // t * (t - 1)] += 1

    def reduce(channels: int) -> None:
        padded = -(-n * channels // t) * t
        exchange("all_reduce", padded)  # a reduce-scatter
        exchange("all_reduce, handed out", padded)  # and an all-gather

    layers = [("body", model.width, model.width), ("head", model.width, model.outputs)]
    if model.inputs:
        layers.insert(0, ("stem", model.inputs, model.width))
    elif "stem" in case.distributed and case.prescaled:
        exchange("all_gather", n * model.width)  # the slices of the embeddings
    elif "stem" in case.distributed:
        exchange("all_gather", t * n, 8)  # the ids
        exchange("all_to_all", n * model.width)  # the slices of the embeddings
        exchange("all_to_all", n * model.width)  # and of their gradients
    for path, inputs, outputs in layers:
        if path not in case.distributed:
            continue
        needs_gradient = path != "stem"
        if case.prescaled:
            reduce(outputs)
            if needs_gradient:
                exchange("all_gather", n * inputs)  # the input's gradient
        else:
            exchange("all_to_all", n * inputs)  # channels of the input
            exchange("all_to_all", t * n * outputs)  # summands of the output
            exchange("all_gather", t * n * outputs)  # the output's gradient
            if needs_gradient:
                exchange("all_to_all", n * inputs)  # channels of the input's gradient
    return found


@requirement("TP-TRAFFIC")
@given(data=st.data())
@trials(8)
def test_exchanges_are_those_of_the_formula(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    case, held = observed(smp_world, smp_engine, data)
    expected = Counter({each: n * case.microbatches for each, n in formula(case).items()})
    for rank, found in enumerate(held):
        first = rank // case.tensor * case.tensor
        group = tuple(range(first, first + case.tensor))
        # In a world of one TP group gradients are reduced over the same ranks, in an exchange of their own.
        of_gradients = gradients(case, rank)
        counted = Counter((e.operation, e.elements, e.sent) for e in found if e.ranks == group)
        counted -= Counter({each[1:]: n for each, n in of_gradients.items() if each[0] == group})
        assert counted == expected, f"rank {rank}: {counted}, not {expected}"


def gradients(
    case: TensorTraining, rank: int
) -> Counter[tuple[tuple[int, ...], str, int, int | None]]:
    """The exchanges that reduce gradients: ranks, operation, elements, and bytes that leave this rank."""
    axes = splits(case)
    trained = {
        name: each.numel()
        for name, each in build(case.model).named_parameters()
        if each.requires_grad
    }
    slices = sum(size // case.tensor for name, size in trained.items() if name in axes)
    whole = sum(size for name, size in trained.items() if name not in axes)
    found: Counter[tuple[tuple[int, ...], str, int, int | None]] = Counter()
    for ranks, elements in (
        (tuple(range(rank % case.tensor, case.ranks, case.tensor)), slices),
        (tuple(range(case.ranks)), whole),
    ):
        size = len(ranks)
        padded = -(-elements // size) * size
        if size > 1 and elements:
            for operation in ("all_reduce", "all_reduce, handed out"):
                found[ranks, operation, padded, padded // size * (size - 1) * 4] += 1
    return found


@requirement("TP-REDUCTION")
@given(data=st.data())
@trials(6)
def test_gradients_of_slices_are_reduced_over_their_replicas(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    # With two TP groups, the DP group is no TP group.
    case, held = observed(smp_world, smp_engine, data, least=4, size=4, tensor=(2,))
    for rank, found in enumerate(held):
        first = rank // case.tensor * case.tensor
        group = tuple(range(first, first + case.tensor))
        others = [each for each in found if each.ranks != group]
        counted = Counter((e.ranks, e.operation, e.elements, e.sent) for e in others)
        expected = gradients(case, rank)
        assert counted == expected, f"rank {rank}: {counted}, not {expected}"
