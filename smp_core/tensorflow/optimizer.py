"""``get_gradients`` for the optimizers of Keras that have none: scripts of the API call it inside of a step."""

from __future__ import annotations

from typing import Any

from smp_core.tensorflow import tensorflow_parts as parts
from smp_core.tensorflow.tensorflow_parts import tf


def get_gradients(self: Any, loss: Any, params: Any) -> list[Any]:
    """The gradients of a loss, one for each variable, None for one that it does not depend on."""
    found = tf.gradients(loss, [parts.inner(each) for each in params])
    return [
        tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in found
    ]


def install() -> None:
    """Give Keras's optimizers the method where they lack it."""
    if not hasattr(tf.keras.optimizers.Optimizer, "get_gradients"):
        tf.keras.optimizers.Optimizer.get_gradients = get_gradients
