"""A step: its values against the unpartitioned model bit for bit, its traces, and mistakes in all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings

import smp_core.tensorflow as smp
from conformance.cases.keras import KerasCase as Case
from conformance.cases.keras import keras_cases as cases
from conformance.cases.keras_script import DROPOUT, check, train
from smp_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    OutsideStepError,
    PartitionError,
    SmpError,
    UnsupportedTrainingError,
)
from tests.smp_core.tensorflow.small_models import (
    MANUAL,
    ONES,
    GivenCall,
    Net,
    X,
    check_alike,
    check_refused,
    plain,
    run,
)

STEPS = 5


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_a_fixed_model(smp_world: Any, partitions: int, outer: bool) -> None:
    blocks = (
        ("dense", 0),
        ("batch norm", 1),
        (DROPOUT if outer else "dropout", 0),
        ("nested", 1),
        ("cond", 0),
        ("while", 1),
    )
    case = Case(
        tuple((kind, place % partitions) for kind, place in blocks),
        0,
        1 % partitions,
        True,
        0,
        partitions,
    )
    found = smp_world.run(
        train, "tensorflow", case, STEPS, outer, ranks=partitions, config=case.config()
    )
    check(case, found, STEPS, outer)


def test_a_loop_before_an_assignment_under_simple(smp_world: Any) -> None:
    # The gradient of the loop gives it further inputs; it and all that follows are the forward pass none the less.
    case = Case(
        (("while", 0), ("batch norm", 0)), 0, 0, False, 0, 1, pipeline="simple", optimizer="SGD"
    )
    found = smp_world.run(train, "tensorflow", case, STEPS, ranks=1, config=case.config())
    check(case, found, STEPS)


# Without shrinking, which would take minutes.
@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(case=cases())
def test_a_drawn_model(smp_world: Any, case: Case) -> None:
    found = smp_world.run(
        train, "tensorflow", case, STEPS, ranks=case.partitions, config=case.config()
    )
    check(case, found, STEPS)


def wider_arrays() -> tuple[list[str], bool]:
    """Arrays of another dtype than the signature's, in a structure too, give what arrays of its own give."""
    model = GivenCall(lambda model, x: model.dense(x["x"] if isinstance(x, dict) else x))
    dtypes, equal = [], True
    for structure in (lambda x: x, lambda x: {"x": x}):
        signature = [tf.nest.map_structure(lambda _: tf.TensorSpec([4, 3]), structure(0))]
        step = smp.step(lambda x: model(x), input_signature=signature)
        narrow = step(structure(X)).concat()
        wide = step(structure(X.astype(np.float64))).concat()
        dtypes.append(wide.dtype.name)
        equal &= bool(tf.reduce_all(narrow == wide))
    return dtypes, equal


def test_arrays_are_cast_to_the_input_signature(smp_world: Any) -> None:
    found = smp_world.run(wider_arrays, ranks=2, config=MANUAL)
    assert found == [(["float32", "float32"], True)] * 2


def constant_result() -> None:
    model = GivenCall(plain)

    @smp.step
    def step(x: Any) -> Any:
        model(x)
        return tf.constant(1.0)

    with pytest.warns(UserWarning, match="no tensor that the step returns depends on the model"):
        step(tf.constant(ONES))


def test_a_result_that_does_not_depend_on_the_model_is_told(smp_world: Any) -> None:
    smp_world.run(constant_result, ranks=2, config=MANUAL)


def traces() -> int:
    count = [0]
    model = Net()

    @smp.step
    def step(x: Any, flag: Any) -> Any:
        count[0] += 1
        return model(x) + (1.0 if flag else 2.0)

    found = []
    for batch, flag in ((X, True), (X * 2, True), (X[:2], True), (X, True), (X, False), (X, False)):
        before = count[0]
        step(tf.constant(batch), flag)
        found.append(count[0] > before)
    return found


def test_a_step_is_traced_again_for_a_shape_and_a_value_and_only_then(smp_world: Any) -> None:
    wanted = [True, False, True, False, True, False]
    assert smp_world.run(traces, ranks=2, config=MANUAL) == [wanted, wanted]


def averaged() -> Any:
    model = Net()
    optimizer = tf.keras.optimizers.SGD(1.0)

    @smp.step
    def step(x: Any) -> Any:
        return optimizer.get_gradients(tf.reduce_mean(model(x)), model.trainable_variables)

    batch = X * (smp.dp_rank() + 1)
    gradients = step(tf.constant(batch))
    return [each.reduce_mean().numpy() for each in gradients]


