"""Coverage of the required features by drawn Keras models and partitions, each of which is trained and compared::

    python -m tools.profiles.keras --cases 500 --jobs 2

Every case trains five steps of an optimizer on ranks of the backend. Its losses, outputs and variables are compared
with those of the unpartitioned model in one process, bit for bit. The exit status is 1 if a case fails, or a row of the
table that :data:`WANTED` names stays below a twentieth of the cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from conformance.cases.keras import KINDS, KerasCase, features, keras_cases
from pytest_smp.ranks.protocols import Executor, Job
from tools.profiles.training import Arguments, Profile, run_profile

#: The rows that must be well covered.
WANTED = (
    *KINDS,
    "an embedding tied to the head",
    "an edge that skips a partition",
    "revisits as 0-1-0-1",
    "empty partitions",
    "2 partitions",
    "3 partitions",
    "4 partitions",
)
STEPS = 5


@dataclasses.dataclass
class KerasProfile(Profile):
    """The counts of drawn Keras models, and the failures."""

    features: Callable[[KerasCase], set[str]] = features
    wanted: Sequence[str] = WANTED
    reference: str = "the unpartitioned model"

    def check(self, executor: Executor, case: KerasCase) -> None:
        """Train a case on ranks, and compare it with the unpartitioned model."""
        from conformance.cases import keras_script

        job = Job(
            body=keras_script.train,
            arguments=Arguments(("tensorflow", case, STEPS)),
            parameters=case.config(),
            timeout=300.0,  # of a case that takes seconds: the machine may be busy
        )
        report = executor.open(case.partitions).run(job)
        if report.error is not None:
            raise report.error
        keras_script.check(case, report.values, STEPS)


def profile(cases: int, start: int = 0, backend: str = "sim") -> Profile:
    """Draw so many cases from the seed ``start``, and run them."""
    return run_profile(KerasProfile(), keras_cases(), cases, 4, start, backend)


def _part(arguments: tuple[int, int, str]) -> tuple[Counter[tuple[str, str]], list[Any], int]:
    found = profile(*arguments)
    return found.rows, found.failures, found.cases


def divided(cases: int, start: int, backend: str, jobs: int) -> Profile:
    """The cases of as many processes, each with a seed of its own."""
    parts = [(len(range(job, cases, jobs)), start + job, backend) for job in range(jobs)]
    whole = KerasProfile()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for rows, failures, count in pool.map(_part, parts):
            whole.rows += rows
            whole.failures += failures
            whole.cases += count
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description="train drawn Keras models on ranks, and show their coverage"
    )
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="sim", help="as --smp-backend")
    parser.add_argument("--jobs", type=int, default=1, help="processes, with seeds that follow")
    given = parser.parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    begun = time.monotonic()
    if given.jobs == 1:
        found = profile(given.cases, given.seed, given.backend)
    else:
        found = divided(given.cases, given.seed, given.backend, given.jobs)
    return found.report(time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main())
