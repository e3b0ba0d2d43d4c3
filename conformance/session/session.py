"""The suite in one pytest session: selects properties, collects their outcomes and judges them.

Properties may run in xdist's workers. A worker sends its outcomes to the main process in the reports'
``user_properties`` and, at its end, in its ``workeroutput``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
import unittest
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conformance.engines.capabilities import FRONT_ENDS, EngineCapability
from conformance.engines.names import find_engine
from conformance.engines.protocol import Engine, EngineError, used
from conformance.requirements.registry import Level, Need, Registry, RequirementError
from conformance.session import amounts, expectations, options, report, waivers
from conformance.session.certification import Certification, certification
from conformance.session.executions import Execution
from conformance.session.expectations import Expectation, ExpectationError
from conformance.session.results import HERE, PropertyResult, argument
from conformance.session.verdicts import (
    NotSupported,
    PropertyOutcome,
    Verdict,
    counted,
    judge_all,
    lacking,
    table,
)
from conformance.session.witness import SeenFailure, Witness
from pytest_smp import launch, settings, supervision, written
from pytest_smp.ranks.backends import find_backend
from pytest_smp.ranks.capabilities import DTYPES, EVERYTHING, REDUCTIONS, Capabilities, Capability
from smp_core.errors import BackendError, RunTimeout

if TYPE_CHECKING:
    from pytest_smp.running import Controller

_SMOKE = 3  # examples of a property in a rehearsal

# Keys in the user_properties of a test's report; JUnit files show them, too.
_REQUIREMENT = "requirement"
_SIBLINGS = (
    "requirement_properties"  # the requirement's number of properties, deselected ones included
)
_TOLD = "conformance"  # outcome, error and notes of a property that did not pass, in JSON
_EXPECTED: pytest.StashKey[Expectation | None] = pytest.StashKey()
_EXECUTION: pytest.StashKey[Execution] = pytest.StashKey()
_LEFT_OUT = (
    "another plugin reports a pass, but the function of this property did not run to its end"
)
_FEW = (
    f"too few examples for a certificate: Hypothesis's profile, or a plugin, has set less than "
    f"{1 + amounts.LEAST_DRAWS}, or leaves out the phase that draws them"
)

#: Exceptions by which a property or a user ends a phase, and that are no failure.
_NO_FAILURE = (
    pytest.skip.Exception,
    unittest.SkipTest,
    pytest.xfail.Exception,
    pytest.exit.Exception,
    KeyboardInterrupt,
)


class SuiteSession:
    """The suite in one pytest session.

    Raises pytest.UsageError for options, expected failures or requirements that cannot be used.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        if sys.flags.optimize and config.getoption("assertmode") == "plain":
            raise pytest.UsageError(
                "conformance: Python drops every assert (PYTHONOPTIMIZE, -O), and pytest does not "
                "rewrite them (--assert=plain): nothing would be tested; leave out one of them"
            )
        self.options = options.read(config, ini=False)
        if config.getoption("smp_backend", False) is False:
            raise pytest.UsageError("conformance: the plugin smp is needed, and is not loaded")
        self.settings = settings.read(config)
        self.backend = find_backend(self.settings.backend)
        self.all = _registry()
        self.engine = self._engine()
        self.registry = self._asked_for()
        self.lacks = self._lacks()
        self.expectations: Path | None = None  # the file of expected failures that is in force
        self.entries, self.expected = self._expectations()
        self.main = not hasattr(config, "workerinput")  # not a worker of xdist
        self.started = time.time()
        self.interrupted: str | None = None
        self.results: dict[str, PropertyResult] = {}  # by node id
        self.siblings: dict[str, int] = {}  # by requirement
        self.whole: bool | None = None  # None: not known yet
        self.unclosed: str | None = None  # the error with which the backend failed to close
        self._here = self._started = (
            False  # whether the suite is collected; whether start() was called
        )
        self._collected: set[Path] = set()
        self._modules: list[pytest.Module] = []  # of the suite
        self._controller: Controller | None = None  # if we opened its backend
        self._crashed: dict[
            str, str
        ] = {}  # by node id; a worker's output names the requirements later
        self._certification: Certification | None = None
        self._witness = Witness()
        self._written: str | None = None
        self._certifies(False)

    def _certifies(self, certified: bool) -> None:
        """Tell the parent of a session that certifies (pytest_smp/supervision.py)."""
        if self.options.certify:
            self.config.stash[supervision.CERTIFIED] = certified

    def found(self) -> None:
        """Note that the session collects the suite, and read the options again with the ini keys.

        Raises pytest.UsageError for options or expected failures that cannot be used.
        """
        if self._here:
            return
        self._here = True
        before, self.options = self.options, options.read(self.config, ini=True)
        self.engine = self._engine()
        self.registry = self._asked_for()
        self.lacks = self._lacks()
        self._certifies(False)
        if self.options != before:
            self.entries, self.expected = self._expectations()
            if self._started:
                self.start()

    def _asked_for(self) -> Registry:
        """The requirements up to --smp-level, without those of another front end.

        Raises pytest.UsageError if there is no such level.
        """
        names = [level.name for level in Level]
        if self.options.level and self.options.level not in names:
            raise pytest.UsageError(f"--smp-level={self.options.level}: one of {', '.join(names)}")
        highest = Level[self.options.level or names[-1]]
        others = FRONT_ENDS - self.engine.capabilities
        return Registry(
            *(
                each
                for each in self.all.values()
                if each.level <= highest and not others & set(each.needs)
            )
        )

    def _engine(self) -> Engine:
        """The engine. Raises pytest.UsageError if there is none of this name."""
        try:
            return find_engine(self.options.engine)
        except EngineError as error:
            raise pytest.UsageError(f"--smp-engine: {error}") from None

    def _lacks(self) -> dict[str, list[Need]]:
        """The needs that neither backend nor engine claims, by requirement."""
        claims = self.backend.capabilities.claims | self.engine.capabilities
        lacks = {
            id: each.lacks(claims, used(self.engine, each.needs))
            for id, each in self.registry.items()
        }
        return {id: needs for id, needs in lacks.items() if needs}

    def _expectations(self) -> tuple[list[Expectation], dict[str, Expectation]]:
        target = self.options.write_expectations
        self.expectations = path = self._expectations_file()
        if path is None:
            return [], {}
        try:
            entries = expectations.read(path)
            if target is None:
                found = expectations.check(entries, self.all)
                return entries, {id: entry for id, entry in found.items() if id in self.registry}
        except ExpectationError as error:
            raise pytest.UsageError(f"expected failures: {error}") from None
        # The file is about to be written anew, so entries without effect may stand in it. Unlisted failures
        # stay failures, so that they are found and listed.
        usable = [entry for entry in reversed(entries) if not entry.todo]
        return entries, {id: e for e in usable for id in self.registry if e.matches(id)}

    def _expectations_file(self) -> Path | None:
        """The file of the options, the existing file to write anew, or the backend's own; None without."""
        target = self.options.write_expectations
        if self.options.expectations is not None:
            return self.options.expectations
        if target is not None and target.exists():
            return target
        try:
            own = expectations.file_of(self.backend.expectations)
            # The backend may name the file that is about to be written for the first time.
            return None if target is not None and own is not None and not own.exists() else own
        except ExpectationError as error:
            raise pytest.UsageError(f"backend {self.backend.name}: {error}") from None

    # Collection.

    def collects(self, collector: pytest.Collector) -> None:
        """Note that a folder or file of the suite is being collected."""
        self._collected.add(collector.path)
        if isinstance(collector, pytest.Module):
            self._modules.append(collector)

    def collected(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Prepare all items before any is deselected: find their requirements, sort them, mark skips.

        Raises pytest.UsageError for an item without a requirement, and for a requirement without a property
        in a session that asked for the whole suite.
        """
        found: dict[str, list[pytest.Item]] = defaultdict(list)
        above: list[pytest.Item] = []
        for item in items:
            if item.path.is_relative_to(HERE):
                id = requirement_of(item, self.all)
                (found[id] if id in self.registry else above).append(item)
        if above:
            items[:] = [item for item in items if item not in set(above)]
            session.config.hook.pytest_deselected(items=above)
        basic_first(items, found, tuple(self.registry))
        self.whole = self._is_whole(session)
        untested = [id for id in self.registry if id not in found]
        if untested and self.whole:
            raise pytest.UsageError(f"requirements without a property: {', '.join(untested)}")
        # A hook of others may have dropped items, or functions, before.
        defined = defined_properties(self._modules) if self.whole else Counter()
        for id, properties in found.items():
            self.siblings[id] = max(len(properties), defined[id])
            for item in properties:
                self._prepare(item, id)

    def _prepare(self, item: pytest.Item, id: str) -> None:
        self.results[item.nodeid] = PropertyResult(id, PropertyOutcome.DESELECTED)
        item.user_properties += [(_REQUIREMENT, id), (_SIBLINGS, self.siblings[id])]
        item.stash[_EXPECTED] = self.expected.get(id)
        item.stash[_EXECUTION] = Execution(item)
        if id in self.lacks:
            by: dict[str, list[Need]] = {}
            for each in self.lacks[id]:
                of = self.backend if isinstance(each, Capability) else self.engine
                by.setdefault(of.name, []).append(each)
            lacks = "; ".join(f"{name} does not claim {', '.join(by[name])}" for name in by)
            item.add_marker(pytest.mark.skip(f"not supported: {lacks}"))

    def selected(self, items: list[pytest.Item]) -> None:
        """Note that these items, which no plugin has deselected, are to run."""
        for item in items:
            if item.nodeid in self.results:
                self.results[item.nodeid].outcome = PropertyOutcome.NOT_RUN

    def _is_whole(self, session: pytest.Session) -> bool:
        """Return whether the session asked for every property of the suite.

        The package or a folder above it must be an argument, and every file must be collected in full. A
        folder above may be a project with its virtual environment below, which pytest does not collect.
        ``--lf`` collects parts of files.
        """
        asked = any(session.isinitpath(path) for path in (HERE, *HERE.parents))
        parts = session.testsfailed or getattr(session.config.option, "lf", False)
        files = set(HERE.glob("test_*.py"))
        return asked and not parts and bool(files) and files <= self._collected

    def open_backend(self, items: list[pytest.Item]) -> None:
        """Open the backend if any property will need it.

        Raises pytest.UsageError if the backend cannot be opened, because no requirement is to blame, and if the
        session can certify nothing for lack of ranks.
        """
        self._refuse_few_ranks()
        ours = [self.results[item.nodeid] for item in items if item.nodeid in self.results]
        if all(result.requirement in self.lacks for result in ours):
            return
        from pytest_smp.plugin import PRELOAD, controller_of

        if any("smp_engine" in getattr(item, "fixturenames", ()) for item in items):
            # A process's first optimizer imports torch._dynamo for seconds: do so once, before ranks exist.
            keras = EngineCapability.TENSORFLOW in self.engine.capabilities
            self.config.stash[PRELOAD] = (self.engine.api,) if keras else ("torch._dynamo",)
        try:
            controller_of(self.config).open()
        except BackendError as error:
            raise pytest.UsageError(str(error)) from None
        self._controller = controller_of(self.config)

    def _refuse_few_ranks(self) -> None:
        """Refuse a session that would run for minutes, skip properties, and certify nothing."""
        ranks, needed = self.settings.ranks, amounts.MOST_RANKS
        outcomes = {result.outcome for result in self.results.values()}
        if not self.options.certify or self.options.smoke or not self.whole:
            return
        if ranks < needed and PropertyOutcome.DESELECTED not in outcomes:
            raise pytest.UsageError(
                f"--smp-certify: a certificate {launch.shortage(needed, ranks)}"
            )

    def close_backend(self) -> None:
        """Close what ``open_backend`` opened, early enough that a failure can still be reported."""
        if self._controller is None:
            return
        try:
            self._controller.close()
        except (Exception, SystemExit) as error:
            self.unclosed = f"the backend could not be closed: {report.error_text(error)}"

    # Running.

    @contextlib.contextmanager
    def adjusted(self, item: pytest.Item) -> Iterator[None]:
        """Change Hypothesis's settings while an item runs.

        An expected failure is not shrunk, and neither is any failure of a session that only lists them;
        their number of examples stays, since the first failure ends them. The examples beside the file of
        expected failures come first, and a session that writes the file adds to them. All other properties get fewer
        examples on ranks that are processes, and in a rehearsal.
        """
        function = getattr(item, "obj", None)
        function = getattr(function, "__func__", function)
        listed = item.stash.get(_EXPECTED, None) or self.options.write_expectations
        changes = listed or self._replaces_ranks or self.options.smoke
        if not hasattr(function, "hypothesis") or not changes:
            yield
            return
        from hypothesis import Phase
        from hypothesis import settings as hypothesis_settings

        from conformance.session.examples import replayed_examples

        name = "_hypothesis_internal_use_settings"  # private
        before = getattr(function, name, None)
        base = before or hypothesis_settings()
        if listed:
            phases = [each for each in base.phases if each not in (Phase.shrink, Phase.explain)]
            changed = hypothesis_settings(base, phases=phases)
            files = self.expectations, self.options.write_expectations
            kept, target = (path and expectations.examples_of(path) for path in files)
            database = replayed_examples(base.database, kept, target)
            if database is not None:
                # A derandomised profile, such as Hypothesis's of CI=true, has no database of its own.
                changed = hypothesis_settings(changed, database=database, derandomize=False)
        else:
            few = base.max_examples
            if self._replaces_ranks:
                few = amounts.on_processes(few, hypothesis_settings().max_examples)
            if self.options.smoke:
                few = min(few, _SMOKE)
            changed = hypothesis_settings(base, max_examples=few)
        setattr(function, name, changed)
        try:
            yield
        finally:
            setattr(function, name, before)

    @contextlib.contextmanager
    def watched(self, item: pytest.Item, when: str) -> Iterator[None]:
        """Note a failure of a phase before a hook of others can hide it, and the end of the function in "call".

        Not in a self-test, whose properties shall fail.
        """
        execution = item.stash.get(_EXECUTION, None)
        if execution is None or self.config.getoption("smp_selftest"):
            yield
        elif when == "call":
            if self._controller is not None:
                self._controller.counts_every_example = True
            with execution.watch(item, lambda error: self._witness_failure(item, when, error)):
                yield
        else:
            try:
                yield
            except BaseException as error:
                self._witness_failure(item, when, error)
                raise

    def _witness_failure(self, item: pytest.Item, when: str, error: BaseException) -> None:
        if not isinstance(error, _NO_FAILURE):
            told = self._failure_told(item, when, error)
            self._witness.add(SeenFailure(item.nodeid, _property(item, _REQUIREMENT), told))

    def _failure_told(self, item: pytest.Item, when: str, error: BaseException) -> dict[str, Any]:
        """Outcome, error and notes of a phase that failed."""
        outcome = _failed_outcome(when, error, self._replaces_ranks)
        if outcome is PropertyOutcome.FAILED and item.stash.get(_EXPECTED, None) is not None:
            outcome = PropertyOutcome.WAIVED
        return {"outcome": outcome, "error": report.error_text(error), "notes": _notes(error)}

    def tell(self, item: pytest.Item, call: pytest.CallInfo[Any], made: pytest.TestReport) -> None:
        """Write outcome, error and notes into a report for the main process, and waive an expected failure.

        A failure goes to the witness as well, since the report may never be logged.
        """
        id = _property(made, _REQUIREMENT)
        if id is None:
            return
        if made.passed or call.excinfo is None:
            if made.when == "call" and made.passed and not hasattr(made, "wasxfail"):
                self._tell_pass(item, made)
            return
        error = call.excinfo.value
        if made.failed:
            told = self._failure_told(item, made.when, error)
            self._witness.add(SeenFailure(made.nodeid, id, told))
            if told["outcome"] is PropertyOutcome.WAIVED:
                made.outcome, made.wasxfail = "skipped", str(item.stash[_EXPECTED])
            else:
                made.sections.append(("requirement", str(self.registry[id])))
        else:
            left_out = isinstance(error, NotSupported)
            outcome = PropertyOutcome.NOT_SUPPORTED if left_out else PropertyOutcome.SKIPPED
            told = {"outcome": outcome, "error": report.error_text(error), "notes": _notes(error)}
        made.user_properties.append((_TOLD, json.dumps(told)))

    def _tell_pass(self, item: pytest.Item, made: pytest.TestReport) -> None:
        execution = item.stash[_EXECUTION]
        told: dict[str, Any] = {"outcome": PropertyOutcome.PASSED, "error": None, "notes": []}
        if not execution.completed:
            told.update(outcome=PropertyOutcome.SKIPPED, error=_LEFT_OUT)
        elif execution.replaced:
            error = f"another plugin, or a conftest, overrides {', '.join(execution.replaced)}"
            told.update(outcome=PropertyOutcome.SKIPPED, error=error)
        elif self.options.certify and not self.options.smoke and execution.few:
            told.update(outcome=PropertyOutcome.SKIPPED, error=_FEW)
        execution.completed = False  # one run is the proof of one report
        made.user_properties.append((_TOLD, json.dumps(told)))

    @property
    def _replaces_ranks(self) -> bool:
        """True if a rank that does not return is ended and replaced, as a rank process is.

        A thread that computes for ever cannot be ended, and runs on beside all later tests.
        """
        return self._controller is not None and not getattr(self._controller.open(), "steady", True)

    def logged(self, made: pytest.TestReport) -> None:
        """Add a report to the results, whether this process or an xdist worker made it."""
        id = _property(made, _REQUIREMENT)
        if id is None:
            if str(made.when) == "???":  # xdist's word for a worker that crashed
                self._crashed[made.nodeid] = str(made.longrepr)
            return
        self.siblings.setdefault(id, _property(made, _SIBLINGS))
        result = self.results.setdefault(made.nodeid, PropertyResult(id))
        result.duration += made.duration
        told = json.loads(_property(made, _TOLD) or "{}")
        smp = _property(made, "smp")
        if smp is not None:
            result.smp = json.loads(smp)
        if told or made.when == "call" or not made.passed:
            result.take(_told_outcome(made, told), told)
        if made.when == "teardown" and self._started:
            self._write_so_far()

    # Workers of xdist.

    def worker_output(self) -> dict[str, Any]:
        """The data that an xdist worker sends to the main process at its end."""
        return {
            "whole": self.whole,
            "unclosed": self.unclosed,
            "failures": [tuple(failure) for failure in self._seen_failures()],
            "properties": {
                nodeid: [result.requirement, result.outcome is not PropertyOutcome.DESELECTED]
                for nodeid, result in self.results.items()
            },
        }

    def worker_told(self, output: Mapping[str, Any]) -> None:
        """Add the output of an xdist worker to the results."""
        self.whole = output["whole"]
        self.unclosed = self.unclosed or output["unclosed"]
        for nodeid, (id, selected) in output["properties"].items():
            missing = PropertyOutcome.NOT_RUN if selected else PropertyOutcome.DESELECTED
            self.results.setdefault(nodeid, PropertyResult(id, missing))
        self._add_failures(SeenFailure(*failure) for failure in output["failures"])

    def _seen_failures(self) -> list[SeenFailure]:
        failures = self._witness.failures()
        self._witness.close()
        return failures

    def _add_failures(self, failures: Iterable[SeenFailure]) -> None:
        """Add what the suite saw to what was reported: a plugin may have logged a later try alone."""
        for failure in failures:
            result = self.results.setdefault(failure.nodeid, PropertyResult(failure.requirement))
            result.take(PropertyOutcome(failure.told["outcome"]), failure.told)

    # The end.

    @property
    def used(self) -> bool:
        """True if a property was selected to run."""
        return any(r.outcome is not PropertyOutcome.DESELECTED for r in self.results.values())

    @property
    def complete(self) -> bool:
        """True if the session was not interrupted and every selected property ran to its end."""
        outcomes = [result.outcome for result in self.results.values()]
        return self.interrupted is None and self.used and PropertyOutcome.NOT_RUN not in outcomes

    def verdicts(self) -> dict[str, Verdict]:
        """The verdict on every requirement, from the results so far."""
        outcomes: dict[str, list[PropertyOutcome]] = defaultdict(list)
        for result in self.results.values():
            outcomes[result.requirement].append(result.outcome)
        for id, count in self.siblings.items():
            outcomes[id] += [PropertyOutcome.NOT_RUN] * (count - len(outcomes[id]))
        return judge_all(
            self.registry,
            outcomes,
            unclaimed=self.lacks,
            expected=self.expected,
            intermittent={id for id, entry in self.expected.items() if entry.intermittent},
        )

    def certification(self) -> Certification:
        """The certification of the run, with its obstacles."""
        if self._certification is None:
            self._certification = certification(
                self.registry, self.verdicts(), self._obstacles(), bool(self.whole)
            )
        return self._certification

    def _obstacles(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        if self.interrupted is not None:
            found[f"the session was interrupted ({self.interrupted})"] = []
        if self.options.smoke:
            found["a rehearsal, with few examples (--smp-smoke)"] = []
        if not self.whole:
            found["the session did not ask for the whole suite (--pyargs conformance)"] = []
        for outcome in (
            PropertyOutcome.DESELECTED,
            PropertyOutcome.SKIPPED,
            PropertyOutcome.NOT_RUN,
        ):
            names = [
                argument(nodeid)
                for nodeid, result in self.results.items()
                if result.outcome is outcome and result.requirement not in self.lacks
            ]
            if names:
                number = "1 property" if len(names) == 1 else f"{len(names)} properties"
                found[f"{number} {outcome}"] = [*names[:5], *(["..."] if len(names) > 5 else [])]
        verdicts = self.verdicts()
        idle = [
            entry.id
            for entry in dict.fromkeys(self.expected.values())
            if all(
                verdicts[id] is Verdict.NOT_SUPPORTED
                for id, each in self.expected.items()
                if each is entry
            )
        ]
        if idle:
            found["waivers of what is not supported"] = idle
        return found

    def finish(self, session: pytest.Session) -> None:
        """Judge the run and write the report and the file of expected failures, if asked for.

        The session's exit status becomes TESTS_FAILED if a verdict is FAIL, the backend failed to close, or
        --smp-certify finds an obstacle.
        """
        self.close_backend()
        self._add_failures(self._seen_failures())
        for nodeid, text in self._crashed.items():
            if nodeid in self.results:
                self.results[nodeid].add(PropertyOutcome.ERROR)
                self.results[nodeid].error = text
        stopped = session.shouldstop or session.shouldfail
        if self.interrupted is None and stopped:
            self.interrupted = str(stopped)
        if self.interrupted is None and session.exitstatus == pytest.ExitCode.USAGE_ERROR:
            self.interrupted = "refused; see what pytest printed"
        if self.interrupted is None:
            self.interrupted = self.unclosed
        if session.exitstatus == pytest.ExitCode.OK and (
            self.unclosed is not None
            # Another plugin may have turned a failed test into a passed one.
            or Verdict.FAIL in self.verdicts().values()
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        good = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        self._certifies(good and self.certification().certified)
        if good and self.options.certify and not self.certification().certified:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._written = self._write_expectations()
        self._write_report(int(session.exitstatus))

    def start(self) -> None:
        """Check, before anything runs, that the files to write at the end can be written.

        Raises pytest.UsageError if one cannot. Then write a first report, which says that the session has
        not ended: the report of a session that is killed.
        """
        self._started = True
        for name in ("report", "write_expectations"):
            path = getattr(self.options, name)
            if path is not None:
                try:
                    written.check_writable(path)
                except OSError as error:
                    option = f"--smp-{name.replace('_', '-')}"
                    raise pytest.UsageError(f"{option}={path.name}: {error.strerror}") from None
        self._write_so_far()

    def _write_so_far(self) -> None:
        """Write a report of the results so far, which a session killed after hours leaves behind."""
        if self.options.report is not None and not written.is_stream(self.options.report):
            self._write_report(None)

    def _write_report(self, exit_status: int | None) -> None:
        if self.options.report is not None:
            report.write(self.options.report, report.document(self, exit_status))

    def _write_expectations(self) -> str | None:
        """Write the file of expected failures if asked for, and describe in words what was done."""
        path = self.options.write_expectations
        if path is None:
            return None
        if self.interrupted is not None:
            return f"{path.name}: not written, the session was interrupted"
        return waivers.rewrite(path, self.entries, self.verdicts(), self.results.values())

    # Output to the terminal.

    def header(self) -> str:
        """The lines at the start: the backend and the engine with their claims, and expected failures."""
        text = f"conformance: {self.backend.name} claims {claims_text(self.backend.capabilities)}"
        path = self.expectations
        if path is not None:
            number = "1 entry" if len(self.entries) == 1 else f"{len(self.entries)} entries"
            text += f"; expected failures: {path.name}, {number}"
        known = self.engine.capabilities | FRONT_ENDS
        missing = [str(each) for each in EngineCapability if each not in known]
        claimed = f"all but {', '.join(missing)}" if missing else "everything"
        return f"{text}\nconformance: engine {self.engine.name} claims {claimed}"

    def summary(self, width: int) -> Iterator[str]:
        """The lines below the heading: the table, waivers, certification."""
        verdicts = self.verdicts()
        verbose = self.config.get_verbosity() > 0
        yield from table(self.registry, verdicts, width, whole=verbose)
        yield from lacking(self.lacks, width)
        for entry in dict.fromkeys(self.expected.values()):
            ids = [id for id, each in self.expected.items() if each is entry]
            stale = [id for id in ids if verdicts[id] is Verdict.STALE_WAIVER]
            if any(verdicts[id] is Verdict.WAIVED for id in ids):
                yield f"waived: {entry.id}: {entry}"
            if stale:
                yield f"stale: {entry.place}: passes: {', '.join(stale)}"
        yield from self._alike()
        if self.unclosed is not None:
            yield self.unclosed
        if self._written is not None:
            yield from self._written.splitlines()
        if self.options.certify:
            found = self.certification()
            if found.certified:
                yield f"certified: {found}"
            else:
                yield f"not certified; reached: {found}. What stands against it:"
                yield from (f"   {text}" for text in found.obstacles)

    def _alike(self) -> Iterator[str]:
        """A line for each error by which several requirements fail: one cause may be behind them."""
        ids: dict[str, list[str]] = defaultdict(list)
        for result in self.results.values():
            if result.outcome in (PropertyOutcome.FAILED, PropertyOutcome.ERROR) and result.error:
                line = result.error.partition("\n")[0]
                if result.requirement not in ids[line]:
                    ids[line].append(result.requirement)
        for line, requirements in sorted(ids.items(), key=lambda each: -len(each[1])):
            if len(requirements) > 1:
                some = ", ".join(requirements[:3]) + (", ..." if len(requirements) > 3 else "")
                yield f"{len(requirements)} requirements fail alike ({some}): {line[:200]}"

    def tells(self, exit_status: int) -> bool:
        """Return whether the session has verdicts to show in the terminal."""
        if self.config.option.collectonly or exit_status == pytest.ExitCode.USAGE_ERROR:
            return False
        ran = {result.outcome for result in self.results.values()}
        return (
            bool(ran - {PropertyOutcome.DESELECTED, PropertyOutcome.NOT_RUN})
            or self.options.certify
        )

    def heading(self) -> str:
        """The heading of the summary: the number of each verdict, the backend and its ranks."""
        return (
            f"requirements: {counted(self.verdicts().values())} "
            f"({self.settings.backend}, --smp-ranks={self.settings.ranks})"
        )


def _registry() -> Registry:
    try:
        from conformance.requirements.catalogue import REQUIREMENTS
    except RequirementError as error:
        raise pytest.UsageError(f"conformance: {error}") from None
    return REQUIREMENTS


def requirement_of(item: pytest.Item, registry: Registry) -> str:
    """The id of the requirement that a property points to.

    Raises pytest.UsageError if there is none, or one that nobody declared.
    """
    marker = item.get_closest_marker("requirement")
    if marker is None:
        raise pytest.UsageError(f"{item.nodeid}: no requirement: say @requirement(id)")
    try:
        return registry.named(*marker.args, **marker.kwargs).id
    except (RequirementError, TypeError) as error:
        raise pytest.UsageError(f"{item.nodeid}: {error}") from None


def defined_properties(modules: Iterable[pytest.Module]) -> Counter[str]:
    """The number of properties of each requirement that modules define, with those of all parameters."""
    found: Counter[str] = Counter()
    for module in modules:
        for function in vars(module.obj).values():
            if getattr(function, "__module__", None) != module.obj.__name__:
                continue
            marks = getattr(function, "pytestmark", ())
            parameters = [mark.args[1] for mark in marks if mark.name == "parametrize"]
            for values in itertools.product(*parameters):
                inner = itertools.chain.from_iterable(
                    getattr(value, "marks", ()) for value in values
                )
                ids = [m.args[0] for m in (*inner, *marks) if m.name == "requirement"]
                found.update(ids[:1])
    return found


def claims_text(capabilities: Capabilities) -> str:
    """The claims of a backend in one line: "everything", or all but the named parts."""
    missing = [str(each) for each in Capability if each not in capabilities]
    dtypes = sorted(DTYPES - capabilities.dtypes)
    reductions = [
        f"{op} of {', '.join(sorted(lacks))}" if op in capabilities.reductions else op
        for op, all_of in REDUCTIONS.items()
        if (lacks := all_of - capabilities.reductions.get(op, frozenset()) - set(dtypes))
    ]
    narrower = [
        f"{each} of {', '.join(sorted(lacks))}"
        for each in Capability
        if each in capabilities and (lacks := capabilities.dtypes - capabilities.moves(each))
    ]
    if capabilities == EVERYTHING:
        return "everything"
    return "all but " + ", ".join([*missing, *dtypes, *narrower, *reductions])


def _property(made: Any, name: str) -> Any:
    properties = getattr(made, "user_properties", ())
    return next((value for key, value in properties if key == name), None)


def _failed_outcome(when: str, error: BaseException, replaces_ranks: bool) -> PropertyOutcome:
    """The outcome of a property from a phase that failed."""
    # RunTimeout is no Exception. On threads a run that does not end cannot be waived: it never stops.
    failures = (Exception, pytest.fail.Exception, *((RunTimeout,) if replaces_ranks else ()))
    tested = when == "call" and isinstance(error, failures)
    return PropertyOutcome.FAILED if tested else PropertyOutcome.ERROR


def _told_outcome(made: pytest.TestReport, told: Mapping[str, Any]) -> PropertyOutcome:
    """The outcome of a property from a report.

    The outcome that the suite saw decides. A report without one that is no failure counts as skipped: a plugin
    made it, or changed its outcome before the suite saw it.
    """
    if told:
        return PropertyOutcome(told["outcome"])
    return (
        PropertyOutcome.SKIPPED if made.outcome in ("passed", "skipped") else PropertyOutcome.FAILED
    )


def _notes(error: BaseException) -> list[str]:
    """The notes of an exception, and of all exceptions in it if it is a group."""
    notes = [report.shortened(note) for note in getattr(error, "__notes__", ())]
    for part in getattr(error, "exceptions", ()):
        notes += _notes(part)
    return notes


def basic_first(
    items: list[pytest.Item], found: Mapping[str, Sequence[pytest.Item]], declared: Sequence[str]
) -> None:
    """Sort the items of ``found``, by requirement, into the order in which requirements are declared.

    Plain values come before layouts, groups and asynchronous calls, so ``-x`` stops at the most basic
    broken promise. Items of other tests keep their places.
    """
    suite = iter([item for id in sorted(found, key=declared.index) for item in found[id]])
    ours = {id(item) for tests in found.values() for item in tests}
    items[:] = [next(suite) if id(item) in ours else item for item in items]
