"""The way from a run's report to pytest's output: one exception with notes, sections per rank,
machine-readable outcomes.
"""

from __future__ import annotations

import json
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.skipping import xfailed_key

from pytest_smp import failures
from pytest_smp.failures import Failure
from pytest_smp.ranks.protocols import Outcome, OutcomeKind, Report, VerdictKind
from smp_core.errors import (
    LeakError,
    RankDisagreementError,
    RunTimeout,
    SmpError,
    VerdictError,
)
from smp_core.transport.diagnosis import ranks_text
from smp_core.transport.stack_frames import is_ours

_ENDS_THE_SESSION = (KeyboardInterrupt, pytest.exit.Exception)


def conclude(report: Report, backend: str, config: Mapping[str, Any] | None = None) -> None:
    """Raise what a failed or skipped run is to raise; return for a run that passed.

    The exception is the root-cause rank's own object, with the other ranks' outcomes as notes. A group
    of all ranks' exceptions would not do: Hypothesis tells failures apart by the exception, and would
    count each of the group. ``config`` is the configuration that the run gave smp.init.
    """
    __tracebackhide__ = True
    error = report.error
    if isinstance(error, BaseExceptionGroup) and error.split(pytest.skip.Exception)[1] is None:
        text = f"rank {report.root} raised a group of skips: skip by pytest.skip, on all ranks"
        error = RankDisagreementError(text).with_traceback(error.__traceback__)
    if error is not None:
        if not isinstance(error, _ENDS_THE_SESSION):
            known = getattr(error, "__notes__", ())  # an exception object may be raised again
            for note in [*_notes(report, backend), *_replay(report)]:
                if note not in known:
                    error.add_note(note)
            ranks = len(report.outcomes)
            failure = Failure(
                str(report.verdict), report.root, ranks, backend, config, _further(report)
            )
            failures.mark(error, failure)
        raise error
    skipped = [outcome for outcome in report.outcomes if outcome.kind is OutcomeKind.SKIPPED]
    if not skipped:
        return
    kinds = {type(outcome.error) for outcome in skipped}
    if len(skipped) == len(report.outcomes) and len(kinds) == 1:
        assert skipped[0].error is not None
        raise skipped[0].error
    lines = ["the ranks do not agree whether the test applies"]
    lines += [f"  {text}" for text in _merged(report.outcomes)]
    assert skipped[0].error is not None
    disagreement = RankDisagreementError("\n".join(lines))
    raise disagreement.with_traceback(skipped[0].error.__traceback__)


def _replay(report: Report) -> list[str]:
    if not report.schedule:
        return []
    return [f"in the schedule {report.schedule}; replay it: --smp-schedule={report.schedule}"]


def _text(error: BaseException | None) -> str:
    try:
        return str(error)
    except Exception as broken:  # a broken __str__ must not hide the error
        return f"<its text cannot be made: {type(broken).__name__}>"


def _notes(report: Report, backend: str) -> list[str]:
    size = len(report.outcomes)
    others = [outcome for outcome in report.outcomes if outcome.rank != report.root]
    world = f"{size} ranks" if size > 1 else "1 rank"
    if report.verdict is not VerdictKind.FAILED:  # the message tells about every rank already
        told = (OutcomeKind.RAISED, OutcomeKind.SKIPPED)
        more = _merged([outcome for outcome in others if outcome.kind in told])
        verdict = f"verdict: {report.verdict} ({world}, {backend})"
        return [verdict, *(f"  {text}" for text in more)]
    root = next(outcome for outcome in report.outcomes if outcome.rank == report.root)
    alike = [outcome for outcome in others if _line(outcome) == _line(root)]
    same = [outcome.rank for outcome in alike if _text(outcome.error) == _text(root.error)]
    other_values = [outcome.rank for outcome in alike if outcome.rank not in same]
    rest = [outcome for outcome in others if _line(outcome) != _line(root)]
    lines = [f"raised by rank {report.root} of {world} ({backend})"]
    if same:
        lines.append(f"{ranks_text(same)}: the same")
    if other_values:
        lines.append(f"{ranks_text(other_values)}: the same line, other values")
    return ["; ".join(lines), *(f"  {text}" for text in _merged(rest))]


def _line(outcome: Outcome) -> tuple[Any, ...]:
    """The key that outcomes of the same cause share: the type of the error and its line."""
    error = outcome.error
    if error is None:
        return (outcome.kind, outcome.rank)
    place = _place(error)
    return type(error), place


def _place(error: BaseException) -> tuple[str, int | None] | None:
    frame = _user_frame(error)
    return None if frame is None else (frame.filename, frame.lineno)


_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line that is neither ours nor a library's, else the innermost of a library."""
    stack = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in stack if not is_ours(frame.filename)]
    users = [frame for frame in theirs if not frame.filename.startswith(_LIBRARIES)]
    return next(reversed(users or theirs), None)


def _line_text(error: BaseException) -> str | None:
    """The user's line where the error was raised, with its source."""
    frame = _user_frame(error)
    if frame is None or isinstance(error, LeakError):  # a leak is found after the bodies returned
        return None
    return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"


