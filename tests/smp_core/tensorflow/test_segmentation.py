"""A drawn graph in segments: they can run in any schedule, and no rank waits for another in a circle."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from smp_core.tensorflow.segmentation import (
    COPIED,
    EVERYWHERE,
    GraphOperation,
    Value,
    levels,
    live,
    segment_graph,
)
from smp_core.tensorflow.tasks import SegmentTask, orders


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[GraphOperation], int]:
    """Operations with drawn inputs, controls and places."""
    partitions = draw(st.integers(1, 4))
    operations: list[GraphOperation] = []
    for at in range(draw(st.integers(1, 25))):
        before = st.integers(0, at - 1) if at else st.nothing()
        inputs = draw(st.lists(before, max_size=3)) if at else []
        controls = draw(st.lists(before, max_size=1)) if at else []
        where = (
            draw(st.integers(EVERYWHERE, partitions - 1))
            if inputs
            else draw(st.integers(COPIED, partitions - 1))
        )
        operations.append(
            GraphOperation(
                f"o{at}",
                "Any",
                tuple(Value(each, 0) for each in inputs),
                () if where == COPIED else tuple(controls),
                ("float32",),
                where,
                draw(st.booleans()),
                not inputs and not controls and where != COPIED and draw(st.booleans()),
            )
        )
    return operations, partitions


@given(
    drawn=graphs(),
    microbatches=st.integers(1, 4),
    schedule=st.sampled_from(["simple", "interleaved"]),
    data=st.data(),
)
def test_segments_can_run_and_no_rank_waits_in_a_circle(
    drawn: tuple[list[GraphOperation], int], microbatches: int, schedule: str, data: st.DataObject
) -> None:
    operations, partitions = drawn
    results = [
        Value(at, 0) for at in data.draw(st.sets(st.integers(0, len(operations) - 1), min_size=1))
    ]
    made = segment_graph(operations, partitions, results)
    alive = live(operations, {each.operation for each in results})
    level = levels(operations, alive)

    # Each live operation is in one segment, after all that it needs.
    where = {at: number for number, each in enumerate(made.segments) for at in each.operations}
    assert where.keys() == {at for at in alive if operations[at].place != COPIED}
    for at in where:
        for each in (
            *(value.operation for value in operations[at].inputs),
            *operations[at].controls,
        ):
            if each in where:
                same = operations[each].place == operations[at].place
                assert level[each] <= level[at] - (not same)
                assert same or where[each] < where[at]

    cap = data.draw(st.integers(1, 4))
    order = orders([made] * microbatches, schedule, cap)
    _run(made, order, microbatches, results, operations)


def _run(
    made: Any,
    order: list[list[SegmentTask]],
    microbatches: int,
    results: list[Value],
    operations: Any,
) -> None:
    """Run the orders with messages, and find that each rank has what it needs."""
    has: list[set[tuple[int, Value]]] = [set() for _ in order]
    left = [list(each) for each in order]
    while any(left):
        moved = False
        for rank, tasks in enumerate(left):
            if not tasks:
                continue
            task = tasks[0]
            segment = made.segments[task.segment]
            if all((task.microbatch, each) in has[rank] for each in segment.inputs):
                tasks.pop(0)
                moved = True
                has[rank] |= {(task.microbatch, each) for each in segment.outputs}
                for message in made.messages:
                    if message.source == segment.key and segment.key.place == rank:
                        has[message.destination] |= {
                            (task.microbatch, each) for each in message.values
                        }
        assert moved, f"ranks wait for each other: {left}"
    for each in results:
        if operations[each.operation].place != COPIED:
            assert all((at, each) in known for known in has for at in range(microbatches))
