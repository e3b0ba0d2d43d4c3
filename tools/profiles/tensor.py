"""Coverage of the required features by drawn cases of tensor parallelism, each of which is run and compared::

    python -m tools.profiles.tensor --cases 2000

Every case trains on a world of the backend, and is compared with one process, bit for bit: in the tier
"exact" with the plain loop, in the tier "replayed" with the loop in the published order. The exit status is 1
if a case fails, or a row of the table that :data:`WANTED` names stays below a twentieth of the cases (100 of
2,000).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from typing import Any

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from pytest_smp.strategies.training_sharding import DTYPES
from pytest_smp.strategies.training_tensor import TensorTraining, tensor_features, tensor_trainings
from smp_core.config import IgnoredKeyWarning
from tools.profiles.training import Profile, run_profile

#: The rows that must be well covered, as far as there are ranks for them.
WANTED = (
    "tensor degree 2",
    "tensor degree 4",
    "tensor degree 8",
    "own batches",
    "prescaled batches",
    "distributed linear layers",
    "distributed embeddings",
    "distributed and whole",
    "layers that stay",
    "several TP groups",
    "tensor and pipeline",
    "tensor and sharding",
    "pipeline, tensor and replicas",
    "spread",
    "accumulation",
    "several windows",
    "checkpointing",
    *DTYPES,
    "sgd",
    "momentum",
    "adam",
    "adamw",
)


#: Degrees of worlds: tensor, pipeline, sharding. With a pipeline of eight ranks there are replicas, too.
_DEGREES: tuple[dict[str, tuple[int, ...]], ...] = (
    {},
    {"tensor": (8, 4)},
    {"pipeline": (2, 4)},
    {"tensor": (2,), "pipeline": (2,)},
    {"sharding": (2, 4)},
    {"sharding": (2, 4), "tensor": (2, 4)},
)


@st.composite
def mixed(draw: st.DrawFn, ranks: int) -> TensorTraining:
    """Cases of both tiers, with pipelines and with sharding as often as without."""
    real, degrees = draw(st.booleans()), draw(st.sampled_from(_DEGREES))
    whole = ranks if draw(st.booleans()) else None
    given: dict[str, Any] = {"real": real, "dtypes": DTYPES, **degrees}
    try:
        return draw(tensor_trainings(ranks, size=whole, **given))
    except InvalidArgument:  # too few ranks for these degrees
        return draw(tensor_trainings(ranks, real=real, dtypes=DTYPES))


def profile(cases: int, ranks: int = 8, start: int = 0, backend: str = "sim") -> Profile:
    """Draw so many cases from the seed ``start``, and run them."""
    return run_profile(Profile(tensor_features, WANTED), mixed(ranks), cases, ranks, start, backend)


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description="run drawn cases of tensor parallelism, and show their coverage"
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=8, help="the most that a world may have")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="sim", help="as --smp-backend")
    given = parser.parse_args(arguments)
    # Many cases have layers that stay, or nothing else, on purpose.
    logging.getLogger("smp_core").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", IgnoredKeyWarning)
    begun = time.monotonic()
    found = profile(given.cases, given.ranks, given.seed, given.backend)
    return found.report(time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main())
