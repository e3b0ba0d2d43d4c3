"""The command line of the soak. Exits 1 if a verdict was lost, or something leaks."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.faults import Claim
from pytest_smp.ranks.protocols import Executor, ExecutorOptions, Job, Report, VerdictKind
from tools.soak import leaks, programs, verdicts
from tools.soak.inside import Inside
from tools.soak.leaks import Held
from tools.soak.programs import SoakArguments
from tools.soak.verdicts import SoakCase

_ENDING = 5.0  # seconds that processes get to end after the executor was closed


@dataclasses.dataclass
class Soak:
    """One executor, what ran on it, and what was wrong."""

    executor: Any
    size: int
    timeout: float
    checked: bool = True
    misses: list[str] = dataclasses.field(default_factory=list)
    shared: set[str] = dataclasses.field(default_factory=set)  # what its ranks have shared
    #: Of the runs with a fault, to the verdict, by the kind of the fault.
    seconds: collections.defaultdict[str, list[float]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    held: list[tuple[int, Held]] = dataclasses.field(default_factory=list)

    def run(self, body: Callable[..., Any], *args: Any, **fields: Any) -> Report:
        """One run on all ranks."""
        fields.setdefault("timeout", 120.0)
        job = Job(body=body, arguments=SoakArguments(args), capture=True, **fields)
        report: Report = self.executor.open(self.size).run(job)
        return report

    # Faults.

    def faults(self, count: int, first: int, seed: int, folder: str) -> None:
        """So many cases, each followed by a clean run."""
        for number in range(first, first + count):
            name = f"{seed}-{number}"
            case = verdicts.draw(name, self.size, self.executor.injects, folder, self.checked)
            wrong = self._fault(case)
            self.shared |= leaks.shared_memory(leaks.descendants())
            if wrong:
                self.misses.append(_miss(number, case, wrong))
                print(self.misses[-1], flush=True)
            done = number - first + 1
            if done % max(1, count // 10) == 0:
                self.held.append((done, Held.now()))
                print(f"{done} faults, {len(self.misses)} misses; {self.held[-1][1]}", flush=True)

    def _fault(self, case: SoakCase) -> list[str]:
        processes = Claim.PROCESSES in self.executor.injects
        limit = {"timeout": self.timeout} if case.lasts else {}
        start = time.monotonic()
        report = self.run(programs.run, *case.arguments, faults=case.faults, **limit)
        self.seconds[case.kind].append(time.monotonic() - start)
        wrong = verdicts.complaints(case, report, processes)
        if wrong:
            wrong.append(f"the error: {report.error!r}")
            wrong += [f"{each.rank}: {each.kind} {each.detail}" for each in report.outcomes]
        if isinstance(case.fault, Inside):
            case.fault.marker(case.folder).unlink(missing_ok=True)
        clean = self.run(programs.run, programs.without_pauses(case.steps), case.folder)
        if clean.verdict is not VerdictKind.PASSED:
            wrong.append(f"the clean run after it: {clean.verdict}: {clean.error!r}")
        told = verdicts.after_the_run(case, report)
        if told is not None and not any(told in text for text in clean.warnings):
            wrong.append(f"the clean run after it does not tell {told!r}, but {clean.warnings}")
        return wrong

    # Tests.

    def tests(self, count: int) -> None:
        """So many short tests, each with a body of its own."""
        sizes, replaced = [], self.replaced
        for number in range(count):
            report = self.run(_short(number))
            if report.values != [number] * self.size:
                self.misses.append(f"test {number}: {report.verdict}: {report.error!r}")
            if number in (count // 3, count - 1):
                self.held.append((number, Held.now()))
                sizes.append(self.run(_held).values)
                print(f"{number + 1} tests; {self.held[-1][1]}; on rank 0 {sizes[-1][0]}")
        runs = count - 1 - count // 3
        for rank, (before, after) in enumerate(zip(*sizes, strict=True)):
            self.misses += leaks.growth(f"rank {rank}", before, after, runs)
        if self.replaced > replaced:
            self.misses.append(f"{self.replaced - replaced} ranks were replaced")

    @property
    def replaced(self) -> int:
        """Rank processes that had to be."""
        return int(getattr(self.executor, "replaced", 0))


def _miss(number: int, case: SoakCase, wrong: list[str]) -> str:
    lines = [f"MISS {number}: {case.fault!r} in {[step.kind for step in case.steps]}", *wrong]
    return "\n    ".join(lines)


def _short(number: int) -> Callable[[], int]:
    def body() -> int:
        import smp_core.torch as smp

        assert smp.allgather(number, smp.WORLD) == [number] * smp.size()
        return number

    return body


def _held() -> Held:
    return Held.now()


def _table(soak: Soak) -> Iterator[str]:
    yield f"{'fault':12}{'runs':>8}{'median s':>10}{'worst s':>10}"
    for kind, seconds in sorted(soak.seconds.items()):
        median = statistics.median(seconds)
        yield f"{kind:12}{len(seconds):8}{median:10.3f}{max(seconds):10.3f}"


def soak(
    backend: str,
    *,
    faults: int = 0,
    tests: int = 0,
    ranks: int = 4,
    seed: int = 0,
    first: int = 0,
    timeout: float = 2.0,
    busy: int = 0,
    check: bool = True,
) -> list[str]:
    """Run it; what was wrong, in words.

    Args:
        backend: as --smp-backend.
        faults: number of random faults, drawn from ``seed`` and their number, from ``first`` on.
        tests: number of short tests, after them.
        timeout: seconds that a run gets in which a rank stands still, or, without the board, waits.
        busy: number of processes that keep the machine busy meanwhile.
        check: the board is on.
    """
    with _busy(busy):
        return _soak(backend, faults, tests, ranks, seed, first, timeout, check)


def _soak(
    backend: str,
    faults: int,
    tests: int,
    ranks: int,
    seed: int,
    first: int,
    timeout: float,
    check: bool,
) -> list[str]:
    processes = set(leaks.descendants())
    outside, kept = os.environ.get("TMPDIR"), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="soak-") as own, tempfile.TemporaryDirectory() as disk:
        os.environ["TMPDIR"] = tempfile.tempdir = own
        try:
            start = time.monotonic()
            options = ExecutorOptions(ranks=ranks, capture=True, check=check)
            executor: Executor = open_backend(backend, options)
            try:
                claims = executor.injects
                checked = check or Claim.PROCESSES not in claims  # `sim` needs no board
                run = Soak(executor, ranks, timeout, checked)
                run.run(programs.run, programs.draw(random.Random(0)), disk)
                run.faults(faults, first, seed, disk)
                if tests:
                    run.tests(tests)
            finally:
                executor.close()
        finally:
            tempfile.tempdir = kept
            if outside is None:
                os.environ.pop("TMPDIR", None)
            else:
                os.environ["TMPDIR"] = outside
        wrong = [*run.misses, *_grown(run), *_left(own, run.shared, processes)]
    seconds = time.monotonic() - start
    for line in _table(run):
        print(line)
    print(
        f"{backend}, {ranks} ranks: {faults} faults and {tests} tests in {seconds:.0f} s, "
        f"{len(run.misses)} misses, {len(wrong) - len(run.misses)} leaks, "
        f"{run.replaced} ranks replaced"
    )
    return wrong


#: Ends by itself, should the soak be killed.
_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that compute, while entered."""
    started = [subprocess.Popen([sys.executable, "-I", "-S", "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _grown(run: Soak) -> list[str]:
    """The controller, from a third of the way on."""
    if len(run.held) < 2:
        return []
    (early, before), (late, after) = (
        run.held[len(run.held) // 3 if len(run.held) > 2 else 0],
        run.held[-1],
    )
    return leaks.growth("controller", before, after, 2 * (late - early))


def _left(own: str, shared: set[str], processes: set[int]) -> list[str]:
    """The processes and files that outlive the executor, in words."""
    deadline = time.monotonic() + _ENDING
    while True:
        wrong = [f"process {pid} is left" for pid in set(leaks.descendants()) - processes]
        wrong += [f"{path} is left" for path in Path(own).iterdir()]
        wrong += [f"{path} is left" for path in sorted(shared) if os.path.exists(path)]
        if not wrong or time.monotonic() > deadline:
            return wrong
        time.sleep(0.05)


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--faults", type=int, default=0, help="random faults")
    parser.add_argument("--tests", type=int, default=0, help="short tests on one pool")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first fault")
    parser.add_argument("--timeout", type=float, default=2.0, help="of runs that last so long, s")
    parser.add_argument("--busy", type=int, default=0, help="processes that load the machine")
    parser.add_argument("--no-check", action="store_true", help="without the board")
    given = vars(parser.parse_args(arguments))
    check = not given.pop("no_check")
    wrong = soak(given.pop("backend"), check=check, **given)
    for text in wrong:
        print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
