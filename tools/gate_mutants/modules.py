"""The modules of the gate, each with the tests that are to kill its mutants."""

from __future__ import annotations

from collections.abc import Mapping

_SESSION = "tests/conformance/session"
_GATE = (f"{_SESSION}/test_gate.py", f"{_SESSION}/test_verdicts.py")

#: By module, the files of tests. They run in the process that has the mutant: sessions that a test starts have none.
TESTS: Mapping[str, tuple[str, ...]] = {
    "conformance.session.amounts": (f"{_SESSION}/test_amounts.py",),
    "conformance.session.certification": _GATE,
    "conformance.session.executions": _GATE,
    "conformance.session.expectations": (f"{_SESSION}/test_expectations.py", *_GATE),
    "conformance.session.results": _GATE,
    "conformance.session.session": _GATE,
    "conformance.session.verdicts": _GATE,
    "conformance.session.witness": _GATE,
    "pytest_smp.results": (
        "tests/pytest_smp/test_failures.py",
        "tests/pytest_smp/test_properties.py",
    ),
    "pytest_smp.plugin": ("tests/pytest_smp/test_marker.py", "tests/pytest_smp/test_fixtures.py"),
}

#: Modules whose mutants take seconds: the part for every change.
QUICK = (
    "conformance.session.certification",
    "conformance.session.executions",
    "conformance.session.results",
    "conformance.session.verdicts",
    "conformance.session.witness",
)
