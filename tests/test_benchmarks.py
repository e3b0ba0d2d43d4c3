"""The benchmarks run: on so little that their figures mean nothing."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed import fake_pg

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no part of what is installed."""
    monkeypatch.syspath_prepend(ROOT)
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)


def test_the_figures_of_the_page_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import __main__, allgather, deadlock, diagnostics

    monkeypatch.setattr(allgather, "EXAMPLES", 5)
    monkeypatch.setattr(allgather, "REPEATS", 1)
    monkeypatch.setattr(deadlock, "REPEATS", 2)
    monkeypatch.setattr(diagnostics, "INVALID", 5)
    monkeypatch.setattr(diagnostics, "VALID", 5)
    figures = [each for module in (allgather, deadlock, diagnostics) for each in module.measure()]
    rows = __main__.table(figures)
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    for figure in figures:
        assert any(row.startswith(figure.name) for row in rows)
        assert dataclasses.asdict(figure)["value"] >= 0
    assert all(each.name in page for each in figures if "programs" not in each.name)


def test_activations_in_flight_are_counted() -> None:
    """The order of GPipe and of 1F1B on a rank, written out: forwards and backwards of microbatches."""
    from benchmarks import pipeline

    gpipe = [("F", 0), ("F", 1), ("F", 2), ("B", 0), ("B", 1), ("B", 2)]
    alternating = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    in_pieces = [("F", 0), ("F", 0), ("F", 1), ("B", 0), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    assert [pipeline.peak(each) for each in (gpipe, alternating, in_pieces, [])] == [3, 2, 2, 0]


def test_what_has_to_be_sent_is_the_sum_of_its_parts() -> None:
    """Of 4 ranks and 16 elements of 4 bytes, written out: what rings hand on."""
    from benchmarks import sharding

    gather = reduce_scatter = 3 * (16 // 4) * 4
    assert sharding.formula(4, 16) == 2 * gather + reduce_scatter
    gather = reduce_scatter = 1 * (16 // 2) * 4
    across = 2 * 1 * (8 // 2) * 4  # a ring all-reduce over two, of a half
    assert sharding.formula(2, 16) == 2 * gather + reduce_scatter + across
    assert sharding.formula(1, 16) == 2 * 3 * (16 // 4) * 4  # a ring all-reduce over all


def test_what_torchs_collectives_send_is_counted() -> None:
    from benchmarks import sharding

    store = fake_pg.FakeStore()
    dist.init_process_group("fake", rank=1, world_size=4, store=store)
    try:
        whole, part = torch.zeros(8), torch.zeros(2)
        for call, sent in (
            (lambda: dist.all_gather_single(whole, part), 3 * 2 * 4),
            (lambda: dist.reduce_scatter_single(part, whole), 3 * 2 * 4),
            (lambda: dist.all_reduce(whole), 2 * 3 * 2 * 4),
            (lambda: dist.all_reduce(whole.bfloat16()), 2 * 3 * 2 * 2),
            (dist.barrier, 0),
        ):
            with sharding.Sent() as counted:
                call()
            assert counted.bytes == sent
        with pytest.raises(KeyError, match="gather"), sharding.Sent():
            dist.gather(part, dst=0)
    finally:
        dist.destroy_process_group()


def test_gradients_are_checked_by_what_rounding_can_do() -> None:
    from benchmarks import sharding

    given = [torch.tensor([1.0, 3.0, -2.0, 0.1]) * rank for rank in range(1, 5)]
    mean = torch.stack(given).mean(0)
    sharding.check("all", [(mean, 0)], [given])
    sharding.check("a part", [(mean[1:3], 1)], [given])
    sharding.check("nothing", [(mean[4:], 4)], [given])
    for wrong in (
        mean * (1 + 2.0**-20),
        mean * 4,
        torch.stack(given[:3]).mean(0),
        mean[[1, 0, 2, 3]],
    ):
        with pytest.raises(AssertionError, match="all: "):
            sharding.check("all", [(wrong, 0)], [given])
    with pytest.raises(AssertionError, match="a part: 2 of 2"):
        sharding.check("a part", [(mean[1:3], 0)], [given])


def test_engines_are_compared_round_by_round() -> None:
    from benchmarks import sharding

    times = {"ours": [1.0, 4.0, 1.0, 9.0, 1.0], "FSDP2": [2.0, 4.0, 1.0, 3.0, 4.0]}
    assert sharding.compared(times, "FSDP2") == "1.00 (0.38 to 2.00)"
    found = {
        "whole": times,
        "backward": times,
        "bytes": {"ours": [36], "FSDP2": [1024]},
        "elements": 4,
    }
    rows = sharding.rows("gloo", 4, ["FSDP2"], found)
    assert [row.name for row in rows] == [
        "torch FSDP2: a step",
        "sharded, degree 4: a step",
        "sharded, degree 4: forward and backward",
        "torch FSDP2: sent in a step",
        "sharded, degree 4: sent in a step",
    ]
    assert rows[1].ratio == "1.00 (0.38 to 2.00) of FSDP2's"
    assert rows[1].budget == "at most 1.00 of FSDP2's"
    assert rows[-1].ratio == "1.000 of the formula"
    found["whole"] = {sharding.ON_GLOO: times["FSDP2"], **times}
    found["backward"] = found["whole"]
    rows = sharding.rows("smddp", 4, [sharding.ON_GLOO, "FSDP2"], found)
    assert [row.name for row in rows] == [
        "torch FSDP2 on Gloo: a step",
        "torch FSDP2 on smddp: a step",
        "sharded, degree 4 on smddp: a step",
        "sharded, degree 4 on smddp: forward and backward",
    ]
    assert rows[2].budget == "at most 0.70 of FSDP2 on Gloo's"


def test_the_chart_of_collectives_is_drawn_to_scale() -> None:
    from benchmarks import collectives_chart as chart

    def figure(what: str, call: str, size: str, value: float) -> dict[str, object]:
        return {"name": f"{what}: {call} of {size} on 8 ranks", "value": value}

    found = chart.curves(
        [
            figure("smddp", "all_gather", "1 KiB", 0.1),
            figure("smddp", "all_gather", "1 MiB", 10.0),
            figure("Open MPI", "all_gather", "1 KiB", 1000.0),
            figure("Open MPI", "all_gather", "1 MiB", 1000.0),
        ]
    )
    assert found == {
        "all_gather": {
            "smddp": [(1024, 0.1), (1048576, 10.0)],
            "Open MPI": [(1024, 1000.0), (1048576, 1000.0)],
        }
    }
    with pytest.raises(ValueError, match="'another: figure' is no figure of the benchmark"):
        chart.curves([{"name": "another: figure", "value": 1.0}])
    picture = ElementTree.fromstring(chart.svg(found))
    drawn = {each.get("class"): each.get("points") for each in picture.iterfind(".//{*}polyline")}
    left, right, half = chart.LEFT, chart.WIDTH - 14, (chart.TOP + chart.BOTTOM) / 2
    assert drawn == {
        "curve smddp": f"{left:.1f},{chart.BOTTOM:.1f} {right:.1f},{half:.1f}",
        "curve Open": f"{left:.1f},{chart.TOP:.1f} {right:.1f},{chart.TOP:.1f}",
    }
    assert {"smddp", "Open MPI", "all_gather", "1 KiB"} <= {
        each.text for each in picture.iterfind(".//{*}text")
    }


def test_a_step_is_compared_with_the_larger_of_its_parts() -> None:
    from benchmarks import overlap

    times = {
        "computation": [1.0] * 5,
        "communication on smddp": [2.0] * 5,
        "communication on gloo": [0.5] * 5,
        "ours": [2.2] * 5,
        "torch DDP on Gloo": [1.5] * 5,
    }
    timeline = {"ours": [("forward", 0.0, 0.25), ("bucket", 0.5, 2.0)]}
    figures = overlap.rows(1000, {"times": times, "timeline": timeline})
    found = {each.name.removeprefix("1000 Mbit/s, "): each for each in figures}
    assert found["ours: a step"].ratio == "1.10 (1.10 to 1.10) of the larger"
    assert found["torch DDP on Gloo: a step"].ratio == "1.50 (1.50 to 1.50) of the larger"
    assert found["ours: bucket in the median step"].spread == (500, 2000)


def test_a_timeline_is_drawn_to_scale() -> None:
    from benchmarks import overlap_chart as chart

    def figure(rate: int, what: str, begin: float, end: float) -> dict[str, object]:
        return {"name": f"{rate} Mbit/s, ours: {what} in the median step", "spread": (begin, end)}

    figures = [
        figure(1000, "forward", 0, 250),
        figure(1000, "bucket", 250, 750),
        figure(1000, "bucket", 500, 1000),
        figure(500, "forward", 0, 9000),
        {"name": "1000 Mbit/s, ours: a step", "spread": (0, 9000)},
    ]
    picture = ElementTree.fromstring(chart.svg(chart.timelines(figures, 1000), 1000))
    drawn = [
        (each.get("class"), each.get("x"), each.get("width"), float(each.get("y", 0)))
        for each in picture.iterfind(".//{*}rect")
        if each.get("height") == str(chart.LANE - 2)
    ]
    width, first = chart.WIDTH - chart.LEFT - chart.RIGHT, chart.TOP + 22
    assert drawn == [
        ("forward", f"{chart.LEFT:.1f}", f"{width / 4:.1f}", first),
        ("bucket", f"{chart.LEFT + width / 4:.1f}", f"{width / 2:.1f}", first + chart.LANE),
        ("bucket", f"{chart.LEFT + width / 2:.1f}", f"{width / 2:.1f}", first + 2 * chart.LANE),
    ]
    with pytest.raises(ValueError, match="no timeline of a link of 100 Mbit/s"):
        chart.timelines(figures, 100)


def test_what_a_rank_holds_is_drawn_to_scale() -> None:
    from benchmarks import memory

    def held(**kinds: int) -> dict[str, int]:
        return dict.fromkeys(memory.KINDS, 0) | kinds

    mib = 2**20
    whole = [
        ("begin", "", held(parameters=mib, optimizer=2 * mib)),
        ("call", "F", held(parameters=mib, optimizer=2 * mib, activations=mib)),
        ("gradient", "B", held(parameters=mib, optimizer=2 * mib, activations=3 * mib)),
        ("update", "", held(parameters=mib, optimizer=2 * mib, gradients=mib)),
    ]
    halved = [
        (*words, {kind: size // 2 for kind, size in counted.items()}) for *words, counted in whole
    ]
    found = {1: whole, 2: halved}
    assert [(row.value, row.ratio) for row in memory.rows(found)] == [
        (4 * 1024, ""),
        (6 * 1024, ""),
        (2 * 1024, "1.000 of 1/2"),
        (3 * 1024, "0.50 of degree 1"),
    ]
    assert [(start, stop) for start, stop, _ in memory.places(whole)] == [
        (0.0, 0.14),
        (0.14, 0.28),
        (0.28, 0.84),
        (0.84, 1.0),
    ]
    picture = ElementTree.fromstring(memory.svg(found))
    labels = [each.text for each in picture.iterfind(".//{*}text")]
    assert {"degree 1", "degree 2", "state 2.00, peak 3.00 MiB", "6 MiB"} <= set(labels)
    areas = [each.get("points").split() for each in picture.iterfind(".//{*}polygon")]
    tops = [min(float(corner.split(",")[1]) for corner in area) for area in areas]
    scale = (memory.BOTTOM - memory.TOP) / 6  # pixels for a MiB
    heights = [round((memory.BOTTOM - top) / scale, 2) for top in tops]
    assert heights == [1, 3, 4, 6, 0.5, 1.5, 2, 3]  # of the stack up to this kind, at its highest


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_the_bytes_of_a_tensor_parallel_layer_are_those_of_the_formula(
    smp_world: Any, monkeypatch: pytest.MonkeyPatch, optimize: str
) -> None:
    from benchmarks import tensor

    for name, value in {"WIDTH": 32, "HEADS": 4, "INNER": 64, "LENGTH": 3}.items():
        monkeypatch.setattr(tensor, name, value)

    def body() -> float:
        torch.manual_seed(0)
        plain, x = tensor.Plain(), torch.randn(tensor.LINES, tensor.LENGTH, tensor.WIDTH)
        return tensor.ours(plain, x).sent()

    config = {"ddp": True, "tensor_parallel_degree": 4, "prescaled_batch": True}
    sent = smp_world.run(body, ranks=4, config={**config, "optimize": optimize})
    assert sent == [tensor.formula(optimize)] * 4
