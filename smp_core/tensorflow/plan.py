"""The plan of one traced step: its segmentation, this rank's functions, and the tensors that the step returns here."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from smp_core.errors import PartitionError
from smp_core.tensorflow import auto, segments
from smp_core.tensorflow import tensorflow_parts as parts
from smp_core.tensorflow.framework import StepSum, StepTensor
from smp_core.tensorflow.placement import OperationPlaces, TracedOperation, place
from smp_core.tensorflow.segmentation import (
    COPIED,
    EVERYWHERE,
    GraphOperation,
    Segmentation,
    SegmentMessage,
    Value,
    describe,
    fingerprint,
    live,
    segment_graph,
)
from smp_core.tensorflow.segments import Graph
from smp_core.tensorflow.session import TensorFlowSession
from smp_core.tensorflow.tensorflow_parts import tf
from smp_core.tensorflow.transport import MOST_DIMENSIONS, Spec, is_too_deep


@dataclasses.dataclass(eq=False, slots=True)
class Plan:
    """One traced step on one rank.

    Attributes:
        graph: the traced microbatch.
        segmentation: its segments and messages.
        functions: the functions of this rank's segments, by the index of the segment.
        feeds: the tensors that each of these functions takes.
        sends: the messages that leave with each of these segments.
        receives: the message that brings each tensor of another rank.
        specs: dtype and shape of each tensor of a message.
        serial: pairs of segments: the first of a microbatch waits for the second of the one before.
        handles: the variables that these functions use.
        returned: the structure that the step returns on this rank, with Value as leaves.
        leaves: these leaves, each once.
        uses: how often this rank takes each tensor: for a segment, for a message, for what it returns.
        owned: the returned tensors that only this rank has: its gradients.
        description: the lines by which ranks compare what they traced.
        fingerprint: the number that stands for them.
    """

    graph: Graph
    segmentation: Segmentation
    functions: dict[int, Any]
    feeds: dict[int, list[Value]]
    sends: dict[int, list[SegmentMessage]]
    receives: dict[Value, SegmentMessage]
    specs: dict[Value, Spec]
    serial: list[tuple[int, int]]
    handles: list[Any]
    returned: Any
    leaves: list[Value]
    uses: Counter[Value]
    owned: frozenset[Value]
    description: list[str]
    fingerprint: int

    def result(
        self,
        values: Mapping[Value, Any],
        averaged: Callable[[Any], Any] | None,
        sums: Mapping[Value, StepSum],
    ) -> Any:
        """The structure that one microbatch returns on this rank."""

        def filled(part: Any) -> Any:
            if isinstance(part, Value):
                average = averaged if part in self.owned else None
                return StepTensor(values[part], average, sums.get(part))
            return _mapped(part, filled)

        return filled(self.returned)


def make(session: TensorFlowSession, concrete: Any, trainable: Sequence[Any]) -> Plan:
    """Place the operations that were traced, divide them into segments, and build this rank's functions.

    ``trainable`` are all trainable variables of the model.

    Raises PartitionError for a graph that cannot be partitioned.
    """
    graph = segments.read(concrete)
    handles = {
        inner.operation: outer for outer, inner in graph.captures if outer.dtype == tf.resource
    }
    variables = {parts.handle_key(parts.handle_of(each)[0]): each for each in _variables(session)}
    variable_names = {
        at: getattr(variables.get(parts.handle_key(outer)), "path", None) or graph.traced[at].name
        for at, outer in handles.items()
    }
    known_owners = {
        at: session.owners[parts.handle_key(outer)]
        for at, outer in handles.items()
        if parts.handle_key(outer) in session.owners
    }
    default = session.runtime.config.default_partition
    default_owners = {
        at: default for at, outer in handles.items() if parts.handle_key(outer) in variables
    }
    placeholder = {parts.handle_key(outer): at for at, outer in handles.items()}
    keys = [parts.handle_key(parts.handle_of(each)[0]) for each in trainable]
    order = [placeholder.get(key) for key in keys]
    traced = (
        auto.resolve(graph, session.layers, session.runtime.config.default_partition)
        if session.runtime.config.auto_partition
        else graph.traced
    )
    structure = concrete.graph.structured_outputs
    placed = place(
        traced,
        variable_names,
        known_owners=known_owners,
        colocated=dict(_colocated(graph, traced, structure, order)),
        default_owners=default_owners,
    )
    for at, owner in placed.owners.items():
        if owner != EVERYWHERE:
            session.owners.setdefault(parts.handle_key(handles[at]), owner)

    # As model.trainable_variables has them after the first step.
    owners = [session.owners.get(key, default) for key in keys]
    returned, owned, others, destinations = _returned(
        graph, structure, placed.operations, owners, session.partition
    )
    leaves = set(graph.outputs)
    _warn_of_constants(session, placed.operations, leaves, default_owners.keys())
    results = sorted(each for each in leaves if each not in owned | others)
    made = segment_graph(
        placed.operations,
        session.partitions,
        results,
        sorted(owned | others),
        graph.effects,
        destinations,
    )
    alive = live(placed.operations, {each.operation for each in leaves} | set(graph.effects))
    lines = describe(placed.operations, alive, graph.detail)
    lines += [f"message {each}" for each in made.messages]  # whose numbers all ranks must agree on
    here = {
        at: each
        for at, each in enumerate(made.segments)
        if each.key.place in (session.partition, EVERYWHERE)
    }
    index = {each.key: at for at, each in enumerate(made.segments)}
    sends: dict[int, list[SegmentMessage]] = {}
    receives: dict[Value, SegmentMessage] = {}
    specs: dict[Value, Spec] = {}
    for message in made.messages:
        if message.source.place == session.partition:
            sends.setdefault(index[message.source], []).append(message)
        elif message.destination == session.partition:
            receives |= dict.fromkeys(message.values, message)
        for value in message.values:
            tensor = graph.tensor(value)
            shape = None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
            specs[value] = spec = Spec(tensor.dtype.as_numpy_dtype, shape)
            if is_too_deep(spec):
                raise PartitionError(
                    f"smp.partition: {tensor.op.name} ({tensor.op.type}) leaves partition {message.source.place} with "
                    f"{tensor.shape.rank} dimensions, one of them of unknown size: a message has at most "
                    f"{MOST_DIMENSIONS} then. Use tf.ensure_shape, or reshape it"
                )
    feeds = {at: [*each.inputs, *segments.fed_arguments(graph, each)] for at, each in here.items()}
    returned_here = list(dict.fromkeys(_leaves(returned)))
    sent = [value for each in sends.values() for message in each for value in message.values]
    taken = [value for each in feeds.values() for value in each]
    used = {value for each in here.values() for value in each.arguments}
    return Plan(
        graph,
        made,
        {at: segments.build(graph, placed.operations, each) for at, each in here.items()},
        feeds,
        sends,
        receives,
        specs,
        _serial(placed, made),
        [outer for value, outer in graph.handles.items() if value in used],
        returned,
        returned_here,
        Counter([*taken, *sent, *returned_here]),
        frozenset(owned),
        lines,
        fingerprint(lines),
    )


def _warn_of_constants(
    session: TensorFlowSession,
    operations: Sequence[GraphOperation],
    leaves: Collection[Value],
    variables: Collection[int],
) -> None:
    """Warn if a step returns tensors and none of them is computed from a variable of the model (API 2)."""
    # Without control inputs: TensorFlow adds those of all that must run to what a function returns.
    needed, waiting = set[int](), [each.operation for each in leaves]
    while waiting:
        at = waiting.pop()
        if at not in needed:
            needed.add(at)
            waiting += [each.operation for each in operations[at].inputs]
    if leaves and _variables(session) and not needed.intersection(variables):
        warnings.warn(
            "smp.step: no tensor that the step returns depends on the model, and its return value must: return its "
            "loss, its output or its gradients",
            stacklevel=2,
        )


def layers_of(graph: Graph, variables: Sequence[Any]) -> dict[int, str]:
    """The names of the layers of variables, by the placeholders of those that the graph uses."""
    names = {
        parts.handle_key(parts.handle_of(each)[0]): str(getattr(each, "path", each.name))
        for each in variables
    }
    return {
        inner.operation: names[parts.handle_key(outer)].rpartition("/")[0]
        for outer, inner in graph.captures
        if parts.handle_key(outer) in names
    }


def _variables(session: TensorFlowSession) -> list[Any]:
    return [] if session.model is None else session.model.all_variables()


def _serial(placed: OperationPlaces, made: Segmentation) -> list[tuple[int, int]]:
    """The first and the last segment that use each variable that the step changes."""
    segment_of = {
        operation: at for at, each in enumerate(made.segments) for operation in each.operations
    }
    users: dict[int, list[int]] = {handle: [] for handle in placed.changed()}
    for index, each in enumerate(placed.operations):
        for value in each.inputs:
            if value.operation in users and index in segment_of:
                users[value.operation].append(segment_of[index])
    return sorted({(min(each), max(each)) for each in users.values() if each})


def _colocated(
    graph: Graph, traced: Sequence[TracedOperation], structure: Any, order: Sequence[int | None]
) -> Iterator[tuple[int, int]]:
    """The operations that sum and shape the gradients of one variable, if the step returns all gradients in a list."""
    for part in _lists(structure):
        if len(part) != len(order):
            continue
        for leaf, handle in zip(part, order, strict=True):
            if handle is None or not tf.is_tensor(leaf):
                continue
            waiting = [graph.value(leaf).operation]
            while waiting:
                at = waiting.pop()
                if traced[at].tag is None and traced[at].origin is None:
                    yield at, handle
                    waiting += [value.operation for value in traced[at].inputs]


def _lists(part: Any) -> Iterator[Any]:
    if isinstance(part, list):
        yield part
    children = part.values() if isinstance(part, Mapping) else part
    if isinstance(part, list | tuple | Mapping):
        for each in children:
            yield from _lists(each)


def _returned(
    graph: Graph,
    structure: Any,
    operations: Sequence[GraphOperation],
    owners: Sequence[int],
    here: int,
) -> tuple[Any, set[Value], set[Value], dict[Value, int]]:
    """The structure that the step returns on this rank, its own gradients, those of other ranks, and the owners of
    gradients that another rank computes.

    A list of gradients becomes the list of this rank's. A gradient of another rank at any other place becomes None.
    """
    owned: set[Value] = set()
    others: set[Value] = set()
    destinations: dict[Value, int] = {}

    def is_gradient(leaf: Any) -> bool:
        if not tf.is_tensor(leaf):
            return False
        operation = operations[graph.value(leaf).operation]
        return operation.backward and operation.place >= 0

    def of_variable(leaf: Any, owner: int) -> Any:
        if not tf.is_tensor(leaf):
            return visit(leaf)
        value = graph.value(leaf)
        (owned if owner == here else others).add(value)
        if operations[value.operation].place not in (owner, EVERYWHERE, COPIED):
            destinations[value] = owner
        return value

    def visit(part: Any) -> Any:
        if tf.is_tensor(part):
            value = graph.value(part)
            if not is_gradient(part):
                return value
            at = operations[value.operation].place
            (owned if at == here else others).add(value)
            return value if at == here else None
        if isinstance(part, list) and any(map(is_gradient, part)):
            if len(part) == len(owners):
                # As model.trainable_variables has them, so that variables without gradient keep their places.
                found = [
                    (of_variable(leaf, owner), owner)
                    for leaf, owner in zip(part, owners, strict=True)
                ]
                return [leaf for leaf, owner in found if owner == here]
            if all(map(is_gradient, part)):
                return [each for each in map(visit, part) if each is not None]
        return _mapped(part, visit)

    return visit(structure), owned, others, destinations


def _leaves(part: Any) -> Iterator[Value]:
    if isinstance(part, Value):
        yield part
    elif isinstance(part, Mapping | list | tuple):
        for each in part.values() if isinstance(part, Mapping) else part:
            yield from _leaves(each)


def _mapped(part: Any, change: Callable[[Any], Any]) -> Any:
    """The same container with other parts; any other value as it is."""
    if isinstance(part, Value):
        return part
    if isinstance(part, Mapping):
        changed = {key: change(each) for key, each in part.items()}
        kind: Any = type(part)
        return changed if kind is dict else kind(changed)
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*map(change, part))
    if isinstance(part, list | tuple):
        kind = tuple if isinstance(part, tuple) else list
        return kind(change(each) for each in part)
    return part
