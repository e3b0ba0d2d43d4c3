"""An error on one rank of a pipeline is the same error on all, and the next step is as if nothing
had happened.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.errors import Cancelled, SmpError
from smp_core.torch.exceptions import (
    BatchSizeError,
    DetachedLossError,
    OutsideStepError,
    SecondModelError,
    StepAbortedError,
    UnsupportedTrainingError,
)
from smp_core.torch.execution import workers
from smp_core.torch.partitioning import partition
from smp_core.transport import current_rank as hosts

PARTS = 3
CONFIG = {
    "pipeline_parallel_degree": PARTS,
    "microbatches": 4,
    "auto_partition": False,
    "default_partition": 0,
    "skip_tracing": True,
}


class Trap(torch.autograd.Function):
    """The identity; its backward pass raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise LookupError("backward")


class Layer(nn.Module):
    """Raises if told to, when a row of the input is above 100."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.trouble = None

    def forward(self, x):
        if bool((x > 100).any()):
            if self.trouble == "forward":
                raise LookupError("forward")
            if self.trouble == "backward":
                return Trap.apply(self.linear(x))
        return self.linear(x) + x.detach() * 0 + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        for index in range(PARTS):
            with partition(index):
                self.layers.append(Layer())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@smp.step
def train(model, x):
    loss = model(x).mean()
    model.backward(loss)
    return loss


def batch(bad=None):
    x = torch.ones(8, 2)
    if bad is not None:
        x[2 * bad] = 1000.0
    return x


def caught(call, *args):
    """The error that a call raises: its type's name, its text, its notes."""
    try:
        call(*args)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        result = type(error).__name__, str(error), notes
    else:
        result = "nothing", "", ""
    return result


@pytest.fixture(autouse=True)
def no_worker_is_left():
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name == "smp worker"]
    assert not left


def body_of_trouble(part, trouble, bad):
    model = smp.DistributedModel(Net())
    train(model, batch())
    gradients = {name: p.grad.clone() for name, p in model.local_named_parameters()}
    model.module.layers[part].trouble = trouble
    result = caught(train, model, batch(bad))
    for name, p in model.local_named_parameters():
        assert torch.equal(p.grad, gradients[name]), "an aborted step leaves gradients as they were"
        p.grad = None
    train(model, batch())
    for name, p in model.local_named_parameters():
        assert torch.equal(p.grad, gradients[name])
    return result


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("trouble", ["forward", "backward"])
@pytest.mark.parametrize("partition", range(PARTS))
@pytest.mark.parametrize("ranks", [PARTS, 2 * PARTS])
def test_a_microbatch_that_raises(smp_world, ranks, partition, trouble, pipeline):
    config = {**CONFIG, "pipeline": pipeline, "ddp": ranks > PARTS}
    results = smp_world.run(body_of_trouble, partition, trouble, 2, ranks=ranks, config=config)
    # Of replicas with the same data, the one of the lowest dp rank is told of; it raises its own error.
    ours = [kind for kind, _, _ in results]
    assert ours.count("LookupError") == 1
    raised = ours.index("LookupError")
    for rank, (kind, text, notes) in enumerate(results):
        if rank == raised:
            continue
        assert kind == "StepAbortedError"
        assert "microbatch 2" in text
        assert f"pp rank {partition} (world rank {raised})" in text
        assert f"LookupError: {trouble}" in text
        where = f"module layers.{partition}" if partition else "the function"
        assert f"in the {trouble} pass of microbatch 2, in {where}." in text
        assert "Traceback" in notes


def raise_in_body(model):
    @smp.step
    def train(model, x):
        model(x)
        raise ValueError("mine")

    train(model, batch())


def detached(model):
    @smp.step
    def train(model, x):
        model.backward(model(x).detach().mean())

    train(model, batch())


def indivisible(model):
    train(model, torch.ones(7, 2))


def nested(model):
    @smp.step
    def train_twice(model, x):
        return train(model, x)

    train_twice(model, batch())


def unpicklable(model):
    @smp.step
    def train(model, x):
        return lambda: x

    train(model, batch())


API = {
    "detached": (detached, DetachedLossError, "model.backward: tensor 0"),
    "indivisible": (indivisible, BatchSizeError, "7"),
    "nested": (nested, OutsideStepError, "inside a step"),
}


def body_of_api_error(name):
    model = smp.DistributedModel(Net())
    train(model, batch())
    result = caught(API[name][0], model)
    train(model, batch())
    return result


@pytest.mark.parametrize("name", API)
def test_errors_of_the_api_are_the_same_on_every_rank(smp_world, name):
    results = smp_world.run(body_of_api_error, name, ranks=PARTS, config=CONFIG)
    _, kind, words = API[name]
    assert {result[0] for result in results} == {kind.__name__}
    assert len({result[1] for result in results}) == 1
    assert words in results[0][1]


def body_of_first_step(function):
    return caught(function, smp.DistributedModel(Net()))


