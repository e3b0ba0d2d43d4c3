"""The selftest: the reference passes, mutants are killed, and the score is printed by class."""

from __future__ import annotations

import dataclasses
import fnmatch
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from conformance.mutants import exclusions, generated
from conformance.mutants.protocol import Mutant
from conformance.mutants.trials import (
    MANY,
    DidNotEnd,
    Outcome,
    Result,
    Trial,
    forget,
    in_processes,
    run,
    shown,
)

#: The part that must be killed, of those written by hand and of those generated.
WRITTEN, GENERATED = 1.0, 0.95

_MARKS_IN_A_LINE = 70

#: Examples that are watched.
SOME = 15

_MARKS = {Result.KILLED: ".", Result.SURVIVED: "S", Result.BROKEN: "B", Result.LEFT_OUT: "-"}


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """How many of a class were tried, and how many were killed."""

    killed: int
    tried: int

    @property
    def part(self) -> float:
        """From 0 to 1."""
        return self.killed / self.tried if self.tried else 1.0

    def __str__(self) -> str:
        return f"{self.killed} of {self.tried} killed ({_percent(self.part)})"


def _percent(part: float) -> str:
    # Rounded down: 100 % is all of them.
    return f"{int(part * 1000) / 10:g} %"


Tried = Sequence[tuple[Mutant, Outcome]]


def score(tried: Tried) -> Score:
    """Of what was not left out."""
    results = [outcome.result for _, outcome in tried if outcome.result is not Result.LEFT_OUT]
    return Score(results.count(Result.KILLED), len(results))


# Running.


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """A property without a mutant: how it failed, if it did, and its seconds."""

    item: pytest.Item

    def __call__(self) -> tuple[str, float]:
        """As many examples as a mutant gets."""
        forget()
        start = time.monotonic()
        error = run(self.item, MANY)
        passed = error is None or isinstance(error, pytest.skip.Exception)
        return ("" if passed else shown(error)), time.monotonic() - start  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, slots=True)
class Coverage:
    """A property without a mutant, watched: the statements of our modules that it goes through."""

    item: pytest.Item

    def __call__(self) -> generated.Lines:
        """Not while it is the reference: the functions say what they do, and so are others."""
        forget()
        with generated.watching() as reached:
            run(self.item, SOME)
        return frozenset(reached)


def _chosen(name: str, pattern: str) -> bool:
    turned = pattern.startswith("!")
    return fnmatch.fnmatchcase(name, pattern.removeprefix("!")) is not turned


def selftest(session: pytest.Session, mutants: Sequence[Mutant]) -> bool:
    """Try the mutants on the collected properties, print the score, and say whether it is enough."""
    return _Selftest(session, mutants).run()


