"""The property of the README: 8 ranks, one allgather of 8 drawn integers. On `sim`, and with no ranks at all."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from benchmarks.figures import Figure, median, seconds
from pytest_smp.proxies import the_smp
from pytest_smp.running import Controller
from pytest_smp.settings import Settings

RANKS = 8
EXAMPLES = 1000
REPEATS = 5
SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=True
)
LISTS = st.lists(st.integers(), min_size=RANKS, max_size=RANKS)


def body(smp, objects):
    """What each rank does with an example."""
    assert smp.allgather(objects[smp.rank()], smp.WORLD) == objects


def measure() -> list[Figure]:
    """Examples per second, the two kinds of run taking turns."""
    controller = Controller(
        Settings(ranks=RANKS, backend="sim", timeout=60, seed=0, strict=False), capture=True
    )

    @SETTINGS
    @hypothesis.given(objects=LISTS)
    def on_ranks(objects):
        controller.run(body, (the_smp(), objects), {}, ranks=RANKS)

    @SETTINGS
    @hypothesis.given(objects=LISTS)
    def bare(objects):
        assert [each for each in objects] == objects  # noqa: C416  (something to execute)

    try:
        for warm in (bare, on_ranks):
            warm()
        rates: dict[str, list[float]] = {"bare": [], "sim": []}
        for _ in range(REPEATS):
            rates["bare"].append(EXAMPLES / seconds(bare))
            rates["sim"].append(EXAMPLES / seconds(on_ranks))
    finally:
        controller.close()
    ratios = [sim / bare for sim, bare in zip(rates["sim"], rates["bare"], strict=True)]
    sim, alone = rates["sim"], rates["bare"]
    return [
        Figure("bare Hypothesis, no ranks", median(alone), "examples/s", (min(alone), max(alone))),
        Figure(
            "sim: allgather on 8 ranks",
            median(sim),
            "examples/s",
            (min(sim), max(sim)),
            f"{median(ratios):.2f} of bare",
            "500/s, or 0.3 of bare",
        ),
    ]
