"""The automatic partition: the model's *atoms*, in the order of their first call, are cut into contiguous segments of
nearly equal cost.

An atom stays on one rank. Atoms are leaf modules, modules of torch.nn except containers (they may read parameters of
their children without calling them), and the own parameters of a module whose children are divided. Atoms that share a
parameter are merged, and so are two atoms of which one reads a parameter of the other. The atoms of a module are
contiguous in the sequence, so a cut divides every module of the tree into contiguous segments. A module whose children
are divided runs on the rank of its first atom. The root runs on rank 0.

The cost of an atom is ``memory_weight`` x its share of all bytes + (1 - ``memory_weight``) x its share of all traced
cost; without a trace, its share of all bytes.

**Bound.** With total cost T and largest atom A, over P partitions of n >= P atoms, the heaviest partition costs at most
1.1 T / P + A. Let M be the least possible maximum over P contiguous segments. Segments that are filled from the left,
each until it reaches T / P, cost at most T / P + A each, and P of them suffice, so M <= T / P + A. Cuts between modules
high in the tree are preferred to cuts inside them, as long as no segment costs more than M + 0.1 T / P. (API 9.8: any
balanced assignment that keeps shared parameters together.)
"""

from __future__ import annotations

import dataclasses
import itertools

from torch import nn

from smp_core.torch.parameters import sharing
from smp_core.torch.parameters.registration import Undivided
from smp_core.torch.pipeline.tracing import Trace

SLACK = 0.1  #: the part of T / P by which a segment may exceed the least maximum, for a cut higher in the tree
_CONTAINERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict,
    nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip


@dataclasses.dataclass(slots=True, eq=False)
class Atom:
    """Modules that stay together. ``depth`` is the depth of the cut before the atom, 0 below the root."""

    modules: list[nn.Module]
    depth: int
    bytes: float = 0.0
    cost: float = 0.0
    weight: float = 0.0


def assign(
    module: nn.Module, degree: int, memory_weight: float, trace: Trace | None = None
) -> dict[nn.Module, int]:
    """The partition of each module of the tree, as a deterministic function of the arguments.

    The lowest ``min(degree, atoms)`` partitions are used.
    """
    atoms = weigh(module, atoms_of(module, trace), memory_weight, trace)
    starts = cut([atom.weight for atom in atoms], [atom.depth for atom in atoms], degree)
    owner: dict[nn.Module, int] = {}
    for partition, (start, end) in enumerate(itertools.pairwise([*starts, len(atoms)])):
        for atom in atoms[start:end]:
            owner.update(dict.fromkeys(atom.modules, partition))
    return {each: owner[each] for each in module.modules()}


def atoms_of(module: nn.Module, trace: Trace | None) -> list[Atom]:
    """The atoms, merged where they share parameters, in the order of first calls; without a trace, of definition."""
    builder = _Builder(module, trace)
    builder.divide(module, 0)
    return builder.merged(module)


def weigh(
    module: nn.Module, atoms: list[Atom], memory_weight: float, trace: Trace | None
) -> list[Atom]:
    """Compute bytes, cost and weight of each atom. A tensor that is registered several times counts once."""
    home = {child: atom for atom in atoms for child in atom.modules}
    counted: set[int] = set()
    for entry in sharing.entries(module):
        if id(entry.tensor) not in counted:
            counted.add(id(entry.tensor))
            home[entry.owner].bytes += entry.tensor.nbytes
    if trace is not None:
        for path, child in module.named_modules():
            home[child].bytes += trace.bytes.get(path, 0)
            home[child].cost += trace.cost.get(path, 0.0)
    total_bytes = sum(atom.bytes for atom in atoms)
    total_cost = sum(atom.cost for atom in atoms)
    if not total_cost:
        memory_weight = 1.0
    for atom in atoms:
        share = atom.bytes / total_bytes if total_bytes else 1.0 / len(atoms)
        work = atom.cost / total_cost if total_cost else 0.0
        atom.weight = memory_weight * share + (1.0 - memory_weight) * work
    return atoms


def callable_module(module: nn.Module) -> bool:
    """Return whether the module has a forward. The parent reads a module without one."""
    forward = getattr(type(module), "forward", None)
    return forward is not nn.Module.forward or "forward" in vars(module)


