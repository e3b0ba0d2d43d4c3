"""Why no rank can run: the wait-for graph of a stuck world, in words.

The graph has an edge from every waiting rank to each rank that it waits for. A stuck world's graph has a cycle,
or a chain that ends at a rank that has returned. The chain needs no cycle: seven ranks can wait
in five groups while the eighth has left.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from smp_core.errors import DeadlockError
from smp_core.transport.handled import while_handling
from smp_core.transport.stack_frames import Place

_MOST_WAITS = 16  # different waits that a message lists


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """One rank's wait: its call in words, the ranks it waits for, the user's line, the likely mistake,
    the line that made the call, where that is another one, and the exception that the rank handles meanwhile.
    """

    rank: int
    call: str
    missing: tuple[int, ...]
    place: Place | None
    hint: str | None = None
    issued: Place | None = None
    exception: str = ""


def ranks_text(ranks: Iterable[int]) -> str:
    """``ranks 0-2, 5`` for 0, 1, 2, 5; ``rank 3`` for one."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {text}"


def find_cycle(edges: dict[int, tuple[int, ...]]) -> list[int]:
    """The ranks of one cycle of the wait-for graph, its lowest rank first, or an empty list."""
    state: dict[int, int] = {}  # 1: on the path, 2: left behind
    for start in sorted(edges):
        if state.get(start):
            continue
        path: list[int] = []
        stack: list[tuple[int, Iterable[int]]] = [(start, iter(edges[start]))]
        state[start] = 1
        path.append(start)
        while stack:
            node, targets = stack[-1]
            for target in targets:
                if target not in edges:
                    continue
                if state.get(target) == 1:
                    cycle = path[path.index(target) :]
                    lowest = cycle.index(min(cycle))
                    return cycle[lowest:] + cycle[:lowest]
                if not state.get(target):
                    state[target] = 1
                    path.append(target)
                    stack.append((target, iter(edges[target])))
                    break
            else:
                stack.pop()
                path.pop()
                state[node] = 2
    return []


def deadlock(
    waits: Sequence[Wait], finished: Sequence[int], size: int
) -> tuple[DeadlockError, int]:
    """The verdict on a stuck world, and the rank that it is raised on.

    The error is raised on the first rank that waits for one that has returned, else on the first of a cycle; where
    some ranks handle an exception while they wait and others do not, on the first of those that do.
    """
    waits = sorted(waits, key=lambda wait: not wait.exception)
    gone = set(finished)
    edges: dict[int, tuple[int, ...]] = {}
    for wait in waits:  # several for a rank that has threads
        edges[wait.rank] = (*edges.get(wait.rank, ()), *wait.missing)
    left_behind = [wait for wait in waits if gone.intersection(wait.missing)]
    cycle = [] if left_behind else find_cycle(edges)
    lines = [f"deadlock: {len(edges)} of {size} ranks wait, and none can go on"]
    lines += wait_lines(waits)
    if gone:
        verb = "has" if len(gone) == 1 else "have"
        lines.append(f"  {ranks_text(gone)} {verb} returned")
    if left_behind:
        root = left_behind[0]
        blamed = gone.intersection(root.missing)
        verb = "has" if len(blamed) == 1 else "have"
        lines.append(
            f"wait-for: rank {root.rank} waits for {ranks_text(blamed)}, which {verb} returned without a matching call"
        )
    elif cycle:
        root = next(wait for wait in waits if wait.rank == cycle[0])
        lines.append(
            "wait-for cycle: " + " -> ".join(f"rank {rank}" for rank in [*cycle, cycle[0]])
        )
    else:  # a chain that ends at a wait for nobody in particular
        root = next((wait for wait in waits if not wait.missing), waits[0])
    if waits[0].exception and not root.exception:
        root = waits[0]
    hints = dict.fromkeys(wait.hint for wait in waits if wait.hint)
    lines += [f"hint: {hint}" for hint in hints]
    error = DeadlockError("\n".join(lines))
    error.waits_for = edges
    return error, root.rank


def _places(wait: Wait) -> str:
    place = "" if wait.place is None else str(wait.place)
    if wait.issued is None or str(wait.issued) == place:
        return place
    return f"{place}\n      issued at {wait.issued}".lstrip()


def wait_lines(waits: Sequence[Wait]) -> list[str]:
    """One line for all ranks in the same call at the same place, waiting for the same ranks."""
    merged: dict[tuple[str, tuple[int, ...], str, str], list[int]] = {}
    for wait in waits:
        key = wait.call, wait.missing, _places(wait), while_handling(wait.exception)
        merged.setdefault(key, []).append(wait.rank)
    lines = []
    for (call, missing, place, handling), ranks in itertools.islice(merged.items(), _MOST_WAITS):
        verb = "waits" if len(ranks) == 1 else "wait"
        target = f" for {ranks_text(missing)}" if missing else ""
        lines.append(f"  {ranks_text(ranks)} {verb} in {call}{target}{handling}")
        if place:
            lines.append(f"      {place}")
    rest = sum(len(ranks) for ranks in itertools.islice(merged.values(), _MOST_WAITS, None))
    if rest:
        lines.append(f"  and {rest} more ranks")
    return lines
