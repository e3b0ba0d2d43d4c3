"""The calls of public scripts, in the words of scripts: for each attribute that docs/spec/api.md lists in section 7, a
program that uses it as they do, and checks what comes of it.

Each program begins with ``BEGINNING`` and runs on every rank of its world. ``folder`` is an empty one, the same on all
ranks. Expected values are those of the documentation, or are computed with plain PyTorch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: Ranks, and the dict that the scripts hand to ``smp.init``.
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (
        4,
        {
            "partitions": 2,
            "microbatches": 2,
            "placement_strategy": "spread",
            "pipeline": "interleaved",
            "optimize": "speed",
            "ddp": True,
        },
    ),
    "manual": (
        2,
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 2,
            "auto_partition": False,
            "default_partition": 0,
            "ddp": True,
        },
    ),
    "tensor": (4, {"tensor_parallel_degree": 2, "ddp": True}),
    "fp16": (2, {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "fp16": True}),
    "sharded": (2, {"sharded_data_parallel_degree": 2, "ddp": True}),
    "states": (2, {"shard_optimizer_state": True, "ddp": True, "prescaled_batch": False}),
}

BEGINNING = """
import os
import torch
import torch.nn as nn
import torch.nn.functional as F
import smdistributed.modelparallel.torch as smp

smp.init(config)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x):
        return F.log_softmax(self.second(torch.relu(self.first(x))), 1)


@smp.step
def train_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(loss)
    return output, loss


def net():
    torch.manual_seed(7)
    return Net()


def make(lr=0.5):
    model = smp.DistributedModel(net())
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), **LOSS)


LOSS = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 4.0, "scale_window": 1000}}
data = torch.arange(16.0).view(4, 4) / 8 - 1
target = torch.tensor([0, 1, 1, 0])


def plain_loss():
    return F.nll_loss(net()(data), target)


def has_gradients(model):
    return any(each.grad is not None for each in model.local_parameters())


def close(one, other):
    torch.testing.assert_close(one, other)
    return True
