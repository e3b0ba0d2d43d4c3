"""The state of an optimizer of Keras in a checkpoint: each slot by the variable that it is for.

Keras numbers slots in the order in which the optimizer was built. After a restart a script may build its optimizers in
another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smp_core.errors import CheckpointError
from smp_core.tensorflow import tensorflow_parts as parts
from smp_core.tensorflow.tensorflow_parts import tf

_OTHER = -1


def is_numbered(optimizer: Any) -> bool:
    """Return whether Keras numbers the slots; those of Keras 2's legacy optimizers go by variable as they are."""
    return isinstance(optimizer, tf.keras.optimizers.Optimizer)


def built_for(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    """The indices in ``variables`` of those that the optimizer was built for, in its order; -1 for one not there."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    at = {place: index for index, place in enumerate(parts.places_in(inner, variables))}
    return [at.get(place, _OTHER) for place in range(parts.count_in(inner))]


def build(name: str, optimizer: Any, variables: Sequence[Any], order: Sequence[int]) -> None:
    """Build an optimizer as it was when it was saved, unless it is built.

    Raises CheckpointError if it was built for a variable that is not the model's.
    """
    if not order or built_for(optimizer, variables):
        return
    if _OTHER in order:
        raise CheckpointError(
            f"smp.CheckpointManager.restore: {name} has slots for variables beside the model's, and is not built yet. "
            f"Call {name}.build(variables) before, or restore after the first step"
        )
    optimizer.build([variables[index] for index in order])


def by_variable(optimizer: Any, variables: Sequence[Any]) -> Any:
    """The optimizer's variables as a ``tf.train.Checkpoint``; a slot has the number of its variable in its name."""
    holder = tf.train.Checkpoint()
    order = built_for(optimizer, variables)
    seen: set[int] = set()
    for name, slots in parts.slot_lists(optimizer, len(order)).items():
        for place, (index, slot) in enumerate(zip(order, slots, strict=True)):
            if slot is not None:
                number = f"other_{place}" if index == _OTHER else index
                setattr(holder, f"{name.strip('_')}_{number}", slot)
                seen.add(id(slot))
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        holder.inner_optimizer = by_variable(inner, variables)
        seen |= {id(each) for each in inner.variables}
    rest = [each for each in optimizer.variables if id(each) not in seen]
    for at, each in enumerate(rest):
        setattr(holder, f"variable_{at}", each)
    return holder