def test_the_first_step_may_fail_while_it_is_traced(smp_world):
    config = {**CONFIG, "skip_tracing": False}
    results = smp_world.run(body_of_first_step, raise_in_body, ranks=PARTS, config=config)
    assert [result[0] for result in results] == ["ValueError", *["StepAbortedError"] * 2]
    results = smp_world.run(body_of_first_step, indivisible, ranks=PARTS, config=config)
    assert [result[0] for result in results] == ["BatchSizeError"] * 3


def test_the_body_raises(smp_world):
    results = smp_world.run(body_of_first_step, raise_in_body, ranks=PARTS, config=CONFIG)
    assert [result[0] for result in results] == ["ValueError", *["StepAbortedError"] * 2]
    assert "in the function" in results[1][1]


def outside():
    model = smp.DistributedModel(Net())
    kinds = [
        caught(model, batch())[0],
        caught(model.backward, torch.ones((), requires_grad=True))[0],
    ]
    train(model, batch())
    kinds += [caught(model, batch())[0], caught(model.module.layers[1], batch())[0]]
    return kinds


def _body_raises(raising, error, traced):
    """A step whose body raises this on one rank, the first step or the second."""
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    trouble = traced

    @smp.step
    def step(x):
        if trouble and smp.rank() == raising:
            raise error
        model.backward(model(x).sum())

    if not traced:
        step(torch.ones(4, 2))
        trouble = True
    step(torch.ones(4, 2))


REPLICAS = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}


@pytest.mark.parametrize("traced", [True, False])
def test_the_root_is_the_replica_whose_body_raised(smp_world, traced):
    """The ranks of the replica that went well may be the first to hear, and to raise."""
    arguments = (2, LookupError("bad batch"), traced)
    report = smp_world.report(_body_raises, *arguments, ranks=4, config=REPLICAS)
    assert (report.root, type(report.error)) == (2, LookupError)
    told = [outcome.error for outcome in report.outcomes if outcome.rank != 2]
    assert [(type(error), error.raised_by) for error in told] == [(StepAbortedError, 2)] * 3


@pytest.mark.parametrize("traced", [True, False])
def test_an_end_of_the_run_inside_of_a_step_is_sent_to_no_rank(smp_world, traced):
    arguments = (0, Cancelled("the run has ended"), traced)
    report = smp_world.report(_body_raises, *arguments, ranks=2, config=REPLICAS)
    assert (report.root, type(report.error)) == (0, Cancelled)
    assert report.outcomes[1].error is None


def test_calls_outside_of_a_step(smp_world):
    refused = "OutsideStepError"
    results = smp_world.run(outside, ranks=PARTS, config=CONFIG)
    assert [result[:3] for result in results] == [[refused] * 3] * PARTS
    assert [result[3] for result in results] == [refused, "nothing", refused]


def alone():
    model = smp.DistributedModel(nn.Linear(2, 2))
    loss = model(batch()).mean()
    model.backward(loss)
    expected = nn.Linear(2, 2)
    expected.load_state_dict(model.module.state_dict())
    expected(batch()).mean().backward()
    assert torch.equal(model.module.weight.grad, expected.weight.grad)


def test_no_step_is_needed_at_pipeline_degree_1(smp_world):
    smp_world.run(alone, ranks=1)


def second_model():
    smp.DistributedModel(Net())
    return caught(smp.DistributedModel, Net())[0]


def test_a_second_model(smp_world):
    assert (
        smp_world.run(second_model, ranks=PARTS, config=CONFIG)
        == [SecondModelError.__name__] * PARTS
    )


class Deaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        with partition(1):
            self.second = TwoInputs()

    def forward(self, x):
        y = self.first(x)
        return self.second(y, unused=self.second(y * 2, y))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, unused):
        return self.linear(x)


def unused_input():
    torch.manual_seed(0)
    module, plain = Deaf(), Deaf()
    plain.load_state_dict(module.state_dict())
    model = smp.DistributedModel(module)
    train(model, batch())
    for part in batch().chunk(smp.num_microbatches()):
        (plain(part).mean() / smp.num_microbatches()).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return [
        torch.equal(parameter.grad, expected[name])
        for name, parameter in model.local_named_parameters()
    ]


def test_an_input_without_influence_gets_no_gradient(smp_world):
    config = {**CONFIG, "pipeline_parallel_degree": 2}
    assert smp_world.run(unused_input, ranks=2, config=config) == [[True] * 2] * 2


def unpicklable_result():
    return caught(unpicklable, smp.DistributedModel(Net()))[:2]


def test_a_result_that_cannot_be_sent(smp_world):
    results = smp_world.run(unpicklable_result, ranks=PARTS, config=CONFIG)
    assert [result[0] for result in results] == ["PayloadError"] * PARTS
    assert "what the function returned" in results[0][1]


class Stubborn:
    """A result that can be pickled and not unpickled."""

    def __getstate__(self):
        return {"some": "state"}

    def __setstate__(self, state):
        raise LookupError("no state")


class Silent(Exception):
    def __str__(self):
        raise LookupError("no text")


class OneWay(SmpError):
    def __reduce__(self):
        return int, ("no number",)


