"""Cells: which a step hits, which a backend claims, and that a program can be made to hit any."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pytest_smp.ranks.capabilities import EVERYTHING, REDUCTIONS, Capabilities, Capability
from pytest_smp.strategies.communication import Cell, Lie, Program, all_cells, cells, sample
from pytest_smp.strategies.communication.coverage import reduce_ops

Make = Callable[..., Program]


def test_the_cells_of_a_collective_are_those_of_its_input_and_its_output(program: Make) -> None:
    call = {
        "operation": "all_gather",
        "group": "g1",
        "dtype": "bool",
        "shape": (2, 2),
        "input": Lie("expanded"),
        "output": Lie("sliced", 3),
        "lags": (0, 1),
    }
    assert cells(program(3, call, g1=(2, 0))) == {
        Cell("all_gather", "bool", "unsorted", "async", "expanded"),
        Cell("all_gather", "bool", "unsorted", "async", "sliced"),
    }


def test_a_send_and_its_receive_are_two_operations(program: Make) -> None:
    call = {"operation": "send", "root": 0, "peer": 1, "lags": (None, 0), "input": Lie("strided")}
    assert cells(program(2, call)) == {
        Cell("send", "float32", "default", "sync", "strided"),
        Cell("recv", "float32", "default", "async", "contiguous"),
    }


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ((0, 1, 2), "sorted"),
        ((0, 2), "sorted"),
        ((1, 2), "without 0"),
        ((2, 1), "unsorted"),
        ((1, 0, 2), "unsorted"),
        ((0,), "of one"),
        ((2,), "of one"),
    ],
)
def test_kinds_of_group(program: Make, members: tuple[int, ...], kind: str) -> None:
    call = {"operation": "barrier", "group": "g1"}
    assert cells(program(3, call, g1=members)) == {Cell("barrier", "-", kind, "sync", "-")}


def test_how_many_cells_a_backend_claims() -> None:
    # dtypes x kinds of group x modes x layouts; a group of one cannot send to itself.
    counts = Counter(cell.operation for cell in all_cells())
    in_place, others = 19 * 5 * 2 * 5, 19 * 5 * 2 * 6
    assert counts == {
        "barrier": 5 * 2,
        **dict.fromkeys(("all_reduce", "reduce", "broadcast"), in_place),
        **dict.fromkeys(("all_gather", "all_gather_single", "gather", "scatter"), others),
        **dict.fromkeys(("reduce_scatter", "reduce_scatter_single"), others),
        **dict.fromkeys(("all_to_all", "all_to_all_single"), others),
        "send": 19 * 4 * 2 * 6,
        "recv": 19 * 4 * 2 * 5,
        "batch_isend_irecv": 19 * 4 * 1 * 6,
        **dict.fromkeys(("smp.barrier", "smp.allgather", "smp.broadcast"), 4),
        "smp.send": 3,
    }


def test_every_51st_cell_is_hit_by_a_program_made_for_it() -> None:
    for seed, cell in enumerate(all_cells()[::51]):
        assert cell in cells(sample(random.Random(seed).randrange, cell=cell)), cell


FEW: list[tuple[dict[str, Any], set[str], set[str]]] = [
    ({"claims": frozenset({Capability.OBJECTS})}, {"smp.send", "smp.barrier"}, {"-"}),
    (
        {"claims": frozenset({Capability.PROCESS_GROUPS, Capability.BROADCAST})},
        {"broadcast"},
        {"float32", "bool"},
    ),
    (
        {
            "claims": frozenset({Capability.PROCESS_GROUPS, Capability.ALL_REDUCE}),
            "dtypes": frozenset({"float32", "int8", "bool"}),
            "reductions": {**dict.fromkeys(REDUCTIONS, frozenset()), "MAX": frozenset({"int8"})},
        },
        {"all_reduce"},
        {"int8"},
    ),
]


@pytest.mark.parametrize(("claims", "operations", "dtypes"), FEW)
def test_only_what_is_claimed_is_claimed(
    claims: dict[str, Any], operations: set[str], dtypes: set[str]
) -> None:
    claimed = all_cells(Capabilities(**claims))
    assert operations <= {cell.operation for cell in claimed}
    assert dtypes <= {cell.dtype for cell in claimed}
    objects = operations == {"smp.send", "smp.barrier"}
    assert all(cell.operation.startswith("smp.") == objects for cell in claimed)
    assert objects or {cell.group for cell in claimed} == {"default"}  # GROUPS is not claimed
    for seed in range(30):
        drawn = cells(sample(random.Random(seed).randrange, capabilities=Capabilities(**claims)))
        assert drawn <= {*claimed}


def test_reductions_without_one_right_result_are_left_out() -> None:
    assert "PRODUCT" in reduce_ops("reduce", "complex64", EVERYTHING, 2)
    assert "PRODUCT" not in reduce_ops("all_reduce", "complex64", EVERYTHING, 2)
    assert "PRODUCT" in reduce_ops("all_reduce", "float32", EVERYTHING, 2)
    assert "AVG" in reduce_ops("reduce", "complex64", EVERYTHING, 4)
    assert "AVG" not in reduce_ops("reduce", "complex64", EVERYTHING, 3)
    assert "AVG" in reduce_ops("reduce", "float32", EVERYTHING, 3)