@pytest.mark.parametrize("horovod", [True, False])
def test_gradients_are_averaged_over_replicas(smp_world: Any, horovod: bool) -> None:
    found = smp_world.run(averaged, ranks=4, config={**MANUAL, "horovod": horovod})
    alone = smp_world.run(averaged, ranks=2, config=MANUAL)  # of the batch of the first replica
    # All is linear in the batch: the second replica has twice the gradient of a kernel, and the same of a bias.
    for rank, own in enumerate(found):
        replica, place = rank // 2, rank % 2
        for got, base in zip(own, alone[place], strict=True):
            scale = (1.5 if horovod else replica + 1.0) if base.ndim == 2 else 1.0
            np.testing.assert_array_equal(got, base * scale)


class Different(smp.DistributedModel):
    """A model that is not the same on the second replica."""

    def __init__(self, more: int, units: int) -> None:
        super().__init__()
        second = smp.dp_rank() == 1
        count, units = 1 + more * second, units if second else 2
        self.layers_of_it = [tf.keras.layers.Dense(units, name=f"d{at}") for at in range(count)]

    def call(self, x: Any) -> Any:
        for layer in self.layers_of_it:
            x = layer(x)
        return x


def different(more: int, units: int) -> str:
    """The error of this rank where the model of the second replica has more layers, or so many units."""
    model = Different(more, units)
    step = smp.step(lambda x: tf.reduce_sum(model(x)))
    with pytest.raises(SmpError) as raised:
        step(tf.constant(X))
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("more", "units", "words"),
    [
        (1, 2, "the model has 4 variables here and 2 on rank 0"),
        (0, 3, "d0/kernel has the shape (3, 3) here and (3, 2) on rank 0"),
    ],
    ids=["layers", "units"],
)
def test_replicas_of_different_models_are_told(
    smp_world: Any, more: int, units: int, words: str
) -> None:
    config = {**MANUAL, "pipeline_parallel_degree": 1, "horovod": True}
    first, second = smp_world.run(different, more, units, ranks=2, config=config)
    assert second.startswith("PartitionError: smp.step: ")
    assert words in second.replace(
        "kernel:0", "kernel"
    )  # Keras 2 numbers the outputs of operations
    assert first == f"StepAbortedError: smp.step: failed on rank 1: {second}"


