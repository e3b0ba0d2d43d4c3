"""Properties of what the API for TensorFlow refuses, on every rank."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import example, given

from conformance.cases.keras import bodies, manual, two
from conformance.cases.training import trials
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld


@requirement("TF-DIVERGENT-TRACE")
def test_ranks_that_trace_different_graphs_get_an_error_each(
    smp_world: SmpWorld, smp_engine: str
) -> None:
    keras = bodies(smp_world, 2)
    for other in range(2):
        assert all(smp_world.run(keras.divergent, smp_engine, other, ranks=2, config=manual()))


@requirement("TF-STEP-RAISES")
@given(
    partition=st.integers(0, 1),
    microbatch=st.integers(0, 1),
    phase=st.sampled_from(["forward", "backward"]),
    outer=st.booleans(),
)
@example(partition=0, microbatch=1, phase="backward", outer=False)  # the last that runs
@trials(4)
def test_an_operation_that_fails_ends_the_step_on_every_rank(
    smp_world: SmpWorld, smp_engine: str, partition: int, microbatch: int, phase: str, outer: bool
) -> None:
    keras, count = bodies(smp_world), two(smp_world)
    bad = (
        partition,
        microbatch,
        phase,
    )  # of one partition the second layer, where there is no other
    for first, loss, second, changed in smp_world.run(
        keras.failing, smp_engine, bad, outer, ranks=count, config=manual(count)
    ):
        assert first
        assert second
        # The kernels are of ones: a row's sum, three times, twice.
        assert loss == float(keras.X.sum()) * 6
        assert not changed


@requirement("TF-NO-TP")
def test_tensor_parallelism_is_refused(smp_world: SmpWorld, smp_engine: str) -> None:
    keras = bodies(smp_world, 2)
    config = {"tensor_parallel_degree": 2, "ddp": True}
    assert all(smp_world.run(keras.configured, smp_engine, config, ranks=2, init=False))


@requirement("TF-PLACEMENT")
def test_permutations_are_refused(smp_world: SmpWorld, smp_engine: str) -> None:
    keras = bodies(smp_world, 2)
    for strategy in ("DPT", "PDT", "TPD"):
        config = manual(placement_strategy=strategy)
        assert all(smp_world.run(keras.configured, smp_engine, config, ranks=2, init=False))
    for strategy in ("cluster", "spread"):
        config = manual(placement_strategy=strategy)
        assert smp_world.run(keras.configured, smp_engine, config, ranks=2, init=False) == ["", ""]
