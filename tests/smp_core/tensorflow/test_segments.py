"""One process that runs all segments of a graph in order has the results of the whole graph, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from conformance.cases.keras import KerasCase as Case
from conformance.cases.keras import keras_cases as cases
from conformance.cases.keras_script import (
    SAMPLES,
    build,
    data,
    loss_and_gradients,
    make_optimizer,
)
from smp_core.tensorflow import segments
from smp_core.tensorflow import tensorflow_parts as parts
from smp_core.tensorflow.placement import place
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

#: TensorFlow traces a model in about a second, so a plain run draws few; SMP_TF_EXAMPLES=500 draws many.
EXAMPLES = int(os.environ.get("SMP_TF_EXAMPLES", "12"))


class Whole(tf.keras.Model):
    """A model whose call is placed as that of a DistributedModel is."""

    case: Case

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with parts.tagged(self.case.default):
            outputs = super().__call__(*args, **kwargs)
        with parts.tagged(EVERYWHERE):
            return tf.identity(outputs)


# Without shrinking, which would take minutes: a case is small as it is.
@settings(
    max_examples=EXAMPLES, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(case=cases())
@example(Case((("layer norm", 1),), 0, 0, False, 0, 3, tape=True))
def test_the_segments_are_the_graph(case: Case) -> None:
    model = build(case, Whole, parts.tagged)
    model.case = case
    optimizer = make_optimizer(case)
    function = tf.function(lambda x, y: loss_and_gradients(case, model, optimizer, x, y))
    x, y = (tf.constant(each[:SAMPLES]) for each in data(case, 0))
    concrete = function.get_concrete_function(x, y)
    graph = segments.read(concrete)
    handles = {inner.operation: "a variable" for _, inner in graph.captures}
    placed = place(graph.traced, handles)
    owned = [each for each in graph.outputs if placed.operations[each.operation].place >= 0]
    results = [each for each in graph.outputs if each not in owned]
    made = segment_graph(placed.operations, case.partitions, results, owned, graph.effects)
    for traced, operation in zip(graph.traced, placed.operations, strict=True):
        if traced.tag is not None and operation.place != COPIED:
            assert operation.place == traced.tag or _takes_a_handle(traced.inputs, handles)
    functions = [segments.build(graph, placed.operations, each) for each in made.segments]

    for step in range(5):
        x, y = (tf.constant(each[:SAMPLES]) for each in data(case, step))
        before = [each.numpy() for each in model.variables]
        wanted = [each.numpy() for each in tf.nest.flatten(concrete(x, y))]
        after = [each.numpy() for each in model.variables]
        for variable, value in zip(model.variables, before, strict=True):
            variable.assign(value)
        known = dict(
            zip(graph.arguments, parts.flat_inputs(function, concrete, (x, y), {}), strict=True)
        )
        for segment, run in zip(made.segments, functions, strict=True):
            feeds = [*segment.inputs, *segments.fed_arguments(graph, segment)]
            known.update(
                zip(segment.outputs, run(*[known[each] for each in feeds]) or (), strict=True)
            )
        for at, (value, want) in enumerate(zip(graph.outputs, wanted, strict=True)):
            np.testing.assert_array_equal(known[value].numpy(), want, f"output {at} of step {step}")
        for variable, want in zip(model.variables, after, strict=True):
            np.testing.assert_array_equal(
                variable.numpy(), want, f"{variable.name} after step {step}"
            )
        gradients = [known[each] for each in graph.outputs[-len(model.trainable_variables) :]]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def test_a_segment_has_the_functions_that_it_calls_and_no_others() -> None:
    def loop(x: Any, by: float) -> Any:
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, y: (i + 1, tf.cond(i > 0, lambda: y * by, lambda: y)),
            [tf.constant(0), x],
        )[1]

    def body(x: Any) -> Any:
        with parts.tagged(0):
            x = loop(x, 2.0)
        with parts.tagged(1):
            return loop(x, 3.0)

    graph = segments.read(tf.function(body).get_concrete_function(tf.TensorSpec([2])))
    placed = place(graph.traced, {})
    made = segment_graph(placed.operations, 2, [], graph.outputs)
    names = [
        {
            each.signature.name
            for each in graph.functions.reached(
                graph.nodes[at].node_def for at in segment.operations
            )
        }
        for segment in made.segments
    ]
    # Each loop has a condition and a body, in which a branch has two functions.
    assert [len(each) for each in names] == [4, 4, 0]
    assert not names[0] & names[1]
    functions = [segments.build(graph, placed.operations, each) for each in made.segments]
    values = [tf.constant([1.0, 2.0])]
    for run in functions:
        values = run(*values)
    np.testing.assert_array_equal(values[0], [6.0, 12.0])
    for run, own in zip(functions, names, strict=True):
        library = {each.signature.name for each in run.graph.as_graph_def().library.function}
        assert library == own


def test_what_functions_and_operations_are_called_does_not_count() -> None:
    def described(name: str, by: float) -> list[str]:
        def body(x: Any) -> Any:
            with tf.name_scope(name):
                inner = tf.function(lambda y: tf.random.uniform([2]) + y * by)
                return tf.cond(
                    x[0] > 0,
                    lambda: inner(x) + 1.0,
                    lambda: tf.while_loop(
                        lambda i, _: i < 2, lambda i, y: (i + 1, inner(y)), [tf.constant(0), x]
                    )[1],
                )

        graph = segments.read(tf.function(body).get_concrete_function(tf.TensorSpec([2])))
        return [graph.detail(at) for at in range(len(graph.nodes))]

    one, again, other = described("one", 2.0), described("again", 2.0), described("one", 3.0)
    assert one == again
    assert one != other


def test_the_order_of_control_inputs_does_not_count() -> None:
    """TensorFlow sorts those of a function's operations by name, and ranks may have made other layers before."""

    def described(*names: str) -> list[str]:
        variables = [tf.Variable(0.0) for _ in names]

        def branch(x: Any) -> Any:
            for name, each, by in zip(names, variables, (1.0, 2.0), strict=True):
                with tf.name_scope(name):
                    each.assign_add(x[0] * by)
            return x + 1.0

        def body(x: Any) -> Any:
            return tf.cond(x[0] > 0, lambda: branch(x), lambda: x)

        graph = segments.read(tf.function(body).get_concrete_function(tf.TensorSpec([2])))
        return [graph.detail(at) for at in range(len(graph.nodes))]

    assert described("layer", "layer_1") == described("layer_9", "layer_10")


def _takes_a_handle(inputs: Sequence[Value], handles: Any) -> bool:
    return any(each.operation in handles for each in inputs)


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
def test_a_cut_can_run_and_no_rank_waits_in_a_circle(
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
