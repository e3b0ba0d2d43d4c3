"""Divisions among ranks: what is drawn, that hard cases are, what they shrink to, and that they serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from pytest_smp.strategies import routings, sequence_shards, split_matrices

Drawn = Callable[..., list[Any]]
Minimal = Callable[..., Any]


def test_split_matrices_have_silent_ranks_and_single_receivers(
    drawn: Drawn, minimal: Minimal
) -> None:
    matrices = drawn(split_matrices(3), 300)
    assert {rows for matrix in matrices for row in matrix for rows in row} == {0, 1, 2, 3}
    sums = [
        ([sum(row) for row in matrix], [sum(c) for c in zip(*matrix, strict=True)])
        for matrix in matrices
    ]
    assert sum(0 in sent and sum(sent) > 0 for sent, _ in sums) > 30
    assert sum(0 in received and sum(received) > 0 for _, received in sums) > 30
    assert sum(min(map(min, matrix)) > 0 for matrix in matrices) > 3
    assert minimal(split_matrices(2)) == ((0, 0), (0, 0))
    assert minimal(split_matrices(2), lambda matrix: matrix[1][0] > 1) == ((0, 0), (2, 0))


@pytest.mark.smp(ranks=3)
@given(matrix=split_matrices(3))
def test_a_split_matrix_is_an_all_to_all(matrix):
    rank = dist.get_rank()
    sent = torch.cat(
        [torch.full((rows,), 10 * rank + peer) for peer, rows in enumerate(matrix[rank])]
    )
    splits = [row[rank] for row in matrix]
    received = torch.empty(sum(splits), dtype=sent.dtype)
    dist.all_to_all_single(received, sent, splits, list(matrix[rank]))
    assert received.tolist() == [
        10 * peer + rank for peer, rows in enumerate(splits) for _ in range(rows)
    ]


def test_routings_leave_experts_idle_and_overload_one(drawn: Drawn, minimal: Minimal) -> None:
    drawn_routings = drawn(routings(6, 3, top_k=2), 300)
    for routing in drawn_routings:
        assert len(routing) == 6
        assert all(len(set(choices)) == 2 and set(choices) <= {0, 1, 2} for choices in routing)
    loads = [
        [sum(expert in choices for choices in routing) for expert in range(3)]
        for routing in drawn_routings
    ]
    assert sum(0 in load for load in loads) > 30
    assert sum(load == [4, 4, 4] for load in loads) > 30
    assert any(len({choices[0] for choices in routing}) == 1 for routing in drawn_routings)
    assert minimal(routings(2, 3, top_k=2)) == ((0, 1), (0, 1))
    assert drawn(routings(0, 2), 3)[0] == ()


@pytest.mark.parametrize(("length", "ranks"), [(7, 2), (8, 4), (2, 3), (0, 2), (5, 1)])
def test_sequence_shards_hold_each_position_once(
    length: int, ranks: int, drawn: Drawn, minimal: Minimal
) -> None:
    forms = drawn(sequence_shards(length, ranks), 100)
    for shards in forms:
        assert len(shards) == ranks
        assert sorted(position for shard in shards for position in shard) == list(range(length))
    assert minimal(sequence_shards(length, ranks))[-1] == tuple(range(length))


def test_sequence_shards_have_the_forms_of_context_parallelism(drawn: Drawn) -> None:
    forms = set(drawn(sequence_shards(8, 2), 200))
    assert ((0, 1, 2, 3), (4, 5, 6, 7)) in forms
    assert ((0, 2, 4, 6), (1, 3, 5, 7)) in forms
    assert ((0, 1, 6, 7), (2, 3, 4, 5)) in forms  # the zigzag of ring attention
    assert any(() in shards for shards in forms)
