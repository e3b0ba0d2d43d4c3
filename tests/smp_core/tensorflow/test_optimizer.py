"""The methods of optimizers and metrics that scripts call."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.errors import ArgumentTypeError
from tests.smp_core.tensorflow.small_models import MANUAL, Net, X, trained_automatically


def test_a_rank_without_variables_applies_no_gradients(smp_world: Any) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    found = smp_world.run(trained_automatically, "one layer", ranks=2, config=config)
    assert sorted(found) == [[], [9, 3]]


def other_names() -> list[Any]:
    model = Net()
    model.profile(tf.constant(X))
    with pytest.raises(ArgumentTypeError, match="inputs must be tensors"):
        model.profile("images")
    metric = tf.keras.metrics.Mean()
    metric.update_state(3.0)
    metric.reset_states()
    optimizer = tf.keras.optimizers.SGD(0.5)
    smp.core.barrier()
    return [float(metric.result()), len(optimizer.variables()), smp.core.initialized]


def test_names_that_scripts_use_besides(smp_world: Any) -> None:
    optimizer = tf.keras.optimizers.SGD(0.5)
    wanted = [0.0, len(optimizer.variables), True]
    assert smp_world.run(other_names, ranks=2, config=MANUAL) == [wanted] * 2
    assert not smp.core.initialized
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = smp.core.other
