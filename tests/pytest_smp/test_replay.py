"""The reference itself: against plain PyTorch where both must agree, and against the published order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_smp import replay


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1))


def test_a_module_that_uses_everything_once_has_the_bits_of_plain_pytorch() -> None:
    module, x = small(), torch.randn(12, 3, generator=torch.Generator().manual_seed(1))

    def body(part: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(part).pow(2).mean()
        loss.backward()
        return loss.detach()

    parts = [(part,) for part in x.chunk(3)]
    replayed = replay.gradients(module, body, parts)
    assert all(parameter.grad is None for parameter in module.parameters())
    losses = [body(*part) for part in parts]
    for name, parameter in module.named_parameters():
        assert torch.equal(replayed.gradients[name], parameter.grad)  # type: ignore[arg-type]
    assert torch.equal(torch.stack(replayed.results), torch.stack(losses))


def test_the_sum_over_microbatches_is_divided_once() -> None:
    module = nn.Linear(1, 1, bias=False)
    replayed = replay.gradients(
        module, lambda x: module(x).sum().backward(), [(torch.ones(1, 1),)] * 3, divisor=3
    )
    assert replayed.gradients["weight"] == torch.tensor([[1.0]])


def test_unused_and_frozen_parameters_have_none() -> None:
    module = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)])
    module[1].requires_grad_(False)
    replayed = replay.gradients(
        module, lambda x: module[0](module[1](x)).sum().backward(), [(torch.ones(1, 1),)]
    )
    assert {name for name, gradient in replayed.gradients.items() if gradient is not None} == {
        "0.weight",
        "0.bias",
    }


def test_a_shared_parameter_has_one_gradient_of_all_its_uses() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    with torch.no_grad():
        module[0].weight.copy_(torch.eye(2))
    replayed = replay.gradients(
        module, lambda x: module(x).sum().backward(), [(torch.tensor([[1.0, 3.0]]),)]
    )
    assert list(replayed.gradients) == ["0.weight"]
    assert torch.equal(replayed.gradients["0.weight"], torch.tensor([[2.0, 6.0], [2.0, 6.0]]))


def test_hooks_of_modules_run_once() -> None:
    module = nn.Sequential(nn.Identity())
    seen: list[str] = []
    module[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    module[0].register_forward_hook(lambda *_: seen.append("after"))
    replay.gradients(module, module, [(torch.ones(1),)])
    assert seen == ["before", "after"]


def test_patching_leaves_no_trace() -> None:
    module = small()
    before = {name: dict(vars(child)) for name, child in module.named_modules()}
    with replay.patched(module):
        module(torch.ones(1, 3))
        with pytest.raises(RuntimeError, match="module '' is patched or compiled already"):
            replay.patched(module).__enter__()
    assert {name: dict(vars(child)) for name, child in module.named_modules()} == before
    assert all(type(child._parameters) is dict for child in module.modules())


def test_replicas_are_folded_as_a_tree_in_float32_and_divided_once() -> None:
    # In bfloat16 256 + 1 is 256; ((256 + 1) + (1 + 0)) / 2 is 129 only if nothing was rounded before.
    values = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    reduced = replay.reduce([{"w": value} for value in values] + [{"w": None}], divisor=2)
    assert reduced["w"] is not None
    assert reduced["w"].dtype is torch.bfloat16
    assert reduced["w"].item() == 129.0
    assert replay.reduce([{"w": None}, {"w": None}], 2) == {"w": None}


def test_steps_of_accumulation_are_summed_in_order() -> None:
    u = 2.0**-24
    steps = [{"w": torch.tensor(value)} for value in (1.0, u, u)]
    assert replay.accumulate(steps)["w"] == torch.tensor(1.0)
    assert replay.accumulate(steps[::-1])["w"] == torch.tensor(1 + 2 * u)
    some = replay.accumulate([{"w": None, "v": None}, {"w": torch.tensor(2.0), "v": None}])
    assert some["v"] is None
    assert some["w"] == torch.tensor(2.0)
