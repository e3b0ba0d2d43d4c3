"""Tests that fail, one for each kind of failure; docs/failures.md shows what pytest prints of them."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pytest_smp import strategies

eight_integers = st.lists(st.integers(-1000, 1000), min_size=8, max_size=8)  # any fits a tensor


@pytest.mark.smp(ranks=8)
@given(objects=eight_integers)
def test_assertion(smp, objects):
    gathered = smp.allgather(objects[smp.rank()], smp.WORLD)
    if smp.rank() == 3:
        assert sum(gathered) < 100


@pytest.mark.smp(ranks=8)
@given(objects=eight_integers)
def test_deadlock(smp, objects):
    if smp.rank() == 3 and max(objects) > 50:
        return  # "nothing to do here": but the others wait
    smp.barrier()


@pytest.mark.smp(ranks=8)
@given(sizes=eight_integers)
def test_mismatch(smp, sizes):
    largest = sizes[smp.rank()] > 50
    loss = torch.tensor([1.0])
    dist.all_reduce(loss, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)


@pytest.mark.smp(ranks=8)
@given(objects=eight_integers)
def test_leak(smp, objects):
    if smp.rank() == 0 and objects[0] > 50:
        dist.isend(torch.tensor(objects[0]), dst=1)


@pytest.mark.smp(ranks=2)
def test_race(smp):
    gradient = torch.tensor([1.0, 2.0])
    work = dist.all_reduce(gradient, async_op=True)
    gradient /= 2  # "while we wait"
    work.wait()


@pytest.mark.smp(ranks=2)
def test_early(smp):
    gradient = torch.tensor([1.0, 2.0])
    work = dist.all_reduce(gradient, async_op=True)
    assert gradient.tolist() == [2.0, 4.0]  # too early
    work.wait()


@pytest.mark.smp(ranks=3)
@given(schedule=strategies.schedules())
def test_order(smp, schedule):
    if smp.rank() == 0:
        message = torch.zeros(1)
        first = dist.recv(message)  # from whoever comes first
        second = dist.recv(message)
        assert (first, second) == (1, 2)
    else:
        dist.send(torch.ones(1), dst=0)
