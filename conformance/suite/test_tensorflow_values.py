"""Properties of the values of a Keras model that is partitioned over a pipeline, against the unpartitioned model."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from conformance.cases.keras import KerasCase, bodies, keras_cases, manual, paths, script, two
from conformance.cases.training import trials
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld


@requirement("TF-PART-VALUE")
def test_a_model_of_every_kind_of_block(smp_world: SmpWorld, smp_engine: str) -> None:
    keras, count = script(smp_world), two(smp_world)
    kinds = ("dense", "batch norm", "dropout", "nested", "cond", "while", "layer norm", "skip")
    blocks = tuple((kind, number % 2) for number, kind in enumerate(kinds))
    case = KerasCase(blocks, embedding=0, head=1, tied=True, default=0, partitions=2)
    case = case.on(count)
    found = smp_world.run(keras.train, smp_engine, case, 3, ranks=count, config=case.config())
    keras.check(case, found, 3)


@requirement("TF-PART-VALUE")
@given(data=st.data())
@trials(5)
def test_a_partition_changes_no_bit(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject
) -> None:
    keras = script(smp_world)
    case = data.draw(keras_cases(data.draw(st.integers(1, min(4, smp_world.ranks)))), "case")
    found = smp_world.run(
        keras.train, smp_engine, case, 3, ranks=case.partitions, config=case.config()
    )
    keras.check(case, found, 3)


@requirement("TF-PART-VALUE")
def test_names_of_layers_may_differ_by_rank(smp_world: SmpWorld, smp_engine: str) -> None:
    keras, count = bodies(smp_world), two(smp_world)
    wanted = keras.X.sum(1, keepdims=True) * (1.0 - 3.0) * np.ones(3, np.float32)
    for found in smp_world.run(keras.names_differ, smp_engine, ranks=count, config=manual(count)):
        np.testing.assert_array_equal(found, wanted)


@requirement("TF-OUT-ALL-RANKS")
@given(data=st.data())
@trials(4)
def test_outputs_are_on_every_rank(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject
) -> None:
    keras, count = bodies(smp_world), min(3, smp_world.ranks)
    places = data.draw(st.lists(paths(count), min_size=1, max_size=4), "places")
    every = [*places, *((at,) for at in range(1, count))]
    for found in smp_world.run(keras.stages, smp_engine, every, ranks=count, config=manual(count)):
        for number, each in enumerate(found):
            np.testing.assert_array_equal(each, keras.X * 2.0 ** (number + 1))


CHAIN = KerasCase(
    (("dense", 0), ("batch norm", 1), ("skip", 0), ("layer norm", 1)), 0, 1, True, 0, 2
)


@requirement("TF-GRAD-LOCAL")
@given(default=st.integers(0, 1), head=st.integers(0, 1), tied=st.booleans())
@trials(3)
def test_gradients_are_those_of_the_variables_of_the_rank(
    smp_world: SmpWorld, smp_engine: str, default: int, head: int, tied: bool
) -> None:
    keras, count = script(smp_world), two(smp_world)
    case = dataclasses.replace(CHAIN, default=default, head=head, tied=tied).on(count)
    body = bodies(smp_world).aligned
    found = smp_world.run(body, smp_engine, case, ranks=count, config=case.config())
    assert all(variable == gradient for rank in found for _, variable, gradient in rank)
    assert sorted(name for rank in found for name, *_ in rank) == keras.trainable(case)


@requirement("TF-SCHED-EQUAL")
@given(pipeline=st.sampled_from(["simple", "interleaved"]), active=st.integers(1, 3))
@trials(3)
def test_no_schedule_changes_a_bit(
    smp_world: SmpWorld, smp_engine: str, pipeline: str, active: int
) -> None:
    keras, count = script(smp_world), two(smp_world)
    for schedule in (pipeline, "simple"):
        case = dataclasses.replace(CHAIN, microbatches=3, pipeline=schedule).on(count)
        config = case.config(active_microbatches=active)
        found = smp_world.run(keras.train, smp_engine, case, 2, ranks=count, config=config)
        keras.check(case, found, 2)


@requirement("TF-SCHED-ACTIVE")
@given(microbatches=st.integers(2, 4), active=st.integers(1, 3))
@trials(4)
def test_no_more_microbatches_are_in_progress(
    smp_world: SmpWorld, smp_engine: str, microbatches: int, active: int
) -> None:
    body, count = bodies(smp_world).order_of_passes, two(smp_world)
    for cap in {active, 1}:
        config = manual(count, microbatches, pipeline="interleaved", active_microbatches=cap)
        for seen in smp_world.run(body, smp_engine, microbatches, ranks=count, config=config):
            assert sorted(seen) == sorted(
                (phase, at) for phase in "BF" for at in range(microbatches)
            )
            held: set[int] = set()
            for phase, at in seen:
                held ^= {at}
                assert (at in held) == (phase == "F")
                assert len(held) <= cap


@requirement("TF-SCHED-ACTIVE")
def test_forwards_come_before_backwards(smp_world: SmpWorld, smp_engine: str) -> None:
    body, count = bodies(smp_world).order_of_passes, two(smp_world)
    config = manual(count, 3, pipeline="simple")
    for seen in smp_world.run(body, smp_engine, 3, ranks=count, config=config):
        assert [phase for phase, _ in seen] == ["F"] * 3 + ["B"] * 3
