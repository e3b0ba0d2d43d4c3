"""Mistakes end in one error on every rank, which says what to do; none hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    CheckpointError,
    OutsideStepError,
    PartitionError,
    SecondModelError,
    SmpError,
    UnsupportedTrainingError,
)

MANUAL = {
    "pipeline_parallel_degree": 2,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
}
X = np.ones((4, 3), np.float32)


class Model(smp.DistributedModel):
    """A model whose ``call`` is given."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.dense = tf.keras.layers.Dense(2, kernel_initializer="ones")

    def call(self, x: Any) -> Any:
        return self.body(self, x)


def run(body: Callable[..., Any], x: Any = X, **options: Any) -> Any:
    model = Model(body)

    @smp.step(**options)
    def step(x: Any) -> Any:
        return model(x)

    return [each.numpy() for each in step(tf.constant(x)).outputs]


def plain(model: Any, x: Any) -> Any:
    return model.dense(x)


def outside() -> None:
    Model(plain)(tf.constant(X))


def inner_step() -> None:
    run(lambda model, x: smp.step(lambda y: y)(x))


def two_models() -> None:
    Model(plain)
    Model(plain)


def beside_the_model() -> None:
    model = Model(plain)

    @smp.step
    def step(x: Any) -> Any:
        with smp.partition(1):
            return model(x)

    step(tf.constant(X))


def index(value: Any) -> Callable[[], None]:
    def body(model: Any, x: Any) -> Any:
        with smp.partition(value):
            return model.dense(x)

    return lambda: run(body)


def in_branch() -> None:
    def chosen(x: Any) -> Any:
        with smp.partition(1):
            return x * 2.0

    run(lambda model, x: tf.cond(tf.reduce_sum(x) > 0, lambda: chosen(x), lambda: x))


def in_loop() -> None:
    def body(i: Any, x: Any) -> Any:
        with smp.partition(1):
            return i + 1, x * 2.0

    run(lambda model, x: tf.while_loop(lambda i, x: i < 2, body, [tf.constant(0), x])[1])


def in_function() -> None:
    def nested(x: Any) -> Any:
        with smp.partition(1):
            return x * 2.0

    run(lambda model, x: tf.function(nested)(x))


def variable_of_two_loops() -> None:
    def loop(model: Any, x: Any) -> Any:
        # Assigned to: a loop is given the value of what it only reads.
        def body(i: Any) -> Any:
            model.count.assign_add(1.0)
            return [i + 1]

        return tf.while_loop(lambda i: i < 2, body, [tf.constant(0)])[0]

    def body(model: Any, x: Any) -> Any:
        if not hasattr(model, "count"):
            with tf.init_scope():
                model.count = tf.Variable(0.0)
        with smp.partition(0):
            a = loop(model, x)
        with smp.partition(1):
            b = loop(model, x)
        return x + tf.cast(a + b, tf.float32)

    run(body)


def strings() -> None:
    def body(model: Any, x: Any) -> Any:
        with smp.partition(0):
            words = tf.strings.as_string(x)
        with smp.partition(1):
            return tf.strings.to_number(words)

    run(body)


def tensor_list() -> None:
    def body(model: Any, x: Any) -> Any:
        with smp.partition(0):
            kept = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=tf.constant([3]))
        with smp.partition(1):
            return tf.raw_ops.TensorListStack(
                input_handle=kept, element_shape=tf.constant([3]), element_dtype=tf.float32
            )

    run(body)


def nine_dimensions() -> None:
    def body(model: Any, x: Any) -> Any:
        x = tf.reshape(tf.boolean_mask(x, x[:, 0] > 0.0), [-1, *[1] * 8])
        with smp.partition(1):
            return x * 2.0

    run(body)


def composite(kind: Callable[[Any], Any]) -> Callable[[], None]:
    def body() -> None:
        model = Model(plain)
        smp.step(lambda x: {"found": kind(model(x))})(tf.constant(X))

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
    model = Model(plain)

    @smp.step
    def one(x: Any) -> Any:
        return model(x)

    @smp.step
    def other(x: Any) -> Any:
        return model(x) * 2.0

    one(tf.constant(X))
    other(tf.constant(X))
    (one if smp.rank() else other)(tf.constant(X))


def retraced_on_one_rank() -> None:
    model = Model(plain)

    @smp.step
    def one(x: Any) -> Any:
        return model(x)

    one(tf.constant(X))
    one(tf.constant(X[:2] if smp.rank() else X))


def other_value() -> None:
    model = Model(plain)
    smp.step(lambda x, by: model(x) * by)(tf.constant(X), 2.0 if smp.rank() else 3.0)


def other_batch() -> None:
    run(plain, X[:2] if smp.rank() else X)


def model_in_a_branch() -> None:
    model = Model(plain)
    smp.step(lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: model(x), lambda: x[:, :2]))(
        tf.constant(X)
    )


#: A place that no folder can be made in, should a call that is to be refused go on.
NOWHERE = "/dev/null/nowhere"


def early_save() -> None:
    smp.CheckpointManager(tf.train.Checkpoint(model=Model(plain)), NOWHERE).save()


def early_save_model() -> None:
    Model(plain).save_model(NOWHERE)


def no_checkpoint() -> None:
    smp.CheckpointManager(Model(plain), NOWHERE)