class _Builder:
    def __init__(self, module: nn.Module, trace: Trace | None) -> None:
        self.trace = trace
        self.filled = {
            child for child in module.modules() if next(iter(child.parameters()), None) is not None
        }
        paths = {child: path for path, child in module.named_modules()}
        never = len(paths)
        self.called = trace.first_calls() if trace is not None else {}
        self.rank = {child: self.called.get(path, never) for child, path in paths.items()}
        self.never = never if trace is not None else None
        self.seen: set[nn.Module] = set()
        self.atoms: list[Atom] = []

    def divide(self, module: nn.Module, depth: int) -> None:
        """Append the atoms of ``module``."""
        self.seen.add(module)
        stay = [module]
        parts = self._parts(module, stay) if _divisible(module) else []
        if not parts:
            stay += [each for each in module.modules() if each not in self.seen]
            self.seen.update(stay)
            self.atoms.append(Atom(stay, depth))
            return
        if any(next(iter(each.parameters(recurse=False)), None) is not None for each in stay):
            self.atoms.append(Atom(stay, depth))
            stay = []
        first = len(self.atoms)
        for part in parts:
            if part not in self.seen:
                # The first child runs where the module runs, so the cut before it is as high as the module.
                self.divide(part, depth if stay and len(self.atoms) == first else depth + 1)
        if len(self.atoms) > first:
            self.atoms[first].modules.extend(stay)
        elif stay:
            self.atoms.append(Atom(stay, depth))

    def _parts(self, module: nn.Module, stay: list[nn.Module]) -> list[nn.Module]:
        """The modules below that may lie on other partitions, in order. The others are added to ``stay``."""
        parts: list[nn.Module] = []
        for child in module.children():
            if child in self.seen or child in parts or child in stay:
                continue
            if child not in self.filled or self._read_in_place(child):
                stay.extend(each for each in child.modules() if each not in self.seen)
                self.seen.update(child.modules())
            elif not callable_module(child):
                stay.append(
                    child
                )  # a list of modules, whose members count as the module's children
                self.seen.add(child)
                parts.extend(self._parts(child, stay))
            else:
                parts.append(child)
        return sorted(parts, key=self.rank.__getitem__)

    def _read_in_place(self, child: nn.Module) -> bool:
        """Return whether a module above uses the child's parameters without calling the child."""
        own = next(iter(child.parameters(recurse=False)), None) is not None
        if not callable_module(child):
            return own
        return self.never is not None and all(
            self.rank[each] == self.never for each in child.modules()
        )

    def merged(self, module: nn.Module) -> list[Atom]:
        """The atoms after merging. A merged atom has the place of its first part."""
        home = {child: index for index, atom in enumerate(self.atoms) for child in atom.modules}
        leader = list(range(len(self.atoms)))

        def find(index: int) -> int:
            while leader[index] != index:
                index = leader[index]
            return index

        groups = [[entry.owner for entry in group] for group in sharing.shared(module)]
        if self.trace is not None:
            groups += [
                [module.get_submodule(reader), module.get_submodule(owner)]
                for reader, owner in self.trace.reads
            ]
        for group in groups:
            first, *others = sorted({find(home[each]) for each in group})
            for other in others:
                leader[other] = first
        for index, atom in enumerate(self.atoms):
            if find(index) != index:
                self.atoms[find(index)].modules.extend(atom.modules)
        return [atom for index, atom in enumerate(self.atoms) if find(index) == index]


def _divisible(module: nn.Module) -> bool:
    if isinstance(module, Undivided):
        return False
    return isinstance(module, _CONTAINERS) or not type(module).__module__.startswith("torch.nn.")


def cut(weights: list[float], depths: list[int], degree: int) -> list[int]:
    """The starts of min(degree, n) segments, none heavier than the least maximum plus the slack.

    Among such cuts the sum of their depths is least; among equals, the cuts are leftmost.
    """
    count, segments = len(weights), min(degree, len(weights))
    sums = [0.0, *itertools.accumulate(weights)]
    limit = least_maximum(weights, segments) + SLACK * sums[-1] / max(segments, 1)
    limit += 1e-9 * sums[-1]  # prefix sums round
    best: list[tuple[int, int]] = [(0, -1)] + [(-1, -1)] * count  # by end: (depths, start)
    table = [best]
    for _ in range(segments):
        row: list[tuple[int, int]] = [(-1, -1)] * (count + 1)
        for end in range(1, count + 1):
            for start in range(end - 1, -1, -1):
                if sums[end] - sums[start] > limit:
                    break
                before = best[start][0]
                if before < 0:
                    continue
                depth = before + (depths[start] if start else 0)
                if row[end][0] < 0 or depth <= row[end][0]:
                    row[end] = (depth, start)
        table.append(best := row)
    starts: list[int] = []
    end = count
    for row in reversed(table[1:]):
        end = row[end][1]
        starts.append(end)
    return starts[::-1]


def least_maximum(weights: list[float], segments: int) -> float:
    """The smallest M for which ``segments`` contiguous segments of at most M hold all weights."""

    def heaviest(limit: float) -> float | None:
        """The heaviest segment when each is filled up to the limit; None if they do not suffice."""
        used, filled, most = 1, 0.0, 0.0
        for weight in weights:
            if filled and filled + weight > limit:
                used, filled = used + 1, 0.0
            filled += weight
            most = max(most, filled)
        return most if used <= segments else None

    low, high = max(weights, default=0.0), sum(weights)
    while high > low:
        middle = (low + high) / 2
        found = heaviest(middle)
        if found is None:
            if middle <= low:
                break
            low = middle
        elif found >= high:
            break
        else:
            high = found
    return high
