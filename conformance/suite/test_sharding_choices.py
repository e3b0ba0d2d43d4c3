"""Properties of sharding options, which change no bit, and of accepted and refused models."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import nn

from conformance.cases.training import raised, results, sharded_cases, smp, trials, with_engine
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies.training_models import Block, Model
from pytest_smp.strategies.training_script import compare, merged
from pytest_smp.strategies.training_sharding import HUGE, divisors, sizes

Data = st.DataObject


def agrees(
    smp_world: SmpWorld,
    smp_engine: str,
    data: Data,
    more: Mapping[str, Any] | None = None,
    **other: Any,
) -> None:
    """Check that two runs on real values, the second with other options, give the same bits.

    ``more`` has fields of the case that are not drawn. ``other`` has, by field, functions from the case to
    the strategy of the second run's value.
    """
    __tracebackhide__ = True
    # The second step knows the order of units from the first, and may unshard ahead.
    fixed: dict[str, Any] = {"sharding": (2, 4), "real": True, "windows": 2, **(more or {})}
    case = data.draw(sharded_cases(smp_world, smp_engine, least=2, **fixed), "case")
    fields = {name: data.draw(each(case), name) for name, each in other.items()}
    first = results(smp_world, smp_engine, case)
    again = results(smp_world, smp_engine, dataclasses.replace(case, **fields))
    compare(merged(first, case.dp), again, what="another choice")


def limits(case: Any) -> st.SearchStrategy[int]:
    """Draw a number of elements, from 1 to more than the model has."""
    total = sum(sizes(case.model))
    return st.sampled_from([1, 2, *sizes(case.model), max(1, total // 2), total, HUGE]).map(
        lambda limit: max(1, limit)
    )


@requirement("SHARD-BUCKET")
@given(data=st.data())
@trials(4)
def test_buckets_change_no_bit(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    agrees(
        smp_world, smp_engine, data, reduce_bucket=limits, overlapping=lambda case: st.booleans()
    )


@requirement("SHARD-LIVE")
@given(data=st.data())
@trials(4)
def test_what_may_be_whole_changes_no_bit(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    layers = (Block("linear"), Block("relu"), Block("linear"), Block("linear"))
    model = Model(Block("chain", layers), inputs=2, width=3)
    agrees(smp_world, smp_engine, data, {"model": model, "threshold": 0}, live=limits)


@requirement("SHARD-CHECKPOINTING")
@given(data=st.data())
@trials(4)
def test_computing_again_changes_no_bit(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    agrees(smp_world, smp_engine, data, checkpointing=lambda case: st.just(not case.checkpointing))


# ---- The backend of gathers ----------------------------------------------------------------------

UNIT, SCRATCH, SORT = (
    8192,
    16 * 2**20,
    128 * 2**20,
)  # bytes: of both sizes; the sizes of the documentation
NO_SMDDP = "these ranks have none"
GatherChoice = tuple[int, str, str]  # bytes of each rank's part, the backend, the reason


class CountedGroup:
    """A process group under another backend's name, which counts its gathers."""

    def __init__(self, group: Any) -> None:
        self._group, self.gathers = group, 0

    def __getattr__(self, name: str) -> Any:
        if name == "_allgather_base":
            self.gathers += 1
        return getattr(self._group, name)

    def _get_backend(self, device: object) -> CountedGroup:
        return self

    def name(self) -> str:
        return "stand-in"


