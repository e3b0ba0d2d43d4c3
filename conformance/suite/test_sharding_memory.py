"""Properties of sharded memory and traffic: bytes on each rank, times of unsharding, and exchanges."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
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
from pytest_smp.strategies import equality
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training_models import Block, Model, build
from pytest_smp.strategies.training_sharding import ShardedTraining
from smp_core.transport import current_rank

Data = st.DataObject
State = dict[str, list[Tensor]]


def opened(engine: str, case: ShardedTraining) -> tuple[ShardedSession, int]:
    """Build the engine's session of this rank; return the session and the number of its replica."""
    found = find_engine(engine)
    if found.conventions.fresh:
        current_rank.retire(f"engine {found.name} trains one case in a process")
    replica = found.replica(case)
    session: Any = found.build(case)
    oracle.seed(case, replica)
    return session, replica


def window(session: ShardedSession, case: ShardedTraining, replica: int, number: int) -> None:
    """Run the passes of one window; the optimizer's step is left to the caller."""
    session.zero_grad()
    for at in range(case.passes):
        step = number * case.passes + at
        session.backward(oracle.batch(case, replica, step), boundary=at == case.passes - 1)


def state_on_rank(engine: str, case: ShardedTraining) -> State:
    """Train, with a step after each window, and copy this rank's part of the training state."""
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
    """Train one window; return bytes of memory and elements of this rank's state, by kind of state."""
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


#: The number of state tensors of each parameter, counters excluded, by optimizer.
KEPT = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


