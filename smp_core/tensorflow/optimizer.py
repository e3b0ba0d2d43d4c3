"""The methods that scripts of the API call on optimizers and metrics, and that Keras lacks in one of its versions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from smp_core import runtime
from smp_core.tensorflow import session as sessions
from smp_core.tensorflow import tensorflow_parts as parts
from smp_core.tensorflow.tensorflow_parts import tf


def get_gradients(self: Any, loss: Any, params: Any) -> list[Any]:
    """The gradients of a loss, one for each variable, None for one that it does not depend on."""
    found = tf.gradients(loss, [parts.inner(each) for each in params])
    return [
        tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in found
    ]


class CallableList(list[Any]):
    """The variables of an optimizer, which Keras 2 has as a method as well as a property."""

    def __call__(self) -> CallableList:
        """Return the list itself."""
        return self


def _applying(apply: Callable[..., Any]) -> Callable[..., Any]:
    """``apply_gradients`` that does nothing but count on a rank whose partition has no trainable variables."""

    @functools.wraps(apply)
    def apply_gradients(
        self: Any, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        pairs = list(grads_and_vars)
        if not pairs and _has_none():
            return self.iterations.assign_add(1)
        return apply(self, pairs, *args, **kwargs)

    return apply_gradients


def _has_none() -> bool:
    if not runtime.is_initialized():
        return False
    session = sessions.current("optimizer.apply_gradients")
    return session.partitioned and not (session.model and session.model.trainable_variables)


def install() -> None:
    """Give Keras's classes the methods where they lack them."""
    kind = tf.keras.optimizers.Optimizer
    if not hasattr(kind, "get_gradients"):
        kind.get_gradients = get_gradients
    legacy = tf.keras.optimizers.legacy.Optimizer  # in Keras 3 a class that only warns
    for each in (kind, legacy):
        if hasattr(each, "apply_gradients"):
            each.apply_gradients = _applying(each.apply_gradients)
    metric = tf.keras.metrics.Metric
    if not hasattr(metric, "reset_states"):  # Keras 3
        metric.reset_states = lambda self: self.reset_state()
        variables = kind.variables
        kind.variables = property(lambda self: CallableList(variables.fget(self)))
