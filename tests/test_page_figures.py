"""Limits and sizes that pages give are those of the code."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from smp_core.launch import processes
from smp_core.transport.smddp import progress, segment, streams

DOCS = Path(__file__).parents[1] / "docs"
KIB, MIB = 2**10, 2**20
WORDS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 8: "eight", 10: "ten"}


def _memory() -> str:
    layout = segment.SegmentLayout(8)
    rounds = (layout.links - layout.data) / MIB
    link = segment.LINK_BYTES / MIB
    return (
        f"grows to {rounds:g} MiB for the collectives of a group of up to {WORDS[layout.size]} ranks, "
        f"and by {link:.1f} MiB for each pair of ranks"
    )


def _silence() -> float:
    """The seconds after which a stream to a machine that vanished has ended, whether bytes are on their way or not."""
    idle, interval, count = (
        streams._KEEPALIVE[option]
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    return max(idle + interval * count, streams._ACKNOWLEDGE_TIMEOUT)


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("backends", _memory()),
        ("backends", f"they check for ends every {progress._POLL_INTERVAL:g} seconds"),
        (
            "backends",
            f"{WORDS[segment.PIECE_SLOTS]} pieces of {segment.PIECE_BYTES / KIB:g} KiB ahead",
        ),
        ("backends", f"A round has {segment.ROUND_BYTES / MIB:g} MiB,"),
        ("backends", f"or {segment.LEAST_ROW_BYTES / KIB:g} KiB of each rank"),
        ("backends", f"At most {WORDS[segment.ROUND_SLOTS]} rounds of a group"),
        ("backends", f"{_silence():g} seconds after its machine vanished"),
        ("security", f"nothing after {WORDS[int(streams._HANDSHAKE_TIMEOUT)]} seconds is closed"),
        ("security", f"when there are more than {streams._MAX_UNAUTHENTICATED}"),
        ("launching", f"have {WORDS[int(processes._OTHERS)]} seconds to end by themselves"),
        ("launching", f"have {WORDS[int(processes._PATIENCE)]} seconds to save"),
        ("launching", f"go on for {WORDS[int(processes._LEFT)]} seconds after others have ended"),
    ],
)
def test_a_page_has_the_figure_of_the_code(page: str, sentence: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert sentence in re.sub(r"\s+", " ", text)