"""


class Call(NamedTuple):
    """A program that uses one attribute."""

    world: str
    program: str
    needs: str = ""  # a package that is not always there


_SAVED = """
model, optimizer = make()
train_step(model, data, target)
optimizer.step()
"""

#: By attribute, as the page spells it.
CALLS: dict[str, Call] = {
    # Ranks and sizes: under "spread" the partitions of a replica are as far apart as they can be (API 4.2).
    "rank": Call("pipeline", "assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1, 2, 3]"),
    "local_rank": Call("pipeline", "assert smp.local_rank() == smp.rank() % smp.local_size()"),
    "size": Call("pipeline", "assert smp.size() == 4"),
    "local_size": Call("pipeline", "assert 1 <= smp.local_size() <= smp.size()"),
    "pp_rank": Call("pipeline", "assert smp.allgather(smp.pp_rank(), smp.WORLD) == [0, 0, 1, 1]"),
    "pp_size": Call("pipeline", "assert smp.pp_size() == 2"),
    "mp_rank": Call("pipeline", "assert smp.allgather(smp.mp_rank(), smp.WORLD) == [0, 0, 1, 1]"),
    "mp_size": Call("tensor", "assert smp.mp_size() == smp.pp_size() * smp.tp_size() == 2"),
    "dp_rank": Call("pipeline", "assert smp.allgather(smp.dp_rank(), smp.WORLD) == [0, 1, 0, 1]"),
    "dp_size": Call(
        "pipeline",
        "sampler = torch.utils.data.distributed.DistributedSampler(\n"
        "    range(8), num_replicas=smp.dp_size(), rank=smp.dp_rank(), shuffle=False)\n"
        "assert list(sampler) == [[0, 2, 4, 6], [1, 3, 5, 7]][smp.dp_rank()]",
    ),
    "rdp_rank": Call("tensor", "assert smp.allgather(smp.rdp_rank(), smp.WORLD) == [0, 0, 1, 1]"),
    "rdp_size": Call("tensor", "assert smp.rdp_size() == smp.size() // smp.tp_size() == 2"),
    "tp_rank": Call("tensor", "assert smp.allgather(smp.tp_rank(), smp.WORLD) == [0, 1, 0, 1]"),
    "tp_size": Call("tensor", "assert smp.tp_size() == 2"),
    "get_tp_group": Call("tensor", "assert (0 in smp.get_tp_group()) == (smp.rank() in (0, 1))"),
    "get_mp_group": Call(
        "pipeline", "assert smp.get_mp_group() == [smp.dp_rank(), smp.dp_rank() + 2]"
    ),
    "get_dp_group": Call(
        "pipeline", "assert smp.get_dp_group() == [2 * smp.pp_rank(), 2 * smp.pp_rank() + 1]"
    ),
    # Process groups.
    **{
        f"get_{kind}_process_group": Call(
            "tensor" if kind in ("tp", "rdp") else "pipeline",
            "x = torch.tensor([2.0 ** smp.rank()])\n"
            f"torch.distributed.all_reduce(x, group=smp.get_{kind}_process_group())\n"
            f"members = smp.allgather(smp.rank(), smp.CommGroup.{group})\n"
            "assert x.item() == sum(2.0 ** each for each in members)",
        )
        for kind, group in (
            ("world", "WORLD"),
            ("mp", "MP_GROUP"),
            ("dp", "DP_GROUP"),
            ("pp", "PP_GROUP"),
            ("tp", "TP_GROUP"),
            ("rdp", "RDP_GROUP"),
        )
    },
    # Groups and rank types.
    "WORLD": Call("pipeline", "smp.barrier(smp.WORLD)\nassert smp.WORLD is smp.CommGroup.WORLD"),
    "MP_GROUP": Call(
        "pipeline",
        "assert smp.allgather(smp.rank(), smp.MP_GROUP) == smp.get_mp_group()",
    ),
    "DP_GROUP": Call(
        "pipeline",
        "losses = smp.allgather(0.5 + smp.dp_rank(), group=smp.DP_GROUP)\n"
        "assert sum(losses) / len(losses) == 1.0",
    ),
    "PP_GROUP": Call(
        "pipeline",
        "if smp.pp_rank() == 0:\n"
        "    smp.broadcast([data, target], smp.PP_GROUP)\n"
        "else:\n"
        "    data, target = smp.recv_from(0, smp.RankType.PP_RANK)\n"
        "assert data.shape == (4, 4)",
    ),
    "TP_GROUP": Call(
        "tensor",
        "whole = torch.cat(smp.allgather(torch.tensor([smp.tp_rank()]), smp.TP_GROUP))\n"
        "assert whole.tolist() == [0, 1]",
    ),
    "CommGroup.DP_GROUP": Call(
        "pipeline", "assert len(smp.allgather(smp.rank(), smp.CommGroup.DP_GROUP)) == 2"
    ),
    **{
        f"RankType.{kind.upper()}_RANK": Call(
            "tensor" if kind in ("tp", "rdp") else "pipeline",
            f"me, n = smp.{kind}_rank(), smp.{size}()\n"
            "if me == 0:\n"
            "    for peer in range(1, n):\n"
            f"        smp.send({{'from': smp.rank()}}, peer, smp.RankType.{kind.upper()}_RANK)\n"
            "else:\n"
            f"    got = smp.recv_from(0, rank_type=smp.RankType.{kind.upper()}_RANK)\n"
            f"    assert got == {{'from': smp.get_{kind}_group()[0]}}",
        )
        for kind, size in (
            ("pp", "pp_size"),
            ("tp", "tp_size"),
            ("rdp", "rdp_size"),
            ("dp", "dp_size"),
        )
    },
    "RankType.WORLD_RANK": Call(
        "pipeline",
        "if smp.rank() == 0:\n"
        "    smp.broadcast('go', smp.WORLD)\n"
        "else:\n"
        "    assert smp.recv_from(0, smp.RankType.WORLD_RANK) == 'go'",
    ),
    # Communication.
    "send": Call(
        "pipeline",
        "if smp.rank() == 1:\n"
        "    smp.send(data, 3, smp.RankType.WORLD_RANK)\n"
        "if smp.rank() == 3:\n"
        "    assert torch.equal(smp.recv_from(1, smp.RankType.WORLD_RANK), data)",
    ),
    "recv_from": Call(
        "pipeline",
        "if smp.dp_rank() == 0:\n"
        "    smp.broadcast({'lr': 0.1}, smp.DP_GROUP)\n"
        "else:\n"
        "    assert smp.recv_from(0, smp.RankType.DP_RANK) == {'lr': 0.1}",
    ),
    "broadcast": Call(
        "pipeline",
        "if smp.mp_rank() == 1:\n"
        "    smp.broadcast(7, group=smp.MP_GROUP)\n"
        "else:\n"
        "    assert smp.recv_from(1, rank_type=smp.RankType.MP_RANK) == 7",
    ),
    "allgather": Call(
        "pipeline", "assert smp.allgather([smp.rank()], smp.WORLD) == [[0], [1], [2], [3]]"
    ),
    "barrier": Call(
        "pipeline",
        "path = os.path.join(folder, 'made')\n"
        "if smp.rank() == 0:\n"
        "    open(path, 'w').close()\n"
        "smp.barrier()\n"
        "assert os.path.exists(path)",
    ),
    "dp_barrier": Call("pipeline", "assert smp.dp_barrier() is None"),
    "mp_barrier": Call("pipeline", "assert smp.mp_barrier() is None"),
    "core.barrier": Call("pipeline", "smp.core.barrier()"),
    "core.initialized": Call("pipeline", "assert smp.core.initialized is True"),
    # Initialization.
    "init": Call(
        "pipeline", "assert smp.is_initialized() and smp.state.cfg.pipeline_parallel_degree == 2"
    ),
    "is_initialized": Call("pipeline", "assert smp.is_initialized()"),
    "is_tracing": Call("pipeline", "assert smp.is_tracing() is False"),
    # The step.
    "step": Call(
        "pipeline",
        "@smp.step()\n"
        "def test_step(model, data, target):\n"
        "    output = model(data)\n"
        "    return {'loss': F.nll_loss(output, target), 'size': len(data)}\n"
        "model, optimizer = make()\n"
        "result = test_step(model, data, target)\n"
        "assert close(result['loss'].reduce_mean(), plain_loss().detach())\n"
        "assert result['size'] == [2, 2]",
    ),
    "outputs": Call(
        "pipeline",
        "model, optimizer = make()\n"
        "_, loss = train_step(model, data, target)\n"
        "assert len(tuple(loss.outputs)) == 2\n"
        "assert close(sum(loss.outputs) / 2, plain_loss().detach())",
    ),
    "reduce_mean": Call(
        "pipeline",
        "model, optimizer = make()\n"
        "_, loss = train_step(model, data, target)\n"
        "assert abs(loss.reduce_mean().item() - plain_loss().item()) < 1e-6",
    ),
    "reduce_sum": Call(
        "pipeline",
        "model, optimizer = make()\n"
        "_, loss = train_step(model, data, target)\n"
        "assert close(loss.reduce_sum(), 2 * plain_loss().detach())",
    ),
    "stack": Call(
        "pipeline",
        "model, optimizer = make()\n"
        "output, _ = train_step(model, data, target)\n"
        "assert close(output.stack(), net()(data).detach().view(2, 2, 2))",
    ),
    "input_split_axes": Call(
        "pipeline",
        "@smp.step(input_split_axes={'data': 1}, non_split_inputs=['bias'], detach_outputs=True)\n"
        "def run(model, data, bias):\n"
        "    return model(data.t()) + bias\n"
        "model, optimizer = make()\n"
        "bias = torch.ones(2)\n"
        "assert close(run(model, data.t(), bias).concat(), (net()(data) + 1).detach())",
    ),
    "detach_outputs": Call(
        "pipeline",
        "@smp.step(detach_outputs=False)\n"
        "def run(model, data):\n"
        "    output = model(data)\n"
        "    model.backward(output.sum())\n"
        "    return output\n"
        "model, optimizer = make()\n"
        "assert close(run(model, data).concat().detach(), net()(data).detach())",
    ),
    "num_microbatches": Call("pipeline", "assert smp.num_microbatches() == 2"),
    # The model.
    "DistributedModel": Call(
        "pipeline",
        "model = smp.DistributedModel(net(), trace_device='gpu', average_grads_across_microbatches=True)\n"
        "assert isinstance(model, nn.Module) and not model.partitioned\n"
        "train_step(model, data, target)\n"
        "assert model.partitioned",
    ),
    "model.DistributedModel": Call(
        "pipeline",
        "assert isinstance(make()[0], smp.model.DistributedModel)\n"
        "assert smp.model.DistributedModel is smp.DistributedModel",
    ),
    "model.backward": Call(
        "pipeline",
        "model, optimizer = make()\n"
        "train_step(model, data, target)\n"
        "module = net()\n"
        "F.nll_loss(module(data), target).backward()\n"
        "expected = {name: each.grad for name, each in module.named_parameters()}\n"
        "for name, parameter in model.local_named_parameters():\n"
        "    assert close(parameter.grad, expected[name])",
    ),
    "register_post_partition_hook": Call(
        "pipeline",
        "seen = []\n"
        "model, optimizer = make()\n"
        "model.register_post_partition_hook(\n"
        "    lambda model, optimizer: seen.append((model, optimizer, has_gradients(model))))\n"
        "assert not seen\n"
        "train_step(model, data, target)\n"
        "train_step(model, data, target)\n"
        "assert seen == [(model, optimizer, False)]",
    ),
    "register_post_step_hook": Call(
        "pipeline",
        "seen = []\n"
        "model, optimizer = make()\n"
        "model.register_post_step_hook(\n"
        "    lambda model, optimizer: seen.append((model, optimizer, has_gradients(model))))\n"
        "train_step(model, data, target)\n"
        "train_step(model, data, target)\n"
        "assert seen == [(model, optimizer, True)]",
    ),
    "local_parameters": Call(
        "pipeline",
        "model, optimizer = make()\n"
        "train_step(model, data, target)\n"
        "counts = smp.allgather(sum(each.numel() for each in model.local_parameters()), smp.PP_GROUP)\n"
        "assert sum(counts) == sum(each.numel() for each in net().parameters())\n"
        "if len(list(model.local_parameters())) > 0:\n"
        "    optimizer.step()",
    ),
    "get_module": Call(
        "fp16",
        "module = net()\nmodel = smp.DistributedModel(module)\nassert model.get_module() is module\n"
        "assert model.module.module.module is module  # under SMP's wrappers of ddp and fp16",
    ),
    "local_state_dict": Call(
        "pipeline",
        _SAVED + "part = model.local_state_dict()\n"
        "assert part.pop('_smp_is_partial') is True\n"
        "names = [name for each in smp.allgather(sorted(part), smp.PP_GROUP) for name in each]\n"
        "assert sorted(names) == sorted(net().state_dict())",
    ),
    "load_state_dict": Call(
        "pipeline",
        "model, optimizer = make()\n"
        "state = {name: torch.ones_like(each) for name, each in net().state_dict().items()}\n"
        "state['_smp_is_partial'] = False\n"
        "model.load_state_dict(state, strict=True)\n"
        "train_step(model, data, target)\n"
        "assert all((each == 1).all() for each in model.local_parameters())",
    ),
    "is_distributed_parameter": Call(
        "tensor",
        "with smp.tensor_parallelism():\n"
        "    first = nn.Linear(4, 4)\n"
        "model = smp.DistributedModel(nn.Sequential(first, nn.Linear(4, 2)))\n"
        "found = {name for name, each in model.named_parameters() if model.is_distributed_parameter(each)}\n"
        "assert {name.rpartition('module.')[2] for name in found} == {'0.weight'}",
    ),
    "cpu": Call(
        "pipeline",
        _SAVED + "state = model.state_dict()\nassert model.cpu() is model\n"
        "for name, parameter in model.get_module().named_parameters():\n"
        "    assert torch.equal(parameter.detach(), state[name])",
    ),
    "join": Call(
        "pipeline",
        "model, optimizer = make()\n"
        "steps = 0\n"
        "with model.join():\n"
        "    for _ in range(1 + smp.dp_rank()):\n"
        "        train_step(model, data, target)\n"
        "        steps += 1\n"
        "assert steps == 1 + smp.dp_rank()",
    ),
    "register_comm_hook": Call(
        "states",
        "def hook(state, bucket):\n"
        "    buffer = bucket.buffer().div_(smp.dp_size())\n"
        "    work = torch.distributed.all_reduce(buffer, group=state, async_op=True)\n"
        "    return work.get_future().then(lambda future: future.value()[0])\n"
        "model, optimizer = make()\n"
        "model.register_comm_hook(smp.get_dp_process_group(), hook)\n"
        "train_step(model, data, target)\n"
        "module = net()\n"
        "F.nll_loss(module(data), target).backward()\n"
        "assert close(model.get_module().first.weight.grad, module.first.weight.grad)",
    ),
    # The optimizer.
    "DistributedOptimizer": Call(
        "pipeline",
        "model, optimizer = make()\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)\n"
        "optimizer.zero_grad()\n"
        "train_step(model, data, target)\n"
        "optimizer.step()\n"
        "scheduler.step()\n"
        "assert optimizer.param_groups[0]['lr'] == 0.25\n"
        "module = net()\n"
        "F.nll_loss(module(data), target).backward()\n"
        "for name, parameter in model.local_named_parameters():\n"
        "    plain = module.get_parameter(name)\n"
        "    assert close(parameter.detach(), (plain - 0.5 * plain.grad).detach())",
    ),
    "optimizer.overflow": Call(
        "fp16",
        "model, optimizer = make()\n"
        "train_step(model, data, target)\n"
        "optimizer.step()\n"
        "assert optimizer.overflow is False\n"
        "optimizer.loss_scale = 2.0 ** 60\n"
        "train_step(model, data, target)\n"
        "optimizer.step()\n"
        "assert optimizer.overflow is True",
    ),
    "clip_master_grads": Call(
        "fp16",
        "model, optimizer = make()\n"
        "train_step(model, data, target)\n"
        "norm = optimizer.clip_master_grads(1e-3)\n"
        "module = net()\n"
        "F.nll_loss(module(data), target).backward()\n"
        "whole = torch.nn.utils.get_total_norm([each.grad for each in module.parameters()])\n"
        "assert abs(norm.item() / whole.item() - 1) < 2 ** -8\n"
        "optimizer.step()\n"
        "optimizer.loss_scale = 2.0 ** 60\n"
        "train_step(model, data, target)\n"
        "assert optimizer.clip_master_grads(1.0) == -1",
    ),
    # Building the model.
    "model_creation": Call(
        "tensor",
        "with smp.model_creation(\n"
        "    tensor_parallelism=smp.tp_size() > 1, dtype=torch.float32, attention_in_fp32=False,\n"
        "    query_key_layer_scaling=False, fused_softmax=True, fused_dropout=True, fused_bias_gelu=True,\n"
        "):\n"
        "    module = net()\n"
        "model = smp.DistributedModel(module)\n"
        "assert isinstance(module.first, smp.nn.DistributedLinear)",
    ),
    "partition": Call(
        "manual",
        "class Parts(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        with smp.partition(1):\n"
        "            self.late = nn.Linear(4, 4)\n"
        "        self.early = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        return self.late(self.early(x))\n"
        "model = smp.DistributedModel(Parts())\n"
        "@smp.step\n"
        "def step(model, data):\n"
        "    model.backward(model(data).sum())\n"
        "step(model, data)\n"
        "names = {name.partition('.')[0] for name, _ in model.local_named_parameters()}\n"
        "assert names == {'late' if smp.pp_rank() == 1 else 'early'}",
    ),
    "set_partition": Call(
        "manual",
        "model, optimizer = make()\n"
        "module = model.get_module()\n"
        "smp.set_partition(module.second, 1)\n"
        "train_step(model, data, target)\n"
        "names = {name.partition('.')[0] for name, _ in model.local_named_parameters()}\n"
        "assert names == {'second' if smp.pp_rank() == 1 else 'first'}",
    ),
    "set_tensor_parallelism": Call(
        "tensor",
        "module = net()\n"
        "smp.set_tensor_parallelism(module.first, True)\n"
        "model = smp.DistributedModel(module)\n"
        "assert isinstance(module.first, smp.nn.DistributedLinear)\n"
        "assert type(module.second) is nn.Linear",
    ),
    "tensor_parallelism": Call(
        "tensor",
        "with smp.tensor_parallelism(enabled=True):\n"
        "    module = net()\n"
        "model = smp.DistributedModel(module)\n"
        "assert module.first.weight.shape == (8, 4 // smp.tp_size())",
    ),
    "delay_param_initialization": Call(
        "pipeline",
        "with smp.delay_param_initialization():\n"
        "    module = net()\n"
        "assert all(each.is_meta for each in module.parameters())\n"
        "model = smp.DistributedModel(module)\n"
        "train_step(model, data, target)\n"
        "expected = net().state_dict()\n"
        "for name, parameter in model.local_named_parameters():\n"
        "    assert torch.equal(parameter.detach(), expected[name])",
    ),
    "register_parameter": Call(
        "sharded",
        "class Reads(nn.Module):\n"
        "    def forward(self, x, owner):\n"
        "        return x @ owner.weight.t()\n"
        "class Shares(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.reads = nn.Linear(4, 4), Reads()\n"
        "        smp.register_parameter(self.reads, self.first.weight)\n"
        "    def forward(self, x):\n"
        "        return self.reads(self.first(x), self.first)\n"
        "torch.manual_seed(7)\n"
        "module = Shares()\n"
        "expected = module(data).detach()\n"
        "model = smp.DistributedModel(module)\n"
        "@smp.step\n"
        "def step(model, data):\n"
        "    output = model(data)\n"
        "    model.backward(output.sum())\n"
        "    return output\n"
        "assert close(step(model, data).concat(), expected)",
    ),
    "tp_register": Call(
        "tensor",
        "@smp.tp_register(smp.nn.DistributedLinear, init_hook=lambda width: ((width, width), {}))\n"
        "class Square(nn.Linear):\n"
        "    def __init__(self, width):\n"
        "        super().__init__(width, width)\n"
        "with smp.tensor_parallelism():\n"
        "    module = nn.Sequential(Square(4))\n"
        "smp.DistributedModel(module)\n"
        "assert type(module[0]) is smp.nn.DistributedLinear",
    ),
    "tp_register_with_module": Call(
        "tensor",
        "class Square(nn.Linear):\n"
        "    def __init__(self, width):\n"
        "        super().__init__(width, width)\n"
        "smp.tp_register_with_module(\n"
        "    Square, smp.nn.DistributedLinear, lambda width: ((width, width), {}),\n"
        "    forward_hook=lambda input: ((input,), {}), return_hook=lambda output: output)\n"
        "with smp.tensor_parallelism():\n"
        "    module = nn.Sequential(Square(4))\n"
        "model = smp.DistributedModel(module)\n"
        "assert type(module[0]) is smp.nn.DistributedLinear\n"
        "assert model(data).shape == (4, 4)",
    ),
    "nn.DistributedTransformer": Call(
        "tensor",
        "torch.manual_seed(7)\n"
        "layers = smp.nn.DistributedTransformer(\n"
        "    num_layers=2, num_attention_heads=2, attention_head_size=2, hidden_size=4, intermediate_size=8)\n"
        "model = smp.DistributedModel(layers)\n"
        "hidden, mask = model((data.view(2, 2, 4), None))\n"
        "assert hidden.shape == (2, 2, 4) and mask is None\n"
        "assert len(layers.seq_layers) == 2",
    ),
    "nn.FusedLayerNorm": Call(
        "tensor",
        "from smdistributed.modelparallel.torch.nn import FusedLayerNorm\n"
        "module = nn.Sequential(nn.Linear(4, 4), FusedLayerNorm(4, eps=1e-5), nn.LayerNorm(4))\n"
        "assert [isinstance(each, FusedLayerNorm) for each in module] == [False, True, False]\n"
        "assert torch.equal(module[1](data), nn.LayerNorm(4, eps=1e-5)(data))",
    ),
    "nn.huggingface": Call(
        "tensor",
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (\n"
        "    translate_hf_state_dict_to_smdistributed_gpt2, translate_state_dict_to_hf_gpt2)\n"
        "config = GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=4, vocab_size=8)\n"
        "state = GPT2LMHeadModel(config).state_dict()\n"
        "ours = translate_hf_state_dict_to_smdistributed_gpt2(state)\n"
        "assert 'transformer.seq_layers.0.attention.query.weight' in ours\n"
        "theirs = translate_state_dict_to_hf_gpt2(ours, max_seq_len=None)\n"
        "assert all(torch.equal(theirs[name], each) for name, each in state.items())\n"
        "from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (  # before SMP 1.10\n"
        "    translate_hf_state_dict_to_smdistributed)\n"
        "from smdistributed.modelparallel.torch.nn.huggingface.gptj import (\n"
        "    translate_hf_gptj_state_dict_to_smdistributed)\n"
        "assert translate_hf_state_dict_to_smdistributed(state).keys() == ours.keys()",
        "transformers",
    ),
    "set_activation_checkpointing": Call(
        "pipeline",
        "module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))\n"
        "model = smp.DistributedModel(module)\n"
        "smp.set_activation_checkpointing(\n"
        "    model.get_module(), pack_args_as_tuple=False, strategy='each')\n"
        "@smp.step\n"
        "def step(model, data):\n"
        "    loss = model(data).sum()\n"
        "    model.backward(loss)\n"
        "    return loss\n"
        "assert len(step(model, data).outputs) == 2",
    ),
    **{
        name: Call(
            "sharded",
            f"from smdistributed.modelparallel.torch.patches.checkpoint import {name}\n"
            "class Checkpointed(Net):\n"
            "    def forward(self, x):\n"
            f"        hidden = {call}\n"
            "        return F.log_softmax(self.second(torch.relu(hidden)), 1)\n"
            "torch.manual_seed(7)\n"
            "module = Checkpointed()\n"
            f"{wrap}\n"
            "model = smp.DistributedModel(module)\n"
            "_, loss = train_step(model, data, target)\n"
            "assert close(loss.reduce_mean(), plain_loss().detach())",
        )
        for name, call, wrap in (
            ("checkpoint", "checkpoint(self.first, x, preserve_rng_state=True)", ""),
            (
                "checkpoint_sequential",
                "checkpoint_sequential(self.first, x, strategy='contiguous')",
                "module.first = nn.Sequential(module.first)",
            ),
        )
    },
    "amp.GradScaler": Call(
        "pipeline",
        "@smp.step\n"
        "def scaled_step(model, scaler, data, target):\n"
        "    with torch.autocast('cpu', enabled=False):\n"
        "        loss = F.nll_loss(model(data), target)\n"
        "    model.backward(scaler.scale(loss))\n"
        "    return loss\n"
        "scaler = smp.amp.GradScaler()\n"
        "model, optimizer = make()\n"
        "scaled_step(model, scaler, data, target)\n"
        "scaler.step(optimizer)\n"
        "scaler.update()\n"
        "module = net()\n"
        "F.nll_loss(module(data), target).backward()\n"
        "for name, parameter in model.local_named_parameters():\n"
        "    plain = module.get_parameter(name)\n"
        "    assert close(parameter.detach(), (plain - 0.5 * plain.grad).detach())",
    ),
    "hvd_average_grads": Call(
        "pipeline",
        "model, optimizer = make()\n"
        "train_step(model, data + smp.dp_rank(), target)\n"
        "before = [each.grad.clone() for each in model.local_parameters()]\n"
        "smp.hvd_average_grads()\n"
        "for each, gradient in zip(model.local_parameters(), before):\n"
        "    assert torch.equal(each.grad, gradient)\n"
        "    assert all(torch.equal(gradient, other) for other in smp.allgather(gradient, smp.DP_GROUP))",
    ),
    # State.
    "state.cfg": Call("pipeline", "assert smp.state.cfg.microbatches == 2"),
    "state.cfg.fp16": Call("fp16", "assert smp.state.cfg.fp16 is True"),
    "state.cfg.shard_optimizer_state": Call(
        "states", "assert smp.state.cfg.shard_optimizer_state is True"
    ),
    "state.cfg.sharded_data_parallel_degree": Call(
        "sharded", "assert smp.state.cfg.sharded_data_parallel_degree > 1"
    ),
    "state.cfg.prescaled_batch": Call("states", "assert not smp.state.cfg.prescaled_batch"),
    "state_mod.state": Call(
        "states",
        "from smdistributed.modelparallel.torch.state_mod import state as smp_state\n"
        "assert smp_state is smp.state and smp_state.cfg.shard_optimizer_state",
    ),
    "state.module_manager.translate_functions": Call(
        "tensor",
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "config = GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=4, vocab_size=8)\n"
        "with smp.model_creation(tensor_parallelism=True):\n"
        "    module = GPT2LMHeadModel(config)\n"
        "model = smp.DistributedModel(module)\n"
        "state = model.state_dict()\n"
        "for translate, _ in smp.state.module_manager.translate_functions:\n"
        "    state = translate(state)\n"
        "assert GPT2LMHeadModel(config).load_state_dict(state) is not None",
        "transformers",
    ),
    "utils.get_distribution_axis": Call(
        "tensor",
        "from smdistributed.modelparallel.torch.utils import get_distribution_axis\n"
        "with smp.tensor_parallelism():\n"
        "    first = nn.Linear(4, 2)\n"
        "model = smp.DistributedModel(nn.Sequential(first))\n"
        "axes = {name[-6:]: get_distribution_axis(each) for name, each in model.named_parameters()}\n"
        "assert axes == {'weight': 1, '0.bias': None}",
    ),
    **{
        f"optimizers.{name}": Call(
            "pipeline",
            f"from smdistributed.modelparallel.torch.optimizers import {name}\n"
            "model = smp.DistributedModel(net())\n"
            f"optimizer = smp.DistributedOptimizer({name}(\n"
            "    model.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.01))\n"
            "train_step(model, data, target)\n"
            "optimizer.step()\n"
            "module = net()\n"
            f"plain = {name}(module.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)\n"
            "F.nll_loss(module(data), target).backward()\n"
            "plain.step()\n"
            "for parameter_name, parameter in model.local_named_parameters():\n"
            "    assert close(parameter.detach(), module.get_parameter(parameter_name).detach())",
        )
        for name in ("FusedLAMB", "FusedNovoGrad")
    },
    # Checkpoints.
    "save": Call(
        "pipeline",
        "import pickle\n" + _SAVED + "name = os.path.join(folder, 'model.pt')\n"
        "state = {'epoch': 3, 'model_state_dict': model.local_state_dict()}\n"
        "if smp.dp_rank() == 0:\n"
        "    smp.save(state, name, True, pickle, pickle_protocol=2)\n"
        "smp.barrier()\n"
        "assert os.path.isfile(name + '_' + str(smp.mp_rank()))\n"
        "if smp.rank() == 0:\n"
        "    smp.save(net().state_dict(), name, partial=False)\n"
        "    assert torch.equal(torch.load(name)['first.weight'], net().first.weight)",
    ),
    "load": Call(
        "sharded",
        _SAVED + "name = os.path.join(folder, 'optimizer.pt')\n"
        "state = optimizer.local_state_dict(gather_if_shard=False)\n"
        "smp.save({'optimizer': state, 'rank': smp.rank()}, name, partial=True, v3=True)\n"
        "smp.barrier()\n"
        "found = smp.load(name, map_location='cpu', partial=True, back_compat=False)\n"
        "assert found['rank'] == smp.rank()\n"
        "optimizer.load_state_dict(found['optimizer'])",
    ),
    "save_checkpoint": Call(
        "pipeline",
        _SAVED + "smp.save_checkpoint(\n"
        "    folder, tag='step_1.pt', partial=True, model=model, optimizer=optimizer,\n"
        "    user_content={'step': 1}, num_kept_partial_checkpoints=2)\n"
        "smp.barrier()\n"
        "assert 'model_0.pt' in os.listdir(os.path.join(folder, 'step_1.pt_partial'))\n"
        "with open(os.path.join(folder, 'newest')) as file:\n"
        "    newest = file.read()\n"
        "assert os.path.isdir(os.path.join(folder, newest))",
    ),
    "resume_from_checkpoint": Call(
        "manual",
        _SAVED + "before = model.state_dict()\n"
        "smp.save_checkpoint(\n"
        "    folder, tag='last', partial=True, model=model, optimizer=optimizer, user_content={'step': 1})\n"
        "optimizer.step()\n"
        "content = smp.resume_from_checkpoint(\n"
        "    folder, tag=None, partial=True, strict=True, load_optimizer=True)\n"
        "assert content == {'step': 1}\n"
        "after = model.state_dict()\n"
        "assert all(torch.equal(after[name], each) for name, each in before.items())",
    ),
}

#: The attribute that TensorFlow's scripts use, and PyTorch has not.
TENSORFLOW = {"CheckpointManager"}
