"""Which modules are distributed, and how hooks translate their calls."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import smp_core.torch as api
from smp_core.torch import fused

CONFIG = {"tensor_parallel_degree": 2, "ddp": True}


def distributed(module: nn.Module) -> list[str]:
    return [
        path
        for path, child in module.named_modules()
        if isinstance(child, api.nn.DistributedModule)
    ]


def test_the_innermost_context_counts(smp_world):
    def body():
        with api.tensor_parallelism():
            on = nn.Linear(2, 2)
            with api.tensor_parallelism(False):
                off = nn.Linear(2, 2)
                with api.model_creation(tensor_parallelism=True):
                    again = nn.Linear(2, 2)
            later = nn.Linear(2, 2)
        outside = nn.Linear(2, 2)
        model = api.DistributedModel(nn.Sequential(on, off, again, later, outside))
        return distributed(model.module)

    assert smp_world.run(body, ranks=2, config=CONFIG) == [["0", "2", "3"]] * 2


def test_the_last_word_of_set_tensor_parallelism_counts_and_covers_the_subtree(smp_world):
    def body():
        module = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
        api.set_tensor_parallelism(module)
        api.set_tensor_parallelism(module[0], False)
        api.set_tensor_parallelism(module[0][1])
        return distributed(api.DistributedModel(module).module)

    assert smp_world.run(body, ranks=2, config=CONFIG) == [["0.1", "1"]] * 2


class Scaled(nn.Module):
    """A linear layer with a factor, that takes its input and returns its output in a dict."""

    def __init__(self, size, *, factor=1.0):
        super().__init__()
        self.inner, self.factor = nn.Linear(size, size, bias=False), factor

    def forward(self, *, given):
        return {"value": self.inner(given) * self.factor}


class DistributedScaled(api.nn.DistributedModule):
    def __init__(self, features, factor):
        super().__init__()
        self.inner, self.factor = api.nn.DistributedLinear(features, features, bias=False), factor

    def forward(self, x):
        return self.inner(x) * self.factor


def test_hooks_translate_arguments_and_values_of_the_outermost_module(smp_world):
    def body():
        @api.tp_register(
            DistributedScaled,
            init_hook=lambda size, *, factor=1.0: ((size,), {"factor": factor}),
            forward_hook=lambda *, given: ((given,), {}),
            return_hook=lambda value: {"value": value},
        )
        class Mine(Scaled):
            pass

        class Heir(Mine):
            pass

        with api.tensor_parallelism():
            module = nn.ModuleDict({"mine": Mine(4, factor=3.0), "heir": Heir(4)})
        assert type(module["mine"]) is Mine
        model = api.DistributedModel(module)
        found = distributed(model.module)
        weight = torch.arange(16.0).view(4, 4)
        state = {"mine.inner.weight": weight, "heir.inner.weight": weight}
        model.load_state_dict(state)
        x = torch.eye(4)
        value = model.module["mine"](given=x)["value"]
        assert torch.equal(value, weight.t() * 3)
        assert [type(each).__name__ for each in model.distributed_modules()] == [
            "DistributedScaled",
            "DistributedLinear",
        ]
        return found

    # A subclass is none of the registered class: its linear layer is distributed by itself.
    expected = ["mine", "mine.inner", "heir.inner"]
    assert smp_world.run(body, ranks=2, config=CONFIG) == [expected] * 2


def test_at_degree_one_a_wished_layer_keeps_its_weights(smp_world):
    def body():
        torch.manual_seed(api.rank())
        with api.tensor_parallelism():
            layer = nn.Linear(3, 2)
        weight = layer.weight.detach().clone()
        model = api.DistributedModel(layer)
        if api.rank() == 0:  # the others get its weights
            assert torch.equal(model.module.weight, weight)
        return type(model.get_module()).__name__

    assert smp_world.run(body, ranks=2, config={"ddp": True}) == ["DistributedLinear"] * 2


def test_at_degree_one_a_registered_class_keeps_weights_of_the_same_names(smp_world, caplog):
    def body():
        api.tp_register_with_module(
            Scaled, DistributedScaled, init_hook=lambda size: ((size,), {"factor": 1.0})
        )
        api.tp_register_with_module(Pair, DistributedPair)
        with api.tensor_parallelism():
            module = nn.ModuleDict({"mine": Scaled(4), "pair": Pair(4)})
        weight = module["mine"].inner.weight.detach().clone()
        model = api.DistributedModel(module)
        assert torch.equal(model.module["mine"].inner.weight, weight)
        return [type(each).__name__ for each in model.module.values()]

    found = smp_world.run(body, ranks=1, config={"ddp": True})
    assert found == [["DistributedScaled", "DistributedPair"]]
    assert "have new weights, because their entries differ in name or shape: pair" in caplog.text


class PlainScaled(nn.Module):
    """A distributed class that is no ``smp.nn.DistributedModule``: it has neither splits nor ``tp_size``."""

    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size, bias=False)


class PlainPair(nn.Module):
    """Another one, whose entries have other names than those of ``Pair``."""

    def __init__(self, size):
        super().__init__()
        self.both = nn.Linear(size, 2 * size)


def test_at_degree_one_a_plain_registered_class_keeps_its_weights_or_is_named(smp_world, caplog):
    def body():
        api.tp_register_with_module(Scaled, PlainScaled)
        api.tp_register_with_module(Pair, PlainPair)
        with api.tensor_parallelism():
            module = nn.ModuleDict({"mine": Scaled(4), "pair": Pair(4)})
        weight = module["mine"].inner.weight.detach().clone()
        model = api.DistributedModel(module)
        assert torch.equal(model.module["mine"].inner.weight, weight)
        return [type(each).__name__ for each in model.module.values()]

    assert smp_world.run(body, ranks=1, config={"ddp": True}) == [["PlainScaled", "PlainPair"]]
    assert "have new weights, because their entries differ in name or shape: pair" in caplog.text


def test_at_degree_one_an_entry_that_the_distributed_class_lacks_is_left_out(smp_world):
    def body():
        with api.tensor_parallelism():
            layer = nn.Linear(3, 2)
        layer.register_buffer("calls", torch.zeros(1))
        weight = layer.weight.detach().clone()
        return torch.equal(api.DistributedModel(layer).module.weight, weight)

    assert smp_world.run(body, ranks=1, config={"ddp": True}) == [True]


def test_initial_weights_are_the_same_at_every_degree(smp_world):
    def body():
        torch.manual_seed(3)
        with api.tensor_parallelism():
            module = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4))
        torch.manual_seed(4)
        return api.DistributedModel(module).state_dict()

    ways = [
        smp_world.run(body, ranks=4, config={"tensor_parallel_degree": degree, "ddp": True})
        for degree in (2, 4)
    ]
    first = ways[0][0]
    for state in (each for way in ways for each in way):
        assert all(torch.equal(state[name], first[name]) for name in first)


def test_the_reducers_parameters(smp_world):
    def body():
        with api.tensor_parallelism():
            layer = nn.Linear(4, 4)
        model = api.DistributedModel(nn.Sequential(layer, nn.LayerNorm(4)))
        names = {id(each): name for name, each in model.named_parameters()}
        split = [name for name, _ in model.scaled_batch_reducer_named_parameters()]
        whole = [name for name, _ in model.default_reducer_named_parameters()]
        assert split == ["0.weight"]
        assert whole == ["0.bias", "1.weight", "1.bias"]
        for each in model.parameters():
            on = names[id(each)] == "module.0.weight"
            assert model.is_distributed_parameter(each) is on
            assert model.is_scaled_batch_parameter(each) is on

    smp_world.run(body, ranks=2, config=CONFIG)


def test_a_copy_of_a_distributed_module_is_one(smp_world):
    def body():
        layer = api.nn.DistributedLinear(4, 4)
        model = api.DistributedModel(nn.Sequential(*(copy.deepcopy(layer) for _ in range(2))))
        weight = torch.arange(16.0).view(4, 4)
        state = {
            f"{n}.{name}": value
            for n in "01"
            for name, value in (("weight", weight), ("bias", weight[0]))
        }
        model.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(model.is_distributed_parameter(each.weight) for each in model.module)

    smp_world.run(body, ranks=2, config=CONFIG)


@pytest.mark.filterwarnings("ignore::smp_core.torch.fused.PlainEquivalentWarning")
def test_options_reach_the_modules_that_take_them(smp_world):
    def body():
        api.tp_register_with_module(
            Scaled,
            DistributedScaled,
            init_hook=lambda size, *, factor=1.0: ((size,), {"factor": factor}),
        )
        with api.tensor_parallelism(factor=5.0, fused_softmax=True):
            module = nn.Sequential(Scaled(4), nn.Linear(4, 4))
        model = api.DistributedModel(module)
        return model.module[0].factor

    assert smp_world.run(body, ranks=2, config=CONFIG) == [5.0] * 2


def test_an_option_for_a_kernel_of_cuda_warns_once(smp_world, monkeypatch):
    monkeypatch.setattr(fused, "_told", set())

    def body():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                with api.model_creation(
                    tensor_parallelism=True, fused_softmax=True, fused_dropout=False
                ):
                    pass
                api.set_tensor_parallelism(nn.Linear(4, 4), flash_attention=True)
                api.set_tensor_parallelism(nn.Linear(4, 4), False, fused_dropout=True)
                api.nn.DistributedTransformerOutputLayer(8, 16, fused_bias_gelu=True)
        return [(str(each.message).partition(":")[0], each.filename) for each in found]

    names = ["fused_softmax=True", "flash_attention=True", "fused_bias_gelu=True"]
    assert smp_world.run(body, ranks=1) == [[(name, __file__) for name in names]]


class Pair(nn.Module):
    """Two parameters, of which the distributed module has one by the same name."""

    def __init__(self, size):
        super().__init__()
        self.inner, self.factor = nn.Linear(size, size), nn.Parameter(torch.ones(1))


class DistributedPair(api.nn.DistributedModule):
    def __init__(self, size):
        super().__init__()
        self.inner = api.nn.DistributedLinear(size, size)
        self.scale = nn.Parameter(torch.ones(1))


def test_frozen_parameters_stay_frozen(smp_world, caplog):
    def body():
        api.tp_register_with_module(Pair, DistributedPair)
        with api.tensor_parallelism():
            module = nn.ModuleDict(
                {
                    "linear": nn.Linear(4, 4),
                    "table": nn.Embedding(4, 4),
                    "pair": Pair(4),
                    "odd": Pair(4),
                    "whole": Pair(4),
                }
            )
        for name in ("linear.weight", "table.weight", "pair.inner.bias", "odd.factor"):
            module.get_parameter(name).requires_grad_(False)
        module["whole"].requires_grad_(False)
        model = api.DistributedModel(module)
        kinds = {name: type(each).__name__ for name, each in model.module.items()}
        assert kinds.pop("odd") == "Pair"
        assert all(kind.startswith("Distributed") for kind in kinds.values())
        return [name for name, each in model.module.named_parameters() if not each.requires_grad]

    expected = [
        "linear.weight",
        "table.weight",
        "pair.inner.bias",
        "odd.factor",
        *("whole.scale", "whole.inner.weight", "whole.inner.bias"),
    ]
    assert smp_world.run(body, ranks=2, config=CONFIG) == [expected] * 2
    assert "odd: its frozen parameter 'factor' has no counterpart" in caplog.text


@api.step
def penalised(model, x):
    output = model(x).pow(3).sum()
    (gradient,) = torch.autograd.grad(output, x, create_graph=True)
    model.backward(gradient.square().sum())


def test_gradients_of_gradients(smp_world):
    def body():
        torch.manual_seed(1)
        reference = nn.Linear(4, 2).double()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) % 5 - 2.0)
        layer = nn.Linear(4, 2).double()
        api.set_tensor_parallelism(layer)
        model = api.DistributedModel(layer)
        model.load_state_dict(reference.state_dict())
        batches = [
            (torch.arange(8.0, dtype=torch.float64).view(2, 4) % 3 - n).requires_grad_()
            for n in range(2)
        ]
        penalised(model, batches[api.dp_rank()])
        for x in batches:
            output = reference(x).pow(3).sum()
            (gradient,) = torch.autograd.grad(output, x, create_graph=True)
            (gradient.square().sum() / 2).backward()
        start = 2 * api.tp_rank()
        assert torch.equal(model.module.weight.grad, reference.weight.grad[:, start : start + 2])

    smp_world.run(body, ranks=2, config=CONFIG)


def test_torchs_encoders_call_the_layers_in_their_fast_path_too(smp_world):
    def body():
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        module = nn.TransformerEncoder(layer, 2)
        api.set_tensor_parallelism(module)
        model = api.DistributedModel(module).eval()
        assert len(list(model.distributed_modules())) == 4
        x = torch.arange(48.0).view(2, 3, 8) % 5
        mask = torch.tensor([[False, False, True], [False, False, False]])
        called = model.module(x, src_key_padding_mask=mask)  # with gradients there is no fast path
        with torch.no_grad():
            assert torch.equal(model.module(x, src_key_padding_mask=mask), called)

    smp_world.run(body, ranks=2, config=CONFIG)
