"""DistributedModel, the context ``partition``, and the hook after the partition (API 2; AWS TensorFlow API)."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsIndex, TypeVar

from smp_core.errors import (
    ArgumentTypeError,
    CheckpointError,
    OutsideStepError,
    PartitionError,
    SecondModelError,
)
from smp_core.tensorflow import saving
from smp_core.tensorflow import session as sessions
from smp_core.tensorflow import tensorflow_parts as parts
from smp_core.tensorflow.auto import UNPLACED
from smp_core.tensorflow.framework import FRAMEWORK
from smp_core.tensorflow.segmentation import EVERYWHERE
from smp_core.tensorflow.session import TensorFlowSession
from smp_core.tensorflow.tensorflow_parts import tf

Hook = TypeVar("Hook", bound=Callable[[], object])


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Operations made inside, in the ``call`` of the model, run in partition ``index``.

    The innermost context counts. Operations in none are in ``default_partition``. Ignored under ``auto_partition``, and
    where Keras only asks a layer for its shapes.

    Raises PartitionError for an index that is no partition, and inside of a branch, a loop body or a nested function,
    which is one operation of the graph; ArgumentTypeError for an index that is no int.
    """
    session = sessions.current("smp.partition")
    if isinstance(index, bool) or not isinstance(index, SupportsIndex):
        raise ArgumentTypeError(f"smp.partition: index must be an int, not {index!r}")
    chosen, count = operator.index(index), session.partitions
    config = session.runtime.config
    if not config.auto_partition and not 0 <= chosen < count:
        raise PartitionError(
            f"smp.partition: partition {chosen} does not exist: with pipeline_parallel_degree {count} partitions run "
            f"from 0 to {count - 1}"
        )
    if config.auto_partition or not session.tracing:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    if parts.is_scratch(graph):
        yield
        return
    if session.call_graph is None:
        raise PartitionError(
            "smp.partition: it places operations of the model; enter it in the model's call, not beside it"
        )
    if graph is not session.call_graph:
        raise PartitionError(
            f"smp.partition({chosen}): entered inside of a branch, a loop body or a nested tf.function "
            f"({graph.name}), which runs as a whole in one partition. Enter it around the loop or the branch"
        )
    with parts.tagged(chosen):
        yield


def register_post_partition_hook(hook: Hook) -> Hook:
    """Run ``hook()`` once, eagerly, after the model is partitioned and before the first forward pass.

    Used as a decorator; registered after the partition it does not run any more.
    """
    if not callable(hook):
        raise ArgumentTypeError(
            f"smp.register_post_partition_hook: {hook!r} is no function without arguments"
        )
    sessions.current("smp.register_post_partition_hook").hooks.append(hook)
    return hook


def _any_batch(each: Any) -> Any:
    """The specification of an argument, for batches of any size."""
    if not tf.is_tensor(each):
        return each
    sizes = each.shape.as_list() if each.shape.rank is not None else None
    return tf.TensorSpec([None, *sizes[1:]] if sizes else sizes, each.dtype)


