"""The selftest: checks that the reference passes, tries the mutants, and prints the score by class."""

from __future__ import annotations

import dataclasses
import fnmatch
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from conformance.engines.capabilities import EngineCapability
from conformance.engines.names import find_engine
from conformance.mutants import exclusions, generated
from conformance.mutants.protocol import Mutant
from conformance.mutants.trials import (
    FEW,
    MANY,
    REFERENCE_LIMIT,
    Attempt,
    DidNotEnd,
    Lost,
    Tell,
    Trial,
    TrialOutcome,
    TrialResult,
    forget,
    in_processes,
    limit,
    own_examples,
    run,
    shown,
    warm_up,
)
from conformance.requirements.catalogue import REQUIREMENTS
from conformance.requirements.registry import Level
from conformance.session import options
from conformance.session.results import HERE
from smp_core.errors import RunTimeout

#: The parts of hand-written and of generated mutants that must be killed.
WRITTEN, GENERATED = 1.0, 0.95

_MARKS_IN_A_LINE = 70

#: The number of examples of a property that are run to find its coverage.
SOME = 15

_MARKS = {
    TrialResult.KILLED: ".",
    TrialResult.SURVIVED: "S",
    TrialResult.HARNESS_ONLY: "H",
    TrialResult.BROKEN: "B",
    TrialResult.LEFT_OUT: "-",
}

#: Kinds of kills that show no wrong value: the mutant took too long, or its process was lost.
LOST = "process lost"
_NO_END = (LOST, "time limit", RunTimeout.__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class MutantScore:
    """The numbers of tried and of killed mutants in a class."""

    killed: int
    tried: int

    @property
    def part(self) -> float:
        """The killed part, from 0 to 1."""
        return self.killed / self.tried if self.tried else 1.0

    def __str__(self) -> str:
        percent = _percent(self.part) if self.tried else "-"
        return f"{self.killed} of {self.tried} killed ({percent})"


def _percent(part: float) -> str:
    # Rounded down, so that 100 % means all of them.
    return f"{int(part * 1000) / 10:g} %"


Tried = Sequence[tuple[Mutant, TrialOutcome]]


def score(tried: Tried) -> MutantScore:
    """Count killed and tried mutants, without those that were left out."""
    results = [outcome.result for _, outcome in tried if outcome.result is not TrialResult.LEFT_OUT]
    return MutantScore(results.count(TrialResult.KILLED), len(results))


# Running.


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceTrial:
    """A job that runs a property without a mutant; returns its failure, or an empty text, and seconds."""

    item: pytest.Item
    examples: int

    def __call__(self, tell: Tell) -> tuple[str, float]:
        """Run the property with as many examples as on a mutant."""
        forget()
        tell(REFERENCE_LIMIT, Attempt(self.item.nodeid, self.examples))
        start = time.monotonic()
        error = run(self.item, self.examples, REFERENCE_LIMIT)
        passed = error is None or isinstance(error, pytest.skip.Exception)
        return ("" if passed else shown(error)), time.monotonic() - start  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, slots=True)
class PropertyCoverage:
    """A job that finds the statements of the mutated modules that a property executes."""

    item: pytest.Item
    seconds: float  #: its limit

    def __call__(self, tell: Tell) -> generated.Lines:
        """Run the property with functions that report their statements.

        Such functions are slower than the reference's, so this run is not the one that is timed.
        """
        forget()
        tell(self.seconds, Attempt(self.item.nodeid, SOME))
        with generated.watching() as reached:
            run(self.item, SOME, self.seconds)
        return frozenset(reached)


def _chosen(name: str, pattern: str) -> bool:
    turned = pattern.startswith("!")
    return fnmatch.fnmatchcase(name, pattern.removeprefix("!")) is not turned


def selftest(session: pytest.Session, mutants: Sequence[Mutant]) -> bool:
    """Try the mutants on the collected properties, print the score, and return whether it is enough."""
    return _Selftest(session, mutants).run()


