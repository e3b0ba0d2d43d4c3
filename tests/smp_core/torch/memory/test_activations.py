"""Activation checkpointing: what it saves, and that it changes nothing else."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.errors import ArgumentError, ArgumentTypeError
from smp_core.torch import DistributedModel
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import PartitionError, UnsupportedTrainingError
from smp_core.torch.memory import recompute
from smp_core.torch.memory.activations import set_activation_checkpointing
from smp_core.torch.patches.checkpoint import checkpoint, checkpoint_sequential

MANUAL = {"auto_partition": False, "default_partition": 0, "skip_tracing": True}


# The mechanism, without ranks.


class Block(nn.Module):
    """Dropout, batch statistics, keyword and other arguments, a nest of outputs."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(width)
        self.calls = 0

    def forward(self, x, pair=(None, 1.0), *, text="", scale=1.0):
        self.calls += 1
        offset, factor = pair
        y = self.norm(self.dropout(torch.tanh(self.linear(x)) * scale)) * factor
        if offset is not None:
            y = y + offset
        return {"y": y, "more": (y * 2, None, text)}


def _loss(out, weight=1.0):
    return out["y"].sum() * weight + out["more"][0].pow(2).sum()


def _trained(module, call, microbatches=2):
    torch.manual_seed(7)
    inputs = [torch.randn(6, 4, requires_grad=True) for _ in range(microbatches)]
    offset = torch.randn(6, 4, requires_grad=True)
    losses = [
        _loss(call(module, x, (offset, 2.0), text="t", scale=0.5), index + 1.0)
        for index, x in enumerate(inputs)
    ]
    for loss in losses:
        loss.backward()
    grads = [each.grad for each in (*inputs, offset, *module.parameters())]
    return [*losses, *grads, *module.buffers(), torch.get_rng_state()]


def _same(one, two):
    assert len(one) == len(two)
    for index, (a, b) in enumerate(zip(one, two, strict=True)):
        assert torch.equal(a, b), index


def _run(module, *args, **kwargs):
    buffers = recompute.Buffers(module)
    return recompute.run("block", module, args, kwargs, buffers.restored)


def test_gradients_statistics_and_random_numbers_are_those_of_plain_calls():
    plain, checked = Block(), None
    checked = copy.deepcopy(plain)
    _same(_trained(plain, nn.Module.__call__), _trained(checked, _run))
    assert (plain.calls, checked.calls) == (2, 4)


