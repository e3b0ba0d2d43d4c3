"""Bugs planted in process_group.py: each must be caught by the test that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_core.transport.checked_group import CheckedGroup
from smp_core.transport.smddp import process_group, rounds
from tests.smp_core.transport.smddp import test_inter_machine, test_process_group, test_work
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, check_caught

BUGS = Bugs()


@BUGS.caught_by(test_process_group.test_lists_of_different_lengths_differ)
def the_number_of_tensors_is_not_compared(patch: Patch) -> None:
    def without(name: str, fields: Any, *rest: Any) -> Any:
        kept = tuple(each for each in fields if each[0] != "number of tensors")
        return rounds.RoundsOperation(name, kept, *rest)

    patch.setattr(process_group, "RoundsOperation", without)


@BUGS.caught_by(test_work.test_a_wait_has_a_limit_and_names_late_ranks)
def nobody_is_named(patch: Patch) -> None:
    patch.setattr(process_group.SmddpProcessGroup, "missing", lambda self, operation: "")


@BUGS.caught_by(test_process_group.test_a_fork_of_a_rank_is_refused)
def a_fork_passes_for_its_parent(patch: Patch) -> None:
    patch.setattr(process_group.SmddpProcessGroup, "check_process", lambda self, call: None)


@BUGS.caught_by(test_process_group.test_a_monitored_barrier_has_a_limit_of_its_own)
def a_monitored_barrier_waits_as_long_as_any_other(patch: Patch) -> None:
    barrier = CheckedGroup.monitored_barrier
    patch.setattr(process_group.SmddpProcessGroup, "monitored_barrier", barrier)


@BUGS.caught_by(test_inter_machine.test_a_group_below_two_machines_uses_no_stream)
def every_group_has_connections(patch: Patch) -> None:
    find = process_group.SmddpProcessGroup._find_machines

    def several(self: Any) -> list[str]:
        return [f"{number} {each}" for number, each in enumerate(find(self))]

    patch.setattr(process_group.SmddpProcessGroup, "_find_machines", several)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
