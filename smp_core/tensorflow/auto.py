"""Automatic partition: every layer goes to a partition by its cost, in the order in which ``call`` reaches it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from smp_core.tensorflow.placement import Traced
from smp_core.tensorflow.segments import Graph
from smp_core.tensorflow.session import TensorFlowSession

#: The tag of operations that wait for a partition.
OPEN = -3


def resolved(
    session: TensorFlowSession, graph: Graph, handles: Mapping[int, Any]
) -> tuple[Traced, ...]:
    """The operations, with the partition of their layer instead of the open tag."""
    units = [unit_of(each.name) if each.tag == OPEN else None for each in graph.traced]
    order = [each for each in dict.fromkeys(units) if each is not None]
    missing = [each for each in order if each not in session.layers]
    if missing and not session.layers:
        costs = _costs(graph, handles, units)
        bounds = split([costs[each] for each in order], session.partitions)
        for partition, (start, end) in enumerate(bounds):
            session.layers.update(dict.fromkeys(order[start:end], partition))
    last = session.runtime.config.default_partition
    found = []
    for each, unit in zip(graph.traced, units, strict=True):
        if unit is None:
            found.append(each)
            continue
        last = session.layers.setdefault(unit, last)
        found.append(dataclasses.replace(each, tag=last))
    return tuple(found)


def unit_of(name: str) -> str:
    """The layer of an operation, by the first two parts of its scope; the model alone for one of no layer."""
    parts = name.split("/")
    return "/".join(parts[:2] if len(parts) > 2 else parts[:1])


def _costs(graph: Graph, handles: Mapping[int, Any], units: list[str | None]) -> dict[str, int]:
    """The bytes of the tensors that each layer makes and of the variables that it reads first."""
    costs: dict[str, int] = {}
    seen: set[int] = set()
    for at, unit in enumerate(units):
        if unit is None:
            continue
        cost = 0
        node = graph.nodes[at]
        fresh = {value.operation for value in graph.traced[at].inputs} & handles.keys() - seen
        seen |= fresh
        if node.type != "ReadVariableOp" or fresh:
            for tensor in node.outputs:
                count = tensor.shape.num_elements() if tensor.shape.rank is not None else 1
                cost += (count or 1) * (tensor.dtype.size or 1)
        costs[unit] = costs.get(unit, 0) + cost
    return costs


def split(costs: list[int], count: int) -> list[tuple[int, int]]:
    """Cut a sequence into ``count`` runs, some of which may be empty, so that the most expensive one is cheapest.

    Among equal cuts the one whose early runs are longest.
    """
    totals = [0]
    for each in costs:
        totals.append(totals[-1] + each)
    # best[k][i]: the cheapest most expensive run of the first i elements in k runs, and where the last of them starts
    best: list[list[tuple[int, int]]] = [[(0 if not i else 2**62, 0) for i in range(len(totals))]]
    for _ in range(count):
        row = []
        for end in range(len(totals)):
            row.append(
                min(
                    (max(best[-1][start][0], totals[end] - totals[start]), -start)
                    for start in range(end + 1)
                )
            )
        best.append([(cost, -start) for cost, start in row])
    bounds, end = [], len(costs)
    for row in reversed(best[1:]):
        start = row[end][1]
        bounds.append((start, end))
        end = start
    return bounds[::-1]
