"""Modules called over the ranks of a pipeline give the outputs and gradients of plain PyTorch."""

from __future__ import annotations

import contextlib
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch.partitioning import partition

CONFIG = {
    "auto_partition": False,
    "default_partition": 0,
    "skip_tracing": True,
    "microbatches": 2,
}


def linear(index, width=4, out=4):
    with partition(index):
        return nn.Linear(width, out, dtype=torch.float64)


class Chain(nn.Module):
    """Layers, one on each of so many partitions."""

    def __init__(self, parts):
        super().__init__()
        self.layers = nn.ModuleList(linear(index) for index in range(parts))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Inner(nn.Module):
    """On one partition, with a child on another, which has a child on the first."""

    def __init__(self, depth, here, there):
        super().__init__()
        self.own = linear(here)
        with partition(there):
            self.child = Inner(depth - 1, there, here) if depth else None

    def forward(self, x):
        y = self.own(x)
        if self.child is not None:
            y = y + torch.sigmoid(self.child(torch.tanh(y)))
        return y * x


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        with partition(1):
            self.top = Inner(3, 1, 0)

    def forward(self, x):
        return self.top(x)


class Reused(nn.Module):
    """One module called several times, in an order that the input decides, with a skip."""

    def __init__(self):
        super().__init__()
        self.a, self.b = linear(1), linear(0)
        self.c = self.a  # a second name of the same module

    def forward(self, x):
        first, second = (self.a, self.b) if float(x.detach()[0, 0]) > 0 else (self.b, self.a)
        y = first(x)
        z = second(torch.tanh(y))
        return self.a(z) + self.c(x) + self.a.forward(y) + x


class InTwoPlaces(nn.Module):
    """A module below two others: it is on the partition of the first, and the second one's tree on another."""

    def __init__(self):
        super().__init__()
        self.first = linear(0)
        with partition(1):
            self.second = nn.Sequential(nn.Sequential(linear(1), self.first))

    def forward(self, x):
        return torch.tanh(self.first(x)) + self.second(x)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Options:
    """Any picklable value."""

    def __init__(self, scale):
        self.scale = scale


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, pair, options, *rest, scale=None, mask=None, **more):
        assert scale is None
        assert rest == (None, "text", (1, 2))
        assert isinstance(pair, Pair)
        assert mask["keep"].dtype is torch.bool
        assert more["same"] is pair.left
        y = self.linear(pair.left * options.scale + pair.right) * mask["keep"]
        index = y.argmax(-1)
        return {"y": y, "pair": Pair(y.relu(), pair.right), "index": index, "n": 3, "none": None}


class Nests(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = linear(0)
        with partition(1):
            self.second = Structured()

    def forward(self, x):
        y = self.first(x)
        mask = {"keep": x > 0}
        out = self.second(
            Pair(y, x.t().contiguous().t()), Options(2.0), None, "text", (1, 2), mask=mask, same=y
        )
        assert isinstance(out["pair"], Pair)
        assert not out["index"].requires_grad
        assert out["none"] is None
        return out["y"] * out["n"] + out["pair"].left + out["pair"].right.sum() + y


class Tensors(nn.Module):
    """Hands its inputs back, and changes some in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x, again, view, empty, integers):
        assert again is x
        assert x.stride() == (1, x.shape[0])
        assert view.stride() == (0, 1)
        assert empty.shape == (0, 3)
        y = self.linear(x)
        y.mul_(2)
        again = again + 1
        again.clamp_(min=0)
        return y, again, view, x, empty, integers + 1, y[:, :2]


class Strides(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = linear(0)
        with partition(1):
            self.second = Tensors()

    def forward(self, x):
        y = self.first(x)
        turned = (y * 1.5).t().contiguous().t()
        view = y[0].expand(3, 4)
        empty = y.new_zeros(0, 3)
        a, b, c, d, e, f, g = self.second(turned, turned, view, empty, torch.arange(3))
        assert f.tolist() == [1, 2, 3]
        assert e.shape == (0, 3)
        return a + b * d + c.sum(0) + g.sum()


class Aliased(nn.Module):
    """Modifies its input in place, as nn.ReLU(inplace=True) does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        x.relu_()
        return self.linear(x)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = linear(0)
        with partition(1):
            self.second = Aliased()

    def forward(self, x):
        return self.second(self.first(x) * 1)


def mean(model, x):
    loss = model(x).mean()
    model.backward(loss)
    return loss


def weighted(model, x):
    y = model(x)
    model.backward(y, torch.full_like(y, 0.5))
    return y.sum()


def several(model, x):
    y = model(x)
    z = model(x * 2)
    model.backward([y.mean(), z], [None, torch.ones_like(z)])
    return y.mean()


def twice(model, x):
    loss = model(x).mean()
    model.backward(loss)
    other = model(x + 1).sum()
    model.backward(other)
    return loss + other


class Plain:
    """Stands in for the model in plain PyTorch."""

    def __init__(self, module, microbatches):
        self.module, self._microbatches = module, microbatches

    def __call__(self, x):
        return self.module(x)

    def backward(self, tensors, grad_tensors=None):
        torch.autograd.backward(tensors, grad_tensors)


def batch(rows=4):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 4, generator=generator, dtype=torch.float64)


