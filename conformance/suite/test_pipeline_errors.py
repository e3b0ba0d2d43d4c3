"""Properties of refusals: every rank raises and none hangs. The engine chooses the exception."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor, nn

from conformance.cases.training import TrainingWorld, namespace, raised, trials, worlds
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld


class Two(nn.Module):
    """Two linear maps; the second can raise, ignore an argument, or share its weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = Second()
        if tied:
            self.second.map.weight = self.first.weight

    def forward(self, x: Tensor, trouble: str = "") -> Tensor:
        h = self.first(x)
        if trouble == "unused input":
            out: Tensor = self.second(h, self.first(x + 1), trouble)
        else:
            out = self.second(h, None, trouble)
        return out


class Trouble(Exception):
    """The exception that a module or a body raises on purpose."""


class Second(nn.Module):
    """A linear map that can raise, and can ignore its second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2)

    def forward(self, x: Tensor, ignored: Tensor | None, trouble: str) -> Tensor:
        if trouble == "module":
            raise Trouble("the module")
        out: Tensor = self.map(x)
        return out


def wrapped(smp: Any, tied: bool = False, last: int | None = None) -> Any:
    """Make the distributed model, with the second module on the last partition, or on ``last``."""
    module = Two(tied)
    model = smp.DistributedModel(module)
    if smp.pp_size() > 1:
        smp.set_partition(module.second, smp.pp_size() - 1 if last is None else last)
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    return model


def stepper(smp: Any) -> Callable[..., Any]:
    """Make a step function that fails in the way that its argument ``trouble`` names."""

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(model: Any, x: Tensor, trouble: str = "") -> Tensor:
        if trouble == "body":
            raise Trouble("the body")
        loss: Tensor = model(x, trouble=trouble).sum()
        if trouble == "late" and float(x[0, 0]) == 0:
            raise Trouble("the first microbatch, after others may have begun")
        if trouble == "detached":
            loss = loss.detach()
        model.backward(loss)
        return loss

    step: Callable[..., Any] = body
    return step


def batch(rows: int) -> Tensor:
    """Make a batch whose rows are filled with their numbers."""
    return torch.arange(rows).float().unsqueeze(1).expand(rows, 2).contiguous()


def get_into(
    engine: str, microbatches: int, trouble: str, before: bool
) -> tuple[str | None, str | None]:
    """Run a step that fails, after a good one if ``before``, and then a good one.

    Returns the types of the exceptions of the failing step and of the good one after it, or None.
    """
    smp = namespace(engine)
    model, step = wrapped(smp), stepper(smp)
    good = batch(2 * microbatches)
    if before:
        step(model, good)
    bad = batch(2 * microbatches + 1) if trouble == "batch" else good
    first = raised(lambda: step(model, bad, trouble))
    return first, raised(lambda: step(model, good))


def refused_everywhere(
    smp_world: SmpWorld, engine: str, world: TrainingWorld, trouble: str, before: bool
) -> None:
    """Check that the failing step raises on every rank, and that the next one works on every rank."""
    __tracebackhide__ = True
    seen = smp_world.run(
        get_into,
        engine,
        world.microbatches,
        trouble,
        before,
        ranks=world.ranks,
        config=world.config,
    )
    assert all(first is not None for first, _ in seen), seen
    assert [then for _, then in seen] == [None] * world.ranks, seen


@requirement("MODEL-BAD-BATCH")
@given(data=st.data(), before=st.booleans())
@trials(4)
def test_a_batch_that_cannot_be_split_is_refused(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, before: bool
) -> None:
    world = data.draw(worlds(smp_world, smp_engine), "world")
    world = dataclasses.replace(world, microbatches=max(2, world.microbatches))
    refused_everywhere(smp_world, smp_engine, world, "batch", before)


@requirement("MODEL-RAISING-BODY")
@given(data=st.data(), trouble=st.sampled_from(["body", "late", "module"]), before=st.booleans())
@trials(8)
def test_an_error_ends_the_step_everywhere(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, trouble: str, before: bool
) -> None:
    world = data.draw(worlds(smp_world, smp_engine), "world")
    refused_everywhere(smp_world, smp_engine, world, trouble, before)


@requirement("MODEL-DETACHED")
@given(data=st.data(), before=st.booleans())
@trials(4)
def test_a_detached_loss_is_refused(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, before: bool
) -> None:
    world = data.draw(worlds(smp_world, smp_engine), "world")
    refused_everywhere(smp_world, smp_engine, world, "detached", before)


@requirement("MODEL-UNUSED-INPUT")
@given(data=st.data(), before=st.booleans())
@trials(4)
def test_an_input_without_influence_gets_no_gradient_or_is_refused(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, before: bool
) -> None:
    world = data.draw(worlds(smp_world, smp_engine, 2), "world")
    seen = smp_world.run(
        ignore_an_input,
        smp_engine,
        world.microbatches,
        before,
        ranks=world.ranks,
        config=world.config,
    )
    refused = [error is not None for error, _, _ in seen]
    assert all(refused) or not any(refused), seen
    assert [then for _, _, then in seen] == [None] * world.ranks, seen
    if any(refused):
        return
    plain = integers(Two())
    plain(batch(2 * world.microbatches), trouble="unused input").sum().backward()
    held = Counter(name for _, found, _ in seen for name in found)
    assert held == {name: world.dp for name, _ in plain.named_parameters()}, "lost gradients"
    for _, found, _ in seen:
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            expected = parameter.grad / world.microbatches
            assert name not in found or torch.equal(found[name], expected), (name, found, expected)


def ignore_an_input(
    engine: str, microbatches: int, before: bool
) -> tuple[str | None, dict[str, Tensor], str | None]:
    """Run a step whose module ignores one of its arguments, and then a good one.

    Returns the type of the first step's exception, or None, this rank's gradients after it by name, and
    the type of the second step's exception, or None.
    """
    smp = namespace(engine)
    model, step = wrapped(smp), stepper(smp)
    integers(model.module)
    good = batch(2 * microbatches)
    if before:
        step(model, good)
    model.zero_grad()
    error = raised(lambda: step(model, good, "unused input"))
    own = model.local_named_parameters()
    found = {name: each.grad.clone() for name, each in own if each.grad is not None}
    return error, found, raised(lambda: step(model, good))


def integers(module: Any) -> Any:
    """Fill the module with small whole numbers, whose sums are exact in any order, and return it."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            if parameter.numel():
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) - number)
    return module


