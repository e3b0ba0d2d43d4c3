"""One process that runs all segments of a graph in order has the results of the whole graph, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, example, given, settings

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
    Value,
    segment_graph,
)

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
    for segment in made.segments:  # none only waits
        assert segment.outputs or set(segment.operations) & set(graph.effects)
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


def test_an_order_through_operations_that_only_wait_is_kept() -> None:
    """A check before an assignment, with many operations between them that do nothing."""
    variable = tf.Variable(0.0)

    def guarded(x: Any) -> Any:
        waiting = [tf.raw_ops.Assert(condition=x < 2.0, data=[x])]
        for _ in range(1500):
            with tf.control_dependencies(waiting):
                waiting = [tf.no_op(), tf.no_op()]
        with tf.control_dependencies([tf.group(waiting)]):
            variable.assign_add(1.0)
        return x

    concrete = tf.function(guarded, autograph=False).get_concrete_function(
        tf.TensorSpec((), tf.float32)
    )
    graph = segments.read(concrete)
    handles = {inner.operation: "a variable" for _, inner in graph.captures}
    placed = place(graph.traced, handles)
    made = segment_graph(placed.operations, 1, graph.outputs, (), graph.effects)
    (run,) = (segments.build(graph, placed.operations, each) for each in made.segments)
    (assignment,) = (
        each for each in run.graph.get_operations() if each.type == "AssignAddVariableOp"
    )
    assert "Assert" in {each.type for each in assignment.control_inputs}
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(tf.constant(5.0))
    assert variable.numpy() == 0.0
    run(tf.constant(1.0))
    assert variable.numpy() == 1.0


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
