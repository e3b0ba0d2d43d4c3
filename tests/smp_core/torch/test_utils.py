"""The functions and members of the library's inside that public scripts read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.errors import ArgumentTypeError
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.utils import get_distribution_axis
from tests.smp_core.torch.checkpoint.tensor_runs import Run, world


@pytest.mark.parametrize("name", ["tp2", "pp2tp2", "tp2rdp2parts"])
def test_the_axis_puts_full_parameters_together(smp_world, name):
    def body():
        run = Run()
        run.step(0)
        whole = run.model.state_dict()
        found = {}
        for name, parameter in run.model.local_named_parameters():
            axis = found[name] = get_distribution_axis(parameter)
            gathered = smp.allgather(parameter.detach(), smp.TP_GROUP)
            full = parameter.detach() if axis is None else torch.cat(gathered, axis)
            assert torch.equal(full, whole[name])
        return found

    axes = {}
    for found in smp_world.run(body, **world(name)):
        axes.update(found)
    split = {"embed.weight", "first.weight", "last.weight"}
    assert axes == {each: 1 if each in split else None for each in axes}
    assert len(axes) == 9


@pytest.mark.smp(ranks=1)
def test_what_is_no_parameter_and_members_of_unknown_content_are_refused(smp):
    assert smp.utils.get_distribution_axis(nn.Linear(2, 2).weight) is None
    with pytest.raises(ArgumentTypeError, match="param is a str, not a parameter"):
        smp.utils.get_distribution_axis("weight")
    for member in ("param_index_to_name_tp_group", "param_name_to_index_tp_group"):
        with pytest.raises(UnsupportedTrainingError, match=r"use that") as error:
            getattr(smp.state, member)
        assert member in str(error.value)
        assert "optimizer.param_name_to_index()" in str(error.value)
