"""The verdicts of a session as a versioned JSON document.

docs/report.md and ``report.schema.json`` describe the document.
"""

from __future__ import annotations

import datetime
import json
import platform
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from conformance.engines.capabilities import NEEDS, EngineCapability, Need
from conformance.engines.protocol import Engine
from conformance.requirements.registry import Level, Registry, Requirement
from conformance.session.certification import Certification
from conformance.session.expectations import Expectation
from conformance.session.options import SuiteOptions
from conformance.session.results import PropertyResult, property_name
from conformance.session.verdicts import PropertyOutcome, Verdict
from pytest_smp.ranks.capabilities import Capabilities, Capability
from pytest_smp.ranks.protocols import Backend
from pytest_smp.settings import Settings
from pytest_smp.written import write_text

SCHEMA = Path(__file__).parents[1] / "report.schema.json"
SCHEMA_VERSION = 2
_SUITE = "pytest-smp"
_EXAMPLE = ("Failing test case", "Falsifying example")  # Hypothesis's words, now and before
_MOST_CHARACTERS = 4000  # of one text; a comparison of two large values may have millions


class Reported(Protocol):
    """The part of a suite session that a report reads.

    :class:`~conformance.session.session.SuiteSession` satisfies this protocol.
    """

    backend: Backend
    engine: Engine
    settings: Settings
    options: SuiteOptions
    registry: Registry  # up to --smp-level
    lacks: dict[str, list[Need]]  # by requirement
    expectations: Path | None  # the file of expected failures that is in force
    expected: dict[str, Expectation]  # by requirement
    results: dict[str, PropertyResult]  # by node id
    started: float
    interrupted: str | None

    @property
    def complete(self) -> bool: ...
    def verdicts(self) -> dict[str, Verdict]: ...
    def certification(self) -> Certification: ...


def document(session: Reported, exit_status: int | None) -> dict[str, Any]:
    """Make the whole report.

    ``exit_status`` is the exit status of the session, or None while the session runs.
    """
    verdicts = session.verdicts()
    interrupted = session.interrupted
    if exit_status is None:
        interrupted = "the session has not ended, or its process was killed"
    certification = session.certification() if exit_status is not None else None
    return {
        "schema": "smp-conformance-report",
        "schema_version": SCHEMA_VERSION,
        "suite": {"name": _SUITE, "version": _version(_SUITE)},
        "complete": exit_status is not None and session.complete,
        "interrupted": interrupted,
        "exit_status": exit_status,
        "started": datetime.datetime.fromtimestamp(session.started, datetime.UTC).isoformat(),
        "backend": {
            "name": session.backend.name,
            "option": session.settings.backend,
            "summary": session.backend.summary,
            **_capabilities(session.backend.capabilities),
        },
        "engine": {
            "name": session.engine.name,
            "option": session.options.engine,
            "claims": [str(e) for e in EngineCapability if e in session.engine.capabilities],
            "not_claimed": [
                str(e) for e in EngineCapability if e not in session.engine.capabilities
            ],
        },
        "options": _options(session),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "hypothesis", "pytest")},
        },
        "hypothesis": _hypothesis(),
        "certification": {
            "asked": session.options.certify,
            "certified": certification is not None and certification.certified,
            "level": certification.level.name if certification and certification.level else None,
            "obstacles": list(certification.obstacles) if certification else [],
        },
        "verdicts": _counts(verdicts.values()),
        "levels": [
            {
                "level": level.name,
                "sentence": level.sentence,
                "verdicts": _counts(verdicts[id] for id in ids),
            }
            for level in Level
            if (ids := [id for id, each in session.registry.items() if each.level is level])
        ],
        "requirements": [
            _requirement(session, each, verdicts[id]) for id, each in session.registry.items()
        ],
    }


def _requirement(session: Reported, requirement: Requirement, verdict: Verdict) -> dict[str, Any]:
    entry = session.expected.get(requirement.id)
    return {
        "id": requirement.id,
        "sentence": requirement.sentence,
        "source": requirement.source,
        "level": requirement.level.name,
        "needs": [str(each) for each in NEEDS if each in requirement.needs],
        "lacks": [str(each) for each in session.lacks.get(requirement.id, ())],
        "verdict": str(verdict),
        "waiver": None
        if entry is None
        else {
            "id": entry.id,
            "reason": entry.reason,
            "link": entry.link,
            "intermittent": entry.intermittent,
        },
        "properties": [
            {"name": property_name(nodeid), **_result(session, result)}
            for nodeid, result in sorted(session.results.items())
            if result.requirement == requirement.id
        ],
    }


def _result(session: Reported, result: PropertyResult) -> dict[str, Any]:
    outcome = result.outcome
    if result.requirement in session.lacks:
        outcome = PropertyOutcome.NOT_SUPPORTED
    examples = [note for note in result.notes if note.startswith(_EXAMPLE)]
    return {
        "outcome": str(outcome),
        "duration": round(result.duration, 6),
        "error": result.error,
        "example": examples[0] if examples else None,
        "notes": [note for note in result.notes if note not in examples[:1]],
        "smp": result.smp,
    }


def _capabilities(capabilities: Capabilities) -> dict[str, Any]:
    return {
        "claims": [str(each) for each in Capability if each in capabilities],
        "not_claimed": [str(each) for each in Capability if each not in capabilities],
        "dtypes": sorted(capabilities.dtypes),
        "narrower": {
            str(each): sorted(capabilities.narrower[each])
            for each in Capability
            if each in capabilities.narrower
        },
        "reductions": {
            op: sorted(dtypes & capabilities.dtypes)
            for op, dtypes in sorted(capabilities.reductions.items())
        },
    }


def _options(session: Reported) -> dict[str, Any]:
    chosen, path = session.settings, session.expectations
    return {
        "ranks": chosen.ranks,
        "timeout": chosen.timeout,
        "seed": chosen.seed,
        "strict": chosen.strict,
        "schedule": None if chosen.schedule is None else str(chosen.schedule),
        "certify": session.options.certify,
        "level": session.options.level or None,
        "smoke": session.options.smoke,
        "expectations": None if path is None else path.name,
    }


def _hypothesis() -> dict[str, Any]:
    from hypothesis import settings

    default = settings()
    return {"max_examples": default.max_examples, "derandomize": default.derandomize}


def _counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    counts = Counter(verdicts)
    return {str(verdict): counts[verdict] for verdict in Verdict}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def error_text(error: BaseException) -> str:
    """The type and the message of an exception, shortened."""
    try:
        text = str(error)
    except Exception as broken:  # a broken __str__ must not hide the error
        text = f"<its text cannot be made: {type(broken).__name__}>"
    return shortened(f"{type(error).__name__}: {text}".rstrip(": "))


def shortened(text: str) -> str:
    """Cut a text that is longer than 4000 characters, and say how much is missing."""
    left = len(text) - _MOST_CHARACTERS
    return text if left <= 0 else f"{text[:_MOST_CHARACTERS]}... ({left} more characters)"


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the document atomically: another process reads the whole old one or the whole new one."""
    write_text(path, json.dumps(document, indent=2) + "\n")