def unnamed_checkpoint() -> None:
    model = Model(plain)
    manager = smp.CheckpointManager(tf.train.Checkpoint(model), NOWHERE)
    smp.step(lambda x: model(x))(tf.constant(X))
    manager.save()


def method(**options: Any) -> Callable[[], None]:
    def body() -> None:
        model = Model(plain)
        smp.step(lambda x: model(x))(tf.constant(X)).accumulate(**options)

    return body


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (outside, OutsideStepError, "was called outside of a step"),
        (inner_step, OutsideStepError, "was called inside a step"),
        (two_models, SecondModelError, "there is one already"),
        (beside_the_model, PartitionError, "enter it in the model's call"),
        (index(2), PartitionError, "partition 2 does not exist: .* from 0 to 1"),
        (index(-1), PartitionError, "partition -1 does not exist"),
        (index(True), ArgumentTypeError, "index must be an int, not True"),
        (index("0"), ArgumentTypeError, "index must be an int, not '0'"),
        (in_branch, PartitionError, "inside of a branch, a loop body or a nested tf.function"),
        (in_loop, PartitionError, "inside of a branch, a loop body or a nested tf.function"),
        (in_function, PartitionError, "inside of a branch, a loop body or a nested tf.function"),
        (variable_of_two_loops, PartitionError, "which partition 0 owns"),
        (strings, PartitionError, "dtype string .* cannot leave its rank"),
        (tensor_list, PartitionError, "dtype variant .* cannot leave its rank"),
        (nine_dimensions, PartitionError, "9 dimensions, one of them of unknown size"),
        (composite(tf.sparse.from_dense), ArgumentError, "returned a SparseTensor"),
        (composite(tf.RaggedTensor.from_tensor), ArgumentError, "returned a RaggedTensor"),
        (other_graph, PartitionError, "traced different graphs: operation .* differs"),
        (other_attribute, PartitionError, "traced different graphs: operation .* LeakyRelu"),
        (other_branch, PartitionError, "traced different graphs: operation .* StatelessIf"),
        (other_value, PartitionError, "traced different graphs: operation .* Const"),
        (other_batch, PartitionError, "traced different graphs: operation .* differs"),
        (model_in_a_branch, PartitionError, "called inside of a branch"),
        (other_step, PartitionError, "run different steps"),
        (retraced_on_one_rank, PartitionError, "run different steps .*rank 1 traces a new step"),
        (early_save, CheckpointError, "save after the first step"),
        (early_save_model, CheckpointError, "save it after the first step"),
        (no_checkpoint, ArgumentTypeError, "not a tf.train.Checkpoint"),
        (unnamed_checkpoint, CheckpointError, "has no named parts"),
        (lambda: run(plain, X[:3]), BatchSizeError, "microbatches=2 does not divide"),
        (lambda: run(plain, np.float32(1)), BatchSizeError, "no axis 0"),
        (lambda: run(plain, jit_compile=True), UnsupportedTrainingError, "XLA cannot compile"),
        (lambda: run(plain, no_such=1), ArgumentTypeError, "no_such: tf.function takes no such"),
        (
            lambda: run(plain, input_signature=[tf.TensorSpec([3, 3])]),
            ArgumentError,
            "input_signature has a batch of 3",
        ),
        (method(method="other"), ArgumentError, "method must be one of"),
        (method(method="add_n", var=1), ArgumentError, "var is for method='variable'"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_mistake_is_told(
    smp_world: Any, body: Callable[[], None], kind: type[SmpError], words: str
) -> None:
    with pytest.raises(kind, match=f"(?s){words}"):
        smp_world.run(body, ranks=2, config=MANUAL)


@pytest.mark.parametrize(
    "body",
    [
        other_graph,
        other_attribute,
        other_branch,
        other_step,
        retraced_on_one_rank,
        strings,
        nine_dimensions,
    ],
    ids=lambda each: each.__name__,
)
def test_every_rank_has_the_error(smp_world: Any, body: Callable[[], None]) -> None:
    def caught() -> str:
        with pytest.raises(PartitionError) as found:
            body()
        return str(found.value)

    first, second = smp_world.run(caught, ranks=2, config=MANUAL)
    assert first == second


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
    model = Model(plain)

    @smp.step
    def step(x: Any, late: bool) -> Any:
        if late and smp.rank():
            raise ZeroDivisionError("on purpose")
        return model(x)

    step(tf.constant(X), False)
    step(tf.constant(X), bool(smp.rank()))  # the other rank traces nothing


def raises_before_the_trace() -> None:
    run(plain, X[:3] if smp.rank() else X)


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


def test_functions_run_eagerly_in_ranks_alone(smp_world: Any) -> None:
    def eager() -> bool:
        Model(plain)
        return bool(tf.config.functions_run_eagerly())

    assert smp_world.run(eager, ranks=2, config=MANUAL) == [True, True]
    assert not tf.config.functions_run_eagerly()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tensor_parallel_degree": 2, "ddp": True}, "tensor_parallel_degree"),
        ({"placement_strategy": "TPD", "ddp": True}, "placement_strategy"),
    ],
)
def test_what_tensorflow_has_not_is_refused(
    smp_world: Any, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(SmpError, match=words):
        smp_world.run(two_models, ranks=2, config=config)