class Nested(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.one, self.two = Block(), Block()
        self.call = call

    def forward(self, x, pair, *, text, scale):
        y = self.call(self.one, x, pair)["y"]
        return self.call(self.two, y, text=text, scale=scale)


def test_a_region_in_a_region():
    torch.manual_seed(0)
    plain = Nested(nn.Module.__call__)
    checked = copy.deepcopy(plain)
    checked.call = _run
    _same(_trained(plain, nn.Module.__call__), _trained(checked, _run))
    assert checked.one.calls == checked.two.calls == 2 * 3


def _kept(function):
    """Bytes of what autograd keeps of the function's call, each memory once."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function()
    del out
    return sum(kept.values())


def test_only_inputs_are_kept():
    layers = nn.Sequential(*(nn.Tanh() for _ in range(10)))
    x = torch.randn(100, requires_grad=True)
    assert _kept(lambda: layers(x)) == 10 * x.nbytes
    assert _kept(lambda: _run(layers, x)) == x.nbytes
    inner = nn.Sequential(*layers)
    outer = lambda: _run(_Calls(lambda y: _run(inner, torch.tanh(y))), x)  # noqa: E731
    assert _kept(outer) == x.nbytes


class _Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def test_nothing_is_left_after_backward():
    x = torch.randn(5, requires_grad=True)
    out = _run(nn.Sequential(nn.Tanh(), nn.Sigmoid()), x)
    out.sum().backward()
    alive = [
        each for each in gc.get_objects() if type(each) in (recompute._Region, recompute._Holder)
    ]
    assert alive == []


def test_outputs_whose_backward_passes_come_one_by_one_are_computed_once():
    block = _Calls(lambda x: (x.exp(), x.tanh()))
    calls = []
    block.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(3, requires_grad=True)
    one, two = _run(block, x)
    one.sum().backward()
    two.sum().backward()
    assert torch.equal(x.grad, x.detach().exp() + (1 - x.detach().tanh() ** 2))
    assert len(calls) == 2


def test_an_input_modified_in_place_is_refused():
    source = torch.randn(3, requires_grad=True)
    x = source * 2
    y = _run(_Calls(lambda x: x.exp()), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"an input of block was modified in place"):
        y.sum().backward()


def test_a_module_that_cannot_be_repeated_is_named():
    turns = iter([torch.tanh, lambda x: x[:2].exp()])
    x = torch.randn(3, requires_grad=True)
    y = _run(_Calls(lambda x: next(turns)(x)), x)
    with pytest.raises(RuntimeError, match=r"block is not repeatable: of 1 tensors .* number 0"):
        y.sum().backward()


def test_a_list_that_the_module_changes_is_changed_once():
    cache: list[torch.Tensor] = []

    def remember(x, cache):
        cache.append(x)
        return x.exp() * torch.tensor(float(len(cache)))

    x = torch.randn(3, requires_grad=True)
    _run(_Calls(remember), x, cache).sum().backward()
    assert len(cache) == 1
    assert torch.equal(x.grad, x.detach().exp())


def test_autocast_is_that_of_the_forward_pass():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append(y.dtype)
            return y.exp()

    x = torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = _run(Watched(4, 4), x)
    y.float().sum().backward()
    assert seen == [torch.bfloat16] * 2


# Arguments.


@pytest.mark.smp(ranks=1)
def test_bad_arguments(smp):
    linear, layers = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ArgumentTypeError, match="module is a function"):
        set_activation_checkpointing(lambda x: x)
    for arguments in ({"strategy": "contiguous"}, {"pack_args_as_tuple": True}):
        with pytest.raises(ArgumentError, match=r"are for torch\.nn\.Sequential"):
            set_activation_checkpointing(linear, **arguments)
    for strategy in ("group_0", "group_", "groups", "group_-1", ""):
        with pytest.raises(ArgumentError, match=r"must be 'each', 'contiguous', or 'group_N'"):
            set_activation_checkpointing(layers, strategy=strategy)
    with pytest.raises(ArgumentTypeError, match="strategy must be a str"):
        set_activation_checkpointing(layers, strategy=2)
    with pytest.raises(ArgumentTypeError, match="module is a function"):
        checkpoint(lambda x: x, torch.ones(1))
    with pytest.raises(ArgumentTypeError, match=r"sequential must be a torch\.nn\.Sequential"):
        checkpoint_sequential(linear, torch.ones(2))
    with pytest.raises(ArgumentError, match="pack_args_as_tuple=True"):
        checkpoint_sequential(layers, (torch.ones(2), torch.ones(2)))


@pytest.mark.smp(ranks=1)
@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2"])
def test_without_a_model(smp, strategy):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(1)
    layers(x).sum().backward()
    expected = [x.grad, *(p.grad for p in layers.parameters())]
    for each in (x, *layers.parameters()):
        each.grad = None
    torch.manual_seed(1)
    checkpoint_sequential(layers, x, strategy).sum().backward()
    _same(expected, [x.grad, *(p.grad for p in layers.parameters())])


# In a pipeline.


class Layer(nn.Module):
    """A layer with an own draw, a child called twice, dropout and statistics."""

    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.4)
        self.norm = nn.BatchNorm1d(width)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.dropout(self.inner(torch.tanh(self.inner(x))))
        return self.norm(x) + nn.functional.dropout(x, 0.5, self.training)


class Model(nn.Module):
    """Layers spread over two partitions: marked, called by checkpoint, and in a Sequential."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(1)
        self.how = how
        self.first, self.second = Layer(), Layer()
        self.layers = nn.Sequential(*(Layer() for _ in range(5)))
        self.head = nn.Linear(4, 1)
        placed = {self.first: 0, self.second: 1, self.head: 1}
        placed.update(zip(self.layers, (0, 0, 0, 1, 1), strict=True))
        for layer, index in placed.items():
            for each in layer.modules():
                each._smp_partition = index

    def forward(self, x):
        if self.how.startswith("call "):
            x = checkpoint(self.second, checkpoint(self.first, x))
            x = checkpoint_sequential(self.layers, x, self.how.removeprefix("call "))
        else:
            x = self.layers(self.second(self.first(x)))
        return self.head(x)


HOWS = ["call each", "call contiguous", "call group_2", "each", "contiguous", "group_2", "group_9"]


def _train(how, steps=2):
    model = DistributedModel(Model(how))
    module = model.module
    if how and not how.startswith("call "):
        set_activation_checkpointing(module.first)
        set_activation_checkpointing(module.second, preserve_rng_state=False)
        set_activation_checkpointing(module.layers, strategy=how)

    @smp.step
    def train(model, x):
        loss = model(x).mean()
        model.backward(loss)
        return loss

    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        losses.append(train(model, torch.randn(8, 4)).reduce_mean())
    mine = [*module.named_parameters(), *module.named_buffers()]
    state = {name: each.detach().clone() for name, each in mine if each.numel()}
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    calls = {name: each.calls for name, each in module.named_modules() if isinstance(each, Layer)}
    return torch.stack(losses), state, grads, calls


@pytest.mark.parametrize(("degree", "pipeline"), [(1, "simple"), (2, "interleaved")])
def test_a_pipeline_computes_the_same_bits(smp_world, degree, pipeline):
    config = {**MANUAL, "pipeline_parallel_degree": degree, "pipeline": pipeline, "microbatches": 4}
    plain = smp_world.run(_train, "", ranks=degree, config=config)
    assert sum(sum(calls.values()) for *_, calls in plain) == 2 * 4 * 7
    assert sum(len(grads) for _, _, grads, _ in plain) >= 7 * 4 + 2
    for how in HOWS:
        checked = smp_world.run(_train, how, ranks=degree, config=config)
        for (loss, state, grads, _), (loss2, state2, grads2, _) in zip(plain, checked, strict=True):
            assert torch.equal(loss, loss2), how
            for one, two in ((state, state2), (grads, grads2)):
                assert one.keys() == two.keys()
                for name in one:
                    assert torch.equal(one[name], two[name]), (how, name)
        # Everything ran twice: once for its value, and once in backward, and not a third time.
        assert sum(sum(calls.values()) for *_, calls in checked) == 2 * 2 * 4 * 7, how


def _split(auto):
    model = DistributedModel(Model(""))
    set_activation_checkpointing(model.module)

    @smp.step
    def train(model, x):
        loss = model(x).mean()
        model.backward(loss)
        return loss

    return train(model, torch.ones(4, 4)).reduce_mean().item()


def test_a_module_split_over_partitions_is_refused_on_every_rank(smp_world):
    config = {**MANUAL, "pipeline_parallel_degree": 2, "microbatches": 2}
    report = smp_world.report(_split, False, ranks=2, config=config)
    for outcome in report.outcomes:
        assert isinstance(outcome.error, PartitionError), outcome
        assert "split over the partitions [0, 1]" in str(outcome.error)
        assert "checkpoint its children" in str(outcome.error)


def _warned():
    model = DistributedModel(Model(""))
    set_activation_checkpointing(model)

    @smp.step
    def train(model, x):
        loss = model(x).mean()
        model.backward(loss)
        return loss

    if smp.pp_rank() == 0:
        with pytest.warns(UserWarning, match="its activations are kept"):
            train(model, torch.ones(4, 4))
    else:
        train(model, torch.ones(4, 4))
    layers = [each for each in model.module.modules() if isinstance(each, Layer)]
    before = sum(each.calls for each in layers)
    train(model, torch.ones(4, 4))  # warns once
    return sum(each.calls for each in layers) - before


def test_a_module_split_by_the_automatic_partition_keeps_its_activations(smp_world):
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    assert sum(smp_world.run(_warned, ranks=2, config=config)) == 2 * 7


class _Repeats(torch.autograd.Function):
    """A function that, as torch's own checkpoint does, calls the module in backward."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), gradient)
        return None, x.grad


class _Foreign(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.first, self.second = Layer(), Layer()
        for each in self.second.modules():
            each._smp_partition = owner

    def forward(self, x):
        return _Repeats.apply(self.second, self.first(x))


@pytest.mark.parametrize("owner", [0, 1])
def test_a_checkpoint_that_is_not_ours_is_refused(smp_world, owner):
    def body():
        model = DistributedModel(_Foreign(owner))

        @smp.step
        def train(model, x):
            loss = model(x).mean()
            model.backward(loss)
            return loss

        with pytest.raises(
            UnsupportedTrainingError, match="'second' was called during the backward"
        ):
            train(model, torch.ones(4, 4))

    smp_world.run(
        body, ranks=2, config={**MANUAL, "pipeline_parallel_degree": 2, "microbatches": 2}
    )


def test_the_timeline_shows_what_is_repeated(smp_world):
    def body():
        model = DistributedModel(Model(""))
        set_activation_checkpointing(model.module.second)

        @smp.step
        def train(model, x):
            loss = model(x).mean()
            model.backward(loss)
            return loss

        train(model, torch.ones(8, 4))
        events = sessions.current("test").timeline
        return sorted((each.microbatch, each.path) for each in events if each.recompute)

    config = {**MANUAL, "pipeline_parallel_degree": 2, "microbatches": 4}
    one, two = smp_world.run(body, ranks=2, config=config)
    assert one == []
    assert two == [(microbatch, "second") for microbatch in range(4)]
