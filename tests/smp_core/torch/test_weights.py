"""State dicts and the local iterators: equal to plain torch's of the whole module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smp_core.errors import ArgumentTypeError
from smp_core.torch.parameters import foreign

MANUAL = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}


class Counted(nn.Linear):
    """With extra state, and a buffer that is not saved."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = 7
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Net(nn.Module):
    def __init__(self, smp=None, split=("front", "back")):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.back = nn.Sequential(Counted(4, 4), nn.Linear(4, 4, bias=False))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.back[1].weight
        if smp is not None:
            for name in split[1:]:
                smp.set_partition(getattr(self, name), 1)

    def forward(self, x):
        return self.tied(self.back(self.front(x)))


BACK = ("front", "back", "tied")


def drawn(seed, *args):
    torch.manual_seed(seed)
    return Net(*args)


def partitioned(smp, module):
    model = smp.DistributedModel(module)

    @smp.step
    def run(model, x):
        model(x)

    run(model, torch.ones(2, 4))
    return model


def equal(state, wanted):
    assert list(state) == list(wanted)
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[key], value), key
        else:
            assert state[key] == value


def reference(seed):
    """After the same forward passes as ``partitioned`` makes: running statistics move."""
    module = drawn(seed)
    module(torch.ones(2, 4))
    return module


@pytest.mark.smp(ranks=4, **MANUAL)
def test_the_gathered_state_is_the_plain_modules(smp):
    model = partitioned(smp, drawn(1, smp, BACK))
    state = model.state_dict()
    assert type(state) is dict
    equal(state, reference(1).state_dict())
    first = model.state_dict(gather_to_rank0=True)
    assert first.keys() == (state.keys() if smp.rank() == 0 else set())
    reference(1).load_state_dict(state)


@pytest.mark.smp(ranks=2, **MANUAL)
def test_the_local_parts_are_disjoint_and_together_the_whole(smp):
    model = smp.DistributedModel(drawn(1, smp, BACK))
    assert [name for name, _ in model.local_named_parameters()] == [
        name for name, _ in Net().named_parameters()
    ]
    assert model.local_state_dict()["_smp_is_partial"] is False
    step = smp.step(lambda model, x: None)
    step(model, torch.ones(1, 4))
    part = model.local_state_dict()
    assert part.pop("_smp_is_partial") is True
    plain = Net()
    prefix = "front" if smp.pp_rank() == 0 else ("back", "tied")
    assert list(part) == [key for key in plain.state_dict() if key.startswith(prefix)]
    for kind in ("parameters", "buffers", "modules"):
        named = [
            name for name, _ in getattr(plain, f"named_{kind}")()
            if name.startswith(prefix) or (name == "" and smp.pp_rank() == 0)
        ]  # fmt: skip
        assert [name for name, _ in getattr(model, f"local_named_{kind}")()] == named
        assert len(list(getattr(model, f"local_{kind}")())) == len(named)
    assert not any(map(foreign.is_foreign, model.local_parameters()))


@pytest.mark.smp(ranks=2, **MANUAL)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_a_state_is_loaded_full_or_merged_before_and_after_partitioning(smp, when, partial, same):
    wanted = reference(5).state_dict()
    wanted["back.0._extra_state"] = {"calls": 3}
    state = dict(wanted)
    if partial:
        here = "front" if smp.pp_rank() == 0 else ("back", "tied")
        state = {key: value for key, value in state.items() if key.startswith(here)}
        state["_smp_is_partial"] = True
    step = smp.step(lambda model, x: None)
    model = smp.DistributedModel(drawn(1, smp, BACK))
    if when == "before":
        assert model.load_state_dict(state, same_partition_load=same) is None
        step(model, torch.ones(1, 4))
    else:
        step(model, torch.ones(1, 4))
        assert model.load_state_dict(state, same_partition_load=same) == ([], [])
    equal(model.state_dict(), wanted)
    assert model.module.tied.weight is model.module.back[1].weight


@pytest.mark.smp(ranks=2, **MANUAL)
def test_partial_states_of_another_partition_are_merged(smp):
    wanted = reference(5).state_dict()
    state = {
        key: value for index, (key, value) in enumerate(wanted.items()) if index % 2 == smp.rank()
    }
    model = smp.DistributedModel(drawn(1, smp, BACK))
    model.load_state_dict({**state, "_smp_is_partial": True})
    smp.step(lambda model, x: None)(model, torch.ones(1, 4))
    equal(model.state_dict(), wanted)


@pytest.mark.smp(ranks=2, **MANUAL)
def test_a_state_that_does_not_fit_is_refused_on_every_rank_in_torchs_words(smp):
    model = partitioned(smp, drawn(1, smp, BACK))
    state = reference(1).state_dict()
    state["back.0.weight"] = torch.ones(3, 3)
    state["extra.weight"] = torch.ones(1)
    del state["front.0.bias"]
    with pytest.raises(RuntimeError) as here:
        model.load_state_dict(state)
    with pytest.raises(RuntimeError) as torchs:
        Net().load_state_dict(state)
    assert str(here.value) == str(torchs.value)
    del state["back.0.weight"]
    assert model.load_state_dict(state, strict=False) == (
        ["front.0.bias", "back.0.weight"], ["extra.weight"],
    )  # fmt: skip
    part = model.local_state_dict()
    part["nobody"] = part.pop(next(iter(part)))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*nobody(.|\n)*Missing key"):
        model.load_state_dict(part, same_partition_load=True)
    with pytest.raises(ArgumentTypeError, match="not a dict"):
        model.load_state_dict([1])


@pytest.mark.smp(ranks=2, **MANUAL)
def test_cpu_makes_the_module_whole_and_the_next_step_parts_it_again(smp):
    model = partitioned(smp, drawn(1, smp, BACK))
    assert model.cpu() is model
    plain = reference(1)
    equal(model.module.state_dict(), plain.state_dict())
    assert torch.equal(model.module.back[0].passing, torch.ones(2))
    smp.step(lambda model, x: None)(model, torch.ones(1, 4))
    for name, parameter in model.module.named_parameters():
        assert parameter.numel() == 0 or name in dict(model.local_named_parameters())


@pytest.mark.smp(ranks=1)
def test_a_degree_of_one_has_everything_at_once(smp):
    model = smp.DistributedModel(drawn(1))
    equal(model.state_dict(), drawn(1).state_dict())
    part = model.local_state_dict()
    assert part.pop("_smp_is_partial") is True
    equal(part, drawn(1).state_dict())
    model.load_state_dict(part)