class DistributedModel(tf.keras.Model):  # type: ignore[misc]
    """A Keras model whose ``call`` is partitioned: subclass it and implement ``call``.

    Every operation that ``call`` makes, those of layers included, runs on exactly one rank of the pipeline. The
    outputs are on all ranks. The model is called inside of a step alone. After the first step the variables of the
    model are those that this rank owns, in ``variables``, ``trainable_variables`` and their like.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        session = sessions.current("smp.DistributedModel")
        if session.model is not None:
            raise SecondModelError(
                "smp.DistributedModel: there is one already; a script has one model"
            )
        super().__init__(*args, **kwargs)
        session.model = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = sessions.current("smp.DistributedModel")
        if session.shows_all or session.call_graph is not None:
            return super().__call__(*args, **kwargs)
        if not session.tracing:
            raise OutsideStepError(
                f"smp.DistributedModel: {type(self).__name__} was called outside of a step; call it in a function "
                "that smp.step decorates"
            )
        config = session.runtime.config
        graph = tf.compat.v1.get_default_graph()
        if graph is not session.step_graph:
            raise PartitionError(
                f"smp.DistributedModel: {type(self).__name__} was called inside of a branch, a loop body or a nested "
                f"tf.function ({graph.name}), which runs as a whole. Call it in the body of the step itself"
            )
        session.call_graph = graph
        self._smp_signature = tf.nest.map_structure(_any_batch, self._served(args, kwargs))
        try:
            with parts.tagged(UNPLACED if config.auto_partition else config.default_partition):
                outputs = super().__call__(*args, **kwargs)
        finally:
            session.call_graph = None
        with parts.tagged(EVERYWHERE):
            return tf.nest.map_structure(
                lambda each: tf.identity(each) if tf.is_tensor(each) else each,
                outputs,
                expand_composites=True,
            )

    def _served(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with ``training=False`` where ``call`` takes that."""
        names, served = list(inspect.signature(self.call).parameters), dict(kwargs)
        if "training" not in names:
            return args, served
        at = names.index("training")
        if at < len(args):
            return (*args[:at], False, *args[at + 1 :]), served
        return args, {**served, "training": False}

    def profile(self, inputs: Any) -> None:
        """Accept inputs of the model, from which the original library measured costs for its automatic partition.

        Here the first step gives the costs, so the model is not called.

        Raises ArgumentTypeError if there is no tensor in ``inputs``.
        """
        sessions.current("smp.DistributedModel.profile")
        if not any(map(FRAMEWORK.is_tensor, tf.nest.flatten(inputs))):
            raise ArgumentTypeError(
                f"smp.DistributedModel.profile: inputs must be tensors, not {inputs!r}"
            )

    def save_model(self, save_path: str = "/opt/ml/model") -> None:
        """Save the whole model with its latest weights as a SavedModel, which plain TensorFlow loads.

        Every rank calls it; rank 0 of the pipeline writes. Its signature ``serving_default`` calls the model with
        ``training=False``, where ``call`` takes that, on the arguments of the last step.

        Raises CheckpointError before the first step, when the model has no variables yet, and on the other ranks if the
        one that writes failed.
        """
        session = sessions.current("smp.DistributedModel.save_model")
        if not session.partitioned:
            raise CheckpointError(
                "smp.DistributedModel.save_model: the model has not been called yet; save it after the first step"
            )
        saving.save(session, self, save_path, self._smp_signature)

    def all_variables(self) -> list[Any]:
        """The variables of all partitions."""
        session = sessions.current("smp.DistributedModel")
        before, session.shows_all = session.shows_all, True
        try:
            return list(super().variables)
        finally:
            session.shows_all = before

    def _own(self, variables: Any) -> list[Any]:
        session: TensorFlowSession = sessions.current("smp.DistributedModel")
        if not session.partitioned or session.tracing or session.shows_all:
            return list(variables)
        here = session.partition
        return [
            each
            for each in variables
            if session.owners.get(parts.handle_key(parts.handle_of(each)[0]), here) == here
        ]

    @property
    def variables(self) -> list[Any]:
        """The variables of this rank's partition; of all partitions before the first step."""
        return self._own(super().variables)

    @property
    def weights(self) -> list[Any]:
        """As ``variables``, without the states of random generators."""
        return self._own(super().weights)

    @property
    def trainable_variables(self) -> list[Any]:
        """The trainable ones of ``variables``."""
        return self._own(super().trainable_variables)

    @property
    def trainable_weights(self) -> list[Any]:
        """The trainable ones of ``weights``."""
        return self._own(super().trainable_weights)

    @property
    def non_trainable_variables(self) -> list[Any]:
        """The others of ``variables``."""
        return self._own(super().non_trainable_variables)

    @property
    def non_trainable_weights(self) -> list[Any]:
        """The others of ``weights``."""
        return self._own(super().non_trainable_weights)
