"""Coverage of the required features by drawn cases of sharded training, each of which is run and compared::

    python -m tools.profiles.sharding --cases 2000

Every case trains on a world of the backend, and is compared with one process, bit for bit: in the tier
"exact" with the plain loop, in the tier "replayed" with the loop in the published order. The exit status is 1
if a case fails, or a row of the table that :data:`WANTED` names stays below a twentieth of the cases (100 of
2,000).
"""

from __future__ import annotations

import argparse
import sys
import time

from hypothesis import strategies as st

from pytest_smp.strategies.training_sharding import (
    DTYPES,
    ShardedTraining,
    sharded_features,
    sharded_trainings,
)
from tools.profiles.training import Profile, run_profile

#: The rows that must be well covered, as far as there are ranks for them.
WANTED = (
    "degree 1",
    "degree 2",
    "degree 3",
    "degree 4",
    "several blocks",
    "threshold size - 1",
    "threshold size",
    "threshold size + 1",
    "persistent and split",
    "tiny parameters",
    "not divisible",
    "zero-size parameters",
    "0-dim parameters",
    "non-contiguous parameters",
    "frozen parameters",
    "shared parameters",
    "unused modules",
    "reused modules",
    "used outside, registered",
    "used outside, not registered",
    "buffers",
    "accumulation",
    "several windows",
    "clipping",
    "small buckets",
    "few live parameters",
    "several nodes",
    "checkpointing",
    *DTYPES,
    "sgd",
    "momentum",
    "adam",
    "adamw",
)


@st.composite
def _mixed(draw: st.DrawFn, ranks: int) -> ShardedTraining:
    real = draw(st.booleans())
    return draw(sharded_trainings(ranks, real=real, dtypes=DTYPES))


def profile(cases: int, ranks: int = 4, start: int = 0, backend: str = "sim") -> Profile:
    """Draw so many cases from the seed ``start``, and run them."""
    return run_profile(
        Profile(sharded_features, WANTED), _mixed(ranks), cases, ranks, start, backend
    )


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description="run drawn cases of sharded training, and show their coverage"
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=4, help="the most that a world may have")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="sim", help="as --smp-backend")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    found = profile(given.cases, given.ranks, given.seed, given.backend)
    return found.report(time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main())
