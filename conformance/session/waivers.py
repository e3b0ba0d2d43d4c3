"""Write the file of expected failures anew, from the results of a session or from its report.

    python -m conformance.session.waivers REPORT FILE

reads the report of a whole session (``--smp-report``), and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.session import expectations
from conformance.session.expectations import Expectation, ExpectationError
from conformance.session.report import SCHEMA_VERSION
from conformance.session.results import PropertyResult
from conformance.session.verdicts import PropertyOutcome, Verdict
from pytest_smp import written

_WAIVABLE = {PropertyOutcome.FAILED, PropertyOutcome.WAIVED}


def rewrite(
    path: Path,
    entries: Sequence[Expectation],
    verdicts: Mapping[str, Verdict],
    results: Iterable[PropertyResult],
) -> str:
    """Write the file, and describe in words what was done.

    Args:
        path: the file to write.
        entries: the entries that the file had before.
        verdicts: the verdict on every requirement, by id.
        results: the results of all properties.
    """
    results = list(results)
    failed = {result.requirement for result in results if result.outcome in _WAIVABLE}
    errors = {result.requirement: result.error for result in results if result.error}
    updated = expectations.updated(entries, verdicts, failed)
    written.write_text(path, expectations.written(updated, errors))
    todo = sum(entry.todo for entry in updated)
    text = f"{path.name}: {len(updated)} expected failures written"
    if todo:
        text += f"; {todo} need a reason and a link before the file can be used"
    untested = {r.requirement for r in results if r.outcome is PropertyOutcome.ERROR}
    if untested:
        named = ", ".join(sorted(untested))
        text += f"\ncannot be waived, for they could not be tested: {named}"
    return text


def rewrite_from_report(path: Path, report: Path) -> str:
    """Write the file from the report of a session, and describe in words what was done.

    Raises ExpectationError for a file that is no report of a whole session, and for a bad file of expected failures.
    """
    try:
        document = json.loads(report.read_text())
    except (OSError, ValueError) as error:
        raise ExpectationError(f"{report.name}: {error}") from None
    reason = _why_refused(document)
    if reason:
        raise ExpectationError(f"{report.name}: {reason}")
    verdicts = {each["id"]: Verdict(each["verdict"]) for each in document["requirements"]}
    results = [
        PropertyResult(each["id"], PropertyOutcome(result["outcome"]), error=result["error"])
        for each in document["requirements"]
        for result in each["properties"]
    ]
    return rewrite(path, expectations.read(path) if path.exists() else [], verdicts, results)


def _why_refused(document: Any) -> str:
    """The reason why nothing can be written from a report; empty if it can be used."""
    if not isinstance(document, dict) or document.get("schema") != "smp-conformance-report":
        return "no report of the suite (--smp-report)"
    if document["schema_version"] != SCHEMA_VERSION:
        return f"schema version {document['schema_version']}; this suite reads {SCHEMA_VERSION}"
    if document["interrupted"]:
        return f"the session was interrupted: {document['interrupted']}"
    for part in ("level", "smoke"):
        if document["options"][part]:
            return (
                f"of a session with --smp-{part}: what was not run, or hardly, would lose its entry"
            )
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the file was written."""
    parser = argparse.ArgumentParser("python -m conformance.session.waivers", description=__doc__)
    parser.add_argument("report", type=Path, help="the report of a session (--smp-report)")
    parser.add_argument("file", type=Path, help="the file of expected failures to write")
    options = parser.parse_args(arguments)
    try:
        print(rewrite_from_report(options.file, options.report))
    except (ExpectationError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
