"""The segmentation of one traced microbatch, as data: operations in segments, and the tensors that pass between them.

An *operation* has a place: a partition, ``EVERYWHERE`` (every rank runs it), or ``COPIED`` (constants, arguments and
captured tensors, which are copied to where they are used). A *segment* is the set of all operations of one level and
one place. The level of an operation is the largest level among its inputs, plus one for an input of another place or,
in a backward pass, of the forward pass. So no two segments need each other, and the segments in the order of their
levels are an order of the whole graph.

Other ranks wait for the messages of a segment. Where a large part of it is needed for no message, as the gradients of
weights are in a backward pass, that part is a segment of its own, which runs when the messages have left. Nothing in
the other part takes a tensor of it, or must run after it.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

EVERYWHERE = -1
COPIED = -2
#: Parts of the names of operations that take longer than the start of a function: products, and convolutions.
_LARGE = ("MatMul", "Einsum", "Conv")


class Value(NamedTuple):
    """One output of an operation; a tensor of the traced graph."""

    operation: int
    output: int


@dataclasses.dataclass(frozen=True, slots=True)
class GraphOperation:
    """One operation of a traced graph, in the order of creation.

    Attributes:
        name: its name in the graph.
        type: the name of its kernel.
        inputs: the tensors that it takes.
        controls: the operations that must run before it.
        outputs: the dtypes of its outputs, by name.
        place: a partition, EVERYWHERE or COPIED.
        backward: whether it computes gradients.
        deferrable: whether it depends on variables and constants alone, so that it may run later than it could.
    """

    name: str
    type: str
    inputs: tuple[Value, ...]
    controls: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ()
    place: int = EVERYWHERE
    backward: bool = False
    deferrable: bool = False


class SegmentKey(NamedTuple):
    """The key of a segment: its level, its place, and whether it is the part that no message needs."""

    level: int
    place: int
    unsent: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Operations that one rank, or every rank, runs as one function.

    Attributes:
        key: its level, its place, and whether it is the part that no message needs.
        operations: their indices, in the order of creation.
        arguments: the tensors of COPIED operations that it takes.
        inputs: the tensors of other segments that it takes.
        outputs: its tensors that other segments take, or that the step returns.
    """

    key: SegmentKey
    operations: tuple[int, ...]
    arguments: tuple[Value, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class SegmentMessage(NamedTuple):
    """The tensors that one segment sends to the rank of one partition.

    ``number`` is the same on every rank, whatever the operations are called there.
    """

    number: int
    source: SegmentKey
    destination: int
    values: tuple[Value, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Segmentation:
    """A traced microbatch in segments.

    Attributes:
        segments: in an order in which one process could run them.
        messages: in the order of their sources.
        partitions: the number of partitions.
        first_backward_level: the first level that has nothing left to do but the backward pass.
    """

    segments: tuple[Segment, ...]
    messages: tuple[SegmentMessage, ...]
    partitions: int
    first_backward_level: int

    def is_backward(self, segment: int) -> bool:
        """Return whether the segment of this index belongs to the backward pass."""
        return self.segments[segment].key.level >= self.first_backward_level

    def local(self, partition: int) -> tuple[Segment, ...]:
        """The segments that the rank of a partition runs."""
        return tuple(each for each in self.segments if each.key.place in (partition, EVERYWHERE))


def live(operations: Sequence[GraphOperation], needed: Collection[int]) -> frozenset[int]:
    """The operations that ``needed`` ones depend on, these included."""
    found: set[int] = set()
    waiting = list(needed)
    while waiting:
        index = waiting.pop()
        if index not in found:
            found.add(index)
            operation = operations[index]
            waiting += [each.operation for each in operation.inputs]
            # A copied operation is copied without the order that it had.
            waiting += operation.controls if operation.place != COPIED else ()
    return frozenset(found)


def levels(operations: Sequence[GraphOperation], alive: Collection[int]) -> dict[int, int]:
    """The level of each live operation that is not COPIED."""
    found: dict[int, int] = {}
    users: defaultdict[int, list[int]] = defaultdict(list)
    deferred: dict[int, None] = {}
    for index in sorted(alive):
        operation = operations[index]
        if operation.place == COPIED:
            continue
        before = {each.operation for each in operation.inputs} | set(operation.controls)
        before = {each for each in before if operations[each].place != COPIED}
        for each in before:
            users[each].append(index)
        found[index] = max(
            (found[each] + _crosses(operations[each], operation) for each in before),
            default=0,
        )
        if operation.deferrable and before <= deferred.keys():
            deferred[index] = None
    for index in reversed(deferred):
        found[index] = min(
            (found[user] - _crosses(operations[index], operations[user]) for user in users[index]),
            default=found[index],
        )
    return found


def _crosses(source: GraphOperation, taker: GraphOperation) -> bool:
    """Return whether an operation must be in a later segment than one whose result it takes.

    In a partition the backward pass is never in a segment of the forward pass, so that a schedule can put it off.
    """
    turns = taker.place >= 0 and taker.backward and not source.backward
    return source.place != taker.place or turns


def segment_graph(
    operations: Sequence[GraphOperation],
    partitions: int,
    results: Collection[Value],
    owned: Collection[Value] = (),
    effects: Collection[int] = (),
    destinations: Mapping[Value, int] | None = None,
) -> Segmentation:
    """Divide a graph into segments.

    Args:
        operations: all operations, in the order of creation, each after its inputs.
        partitions: the number of partitions.
        results: the tensors that every rank must have in the end.
        owned: the tensors that only the rank of their partition must have, or that of their destination.
        effects: the operations that run for what they change.
        destinations: for some of ``owned``, the partition whose rank must have it.
    """
    alive = live(operations, {each.operation for each in (*results, *owned)} | set(effects))
    level = levels(operations, alive)
    keys = {index: SegmentKey(each, operations[index].place) for index, each in level.items()}
    if partitions > 1:
        for index in _unsent(operations, keys, results, destinations or {}):
            keys[index] = keys[index]._replace(unsent=True)
    members: defaultdict[SegmentKey, list[int]] = defaultdict(list)
    for index in sorted(keys):
        members[keys[index]].append(index)

    consumers: defaultdict[Value, set[int]] = defaultdict(set)  # the places that take a tensor
    outgoing: defaultdict[SegmentKey, set[Value]] = defaultdict(set)
    taken: dict[SegmentKey, tuple[tuple[Value, ...], tuple[Value, ...]]] = {}
    for key, indices in members.items():
        arguments: dict[Value, None] = {}
        inputs: dict[Value, None] = {}
        for index in indices:
            for value in operations[index].inputs:
                source = keys.get(value.operation)
                if source is None:
                    arguments[value] = None
                elif source != key:
                    inputs[value] = None
                    consumers[value].add(key.place)
                    outgoing[source].add(value)
        taken[key] = tuple(arguments), tuple(inputs)
    for value in (*results, *owned):
        if value.operation in keys:
            outgoing[keys[value.operation]].add(value)
    for value in results:
        consumers[value].add(EVERYWHERE)
    for value, destination in (destinations or {}).items():
        consumers[value].add(destination)

    segments: list[Segment] = []
    messages: list[SegmentMessage] = []
    for key in sorted(members):
        outputs = tuple(sorted(outgoing[key]))
        segments.append(
            Segment(
                key,
                tuple(members[key]),
                *taken[key],
                outputs,
            )
        )
        if key.place == EVERYWHERE:
            continue
        for destination in range(partitions):
            sent = tuple(
                value
                for value in outputs
                if destination != key.place and {destination, EVERYWHERE} & consumers[value]
            )
            if sent:
                messages.append(SegmentMessage(len(messages), key, destination, sent))
    forward = (
        level[index]
        for index, key in keys.items()
        if key.place != EVERYWHERE
        and not operations[index].backward
        and not operations[index].deferrable
    )
    return Segmentation(tuple(segments), tuple(messages), partitions, max(forward, default=-1) + 1)


def _unsent(
    operations: Sequence[GraphOperation],
    keys: Mapping[int, SegmentKey],
    results: Collection[Value],
    destinations: Mapping[Value, int],
) -> list[int]:
    """The operations that no message of their segment needs, of each segment where they are worth one of their own."""
    needed = {value.operation for value in results}
    needed |= {
        value.operation
        for value, destination in destinations.items()
        if operations[value.operation].place != destination
    }
    for index, key in keys.items():
        for value in operations[index].inputs:
            source = keys.get(value.operation)
            if source is not None and source.place != key.place:
                needed.add(value.operation)
    senders = {keys[index] for index in needed if index in keys}
    for index in sorted(keys, reverse=True):
        if index in needed:
            operation = operations[index]
            before = {each.operation for each in operation.inputs} | set(operation.controls)
            needed |= {each for each in before if keys.get(each) == keys[index]}
    rest = [
        index
        for index in sorted(keys)
        if index not in needed and keys[index] in senders and keys[index].place != EVERYWHERE
    ]
    large = {keys[index] for index in rest if any(map(operations[index].type.count, _LARGE))}
    return [index for index in rest if keys[index] in large]


def describe(
    operations: Sequence[GraphOperation], alive: Collection[int], detail: Callable[[int], str]
) -> list[str]:
    """One line for each live operation, without names: ranks that traced the same graph have the same lines.

    ``detail`` gives what a line says of an operation besides: its shapes, and the value of a constant.
    """
    return [
        f"{operations[index].type}{list(operations[index].inputs)} -> {list(operations[index].outputs)} "
        f"at {operations[index].place}: {detail(index)}"
        for index in sorted(alive)
    ]


def fingerprint(lines: Sequence[str]) -> int:
    """A positive 63-bit number, the same for the same lines."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