def choices(
    offered: bool, environment: Mapping[str, str], widths: Sequence[int]
) -> tuple[list[GatherChoice], int]:
    """Train a step. Return the choice for each gather of parameters, and the gathers of the stand-in for SMDDP.

    The stand-in has the place of SMDDP's process group: so backends that have none are asked, too.
    """
    from smp_core import runtime
    from smp_core.torch import observe
    from smp_core.transport.protocols import Group

    os.environ.update(environment)
    smp.rank()
    fabric, made = runtime.current("the requirement").fabric, []

    def smddp_group(group: Group) -> Any:
        if not offered:
            return NO_SMDDP
        made.append(CountedGroup(fabric.process_group(group)))
        return made[-1]

    fabric.smddp_group = smddp_group  # type: ignore[method-assign]
    try:
        layers = [(nn.Linear(1, width), nn.Linear(width, 1)) for width in widths]
        for layer in itertools.chain(*layers):
            layer.register_parameter("bias", None)
        model = smp.DistributedModel(nn.Sequential(*itertools.chain(*layers)))

        @smp.step  # type: ignore[untyped-decorator]  # anybody's
        def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(x).sum()
            model.backward(loss)  # type: ignore[operator]
            return loss

        with observe.traffic(model).recorded() as log:
            step(model, torch.ones(1, 1))
    finally:
        del fabric.smddp_group
    size = smp.rdp_size()
    gathers = [
        (each.elements * each.dtype.itemsize // size, each.backend, each.reason)
        for each in log
        if each.operation.startswith("all_gather") and each.dtype is torch.float32
    ]
    return gathers, sum(each.gathers for each in made)


@requirement("SHARD-GATHER-BACKEND")
@given(data=st.data())
@trials(12)
def test_the_backend_of_a_gather(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    degree = data.draw(st.sampled_from([each for each in (2, 4) if each <= smp_world.ranks]))
    chosen = data.draw(st.sampled_from(["auto", "auto", "auto", "nccl"]), "ddp_dist_backend")
    offered = data.draw(st.sampled_from([True, True, False]), "offered")
    buffers = st.none() | st.integers(1, 5).map(lambda count: count * UNIT)
    told = {
        "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": data.draw(buffers, "scratch"),
        "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": data.draw(st.none() | st.just(UNIT), "sort"),
    }
    scratch, sort = (
        size or usual for size, usual in zip(told.values(), (SCRATCH, SORT), strict=True)
    )
    # Parts of a byte's multiple, an element less and more: at the limits of both buffers.
    parts = st.builds(
        lambda count, more: count * UNIT // 4 + more, st.integers(1, 5), st.integers(-1, 1)
    )
    widths = data.draw(st.lists(parts, min_size=1, max_size=3, unique=True), "elements of parts")
    config = {
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": 0,
        "ddp": True,
        "ddp_dist_backend": chosen,
    }
    environment = {name: str(size) for name, size in told.items() if size is not None}
    arguments = offered, environment, [width * degree for width in widths]
    found = smp_world.run(with_engine, smp_engine, choices, *arguments, ranks=degree, config=config)
    for gathers, carried in found:
        assert {part for part, _, _ in gathers} == {4 * width for width in widths}
        assert carried == sum(not reason for _, _, reason in gathers)
        for part, backend, reason in gathers:
            because: list[str] = []  # what the reason tells
            if chosen != "auto":
                because = ["ddp_dist_backend", chosen]
            elif not offered:
                because = [NO_SMDDP]
            elif part > scratch:
                because = ["scratch", str(part), str(scratch)]
            elif degree * part > 8 * sort:
                because = ["sort", str(part), str(sort)]
            assert (backend == "stand-in") is not bool(because), (
                f"{part} bytes went by {backend}: {reason}"
            )
            assert bool(reason) is bool(because), f"{part} bytes by {backend}: reason {reason!r}"
            assert all(word in reason for word in because), f"{reason!r} lacks one of {because}"


@requirement("SHARD-HIERARCHICAL")
@given(data=st.data())
@trials(6)
def test_nodes_change_no_bit(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    fixed = {"windows": 1, "hierarchical": False, "threshold": 0}
    most = min(8, smp_world.ranks)
    drawn = sharded_cases(
        smp_world,
        smp_engine,
        least=4,
        most=most,
        sharding=(4, 8),
        real=True,
        without=("route",),
        **fixed,
    )
    case = data.draw(drawn, "case")
    first = results(smp_world, smp_engine, case)
    per_node = data.draw(st.sampled_from([2, *divisors(case.dp)]), "ranks per node")
    other = dataclasses.replace(case, hierarchical=True, per_node=per_node)
    compare(merged(first, case.dp), results(smp_world, smp_engine, other), what="one hop")


# ---- Models --------------------------------------------------------------------------------------


def different_on_rank(at: int, what: str) -> str | None:
    """Wrap a model that differs on rank ``at``; return the type of the exception, or None."""
    odd = smp.rank() == at

    def wrap() -> None:
        layers: list[nn.Module] = [
            nn.Linear(2, 3),
            nn.Linear(3, 4 if odd and what == "shape" else 5),
        ]
        if odd and what == "more":
            layers.append(nn.Linear(2, 2))
        if odd and what == "frozen":
            layers[0].requires_grad_(False)
        smp.DistributedModel(nn.Sequential(*layers))

    return raised(wrap)


@requirement("SHARD-SAME-MODEL")
@given(at=st.integers(0, 1), what=st.sampled_from(["shape", "more"]))
@trials(4)
def test_another_model_is_refused_everywhere(
    smp_world: SmpWorld, smp_engine: str, at: int, what: str
) -> None:
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "ddp": True}
    told = smp_world.run(
        with_engine, smp_engine, different_on_rank, at, what, ranks=2, config=config
    )
    assert None not in told, told


def delayed_on_rank(widths: list[int]) -> dict[str, torch.Tensor]:
    """Make a model under delayed initialization, and return its parameters by name."""
    torch.manual_seed(3)
    with smp.delay_param_initialization():
        made = layers_of(widths)
    model = smp.DistributedModel(made)
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def layers_of(widths: list[int]) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


@requirement("SHARD-DELAYED")
@given(widths=st.lists(st.integers(1, 7), min_size=2, max_size=4), threshold=st.integers(0, 30))
@trials(5)
def test_delayed_values_are_those_of_one_process(
    smp_world: SmpWorld, smp_engine: str, widths: list[int], threshold: int
) -> None:
    config = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": threshold}
    found = smp_world.run(
        with_engine, smp_engine, delayed_on_rank, widths, ranks=2, config={**config, "ddp": True}
    )
    torch.manual_seed(3)
    for name, value in layers_of(widths).state_dict().items():
        for rank, each in enumerate(found):
            assert torch.equal(each[name], value), f"rank {rank}: {name} is {each[name]}"
