"""The timeline of a step by the benchmark ``overlap``: phases and AllReduces of buckets, an engine above the other.

    python -m benchmarks overlap --json found.json
    python -m benchmarks.overlap_chart found.json 250 docs/overlap.svg

The number is the link's rate in Mbit/s. The colours follow the reader's choice of a light or a dark page.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.memory import text

# In pixels.
WIDTH, TOP, LEFT, RIGHT = 1000, 66, 14, 14
LANE, ENGINE = 20, 86  # the height of a lane, and of all that belongs to an engine
STYLE = """<style>
svg { --ink: #222; --paper: #fff }
@media (prefers-color-scheme: dark) { svg { --ink: #ddd; --paper: #0d1117 } }
text { fill: var(--ink) }
.paper { fill: var(--paper) }
rect { stroke: var(--paper) }
.forward { fill: #4292c6 }
.backward { fill: #2ca25f }
.update { fill: #b07aa1 }
.bucket { fill: #d1603d }
</style>"""
_NAME = re.compile(
    r"(?P<rate>\d+) Mbit/s, (?P<engine>.+): (?P<what>forward|backward|update|bucket) in the median step"
)


class Span(NamedTuple):
    """One phase or one AllReduce, in milliseconds since the step began."""

    what: str
    begin: float
    end: float


def timelines(figures: Sequence[Mapping[str, Any]], rate: int) -> dict[str, list[Span]]:
    """The spans of each engine on the link of this rate. Raises ValueError if there are none."""
    found: dict[str, list[Span]] = {}
    for figure in figures:
        match = _NAME.fullmatch(figure["name"])
        if match is not None and int(match["rate"]) == rate:
            span = Span(match["what"], *figure["spread"])
            found.setdefault(match["engine"], []).append(span)
    if not found:
        raise ValueError(f"no timeline of a link of {rate} Mbit/s is among these figures")
    return found


def svg(found: Mapping[str, Sequence[Span]], rate: int) -> str:
    """All engines on one scale of time."""
    height = TOP + ENGINE * len(found)
    last = max(span.end for spans in found.values() for span in spans)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"',
        ' font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12">',
        "<title>A data-parallel step on two machines: its phases and the AllReduces of its buckets</title>",
        STYLE,
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        text(LEFT, 24, f"A step of a rank, {rate} Mbit/s to the other machine", size=16, bold=True),
        *_legend(),
    ]
    for number, (engine, spans) in enumerate(found.items()):
        lines += _engine(TOP + ENGINE * number, engine, spans, last)
    return "\n".join([*lines, "</svg>", ""]).replace(' fill="#222"', "")


def _legend() -> Iterator[str]:
    at = float(LEFT)
    for what in ("forward", "backward", "update", "bucket"):
        yield f'<rect class="{what}" x="{at:.1f}" y="36" width="14" height="14"/>'
        label = "AllReduce of a bucket" if what == "bucket" else what
        yield text(at + 20, 48, label)
        at += 20 + 6.6 * len(label) + 24


def _engine(top: float, name: str, spans: Sequence[Span], last: float) -> Iterator[str]:
    """A lane of computation, and below it two of AllReduces, which take turns because each may overlap the next."""
    scale = (WIDTH - LEFT - RIGHT) / last
    end = max(span.end for span in spans)
    yield text(LEFT, top + 16, f"{name}, {end:.0f} ms", size=13, bold=True)
    buckets = 0
    for span in spans:
        lane = 0
        if span.what == "bucket":
            lane = 1 + buckets % 2
            buckets += 1
        yield (
            f'<rect class="{span.what}" x="{LEFT + scale * span.begin:.1f}" y="{top + 22 + LANE * lane:.1f}"'
            f' width="{scale * (span.end - span.begin):.1f}" height="{LANE - 2}"/>'
        )


def main() -> None:
    """Draw what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap_chart", description=__doc__)
    parser.add_argument("found", type=Path, help="the file that --json wrote")
    parser.add_argument("rate", type=int, help="Mbit/s of the link")
    parser.add_argument("chart", type=Path, help="the file to write")
    options = parser.parse_args()
    figures = json.loads(options.found.read_text())
    drawn = svg(timelines(figures, options.rate), options.rate)
    options.chart.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
