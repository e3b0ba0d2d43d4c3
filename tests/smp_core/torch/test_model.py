"""smp.DistributedModel: its arguments, its hooks, and the order of a first step."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.errors import ArgumentError, ArgumentTypeError, SmpError
from smp_core.torch import model as smp_model
from smp_core.torch import state_mod
from smp_core.torch.exceptions import OutsideStepError, UnsupportedTrainingError
from smp_core.torch.module_view import ModuleView
from smp_core.torch.partitioning import partition, set_partition

CONFIG = {
    "pipeline_parallel_degree": 2,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
    "ddp": True,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        with partition(1):
            self.second = nn.Linear(2, 2)
            self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.second(self.first(x)))


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def what_is_local(model):
    return (
        [path for path, _ in model.local_named_modules()],
        [name for name, _ in model.local_named_parameters()],
        [name for name, _ in model.local_named_buffers()],
        len(list(model.local_modules())),
        len(list(model.local_parameters())),
        len(list(model.local_buffers())),
    )


def parts():
    model = smp.DistributedModel(Net())
    before = model.partitioned, what_is_local(model)
    train(model, torch.randn(4, 2))
    assert model.module.module is model.get_module() == model.module
    assert not list(model.distributed_modules())
    assert not list(model.scaled_batch_reducer_named_parameters())
    names = [name for name, _ in model.local_named_parameters()]
    assert [name for name, _ in model.default_reducer_named_parameters()] == names
    assert [name for name, _ in model.virtual_named_parameters()] == names
    for p in model.local_parameters():
        assert not model.is_distributed_parameter(p)
        assert not model.is_scaled_batch_parameter(p)
    for b in model.local_buffers():
        assert not model.is_distributed_buffer(b)
        assert not model.is_scaled_batch_buffer(b)
    elsewhere = [p for p in model.module.parameters() if p.numel() == 0]
    return before, (model.partitioned, what_is_local(model)), len(elsewhere)


def test_each_rank_holds_its_partition_alone(smp_world):
    everything = (
        ["", "first", "second", "norm"],
        ["first.weight", "first.bias", "second.weight", "second.bias", "norm.weight", "norm.bias"],
        ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"],
        *(4, 6, 3),
    )
    first = (["", "first"], everything[1][:2], [], 2, 2, 0)
    second = (["second", "norm"], everything[1][2:], everything[2], 2, 4, 3)
    results = smp_world.run(parts, ranks=4, config=CONFIG)
    for rank, (before, after, elsewhere) in enumerate(results):
        assert before == (False, everything)
        assert after == (True, first if rank % 2 == 0 else second)
        assert elsewhere == (4 if rank % 2 == 0 else 2)


def order_of_a_first_step():
    seen = []
    model = smp.DistributedModel(Net())
    model.module.first.register_forward_hook(lambda *_: seen.append("forward"))
    model.register_post_partition_hook(lambda m, o: seen.append(("partitioned", m is model, o)))
    model.register_post_partition_hook(lambda m, o: seen.append("never")).remove()
    model.register_post_step_hook(lambda m, o: seen.append(("stepped", m is model, o)))

    @smp.step
    def train(model, x):
        seen.append("traced" if smp.is_tracing() else "body")
        loss = model(x).mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        train(model, torch.randn(4, 2))
        seen.append("end")
    return seen


def test_the_first_step(smp_world):
    config = {**CONFIG, "pipeline": "simple"}
    driver, other = smp_world.run(order_of_a_first_step, ranks=2, config=config)
    hooks = ("partitioned", True, None), ("stepped", True, None)
    step = ["body", "forward", "body", "forward"]
    assert driver == ["traced", "forward", hooks[0], *step, hooks[1], "end", *step, "end"]
    assert other == [*hooks, "end", "end"]


def bad_arguments():
    def refused(kind, *args, **kwargs):
        with pytest.raises(kind):
            smp.DistributedModel(*args, **kwargs)

    refused(ArgumentTypeError, "module")
    refused(ArgumentError, Net(), trace_device="tpu")
    refused(ArgumentError, Net(), trace_device="cpu", trace_execution_times=True)
    refused(ArgumentError, Net(), backward_passes_per_step=0)
    refused(ArgumentTypeError, Net(), backward_passes_per_step=1.5)
    refused(ArgumentTypeError, Net(), bucket_cap_mb="big")
    refused(ArgumentError, Net(), bucket_cap_mb=0)
    refused(UnsupportedTrainingError, torch.jit.ScriptModule())
    smp.DistributedModel(  # none of them counts as the model
        Net(),
        trace_device="cpu",
        trace_execution_times=False,
        overlapping_allreduce=False,
        backward_passes_per_step=2,
        average_grads_across_microbatches=False,
        bucket_cap_mb=0.5,
        trace_memory_usage=True,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
    )


def test_arguments(smp_world):
    smp_world.run(bad_arguments, ranks=2, config=CONFIG)


def accumulated(average):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    reference = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    reference.load_state_dict(net.state_dict())
    set_partition(net[2], 1)
    model = smp.DistributedModel(
        net, backward_passes_per_step=3, average_grads_across_microbatches=average
    )
    steps = [torch.randn(4, 2) for _ in range(3)]
    for index, x in enumerate(steps):
        assert all(p.grad is None for p in model.local_parameters()), index
        train(model, x)
        for part in x.chunk(2):
            (reference(part).square().mean() / (2 if average else 1)).backward()
    expected = dict(reference.named_parameters())
    for name, p in model.local_named_parameters():
        torch.testing.assert_close(p.grad, expected[name].grad)


@pytest.mark.parametrize("average", [True, False])
def test_steps_are_summed_and_microbatches_averaged(smp_world, average):
    smp_world.run(accumulated, average, ranks=2, config=CONFIG)


def replicas():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 4, 2)
    reference = Net()
    reference.load_state_dict(net.state_dict())
    torch.manual_seed(smp.rank())
    for p in net.parameters():  # those of pp_rank 0 and dp_rank 0 count
        if smp.rank():
            nn.init.normal_(p)
    model = smp.DistributedModel(net)
    train(model, x[smp.dp_rank()])
    for batch in x:
        for part in batch.chunk(2):
            (reference(part).square().mean() / 4).backward()
    expected = dict(reference.named_parameters())
    for name, p in model.local_named_parameters():
        assert torch.equal(p, expected[name])
        torch.testing.assert_close(p.grad, expected[name].grad)


def test_replicas_average_their_gradients(smp_world):
    smp_world.run(replicas, ranks=4, config=CONFIG)


def facades():
    assert smp.state.cfg.microbatches == 2
    assert not smp.state.cfg.fp16
    assert smp.state.model is None
    model = smp.DistributedModel(Net())
    assert smp.state.model is model
    assert smp.state.optimizer is None
    assert not list(smp.state.module_manager.translate_functions)
    assert smp.core.initialized
    smp.core.barrier()
    assert not smp.is_tracing()
    assert smp_model.DistributedModel is smp.DistributedModel
    assert state_mod.state is smp.state


def test_what_scripts_read_of_the_inside(smp_world):
    smp_world.run(facades, ranks=2, config=CONFIG)


def outside(steps, **options):
    """Some calls outside of steps, and steps ("in"); the gradients at the end."""
    hooked = []
    model = smp.DistributedModel(nn.Linear(3, 2, dtype=torch.float64), **options)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(0.1, 0.9, p.numel(), dtype=torch.float64).view(p.shape))
    model.register_post_partition_hook(lambda m, o: hooked.append((m is model, o)))
    for index, where in enumerate(steps):
        x = torch.full((3, 3), 0.1 + 0.7 * index, dtype=torch.float64)
        if where == "in":
            train(model, x)
        else:
            model.backward(model(x).square().mean())
    assert hooked == [(True, None)]
    return [p.grad for p in model.parameters()]


def plain(batches, scale):
    model = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(0.1, 0.9, p.numel(), dtype=torch.float64).view(p.shape))
    for index in batches:
        x = torch.full((3, 3), 0.1 + 0.7 * index, dtype=torch.float64)
        scale(model(x).square().mean()).backward()
    return [p.grad for p in model.parameters()]


def test_a_backward_pass_outside_of_steps_is_divided_by_nothing(smp_world):
    """By microbatches, of which it has one; bit for bit, also where there would be three."""
    expected = plain([0], lambda loss: loss)
    config = {"microbatches": 3, "ddp": True}
    for ranks in (1, 2):  # of equal replicas, whose mean is exact
        for found in smp_world.run(outside, ["out"], ranks=ranks, config=config):
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs)


#: All terms are positive, so relative roundings add up. On each side a gradient has seen at most 20: 6 of the
#: forward pass, 3 of the loss, 3 of the rows, 2 of microbatches, 2 of passes, 1 of replicas, 3 of scaling.
BOUND = 2 * 20 * 2.0**-53 / (1 - 20 * 2.0**-53)


@pytest.mark.parametrize("steps", [["out", "in"], ["in", "out"], ["in", "in"], ["out", "out"]])
def test_steps_and_calls_outside_of_them_accumulate_their_averages(smp_world, steps):
    expected = plain([0, 1], lambda loss: loss)
    found = smp_world.run(
        outside,
        steps,
        ranks=2,
        config={"microbatches": 3, "ddp": True},
    )
    for one in found:
        for ours, theirs in zip(one, expected, strict=True):
            assert bool(((ours - theirs).abs() <= BOUND * theirs).all())
    with_passes = smp_world.run(_accumulated, steps, ranks=2, config={"microbatches": 3})
    for one in with_passes:
        for ours, theirs in zip(one, expected, strict=True):
            assert bool(((ours - theirs).abs() <= BOUND * theirs).all())


def _accumulated(steps):
    return outside(steps, backward_passes_per_step=2)


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Dropping(nn.Module):
    """With random numbers, which are counted by calls."""

    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Linear(3, 3, dtype=torch.float64), nn.Dropout()
        with partition(smp.pp_size() - 1):
            self.second = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        return self.second(self.drop(self.first(x)))


def copied(how):
    copies = {"copy": copy.deepcopy, "save": saved}
    torch.manual_seed(1)
    model = smp.DistributedModel(Dropping())
    x = torch.ones(4, 3, dtype=torch.float64)
    train(model, x)
    other = copies[how](model.module)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    model.zero_grad()

    @smp.step
    def both(model, x):
        with torch.no_grad():
            before = other(x)  # its calls are none of the model's
        loss = model(x).square().mean()
        model.backward(loss)
        return before

    torch.manual_seed(7)
    both(model, x)
    mine = {name: p.grad.clone() for name, p in model.local_named_parameters()}
    torch.manual_seed(7)
    model.zero_grad()
    train(model, x)
    for name, p in model.local_named_parameters():
        assert torch.equal(p.grad, mine[name])
    with torch.no_grad():
        return other(x).count_nonzero().item()


@pytest.mark.parametrize("how", ["copy", "save"])
def test_a_copy_of_the_wrapped_module_is_a_plain_module(smp_world, how):
    assert smp_world.run(copied, how, ranks=1, config={"microbatches": 2}) == [0]


def part_of_a_copy(how):
    copies = {"copy": copy.deepcopy, "save": saved}
    model = smp.DistributedModel(Dropping())
    x = torch.ones(4, 3, dtype=torch.float64)
    train(model, x)
    other = copies[how](model.module)
    texts = []
    for call in (lambda: other.first(x), lambda: other.second(x)):
        try:
            call()
            texts.append("")
        except OutsideStepError as error:
            texts.append(str(error))

    @smp.step
    def step(model, x):
        return other(x)

    with pytest.raises(SmpError, match="Load a state_dict"):
        step(model, x)
    return texts


@pytest.mark.parametrize("how", ["copy", "save"])
def test_a_copy_of_a_partition_says_what_it_lacks(smp_world, how):
    config = {**CONFIG, "skip_tracing": True}
    first, second = smp_world.run(part_of_a_copy, how, ranks=2, config=config)
    assert first[0] == second[1] == ""
    for text in (first[1], second[0]):
        assert "another pp rank owns it. Load a state_dict" in text


@pytest.mark.smp(ranks=1)
@pytest.mark.parametrize("copies", [copy.deepcopy, saved])
def test_the_model_itself_cannot_be_copied(smp, copies):
    model = smp.DistributedModel(nn.Linear(2, 2))
    with pytest.raises(UnsupportedTrainingError, match="cannot be copied, pickled or saved whole"):
        copies(model)


def innermost(module):
    """As transformers' unwrap_model does."""
    return innermost(module.module) if hasattr(module, "module") else module


