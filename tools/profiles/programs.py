"""Many programs on a backend: a count of false alarms and of cells hit, a score of the verdicts.

    python -m tools.profiles.programs --valid 20000 --invalid 5000

Program number n is drawn from the seed n alone, and valid ones are made to hit the cells in turn,
so with more programs than cells each cell is hit.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pytest_smp.ranks.backends import find_backend, open_backend
from pytest_smp.ranks.capabilities import Capabilities
from pytest_smp.ranks.protocols import Executor, Job, Report, VerdictKind
from pytest_smp.strategies.communication.coverage import Cell, all_cells, cells
from pytest_smp.strategies.communication.drawing import sample
from pytest_smp.strategies.communication.faults import FAULTS, Score, Unused, sample_invalid
from pytest_smp.strategies.communication.program import Runnable


@dataclass
class ProgramCoverage:
    """The results of valid programs: the number of hits of each claimed cell, and the false alarms."""

    hits: collections.Counter[Cell]
    claimed: tuple[Cell, ...]
    alarms: list[tuple[int, str]] = field(default_factory=list)  #: seed and message
    seconds: float = 0.0

    @property
    def missed(self) -> list[Cell]:
        """The claimed cells that no program hit."""
        return [cell for cell in self.claimed if not self.hits[cell]]

    def table(self) -> str:
        """A table with the number of each operation's cells that were hit, and the rarest cell's hits."""
        lines = [f"{'operation':24}{'dtypes':>8}{'cells':>8}{'hit':>8}{'least':>8}{'hits':>10}"]
        for operation in dict.fromkeys(cell.operation for cell in self.claimed):
            own = [cell for cell in self.claimed if cell.operation == operation]
            hits = [self.hits[cell] for cell in own]
            dtypes = len({cell.dtype for cell in own})
            lines.append(
                f"{operation:24}{dtypes:8}{len(own):8}{sum(map(bool, hits)):8}{min(hits):8}{sum(hits):10}"
            )
        for axis in ("dtype", "group", "mode", "layout"):
            counts: collections.Counter[str] = collections.Counter()
            for cell, hits_of in self.hits.items():
                counts[getattr(cell, axis)] += hits_of
            known = dict.fromkeys(getattr(cell, axis) for cell in self.claimed)
            lines.append(f"{axis}: " + ", ".join(f"{value} {counts[value]}" for value in known))
        return "\n".join(lines)


@dataclass
class Scores:
    """The results of invalid programs, by kind of fault and by due verdict."""

    counts: collections.Counter[tuple[str, VerdictKind]] = field(
        default_factory=collections.Counter
    )
    right: collections.Counter[tuple[str, VerdictKind, str]] = field(
        default_factory=collections.Counter
    )
    wrong: list[tuple[int, Score, str]] = field(default_factory=list)  #: seed, score, message
    noise: list[int] = field(default_factory=list)  #: of each program's message
    unused: Unused = field(default_factory=collections.Counter)  #: faults that were drawn, too
    seconds: float = 0.0

    @property
    def quiet(self) -> float:
        """The share of messages that name no rank and no line beside those that matter."""
        return self.noise.count(0) / len(self.noise) if self.noise else 1.0

    def share(self, what: str) -> float:
        """The share of programs whose ``verdict``, ``rank`` or ``lines`` was right."""
        total = self.counts.total()
        right = sum(count for key, count in self.right.items() if key[2] == what)
        return right / total if total else 1.0

    def table(self) -> str:
        """A table of kinds of faults and due verdicts: the programs, and those with right verdict, rank, lines."""
        lines = [f"{'fault':18}{'verdict':12}{'count':>8}{'verdict':>9}{'rank':>8}{'lines':>8}"]
        for kind, verdict in sorted(self.counts):
            right = [self.right[kind, verdict, what] for what in Score._fields]
            lines.append(
                f"{kind:18}{verdict:12}{self.counts[kind, verdict]:8}"
                f"{right[0]:9}{right[1]:8}{right[2]:8}"
            )
        shares = ", ".join(f"{what} {self.share(what):.2%}" for what in Score._fields)
        noise = f"{self.quiet:.2%} of the messages without noise, {sum(self.noise)} ranks or lines in all"
        unused = ", ".join(
            f"{kind} {why} {count}" for (kind, why), count in sorted(self.unused.items())
        )
        return "\n".join([*lines, f"right: {shares}", noise, f"drawn and not used: {unused}"])


def run_valid(
    executor: Executor, capabilities: Capabilities, seeds: Iterable[int]
) -> ProgramCoverage:
    """Run a valid program for each seed."""
    claimed = all_cells(capabilities)
    result, start = ProgramCoverage(collections.Counter(), claimed), time.monotonic()
    for seed in seeds:
        choose = random.Random(seed).randrange
        program = sample(choose, capabilities=capabilities, cell=claimed[seed % len(claimed)])
        report = _run(executor, program)
        if report.error is not None or report.warnings:
            result.alarms.append((seed, f"{report.verdict}: {report.error} {report.warnings}"))
        else:
            result.hits.update(cells(program))
    result.seconds = time.monotonic() - start
    return result


def run_invalid(
    executor: Executor,
    capabilities: Capabilities,
    seeds: Iterable[int],
    kinds: tuple[str, ...] = tuple(FAULTS),
) -> Scores:
    """Run an invalid program for each seed."""
    result, start = Scores(), time.monotonic()
    for seed in seeds:
        program = sample_invalid(
            random.Random(seed).randrange,
            capabilities=capabilities,
            kinds=kinds,
            unused=result.unused,
        )
        report = _run(executor, program)
        score, key = program.score(report), (program.fault.kind, program.verdict)
        result.counts[key] += 1
        result.noise.append(program.noise(report))
        for what in Score._fields:
            result.right[(*key, what)] += getattr(score, what)
        if not all(score):
            result.wrong.append((seed, score, f"{program.fault.kind}: {report.error}"))
    result.seconds = time.monotonic() - start
    return result


def _run(executor: Executor, program: Runnable) -> Report:
    job = Job(body=program.run, arguments=lambda rank: ((), {}), timeout=60)
    return executor.open(program.ranks).run(job)


def main(arguments: list[str]) -> int:
    """Run and print; 0 if nothing was wrong and every claimed cell was hit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--valid", type=int, default=0, help="how many valid programs")
    parser.add_argument("--invalid", type=int, default=0, help="how many invalid programs")
    parser.add_argument("--seed", type=int, default=0, help="the first program's")
    parser.add_argument("--backend", default="sim")
    asked = parser.parse_args(arguments)
    capabilities = find_backend(asked.backend).capabilities
    executor, failed = open_backend(asked.backend), False
    parts: list[tuple[int, Callable[[range], bool]]] = [
        (asked.valid, lambda seeds: _print_valid(executor, capabilities, seeds)),
        (asked.invalid, lambda seeds: _print_invalid(executor, capabilities, seeds)),
    ]
    try:
        for count, part in parts:
            if count:
                failed |= not part(range(asked.seed, asked.seed + count))
    finally:
        executor.close()
    return int(failed)


def _print_valid(executor: Executor, capabilities: Capabilities, seeds: range) -> bool:
    coverage = run_valid(executor, capabilities, seeds)
    print(coverage.table())
    print(
        f"{len(seeds)} valid programs, {len(coverage.alarms)} false alarms, "
        f"{len(coverage.missed)} of {len(coverage.claimed)} cells missed, "
        f"{len(seeds) / coverage.seconds:.0f} programs/s"
    )
    for seed, message in coverage.alarms[:10]:
        print(f"seed {seed}: {message}")
    return not coverage.alarms and not coverage.missed


def _print_invalid(executor: Executor, capabilities: Capabilities, seeds: range) -> bool:
    scores = run_invalid(executor, capabilities, seeds)
    print(scores.table())
    print(f"{len(seeds)} invalid programs, {len(seeds) / scores.seconds:.0f} programs/s")
    for seed, score, message in scores.wrong[:10]:
        print(f"seed {seed}: {score}: {message}")
    return not scores.wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
