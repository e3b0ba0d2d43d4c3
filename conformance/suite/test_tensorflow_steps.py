"""Properties of smp.step as a ``tf.function``, and of what a script does around it."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from conformance.cases.keras import KerasCase, bodies, manual, script, two
from conformance.cases.training import trials
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld


@requirement("TF-STEP-TF-FUNCTION")
def test_an_input_signature_is_of_all_that_it_allows(smp_world: SmpWorld, smp_engine: str) -> None:
    calls = [(2, "float32", 1), (3, "float32", 1), (4, "float32", 2)]
    body, count = bodies(smp_world).traces, two(smp_world)
    for first, *others in smp_world.run(
        body, smp_engine, calls, True, ranks=count, config=manual(count)
    ):
        assert first >= 1
        assert others == [0, 0]


@requirement("TF-STEP-RETRACE")
@given(rows=st.integers(2, 4), option=st.integers(2, 5))
@trials(3)
def test_a_step_is_traced_for_what_is_new_alone(
    smp_world: SmpWorld, smp_engine: str, rows: int, option: int
) -> None:
    first = (rows, "float32", 1)
    calls = [
        first,
        first,
        (rows + 1, "float32", 1),
        (rows, "float64", 1),
        (rows, "float32", option),
    ]
    body, count = bodies(smp_world).traces, two(smp_world)
    seen = smp_world.run(
        body, smp_engine, [*calls, *calls], False, ranks=count, config=manual(count)
    )
    for counts in seen:
        assert counts[1] == 0
        assert all(counts[at] >= 1 for at in (0, 2, 3, 4))
        assert counts[5:] == [0] * 5


@requirement("TF-STEP-OUTER")
def test_an_outer_function_trains_alike(smp_world: SmpWorld, smp_engine: str) -> None:
    keras, count = script(smp_world), two(smp_world)
    blocks = (("dense", 0), ("batch norm", 1), ("nested", 0), ("cond", 1), ("while", 0))
    case = KerasCase(blocks, embedding=0, head=1, tied=True, default=1, partitions=2).on(count)
    found = smp_world.run(keras.train, smp_engine, case, 3, True, ranks=count, config=case.config())
    keras.check(case, found, 3, True)


@requirement("TF-STEP-ORDER")
def test_steps_and_assignments_take_effect_in_order(smp_world: SmpWorld, smp_engine: str) -> None:
    keras, count = bodies(smp_world), two(smp_world)
    # The kernels are of ones: a row's sum, three times, twice.
    loss = float(keras.X.sum()) * 6
    for found in smp_world.run(keras.in_order, smp_engine, ranks=count, config=manual(count)):
        assert found == [loss, 2 * loss, 10 * loss, 10.0]


@requirement("TF-STEP-ORDER")
def test_steps_of_a_graph_take_effect_in_order_on_every_rank(
    smp_world: SmpWorld, smp_engine: str
) -> None:
    keras, count = bodies(smp_world), two(smp_world)
    loss = float(keras.X.sum()) * 6
    for found in smp_world.run(keras.in_order, smp_engine, True, ranks=count, config=manual(1)):
        assert found == [loss, 2 * loss, 10 * loss, 10.0]


@requirement("TF-STEP-OUTSIDE")
def test_a_call_outside_of_a_step_is_refused(smp_world: SmpWorld, smp_engine: str) -> None:
    keras, count = bodies(smp_world), two(smp_world)
    for error, loss in smp_world.run(keras.outside, smp_engine, ranks=count, config=manual(count)):
        assert error
        assert loss == float(keras.X.sum()) * 6


@requirement("TF-MB-MERGE")
@given(microbatches=st.integers(2, 4))
@trials(3)
def test_merge_keeps_the_order_of_the_batch(
    smp_world: SmpWorld, smp_engine: str, microbatches: int
) -> None:
    keras, count = bodies(smp_world), two(smp_world)
    config = manual(count, microbatches)
    sums = 3 * np.arange(6.0 * microbatches).reshape(-1, 3).sum(1)
    for found in smp_world.run(keras.joined, smp_engine, microbatches, ranks=count, config=config):
        np.testing.assert_array_equal(found["merge"], np.stack([sums, sums], 1))


@requirement("TF-MB-ACCUMULATE")
@given(microbatches=st.sampled_from([2, 4]))
@trials(2)
def test_accumulate_is_the_mean(smp_world: SmpWorld, smp_engine: str, microbatches: int) -> None:
    keras, count = bodies(smp_world), two(smp_world)
    config = manual(count, microbatches)
    sums = 3 * np.arange(6.0 * microbatches).reshape(-1, 3).sum(1)
    mean = np.stack([sums, sums], 1).reshape(microbatches, 2, 2).mean(0)
    for found in smp_world.run(keras.joined, smp_engine, microbatches, ranks=count, config=config):
        for each in (*found["accumulate"], found["mean"], found["var"]):
            np.testing.assert_array_equal(each, mean)
        assert found["returned"]


@requirement("TF-HOOK-ONCE")
def test_the_hook_is_called_once_and_before_all(smp_world: SmpWorld, smp_engine: str) -> None:
    keras, count = bodies(smp_world), two(smp_world)
    for seen in smp_world.run(keras.hooked, smp_engine, ranks=count, config=manual(count)):
        # On two ranks a layer's kernel and bias; two steps, and one of a smaller batch, of two microbatches.
        assert seen == [("hook", True, 4 // count), *["forward"] * (12 // count)]
