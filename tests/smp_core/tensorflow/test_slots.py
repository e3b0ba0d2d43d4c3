"""The slots of an optimizer in a checkpoint, by variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.tensorflow import tensorflow_parts as parts
from tests.smp_core.tensorflow.keras_training import CASE


class TwoLayers(smp.DistributedModel):
    """A layer on each of two partitions, of equal kernels and biases' shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (tf.keras.layers.Dense(3, name=name) for name in ("one", "other"))

    def call(self, x: Any) -> Any:
        x = self.other(self.one(x))
        with smp.partition(1):
            return x * 2.0


def slots(folder: str, saving: bool, before: bool) -> Any:
    """Two optimizers, each for one layer; after the restart they are built for the variables in another order."""
    model = TwoLayers()
    kinds = [tf.keras.optimizers.Adam(0.1), tf.keras.optimizers.Adam(0.1)]
    checkpoint = tf.train.Checkpoint(model=model, first=kinds[0], second=kinds[1])
    manager = smp.CheckpointManager(checkpoint, folder)

    @smp.step
    def body(x: Any) -> Any:
        return kinds[0].get_gradients(tf.reduce_sum(model(x)), model.trainable_variables)

    def step() -> None:
        gradients = body(tf.constant(np.eye(4, 3), tf.float32))
        pairs = [
            (each.accumulate() * (at + 1.0), variable)
            for at, (each, variable) in enumerate(
                zip(gradients, model.trainable_variables, strict=True)
            )
        ]
        if not saving:
            pairs.reverse()
        for optimizer, layer in zip(kinds, (model.one, model.other), strict=True):
            own = {id(parts.inner(each)) for each in layer.trainable_variables}
            mine = [each for each in pairs if id(parts.inner(each[1])) in own]
            if mine:
                optimizer.apply_gradients(mine)

    if saving:
        step()
        step()
        manager.save()
    else:
        if not before:
            step()
        manager.restore()
    step()
    return [each.numpy() for each in model.trainable_variables]


@pytest.mark.parametrize("before", [True, False])
def test_slots_go_by_variable_whatever_the_order(
    smp_world: Any, tmp_path: Path, before: bool
) -> None:
    config = CASE.config()
    wanted = smp_world.run(slots, str(tmp_path), True, before, ranks=2, config=config)
    found = smp_world.run(slots, str(tmp_path), False, before, ranks=2, config=config)
    assert len(wanted[0]) == 4
    for one, other in zip(wanted, found, strict=True):
        for want, have in zip(one, other, strict=True):
            np.testing.assert_array_equal(have, want)
