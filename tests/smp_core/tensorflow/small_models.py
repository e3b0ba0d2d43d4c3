"""Small Keras models on two partitions, and the checks of a mistake on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.errors import PartitionError, SmpError

MANUAL = {
    "pipeline_parallel_degree": 2,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
}

X = np.arange(12, dtype=np.float32).reshape(4, 3)

ONES = np.ones((4, 3), np.float32)


def name(variable: Any) -> list[str]:
    """Layer and name of a variable, of Keras 3 or 2."""
    return str(getattr(variable, "path", variable.name)).partition(":")[0].split("/")[-2:]


class Net(smp.DistributedModel):
    """Two layers on two partitions, and a count of the calls of each on this rank."""

    def __init__(self, called: list[int] | None = None) -> None:
        super().__init__()
        self.note = None if called is None else called.append  # a list would be copied by Keras
        self.one = tf.keras.layers.Dense(3, kernel_initializer="ones", name="one")
        self.two = tf.keras.layers.Dense(2, kernel_initializer="ones", name="two")

    def call(self, x: Any) -> Any:
        x = self.counted(0, self.one(x))
        with smp.partition(1):
            return self.counted(1, self.two(x))

    def counted(self, place: int, x: Any) -> Any:
        if self.note is None:
            return x

        def count(array: Any) -> Any:
            self.note(place)
            return array

        return tf.ensure_shape(tf.numpy_function(count, [x], tf.float32), x.shape)


class Held(smp.DistributedModel):
    """A whole network in one attribute."""

    def __init__(self) -> None:
        super().__init__()
        layers = tf.keras.layers
        self.all = tf.keras.Sequential(
            [layers.Dense(3), layers.Activation("relu"), layers.Dense(3), layers.Dense(2)]
        )

    def call(self, x: Any) -> Any:
        return self.all(x)


class OneLayer(smp.DistributedModel):
    """A model that no partition can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.one = tf.keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.one(x)


def trained_automatically(kind: str, others: int = 0) -> list[int]:
    """The sizes of this rank's variables after two steps of a script that knows nothing of partitions.

    ``others`` are the layers that rank 1 has made before, by which Keras counts on in names.
    """
    for _ in range(others * smp.rank()):
        tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model = Held() if kind == "held" else OneLayer()
    optimizer = tf.keras.optimizers.SGD(0.5)

    @smp.step
    def step(x: Any) -> Any:
        return optimizer.get_gradients(tf.reduce_sum(model(x)), model.trainable_variables)

    for _ in range(2):
        gradients = [each.accumulate() for each in step(tf.constant(X))]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert int(optimizer.iterations) == 2
    return [each.numpy().size for each in model.trainable_variables]


class GivenCall(smp.DistributedModel):
    """A model whose ``call`` is given."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.dense = tf.keras.layers.Dense(2, kernel_initializer="ones")

    def call(self, x: Any) -> Any:
        return self.body(self, x)


def run(body: Callable[..., Any], x: Any = ONES, **options: Any) -> Any:
    model = GivenCall(body)

    @smp.step(**options)
    def step(x: Any) -> Any:
        return model(x)

    return [each.numpy() for each in step(tf.constant(x)).outputs]


def plain(model: Any, x: Any) -> Any:
    return model.dense(x)


def check_refused(
    smp_world: Any, body: Callable[[], None], kind: type[SmpError], words: str
) -> None:
    """Run a body that makes a mistake on two ranks, and look for the words of its error."""
    with pytest.raises(kind, match=f"(?s){words}"):
        smp_world.run(body, ranks=2, config=MANUAL)


def check_alike(smp_world: Any, body: Callable[[], None]) -> None:
    """Run a body that makes a mistake on two ranks, and compare their errors."""

    def caught() -> str:
        with pytest.raises(PartitionError) as found:
            body()
        return str(found.value)

    first, second = smp_world.run(caught, ranks=2, config=MANUAL)
    assert first == second
