"""The plan of a traced step: gradients in line with variables, and tensors that no message can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.errors import PartitionError, SmpError
from smp_core.tensorflow import tensorflow_parts as parts
from tests.smp_core.tensorflow.small_models import MANUAL, X, check_alike, check_refused, name, run


class Extra(smp.DistributedModel):
    """Two layers on two partitions, and three variables beside them: one is used outside of ``call``, one never, and
    one when ``late`` is true.
    """

    def __init__(self) -> None:
        super().__init__()
        self.idle = self.add_weight(shape=(3,), initializer="ones", name="idle")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.later = self.add_weight(shape=(3,), initializer="ones", name="later")
        self.one = tf.keras.layers.Dense(3, kernel_initializer="ones", name="one")
        self.two = tf.keras.layers.Dense(2, kernel_initializer="ones", name="two")

    def call(self, x: Any, late: bool = False) -> Any:
        x = self.one(x)
        with smp.partition(1):
            return self.two(x * self.later if late else x)


def beside_the_call(late: bool) -> Any:
    model = Extra()
    optimizer = tf.keras.optimizers.SGD(1.0)

    @smp.step
    def step(x: Any, late: bool) -> Any:
        loss = tf.reduce_sum(model(x, late=late)) * model.scale
        loss += tf.nn.l2_loss(parts.inner(model.two.kernel))
        found = optimizer.get_gradients(loss, model.trainable_variables)
        return loss, found

    step(tf.constant(X), False)
    loss, gradients = step(tf.constant(X), late)
    return loss.reduce_sum().numpy(), {
        name(variable)[-1] if len(variable.shape) < 2 else name(variable)[-2]: (
            None if isinstance(each, list) else each.reduce_sum().numpy().tolist()
        )
        for each, variable in zip(gradients, model.trainable_variables, strict=True)
        if name(variable)[-1] != "bias"
    }


@pytest.mark.parametrize("late", [False, True])
def test_variables_that_the_call_does_not_use_keep_the_gradients_in_line(
    smp_world: Any, late: bool
) -> None:
    (loss, first), (other_loss, second) = smp_world.run(
        beside_the_call, late, ranks=2, config=MANUAL
    )
    total = float(X.sum()) * 3 * 2
    # The operations outside run on all ranks, those that read a variable of one rank among them.
    assert loss == other_loss == total + 2 * 3.0
    assert first["idle"] is None
    assert first["scale"] == total
    assert (first["later"] is not None) == late
    assert first["one"] == np.repeat(X.sum(0)[:, None] * 2, 3, axis=1).tolist()
    rows = float(X.sum())
    assert second == {"two": np.full((3, 2), rows + 2.0).tolist()}
    if late:
        assert first["later"] == [rows * 2] * 3


def nine_dimensions() -> None:
    def body(model: Any, x: Any) -> Any:
        x = tf.reshape(tf.boolean_mask(x, x[:, 0] > 0.0), [-1, *[1] * 8])
        with smp.partition(1):
            return x * 2.0

    run(body)


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (nine_dimensions, PartitionError, "9 dimensions, one of them of unknown size"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_mistake_is_told(
    smp_world: Any, body: Callable[[], None], kind: type[SmpError], words: str
) -> None:
    check_refused(smp_world, body, kind, words)


@pytest.mark.parametrize("body", [nine_dimensions], ids=lambda each: each.__name__)
def test_every_rank_has_the_error(smp_world: Any, body: Callable[[], None]) -> None:
    check_alike(smp_world, body)
