"""The trace: what a plain run shows, and that it leaves nothing behind."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn

from smp_core.errors import ArgumentError
from smp_core.torch.pipeline import tracing
from smp_core.torch.session import current


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout()
        self.twice = nn.Linear(6, 6, bias=False)
        self.never = nn.Linear(2, 2)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)))
        return self.twice(self.twice.forward(x)) + random.random() + np.random.rand()


def test_calls_come_in_order_with_shapes_and_callers():
    module = Net()
    with tracing.Tracer(module) as tracer:
        module(torch.ones(3, 4))
    trace = pickle.loads(pickle.dumps(tracer.trace))
    assert [(call.path, call.nth, call.caller) for call in trace.calls] == [
        ("", 0, None), ("first", 0, ""), ("norm", 0, ""), ("drop", 0, ""), ("twice", 0, ""),
        ("twice", 1, ""),
    ]  # fmt: skip
    assert trace.calls[1] == tracing.TracedCall("first", 0, "", ((3, 4),), ((3, 6),))
    assert trace.first_calls() == {"": 0, "first": 1, "norm": 2, "drop": 3, "twice": 4}
    # Products: 2 x rows x inner x columns each, plus the elements of all results of operators
    # (for `first`, addmm and the transposed view of its weight).
    assert trace.cost["first"] == 2 * 3 * 4 * 6 + 3 * 6 + 4 * 6
    assert trace.cost["twice"] == 2 * (2 * 3 * 6 * 6 + 3 * 6 + 6 * 6)
    assert "never" not in trace.cost
    assert trace.bytes["twice"] == 2 * 3 * 6 * 4
    assert trace.unit == "operations"


def test_a_run_leaves_buffers_generators_flags_and_gradients_as_they_were():
    module = Net()
    module(torch.ones(2, 4)).sum().backward()
    module.drop.eval()
    gradient = module.first.weight.grad.clone()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    objects = dict(module.named_buffers())
    with tracing.Tracer(module):
        module.train()
        module.norm.register_buffer("late", torch.ones(1))
        module.norm.running_var = torch.zeros(6)
        module(torch.randn(2, 4)).sum().backward()
    assert torch.equal(module.first.weight.grad, gradient)
    assert module.never.weight.grad is None
    assert dict(module.named_buffers()) == objects  # the same objects
    assert all(torch.equal(buffers[name], buffer) for name, buffer in module.named_buffers())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert not module.drop.training
    assert module.norm.training
    assert all("forward" not in vars(each) for each in module.modules())


@pytest.mark.smp(ranks=1)
def test_an_error_passes_and_everything_is_put_back(smp):
    module, session = Net(), current("test")
    mean = module.norm.running_mean.clone()
    own = module.first.forward
    module.first.forward = own  # an instance's own forward stays
    tracer = tracing.Tracer(module, session)
    with pytest.raises(ZeroDivisionError), tracer:
        module(torch.ones(2, 4)).div_(1 if smp.is_tracing() else "no") / (1 / 0)
    assert tracer.trace.calls
    assert not smp.is_tracing()
    assert torch.equal(module.norm.running_mean, mean)
    assert vars(module.first)["forward"] == own
    with tracing.Tracer(module):
        module(torch.ones(2, 4))


def test_measured_times_and_memory():
    module = Net()
    with tracing.Tracer(module, execution_times=True, memory_usage=True) as tracer:
        module(torch.ones(3, 4))
    assert tracer.trace.unit == "seconds"
    assert set(tracer.trace.cost) == {"", "first", "norm", "drop", "twice"}
    assert min(tracer.trace.cost.values()) >= 0
    # The inputs of the two products by `twice` are kept: what dropout gave, and the first product.
    assert tracer.trace.bytes["twice"] == 2 * 3 * 6 * 4


def test_times_on_the_cpu_and_unknown_devices_are_refused():
    tracing.check_options("gpu", True)
    tracing.check_options("cpu", False)
    with pytest.raises(ArgumentError, match="trace_execution_times must be False"):
        tracing.check_options("cpu", True)
    with pytest.raises(ArgumentError, match="'cpu' or 'gpu', not 'tpu'"):
        tracing.check_options("tpu", False)
