"""The output of a step: the tensors of all microbatches, joined or reduced, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.errors import ArgumentError, SmpError
from tests.smp_core.tensorflow.small_models import (
    MANUAL,
    ONES,
    GivenCall,
    Net,
    X,
    check_refused,
    plain,
)


def results() -> dict[str, Any]:
    model = Net()

    @smp.step(non_split_inputs=["factor"])
    def step(x: Any, factor: Any) -> Any:
        outputs = model(x) * factor
        return {"outputs": outputs, "sum": tf.reduce_sum(outputs), "nothing": None}

    made = step(tf.constant(X), factor=tf.constant(0.5))
    var = tf.Variable(0.0)
    assert made["sum"].accumulate(var=var) is var
    return {
        "merge": made["outputs"].merge().numpy(),
        "concat": made["outputs"].concat().numpy(),
        "stack": made["outputs"].stack().numpy(),
        "outputs": [each.numpy() for each in made["outputs"].outputs],
        "mean": made["sum"].reduce_mean().numpy(),
        "sum": made["sum"].reduce_sum().numpy(),
        "var": var.numpy(),
        "accumulate": [
            made["sum"].accumulate(method).numpy()
            for method in ("variable", "add_n", "accumulate_n")
        ],
        "nothing": made["nothing"],
    }


def test_results_are_on_all_ranks(smp_world: Any) -> None:
    # Kernels of ones: each output is 3 times the sum of the row.
    outputs = np.repeat(X.sum(1, keepdims=True) * 3 * 0.5, 2, axis=1)
    first, second = outputs[:2].sum(), outputs[2:].sum()
    for found in smp_world.run(results, ranks=2, config=MANUAL):
        np.testing.assert_array_equal(found["merge"], outputs)
        np.testing.assert_array_equal(found["concat"], outputs)
        np.testing.assert_array_equal(found["stack"], outputs.reshape(2, 2, 2))
        np.testing.assert_array_equal(np.concatenate(found["outputs"]), outputs)
        assert found["sum"] == first + second
        assert found["mean"] == found["var"] == (first + second) / 2
        assert found["accumulate"] == [found["mean"]] * 3
        assert found["nothing"] == [None, None]


def method(**options: Any) -> Callable[[], None]:
    def body() -> None:
        model = GivenCall(plain)
        smp.step(lambda x: model(x))(tf.constant(ONES)).accumulate(**options)

    return body


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (method(method="other"), ArgumentError, "method must be one of"),
        (method(method="add_n", var=1), ArgumentError, "var is for method='variable'"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_mistake_is_told(
    smp_world: Any, body: Callable[[], None], kind: type[SmpError], words: str
) -> None:
    check_refused(smp_world, body, kind, words)
