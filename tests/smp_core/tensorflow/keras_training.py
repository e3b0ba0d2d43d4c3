"""A rank's training of a small Keras model, with checkpoints."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import smp_core.tensorflow as smp
from conformance.cases.keras import KerasCase as Case
from conformance.cases.keras_script import (
    DROPOUT,
    build,
    data,
    loss_and_gradients,
    make_optimizer,
)

CASE = Case((("dense", 0), ("batch norm", 1), (DROPOUT, 1)), 0, 1, False, 0, 2)


class Training:
    """A rank's training of the case, with a manager of checkpoints."""

    def __init__(self, folder: str, **options: Any) -> None:
        self.model = model = build(CASE, smp.DistributedModel, smp.partition)
        self.optimizer = optimizer = make_optimizer(CASE)
        self.counter = tf.Variable(0)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, counter=self.counter)
        self.manager = smp.CheckpointManager(checkpoint, folder, **options)

        @smp.step
        def body(x: Any, y: Any) -> Any:
            return loss_and_gradients(CASE, model, optimizer, x, y)

        self.body = body

    def step(self, number: int) -> list[float]:
        x, y = data(CASE, number)
        loss, _, gradients = self.body(tf.constant(x), tf.constant(y))
        mean = [each.accumulate() for each in gradients]
        self.optimizer.apply_gradients(zip(mean, self.model.trainable_variables, strict=True))
        self.counter.assign_add(1)
        return [float(each) for each in loss.outputs]


def stopped(folder: str) -> None:
    training = Training(folder, max_to_keep=2)
    for number in range(3):
        training.step(number)
        training.manager.save()
