"""Properties of distributed transformer layers, compared with the layer by its definition in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import smp_core.torch as smp
from conformance.cases.draws import needs
from conformance.cases.training import trials
from conformance.cases.transformers import LayerCase, State, expected, layers, loss_of
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from smp_core.torch import observe


@smp.step
def train_step(model: smp.DistributedModel, inputs: tuple[Tensor | None, ...]) -> Tensor:
    output: Tensor = model(inputs)[0]
    model.backward(loss_of(output))
    return output


def share() -> int:
    """The number of this rank's batch."""
    return smp.rdp_rank() if smp.state.cfg.prescaled_batch else smp.dp_rank()


def layer_of(case: LayerCase) -> nn.Module:
    """The distributed layer of a case."""
    options: dict[str, Any] = case.options
    return smp.nn.DistributedTransformerLayer(**options)


def trained(case: LayerCase) -> tuple[Tensor, State]:
    """The output of this rank's batch, and the gradients of whole weights."""
    torch.set_default_dtype(torch.float64)
    model = smp.DistributedModel(layer_of(case))
    model.load_state_dict(case.state())
    hidden, cross, masked = case.batch(share())
    mask = masked if case.padded else None
    inputs = (hidden, cross, mask, None) if case.others else (hidden, mask)
    output: Tensor = train_step(model, inputs).concat()
    with torch.no_grad():
        for parameter in model.local_parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    return output.detach(), {name: each.clone() for name, each in model.state_dict().items()}


def agree(smp_world: SmpWorld, case: LayerCase) -> list[tuple[Tensor, State]]:
    """Train the layer, compare all ranks with the definition, and return what they have."""
    __tracebackhide__ = True
    found = smp_world.run(trained, case, ranks=case.ranks, config=case.config)
    truth, coarse = (expected(case, dtype) for dtype in (torch.float64, torch.float32))
    # Of all values: some gradients are differences of these that are zero but for rounding.
    scale = max(float(each.abs().max()) for each in (*truth[0], *truth[1].values()))
    for rank, (output, gradients) in enumerate(found):
        number = rank // case.degree if case.prescaled else rank
        near(f"rank {rank}: output", output, coarse[0][number], truth[0][number], scale)
        assert gradients.keys() == truth[1].keys()
        for name, value in truth[1].items():
            what = f"rank {rank}: gradient of {name}"
            near(what, gradients[name], coarse[1][name], value, scale)
    return found


def near(what: str, value: Tensor, coarse: Tensor, truth: Tensor, scale: float) -> None:
    """Assert that an error is at most four times that of float32 (ENGINES 2.2)."""
    __tracebackhide__ = True
    unit = torch.finfo(torch.float32).eps * scale
    bound = 4 * max(float((coarse.double() - truth).abs().max()), unit)
    error = float((value - truth).abs().max())
    assert error <= bound, f"{what}: an error of {error:.2g}, where float32 has {bound / 4:.2g}"


@requirement("TP-TRANSFORMER")
@given(data=st.data())
@trials(8)
def test_a_layer_is_that_of_one_process(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject
) -> None:
    needs(smp_world, 2)
    agree(smp_world, data.draw(layers(smp_world.ranks), "case"))


@requirement("TP-TRANSFORMER")
@given(data=st.data())
@trials(4)
def test_each_sample_has_its_own_mask(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject
) -> None:
    needs(smp_world, 2)
    drawn = data.draw(layers(smp_world.ranks), "case")
    length = max(3, drawn.length)
    agree(smp_world, dataclasses.replace(drawn, prescaled=False, padded=True, length=length))


@requirement("TP-OPTIMIZE")
@given(data=st.data())
@trials(3)
def test_speed_and_memory_hold_other_bytes(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject
) -> None:
    needs(smp_world, 2)
    drawn = data.draw(layers(smp_world.ranks), "case")
    # Hidden states that are wider than the intermediate channels and the heads.
    sizes: dict[str, Any] = {
        "prescaled": True,
        "others": 0,
        "channels": 8 * drawn.degree,
        "inner": drawn.degree,
    }
    sizes |= {"heads": drawn.degree, "size": 1, "rows": 2, "length": 4, "parallel": False}
    case = dataclasses.replace(drawn, **sizes)
    held = {
        optimize: smp_world.run(
            bytes_held,
            dataclasses.replace(case, optimize=optimize),
            ranks=case.ranks,
            config={**case.config, "optimize": optimize},
        )
        for optimize in ("speed", "memory")
    }
    whole = case.rows * case.length * case.channels * 4
    for speed, memory in zip(held["speed"], held["memory"], strict=True):
        assert sum(memory[0]) < sum(speed[0]), f"kept for backward: {memory[0]}, and {speed[0]}"
        assert max(memory[0]) < whole <= max(speed[0]), f"kept: {memory[0]}, of which {whole}"
        assert memory[1] > speed[1], f"sent: {memory[1]} bytes, and {speed[1]}"


def bytes_held(case: LayerCase) -> tuple[list[int], int]:
    """The bytes of each activation that a forward pass keeps for backward, and of all that a step sends."""
    model = smp.DistributedModel(layer_of(case))
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    hidden, _, masked = case.batch(share())
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    sent = observe.tensor_traffic(model)
    mark = sent.mark()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model((hidden.float().requires_grad_(), masked if case.padded else None))[0]
    model.backward(loss_of(output))
    return list(kept.values()), sent.bytes(mark)


@requirement("TP-DROPOUT")
@pytest.mark.parametrize("prescaled", [False, True])
@given(data=st.data())
@trials(3)
def test_dropout_follows_the_split(
    smp_world: SmpWorld, smp_engine: str, prescaled: bool, data: st.DataObject
) -> None:
    needs(smp_world, 2)
    drawn = data.draw(layers(smp_world.ranks), "case")
    sizes: dict[str, Any] = {"channels": 32 * drawn.degree, "rows": 2, "length": 4}
    case = dataclasses.replace(drawn, prescaled=prescaled, **sizes)
    found = smp_world.run(masks, case, ranks=case.ranks, config=case.config)
    for rank, kept in enumerate(found):
        parts = {part.numpy().tobytes() for part in kept.chunk(case.degree, -1)}
        assert len(parts) == case.degree, f"rank {rank}: slices of channels are dropped alike"
        if case.prescaled:
            first = found[rank // case.degree * case.degree]
            assert torch.equal(kept, first), f"rank {rank}: another mask than its TP group's first"


def masks(case: LayerCase) -> Tensor:
    """The channels that a block's dropout keeps, on a rank that a script has seeded by its number."""
    torch.manual_seed(case.seed + smp.rank())
    block = smp.nn.DistributedTransformerOutputLayer(
        case.channels, case.inner, 0.5, "relu", pre_layernorm=True, post_layernorm=False
    )
    model = smp.DistributedModel(block)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert block.dense2.bias is not None
        block.dense2.bias.fill_(1)
    zeros = torch.zeros(case.rows, case.length, case.channels)
    kept: Tensor = block_step(model, zeros).concat() != 0
    return kept


@smp.step
def block_step(model: smp.DistributedModel, hidden: Tensor) -> Tensor:
    output: Tensor = model(hidden)
    model.backward(output.sum())
    return output