class _Selftest:
    def __init__(self, session: pytest.Session, mutants: Sequence[Mutant]) -> None:
        self.session = session
        self.config = session.config
        self.terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        self.properties: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            marker = item.get_closest_marker("requirement")
            if marker is not None:
                self.properties[marker.args[0]].append(item)
        self.choice = session.config.option.smp_mutant
        pattern = self.choice or "*"
        self.engine = find_engine(options.read(session.config, ini=True).engine)
        chosen = [each for each in mutants if _chosen(each.name, pattern)]
        self.written = [each for each in chosen if self._applies(each)]
        self.unclaimed = len(chosen) - len(self.written)
        self.elsewhere = [each for each in self.written if each.requirement not in self.properties]
        # A generated mutant names no requirement, so all properties must be collected to find its killer.
        applicable = {each.requirement for each in mutants if self._applies(each)}
        all_here = applicable <= set(self.properties)
        self.sites = [
            site
            for module in generated.MODULES
            for site in (generated.sites(module) if all_here else ())
            if _chosen(site.name, pattern)
        ]

    def _applies(self, mutant: Mutant) -> bool:
        """Return whether the engine claims what the mutant's requirement needs of an engine."""
        needs = REQUIREMENTS.named(mutant.requirement).needs
        return needs & set(EngineCapability) <= self.engine.capabilities

    def run(self) -> bool:
        start = time.monotonic()
        here = [each for each in self.written if each not in self.elsewhere]
        if not here and not self.sites:
            self._line(
                "no mutant to try: no mutant has such a name, or its requirement has no property here",
                red=True,
            )
            return False
        needed = {each.requirement for each in here}
        items = [
            item
            for requirement, items in self.properties.items()
            for item in items
            if self.sites or requirement in needed
        ]
        if any("smp_engine" in getattr(item, "fixturenames", ()) for item in items):
            # A process's first optimizer imports torch._dynamo for seconds: do so once, before forking.
            import torch._dynamo  # noqa: F401
        warm_up()
        costs = self._reference(items, FEW)
        if costs is None:
            return False
        excluded = Counter(
            reason for site in self.sites if (reason := exclusions.reason(site)) is not None
        )
        sites = [site for site in self.sites if exclusions.reason(site) is None]
        self._phase(f"{len(costs)} properties pass on the reference", start)
        trials = [Trial(each, self.properties[each.requirement], costs) for each in here]
        made = self._generated(sites, costs) if sites else []
        tried = self._try([*trials, *made])
        # Few mutants need MANY examples, so the reference is run again only for the properties that
        # killed those.
        late = {
            outcome.attempt.nodeid
            for _, outcome in tried
            if outcome.result is TrialResult.KILLED
            and outcome.attempt
            and outcome.attempt.examples > FEW
        }
        if self._reference([item for item in items if item.nodeid in late], MANY) is None:
            return False
        for mutant, outcome in tried:  # for pytest's last line, which would say that no tests ran
            place = (mutant.name, None, mutant.name)
            report = pytest.TestReport(mutant.name, place, {}, "passed", None, "call")
            self.terminal.stats.setdefault(outcome.result.value, []).append(report)
        enough = self._report(tried[: len(trials)], tried[len(trials) :], excluded)
        self._line(
            f"selftest: {'passed' if enough else 'failed'} in {time.monotonic() - start:.0f} s"
        )
        return enough

    def _reference(
        self, items: Sequence[pytest.Item], examples: int
    ) -> Mapping[pytest.Item, float] | None:
        """Run each property on the reference; return its seconds, or None if one fails."""
        failures, costs = [], {}
        jobs = [ReferenceTrial(item, examples) for item in items]
        for index, answer in in_processes(jobs, self.config):
            failed, seconds = (answer.how, 0.0) if isinstance(answer, Lost) else answer
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
        self, sites: Sequence[generated.MutationSite], costs: Mapping[pytest.Item, float]
    ) -> list[Trial]:
        """The trials of generated mutants, each on the properties that execute its line, the quickest first.

        Properties of training are left out. They execute most lines of communication, slowly, and point to
        no particular fault there.
        """
        below = {
            item
            for requirement, items in self.properties.items()
            for item in items
            if REQUIREMENTS.named(requirement).level < Level.L3
        }
        items = sorted(below & costs.keys(), key=lambda item: costs[item])
        for module in generated.MODULES:
            generated.telling(module)  # compiled here, and not by each process
        watched = [PropertyCoverage(item, limit(costs[item], own_examples(item))) for item in items]
        covered = dict(in_processes(watched, self.config))
        trials = []
        for site in sites:
            through = [
                item
                for index, item in enumerate(items)
                if not isinstance(covered[index], Lost) and site.is_reached_by(covered[index])
            ]
            named = through[0].get_closest_marker("requirement") if through else None
            requirement = "NONE" if named is None else named.args[0]
            trials.append(Trial(site.mutant(requirement, DidNotEnd), through, costs))
        return trials

    def _try(self, trials: Sequence[Trial]) -> Tried:
        outcomes: dict[int, TrialOutcome] = {}
        self._line(f"{len(trials)} mutants")
        for index, answer in self._answers(trials):
            if isinstance(answer, Lost):
                # The mutant is to blame only if a property had started in the process. A hand-written
                # mutant names the exceptions that kill it, so a lost process is a kill only with DidNotEnd.
                kills = answer.started and DidNotEnd in trials[index].mutant.by
                result = TrialResult.KILLED if kills else TrialResult.BROKEN
                answer = TrialOutcome(result, answer.how, LOST, answer.attempt)
            outcomes[index] = answer
            self.terminal.write(_MARKS[answer.result])
            if len(outcomes) % _MARKS_IN_A_LINE == 0 or len(outcomes) == len(trials):
                self.terminal.write("\n", flush=True)
        return [(trial.mutant, outcomes[index]) for index, trial in enumerate(trials)]

    def _answers(self, trials: Sequence[Trial]) -> Iterator[tuple[int, TrialOutcome | Lost]]:
        """Yield the answer of each trial. A lost trial is run once more, alone.

        A machine that is short of memory also ends processes.
        """
        lost = []
        for index, answer in in_processes(trials, self.config):
            if isinstance(answer, Lost):
                lost.append(index)
            else:
                yield index, answer
        for index in lost:
            ((_, answer),) = in_processes([trials[index]], self.config)
            yield index, answer

    # The score.

    def _report(self, written: Tried, made: Tried, excluded: Counter[str]) -> bool:
        self.terminal.section("mutants")
        for line in _table(written):
            self._line(line)
        for line in _table(made):
            self._line(line)
        for mutant, outcome in (*written, *made):
            if outcome.result not in (TrialResult.KILLED, TrialResult.LEFT_OUT):
                why = outcome.detail
                text = f"{mutant.name}: {mutant.sentence} [{mutant.requirement}] {why}"
                self._line(f"{outcome.result.upper()} {text.strip()}", red=True)
        for reason, count in excluded.most_common():
            self._line(f"not generated: {count}: {reason}")
        if self.unclaimed:
            self._line(
                f"not applicable: {self.unclaimed} whose requirement needs what engine {self.engine.name} does not "
                "claim"
            )
        if self.elsewhere:
            self._line(f"left out: {len(self.elsewhere)} whose requirement has no property here")
        of = " of those collected" if self.elsewhere else ""
        chosen = f" ({self.choice})" if self.choice else ""
        if written:
            self._line(f"written by hand{chosen}: {score(written)}{of}")
        if made:
            self._line(f"generated{chosen}: {score(made)}{_harness_only(made)}")
            self._line(f"generated, killed by: {_kinds(made)}")
        missing = list(self._missing((*written, *made)))
        for line in missing:
            self._line(f"not tried: {line}", red=True)
        broken = any(outcome.result is TrialResult.BROKEN for _, outcome in (*written, *made))
        enough = score(written).part >= WRITTEN and score(made).part >= GENERATED
        return enough and not broken and not missing

    def _missing(self, tried: Tried) -> Iterator[str]:
        """Describe the mutants that should have been tried and were not, which no score counts."""
        skipped = sum(outcome.result is TrialResult.LEFT_OUT for _, outcome in tried)
        if skipped:
            yield f"{skipped} mutants, because all of their properties are skipped"
        if self.elsewhere and not _in_part(self.session):
            yield (
                f"{len(self.elsewhere)} mutants, whose requirements have no property here although "
                "the whole suite was asked for"
            )

    def _phase(self, what: str, start: float) -> None:
        self._line(f"{what} ({time.monotonic() - start:.0f} s)")

    def _line(self, text: str, **style: bool) -> None:
        self.terminal.write_line(text, **style)


def _in_part(session: pytest.Session) -> bool:
    """Return whether the user asked for a part of the suite."""
    option = session.config.option
    names = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf")
    if any(getattr(option, name, None) for name in names):
        return True
    return not any(session.isinitpath(path) for path in (HERE, *HERE.parents))


def _harness_only(tried: Tried) -> str:
    count = sum(outcome.result is TrialResult.HARNESS_ONLY for _, outcome in tried)
    return f", {count} caught by the harness only" if count else ""


def _kinds(tried: Tried) -> str:
    counts = Counter(outcome.by for _, outcome in tried if outcome.result is TrialResult.KILLED)
    without_end = sum(counts[kind] for kind in _NO_END)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "-"
    return f"{kinds} ({without_end} by loss or time limit)"


def _table(tried: Tried) -> Iterator[str]:
    kinds: dict[str, list[tuple[Mutant, TrialOutcome]]] = defaultdict(list)
    for mutant, outcome in tried:
        kinds[mutant.kind].append((mutant, outcome))
    for kind, those in kinds.items():
        left_out = sum(outcome.result is TrialResult.LEFT_OUT for _, outcome in those)
        more = f", {left_out} left out" if left_out else ""
        yield f"  {kind:<42}{score(those)}{more}"
