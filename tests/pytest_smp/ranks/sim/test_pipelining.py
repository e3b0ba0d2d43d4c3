"""torch's own pipelines on `sim`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

from smp_core.errors import RaceError


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, value):
        return self.c(self.b(self.a(value)))


@pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore:.isinstance.treespec")
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_a_traced_pipeline_of_three_ranks(smp_world, schedule):
    # torch receives what a stage has no use for into one buffer, several times at once.
    def body():
        rank, model = dist.get_rank(), Chain()
        value = torch.arange(24.0).reshape(6, 4)
        where = {"b": SplitPoint.BEGINNING, "c": SplitPoint.BEGINNING}
        stages = pipeline(model, (value[:2],), split_spec=where)
        stage = stages.build_stage(rank, torch.device("cpu"))
        steps = schedule(stage, 3, loss_fn=lambda result, target: (result - target).pow(2).sum())
        inputs = (value,) if rank == 0 else ()
        targets = {"target": torch.zeros(6, 4)} if rank == 2 else {}
        result = steps.step(*inputs, **targets)
        return None if rank < 2 else torch.allclose(result, model(value))

    assert smp_world.run(body, ranks=3) == [None, None, True]


def test_a_buffer_of_the_users_own_is_not_forgiven(smp_world):
    def body():
        rank = dist.get_rank()
        if rank == 0:
            buffer = torch.zeros(1)
            operations = [dist.P2POp(dist.irecv, buffer, peer) for peer in (1, 2)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        else:
            dist.send(torch.ones(1), 0)

    with pytest.raises(RaceError, match=r"recv from rank 2 .* uses memory of recv from rank 1"):
        smp_world.run(body, ranks=3)
