"""Bugs planted in folding.py: each must be caught by the test that it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smp_core.transport.smddp import folding
from tests.smp_core.transport.smddp import test_folding
from tests.smp_core.transport.smddp import test_folding as fold_tests
from tests.smp_core.transport.smddp.planted_bugs import Bug, Bugs, Patch, check_caught

BUGS = Bugs()


def _all_bits(op: str, dtype: str) -> Callable[[Path], None]:
    return lambda _: test_folding.test_the_bits_are_those_of_the_published_order(op, dtype)


@BUGS.caught_by(_all_bits("SUM", "float32"))
def sums_go_from_the_first_rank_to_the_last(patch: Patch) -> None:
    def fold(rows: Any, combine: Any, result: Any) -> None:
        result[:] = rows[0]
        for row in rows[1:]:
            combine(result, row, out=result)

    patch.setattr(folding, "_fold", fold)


@BUGS.caught_by(_all_bits("SUM", "bfloat16"))
def halves_are_added_as_halves(patch: Patch) -> None:
    patch.setattr(folding, "_HALVES", ())
    reduced = folding.reduce_tensors

    def in_halves(tensors: Any, op: str) -> Any:
        first, *rest = tensors
        for each in rest:
            first = first + each
        return first if first.dtype is torch.bfloat16 else reduced(tensors, op)

    patch.setattr(folding, "reduce_tensors", in_halves)


@BUGS.caught_by(_all_bits("AVG", "float32"))
def a_mean_is_a_sum(patch: Patch) -> None:
    fold = folding.fold_rows
    patch.setattr(
        fold_tests,
        "fold_rows",
        lambda rows, dtype, op, target: fold(rows, dtype, "SUM" if op == "AVG" else op, target),
    )


@BUGS.caught_by(_all_bits("BOR", "int32"))
def a_bitwise_or_is_exclusive(patch: Patch) -> None:
    patch.setitem(folding._COMBINE, "BOR", np.bitwise_xor)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: Patch, tmp_path: Path) -> None:
    check_caught(bug, monkeypatch, tmp_path)
