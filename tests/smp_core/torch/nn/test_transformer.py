"""The transformer modules of ``smp.nn`` against torch's own encoder and decoder layers.

Both compute in float64, and may differ by the rounding of sums in another order. The bound is the error of torch's own
layer in float32, which is greater than any such rounding by orders of magnitude, and smaller than any defect.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as api
from smp_core.torch.parameters.split import split_of

BATCH, LENGTH, OTHER, HEADS, HIDDEN, INNER = 2, 5, 3, 4, 16, 32
SHAPE = {
    "num_attention_heads": HEADS,
    "attention_head_size": HIDDEN // HEADS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def attention_state(prefix: str, attention: nn.MultiheadAttention, norm: nn.LayerNorm, ln: str):
    """The state of torch's attention under the names of a distributed one."""
    state = {}
    for name in ("weight", "bias"):
        parts = getattr(attention, f"in_proj_{name}").chunk(3)
        for part, which in zip(parts, ("query", "key", "value"), strict=True):
            state[f"{prefix}.{which}.{name}"] = part
        state[f"{prefix}.dense.{name}"] = getattr(attention.out_proj, name)
        state[f"{prefix}.{ln}.{name}"] = getattr(norm, name)
    return state


def state_of(layer, gradients: bool = False):
    """The state, or the gradients, of one of torch's layers under the names of a distributed one."""
    if gradients:
        for each in layer.parameters():
            each.data = each.grad
    ln = "pre_layernorm" if layer.norm_first else "layernorm"
    state = attention_state("attention", layer.self_attn, layer.norm1, ln)
    last = layer.norm2
    if isinstance(layer, nn.TransformerDecoderLayer):
        state |= attention_state("cross_attention", layer.multihead_attn, layer.norm2, ln)
        last = layer.norm3
    for name in ("weight", "bias"):
        state[f"output.dense1.{name}"] = getattr(layer.linear1, name)
        state[f"output.dense2.{name}"] = getattr(layer.linear2, name)
        state[f"output.{ln}.{name}"] = getattr(last, name)
    return {name: value.detach().clone() for name, value in state.items()}


class Reference:
    """One of torch's layers, and all that a test compares, in one dtype."""

    def __init__(self, cross: bool, pre: bool, mask: str, shares: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        kind = nn.TransformerDecoderLayer if cross else nn.TransformerEncoderLayer
        options = {"activation": "gelu", "batch_first": True, "norm_first": pre, "dropout": 0.0}
        layer = kind(HIDDEN, HEADS, INNER, **options).to(dtype)
        self.state = state_of(layer)
        self.inputs = [
            tuple(
                each.to(dtype).requires_grad_()
                for each in (
                    drawn(BATCH, LENGTH, HIDDEN, seed=2 * number + 1),
                    drawn(BATCH, OTHER, HIDDEN, seed=2 * number + 2),
                )
            )
            for number in range(shares)
        ]
        self.padding = [
            torch.arange(LENGTH) >= torch.tensor([[LENGTH - number % 3], [LENGTH - 1]])
            for number in range(shares)
        ]
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.outputs = []
        for (hidden, other), padding in zip(self.inputs, self.padding, strict=True):
            pad = padding if "padding" in mask else None
            masked = causal if "causal" in mask else None
            if cross:
                found = layer(hidden, other, tgt_mask=masked, tgt_key_padding_mask=pad)
            else:
                found = layer(hidden, src_mask=masked, src_key_padding_mask=pad)
            self.outputs.append(found)
        sum(loss_of(each) for each in self.outputs).div(shares).backward()
        self.gradients = state_of(layer, gradients=True)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return (output * weights).sum() + output.square().sum()


class Several(nn.ModuleList):
    """A layer for each case: a script has one model."""

    def forward(self, *inputs):
        return [layer(each)[0] for layer, each in zip(self, inputs, strict=True)]


@api.step
def train_step(model, *inputs):
    outputs = model(*inputs)
    model.backward(sum(loss_of(each) for each in outputs))
    return outputs


def close(what: str, ours: torch.Tensor, coarse: torch.Tensor, truth: torch.Tensor) -> None:
    """Assert that a value is nearer to the truth than torch's own in float32."""
    bound = (coarse.double() - truth).abs().max()
    assert (ours - truth).abs().max() <= bound, (what, ours - truth, bound)


#: By layer: if it attends to other states, if it normalises before its blocks, and its mask.
CASES = [
    (False, False, "none"),
    (False, True, "causal"),
    (False, False, "causal and padding"),
    (True, True, "padding"),
    (True, False, "causal"),
]


def body() -> None:
    torch.set_default_dtype(torch.float64)
    api.init()
    config = api.state.cfg
    shares = api.rdp_size() if config.prescaled_batch else api.dp_size()
    share = api.rdp_rank() if config.prescaled_batch else api.dp_rank()
    layers, truths, coarse, inputs = Several(), [], [], []
    state = {}
    for number, (cross, pre, mask) in enumerate(CASES):
        truths.append(truth := Reference(cross, pre, mask, shares, torch.float64))
        coarse.append(Reference(cross, pre, mask, shares, torch.float32))
        options = {
            "causal_mask_size": LENGTH if "causal" in mask else None,
            "add_cross_attention": cross,
            "pre_layernorm": pre,
            "post_layernorm": not pre,
        }
        layers.append(api.nn.DistributedTransformerLayer(**SHAPE, **options))
        state |= {f"{number}.{name}": value for name, value in truth.state.items()}
        hidden, other = (each.detach().clone().requires_grad_() for each in truth.inputs[share])
        padding = truth.padding[share] if "padding" in mask else None
        inputs.append((hidden, other, padding, None) if cross else (hidden, padding))
    model = api.DistributedModel(layers)
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state)
    outputs = train_step(model, *inputs)
    for number, (output, near, truth) in enumerate(zip(outputs, coarse, truths, strict=True)):
        close(f"output {number}", output.concat(), near.outputs[share], truth.outputs[share])
    for name, parameter in model.local_named_parameters():
        number, _, below = name.partition(".")
        found = split_of(parameter)
        gradients = (each[int(number)].gradients[below] for each in (coarse, truths))
        expected = [each if found is None else found.slice_of(each) for each in gradients]
        close(name, parameter.grad, *expected)


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize("prescaled", [False, True], ids=["own batches", "prescaled"])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_layer_computes_as_torchs_does(smp_world, degree, prescaled, optimize):
    config = {
        "tensor_parallel_degree": degree,
        "ddp": True,
        "prescaled_batch": prescaled,
        "optimize": optimize,
    }
    smp_world.run(body, ranks=4, config=config)