class _Selftest:
    def __init__(self, session: pytest.Session, mutants: Sequence[Mutant]) -> None:
        self.config = session.config
        self.terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        self.properties: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            marker = item.get_closest_marker("requirement")
            if marker is not None:
                self.properties[marker.args[0]].append(item)
        pattern = session.config.option.smp_mutant or "*"
        self.written = [each for each in mutants if _chosen(each.name, pattern)]
        self.elsewhere = [each for each in self.written if each.requirement not in self.properties]
        # What kills a generated one is known only when all properties are there.
        all_here = {each.requirement for each in mutants} <= set(self.properties)
        self.sites = [
            site
            for module in generated.MODULES
            for site in (generated.sites(module) if all_here else ())
            if _chosen(site.name, pattern)
        ]

    def run(self) -> bool:
        start = time.monotonic()
        trials = [
            Trial(each, self.properties[each.requirement])
            for each in self.written
            if each not in self.elsewhere
        ]
        if not trials and not self.sites:
            self._line("no mutant to try: their requirements have no property here", red=True)
            return False
        costs = self._reference(
            [item for items in self.properties.values() for item in items]
            if self.sites
            else list(dict.fromkeys(item for trial in trials for item in trial.properties))
        )
        if costs is None:
            return False
        excluded = Counter(
            reason for site in self.sites if (reason := exclusions.reason(site)) is not None
        )
        sites = [site for site in self.sites if exclusions.reason(site) is None]
        self._phase(f"{len(costs)} properties pass on the reference", start)
        made = self._generated(sites, costs) if sites else []
        tried = self._try([*trials, *made])
        enough = self._report(tried[: len(trials)], tried[len(trials) :], excluded)
        self._line(
            f"selftest: {'passed' if enough else 'failed'} in {time.monotonic() - start:.0f} s"
        )
        return enough

    def _reference(self, items: Sequence[pytest.Item]) -> Mapping[pytest.Item, float] | None:
        """The seconds of each property on the reference; None if one fails."""
        failures, costs = [], {}
        for index, answer in in_processes([Reference(item) for item in items], self.config):
            failed, seconds = (answer, 0.0) if isinstance(answer, str) else answer
            costs[items[index]] = seconds
            if failed:
                failures.append(f"FAILED without a mutant: {items[index].nodeid}: {failed}")
        for line in failures:
            self._line(line, red=True)
        if failures:
            self._line("the reference must pass: nothing is scored", red=True)
            return None
        return costs

    def _generated(
        self, sites: Sequence[generated.Site], costs: Mapping[pytest.Item, float]
    ) -> list[Trial]:
        """A generated mutant names the requirements whose properties go through its lines: the
        quickest first.
        """
        items = sorted(costs, key=lambda item: costs[item])
        covered = dict(in_processes([Coverage(item) for item in items], self.config))
        trials = []
        for site in sites:
            through = [
                item
                for index, item in enumerate(items)
                if not isinstance(covered[index], str) and site.is_reached_by(covered[index])
            ]
            named = through[0].get_closest_marker("requirement") if through else None
            trials.append(
                Trial(site.mutant("NONE" if named is None else named.args[0], DidNotEnd), through)
            )
        return trials

    def _try(self, trials: Sequence[Trial]) -> Tried:
        outcomes: dict[int, Outcome] = {}
        self._line(f"{len(trials)} mutants")
        for index, answer in in_processes(trials, self.config):
            if isinstance(answer, str):  # killed is what a property does, not what ends a process
                lost = Result.KILLED if DidNotEnd in trials[index].mutant.by else Result.BROKEN
                answer = Outcome(lost, answer)
            outcomes[index] = answer
            self.terminal.write(_MARKS[answer.result])
            if len(outcomes) % _MARKS_IN_A_LINE == 0 or len(outcomes) == len(trials):
                self.terminal.write("\n", flush=True)
        return [(trial.mutant, outcomes[index]) for index, trial in enumerate(trials)]

    # The score.

    def _report(self, written: Tried, made: Tried, excluded: Counter[str]) -> bool:
        self.terminal.section("mutants")
        for line in _table(written):
            self._line(line)
        for line in _table(made):
            self._line(line)
        for mutant, outcome in (*written, *made):
            if outcome.result not in (Result.KILLED, Result.LEFT_OUT):
                why = outcome.detail
                text = f"{mutant.name}: {mutant.sentence} [{mutant.requirement}] {why}"
                self._line(f"{outcome.result.upper()} {text.strip()}", red=True)
        for reason, count in excluded.most_common():
            self._line(f"not generated: {count}: {reason}")
        if self.elsewhere:
            self._line(f"left out: {len(self.elsewhere)} whose requirement has no property here")
        broken = any(outcome.result is Result.BROKEN for _, outcome in (*written, *made))
        enough = score(written).part >= WRITTEN and score(made).part >= GENERATED
        self._line(f"written by hand: {score(written)}")
        if made:
            self._line(f"generated: {score(made)}")
        return enough and not broken and bool(score(written).tried + score(made).tried)

    def _phase(self, what: str, start: float) -> None:
        self._line(f"{what} ({time.monotonic() - start:.0f} s)")

    def _line(self, text: str, **style: bool) -> None:
        self.terminal.write_line(text, **style)


def _table(tried: Tried) -> Iterator[str]:
    kinds: dict[str, list[tuple[Mutant, Outcome]]] = defaultdict(list)
    for mutant, outcome in tried:
        kinds[mutant.kind].append((mutant, outcome))
    for kind, those in kinds.items():
        left_out = sum(outcome.result is Result.LEFT_OUT for _, outcome in those)
        more = f", {left_out} left out" if left_out else ""
        yield f"  {kind:<42}{score(those)}{more}"
