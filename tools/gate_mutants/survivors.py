"""Mutants of the gate that no test kills, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping

#: By module and the text of the mutant (MutationSite.text).
SURVIVORS: Mapping[str, Mapping[str, str]] = {}
