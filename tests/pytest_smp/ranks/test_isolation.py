"""Each rank has its own random generators and default dtype; the controller's are given back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Job


def draws(count):
    """The numbers that a rank draws: a normal number is ready after each odd call, and the dtype shows."""
    values = []
    for _ in range(count):
        values += [random.random(), random.gauss(0, 1)]
        values += [float(np.random.rand()), float(np.random.normal())]
        values += torch.rand(2).tolist()
        yield values
    return


def interleaved(count):
    values = []
    for current in draws(count):
        values = current
        smp.barrier()
    return values


def alone(count, seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return list(draws(count))[-1]


def alone_on_ranks(count):
    """As `alone`, whatever generator the process has made numpy's default."""
    current = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937())
    try:
        return alone(count, 0)
    finally:
        np.random.set_bit_generator(current)


@pytest.fixture
def generators():
    """Put the process's generators back after the test."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_draws_as_if_it_were_alone(smp_world, generators, ranks):
    values = smp_world.run(interleaved, 5, ranks=ranks)
    assert values == [alone(5, 0)] * ranks


def test_ranks_that_seed_by_themselves_do_not_disturb_each_other(smp_world, generators):
    def body():
        seed = 10 + smp.rank()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        smp.barrier()
        return interleaved(3)

    assert smp_world.run(body, ranks=3) == [alone(3, 10 + rank) for rank in range(3)]


@pytest.mark.parametrize("ready", [False, True], ids=["", "a normal number is ready"])
def test_the_controller_draws_on_as_if_nothing_had_happened(smp_world, generators, ready):
    def start():
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        if ready:
            np.random.normal()
            random.gauss(0, 1)

    start()
    expected = list(draws(2))[-1]
    start()
    smp_world.run(interleaved, 3, ranks=2)
    assert list(draws(2))[-1] == expected


def test_a_run_does_not_depend_on_the_one_before(smp_world, generators):
    first = smp_world.run(interleaved, 2, ranks=2)
    smp_world.run(interleaved, 1, ranks=2)
    assert smp_world.run(interleaved, 2, ranks=2) == first


def test_the_seed_of_the_job(generators):
    executor = open_backend("sim")
    try:
        values = {}
        for seed in (0, 1):
            job = Job(body=interleaved, arguments=lambda rank: ((2,), {}), seed=seed)
            values[seed] = executor.open(2).run(job).values
    finally:
        executor.close()
    assert values[1] == [alone(2, 1)] * 2
    assert values[0] != values[1]


def test_a_generator_of_another_kind_stays_the_controllers(smp_world, generators):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        expected = np.random.RandomState(np.random.PCG64(3)).rand(2)
        assert np.random.rand() == expected[0]
        assert smp_world.run(interleaved, 2, ranks=2) == [alone_on_ranks(2)] * 2
        assert np.random.rand() == expected[1]
    finally:
        np.random.set_bit_generator(before)


def test_the_default_dtype_belongs_to_the_rank(smp_world):
    def body():
        if smp.rank() == 1:
            torch.set_default_dtype(torch.float64)
        smp.barrier()
        return str(torch.ones(1).dtype)

    assert smp_world.run(body, ranks=2) == ["torch.float32", "torch.float64"]
    assert torch.get_default_dtype() is torch.float32


def test_gradient_mode_and_default_device_do_not_reach_the_next_run(smp_world):
    def leaves():
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")

    def looks():
        return torch.is_grad_enabled(), str(torch.ones(1).device)

    smp_world.run(leaves, ranks=2)
    assert smp_world.run(looks, ranks=2) == [(True, "cpu")] * 2


def test_a_default_device_within_another_does_not_reach_the_next_run(smp_world):
    """The outer one takes the inner from torch's stack of modes, and the device is still the default."""

    def leaves():
        with torch.device("meta"):
            torch.set_default_device("meta")

    smp_world.run(leaves, ranks=2)
    assert smp_world.run(lambda: str(torch.get_default_device()), ranks=2) == ["cpu"] * 2


def test_ranks_compute_on_one_thread_and_others_as_before(smp_world):
    before = torch.get_num_threads()
    assert smp_world.run(torch.get_num_threads, ranks=2) == [1, 1]
    assert torch.get_num_threads() == before
