"""The property of the README: 8 ranks, one allgather of 8 drawn integers. On each backend, and with no ranks at all."""

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


BUDGETS = {
    "sim": "500/s, or 0.3 of bare",
    "gloo": "",
    "mpi": "200/s",
}


def measure() -> list[Figure]:
    """Examples per second, ranks warm; the kinds of run take turns."""

    @SETTINGS
    @hypothesis.given(objects=LISTS)
    def bare(objects):
        assert [each for each in objects] == objects  # noqa: C416  (something to execute)

    controllers = {
        backend: Controller(
            Settings(ranks=RANKS, backend=backend, timeout=60, seed=0, strict=False), capture=True
        )
        for backend in BUDGETS
    }
    runs = {"bare": bare, **{name: _property(each) for name, each in controllers.items()}}
    try:
        for run in runs.values():
            run()
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(REPEATS):
            for name, run in runs.items():
                rates[name].append(EXAMPLES / seconds(run))
    finally:
        for controller in controllers.values():
            controller.close()
    figures = []
    for name, of in rates.items():
        ratios = [one / alone for one, alone in zip(of, rates["bare"], strict=True)]
        title = "bare Hypothesis, no ranks"
        ratio = budget = ""
        if name != "bare":
            title = f"{name}: allgather on {RANKS} ranks"
            ratio, budget = f"{median(ratios):.2f} of bare", BUDGETS[name]
        spread = min(of), max(of)
        figures.append(Figure(title, median(of), "examples/s", spread, ratio, budget))
    return figures


def _property(controller):
    @SETTINGS
    @hypothesis.given(objects=LISTS)
    def on_ranks(objects):
        controller.run(body, (the_smp(), objects), {}, ranks=RANKS)

    return on_ranks
