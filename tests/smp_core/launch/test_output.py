"""The lines of ranks, as ``smp-run`` shows them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from smp_core.launch.output import OutputStyle, RankOutput


def shown(
    capsys: pytest.CaptureFixture[str], style: str, *parts: tuple[int, str, bytes]
) -> tuple[str, str]:
    capsys.readouterr()
    output = RankOutput(OutputStyle(style), 11)
    for rank, stream, data in parts:
        output.take(rank, stream, data)
    output.end()
    return capsys.readouterr()


def test_lines_are_behind_their_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [
        (1, "stdout", b"o"),
        (10, "stdout", b"ten\n"),
        (1, "stdout", b"ne\n"),
        (0, "stderr", b"e\n"),
    ]
    out, err = shown(capsys, "prefix", *parts)
    assert out == "[rank 10] ten\n[rank  1] one\n"
    assert err == "[rank  0] e\n"


def test_a_progress_bar_is_shown_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capsys, "plain", (0, "stdout", b"10 %\r20 %\r"), (0, "stdout", b"done\r\nend"))
    assert out.splitlines() == ["10 %", "20 %", "done", "end"]


def test_ranks_stand_together(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [
        (1, "stdout", b"a\n"),
        (0, "stdout", b"b\n"),
        (1, "stdout", b"c"),
        (0, "stderr", b"d\n"),
    ]
    out, err = shown(capsys, "group", *parts)
    assert out == "---- rank 0 ----\nb\n---- rank 1 ----\na\nc\n"
    assert err == "d\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n")),
    data=st.data(),
)
def test_no_cut_of_the_bytes_changes_a_line(
    capsys: pytest.CaptureFixture[str], text: str, data: st.DataObject
) -> None:
    """A character of several bytes may come in parts."""
    whole = f"{text}\n".encode()
    at = data.draw(st.integers(0, len(whole)), "at")
    out, _ = shown(capsys, "plain", (0, "stdout", whole[:at]), (0, "stdout", whole[at:]))
    assert out == f"{text}\n"
