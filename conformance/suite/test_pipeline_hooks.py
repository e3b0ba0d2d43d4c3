"""Properties of the distributed model's hooks and attributes."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor, nn

from conformance.cases.draws import needs
from conformance.cases.training import TrainingWorld, namespace, step_of_the_sum, trials, worlds
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld


class Chain(nn.Module):
    """A model of linear maps, the last of which is called twice, and a buffer."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.last = nn.Linear(3, 3)
        self.register_buffer("factor", torch.tensor([1.0, 2.0, 3.0]))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.last(self.last(self.first(x)) * self.factor)
        return out


def values(module: nn.Module, scale: float = 1.0) -> None:
    """Fill the parameters with fixed values, the same on every rank."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            filled = torch.arange(parameter.numel(), dtype=torch.float32) + number
            parameter.copy_(filled.reshape(parameter.shape) * scale)


def distributed(smp: Any, module: Chain) -> Any:
    """Wrap a chain in DistributedModel, with the last map on rank 1 if there is a pipeline."""
    values(module)
    model = smp.DistributedModel(module)
    if smp.pp_size() > 1:
        smp.set_partition(module.last, 1)
    return model


@dataclasses.dataclass
class Heard:
    """The calls of hooks on one rank, and attributes of its model.

    Attributes:
        calls: the calls of the model's hooks, each with the hook's name, whether model and optimizer were the
            script's, whether the model was partitioned, and the step in progress.
        forwards: the number of calls of each module's forward hook after the first step, by module.
        partitioned: the model's ``partitioned`` before the first step and after the last.
        wrapped: whether the model's ``module`` is the wrapped module, or leads to it.
    """

    calls: list[tuple[str, bool, bool, int]] = dataclasses.field(default_factory=list)
    forwards: dict[str, int] = dataclasses.field(default_factory=dict)
    partitioned: tuple[bool, bool] = (False, False)
    wrapped: bool = False


def listen(engine: str, steps: int, microbatches: int, tracing: bool) -> Heard:
    """Register hooks, run steps, and return the calls on this rank."""
    smp = namespace(engine)
    heard = Heard()
    module = Chain()
    model = distributed(smp, module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    now = [-1]

    def hook(name: str) -> Any:
        def called(given_model: Any, given_optimizer: Any) -> None:
            own = given_model is model and given_optimizer is optimizer
            heard.calls.append((name, own, model.partitioned, now[0]))

        return called

    model.register_post_partition_hook(hook("partition"))
    model.register_post_partition_hook(hook("removed")).remove()
    model.register_post_step_hook(hook("step"))
    model.register_post_step_hook(hook("removed")).remove()
    counting = [False]
    for name, each in module.named_children():
        heard.forwards[name] = 0

        def count(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            heard.forwards[name] += counting[0]

        each.register_forward_hook(count)

    body = step_of_the_sum(smp)
    before = model.partitioned
    for step in range(steps):
        now[0] = step
        counting[0] = step > 0  # a trace may call modules once more in the first step
        body(model, torch.ones(2 * microbatches, 2))
    now[0] = steps
    heard.partitioned = before, model.partitioned
    innermost: Any = model.module
    while hasattr(innermost, "module"):  # inside of wrappers of ddp and of 16 bits (API 1.7)
        innermost = innermost.module
    heard.wrapped = innermost is module
    return heard


def heard(
    smp_world: SmpWorld, engine: str, world: TrainingWorld, steps: int, tracing: bool = True
) -> list[Heard]:
    """Run :func:`listen` on all ranks of a world."""
    __tracebackhide__ = True
    config = world.config | ({} if tracing else {"skip_tracing": True})
    return smp_world.run(
        listen, engine, steps, world.microbatches, tracing, ranks=world.ranks, config=config
    )


@requirement("HOOK-POST-PARTITION")
@given(data=st.data(), tracing=st.booleans())
@trials(5)
def test_post_partition_hooks_are_called_once_and_early(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, tracing: bool
) -> None:
    world = data.draw(worlds(smp_world, smp_engine), "world")
    for rank in heard(smp_world, smp_engine, world, 2, tracing):
        calls = [call for call in rank.calls if call[0] != "step"]
        assert calls == [("partition", True, True, 0)]


@requirement("HOOK-POST-STEP")
@given(data=st.data(), steps=st.integers(1, 3))
@trials(5)
def test_post_step_hooks_are_called_once_after_the_first(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, steps: int
) -> None:
    world = data.draw(worlds(smp_world, smp_engine), "world")
    for rank in heard(smp_world, smp_engine, world, steps):
        assert [call[0] for call in rank.calls] == ["partition", "step"]
        assert rank.calls[1] == ("step", True, True, 0)


@requirement("HOOK-FORWARD")
@given(data=st.data(), steps=st.integers(2, 3))
@trials(5)
def test_forward_hooks_are_called_once_a_call(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, steps: int
) -> None:
    world = data.draw(worlds(smp_world, smp_engine), "world")
    seen = heard(smp_world, smp_engine, world, steps)
    calls = (steps - 1) * world.microbatches * world.dp
    for name, times in (("first", 1), ("last", 2)):
        assert sum(rank.forwards[name] for rank in seen) == calls * times, name


class Base(nn.Module):
    """A linear map, whose forward other classes call."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.map(x)
        return out