@pytest.mark.parametrize(
    ("config", "wrappers"),
    [({}, 0), ({"ddp": True}, 1), ({"fp16": True}, 1), ({"ddp": True, "fp16": True}, 2)],
)
def test_the_module_stands_inside_of_the_wrappers_of_smp(smp_world, config, wrappers):
    def body():
        module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        model = smp.DistributedModel(module)
        assert innermost(model) is model.get_module() is module
        chain = [model]
        while hasattr(chain[-1], "module"):
            chain.append(chain[-1].module)
        assert len(chain) == wrappers + 2
        assert chain[-1] is module
        assert model.module is model.module
        for each in chain[1:]:
            assert isinstance(each, nn.Sequential)
            assert each == module
            assert hash(each) == hash(module)
            assert each
            assert (len(each), [*each], each[0]) == (2, [*module], module[0])
            x = torch.ones(1, 2, dtype=module[0].weight.dtype)
            assert torch.equal(each(x), module(x))
            assert each.state_dict().keys() == module.state_dict().keys()
            assert each.get_submodule("0") is module[0]
            assert type(copy.deepcopy(each)) is nn.Sequential
            assert repr(each) == repr(module)
            assert "forward" in dir(each)
            each.name = "name"
            assert vars(module).pop("name") == "name"
            each[1] = nn.Tanh()
            assert isinstance(module[1], nn.Tanh)
            each.extra = nn.Identity()
            assert "extra" in module._modules
            del each.extra
        module.add_module("module", nn.Identity())

    smp_world.run(body, ranks=2, config=config)


def test_a_view_of_a_module_makes_no_cycle():
    module = nn.Linear(2, 2)
    view, reference = ModuleView(ModuleView(module)), weakref.ref(module)
    assert view.module.module is module
    del module, view
    assert reference() is None
