"""The timeline: what is recorded, what a schedule forbids, and the file for Perfetto."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from smp_core.schedule import Phase
from smp_core.torch.execution import timeline
from smp_core.torch.execution.timeline import Event, Timeline


@dataclasses.dataclass(eq=False)
class Task:
    microbatch: int
    path: str | None = None
    phase: Phase = Phase.FORWARD


def run(order: str, rank: int = 0) -> list[Event]:
    """The timeline of a rank that does this: ``F0 B0 F1 ...``, a body for each microbatch."""
    recorded, tasks = Timeline(rank), dict[int, Task]()
    for now, word in enumerate(order.split()):
        task = tasks.setdefault(int(word[1:]), Task(int(word[1:])))
        task.phase = Phase(word[0])
        recorded.begins(task, now)
        recorded.ends(task, now + 0.5)
    return recorded.events


def test_a_stretch_says_who_what_and_when() -> None:
    recorded, body, call = Timeline(3), Task(1), Task(0, "layers.0")
    recorded.begins(body, 10.0)
    body.phase = Phase.BACKWARD  # the body has come to model.backward, and pauses
    recorded.ends(body, 10.5)
    recorded.begins(call, 11.0)
    recorded.ends(call, 11.25)
    recorded.begins(body, 12.0)
    recorded.ends(body, 14.0)
    assert recorded.events == [
        Event(3, 1, None, Phase.FORWARD, 0, 0, 1, 10.0, 0.5),
        Event(3, 0, "layers.0", Phase.FORWARD, 1, 2, 3, 11.0, 0.25),
        Event(3, 1, None, Phase.BACKWARD, 0, 4, 5, 12.0, 2.0),
    ]
    assert str(recorded.events[1]) == "F0 layers.0 on rank 3 (2 to 3)"


def test_a_recomputation_is_inside_of_a_backward_stretch() -> None:
    recorded, task = Timeline(), Task(2, phase=Phase.BACKWARD)
    recorded.begins(task, 0)
    with pytest.raises(KeyError), recorded.recomputes(task, "a.b"):
        raise KeyError
    recorded.ends(task, 1)
    inner, outer = recorded.events
    assert (inner.path, inner.recompute, inner.begun, inner.ended) == ("a.b", True, 1, 2)
    assert (outer.path, outer.recompute, outer.begun, outer.ended) == (None, False, 0, 3)
    assert str(inner) == "R2 a.b on rank 0 (1 to 2)"
    assert timeline.violations(recorded.events, "simple", 1) == []
    trace = timeline.chrome_trace(recorded.events)["traceEvents"]
    assert [one["name"] for one in trace if one["ph"] == "X"] == ["B body", "R a.b"]


@pytest.mark.parametrize(
    ("order", "schedule", "cap", "found"),
    [
        ("F0 F1 F2 B0 B1 B2", "simple", 1, []),
        ("F0 F1 B1 B0", "simple", 1, []),
        ("F0 B0 F1 B1", "simple", 2, ["B0 body on rank 0 (2 to 3) began before F1 body on rank 0"]),
        ("F0 F1 B0 F2 B1 B2", "interleaved", 2, []),
        ("F0 F1 F2 B0 B1 B2", "interleaved", 2, ["3 microbatches were in flight on rank 0, of 2"]),
        ("F1 F0 B0 B1", "interleaved", 2, ["microbatches began in the order [1, 0] on rank 0"]),
    ],
)
def test_what_a_schedule_forbids_is_found(
    order: str, schedule: str, cap: int, found: list[str]
) -> None:
    events = [*run(order), *run("F0 B0", rank=1)]
    said = timeline.violations(events, schedule, cap)
    assert len(said) == len(found)
    assert all(one.startswith(other) for one, other in zip(said, found, strict=True))


def test_two_stretches_at_once_are_found() -> None:
    recorded, first, second = Timeline(), Task(0), Task(1)
    recorded.begins(first, 0)
    recorded.begins(second, 1)
    recorded.ends(second, 2)
    recorded.ends(first, 3)
    (said,) = timeline.violations(recorded.events, "interleaved", 2)
    assert said == "F1 body on rank 0 (1 to 2) ran during F0 body on rank 0 (0 to 3)"


@pytest.mark.parametrize(
    ("order", "most"), [("", 0), ("F0 B0 F1 B1", 1), ("F0 F1 B0 F2 B1 B2", 2), ("F0 F1 F2", 1)]
)
def test_microbatches_in_flight_are_counted(order: str, most: int) -> None:
    assert timeline.in_flight(run(order)) == most


def test_the_trace_file_is_json_for_perfetto(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    timeline.write(file, [*run("F0 F1 B0 B1", rank=1), *run("F0 B0")])
    records = json.loads(file.read_text())["traceEvents"]
    slices = [one for one in records if one["ph"] == "X"]
    assert [(one["pid"], one["tid"], one["name"], one["cat"]) for one in slices] == [
        (0, 0, "F body", "forward"),
        (0, 0, "B body", "backward"),
        (1, 0, "F body", "forward"),
        (1, 1, "F body", "forward"),
        (1, 0, "B body", "backward"),
        (1, 1, "B body", "backward"),
    ]
    assert [(one["ts"], one["dur"]) for one in slices[:2]] == [(0.0, 5e5), (1e6, 5e5)]
    names = {
        (one["pid"], one.get("tid")): one["args"]["name"] for one in records if one["ph"] == "M"
    }
    assert names == {
        (0, None): "rank 0",
        (1, None): "rank 1",
        (0, 0): "microbatch 0",
        (1, 0): "microbatch 0",
        (1, 1): "microbatch 1",
    }
    assert timeline.chrome_trace([])["traceEvents"] == []