class Inherits(Base):
    """A class without a forward of its own."""


class Derived(Inherits):
    """The map of the base class, times two."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super()._orig_forward(x) * 2  # type: ignore[misc]
        return out


class Most(Derived):
    """The result of the base class, plus three."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super()._orig_forward(x) + 3  # type: ignore[misc]
        return out


def call_bases(engine: str, microbatches: int, rows: int) -> Tensor:
    """Run a step whose modules call the forwards of their base classes, and return its outputs."""
    smp = namespace(engine)
    module = nn.Sequential(Derived(), Most())
    values(module)
    model = smp.DistributedModel(module)
    if smp.pp_size() > 1:
        smp.set_partition(module[1], smp.pp_size() - 1)

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(model: Any, x: Tensor) -> Tensor:
        output: Tensor = model(x)
        model.backward(output.sum())
        return output

    together: Tensor = body(model, lines(microbatches * rows)).concat()
    return together


def lines(rows: int) -> Tensor:
    """Make a batch of different whole numbers."""
    return torch.arange(2.0 * rows).view(rows, 2)


@requirement("MODEL-ORIG-FORWARD")
@given(data=st.data(), rows=st.integers(1, 3))
@trials(4)
def test_the_forward_of_a_base_class_is_called_by_its_other_name(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, rows: int
) -> None:
    world = data.draw(worlds(smp_world, smp_engine), "world")
    module = nn.Sequential(Derived(), Most())
    values(module)
    expected = lines(world.microbatches * rows)
    weights = list(module.parameters())
    for (weight, bias), more in ((weights[:2], 0), (weights[2:], 3)):
        expected = nn.functional.linear(expected, weight, bias) * 2 + more
    for found in smp_world.run(
        call_bases,
        smp_engine,
        world.microbatches,
        rows,
        ranks=world.ranks,
        config=world.config,
    ):
        assert torch.equal(found, expected)


@requirement("MODEL-ATTRIBUTES")
@given(data=st.data())
@trials(4)
def test_partitioned_and_module(smp_world: SmpWorld, smp_engine: str, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world, smp_engine), "world")
    for rank in heard(smp_world, smp_engine, world, 1):
        assert rank.partitioned == (world.pp == 1, True)
        assert rank.wrapped


def look_at_state(engine: str, microbatches: int, stepped: bool) -> dict[str, Tensor]:
    """The model's state_dict, before or after the first step."""
    smp = namespace(engine)
    model = distributed(smp, Chain())
    body = step_of_the_sum(smp)
    if stepped:
        body(model, torch.ones(2 * microbatches, 2))
    return dict(model.state_dict())


@requirement("MODEL-ATTRIBUTES")
@given(data=st.data(), stepped=st.booleans())
@trials(4)
def test_the_state_is_that_of_the_wrapped_module(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, stepped: bool
) -> None:
    world = data.draw(worlds(smp_world, smp_engine), "world")
    plain = Chain()
    values(plain)
    expected = plain.state_dict()
    for state in smp_world.run(
        look_at_state,
        smp_engine,
        world.microbatches,
        stepped or world.pp > 1,
        ranks=world.ranks,
        config=world.config,
    ):
        found = {name: each for name, each in state.items() if isinstance(each, Tensor)}
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def train_unevenly(engine: str, batches: tuple[int, ...], microbatches: int) -> list[Tensor | None]:
    """Train as many steps as this replica has batches, under join.

    Returns the gradient of the last module's bias after each step.
    """
    smp = namespace(engine)
    module = Chain()
    model = distributed(smp, module)
    body = step_of_the_sum(smp)
    found: list[Tensor | None] = []
    with model.join():
        for _ in range(batches[smp.dp_rank()]):
            model.zero_grad(set_to_none=True)
            body(model, torch.ones(2 * microbatches, 2))
            gradient = module.last.bias.grad
            found.append(None if gradient is None else gradient.clone())
    return found


@requirement("MODEL-JOIN")
@given(data=st.data(), batches=st.permutations([1, 3]))
@trials(5)
def test_replicas_may_have_fewer_batches(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, batches: list[int]
) -> None:
    needs(smp_world, 2)
    world = data.draw(worlds(smp_world, smp_engine).filter(lambda each: each.dp == 2), "world")
    world = dataclasses.replace(world, microbatches=2 ** (world.microbatches - 1))
    seen = smp_world.run(
        train_unevenly,
        smp_engine,
        tuple(batches),
        world.microbatches,
        ranks=world.ranks,
        config=world.config,
    )
    # The bias gets a gradient from both calls of its module and two rows, on all replicas, then on one.
    plain = Chain()
    values(plain)
    plain(torch.ones(2, 2)).sum().backward()
    whole = plain.last.bias.grad
    assert whole is not None
    for found in seen:
        held = [each for each in found if each is not None]
        for step, gradient in enumerate(held):
            share = 1.0 if step < min(batches) else 0.5
            assert torch.equal(gradient, whole * share), step
    assert any(each is not None for found in seen for each in found)
