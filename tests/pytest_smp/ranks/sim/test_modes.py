"""A user's mode sees the user's own operations, and none of the backend's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, VerdictKind

RANKS = 2


@pytest.fixture(scope="module", params=["sim", "mpi"])
def run(request):
    executor = open_backend(request.param, ExecutorOptions(ranks=RANKS))

    def run(body):
        report = executor.open(RANKS).run(Job(body=body, arguments=_no_arguments, timeout=60))
        assert report.verdict is VerdictKind.PASSED, report
        return [outcome.value for outcome in report.outcomes]

    yield run
    executor.close()


def _no_arguments(rank):
    return (), {}


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


def every_operation():
    """One call of each kind, on tensors made before."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    one, two, four = torch.full((2,), float(rank)), torch.zeros(2), torch.zeros(4)
    strided = torch.zeros(4)[::2]
    parts = [torch.zeros(2), torch.zeros(2)]
    group = dist.group.WORLD

    def calls():
        dist.all_reduce(one)
        dist.broadcast(strided, 1)
        dist.all_gather(parts, one)
        group.all_gather_single(four, one).wait()
        group.reduce_scatter_single(one, four).wait()
        group.all_to_all_single(four, four, [2, 2], [2, 2]).wait()
        dist.reduce(one, 0)
        dist.gather(one, parts if rank == 0 else None)
        dist.scatter(one, parts if rank == 0 else None)
        for work in [dist.isend(one, other), dist.irecv(two, other)]:
            while not work.is_completed():
                pass
        dist.all_reduce(two, async_op=True).wait()
        dist.barrier()

    return calls


@pytest.mark.parametrize("mode", [Dispatched, Called])
def test_a_mode_sees_no_operation_of_the_backend(run, mode):
    def body():
        calls = every_operation()
        with mode() as entered:
            calls()
            seen = list(entered.seen)
            torch.ones(1)
        # The mode is on: it sees the user's own.
        return seen, len(entered.seen) - len(seen) > 0

    for seen, works in run(body):
        # A function mode sees the functions of torch.distributed that the user calls, and what they ask.
        asked = ("__get__", "is_complex", "numel", "is_floating_point", "device")
        ours = [each for each in seen if each not in asked and not hasattr(dist, each)]
        assert ours == []
        assert works


def test_a_mode_does_not_change_what_is_communicated(run):
    class Zeros(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return torch.zeros_like(result) if isinstance(result, torch.Tensor) else result

    def body():
        value = torch.full((2,), dist.get_rank() + 1.0)
        with Zeros():
            dist.all_reduce(value)
            work = dist.all_reduce(value, async_op=True)
            work.wait()
        return value.tolist()

    assert run(body) == [[6.0, 6.0]] * RANKS
