"""Coverage of the required features by drawn training cases, each of which is run and compared::

    python -m tools.profiles.training --cases 2000

Every case trains on a world of the backend, and is compared with plain PyTorch, bit for bit: in the
tier "exact" with the plain loop, in the tier "replayed" with the loop in the published order. The exit
status is 1 if a case fails, or a row of the table that :data:`WANTED` names stays below a twentieth of
the cases (100 of 2,000).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Executor, ExecutorOptions, Job
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import Training, features
from pytest_smp.strategies.training_draws import trainings
from pytest_smp.strategies.training_replay import replayed
from pytest_smp.strategies.training_script import compare, run_script

#: The rows that must be well covered.
WANTED = (
    "nested cross-partition calls",
    "shared parameters",
    "reused modules",
    "branches and skips",
    "degree 1",
    "several axes",
    "accumulation",
    "simple",
    "interleaved",
)
_SHARE = 20  # of the cases, one in so many
_TIERS = ("exact", "replayed")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The same arguments for every rank; frozen, so that simulated ranks may share them."""

    values: tuple[Any, ...]

    def __call__(self, rank: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.values, {}


@dataclasses.dataclass
class Profile:
    """The counts of drawn cases, and the failures: each case as code, with its error.

    ``features`` gives the rows that a case counts in; ``wanted`` are the rows that must be well covered. ``reference``
    says in words what the results are compared with.
    """

    features: Callable[[Any], set[str]] = features
    wanted: Sequence[str] = WANTED
    rows: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    failures: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    cases: int = 0
    reference: str = "plain PyTorch"

    def run(self, executor: Executor, case: Any) -> None:
        """Run one case, compare, and count it."""
        self.cases += 1
        tier = getattr(case, "tier", "exact")
        self.rows.update((name, tier) for name in self.features(case) | {"all"})
        try:
            self.check(executor, case)
        except Exception as error:  # of any type: a rank raised it
            self.failures.append((repr(case), f"{type(error).__name__}: {error}"))

    def check(self, executor: Executor, case: Any) -> None:
        """Run one case, and compare."""
        job = Job(
            body=run_script,
            arguments=Arguments((case,)),
            parameters=case.config,
            timeout=300.0,  # of a case that takes a second: the machine may be busy
        )
        report = executor.open(case.ranks).run(job)
        if report.error is not None:
            raise report.error
        expected = replayed(case) if case.real else oracle.plain(case)
        compare(expected, report.values, none=True)

    def lines(self) -> list[str]:
        """The table."""
        names = {name for name, _ in self.rows}
        order = ["all", *self.wanted, *sorted(names - {"all", *self.wanted})]
        lines = [f"{'cases':32} {'together':>9} {'exact':>9} {'replayed':>9}"]
        for name in order:
            counts = [self.rows[name, tier] for tier in _TIERS]
            lines.append(f"{name:32} {sum(counts):9} {counts[0]:9} {counts[1]:9}")
        return lines

    def missing(self) -> list[str]:
        """The rows that are covered too little."""
        least = self.cases // _SHARE
        counts = {name: sum(self.rows[name, tier] for tier in _TIERS) for name in self.wanted}
        return [f"{name}: {count} of {least}" for name, count in counts.items() if count < least]

    def report(self, seconds: float) -> int:
        """Print the table, what failed and what is missing; the exit status."""
        for line in self.lines():
            print(line)
        for code, why in self.failures[:10]:
            print(f"FAILED {code}\n   {why}")
        for text in self.missing():
            print(f"too few: {text}")
        print(
            f"{self.cases} cases in {seconds:.0f} s, {len(self.failures)} failed; "
            f"the others equal {self.reference}, bit for bit"
        )
        return 1 if self.failures or self.missing() else 0


@st.composite
def _mixed(draw: st.DrawFn, ranks: int) -> Training:
    real = draw(st.integers(0, 2)) == 2
    return draw(trainings(ranks, real=real))


def run_profile(
    found: Profile, drawn: st.SearchStrategy[Any], cases: int, ranks: int, start: int, backend: str
) -> Profile:
    """Draw so many cases from the seed ``start``, and run them on worlds of the backend."""
    executor = open_backend(backend, ExecutorOptions(ranks=ranks))

    @hypothesis.seed(start)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def run(case: Any) -> None:
        if found.cases < cases:
            found.run(executor, case)
            if found.cases % 200 == 0:
                print(f"{found.cases} cases, {len(found.failures)} failed", flush=True)

    try:
        run()
    finally:
        executor.close()
    return found


def profile(cases: int, ranks: int = 4, start: int = 0, backend: str = "sim") -> Profile:
    """Draw so many cases from the seed ``start``, and run them."""
    return run_profile(Profile(), _mixed(ranks), cases, ranks, start, backend)


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description="run drawn training cases, and show their coverage"
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=4, help="the most that a world may have")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="sim", help="as --smp-backend")
    given_ = parser.parse_args(arguments)
    begun = time.monotonic()
    found = profile(given_.cases, given_.ranks, given_.seed, given_.backend)
    return found.report(time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main())
