"""What sharding is for: bytes on each rank, what is whole for how long, and what leaves a shard group."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor, nn

from conformance.cases.training import blocks_of_two, sharded_cases, trials, without
from conformance.engines.names import find_engine
from conformance.engines.protocol import Exchange, ShardedSession
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training_models import Block, Model, build
from pytest_smp.strategies.training_sharding import ShardedTraining
from smp_core.transport import current_rank

Data = st.DataObject
State = dict[str, list[Tensor]]


def opened(engine: str, case: ShardedTraining) -> tuple[ShardedSession, int]:
    """The session of this rank, and its replica."""
    found = find_engine(engine)
    if found.conventions.fresh:
        current_rank.retire(f"engine {found.name} trains one case in a process")
    replica = found.replica(case)
    session: Any = found.build(case)
    oracle.seed(case, replica)
    return session, replica


def window(session: ShardedSession, case: ShardedTraining, replica: int, number: int) -> None:
    """The passes of one window, and a step."""
    session.zero_grad()
    for at in range(case.passes):
        step = number * case.passes + at
        session.backward(oracle.batch(case, replica, step), boundary=at == case.passes - 1)


def state_on_rank(engine: str, case: ShardedTraining) -> State:
    """What a rank holds after a step of each window, in memory of its own."""
    session, replica = opened(engine, case)
    for number in range(case.windows):
        window(session, case, replica, number)
        session.step()
    held = session.state()
    session.close()
    return {kind: [each.detach().clone() for each in tensors] for kind, tensors in held.items()}


def states(smp_world: SmpWorld, engine: str, case: ShardedTraining) -> list[State]:
    __tracebackhide__ = True
    return smp_world.run(state_on_rank, engine, case, ranks=case.ranks, config=case.config)


# ---- Bytes ---------------------------------------------------------------------------------------


def bytes_on_rank(engine: str, case: ShardedTraining) -> dict[str, tuple[int, int]]:
    """By kind, the bytes of memory behind what a rank holds, and the elements."""
    session, replica = opened(engine, case)
    window(session, case, replica, 0)
    session.step()
    found = {}
    for kind, tensors in session.state().items():
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found[kind] = sum(memory.values()), sum(each.numel() for each in tensors)
    session.close()
    return found


def part(engine: str, case: ShardedTraining, parameter: nn.Parameter) -> int:
    """The most elements of a parameter that a rank may hold."""
    if find_engine(engine).conventions.shards == "rows":
        rows = parameter.shape[0]
        return -(-rows // case.sharding) * (parameter.numel() // rows)
    return -(-parameter.numel() // case.sharding)


#: Tensors of the state of each parameter, beside counters.
KEPT = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


@requirement("SHARD-MEMORY")
@given(data=st.data())
@trials(6)
def test_state_is_divided_by_the_degree(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    fixed: dict[str, Any] = {"threshold": 0, "windows": 1, "checkpointing": False}
    # What is not used may have no gradient.
    fixed["without"] = (*without(smp_engine), "unused", "route")
    case = data.draw(sharded_cases(smp_world, smp_engine, least=2, **fixed), "case")
    held = smp_world.run(bytes_on_rank, smp_engine, case, ranks=case.ranks, config=case.config)
    parameters = list(build(case.model).parameters())
    trained = [each for each in parameters if each.requires_grad]
    times = {"parameters": 1, "gradients": 1, "optimizer": KEPT[case.optimizer]}
    for kind, number in times.items():
        of = parameters if kind == "parameters" else trained
        most = 4 * number * sum(part(smp_engine, case, each) for each in of)
        for rank, each in enumerate(held):
            assert each[kind][0] <= most, f"rank {rank} has {each[kind][0]} bytes of {kind}"
        for first in range(0, case.ranks, case.sharding):
            elements = sum(each[kind][1] for each in held[first : first + case.sharding])
            assert elements >= number * sum(each.numel() for each in of), kind


@requirement("SHARD-THRESHOLD")
@given(data=st.data(), width=st.integers(2, 5), around=st.integers(-1, 1))
@trials(6)
def test_what_is_smaller_than_the_threshold_is_whole(
    smp_world: SmpWorld, smp_engine: str, data: Data, width: int, around: int
) -> None:
    model = Model(Block("chain", (Block("linear"), Block("linear"))), inputs=3, width=width)
    sizes = [each.numel() for each in build(model).parameters()]
    threshold = data.draw(st.sampled_from(sizes), "size") + around
    fixed: dict[str, Any] = {"model": model, "threshold": threshold, "windows": 1}
    drawn = sharded_cases(smp_world, smp_engine, least=2, sharding=(2, 4), **fixed)
    case = data.draw(drawn, "case")
    held = states(smp_world, smp_engine, case)
    for first in range(0, case.ranks, case.sharding):
        block = held[first : first + case.sharding]
        for at, size in enumerate(sizes):
            counts = [each["parameters"][at].numel() for each in block]
            if size < threshold:
                assert counts == [size] * case.sharding, f"{size} elements, on ranks {counts}"
            else:
                assert sum(counts) == size, f"{size} elements, on ranks {counts}"


# ---- Equal bits ----------------------------------------------------------------------------------


def agree(case: ShardedTraining, held: list[State]) -> None:
    """Ranks at the same place of their blocks hold the same; so do all, of what is not split."""
    shapes = [each.shape for each in build(case.model).parameters()]
    for rank, state in enumerate(held):
        for kind, tensors in state.items():
            for at, tensor in enumerate(tensors):
                whole = len(tensors) == len(shapes) and tensor.numel() == shapes[at].numel()
                other = held[0 if whole else rank % case.sharding][kind][at]
                assert torch.equal(tensor, other), f"{kind} {at} of rank {rank}: {tensor}, {other}"


@requirement("SHARD-REPLICAS")
@given(data=st.data())
@trials(4)
def test_replicas_stay_equal(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    fixed: dict[str, Any] = {"real": True, "windows": 2}
    case = data.draw(blocks_of_two(smp_world, smp_engine, **fixed), "case")
    agree(case, states(smp_world, smp_engine, case))


@requirement("SHARD-CLIP-EQUAL")
@given(data=st.data())
@trials(4)
def test_ranks_clip_by_the_same_bits(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    fixed: dict[str, Any] = {"real": True, "windows": 2, "clip": 0.01}
    # Some parameters are not split, where an engine has a threshold.
    model = Model(Block("chain", (Block("linear"), Block("linear"))), inputs=2, width=3)
    drawn = sharded_cases(smp_world, smp_engine, least=2, model=model, threshold=5, **fixed)
    case = data.draw(drawn.filter(lambda case: case.sharding > 1), "case")
    agree(case, states(smp_world, smp_engine, case))


# ---- What is whole, and for how long -------------------------------------------------------------


class MemoryWatch:
    """The memory of whole weights of a rank's layers, while there is any, in the order of first use."""

    def __init__(self, module: nn.Module, shapes: dict[str, torch.Size]) -> None:
        self.memory: dict[str, list[weakref.ref[Any]]] = {}
        self.seen: list[dict[str, int]] = []  # whenever a layer runs, elements that are whole
        for path, layer in module.named_modules():
            if f"{path}.weight" in shapes:
                hook = self._watching(path, shapes[f"{path}.weight"])
                layer.register_forward_pre_hook(hook)

    def _watching(self, path: str, shape: torch.Size) -> Any:
        def look(layer: Any, args: Any) -> None:
            weight = layer.weight
            assert weight.shape == shape, f"{path}.weight is {tuple(weight.shape)} where it is used"
            self.memory.setdefault(path, []).append(weakref.ref(weight.untyped_storage()))
            self.seen.append(self.whole())

        return look

    def whole(self) -> dict[str, int]:
        """By layer, the elements of memory that is not freed; of one that was seen several times, the
        largest.
        """
        alive: dict[str, int] = {}
        for path, found in self.memory.items():
            sizes = [each.nbytes() // 4 for ref in found if (each := ref()) is not None]
            if any(sizes):
                alive[path] = max(sizes)
        return alive


def whole_on_rank(
    engine: str, case: ShardedTraining
) -> tuple[list[dict[str, int]], dict[str, int]]:
    """What was whole whenever a layer ran, and what is after a step."""
    session, replica = opened(engine, case)
    shapes = {name: each.shape for name, each in build(case.model).named_parameters()}
    watch = MemoryWatch(session.module, shapes)
    window(session, case, replica, 0)
    session.step()
    after = watch.whole()
    session.close()
    return watch.seen, after


#: Layers that are units of their own, wherever units are drawn.
LAYERS = Model(Block("chain", (Block("linear"), Block("mlp", size=3), Block("linear"))), 3, 4, 3)


@requirement("SHARD-FREED")
@given(data=st.data(), microbatches=st.sampled_from([1, 2]))
@trials(3)
def test_what_has_run_is_freed(
    smp_world: SmpWorld, smp_engine: str, data: Data, microbatches: int
) -> None:
    fixed: dict[str, Any] = {"model": LAYERS, "threshold": 0, "microbatches": microbatches}
    fixed |= {"windows": 1, "checkpointing": False, "sharding": (2, 4)}
    case = data.draw(sharded_cases(smp_world, smp_engine, least=2, **fixed), "case")
    ranks = smp_world.run(whole_on_rank, smp_engine, case, ranks=case.ranks, config=case.config)
    # In the order of the forward pass; the layers of an mlp are one unit, the stem may be the root's.
    order = ["body.0", "body.1", "body.2"]
    for rank, (seen, after) in enumerate(ranks):
        assert after == {}, f"rank {rank}: {after} is whole after a step"
        for running, whole in zip(itertools.cycle(_order(LAYERS)), seen, strict=False):
            unit = running.rpartition(".")[0] if running.count(".") > 1 else running
            before = order[: order.index(unit)] if unit in order else []
            left = [path for path in whole if any(path.startswith(each) for each in before)]
            assert not left, f"rank {rank}: {left} is whole while {running} runs"


def _order(model: Model) -> list[str]:
    """The layers that have weights, as they are called."""
    return [
        path.rpartition(".")[0] for path, _ in build(model).named_parameters() if "weight" in path
    ]


@requirement("SHARD-LIVE-BOUND")
@given(data=st.data(), live=st.sampled_from([16, 24, 40, 64]))
@trials(4)
def test_no_more_is_whole_than_is_allowed(
    smp_world: SmpWorld, smp_engine: str, data: Data, live: int
) -> None:
    fixed: dict[str, Any] = {"model": LAYERS, "threshold": 0, "live": live, "windows": 1}
    drawn = sharded_cases(smp_world, smp_engine, least=2, sharding=(2, 4), **fixed)
    case = data.draw(drawn, "case")
    ranks = smp_world.run(whole_on_rank, smp_engine, case, ranks=case.ranks, config=case.config)
    for rank, (seen, _) in enumerate(ranks):
        for whole in seen:
            assert sum(whole.values()) <= live, f"rank {rank}: {whole} is whole, allowed are {live}"


def live_on_rank(engine: str, case: ShardedTraining) -> int | None:
    """The most elements that the engine says were whole at a time, or on their way."""
    session, replica = opened(engine, case)
    window(session, case, replica, 0)
    told = session.live()
    session.close()
    return told


#: Layers of 20 elements each; the root's own parameters have 13, and are whole while it runs.
EQUAL = Model(Block("chain", (Block("linear"), Block("linear"), Block("linear"))), 1, 4, 1)


@requirement("SHARD-LIVE-BOUND")
@given(data=st.data(), live=st.integers(33, 52))
@trials(3)
def test_what_is_fetched_ahead_is_no_more_than_is_allowed(
    smp_world: SmpWorld, smp_engine: str, data: Data, live: int
) -> None:
    # One layer fits, two do not. What a step asks for is known from the step before.
    fixed: dict[str, Any] = {
        "model": EQUAL,
        "threshold": 0,
        "live": live,
        "windows": 1,
        "passes": 2,
    }
    drawn = sharded_cases(smp_world, smp_engine, least=2, sharding=(2, 4), **fixed)
    case = data.draw(drawn, "case")
    told = smp_world.run(live_on_rank, smp_engine, case, ranks=case.ranks, config=case.config)
    assert all(each is None or each <= live for each in told), f"{told}, allowed are {live}"


# ---- What leaves a shard group ----------------------------------------------------------------


def exchanges_on_rank(engine: str, case: ShardedTraining) -> tuple[int, list[list[Exchange]]]:
    """This rank's replica, and what each pass of a window exchanged."""
    session, replica = opened(engine, case)
    session.zero_grad()
    found = []
    for at in range(case.passes):
        session.traffic()
        session.backward(oracle.batch(case, replica, at), boundary=at == case.passes - 1)
        found.append(session.traffic())
    session.close()
    return replica, found


@requirement("SHARD-ALLREDUCE-BOUNDARY")
@given(data=st.data(), passes=st.integers(1, 3))
@trials(5)
def test_gradients_leave_their_group_at_the_boundary_only(
    smp_world: SmpWorld, smp_engine: str, data: Data, passes: int
) -> None:
    fixed: dict[str, Any] = {"passes": passes, "windows": 1, "threshold": 0}
    # Buffers go to all ranks before each pass; a rank that does not use the same gathers other parts.
    fixed["without"] = (*without(smp_engine), "scale", "route")
    drawn = sharded_cases(smp_world, smp_engine, least=4, sharding=(2,), **fixed)
    case = data.draw(drawn.filter(lambda case: case.dp == 4), "case")
    held = smp_world.run(exchanges_on_rank, smp_engine, case, ranks=case.ranks, config=case.config)
    elements = sum(e.numel() for e in build(case.model).parameters() if e.requires_grad)
    for rank, (replica, found) in enumerate(held):
        first = replica // case.sharding * case.sharding
        block = set(range(first, first + case.sharding))
        beyond = [sum(e.elements for e in each if not set(e.ranks) <= block) for each in found]
        assert beyond[:-1] == [0] * (passes - 1), f"rank {rank}: {found}"
        assert beyond[-1] >= elements // case.sharding, f"rank {rank}: {found[-1]}"
        assert all(any(e.elements for e in each) for each in found), "each pass is scattered"