def check(make, arguments, body):
    """Gradients and losses of this rank's partition are those of plain PyTorch."""
    torch.manual_seed(1)
    reference = make(*arguments)
    torch.manual_seed(1)
    model = smp.DistributedModel(make(*arguments))
    count = smp.state.cfg.microbatches
    plain = Plain(reference, count)
    losses = [body(plain, part).detach() for part in batch(2 * count).chunk(count)]
    result = smp.step(body)(model, batch(2 * count))
    for got, wanted in zip(result.outputs, losses, strict=True):
        torch.testing.assert_close(got, wanted)
        assert not got.requires_grad
    expected = dict(reference.named_parameters())
    own = list(model.local_named_parameters())
    for name, parameter in own:
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name].grad / count)
    return len(own)


MODELS = [
    (Chain, (1,), 1),
    (Chain, (2,), 2),
    (Chain, (4,), 4),
    (Nested, (), 2),
    (Reused, (), 2),
    (InTwoPlaces, (), 2),
    (Nests, (), 2),
    (Strides, (), 2),
    (InPlace, (), 2),
]


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("body", [mean, weighted, several, twice])
@pytest.mark.parametrize(("make", "arguments", "ranks"), MODELS)
def test_gradients(smp_world, make, arguments, ranks, body, pipeline):
    config = {
        **CONFIG,
        "pipeline_parallel_degree": ranks,
        "microbatches": 4 if ranks > 2 else 2,
        "pipeline": pipeline,
    }
    smp_world.run(check, make, arguments, body, ranks=ranks, config=config)


@pytest.mark.parametrize("active", [1, 2, 3])
def test_any_number_of_active_microbatches(smp_world, active):
    config = {
        **CONFIG,
        "pipeline_parallel_degree": 3,
        "microbatches": 6,
        "active_microbatches": active,
    }
    smp_world.run(check, Chain, (3,), mean, ranks=3, config=config)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn,
]  # fmt: skip


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        with partition(1):
            self.there = Returns()

    def forward(self, x, *values):
        return self.there(x, *values)


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, *values):
        return x * self.weight, *values


def every_dtype():
    model = smp.DistributedModel(Echo())

    @smp.step
    def step(model, x):
        values = [torch.ones(2, 3).to(dtype) for dtype in DTYPES]
        values += [torch.ones(3, 2).to(dtype).t() for dtype in DTYPES[:-1]]
        values += [torch.ones(()), torch.tensor([[]]), torch.conj(torch.ones(2) * 1j)]
        _, *got = model(x, *values)
        for sent, came in zip(values, got, strict=True):
            assert came.dtype is sent.dtype
            assert came.stride() == sent.stride()
            assert torch.equal(came.to(torch.complex128), sent.to(torch.complex128))
        return 0

    step(model, torch.ones(2))


def test_every_dtype_crosses(smp_world):
    smp_world.run(every_dtype, ranks=2, config={**CONFIG, "pipeline_parallel_degree": 2})


def results(detach):
    model = smp.DistributedModel(Chain(2))

    @smp.step(detach_outputs=detach)
    def step(model, x):
        y = model(x)
        return {"y": y, "nest": [y.sum(), {"text": "a"}], "n": len(x)}

    out = step(model, batch())
    first = smp.pp_rank() == 0
    assert out["n"] == [2, 2]
    assert out["nest"][1]["text"] == ["a", "a"]
    assert all(y.requires_grad == (first and not detach) for y in out["y"].outputs)
    return out["y"].concat().detach(), out["nest"][0].reduce_mean().item()


@pytest.mark.parametrize("detach", [True, False])
def test_results_on_every_rank(smp_world, detach):
    config = {**CONFIG, "pipeline_parallel_degree": 2}
    (first, mean_first), (second, mean_second) = smp_world.run(
        results, detach, ranks=2, config=config
    )
    assert torch.equal(first, second)
    assert mean_first == mean_second


def dummies():
    model = smp.DistributedModel(Chain(2))
    x = batch() if smp.pp_rank() == 0 else torch.zeros(4, 0)
    return smp.step(mean)(model, x).reduce_mean().item()


def test_only_the_driver_needs_data(smp_world):
    losses = smp_world.run(dummies, ranks=2, config={**CONFIG, "pipeline_parallel_degree": 2})
    assert losses[0] == losses[1]


