"""The functions and members of the library's inside that public scripts read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.errors import ArgumentTypeError, NotInitializedError
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
def test_what_is_no_parameter_is_refused(smp):
    assert smp.utils.get_distribution_axis(nn.Linear(2, 2).weight) is None
    with pytest.raises(ArgumentTypeError, match="param is a str, not a parameter"):
        smp.utils.get_distribution_axis("weight")


@pytest.mark.smp(ranks=2)
def test_a_message_for_a_log_has_the_rank(smp):
    assert smp.utils.rmsg("loss 0.5") == f"[{smp.rank()}] loss 0.5"
    assert smp.utils.rmsg(ValueError("bad")) == f"[{smp.rank()}] bad"


@pytest.mark.smp(ranks=4, tensor_parallel_degree=2, pipeline_parallel_degree=2, ddp=True)
def test_names_and_indices_of_a_tensor_parallel_group(smp):
    """Each tp rank's pairs of name and index, those of all partitions, as states of the optimizer count them."""
    with smp.tensor_parallelism():
        first = nn.Linear(2, 2)
    second = nn.Linear(2, 2, bias=False)
    model = smp.DistributedModel(nn.Sequential(first, nn.Sequential(second, second)))
    for member in ("param_index_to_name_tp_group", "param_name_to_index_tp_group"):
        with pytest.raises(UnsupportedTrainingError, match=f"{member}: there is no optimizer"):
            getattr(smp.state, member)
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    names = {0: "0.weight", 1: "0.bias", 2: "1.0.weight"}
    assert smp.state.param_index_to_name_tp_group == [names, names]
    indices = {"0.weight": 0, "0.bias": 1, "1.0.weight": 2, "1.1.weight": 2}
    assert smp.state.param_name_to_index_tp_group == [indices, indices]
    assert smp.allgather(smp.state.param_name_to_index_tp_group[smp.tp_rank()], smp.TP_GROUP) == [
        indices,
        indices,
    ]


def test_utilities_need_a_run():
    for call in (smp.hvd_average_grads, lambda: smp.utils.rmsg("loss")):
        with pytest.raises(NotInitializedError):
            call()
