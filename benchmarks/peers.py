"""The same 8-rank allgather by torch's own test harnesses: threads, and a process per rank and test."""

from __future__ import annotations

import io
import logging
import unittest
import warnings

import torch
from torch import distributed as dist

from benchmarks.figures import Figure, median, seconds

RANKS = 8


def _harness():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_distributed
    logging.getLogger(common_distributed.__name__).setLevel(logging.WARNING)
    return common_distributed


def _gather(rank: int) -> None:
    gathered = [None] * RANKS
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(RANKS))


common = _harness()


class Threaded(common.MultiThreadedTestCase):
    """torch's MultiThreadedTestCase: eight new threads for each test."""

    @property
    def world_size(self):
        return RANKS

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_gather(self):
        """One allgather."""
        _gather(self.rank)


class Processes(common.MultiProcessTestCase):
    """torch's MultiProcessTestCase: eight new processes for each test."""

    @property
    def world_size(self):
        return RANKS

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_gather(self):
        """One allgather."""
        torch.set_num_threads(1)
        store = dist.FileStore(self.file_name, RANKS)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=RANKS)
        _gather(self.rank)
        dist.destroy_process_group()


def _once(case: type[unittest.TestCase]) -> None:
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    stream = io.StringIO()
    result = unittest.TextTestRunner(stream=stream).run(suite)
    if not result.wasSuccessful() or result.testsRun != 1:
        raise RuntimeError(f"{case.__name__} did not pass:\n{stream.getvalue()}")


def measure() -> list[Figure]:
    """Tests per second; each harness runs one test after the other."""
    figures = []
    for case, label, repeats in (
        (Threaded, "torch MultiThreadedTestCase, one test", 20),
        (Processes, "torch MultiProcessTestCase (gloo), one test", 2),
    ):
        if case is Threaded:
            _once(case)
        rates = [1 / seconds(lambda case=case: _once(case)) for _ in range(repeats)]
        figures.append(Figure(label, median(rates), "tests/s", (min(rates), max(rates))))
    return figures
