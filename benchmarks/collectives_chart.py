"""The chart of the benchmark ``collectives``: the time of a call by its size, in a panel for each collective.

    python -m benchmarks collectives --json found.json
    python -m benchmarks.collectives_chart found.json docs/collectives.svg

The colours follow the reader's choice of a light or a dark page.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory import text

# In pixels.
WIDTH, HEIGHT, TOP, BOTTOM, LEFT, GAP = 1000, 360, 84, 300, 62, 14
LEAST, MOST = 0.1, 1000.0  # milliseconds, at the ends of the axis
STYLE = """<style>
svg { --ink: #222; --faint: #e0e0e0; --paper: #fff }
@media (prefers-color-scheme: dark) { svg { --ink: #ddd; --faint: #3a3a3a; --paper: #0d1117 } }
text { fill: var(--ink) }
.paper { fill: var(--paper) }
.grid { stroke: var(--faint) }
.curve { fill: none; stroke-width: 1.8 }
.smddp { stroke: #d1603d; stroke-width: 3 }
.gloo { stroke: #4292c6 }
.MPICH { stroke: #2ca25f }
.Open { stroke: #b07aa1 }
.copy { stroke: #999; stroke-dasharray: 4 3 }
</style>"""
_NAME = re.compile(
    r"(?P<what>.+): (?P<call>\w+) of (?P<count>\d+) (?P<unit>B|KiB|MiB) on \d+ ranks"
)
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}

#: By collective, by what was measured: sizes in bytes, and milliseconds.
Curves = dict[str, dict[str, list[tuple[int, float]]]]


def curves(figures: Sequence[Mapping[str, Any]]) -> Curves:
    """The curves of the figures that the benchmark wrote as JSON. Raises ValueError for other figures."""
    found: Curves = {}
    for figure in figures:
        match = _NAME.fullmatch(figure["name"])
        if match is None:
            raise ValueError(f"{figure['name']!r} is no figure of the benchmark collectives")
        size = int(match["count"]) * _UNITS[match["unit"]]
        point = size, float(figure["value"])
        found.setdefault(match["call"], {}).setdefault(match["what"], []).append(point)
    return found


def svg(found: Curves) -> str:
    """A panel for each collective, all on one scale."""
    names = list(dict.fromkeys(what for by_what in found.values() for what in by_what))
    sizes = sorted(
        {size for by_what in found.values() for each in by_what.values() for size, _ in each}
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"',
        ' font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12">',
        "<title>Milliseconds of a collective call of eight ranks, by its size in bytes</title>",
        STYLE,
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        text(
            14, 24, "Milliseconds of a call of 8 ranks on 2 cores, by its size", size=16, bold=True
        ),
        *legend(names),
    ]
    wide = (WIDTH - LEFT - 14 - GAP * (len(found) - 1)) / len(found)
    for number, (call, by_what) in enumerate(found.items()):
        lines += panel(LEFT + number * (wide + GAP), wide, call, by_what, sizes)
    return "\n".join([*lines, "</svg>", ""]).replace(' fill="#222"', "")


def legend(names: Sequence[str]) -> Iterator[str]:
    """The legend above the panels."""
    at = 14.0
    for name in names:
        yield f'<line class="curve {name.split()[0]}" x1="{at}" y1="44" x2="{at + 20}" y2="44"/>'
        label = "a bare copy" if name == "copy" else name
        yield text(at + 26, 48, label)
        at += 26 + 6.6 * len(label) + 24


def panel(
    left: float,
    wide: float,
    call: str,
    by_what: Mapping[str, Sequence[tuple[int, float]]],
    sizes: Sequence[int],
) -> Iterator[str]:
    """One collective."""
    first, last = math.log(sizes[0]), math.log(sizes[-1])

    def x(size: int) -> float:
        return left + wide * (math.log(size) - first) / (last - first)

    def y(milliseconds: float) -> float:
        part = math.log(milliseconds / LEAST) / math.log(MOST / LEAST)
        return BOTTOM - (BOTTOM - TOP) * min(max(part, 0.0), 1.0)

    yield text(left, TOP - 12, call, size=13, bold=True)
    for power in range(round(math.log10(MOST / LEAST)) + 1):
        value = LEAST * 10**power
        yield f'<line class="grid" x1="{left:.1f}" y1="{y(value):.1f}" x2="{left + wide:.1f}" y2="{y(value):.1f}"/>'
        if left == LEFT:
            yield text(LEFT - 8, y(value) + 4, f"{value:g}", anchor="end")
    for size in sizes[::2]:
        yield text(x(size), BOTTOM + 17, _words(size), size=10, anchor="middle")
    for what, points in by_what.items():
        corners = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in points)
        yield f'<polyline class="curve {what.split()[0]}" points="{corners}"/>'


def _words(size: int) -> str:
    unit = max((each for each in _UNITS if _UNITS[each] <= size), key=_UNITS.__getitem__)
    return f"{size // _UNITS[unit]} {unit}"


def main() -> None:
    """Draw what was found."""
    found, path = sys.argv[1:]
    Path(path).write_text(svg(curves(json.loads(Path(found).read_text()))), encoding="utf-8")


if __name__ == "__main__":
    main()
