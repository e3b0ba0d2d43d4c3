"""Mutants of the gate that no in-process test kills, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping

_SESSIONS = "sessions in processes of their own notice: tests/conformance/session/test_report.py"
_SHOWN = "changes the width or the length of a list that is shown"
_MODE = "changes a bit of the mode of a file that no other user may read or write"

#: By module and the text of the mutant (MutationSite.text).
SURVIVORS: Mapping[str, Mapping[str, str]] = {
    "conformance.session.executions": {
        "Execution._noted: return result -> return None": "a property returns None",
    },
    "conformance.session.results": {
        "HERE: 1 -> 2": _SESSIONS,
        "HERE: 1 -> 0": _SESSIONS,
        "PropertyResult.add: _RANK.index(outcome) < _RANK.index(self.outcome) -> "
        "_RANK.index(outcome) <= _RANK.index(self.outcome)": "keeps the second error of two",
    },
    "conformance.session.verdicts": {
        "table: len(lines) > _MOST_LINES -> len(lines) >= _MOST_LINES": _SHOWN,
        "_wrapped: max(width, 60) -> max(60, width)": "changes nothing",
        "_wrapped: 60 -> 59": _SHOWN,
    },
    "conformance.session.witness": {
        "_private: 384 -> 385": _MODE,
        "_private: 384 -> 383": _MODE,
    },
}