class Doubled:
    """An argument that says itself what each microbatch gets."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
        assert axis == 0
        return tf.constant(np.split(self.rows, num_mb)[mb] * 2)


def sliced() -> Any:
    model = Net()
    step = smp.step(lambda x: model(x))
    return step(Doubled(X)).concat().numpy()


def test_an_object_gives_the_part_of_each_microbatch(smp_world: Any) -> None:
    wanted = np.repeat(X.sum(1, keepdims=True) * 3 * 2, 2, axis=1)
    for found in smp_world.run(sliced, ranks=2, config=MANUAL):
        np.testing.assert_array_equal(found, wanted)


def traced_for_any_batch() -> list[Any]:
    model, traces = Net(), list[int]()

    @smp.step(reduce_retracing=True)
    def step(x: Any) -> Any:
        traces.append(1)
        return model(x)

    found = []
    for rows in (4, 6, 8, 10):
        outputs = step(tf.ones((rows, 3)))
        found.append((len(traces), [each.shape[0] for each in outputs.outputs]))
    return found


def test_arguments_of_tf_function_reach_it(smp_world: Any) -> None:
    # The second batch shows that the size varies; from then on one trace is of any size, which leaves a partition, too.
    for found in smp_world.run(traced_for_any_batch, ranks=2, config=MANUAL):
        counts = [count for count, _ in found]
        assert counts[1] > counts[0]
        assert counts[1:] == [counts[1]] * 3
        assert [sizes for _, sizes in found] == [[rows // 2] * 2 for rows in (4, 6, 8, 10)]


def inner_step() -> None:
    run(lambda model, x: smp.step(lambda y: y)(x))


def composite(kind: Callable[[Any], Any]) -> Callable[[], None]:
    def body() -> None:
        model = GivenCall(plain)
        smp.step(lambda x: {"found": kind(model(x))})(tf.constant(ONES))

    return body


def other_graph() -> None:
    run(lambda model, x: model.dense(x) + 1.0 if smp.rank() else model.dense(x))


def other_attribute() -> None:
    def body(model: Any, x: Any) -> Any:
        return tf.nn.leaky_relu(model.dense(x), alpha=0.25 if smp.rank() else 0.5)

    run(body)


def other_branch() -> None:
    def body(model: Any, x: Any) -> Any:
        inner = tf.cos if smp.rank() else tf.sin
        x = model.dense(x)
        return tf.cond(
            tf.reduce_sum(x) > 0,
            lambda: tf.cond(x[0, 0] > 0, lambda: inner(x), lambda: x),
            lambda: x,
        )

    run(body)


def other_step() -> None:
    model = GivenCall(plain)

    @smp.step
    def one(x: Any) -> Any:
        return model(x)

    @smp.step
    def other(x: Any) -> Any:
        return model(x) * 2.0

    one(tf.constant(ONES))
    other(tf.constant(ONES))
    (one if smp.rank() else other)(tf.constant(ONES))


def retraced_on_one_rank() -> None:
    model = GivenCall(plain)

    @smp.step
    def one(x: Any) -> Any:
        return model(x)

    one(tf.constant(ONES))
    one(tf.constant(ONES[:2] if smp.rank() else ONES))


def other_value() -> None:
    model = GivenCall(plain)
    smp.step(lambda x, by: model(x) * by)(tf.constant(ONES), 2.0 if smp.rank() else 3.0)


def other_batch() -> None:
    run(plain, ONES[:2] if smp.rank() else ONES)


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (inner_step, OutsideStepError, "was called inside a step"),
        (composite(tf.sparse.from_dense), ArgumentError, "returned a SparseTensor"),
        (composite(tf.RaggedTensor.from_tensor), ArgumentError, "returned a RaggedTensor"),
        (other_graph, PartitionError, "traced different graphs: operation .* differs"),
        (other_attribute, PartitionError, "traced different graphs: operation .* LeakyRelu"),
        (other_branch, PartitionError, "traced different graphs: operation .* StatelessIf"),
        (other_value, PartitionError, "traced different graphs: operation .* Const"),
        (other_batch, PartitionError, "traced different graphs: operation .* differs"),
        (other_step, PartitionError, "run different steps"),
        (retraced_on_one_rank, PartitionError, "run different steps .*rank 1 traces a new step"),
        (lambda: run(plain, ONES[:3]), BatchSizeError, "microbatches=2 does not divide"),
        (lambda: run(plain, np.float32(1)), BatchSizeError, "no axis 0"),
        (lambda: run(plain, jit_compile=True), UnsupportedTrainingError, "XLA cannot compile"),
        (lambda: run(plain, no_such=1), ArgumentTypeError, "no_such: tf.function takes no such"),
        (
            lambda: run(plain, input_signature=[tf.TensorSpec([3, 3])]),
            ArgumentError,
            "input_signature has a batch of 3",
        ),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_mistake_is_told(
    smp_world: Any, body: Callable[[], None], kind: type[SmpError], words: str
) -> None:
    check_refused(smp_world, body, kind, words)


@pytest.mark.parametrize(
    "body",
    [other_graph, other_attribute, other_branch, other_step, retraced_on_one_rank],
    ids=lambda each: each.__name__,
)
def test_every_rank_has_the_error(smp_world: Any, body: Callable[[], None]) -> None:
    check_alike(smp_world, body)


def test_a_rank_that_raises_in_a_step_ends_the_run(smp_world: Any) -> None:
    def fails(x: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    def body(model: Any, x: Any) -> Any:
        with smp.partition(1):
            return tf.py_function(fails, [x], tf.float32)

    with pytest.raises(tf.errors.UnknownError, match="on purpose"):
        smp_world.run(run, body, ranks=2, config=MANUAL)


def raises_in_trace() -> None:
    def body(model: Any, x: Any) -> Any:
        if smp.rank():
            raise ZeroDivisionError("on purpose")
        return model.dense(x)

    run(body)


def raises_in_a_later_trace() -> None:
    model = GivenCall(plain)

    @smp.step
    def step(x: Any, late: bool) -> Any:
        if late and smp.rank():
            raise ZeroDivisionError("on purpose")
        return model(x)

    step(tf.constant(ONES), False)
    step(tf.constant(ONES), bool(smp.rank()))  # the other rank traces nothing


def raises_before_the_trace() -> None:
    run(plain, ONES[:3] if smp.rank() else ONES)


def raises_in_a_hook() -> None:
    @smp.register_post_partition_hook
    def hook() -> None:
        if smp.rank():
            raise ZeroDivisionError("on purpose")

    run(plain)


@pytest.mark.parametrize(
    ("body", "own"),
    [
        (raises_in_trace, "on purpose"),
        (raises_in_a_later_trace, "on purpose"),
        (raises_before_the_trace, "microbatches=2 does not divide"),
        (raises_in_a_hook, "on purpose"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_the_other_ranks_are_told_of_a_rank_that_raises(
    smp_world: Any, body: Callable[[], None], own: str
) -> None:
    def caught() -> str:
        try:
            body()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    first, second = smp_world.run(caught, ranks=2, config=MANUAL)
    assert own in second
    assert not second.startswith("StepAbortedError")
    assert first.startswith("StepAbortedError: ")
    assert "rank 1" in first
    assert first.endswith(second)
