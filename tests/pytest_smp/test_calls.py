"""``smp_calls``: the communications of a run as data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

# Both stay imported: a session in this process would import them twice.
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session

TESTS = """
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def every_operation():
        rank = dist.get_rank()
        x = torch.ones(2, 3, dtype=torch.float64)
        dist.all_reduce(x)
        dist.broadcast(torch.ones(4, dtype=torch.bfloat16), 1)
        dist.all_gather([torch.empty(2) for _ in range(2)], torch.ones(2))
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
        dist.scatter(torch.empty(3), [torch.ones(3)] * 2 if rank == 0 else None, 0)
        dist.gather(torch.ones(3), [*torch.empty(2, 3)] if rank == 1 else None, 1)
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        if rank == 0:
            dist.send(torch.ones(5), 1)
        else:
            dist.recv(torch.empty(5), 0)
        dist.barrier()
        api.barrier()
        api.allgather(rank, api.WORLD)
        if rank == 0:
            api.send("x", 1, api.RankType.WORLD_RANK)
        else:
            api.recv_from(0, api.RankType.WORLD_RANK)

    def test_every_operation(smp_world, smp_calls):
        smp_world.run(every_operation, ranks=2)
        for rank in range(2):
            made = [call for call in smp_calls if call.rank == rank]
            assert [(call.operation, call.dtype, call.shapes, call.bytes) for call in made] == [
                ("all_reduce", "float64", ((2, 3),), 48),
                ("broadcast", "bfloat16", ((4,),), 8),
                ("all_gather", "float32", ((2,),), 8),
                ("all_gather_single", "float32", ((2,),), 8),
                ("reduce_scatter_single", "float32", ((4,),), 16),
                ("scatter", "float32", ((3,),), 12),
                ("gather", "float32", ((3,),), 12),
                ("all_to_all_single", "float32", ((4,),), 16),
                ("recv" if rank else "send", "float32", ((5,),), 20),
                ("barrier", "", (), 0),
                ("smp.barrier", "", (), 0),
                ("smp.allgather", "", (), 0),
                ("smp.recv_from" if rank else "smp.send", "", (), 0),
            ]
            assert {call.group for call in made[:-1]} == {(0, 1)}
            assert made[-1].group == (rank, 1 - rank)
            assert {call.phase for call in made} == {"outside"}
            assert made[0].shape == (2, 3)
            assert made[0].line == f"test_it.py:{every_operation.__code__.co_firstlineno + 3}"

    @pytest.mark.smp(ranks=2)
    def test_accumulation(smp, smp_calls):
        model = DistributedDataParallel(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        before = len(smp_calls)
        with model.no_sync():
            model(torch.ones(1, 3)).sum().backward()
        assert not smp_calls[before:]
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        reductions = [call for call in smp_calls[before:] if call.operation == "all_reduce"]
        assert [(call.phase, call.dtype, call.rank) for call in reductions] == [
            ("backward", "float32", smp.rank())
        ]

    @pytest.mark.smp(ranks=2)
    def test_sharded(smp, smp_calls):
        model = fully_shard(nn.Linear(4, 4, bias=False))
        model(torch.ones(1, 4)).sum().backward()
        assert [(call.operation, call.phase) for call in smp_calls] == [
            ("all_gather_single", "forward"),
            ("reduce_scatter_single", "backward"),
        ]

    class Averaging(torch.optim.SGD):
        def step(self):
            dist.all_reduce(torch.ones(1))
            super().step()

    @pytest.mark.smp(ranks=2, ddp=True)
    def test_phases(smp, smp_calls):
        Averaging([nn.Parameter(torch.ones(1))], lr=0.5).step()
        assert [call.phase for call in smp_calls] == ["step"]
        model = smp.DistributedModel(nn.Linear(3, 1))
        @smp.step
        def train_step(model, x):
            model.backward(model(x).sum())
        train_step(model, torch.ones(4, 3))
        (gradients,) = [call for call in smp_calls if call.operation == "all_to_all_single"]
        assert (gradients.phase, gradients.bytes) == ("backward", 16)  # four elements of four bytes

    @pytest.mark.smp(ranks=2)
    def test_exchanges_of_the_api(smp, smp_calls, smp_tmp_path):
        smp.init({"microbatches": 2})
        model = smp.DistributedModel(nn.Linear(3, 1))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        @smp.step
        def train_step(model, x):
            smp.barrier()
            model.backward(model(x).sum())
        train_step(model, torch.ones(4, 3))
        smp.save_checkpoint(str(smp_tmp_path), "tag", True, model, optimizer)
        assert {call.operation for call in smp_calls if call.operation.startswith("smp.")} == {"smp.barrier"}

    def test_of_the_last_run_alone(smp_world, smp_calls):
        assert list(smp_calls) == []
        smp_world.run(dist.barrier, ranks=2)
        smp_world.run(dist.barrier, ranks=2)
        assert [call.rank for call in smp_calls] == [0, 1]

    def test_not_recorded(smp_world):
        smp_world.run(dist.barrier, ranks=2)
"""


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_calls_are_data(session: Session, backend: str) -> None:
    ended = session(TESTS, f"--smp-backend={backend}", "-W", "ignore::FutureWarning", ranks=2)
    assert ended.counts == {"passed": 7}, ended.text


def test_rank_processes_record_calls_for_the_board_alone(session: Session) -> None:
    ended = session(TESTS, "--smp-backend=gloo", "--smp-check=false", "-k", "last_run", ranks=2)
    assert ended.counts == {"failed": 1, "deselected": 6}
    ended.shows("UnsupportedError: smp_calls", "--smp-check")
