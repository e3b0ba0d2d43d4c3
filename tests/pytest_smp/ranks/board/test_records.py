"""The wire format: any pieces make the same records, and what is no record is refused by rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_smp.ranks.board import Board, records
from pytest_smp.ranks.board.records import MOST_BYTES, SHAPES, Reader, encode
from smp_core.errors import BackendError


@given(st.lists(st.integers(0, 10**12), min_size=1), st.lists(st.integers(1, 30)))
def test_any_pieces_make_the_same_records(numbers: list[int], pieces: list[int]) -> None:
    data = b"".join(encode("k", number) for number in numbers)
    reader, read = Reader(0), []
    for piece in [*pieces, len(data)]:
        read += reader.feed(data[:piece])
        data = data[piece:]
    read += reader.feed(data)
    assert read == [["k", number] for number in numbers]


@given(st.binary())
def test_garbage_is_refused_and_names_the_rank(data: bytes) -> None:
    board = Board(4)
    with pytest.raises(BackendError, match="rank 3: its line to the board"):
        board.feed(3, data + b"\n")  # no bytes of this size are a record by chance
    assert board.look(range(4), 1.0) is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{}",
        b"[1]",
        b'["?"]',
        b'["k"]',
        b'["k","1"]',
        b'["k",true]',
        b'["k",1.5]',
        b'["w",1,1,0]',
        b"[" * 100_000,
        b'["k",' + b"9" * 5000 + b"]",
    ],
)
def test_what_is_no_record(line: bytes) -> None:
    with pytest.raises(BackendError, match="rank 2"):
        Reader(2).feed(line + b"\n")


def test_each_kind_has_a_letter_of_its_own() -> None:
    names = [name for name, value in vars(records).items() if name.isupper() and type(value) is str]
    assert sorted(getattr(records, name) for name in names) == sorted(SHAPES)


def test_a_line_without_an_end() -> None:
    reader = Reader(5)
    reader.feed(b"x" * MOST_BYTES)
    with pytest.raises(BackendError, match=r"rank 5.*without an end of line"):
        reader.feed(b"x")
