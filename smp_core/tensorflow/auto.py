"""Automatic partition: every layer goes to a partition by its cost, in the order in which ``call`` reaches it.

A *scope* is the layer of an operation in its name: a layer of the model, or a layer in one that is too expensive for a
partition, as in a Sequential that holds the whole network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from smp_core.tensorflow.placement import TracedOperation
from smp_core.tensorflow.segments import Graph

#: The tag of operations that have no partition yet.
UNPLACED = -3


def resolve(graph: Graph, layers: dict[str, int], default: int) -> tuple[TracedOperation, ...]:
    """The operations, with the partition of their scope instead of ``UNPLACED``.

    A scope that is not among ``layers``, as of a layer that is built later, joins the one before it.
    """
    last, found = default, []
    for each in graph.traced:
        if each.tag != UNPLACED:
            found.append(each)
            continue
        last = layers.setdefault(_known_scope(each.name, layers), last)
        found.append(dataclasses.replace(each, tag=last))
    return tuple(found)


def decide(graph: Graph, layers: Mapping[int, str], count: int) -> dict[str, int]:
    """The partition of each scope.

    ``layers`` are the names of the layers of the trainable variables, by the placeholders of their handles.
    """
    handles = {inner.operation for outer, inner in graph.captures}
    unplaced = [at for at, each in enumerate(graph.traced) if each.tag == UNPLACED]
    costs = _costs(graph, handles, unplaced)
    most = sum(costs.values()) / count
    scopes = {at: _scope(graph.traced[at].name, 2) for at in unplaced}
    depth = 2
    while True:
        inside: dict[str, set[str]] = {}
        total: dict[str, int] = {}
        for at in unplaced:
            read = {value.operation for value in graph.traced[at].inputs}
            own = inside.setdefault(scopes[at], set())
            own |= {layers[each] for each in read & layers.keys()}
            total[scopes[at]] = total.get(scopes[at], 0) + costs[at]
        large = {each for each, cost in total.items() if cost > most and len(inside[each]) > 1}
        depth += 1
        divided = {
            at: _scope(graph.traced[at].name, depth) if scopes[at] in large else scopes[at]
            for at in unplaced
        }
        if divided == scopes:
            break
        scopes = divided
    order = list(dict.fromkeys(scopes.values()))
    bounds = split([total[each] for each in order], count, [bool(inside[each]) for each in order])
    return {
        each: partition
        for partition, (start, end) in enumerate(bounds)
        for each in order[start:end]
    }


def _scope(name: str, depth: int) -> str:
    """The first so many parts of an operation's scope; the model alone for one of no layer."""
    parts = name.split("/")
    return "/".join(parts[: min(depth, max(1, len(parts) - 1))])


def _known_scope(name: str, layers: Mapping[str, int]) -> str:
    """The smallest scope that is among ``layers``; else the layer of the model."""
    for depth in range(name.count("/"), 2, -1):
        if (scope := _scope(name, depth)) in layers:
            return scope
    return _scope(name, 2)


def _costs(graph: Graph, handles: set[int], operations: Sequence[int]) -> dict[int, int]:
    """The bytes of the tensors that each operation makes, and of the variables that it is the first to read."""
    costs: dict[int, int] = {}
    seen: set[int] = set()
    for at in operations:
        cost = 0
        node = graph.nodes[at]
        fresh = {value.operation for value in graph.traced[at].inputs} & handles - seen
        seen |= fresh
        if node.type != "ReadVariableOp" or fresh:
            for tensor in node.outputs:
                count = tensor.shape.num_elements() if tensor.shape.rank is not None else 1
                cost += (count or 1) * (tensor.dtype.size or 1)
        costs[at] = cost
    return costs


def split(
    costs: Sequence[int], count: int, trains: Sequence[bool] | None = None
) -> list[tuple[int, int]]:
    """Split a sequence into ``count`` runs, some of which may be empty.

    Of all splits the one with the fewest runs that train nothing, then the one whose most expensive run is cheapest,
    then the one whose early runs are longest.

    Args:
        costs: the cost of each element.
        count: the number of runs.
        trains: whether each element has trainable variables; all have if not given.
    """
    totals, trained = [0], [0]
    for each, has in zip(costs, trains or [True] * len(costs), strict=True):
        totals.append(totals[-1] + each)
        trained.append(trained[-1] + has)
    # best[k][i]: of the first i elements in k runs, how many train nothing, the cost of the most expensive, and where
    # the last of them starts
    never = 2**62
    best = [[(0, 0 if not i else never, 0) for i in range(len(totals))]]
    for _ in range(count):
        row = []
        for end in range(len(totals)):
            row.append(
                min(
                    (
                        best[-1][start][0] + (trained[end] == trained[start]),
                        max(best[-1][start][1], totals[end] - totals[start]),
                        -start,
                    )
                    for start in range(end + 1)
                    if best[-1][start][1] < never
                )
            )
        best.append([(idle, cost, -start) for idle, cost, start in row])
    bounds, end = [], len(costs)
    for row in reversed(best[1:]):
        start = row[end][2]
        bounds.append((start, end))
        end = start
    return bounds[::-1]