def call_outside(engine: str, microbatches: int, before: bool) -> list[str | None]:
    """Call the model and its backward outside a step, and then run a step.

    Returns the type of the exception of each call, or None.
    """
    smp = namespace(engine)
    model, step = wrapped(smp), stepper(smp)
    if before:
        step(model, batch(microbatches))
    outside = raised(lambda: model(batch(1)))
    loss = torch.ones((), requires_grad=True)
    return [
        outside,
        raised(lambda: model.backward(loss)),
        raised(lambda: step(model, batch(microbatches))),
    ]


@requirement("MODEL-OUTSIDE-STEP")
@given(data=st.data(), before=st.booleans())
@trials(4)
def test_calls_outside_a_step_are_refused(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, before: bool
) -> None:
    world = data.draw(worlds(smp_world, smp_engine, 2), "world")
    for called, backward, step in smp_world.run(
        call_outside,
        smp_engine,
        world.microbatches,
        before,
        ranks=world.ranks,
        config=world.config,
    ):
        assert called is not None
        assert backward is not None
        assert step is None


def wrap_twice(engine: str) -> tuple[str | None, str | None]:
    """Make two DistributedModels; return the types of the exceptions of each, or None."""
    smp = namespace(engine)
    first = raised(lambda: smp.DistributedModel(Two()))
    return first, raised(lambda: smp.DistributedModel(Two()))


@requirement("MODEL-SECOND")
@given(data=st.data())
@trials(4)
def test_a_second_model_is_refused(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject
) -> None:
    world = data.draw(worlds(smp_world, smp_engine), "world")
    seen = smp_world.run(wrap_twice, smp_engine, ranks=world.ranks, config=world.config)
    assert all(first is None and second is not None for first, second in seen), seen


def partition_badly(engine: str, microbatches: int, how: str, index: int) -> str | None:
    """Ask for an impossible partition in the way that ``how`` names, and run a step.

    Returns the type of the exception of the first failing call, or None.
    """
    smp = namespace(engine)

    def go() -> None:
        if how == "context":
            with smp.partition(index):
                module: nn.Module = Two()
            model = smp.DistributedModel(module)
        elif how == "set_partition":
            model = wrapped(smp, last=index)
        else:
            model = wrapped(smp, tied=True)
        stepper(smp)(model, batch(microbatches))

    return raised(go)


@requirement("MODEL-BAD-PARTITION")
@given(data=st.data(), how=st.sampled_from(["context", "set_partition"]))
@trials(5)
def test_a_partition_that_is_not_there_is_refused(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, how: str
) -> None:
    world = data.draw(worlds(smp_world, smp_engine, 2), "world")
    index = data.draw(st.sampled_from([world.pp, world.pp + 1, 99, -1]), "index")
    seen = smp_world.run(
        partition_badly,
        smp_engine,
        world.microbatches,
        how,
        index,
        ranks=world.ranks,
        config=world.config,
    )
    assert all(each is not None for each in seen), seen


@requirement("MODEL-SHARED-ACROSS")
@given(data=st.data())
@trials(5)
def test_a_parameter_in_two_partitions_is_refused(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject
) -> None:
    world = data.draw(worlds(smp_world, smp_engine, 2), "world")
    seen = smp_world.run(
        partition_badly,
        smp_engine,
        world.microbatches,
        "shared",
        0,
        ranks=world.ranks,
        config=world.config,
    )
    assert all(each is not None for each in seen), seen
