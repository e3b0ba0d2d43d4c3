"""The calls of torch's C++ on process groups and works: on `sim` and `mpi` these are Python classes, and
their results are those of torch's Gloo.
"""

from __future__ import annotations

import datetime
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, VerdictKind
from smp_core.errors import DeadlockError

RANKS = 3
F = torch.ops._c10d_functional


def _no_arguments(rank):
    return (), {}


@pytest.fixture(scope="module", params=["sim", "mpi", "gloo"])
def run(request):
    executor = open_backend(request.param, ExecutorOptions(ranks=RANKS))

    def run(body):
        report = executor.open(RANKS).run(Job(body=body, arguments=_no_arguments, timeout=60))
        assert report.verdict is VerdictKind.PASSED, report
        return [outcome.value for outcome in report.outcomes]

    yield run
    executor.close()


def sent_or_received(value, rank, group):
    """From rank 0 to rank 1; what `isend` gives is a token."""
    if rank == 0:
        F.wait_tensor(F.isend(value, 1, 0, group))
    elif rank == 1:
        return F.irecv(value, 0, 0, group), [1.0] * len(value)
    return value, [rank + 1.0] * len(value)


def one_of_each(name, rank, ranks, group):
    """One call of a functional operation, and its result by arithmetic."""
    value, total = torch.full((ranks,), rank + 1.0), float(sum(range(1, ranks + 1)))
    everybody = [each + 1.0 for each in range(ranks) for _ in range(ranks)]
    gathered, summed, own = torch.zeros(ranks * ranks), [total] * ranks, [total]
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    pair = [value, torch.zeros(ranks)]
    calls = {
        "all_reduce": lambda: (F.all_reduce(value, "sum", group), summed),
        "all_reduce_": lambda: (F.all_reduce_(value, "sum", group), summed),
        "all_reduce_coalesced": lambda: (F.all_reduce_coalesced([value], "sum", group), [summed]),
        "all_reduce_coalesced_": lambda: (F.all_reduce_coalesced_([value], "sum", group), [summed]),
        "broadcast": lambda: (F.broadcast(value, 1, group), [2.0] * ranks),
        "broadcast_": lambda: (F.broadcast_(value, 1, group), [2.0] * ranks),
        "reduce_scatter_tensor": lambda: (
            F.reduce_scatter_tensor(value, "sum", ranks, group),
            own,
        ),
        "reduce_scatter_tensor_out": lambda: (
            F.reduce_scatter_tensor_out(value, "sum", ranks, group, out=torch.zeros(1)),
            own,
        ),
        "reduce_scatter_tensor_coalesced": lambda: (
            F.reduce_scatter_tensor_coalesced([value], "sum", ranks, group),
            [own],
        ),
        "all_gather_into_tensor": lambda: (
            F.all_gather_into_tensor(value, ranks, group),
            everybody,
        ),
        "all_gather_into_tensor_out": lambda: (
            F.all_gather_into_tensor_out(value, ranks, group, out=gathered),
            everybody,
        ),
        "all_gather_into_tensor_coalesced": lambda: (
            F.all_gather_into_tensor_coalesced([value], ranks, group),
            [everybody],
        ),
        "all_to_all_single": lambda: (
            F.all_to_all_single(value, [1] * ranks, [1] * ranks, group),
            [each + 1.0 for each in range(ranks)],
        ),
        "isend": lambda: sent_or_received(value, rank, group),
        "batch_p2p_ops": lambda: (
            F.batch_p2p_ops(["isend", "irecv"], [after, before], [0, 0], pair, group),
            [[], [before + 1.0] * ranks],
        ),
    }
    calls["irecv"] = calls["isend"]
    return calls[name]()


OPERATIONS = sorted(
    {
        schema.name.partition("::")[2]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("_c10d_functional::")
        and "::_" not in schema.name  # what torch's Python adds for itself
    }
    - {"wait_tensor"}
)


# Over Gloo all of it is torch's own.
@pytest.mark.parametrize("run", ["sim", "mpi"], indirect=True, scope="module")
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_functional_operation_of_torch(run, name):
    def body():
        ranks, rank = dist.get_world_size(), dist.get_rank()
        result, expected = one_of_each(name, rank, ranks, dist.group.WORLD.group_name)
        if isinstance(result, torch.Tensor):
            return F.wait_tensor(result).tolist() == expected
        return [F.wait_tensor(each).tolist() for each in result] == expected

    assert run(body) == [True] * RANKS


@pytest.mark.parametrize("form", ["function", "method"])
def test_monitored_barrier(run, form):
    def body():
        if form == "function":
            dist.monitored_barrier()
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=60), wait_all_ranks=True)
        else:
            dist.group.WORLD.monitored_barrier(datetime.timedelta(seconds=60), wait_all_ranks=True)
        pair = dist.new_group([2, 0])
        if dist.get_rank() != 1:
            dist.monitored_barrier(pair)

    run(body)


def test_a_monitored_barrier_without_a_rank_is_a_deadlock_that_names_it(smp_world):
    def body():
        if dist.get_rank() != 1:
            dist.monitored_barrier()

    with pytest.raises(DeadlockError, match=r"(?s)monitored_barrier.*rank 1"):
        smp_world.run(body, ranks=3)


def test_ddp_join_divides_by_the_ranks_that_are_left(run):
    def body():
        rank = dist.get_rank()
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        gradients = []
        with model.join(divide_by_initial_world_size=False):
            for _ in range(1 + rank):
                model.zero_grad()
                model(torch.full((1, 2), rank + 1.0)).sum().backward()
                gradients.append(model.module.weight.grad[0].tolist())
        return gradients

    # Rank r has r + 1 batches of r + 1: (1 + 2 + 3) / 3, then (2 + 3) / 2, then 3.
    steps = [[2.0, 2.0], [2.5, 2.5], [3.0, 3.0]]
    assert run(body) == [steps[: 1 + rank] for rank in range(RANKS)]


def test_torchs_functions_that_take_a_work_are_the_ones_that_were_looked_at():
    """C++ may hold a work longer than Python does, and what it then asks the Python half answers."""
    module = torch._C._distributed_c10d
    takes = {
        f"{owner.__name__}.{name}"
        for owner in (module, *(each for each in vars(module).values() if isinstance(each, type)))
        for name in dir(owner)
        if re.search(
            r"\(.*\b(?!self)\w+: (c10d::|torch\._C\._distributed_c10d\.)Work\b.*\) ->",
            getattr(getattr(owner, name), "__doc__", None) or "",
        )
    }
    assert takes == {
        f"{module.__name__}._register_work",  # waits once, and lets go
        "Reducer._set_forward_pass_work_handle",
    }


def test_groups_are_counted_and_named_as_torch_does(run):
    def body():
        seen = [dist.get_pg_count(), dist.group.WORLD.group_name, dist.group.WORLD.group_desc]
        pair = dist.new_group([0, 1])
        name = pair.group_name if dist.get_rank() < 2 else None
        return [*seen, dist.get_pg_count(), name]

    named = [1, "0", "default_pg", 2, "1"]
    expected = [named, named, [*named[:4], None]]
    assert run(body) == expected
    assert run(body) == expected  # from the first again
