"""The state of training with TensorFlow on one rank: its model, the owners of its variables, the step in progress."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from smp_core import runtime
from smp_core.errors import ConfigError, SecondModelError
from smp_core.runtime import Runtime
from smp_core.tensorflow.segmentation import SegmentMessage
from smp_core.tensorflow.tasks import SegmentTask
from smp_core.tensorflow.tensorflow_parts import tf
from smp_core.tensorflow.transport import SegmentTransport
from smp_core.topology import GroupKind
from smp_core.transport import current_rank

#: The tasks of a step on one rank, and the messages that it takes, with their microbatches.
StepOrder = tuple[Sequence[SegmentTask], Sequence[tuple[int, SegmentMessage]]]


@dataclasses.dataclass(eq=False, slots=True)
class TensorFlowSession:
    """One rank's training.

    Attributes:
        runtime: the rank's place in the world.
        transport: its messages.
        model: the DistributedModel; None until there is one.
        owners: the partition of each variable, by the id of its handle.
        partitioned: whether the first step has partitioned the model.
        hooks: the functions that run when the model is partitioned.
        deferred_restores: restores of checkpoints, which run before the hooks.
        tracing: whether the body of a step is being traced.
        step_graph: the graph in which the body of a step is being traced.
        call_graph: the graph in which the model is being called; None outside of its ``call``.
        shows_all: whether the model is to show all of its variables, as while it is saved.
        functions: the ``tf.function`` and the plans of each step function.
        orders: for the plans of a step's microbatches, the tasks of this rank and the messages that it takes.
        layers: the partition of each layer, by its scope, under ``auto_partition``.
        autograph: whether the caller of the step wants AutoGraph, as TensorFlow says it.
        eager: whether functions run eagerly as long as ranks are threads of this process.
    """

    runtime: Runtime
    transport: SegmentTransport
    model: Any = None
    owners: dict[int, int] = dataclasses.field(default_factory=dict)
    partitioned: bool = False
    hooks: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    deferred_restores: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    tracing: bool = False
    step_graph: Any = None
    call_graph: Any = None
    shows_all: bool = False
    functions: dict[Any, Any] = dataclasses.field(default_factory=dict)
    orders: dict[Any, tuple[Sequence[SegmentTask], Sequence[tuple[int, SegmentMessage]]]] = (
        dataclasses.field(default_factory=dict)
    )
    layers: dict[str, int] = dataclasses.field(default_factory=dict)
    autograph: Any = None
    eager: bool = False

    @property
    def partition(self) -> int:
        """The partition of this rank."""
        return self.runtime.position(GroupKind.PP)

    @property
    def partitions(self) -> int:
        """The number of partitions."""
        return self.runtime.config.pipeline_parallel_degree


def current(call: str) -> TensorFlowSession:
    """This rank's session, made on the first call. Raises NotInitializedError, naming ``call``."""
    owner = runtime.current(call)
    if owner.training is None:
        _check(owner)
        eager = current_rank.ranks_are_threads()
        if eager:
            # Callbacks of a running graph come on threads of TensorFlow's own, which are no ranks.
            tf.config.run_functions_eagerly(True)
        owner.training = TensorFlowSession(owner, SegmentTransport(owner), eager=eager)
    session = owner.training
    if not isinstance(session, TensorFlowSession):
        raise SecondModelError(
            f"{call}: this rank trains with smp_core.torch already; a rank trains with one framework"
        )
    return session


def _check(owner: Runtime) -> None:
    config = owner.config
    if config.tensor_parallel_degree > 1:
        raise ConfigError(
            f"tensor_parallel_degree={config.tensor_parallel_degree}: there is no tensor parallelism for TensorFlow. "
            "See docs/spec/api.md#2"
        )
    if config.placement_strategy not in ("cluster", "spread"):
        raise ConfigError(
            f"placement_strategy={config.placement_strategy!r}: for TensorFlow it is 'cluster' or 'spread'. "
            "See docs/spec/api.md#2"
        )
