"""The whole model as a SavedModel: its variables are brought together on one rank for the time of the writing."""

from __future__ import annotations

from typing import Any

from smp_core.errors import CheckpointError
from smp_core.tensorflow import tensorflow_parts as parts
from smp_core.tensorflow.collective_try import collective_try
from smp_core.tensorflow.session import TensorFlowSession
from smp_core.tensorflow.tensorflow_parts import tf
from smp_core.topology import GroupKind


def save(session: TensorFlowSession, model: Any, path: str, signature: Any) -> None:
    """Save the model. Every rank of the world calls it; the first replica's rank of partition 0 writes.

    Raises CheckpointError on the ranks that do not write, if the one that does failed.
    """
    group = session.runtime.group(GroupKind.PP)
    variables = model.all_variables()
    owners = [session.owners[parts.handle_key(parts.handle_of(each)[0])] for each in variables]
    local = {
        at: each.numpy()
        for at, (each, owner) in enumerate(zip(variables, owners, strict=True))
        if owner == session.partition
    }
    gathered = session.runtime.fabric.objects.allgather(local, group)

    def write() -> None:
        if session.partition or session.runtime.position(GroupKind.RDP):
            return
        remote = {at: value for each in gathered for at, value in each.items() if at not in local}
        for at, value in remote.items():
            parts.materialize(variables[at], value)
        session.shows_all = True
        try:
            whole = tf.Module()
            # Not the model itself: TensorFlow finds no variables of random generators in a model of Keras 3.
            whole.all_variables = [parts.inner(each) for each in variables]
            tf.saved_model.save(whole, path, signatures=_serving(model, signature))
        finally:
            session.shows_all = False
            for at in remote:
                parts.free(variables[at])

    call = "smp.DistributedModel.save_model"
    collective_try(session.runtime, call, write, CheckpointError)


def _serving(model: Any, signature: Any) -> Any:
    flat = tf.nest.flatten(signature)
    specs = [each for each in flat if isinstance(each, tf.TensorSpec)]

    @tf.function(input_signature=specs)  # type: ignore[untyped-decorator]
    def serve(*tensors: Any) -> dict[str, Any]:
        given = iter(tensors)
        arguments = [next(given) if isinstance(each, tf.TensorSpec) else each for each in flat]
        args, kwargs = tf.nest.pack_sequence_as(signature, arguments)
        outputs = model(*args, **kwargs)
        return {f"output_{at}": each for at, each in enumerate(tf.nest.flatten(outputs))}

    return serve.get_concrete_function()
