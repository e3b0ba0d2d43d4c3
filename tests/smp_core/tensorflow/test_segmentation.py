"""A drawn graph in segments: they can run in any schedule, and no rank waits for another in a circle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
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
                draw(st.sampled_from(["Any", "MatMul"])),
                tuple(Value(each, 0) for each in inputs),
                () if where == COPIED else tuple(controls),
                ("float32",),
                where,
                draw(st.booleans()),
                not inputs and not controls and where != COPIED and draw(st.booleans()),
            )
        )
    return operations, partitions


def _before(operations: Sequence[GraphOperation], at: int) -> Iterator[int]:
    """The operations that must run before one."""
    yield from (each.operation for each in operations[at].inputs)
    yield from operations[at].controls


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
        for each in _before(operations, at):
            if each in where:
                same = operations[each].place == operations[at].place
                assert level[each] <= level[at] - (not same)
                assert where[each] <= where[at] - (not same)

    cap = data.draw(st.integers(1, 4))
    order = orders([made] * microbatches, schedule, cap)
    _run(made, order, microbatches, results, operations)


@given(drawn=graphs(), data=st.data())
def test_a_message_leaves_before_the_large_operations_that_it_does_not_need(
    drawn: tuple[list[GraphOperation], int], data: st.DataObject
) -> None:
    operations, partitions = drawn
    results = [
        Value(at, 0) for at in data.draw(st.sets(st.integers(0, len(operations) - 1), min_size=1))
    ]
    owned = [Value(at, 0) for at in range(len(operations))]
    destinations = data.draw(
        st.dictionaries(st.sampled_from(owned), st.integers(0, partitions - 1), max_size=3)
    )
    made = segment_graph(operations, partitions, results, owned, (), destinations)
    where = {at: number for number, each in enumerate(made.segments) for at in each.operations}
    assert all(where.get(each, 0) <= where[at] for at in where for each in _before(operations, at))
    for number, segment in enumerate(made.segments):
        sent = [each for each in made.messages if each.source == segment.key]
        needed = live(operations, {value.operation for each in sent for value in each.values})
        if segment.key.unsent:
            assert not sent
            assert any(operations[at].type == "MatMul" for at in segment.operations)
            # Its rank runs it when the messages of the other part have left.
            before = made.segments[number - 1]
            assert before.key == segment.key._replace(unsent=False)
            assert set(before.operations) <= live(
                operations,
                {
                    value.operation
                    for each in made.messages
                    if each.source == before.key
                    for value in each.values
                },
            )
        elif sent and not needed >= set(segment.operations):
            assert not any(
                operations[at].type == "MatMul" for at in set(segment.operations) - needed
            )


def test_the_gradient_for_another_rank_leaves_before_those_of_weights_are_computed() -> None:
    """A layer in each of two partitions: the last one's gradients are two products, of which one is sent."""
    x, weight, other = (
        GraphOperation(name, "Placeholder", (), (), ("float32",), COPIED) for name in "xwv"
    )

    def product(name: str, place: int, *inputs: int, backward: bool = False) -> GraphOperation:
        values = tuple(Value(each, 0) for each in inputs)
        return GraphOperation(name, "MatMul", values, (), ("float32",), place, backward)

    operations = [
        x,
        weight,
        other,
        product("first", 0, 0, 1),  # 3
        product("last", 1, 3, 2),  # 4
        product("of the last weight", 1, 3, 4, backward=True),  # 5
        product("of the last input", 1, 2, 4, backward=True),  # 6
        product("of the first weight", 0, 6, 0, backward=True),  # 7
    ]
    made = segment_graph(operations, 2, [Value(4, 0)], [Value(5, 0), Value(7, 0)])
    assert [each.operations for each in made.segments] == [(3,), (4,), (6,), (5,), (7,)]
    assert [message.values for message in made.messages] == [
        (Value(3, 0),),
        (Value(4, 0),),
        (Value(6, 0),),
    ]
    one = segment_graph(
        [dataclasses.replace(each, place=min(each.place, 0)) for each in operations],
        1,
        [Value(4, 0)],
        [Value(5, 0), Value(7, 0)],
    )
    assert not any(each.key.unsent for each in one.segments)


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