@requirement("SHARD-MEMORY")
@given(data=st.data())
@trials(6)
def test_state_is_divided_by_the_degree(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    fixed: dict[str, Any] = {"threshold": 0, "windows": 1, "checkpointing": False}
    # Unused parameters may have no gradient, so the model has none of these blocks.
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
    """Check that ranks with the same shard hold the same bits.

    Parameters that are not sharded must have the same bits on all ranks.
    """
    shapes = [each.shape for each in build(case.model).parameters()]
    for rank, state in enumerate(held):
        for kind, tensors in state.items():
            # Of a parameter that is not trained there is no state, so that other numbers say nothing of shapes.
            each_has = KEPT[case.optimizer] if kind == "optimizer" else 1
            of_all = len(tensors) == each_has * len(shapes)
            for at, tensor in enumerate(tensors):
                whole = of_all and tensor.numel() == shapes[at // each_has].numel()
                other = held[0 if whole else rank % case.sharding][kind][at]
                # By bits: training may diverge, and torch.equal finds no nan equal to itself.
                assert equality.same(tensor, other), (
                    f"{kind} {at} of rank {rank}: {tensor}, {other}"
                )


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
    # An engine with a threshold leaves some of these parameters unsharded.
    model = Model(Block("chain", (Block("linear"), Block("linear"))), inputs=2, width=3)
    drawn = sharded_cases(smp_world, smp_engine, least=2, model=model, threshold=5, **fixed)
    case = data.draw(drawn.filter(lambda case: case.sharding > 1), "case")
    agree(case, states(smp_world, smp_engine, case))


# ---- What is whole, and for how long -------------------------------------------------------------


#: A rule that tells whether a layer (its path; "" is after the step) may run while these elements, by layer, are
#: unsharded.
Allowed = Callable[[str, dict[str, int]], bool]

#: The seconds that a backend's threads get, in all looks of a rank together, to drop what they still hold of a
#: collective that has completed.
PATIENCE = 2.0


class MemoryWatch:
    """Watches the memory of unsharded weights of a rank's layers.

    Weak references to the storages tell whether the memory is freed. A thread of a backend may hold the result of a
    collective a little longer than the rank that waited for it (Gloo's does, until it gets the interpreter's lock to
    drop a tensor that Python has seen). So a look that sees what is not ``allowed`` is repeated, for ``PATIENCE``
    seconds in all.
    """

    def __init__(self, module: nn.Module, shapes: dict[str, torch.Size], allowed: Allowed) -> None:
        self.memory: dict[str, list[weakref.ref[Any]]] = {}
        #: The path of each layer that ran, and what was unsharded.
        self.seen: list[tuple[str, dict[str, int]]] = []
        self._allowed, self._patience = allowed, PATIENCE
        for path, layer in module.named_modules():
            if f"{path}.weight" in shapes:
                hook = self._watching(path, shapes[f"{path}.weight"])
                layer.register_forward_pre_hook(hook)

    def _watching(self, path: str, shape: torch.Size) -> Any:
        def look(layer: Any, args: Any) -> None:
            weight = layer.weight
            assert weight.shape == shape, f"{path}.weight is {tuple(weight.shape)} where it is used"
            self.memory.setdefault(path, []).append(weakref.ref(weight.untyped_storage()))
            self.look(path)

        return look

    def look(self, running: str) -> None:
        """Note what is unsharded while the layer ``running`` runs."""
        while not self._allowed(running, whole := self._whole()) and self._patience > 0:
            start = time.monotonic()
            # Lets go of the interpreter's lock, for which the backend's thread waits.
            time.sleep(0.001)
            self._patience -= time.monotonic() - start
        self.seen.append((running, whole))

    def _whole(self) -> dict[str, int]:
        """The elements of weights whose memory is not freed, by layer, in the order of first use.

        Several storages of one layer count as the largest of them.
        """
        alive: dict[str, int] = {}
        for path, found in self.memory.items():
            sizes = [each.nbytes() // 4 for ref in found if (each := ref()) is not None]
            if any(sizes):
                alive[path] = max(sizes)
        return alive


def whole_on_rank(
    engine: str, case: ShardedTraining, allowed: Allowed
) -> list[tuple[str, dict[str, int]]]:
    """Train one window and step; return each layer that ran with the unsharded elements then, and "" for the end."""
    session, replica = opened(engine, case)
    shapes = {name: each.shape for name, each in build(case.model).named_parameters()}
    watch = MemoryWatch(session.module, shapes, allowed)
    window(session, case, replica, 0)
    session.step()
    watch.look("")
    session.close()
    return watch.seen


#: A model whose layers are units of their own in every engine.
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
    ranks = smp_world.run(
        whole_on_rank, smp_engine, case, nothing_left, ranks=case.ranks, config=case.config
    )
    for rank, seen in enumerate(ranks):
        for running, whole in seen:
            left = left_over(running, whole)
            assert not left, f"rank {rank}: {left} is whole {_at(running)}"


def left_over(running: str, whole: dict[str, int]) -> list[str]:
    """The layers of units before that of ``running``, in the order of the forward pass, whose weights are whole.

    The layers of an mlp are one unit; the stem, which may belong to the root's unit, is left out.
    """
    if not running:
        return list(whole)
    order = ["body.0", "body.1", "body.2"]
    unit = running.rpartition(".")[0] if running.count(".") > 1 else running
    before = order[: order.index(unit)] if unit in order else []
    return [path for path in whole if any(path.startswith(each) for each in before)]


def nothing_left(running: str, whole: dict[str, int]) -> bool:
    return not left_over(running, whole)


def _at(running: str) -> str:
    return f"while {running} runs" if running else "after a step"


@requirement("SHARD-LIVE-BOUND")
@given(data=st.data(), live=st.sampled_from([16, 24, 40, 64]))
@trials(4)
def test_no_more_is_whole_than_is_allowed(
    smp_world: SmpWorld, smp_engine: str, data: Data, live: int
) -> None:
    fixed: dict[str, Any] = {"model": LAYERS, "threshold": 0, "live": live, "windows": 1}
    drawn = sharded_cases(smp_world, smp_engine, least=2, sharding=(2, 4), **fixed)
    case = data.draw(drawn, "case")
    allowed = functools.partial(within, live)
    ranks = smp_world.run(
        whole_on_rank, smp_engine, case, allowed, ranks=case.ranks, config=case.config
    )
    for rank, seen in enumerate(ranks):
        for running, whole in seen:
            found = f"{whole} is whole {_at(running)}, allowed are {live}"
            assert within(live, running, whole), f"rank {rank}: {found}"


def within(live: int, running: str, whole: dict[str, int]) -> bool:
    return sum(whole.values()) <= live


def live_on_rank(engine: str, case: ShardedTraining) -> int | None:
    """Train one window, and return the engine's own count of its peak of unsharded elements."""
    session, replica = opened(engine, case)
    window(session, case, replica, 0)
    told = session.live()
    session.close()
    return told


#: A model with layers of 20 elements each; the root's own 13 elements are unsharded for the whole pass.
EQUAL = Model(Block("chain", (Block("linear"), Block("linear"), Block("linear"))), 1, 4, 1)


@requirement("SHARD-LIVE-BOUND")
@given(data=st.data(), live=st.integers(33, 52))
@trials(3)
def test_what_is_fetched_ahead_is_no_more_than_is_allowed(
    smp_world: SmpWorld, smp_engine: str, data: Data, live: int
) -> None:
    # The limit has room for one layer and not for two. The step before tells the engine the order of layers.
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
    """Run the passes of one window; return this rank's replica and the exchanges of each pass."""
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
    # "scale" is left out because its buffers are broadcast to all ranks before each pass, and "route"
    # because ranks that use different parameters gather different ones.
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
