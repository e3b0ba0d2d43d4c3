"""The memory of a rank in one step, by kind, at degrees 1, 2, 4 and 8: rows for the table, and a picture.

    python -m benchmarks.memory docs/memory.svg

The character GPT of ``examples/`` on 8 simulated ranks, with AdamW in float32: the second step, so that the
optimizer has its state. Everything is counted (smp_core/torch/memory/recorder.py) and nothing is timed, so that
the picture is the same wherever it is made.

The SVG is written by this module, and not by a library of plots: such libraries bring a dozen packages for one
picture whose shapes are rectangles, and their output changes from version to version.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.figures import Figure

RANKS = 8
DEGREES = (1, 2, 4, 8)
OPTIONS = {"width": 96, "batch": 16, "microbatches": 1}
BUCKET = 100_000  # elements; a block of the model has 111,840
PARAMETERS = {
    "ddp": True,
    "sdp_param_persistence_threshold": 1000,
    "sdp_reduce_bucket_size": BUCKET,
    "sdp_max_live_parameters": 250_000,
    "sdp_gradient_clipping": 1.0,
}
STATE = ("parameters", "optimizer", "gradients")

#: The colour of each kind of memory, from the bottom of the stack up, split kinds first.
KINDS = {
    "parameters": "#0b559f",
    "optimizer": "#4292c6",
    "gradients": "#9ecae1",
    "gathered": "#e69f00",
    "activations": "#b8b8b8",
    "exchanged": "#d1603d",
}
LABELS = {
    "optimizer": "optimizer state",
    "gathered": "gathered parameters",
    "exchanged": "buffers of collectives",
}
#: Where phases begin and end on the axis, as parts of its length.
PHASES = {"forward": (0.0, 0.28), "backward": (0.28, 0.84), "update": (0.84, 1.0)}


def body():
    """The samples of the second step, on one rank."""
    import smp_core.torch as smp
    from examples.characters import train as example
    from smp_core.torch.memory.recorder import Recorder

    options = example.Options(**OPTIONS)
    corpus = example.Corpus(options)
    bucket_cap_mb = BUCKET * 4 / 2**20  # the same size for degree 1
    model = smp.DistributedModel(example.build(corpus, options), bucket_cap_mb=bucket_cap_mb)
    optimizer = smp.DistributedOptimizer(example.optimizer_of(model))
    share = options.batch // smp.dp_size()
    for _, lines in zip(range(2), corpus.batches(), strict=False):
        optimizer.zero_grad()
        with Recorder() as recorder:
            example.train_step(model, lines[smp.dp_rank() * share :][:share])
            optimizer.step()
    return [(each.event, each.phase, each.bytes) for each in recorder.samples]


Samples = Sequence[tuple[str, str, Mapping[str, int]]]


def samples(degree: int) -> Samples:
    """The samples of the rank that holds the most at its fullest."""
    from pytest_smp.ranks.backends import open_backend
    from pytest_smp.ranks.protocols import Job

    executor = open_backend("sim")
    parameters = {**PARAMETERS, "sharded_data_parallel_degree": degree}
    job = Job(body=body, arguments=lambda rank: ((), {}), parameters=parameters)
    report = executor.open(RANKS).run(job)
    executor.close()
    if report.error is not None:
        raise report.error
    return max(report.values, key=peak)


def total(counted: Mapping[str, int], kinds: Sequence[str] = tuple(KINDS)) -> int:
    """The bytes of these kinds together."""
    return sum(counted[kind] for kind in kinds)


def peak(given: Samples) -> int:
    """The most bytes at any time."""
    return max(total(counted) for _, _, counted in given)


def state(given: Samples) -> int:
    """Parameters, optimizer state and gradients, when the step is over."""
    return next(total(counted, STATE) for event, _, counted in given if event == "update")


def measure() -> list[Figure]:
    """Two rows for each degree."""
    return rows({degree: samples(degree) for degree in DEGREES})


def rows(found: Mapping[int, Samples]) -> list[Figure]:
    """Two figures for each degree: the split state, beside an even part of that at degree 1, and the peak."""
    whole, most = state(found[1]), peak(found[1])
    figures = []
    for degree, given in found.items():
        part = "" if degree == 1 else f"{state(given) * degree / whole:.3f} of 1/{degree}"
        name = f"degree {degree}: parameters, gradients, optimizer state"
        figures.append(Figure(name, state(given) / 1024, "KiB", None, part))
        ratio = "" if degree == 1 else f"{peak(given) / most:.2f} of degree 1"
        figures.append(
            Figure(f"degree {degree}: the most at a time", peak(given) / 1024, "KiB", None, ratio)
        )
    return figures


def places(given: Samples) -> list[tuple[float, float, Mapping[str, int]]]:
    """The interval of each sample on the axis from 0 to 1: the samples of a phase are evenly spread over it."""
    forward = [number for number, (_, phase, _) in enumerate(given) if phase == "F"]
    backward = [number for number, (_, phase, _) in enumerate(given) if phase == "B"]
    ends = (forward[-1] + 1, backward[-1] + 1, len(given))
    placed, start = [], 0
    for (left, right), end in zip(PHASES.values(), ends, strict=True):
        width = (right - left) / (end - start)
        for number, (_, _, counted) in enumerate(given[start:end]):
            placed.append((left + number * width, left + (number + 1) * width, counted))
        start = end
    return placed


# The picture, in pixels.
WIDTH, HEIGHT, TOP, BOTTOM, LEFT, GAP = 1000, 430, 100, 376, 62, 16
PANEL = (WIDTH - LEFT - 14 - GAP * (len(DEGREES) - 1)) / len(DEGREES)


def svg(found: Mapping[int, Samples]) -> str:
    """A panel for each degree, all on one scale."""
    step = next(
        each for each in (2**18, 2**19, 2**20, 2**21, 2**22, 2**24) if peak(found[1]) <= 7 * each
    )
    ceiling = -(-peak(found[1]) // step) * step
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"',
        ' font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12" fill="#222">',
        "<title>Bytes that a rank holds in one step, by kind, at degree 1, 2, 4 and 8</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        text(14, 24, "What one rank holds in a step", size=16, bold=True),
        *legend(),
        *scale(step, ceiling),
    ]
    for number, (degree, given) in enumerate(found.items()):
        left = LEFT + number * (PANEL + GAP)
        lines += panel(left, degree, given, state(found[1]), ceiling)
    return "\n".join([*lines, "</svg>", ""])


def height(size: float, ceiling: int) -> float:
    """The vertical position of a number of bytes on the page."""
    return BOTTOM - (BOTTOM - TOP) * size / ceiling


def legend() -> Iterator[str]:
    """The legend above the panels, in the order of the stack from its bottom up."""
    at = 14.0
    for kind, colour in KINDS.items():
        label = LABELS.get(kind, kind)
        yield f'<rect x="{at}" y="38" width="12" height="12" fill="{colour}"/>'
        yield text(at + 17, 48, label)
        at += 17 + 6.4 * len(label) + 22
    yield line(at, 44, at + 18, 44, "#222", "4 3")
    yield text(at + 23, 48, "degree 1's state / degree")


def scale(step: int, ceiling: int) -> Iterator[str]:
    """Horizontal lines over all panels, with their sizes."""
    for size in range(0, ceiling + 1, step):
        y = height(size, ceiling)
        yield line(LEFT, y, WIDTH - 14, y, "#e4e4e4")
        label = f"{size / 2**20:g} MiB" if size else "0"
        yield text(LEFT - 8, y + 4, label, anchor="end")


def panel(left: float, degree: int, given: Samples, whole: int, ceiling: int) -> Iterator[str]:
    """One degree: stacked steps, phases below, sizes above."""
    placed = places(given)
    yield text(left, TOP - 24, f"degree {degree}", size=14, bold=True)
    sizes = f"state {mebibytes(state(given))}, peak {mebibytes(peak(given))} MiB"
    yield text(left, TOP - 8, sizes, colour="#555")
    below = [0] * len(placed)
    for kind, colour in KINDS.items():
        above = [
            under + counted[kind] for under, (_, _, counted) in zip(below, placed, strict=True)
        ]
        over = steps(
            [(start, stop, size) for (start, stop, _), size in zip(placed, above, strict=True)]
        )
        under_ = steps(
            [(start, stop, size) for (start, stop, _), size in zip(placed, below, strict=True)]
        )
        corners = [
            f"{left + x * PANEL:.1f},{height(size, ceiling):.1f}"
            for x, size in [*over, *reversed(under_)]
        ]
        if above != below:
            yield f'<polygon points="{" ".join(corners)}" fill="{colour}"/>'
        below = above
    y = height(whole / degree, ceiling)
    yield line(left, y, left + PANEL, y, "#222", "4 3")
    yield line(left, BOTTOM, left + PANEL, BOTTOM, "#222")
    for phase, (start, stop) in PHASES.items():
        yield text(left + (start + stop) / 2 * PANEL, BOTTOM + 17, phase, anchor="middle")
        if start:
            at = left + start * PANEL
            yield line(at, TOP, at, BOTTOM + 6, "#999", "1 3")
    if degree == 1:
        caption = (
            "The character GPT of examples/, 455,616 parameters, on 8 ranks with AdamW in float32; "
            "one sample for each event of the second step."
        )
        yield text(LEFT, HEIGHT - 12, caption, colour="#555")


def steps(held: Sequence[tuple[float, float, int]]) -> list[tuple[float, int]]:
    """The corners of a line that keeps each size from start to stop."""
    corners: list[tuple[float, int]] = []
    for start, stop, size in held:
        if corners and corners[-1][1] == size:
            corners[-1] = stop, size
        else:
            corners += [(start, size), (stop, size)]
    return corners


def mebibytes(size: int) -> str:
    """A number of bytes in MiB, with two digits behind the point."""
    return f"{size / 2**20:.2f}"


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    bold: bool = False,
    anchor: str = "start",
    colour: str = "#222",
) -> str:
    """One line of text."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
        f"{escape(words)}</text>"
    )


def line(x: float, y: float, to_x: float, to_y: float, colour: str, dashes: str = "") -> str:
    """A straight line."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}"{dashed}/>'


def main() -> None:
    """Measure, draw, and print the figures."""
    from benchmarks.__main__ import table

    found = {degree: samples(degree) for degree in DEGREES}
    for path in sys.argv[1:]:
        Path(path).write_text(svg(found), encoding="utf-8")
    for row in table(rows(found)):
        print(row)


if __name__ == "__main__":
    main()
