"""Properties of where operations of a Keras model run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from conformance.cases.keras import Path, bodies, manual, paths
from conformance.cases.training import trials
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld

STEPS = 2


def ran(
    smp_world: SmpWorld, engine: str, layers: list[Path], config: dict[str, Any]
) -> list[Counter[Any]]:
    """How often each operation ran, by rank."""
    count = config["pipeline_parallel_degree"]
    found = smp_world.run(
        bodies(smp_world, count).runs, engine, layers, STEPS, ranks=count, config=config
    )
    return [Counter(each) for each in found]


@st.composite
def placed(draw: st.DrawFn, ranks: int, least: int = 0) -> tuple[int, list[Path]]:
    """Draw up to three partitions, and where each of two to four layers is, in at least so many contexts."""
    count = draw(st.integers(min(2, ranks), min(3, ranks)))
    path = paths(count).filter(lambda each: len(each) >= least)
    return count, draw(st.lists(path, min_size=2, max_size=4))


@requirement("TF-OPS-ONE-RANK")
def test_an_operation_and_its_gradient_run_on_one_rank(
    smp_world: SmpWorld, smp_engine: str
) -> None:
    layers: list[Path] = [(0,), (1,), (1,), (0,), (1,)]
    first, second = ran(smp_world, smp_engine, layers, manual())
    for number in range(len(layers)):
        for phase in ("forward", "backward"):
            counts = first[phase, number], second[phase, number]
            own = layers[number][0]
            assert counts == ((STEPS * 2, 0) if own == 0 else (0, STEPS * 2)), (phase, number)


@requirement("TF-OPS-ONE-RANK")
@given(data=st.data(), microbatches=st.integers(1, 3))
@trials(5)
def test_no_operation_runs_twice(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, microbatches: int
) -> None:
    count, layers = data.draw(placed(smp_world.ranks), "case")
    seen = ran(smp_world, smp_engine, layers, manual(count, microbatches))
    for number in range(len(layers)):
        found = [(each["forward", number], each["backward", number]) for each in seen]
        times = STEPS * microbatches
        assert sorted(found) == [(0, 0)] * (count - 1) + [(times, times)], number


@requirement("TF-OPS-OUTSIDE-ALL")
@given(data=st.data(), microbatches=st.integers(1, 3))
@trials(5)
def test_operations_outside_run_on_every_rank(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, microbatches: int
) -> None:
    count, layers = data.draw(placed(smp_world.ranks), "case")
    for each in ran(smp_world, smp_engine, layers, manual(count, microbatches)):
        assert each["outside", 0] == STEPS * microbatches


@requirement("TF-PART-INNERMOST")
@given(data=st.data())
@trials(5)
def test_the_innermost_context_counts(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject
) -> None:
    count, layers = data.draw(placed(smp_world.ranks, least=1), "case")
    layers = [*layers, (0, count - 1), (count - 1, 0)]
    seen = ran(smp_world, smp_engine, layers, manual(count))
    owners = [
        {rank for rank, each in enumerate(seen) if each["forward", number]}
        for number in range(len(layers))
    ]
    assert owners == [{path[-1]} for path in layers]


@requirement("TF-PART-DEFAULT")
@given(default=st.integers(0, 1), second=st.integers(0, 1))
@trials(4)
def test_what_no_context_holds_is_in_the_default_partition(
    smp_world: SmpWorld, smp_engine: str, default: int, second: int
) -> None:
    layers: list[Path] = [(), (second,), ()]
    for default_partition in (default, 1):
        config = manual(default_partition=default_partition)
        seen = ran(smp_world, smp_engine, layers, config)
        for number in (0, 2):
            assert [each["forward", number] > 0 for each in seen] == [
                default_partition == rank for rank in range(2)
            ]


@requirement("TF-PART-AUTO-IGNORED")
def test_automatic_partition_ignores_contexts(smp_world: SmpWorld, smp_engine: str) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    plain = ran(smp_world, smp_engine, [(), (), (), ()], config)
    assert all(any(phase == "forward" for phase, _ in each) for each in plain)
    assert ran(smp_world, smp_engine, [(1,), (0, 1), (7,), (0,)], config) == plain


@requirement("TF-PART-INDEX")
@given(index=st.sampled_from([2, -1]) | st.integers(3, 99))
@trials(4)
def test_a_partition_that_does_not_exist_is_refused(
    smp_world: SmpWorld, smp_engine: str, index: int
) -> None:
    body = bodies(smp_world, 2).bad_index
    for error, seen in smp_world.run(body, smp_engine, index, ranks=2, config=manual()):
        assert error
        assert seen == []