def strange(kind):
    class Local(Exception):
        """Cannot be pickled, nor can what it holds."""

        def __init__(self):
            super().__init__(lambda: None)

    return {"local": Local, "silent": Silent, "one way": OneWay}[kind]()


def raises_strangely(kind):
    model = smp.DistributedModel(Net())
    train(model, batch())

    def hook(module, args):
        if smp.rank() == 1:
            raise strange(kind)

    handle = model.module.layers[1].register_forward_pre_hook(hook)
    raised = None
    try:
        train(model, batch())
    except Exception as error:
        raised = (
            type(error).__name__,
            getattr(error, "args", ("",))[:1],
            type(error) is StepAbortedError,
        )
    handle.remove()
    train(model, batch())
    return raised[0], str(raised[1]) if raised[2] else ""


@pytest.mark.parametrize("kind", ["local", "silent", "one way"])
def test_an_exception_that_cannot_travel(smp_world, kind):
    results = smp_world.run(raises_strangely, kind, ranks=PARTS, config=CONFIG)
    own = type(strange(kind)).__name__
    assert [result[0] for result in results] == ["StepAbortedError", own, "StepAbortedError"]
    assert results[0] == results[2]
    assert own in results[0][1]


@smp.step
def stubborn(model, x):
    loss = model(x).mean()
    model.backward(loss)
    return loss, Stubborn()


def stubborn_result():
    model = smp.DistributedModel(Net())
    result = caught(stubborn, model, batch())[:2]
    train(model, batch())
    return result


def test_a_result_that_cannot_be_put_together_again(smp_world):
    results = smp_world.run(stubborn_result, ranks=PARTS, config=CONFIG)
    assert {result[0] for result in results} == {"PayloadError"}
    assert len(set(results)) == 1
    assert "LookupError: no state" in results[0][1]


def backward_twice():
    model = smp.DistributedModel(Net())

    @smp.step
    def step(model, x):
        y = model.module.layers[1](x)
        model.backward(y.mean())
        model.backward(y.sum())

    result = caught(step, model, batch())
    train(model, batch())
    return result


def test_a_graph_is_used_once(smp_world):
    results = smp_world.run(backward_twice, ranks=PARTS, config=CONFIG)
    assert [result[0] for result in results] == [
        "StepAbortedError",
        "RuntimeError",
        "StepAbortedError",
    ]
    assert "retain_graph is not supported" in results[1][1]


def no_thread(part):
    model = smp.DistributedModel(Net())
    train(model, batch())
    here, acquire = hosts.current(), workers.WorkerThreads.acquire

    def refused(pool):
        if pool.rank is here:
            raise RuntimeError("can't start new thread")
        return acquire(pool)

    if smp.rank() == part:  # one rank alone: on sim the others share the class
        workers.WorkerThreads.acquire = refused
    try:
        result = caught(train, model, batch())
    finally:
        if smp.rank() == part:
            workers.WorkerThreads.acquire = acquire
    train(model, batch())
    return result


@pytest.mark.parametrize("part", range(PARTS))
def test_a_rank_that_gets_no_thread_says_so(smp_world, part):
    results = smp_world.run(no_thread, part, ranks=PARTS, config=CONFIG)
    kinds = ["StepAbortedError"] * PARTS
    kinds[part] = "RuntimeError"
    assert [result[0] for result in results] == kinds
    assert all("can't start new thread" in result[1] for result in results)


def no_model():
    return caught(train, None, batch())[0]


def test_a_step_without_a_model(smp_world):
    kinds = smp_world.run(no_model, ranks=PARTS, config=CONFIG)
    assert kinds == [UnsupportedTrainingError.__name__] * PARTS


def no_sync():
    smp.DistributedModel(Net()).no_sync()


def test_no_sync_is_refused(smp_world):
    with pytest.raises(UnsupportedTrainingError, match="backward_passes_per_step"):
        smp_world.run(no_sync, ranks=PARTS, config=CONFIG)


def test_the_error_of_the_others_is_one_of_ours():
    assert issubclass(StepAbortedError, RuntimeError)


class Raising(nn.Module):
    def forward(self, x):
        raise ZeroDivisionError("inside")


@pytest.mark.smp(
    ranks=2,
    pipeline_parallel_degree=2,
    auto_partition=False,
    default_partition=0,
    skip_tracing=True,
)
def test_the_remote_traceback_is_of_the_users_frames(smp):
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Raising()))
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)

    @smp.step
    def train(model, x):
        model.backward(model(x).sum())

    with pytest.raises(StepAbortedError if smp.rank() == 0 else ZeroDivisionError) as raised:
        train(model, torch.ones(2, 2))
    if smp.rank() == 0:
        (note,) = (each for each in raised.value.__notes__ if "Traceback" in each)
        files = [line for line in note.splitlines() if line.startswith("  File")]
        assert 'raise ZeroDivisionError("inside")' in note
        outside = [line for line in files if "tests/smp_core" not in line]
        assert not [line for line in outside if "smp_core/torch/execution" in line]
