"""The model on its ranks: the place of each operation, the hook, the variables, and mistakes in all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.errors import (
    ArgumentTypeError,
    CheckpointError,
    OutsideStepError,
    PartitionError,
    SecondModelError,
    SmpError,
)
from tests.smp_core.tensorflow.small_models import (
    MANUAL,
    ONES,
    GivenCall,
    Net,
    X,
    check_refused,
    name,
    plain,
    run,
)


def counted_steps() -> list[int]:
    called: list[int] = []
    outside: list[int] = []
    model = Net(called)

    @smp.step
    def step(x: Any) -> Any:
        outputs = model(x)
        return tf.ensure_shape(
            tf.numpy_function(lambda each: outside.append(2) or each, [outputs], tf.float32),
            outputs.shape,
        )

    step(tf.constant(X))
    step(tf.constant(X))
    return called + outside


def test_an_operation_of_the_model_runs_on_one_rank_and_others_on_all(smp_world: Any) -> None:
    assert smp_world.run(counted_steps, ranks=2, config=MANUAL) == [
        [0] * 4 + [2] * 4,
        [1] * 4 + [2] * 4,
    ]


def hooks() -> list[Any]:
    events: list[Any] = []
    model = Net()

    @smp.register_post_partition_hook
    def hook() -> None:
        assert tf.executing_eagerly()
        events.append(list(map(name, model.trainable_variables)))

    @smp.step
    def step(x: Any) -> Any:
        return model(x)

    step(tf.constant(X))
    step(tf.constant(X[:2]))
    return events


def test_the_hook_runs_once_after_the_partition(smp_world: Any) -> None:
    first, second = smp_world.run(hooks, ranks=2, config=MANUAL)
    assert first == [[["one", "kernel"], ["one", "bias"]]]
    assert second == [[["two", "kernel"], ["two", "bias"]]]


def freed() -> list[tuple[int, ...]]:
    model = Net()
    smp.step(lambda x: model(x))(tf.constant(X))
    return [tuple(each.numpy().shape) for each in model.all_variables()]


def test_variables_of_other_ranks_are_freed(smp_world: Any) -> None:
    assert smp_world.run(freed, ranks=2, config=MANUAL) == [
        [(3, 3), (3,), (0,), (0,)],
        [(0,), (0,), (3, 2), (2,)],
    ]


class Growing(smp.DistributedModel):
    """A layer on each of two partitions, and another two from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers_made = [
            tf.keras.layers.Dense(2, kernel_initializer="ones", name=f"layer_{at}")
            for at in range(4)
        ]

    def call(self, x: Any, more: bool = False) -> Any:
        x = self.layers_made[0](x)
        with smp.partition(1):
            x = self.layers_made[1](x)
        if more:
            x = self.layers_made[2](x)
            with smp.partition(1):
                x = self.layers_made[3](x)
        return x


def freed_later(outer: bool) -> Any:
    model = Growing()
    few, many = (smp.step(functools.partial(model, more=more)) for more in (False, True))
    seen = []
    for step in (few, many, many):
        outputs = (tf.function(step) if outer else step)(tf.constant(X))
        seen.append(
            [float(tf.reduce_sum(each)) for each in outputs.outputs]
            + [each.numpy().size for each in model.all_variables()]
        )
    return seen


@pytest.mark.parametrize("outer", [False, True])
def test_variables_of_layers_that_are_built_later_are_freed_too(
    smp_world: Any, outer: bool
) -> None:
    first, second = smp_world.run(freed_later, outer, ranks=2, config=MANUAL)
    few, many = ([by * float(each.sum()) for each in (X[:2], X[2:])] for by in (4.0, 16.0))
    assert first == [[*few, 6, 2, 0, 0], *[[*many, 6, 2, 0, 0, 4, 2, 0, 0]] * 2]
    assert second == [[*few, 0, 0, 4, 2], *[[*many, 0, 0, 4, 2, 0, 0, 4, 2]] * 2]


def outside() -> None:
    GivenCall(plain)(tf.constant(ONES))


def two_models() -> None:
    GivenCall(plain)
    GivenCall(plain)


def beside_the_model() -> None:
    model = GivenCall(plain)

    @smp.step
    def step(x: Any) -> Any:
        with smp.partition(1):
            return model(x)

    step(tf.constant(ONES))


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


def model_in_a_branch() -> None:
    model = GivenCall(plain)
    smp.step(lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: model(x), lambda: x[:, :2]))(
        tf.constant(ONES)
    )


#: A place that no folder can be made in, should a call that is to be refused go on.
NOWHERE = "/dev/null/nowhere"


def early_save_model() -> None:
    GivenCall(plain).save_model(NOWHERE)


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (outside, OutsideStepError, "was called outside of a step"),
        (two_models, SecondModelError, "there is one already"),
        (beside_the_model, PartitionError, "enter it in the model's call"),
        (index(2), PartitionError, "partition 2 does not exist: .* from 0 to 1"),
        (index(-1), PartitionError, "partition -1 does not exist"),
        (index(True), ArgumentTypeError, "index must be an int, not True"),
        (index("0"), ArgumentTypeError, "index must be an int, not '0'"),
        (in_branch, PartitionError, "inside of a branch, a loop body or a nested tf.function"),
        (in_loop, PartitionError, "inside of a branch, a loop body or a nested tf.function"),
        (in_function, PartitionError, "inside of a branch, a loop body or a nested tf.function"),
        (model_in_a_branch, PartitionError, "called inside of a branch"),
        (early_save_model, CheckpointError, "save it after the first step"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_mistake_is_told(
    smp_world: Any, body: Callable[[], None], kind: type[SmpError], words: str
) -> None:
    check_refused(smp_world, body, kind, words)
