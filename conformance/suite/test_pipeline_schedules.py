"""Properties of schedules: the order of microbatches' forward and backward passes.

A module of the model notes its own calls and backward passes, so nothing is asked of the engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor, nn

from conformance.cases.draws import needs
from conformance.cases.training import namespace, trials
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld

Event = tuple[str, int]  # "F" or "B", and the microbatch


class _Noted(torch.autograd.Function):
    """The identity, which notes its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[Event], microbatch: int) -> Tensor:
        ctx.events, ctx.microbatch = events, microbatch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.events.append(("B", ctx.microbatch))
        return grads[0], None, None


class Stage(nn.Module):
    """A linear map that notes its calls in a list of its rank."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2)
        self.events = events

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        if torch.is_grad_enabled():
            self.events.append(("F", microbatch))
        noted: Tensor = _Noted.apply(self.map(x), self.events, microbatch)  # type: ignore[no-untyped-call]
        return noted


class TwoStages(nn.Module):
    """A model that calls its stages one after the other."""

    def __init__(self, number: int, events: list[Event]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(events) for _ in range(number))

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        for stage in self.stages:
            x = stage(x, microbatch)
        return x


@dataclasses.dataclass
class Order:
    """The events of one rank's modules, and the number of bodies in progress when each body began."""

    events: list[Event]
    in_progress: list[int]


def note_order(engine: str, stages: tuple[int, ...], microbatches: int, steps: int) -> list[Order]:
    """Train, and return the order on this rank for each step; ``stages`` has each stage's partition."""
    smp = namespace(engine)
    events: list[Event] = []
    module = TwoStages(len(stages), events)
    model = smp.DistributedModel(module)
    if smp.pp_size() > 1:
        for stage, owner in zip(module.stages, stages, strict=True):
            smp.set_partition(stage, owner)
    active: set[int] = set()
    counts: list[int] = []

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(model: Any, x: Tensor) -> Tensor:
        microbatch = int(x[0, 0])
        active.add(microbatch)
        counts.append(len(active))
        loss = model(x, microbatch=microbatch).sum()
        model.backward(loss)
        active.discard(microbatch)
        out: Tensor = loss
        return out

    found = []
    x = torch.arange(microbatches).repeat_interleave(2).reshape(microbatches, 2).float()
    for _ in range(steps):
        body(model, x)
        active.clear()
        # A trace in the first step may have noted the first microbatch, so only the last events count.
        last = events[-2 * microbatches * sum(at == smp.pp_rank() for at in stages) :]
        found.append(Order(last, list(counts)))
        events.clear()
        counts.clear()
    return found


@st.composite
def pipelines(draw: st.DrawFn, most: int) -> tuple[int, tuple[int, ...]]:
    """Draw a pipeline degree, and partitions of two to five stages, the last on the last rank."""
    pp = draw(st.integers(2, most))
    drawn = draw(st.lists(st.integers(0, pp - 1), min_size=1, max_size=4))
    return pp, (*drawn, pp - 1)


def config(pp: int, microbatches: int, schedule: str, active: int | None = None) -> dict[str, Any]:
    """The parameters of smp.init for a manual partition without tracing."""
    given: dict[str, Any] = {
        "pipeline_parallel_degree": pp,
        "microbatches": microbatches,
        "pipeline": schedule,
        "auto_partition": False,
        "default_partition": 0,
        "skip_tracing": True,
    }
    return given if active is None else {**given, "active_microbatches": active}


@requirement("PIPE-SIMPLE")
@given(data=st.data(), microbatches=st.integers(2, 5), active=st.none() | st.integers(1, 3))
@trials(8)
def test_forwards_come_before_backwards(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, microbatches: int, active: int | None
) -> None:
    needs(smp_world, 2)
    pp, stages = data.draw(pipelines(min(4, smp_world.ranks)), "pipeline")
    given_ = config(pp, microbatches, "simple", active)
    seen = smp_world.run(note_order, smp_engine, stages, microbatches, 2, ranks=pp, config=given_)
    for rank, steps in enumerate(seen):
        own = stages.count(rank)
        for order in steps:
            phases = [phase for phase, _ in order.events]
            assert phases == ["F"] * (own * microbatches) + ["B"] * (own * microbatches), rank


@requirement("PIPE-ACTIVE")
@given(data=st.data(), microbatches=st.integers(1, 6), active=st.integers(1, 4))
@trials(8)
def test_no_more_microbatches_are_in_progress(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, microbatches: int, active: int
) -> None:
    needs(smp_world, 2)
    pp, stages = data.draw(pipelines(min(4, smp_world.ranks)), "pipeline")
    given_ = config(pp, microbatches, "interleaved", active)
    seen = smp_world.run(note_order, smp_engine, stages, microbatches, 2, ranks=pp, config=given_)
    for rank, steps in enumerate(seen):
        own = stages.count(rank)
        for order in steps:
            assert max(order.in_progress, default=0) <= active
            assert len(order.events) == 2 * own * microbatches
            held: dict[int, int] = {}  # forward passes whose backward has not run, by microbatch
            for phase, microbatch in order.events:
                held[microbatch] = held.get(microbatch, 0) + (1 if phase == "F" else -1)
                assert sum(count > 0 for count in held.values()) <= active, rank


@requirement("PIPE-INTERLEAVED")
@given(data=st.data(), microbatches=st.integers(2, 5))
@trials(5)
def test_one_microbatch_at_a_time(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, microbatches: int
) -> None:
    needs(smp_world, 2)
    pp, stages = data.draw(pipelines(min(4, smp_world.ranks)), "pipeline")
    given_ = config(pp, microbatches, "interleaved", 1)
    seen = smp_world.run(note_order, smp_engine, stages, microbatches, 1, ranks=pp, config=given_)
    for rank, steps in enumerate(seen):
        own = stages.count(rank)
        one = ["F"] * own + ["B"] * own
        assert [phase for phase, _ in steps[0].events] == one * microbatches, rank
        assert [at for _, at in steps[0].events] == sorted(at for _, at in steps[0].events), rank


@requirement("PIPE-INTERLEAVED")
@given(data=st.data(), microbatches=st.integers(3, 6), active=st.integers(1, 2))
@trials(5)
def test_a_backward_does_not_wait_for_all_forwards(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, microbatches: int, active: int
) -> None:
    needs(smp_world, 2)
    pp, stages = data.draw(pipelines(min(4, smp_world.ranks)), "pipeline")
    given_ = config(pp, microbatches, "interleaved", active)
    seen = smp_world.run(note_order, smp_engine, stages, microbatches, 1, ranks=pp, config=given_)
    for rank, steps in enumerate(seen):
        phases = [phase for phase, _ in steps[0].events]
        if phases:
            last = len(phases) - 1 - phases[::-1].index("F")
            assert phases.index("B") < last, rank
