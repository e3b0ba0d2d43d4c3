"""With ``deterministic_server`` the order of what a rank does depends on the step alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import smp_core.torch as smp
from pytest_smp import strategies
from pytest_smp.ranks.schedule import Schedule
from smp_core.torch import session as sessions
from smp_core.torch.partitioning import partition
from tests.smp_core.torch.execution.test_engine import linear

CONFIG = {
    "auto_partition": False,
    "default_partition": 0,
    "skip_tracing": True,
    "microbatches": 4,
    "active_microbatches": 3,
    "deterministic_server": True,
}


class Middle(nn.Module):
    """On one rank, with children on the ranks around it."""

    def __init__(self, here: int, last: int) -> None:
        super().__init__()
        self.own = linear(here)
        self.after, self.before = linear(last), linear(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.before(torch.tanh(self.after(self.own(x)))) + x
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        last = smp.pp_size() - 1
        self.first, self.last = linear(0), linear(last)
        with partition(1):
            self.middle = Middle(1, last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.middle(self.first(x))) + self.middle(x)
        return y


def orders() -> list[tuple[int, str | None, str]]:
    """The activities of this rank in a step, in order."""
    torch.manual_seed(5)
    model = smp.DistributedModel(Net())

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        model.backward(loss)
        return loss

    step(torch.ones(8, 4, dtype=torch.float64))
    events: list[Any] = sessions.current("a test").timeline
    return [(event.microbatch, event.path, event.phase.value) for event in events]


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("degree", [2, 3])
def test_the_order_does_not_depend_on_which_message_comes_first(
    smp_world: Any, degree: int, pipeline: str
) -> None:
    config = {**CONFIG, "pipeline_parallel_degree": degree, "pipeline": pipeline}
    expected = smp_world.run(orders, ranks=degree, config=config)
    assert {microbatch for microbatch, _, _ in expected[0]} == {0, 1, 2, 3}

    @settings(max_examples=6, deadline=None)
    @given(schedule=strategies.schedules())
    def check(schedule: Schedule) -> None:
        found = smp_world.run(orders, ranks=degree, config=config, schedule=schedule)
        assert found == expected

    check()
