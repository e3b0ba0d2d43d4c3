"""Bugs planted in collectives.py: each must be caught by the test that it names."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smp_core.transport import messages
from smp_core.transport.smddp import collectives, flat
from tests.smp_core.transport.smddp import test_collectives, test_process_group, test_rounds
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, check_caught, values

BUGS = Bugs()


@BUGS.caught_by(*values(test_collectives.check_reductions))
def the_last_part_of_a_reduction_is_cut(patch: Patch) -> None:
    two_hops = collectives._two_hops

    def cut(group: Any, mine: Any, target: Any, dtype: Any, op: str) -> Any:
        return two_hops(group, mine[:-64], target[:-64], dtype, op)

    patch.setattr(collectives, "_two_hops", cut)


@BUGS.caught_by(*values(test_collectives.check_reductions))
def parts_end_inside_of_an_element(patch: Patch) -> None:
    patch.setattr(collectives, "_LINE", 1)


@BUGS.caught_by(*values(test_collectives.check_several_scatters_at_once))
def each_part_begins_with_its_block(patch: Patch) -> None:
    between = collectives._Columns.between

    def first(self: Any, begin: int, end: int) -> Any:
        return ((array, 0) for array, _ in between(self, begin, end))

    patch.setattr(collectives._Columns, "between", first)


@BUGS.caught_by(*values(test_collectives.check_several_scatters_at_once))
def what_several_scatters_write_in_place_is_sent(patch: Patch) -> None:
    patch.setattr(collectives, "copied_if_shared", lambda source, targets, same: source)


@BUGS.caught_by(*values(test_collectives.check_moves))
def what_is_written_in_place_is_sent(patch: Patch) -> None:
    patch.setattr(collectives, "copied_if_shared", lambda source, targets, same: source)


@BUGS.caught_by(*values(test_collectives.check_several_gathers_at_once))
def what_several_gathers_write_in_place_is_sent(patch: Patch) -> None:
    copied = collectives.copied_if_shared

    def kept(source: Any, targets: Any, same: Any) -> Any:
        return source if len(targets) > 1 else copied(source, targets, same)

    patch.setattr(collectives, "copied_if_shared", kept)


@BUGS.caught_by(*values(test_collectives.check_several_gathers_at_once))
def a_round_ends_with_a_target(patch: Patch) -> None:
    def rows(targets: Any) -> Any:
        ends = list(itertools.accumulate(each.shape[1] for each in targets))

        def sink(rows: Any, at: int) -> None:
            for target, end in zip(targets, ends, strict=True):
                begin = end - target.shape[1]
                if begin <= at < end:
                    rest = target[:, at - begin :]
                    rest[:] = rows[:, : rest.shape[1]]

        return sink

    patch.setattr(collectives, "_rows", rows)


@BUGS.caught_by(*values(test_collectives.check_moves))
def a_row_is_the_next_member_s(patch: Patch) -> None:
    scatter = collectives._scatter_rows

    def shifted(group: Any, rows: Any, target: Any) -> Any:
        return scatter(group, None if rows is None else np.roll(rows, 1, axis=0), target)

    patch.setattr(collectives, "_scatter_rows", shifted)


@BUGS.caught_by(*values(test_collectives.check_moves))
def every_member_writes_a_broadcast(patch: Patch) -> None:
    broadcast = collectives._broadcast_slot

    def written(group: Any, mine: Any, length: int, target: Any) -> Any:
        nothing = np.zeros(length, np.uint8)
        return broadcast(group, nothing if mine is None else mine, length, target)

    patch.setattr(collectives, "_broadcast_slot", written)


@BUGS.caught_by(*values(test_collectives.check_moves))
def a_long_operation_has_a_round_too_few(patch: Patch) -> None:
    patch.setattr(collectives, "_rounds_of", lambda length, piece: max(length // piece, 1))


@BUGS.caught_by(*values(test_collectives.check_uneven))
def the_longest_part_is_this_member_s(patch: Patch) -> None:
    def own(group: Any, call: Any, sizes: Any, gathers: bool) -> int:
        return max(each.numel() for each in call.brings)

    patch.setattr(collectives, "_check_pairs", own)


@BUGS.caught_by(*values(test_collectives.check_uneven))
def the_first_round_of_an_uneven_operation_is_its_last(patch: Patch) -> None:
    patch.setattr(collectives, "_pairwise", lambda group, transfer, check, piece: transfer)


@BUGS.caught_by(*values(test_collectives.check_mixed_dtypes))
def all_outputs_of_a_call_have_the_dtype_of_the_first(patch: Patch) -> None:
    def as_the_first(group: Any, parts: Any, target: Any, call: Any) -> Any:
        sink = collectives._folded(target.bytes, call.gets[0].dtype, call.op)
        return collectives._then(
            collectives._exchange_blocks(group, parts, target.bytes.size, sink), target
        )

    patch.setattr(collectives, "_exchange_mixed", as_the_first)


@BUGS.caught_by(*values(test_collectives.check_memory_of_large_tensors))
def tensors_are_copied_before_they_are_sent(patch: Patch) -> None:
    patch.setattr(collectives, "read", lambda tensors: flat.read(tensors).copy())


@BUGS.caught_by(test_process_group.test_a_step_of_fsdp_is_that_of_the_whole_model)
def a_part_of_a_scattered_sum_is_the_next_member_s(patch: Patch) -> None:
    exchange = collectives._exchange_blocks

    def shifted(group: Any, parts: Any, *rest: Any) -> Any:
        return exchange(group, [np.roll(each, 1, axis=0) for each in parts], *rest)

    patch.setattr(collectives, "_exchange_blocks", shifted)


@BUGS.caught_by(test_rounds.test_every_rank_learns_of_calls_that_differ)
def a_size_that_differs_is_no_error(patch: Patch) -> None:
    patch.setattr(messages, "pair_mismatch", lambda *_: None)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