def without_gradients(how):
    torch.manual_seed(1)
    reference = Nested()
    torch.manual_seed(1)
    model = smp.DistributedModel(Nested())
    seen = []

    @smp.step
    def step(model, x):
        y = model(x)
        seen.append(y.requires_grad)
        return y

    with how():
        out = step(model, batch())
    with torch.no_grad():
        expected = reference(batch())
    assert torch.allclose(out.concat(), expected)
    assert all(p.grad is None for p in model.local_parameters())
    return seen


@pytest.mark.parametrize(
    ("how", "grad"),
    [(torch.no_grad, False), (torch.inference_mode, False), (contextlib.nullcontext, True)],
)
def test_a_step_without_backward(smp_world, how, grad):
    config = {**CONFIG, "pipeline_parallel_degree": 2}
    driver, other = smp_world.run(without_gradients, how, ranks=2, config=config)
    assert driver == [grad, grad]
    assert other == []


def with_autocast():
    model = smp.DistributedModel(Chain(2).float())

    @smp.step
    def step(model, x):
        assert model.module.layers[0](x).dtype is torch.bfloat16
        y = model(x)
        assert y.dtype is torch.bfloat16
        model.backward(y.float().mean())

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=smp.pp_rank() == 0):
        step(model, batch().float())
    assert all(p.grad.dtype is torch.float32 for p in model.local_parameters())


def test_autocast_crosses(smp_world):
    smp_world.run(with_autocast, ranks=2, config={**CONFIG, "pipeline_parallel_degree": 2})


class Derived(nn.Linear):
    def forward(self, x):
        return super().forward(x) + self._orig_forward.__func__(self, x) * 0


def hooks():
    net = Chain(2)
    seen = []
    for index, layer in enumerate(net.layers):
        layer.register_forward_pre_hook(lambda *_, i=index: seen.append(("before", i)))
        layer.register_forward_hook(lambda *_, i=index: seen.append(("after", i)))
    model = smp.DistributedModel(net)

    @smp.step
    def step(model, x):
        return model(x), model.module.layers[1].forward(x)

    step(model, batch())
    plain = model.module.layers[0]._orig_forward
    assert plain.__func__ is nn.Linear.forward
    return seen


def test_forward_hooks_run_on_the_owner_alone(smp_world):
    driver, other = smp_world.run(hooks, ranks=2, config={**CONFIG, "pipeline_parallel_degree": 2})
    assert driver == [("before", 0), ("after", 0)] * 2
    assert other == [("before", 1), ("after", 1)] * 2


class Dropping(nn.Module):
    def __init__(self, second):
        super().__init__()
        self.first = linear(0)
        with partition(second):
            self.second = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Dropout(0.5))

    def forward(self, x):
        x = self.first(x) + torch.rand(4, dtype=x.dtype)
        y = self.second(nn.functional.dropout(x))
        return y * torch.rand(4, dtype=x.dtype)  # drawn after another microbatch's turn


def drops(second, pipeline):
    torch.manual_seed(5)
    model = smp.DistributedModel(Dropping(second))
    for _ in range(2):
        losses = smp.step(mean)(model, batch())
    drawn = torch.rand(()).item()
    weights = [p.grad for p in model.local_parameters()]
    return losses.outputs, drawn if smp.pp_rank() == 0 else None, weights


def test_random_numbers_do_not_depend_on_the_partition(smp_world):
    runs = [
        smp_world.run(
            drops,
            second,
            pipeline,
            ranks=ranks,
            config={**CONFIG, "pipeline_parallel_degree": ranks, "pipeline": pipeline},
        )
        for ranks, second in ((1, 0), (2, 0), (2, 1))
        for pipeline in ("simple", "interleaved")
    ]
    first, drawn, weights = runs[0][0]
    assert not torch.equal(*first)
    for run in runs:
        assert all(map(torch.equal, run[0][0], first))
        assert run[0][1] == drawn
        gathered = [gradient for rank in run for gradient in rank[2]]
        assert all(map(torch.equal, gathered, weights))


def kept_in_evaluation():
    model = smp.DistributedModel(Chain(2))
    outputs, most = [], 0

    def look(module, args, output):
        nonlocal most
        outputs.append(weakref.ref(output))
        most = max(most, sum(each() is not None for each in outputs))

    model.module.layers[1].register_forward_hook(look)

    @smp.step
    def step(model, x):
        return model(x).sum()

    step(model, batch(16))
    return most


def test_no_activations_are_kept_of_microbatches_that_are_over(smp_world):
    config = {
        **CONFIG,
        "pipeline_parallel_degree": 2,
        "microbatches": 8,
        "active_microbatches": 2,
    }
    _, most = smp_world.run(kept_in_evaluation, ranks=2, config=config)
    assert 1 <= most <= 3  # those in progress, and one whose end this rank has not been told
