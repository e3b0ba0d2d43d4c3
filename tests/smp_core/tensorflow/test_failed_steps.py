"""An operation that fails while a step runs ends the step on every rank, on every backend; the next step works."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from conformance.cases.keras_bodies import picky
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Executor, ExecutorOptions, Job

RANKS, MICROBATCHES = 4, 2
PHASES = ("forward", "backward")
Case = tuple[int, int, str]  # microbatch, partition, phase


@pytest.fixture(scope="module", params=["sim", "gloo", "mpi"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    # So that the ranks are forked from a process that has it.
    prelude = functools.partial(importlib.import_module, "smp_core.tensorflow")
    executor = open_backend(str(request.param), ExecutorOptions(ranks=RANKS, prelude=prelude))
    yield executor
    executor.close()


Run = Callable[..., list[Any]]


@pytest.fixture
def run(executor: Executor) -> Run:
    def run(body: Callable[..., Any], *args: Any, ranks: int, **config: Any) -> list[Any]:
        config |= {"microbatches": MICROBATCHES, "auto_partition": False, "default_partition": 0}

        def on_rank() -> Any:
            smp.init(config)
            return body(*args)

        job = Job(body=on_rank, arguments=lambda rank: ((), {}), timeout=300)
        report = executor.open(ranks).run(job)
        assert report.error is None, report.error
        return [each.value for each in report.outcomes]

    return run


class Model(smp.DistributedModel):
    """A layer for each partition, each of which fails where the indices say so."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [
            tf.keras.layers.Dense(3, kernel_initializer="ones") for _ in range(smp.pp_size())
        ]

    def call(self, x: Any, indices: Any) -> Any:
        for at, part in enumerate(self.parts):
            with smp.partition(at):
                x = picky(part(x), indices[0, at, 0], indices[0, at, 1])
                if at == 1:  # the sizes of what leaves partition 1 are known only when it is there
                    x = tf.boolean_mask(x, x[:, 0] > -1.0)
        return x


def outcomes(cases: list[Case | None], outer: bool, failing: int) -> list[Any]:
    """The loss of each step on this rank, or its error in words; in the pipeline ``failing`` alone a step fails."""
    model, optimizer = Model(), tf.keras.optimizers.SGD(1 / 1024)

    @smp.step
    def step(x: Any, indices: Any) -> Any:
        loss = tf.reduce_sum(model(x, indices))
        return loss, optimizer.get_gradients(loss, model.trainable_variables)

    def train(x: Any, indices: Any) -> Any:
        loss, gradients = step(x, indices)
        mean = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    call = tf.function(train) if outer else train
    found: list[Any] = []
    for case in cases:
        indices = np.zeros((2 * MICROBATCHES, smp.pp_size(), 2), np.int32)
        if case is not None and smp.dp_rank() == failing:
            microbatch, partition, phase = case
            indices[2 * microbatch :, partition, PHASES.index(phase)] = 1
        try:
            found.append(float(call(tf.ones((2 * MICROBATCHES, 3)), tf.constant(indices))))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def told(rank: int, partition: int, case: Case) -> str:
    microbatch, _, phase = case
    return (
        f"StepAbortedError: smp.step was aborted in the {phase} pass of microbatch {microbatch}, because "
        f"pp rank {partition} (world rank {rank}) raised InvalidArgumentError: "
    )


@pytest.mark.parametrize("outer", [False, True])
def test_all_ranks_are_told_of_an_operation_that_fails(run: Run, outer: bool) -> None:
    ranks = 3
    cases = [(m, p, phase) for m in range(MICROBATCHES) for p in range(ranks) for phase in PHASES]
    config = {"pipeline_parallel_degree": ranks}
    steps = [each for case in cases for each in (None, case)]
    found = run(outcomes, steps, outer, 0, ranks=ranks, **config)
    good = run(outcomes, [None] * len(cases), outer, 0, ranks=ranks, **config)
    assert len(set(good[0])) == len(cases)  # the loss changes at each step
    for rank, seen in enumerate(found):
        # A step that failed has changed no weight on any rank.
        assert seen[::2] == good[rank]
        for case, text in zip(cases, seen[1::2], strict=True):
            assert "is not in [0, 1)" in text
            assert (told(case[1], case[1], case) in text) == (rank != case[1]), text


@pytest.mark.parametrize("outer", [False, True])
def test_ranks_whose_gradients_are_averaged_are_told(run: Run, outer: bool) -> None:
    cases: list[Case] = [(1, 0, "backward"), (0, 1, "forward")]
    config = {"pipeline_parallel_degree": 2, "horovod": True}
    steps = [None, *cases, None]
    for rank, seen in enumerate(run(outcomes, steps, outer, 1, ranks=4, **config)):
        assert seen[0] != seen[3]
        for case, text in zip(cases, seen[1:3], strict=True):
            origin = 2 + case[1]
            assert "is not in [0, 1)" in text
            assert (told(origin, case[1], case) in text) == (rank != origin), text


def refused(place: str, wrongs: tuple[bool, ...]) -> list[str]:
    """The loss of each step, or its error: rank 3 does not come to run those that are wrong."""
    model = Model()
    bad = smp.rank() == 3

    @smp.step
    def step(x: Any, indices: Any, wrong: bool) -> Any:
        if wrong:
            raise ZeroDivisionError("on purpose")
        return tf.reduce_sum(model(x, indices))

    if place == "hook":

        @smp.register_post_partition_hook
        def hook() -> None:
            if bad:
                raise ZeroDivisionError("on purpose")

    indices = tf.zeros((4, smp.pp_size(), 2), tf.int32)
    found = []
    for wrong in wrongs:
        try:
            x = tf.ones((3 if wrong and bad and place == "split" else 4, 3))
            loss = step(x, indices, wrong and bad and place == "body")
            found.append(str(float(loss.reduce_mean())))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize(
    ("place", "wrongs"),
    [("split", (True, False, True)), ("body", (False, True, False)), ("hook", (True, False))],
)
def test_replicas_are_told_of_a_rank_that_cannot_run(
    run: Run, place: str, wrongs: tuple[bool, ...]
) -> None:
    config = {"pipeline_parallel_degree": 2, "horovod": True}
    for rank, seen in enumerate(run(refused, place, wrongs, ranks=4, **config)):
        for wrong, text in zip(wrongs, seen, strict=True):
            if not wrong:
                assert (
                    float(text) == 2 * 3 * 3 * 3
                )  # rows of a microbatch, and ones through two layers of ones
                continue
            assert ("microbatches=2 does not" if place == "split" else "on purpose") in text
            assert text.startswith("StepAbortedError") == (rank != 3)
            assert "rank 3" in text or rank == 3