def refuse_xfail(made: pytest.TestReport, item: pytest.Item, error: BaseException) -> None:
    """Fail a test with ``xfail(raises=...)`` if a rank has raised what is not named there.

    pytest compares the root cause alone.
    """
    xfailed, failure = item.stash.get(xfailed_key, None), failures.of(error)
    raises = None if xfailed is None else xfailed.raises
    if raises is None or failure is None:
        return
    for outcome in failure.further:
        own: Any = outcome.error
        expected = (
            isinstance(own, raises) if isinstance(raises, type | tuple) else raises.matches(own)
        )
        if not expected:
            made.outcome = "failed"
            del made.wasxfail
            made.sections.append(("xfail", f"{_merged([outcome])[0]}: raises= does not name it"))
            return


def _further(report: Report) -> tuple[Outcome, ...]:
    """The ranks that have raised another type than the root cause, at a line of the user's: no consequences."""
    if report.verdict is not VerdictKind.FAILED:
        return ()
    return tuple(
        outcome
        for outcome in report.outcomes
        if outcome.kind is OutcomeKind.RAISED and outcome.error is not None
        if type(outcome.error) is not type(report.error) and _is_of_user(outcome.error)
    )


def _is_of_user(error: BaseException) -> bool:
    """Return whether a line of the user's raised the error: not a call that failed because a peer had ended."""
    stack = traceback.extract_tb(error.__traceback__)
    return bool(stack) and not (
        is_ours(stack[-1].filename) or stack[-1].filename.startswith(_LIBRARIES)
    )


def _merged(outcomes: list[Outcome]) -> list[str]:
    texts: dict[str, list[int]] = {}
    for outcome in outcomes:
        texts.setdefault(_describe(outcome), []).append(outcome.rank)
    return [f"{ranks_text(ranks)}: {text}" for text, ranks in texts.items()]


def _describe(outcome: Outcome) -> str:
    if outcome.error is not None:
        first_line = _text(outcome.error).partition("\n")[0]
        text = f"{outcome.kind}: {type(outcome.error).__name__}: {first_line}".rstrip(": ")
        place = _place(outcome.error)
        return text if place is None else f"{text} ({Path(place[0]).name}:{place[1]})"
    return outcome.detail or str(outcome.kind)


def add_to_item(
    item: pytest.Item,
    report: Report,
    backend: str,
    error: BaseException | None,
    *,
    abandoned: bool = True,
) -> None:
    """Put the ranks' output into sections of the item's report, and their outcomes into its
    properties. ``abandoned``: ranks that did not come back go on (they are threads).
    """
    for outcome in report.outcomes:
        for name, text in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
            if text:
                item.add_report_section("call", f"{name} (rank {outcome.rank})", text)
    ranks = [
        {"rank": outcome.rank, "outcome": str(outcome.kind), "detail": _describe(outcome)}
        for outcome in report.outcomes
    ]
    summary = {
        "backend": backend,
        "verdict": str(report.verdict),
        "root": report.root,
        "abandoned": abandoned and report.verdict is VerdictKind.TIMED_OUT,
        "schedule": str(report.schedule),
        "ranks": ranks,
    }
    if error is not None:
        summary |= _told(error)
    item.user_properties.append(("smp", json.dumps(summary)))


def summary_of(error: BaseException) -> str | None:
    """The value of the property ``smp`` for a test that started its runs itself and let ``error`` through.

    None if no run raised ``error``.
    """
    found = [failure for _, failure in failures.parts(error)]
    if not found:
        return None
    last = found[-1]
    return json.dumps(
        {
            "backend": last.backend,
            "verdict": last.verdict,
            "root": last.root,
            "abandoned": False,  # the controller that started them counts those
            "schedule": "",
            "ranks": [],
            **_told(error),
        }
    )


def _told(error: BaseException) -> dict[str, Any]:
    """The parts of an exception, and of those that it groups, for the section of failures at the end."""
    several = [each for each, _ in failures.parts(error) if each is not error]
    return {
        "error": f"{type(error).__name__}: {_text(error)}".rstrip(": "),
        "line": _line_text(error),
        "notes": list(getattr(error, "__notes__", ())),
        **({"failures": [_told(each) for each in several]} if several else {}),
    }


def shorten(made: pytest.TestReport, error: BaseException) -> None:
    """Let the line of pytest's short summary begin with the verdict: it is cut at the terminal's
    width, and the module's name of an error of ours says nothing.
    """
    crash = getattr(made.longrepr, "reprcrash", None)
    if crash is None or not isinstance(error, SmpError | RunTimeout):
        return
    prefix = f"{type(error).__module__}."
    crash.message = crash.message.removeprefix(prefix)
    if isinstance(error, VerdictError | RunTimeout):
        crash.message = crash.message.removeprefix(f"{type(error).__name__}: ")
    # A rank that died before its first call has no line; the note that our frames are hidden helps no user.
    for shown, *_ in getattr(made.longrepr, "chain", ()):
        if not shown.reprentries or "hidden" in (shown.extraline or ""):
            shown.extraline = None