def repeated() -> None:
    """Blocks of a layer are modules that are called, so that each can be checkpointed by itself, and has hooks."""
    api.init()
    layer = api.nn.DistributedTransformerLayer(**SHAPE)
    model = api.DistributedModel(layer)
    api.set_activation_checkpointing(layer.attention)
    called = []
    layer.output.register_forward_hook(lambda *_: called.append("output"))
    layer.attention.layernorm.register_forward_hook(lambda *_: called.append("norm"))
    x = drawn(BATCH, LENGTH, HIDDEN, seed=1).requires_grad_()
    train_one(model, x)
    assert called == ["norm", "output", "norm"]


@api.step
def train_one(model, x):
    output = model((x, None))[0]
    model.backward(loss_of(output))
    return output


def test_the_blocks_of_a_layer_are_called_as_modules(smp_world):
    smp_world.run(repeated, ranks=2, config={"tensor_parallel_degree": 2, "ddp": True})


def called_alone() -> None:
    """A layer of a stack that a script calls gives what the stack of this layer alone gives."""
    torch.set_default_dtype(torch.float64)
    api.init()
    stack = api.nn.DistributedTransformer(1, **SHAPE)
    model = api.DistributedModel(stack)
    x = drawn(BATCH, LENGTH, HIDDEN, seed=api.rank())
    mask = torch.arange(LENGTH) >= torch.tensor([[LENGTH - api.rank()], [LENGTH - 1]])
    model.eval()
    assert torch.equal(stack.seq_layers[0]((x, mask))[0], model((x, mask))[0])


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_a_layer_of_a_stack_may_be_called_alone(smp_world, optimize):
    config = {"tensor_parallel_degree": 2, "ddp": True, "optimize": optimize}
    smp_world.run(called_alone, ranks=2, config=config)


def wide(dtype: torch.dtype, autocast: bool) -> None:
    """A residual that a 16-bit sum cannot hold; a layer of 16-bit weights, or under autocast."""
    api.init()
    options = {"pre_layernorm": True, "post_layernorm": False, "fp32_residual_addition": True}
    stack = api.nn.DistributedTransformer(2, **SHAPE, **options, attention_in_fp32=True)
    model = api.DistributedModel(stack if autocast else stack.to(dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for layer, bias in zip(stack.seq_layers, (2.0**15, -(2.0**15)), strict=True):
            layer.output.dense2.bias.fill_(bias)
    model.eval()
    x = torch.full((BATCH, LENGTH, HIDDEN), 2.0**15, dtype=torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        output = model((x, None))[0]
    # Between the layers the residual is 2 ** 16, which float16 has not.
    assert output.dtype is x.dtype
    assert torch.equal(output, x)


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_a_layer_computes_in_16_bits(smp_world, dtype, autocast, optimize):
    config = {"tensor_parallel_degree": 2, "ddp": True, "optimize": optimize}
    smp_world.run(wide, dtype, autocast, ranks=2, config=config)


@pytest.mark.parametrize("optimize", ["memory", "speed"])
def test_layer_norms_are_of_the_class_by_which_scripts_find_them(smp_world, optimize):
    """Scripts give no weight decay to the parameters of such modules, and to biases."""

    def body():
        layer = api.nn.DistributedTransformerLayer(**SHAPE)
        return {
            name.rpartition(".")[2]
            for name, module in layer.named_modules()
            if isinstance(module, api.nn.FusedLayerNorm)
        }

    config = {"tensor_parallel_degree": 2, "ddp": True, "optimize": optimize}
    for found in smp_world.run(body, ranks=2, config=config):
        assert found == {"layernorm"}
