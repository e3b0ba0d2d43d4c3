"""Bodies that ranks run in the properties of TensorFlow: small models, and scripts of a few lines.

Ranks import this module, and so TensorFlow; properties do when they run (:func:`conformance.cases.keras.bodies`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from conformance.cases import keras_script
from conformance.cases.keras import KerasCase, Path
from conformance.cases.training import namespace
from smp_core.errors import VerdictError

MICROBATCHES = 2
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def model_of(smp: Any, call: Callable[[Any, Any], Any]) -> Any:
    """A DistributedModel of two layers with this ``call``."""

    base: Any = smp.DistributedModel

    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one = tf.keras.layers.Dense(3, kernel_initializer="ones", name="one")
            self.two = tf.keras.layers.Dense(2, kernel_initializer="ones", name="two")

        def call(self, x: Any) -> Any:
            return call(self, x)

    return Model()


def second_partition(smp: Any) -> Any:
    """The context of partition 1, or of partition 0 where there is no other."""
    return smp.partition(min(1, smp.pp_size() - 1))


def two_layers(smp: Any) -> Callable[[Any, Any], Any]:
    """A ``call`` whose second layer is in the second partition."""

    def call(model: Any, x: Any) -> Any:
        x = model.one(x)
        with second_partition(smp):
            return model.two(x)

    return call


def noted(x: Any, note: Callable[[Any], object], label: Any, back: Any = None) -> Any:
    """The same tensor; each run of the operation is noted, and each of its gradient where ``back`` is a label."""

    def noting(tensor: Any, label: Any) -> Any:
        def run(array: Any) -> Any:
            note(label)
            return array

        return tf.ensure_shape(tf.numpy_function(run, [tensor], tf.float32), tensor.shape)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def both(tensor: Any) -> Any:
        return noting(tensor, label), lambda dy: dy if back is None else noting(dy, back)

    return both(x) if back is not None else noting(x, label)


def nested(smp: Any, path: Path) -> contextlib.ExitStack:
    """The contexts of a path of partitions, the outermost first."""
    stack = contextlib.ExitStack()
    for index in path:
        stack.enter_context(smp.partition(index))
    return stack


def runs(engine: str, paths: Sequence[Path], steps: int) -> list[Any]:
    """The operations that ran on this rank: those of a layer for each path, forward and backward, and those outside."""
    smp = namespace(engine)
    seen: list[Any] = []
    note = seen.append

    class Noting(tf.keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, number: int) -> None:
            super().__init__(name=f"noting_{number}")
            self.number = number

        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, x: Any) -> Any:
            return noted(x * self.scale, note, ("forward", self.number), ("backward", self.number))

    base: Any = smp.DistributedModel

    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = [Noting(number) for number in range(len(paths))]

        def call(self, x: Any) -> Any:
            for path, part in zip(paths, self.parts, strict=True):
                with nested(smp, path):
                    x = part(x)
            return x

    model, optimizer = Model(), tf.keras.optimizers.SGD(0.0)

    @smp.step  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        loss = tf.reduce_sum(noted(model(x), note, ("outside", 0), ("outside, backward", 0)))
        return loss, optimizer.get_gradients(loss, model.trainable_variables)

    for _ in range(steps):
        step(tf.ones((12, 3)))  # for 1, 2 or 3 microbatches
    return seen


def stages(engine: str, paths: Sequence[Path]) -> list[Any]:
    """The outputs of a model that returns what each of its stages doubles, on this rank."""
    smp = namespace(engine)

    def call(model: Any, x: Any) -> Any:
        found = []
        for path in paths:
            with nested(smp, path):
                x = x * 2.0
                found.append(x)
        return found

    model = model_of(smp, call)
    outputs = smp.step(lambda x: model(x))(tf.constant(X))
    return [each.concat().numpy() for each in outputs]


def names_differ(engine: str) -> Any:
    """The output of two layers of a model, whose names are other ones on each rank."""
    smp = namespace(engine)
    tf.keras.backend.clear_session()
    for _ in range(9 * smp.pp_rank()):  # so that the names of the next two sort the other way round
        tf.keras.layers.Dense(1)
    first, second = (
        tf.keras.layers.Dense(3, kernel_initializer=start, use_bias=False)
        for start in (tf.keras.initializers.Constant(1.0), tf.keras.initializers.Constant(3.0))
    )

    base: Any = smp.DistributedModel

    class Model(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = first, second

        def call(self, x: Any) -> Any:
            x, y = self.one(x), self.two(x)
            with second_partition(smp):
                return x - y

    model = Model()
    return smp.step(lambda x: model(x))(tf.constant(X)).concat().numpy()


def joined(engine: str, parts: int) -> dict[str, Any]:
    """The results of StepOutput's methods for the microbatches' outputs."""
    smp = namespace(engine)
    model = model_of(smp, two_layers(smp))

    @smp.step  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        return model(x)

    made = step(batch(parts))
    var = tf.Variable(tf.zeros_like(made.outputs[0]))
    returned = made.accumulate(method="variable", var=var)
    return {
        "outputs": [each.numpy() for each in made.outputs],
        "merge": made.merge().numpy(),
        "accumulate": [
            made.accumulate(method=each).numpy() for each in ("variable", "add_n", "accumulate_n")
        ],
        "mean": made.reduce_mean().numpy(),
        "var": var.numpy(),
        "returned": returned is var,
    }


def batch(parts: int) -> Any:
    """A batch of whole numbers, two rows for each microbatch."""
    return tf.reshape(tf.range(6.0 * parts), (2 * parts, 3))


def traces(engine: str, calls: Sequence[tuple[int, str, Any]], signature: bool) -> list[int]:
    """The number of traces of a step before and after each call, given by rows of a microbatch, dtype and option."""
    smp = namespace(engine)
    count = [0]
    model = model_of(smp, two_layers(smp))
    options: dict[str, Any] = {}
    if signature:
        options["input_signature"] = [
            tf.TensorSpec([None, 3], tf.float32),
            tf.TensorSpec([], tf.float32),
        ]
        options["reduce_retracing"] = True

    @smp.step(non_split_inputs=["option"], autograph=False, **options)  # type: ignore[untyped-decorator]
    def step(x: Any, option: Any) -> Any:
        count[0] += 1
        return model(tf.cast(x, tf.float32)) * tf.cast(option, tf.float32)

    found = []
    for rows, dtype, option in calls:
        before = count[0]
        x = tf.ones((rows * MICROBATCHES, 3), dtype)
        made = step(x, tf.constant(float(option)) if signature else option)
        # Ones through kernels of ones: 3, then 9; times the option.
        np.testing.assert_array_equal(made.merge().numpy(), np.full((rows * 2, 2), 9.0 * option))
        found.append(count[0] - before)
    return found


def in_order(engine: str, graph: bool = False) -> list[float]:
    """The losses of three steps of one ``tf.function``, with assignments to a variable between them.

    With ``graph`` the function is a graph on every backend, which ranks without messages to each other can run.
    """
    smp = namespace(engine)
    model = model_of(smp, two_layers(smp))
    factor = tf.Variable(1.0)

    @smp.step  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        return tf.reduce_sum(model(x)) * factor

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def whole(x: Any) -> Any:
        first = step(x).reduce_sum()
        factor.assign_add(1.0)
        second = step(x).reduce_sum()
        factor.assign(factor * 5.0)
        return first, second, step(x).reduce_sum(), factor.read_value()

    if graph:
        tf.config.run_functions_eagerly(False)
    return [float(each) for each in whole(tf.constant(X))]


def hooked(engine: str) -> list[Any]:
    """The operations of a model and the call of its hook after the partition, in order, with the hook's variables."""
    smp = namespace(engine)
    seen: list[Any] = []

    def call(model: Any, x: Any) -> Any:
        x = noted(model.one(x), seen.append, "forward")
        with second_partition(smp):
            return noted(model.two(x), seen.append, "forward")

    model = model_of(smp, call)

    @smp.register_post_partition_hook  # type: ignore[untyped-decorator]
    def hook() -> None:
        seen.append(("hook", tf.executing_eagerly(), len(model.trainable_variables)))

    step = smp.step(lambda x: model(x))
    for _ in range(2):
        step(tf.constant(X))
    step(tf.constant(X[:2]))  # another trace
    return seen


def aligned(engine: str, case: KerasCase) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """For each of the rank's trainable variables its name, its shape, and the shape of its gradient, after a step."""
    smp = namespace(engine)
    model = keras_script.build(case, smp.DistributedModel, smp.partition)
    optimizer = keras_script.make_optimizer(case)
    step = smp.step(lambda x, y: keras_script.loss_and_gradients(case, model, optimizer, x, y))
    x, y = keras_script.data(case, 0)
    for _ in range(2):
        _, _, gradients = step(tf.constant(x), tf.constant(y))
    variables = model.trainable_variables
    return [
        (name, tuple(each.shape), tuple(gradient.outputs[0].shape))
        for name, each, gradient in zip(
            keras_script.named(variables), variables, gradients, strict=True
        )
    ]


def caught(body: Callable[[], object]) -> str:
    """The type of the error that a body raises; empty without. A verdict of the harness is no error of the engine."""
    try:
        body()
    except VerdictError:
        raise
    except Exception as error:
        return type(error).__name__
    return ""


def outside(engine: str) -> tuple[str, float]:
    """The error of a model that is called outside of a step, and the result of one that is called in it."""
    smp = namespace(engine)
    model = model_of(smp, two_layers(smp))
    error = caught(lambda: model(tf.constant(X)))
    return error, float(smp.step(lambda x: tf.reduce_sum(model(x)))(tf.constant(X)).reduce_sum())


def divergent(engine: str, other: int) -> str:
    """The error of a step in which one rank makes another operation than the rest."""
    smp = namespace(engine)

    def call(model: Any, x: Any) -> Any:
        x = model.one(x)
        with second_partition(smp):
            x = model.two(x)
            return tf.exp(x) if smp.rank() == other else tf.sin(x)

    model = model_of(smp, call)
    return caught(lambda: smp.step(lambda x: model(x))(tf.constant(X)))


@tf.custom_gradient  # type: ignore[untyped-decorator]
def picky(x: Any, forward: Any, backward: Any) -> Any:
    """The same tensor; the pass whose index is 1 fails, because there is one element to take."""

    def gradient(dy: Any) -> Any:
        index = backward + tf.cast(0 * tf.reduce_sum(dy), tf.int32)  # when the gradient is there
        return dy + tf.gather(tf.zeros(1), index), None, None

    return x + tf.gather(tf.zeros(1), forward), gradient


def failing(engine: str, bad: tuple[int, int, str], outer: bool) -> tuple[str, float, str, bool]:
    """A step that fails, a good one, and one that fails: errors, the loss, and whether the last one changed a variable.

    ``bad`` is the partition, the microbatch and the phase of the operation that fails.
    """
    smp = namespace(engine)

    def call(model: Any, given: Any) -> Any:
        x, indices = given
        x = picky(model.one(x), indices[0, 0, 0], indices[0, 0, 1])
        with second_partition(smp):
            return picky(model.two(x), indices[0, 1, 0], indices[0, 1, 1])

    model, optimizer = model_of(smp, call), tf.keras.optimizers.SGD(1.0)

    @smp.step  # type: ignore[untyped-decorator]
    def step(x: Any, indices: Any) -> Any:
        loss = tf.reduce_sum(model((x, indices)))
        return loss, optimizer.get_gradients(loss, model.trainable_variables)

    def train(x: Any, indices: Any) -> Any:
        loss, gradients = step(x, indices)
        mean = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
        return loss.reduce_sum()

    run = tf.function(train) if outer else train
    partition, microbatch, phase = bad
    good = np.zeros((len(X), 2, 2), np.int32)
    wrong = good.copy()
    wrong[2 * microbatch :, partition, int(phase == "backward")] = 1
    first = caught(lambda: run(tf.constant(X), tf.constant(wrong)))
    loss = float(run(tf.constant(X), tf.constant(good)))
    before = [each.numpy() for each in model.variables]
    second = caught(lambda: run(tf.constant(X), tf.constant(wrong)))
    after = [each.numpy() for each in model.variables]
    changed = any((a != b).any() for a, b in zip(before, after, strict=True))
    return first, loss, second, changed


def bad_index(engine: str, index: int) -> tuple[str, list[str]]:
    """The error of a partition that does not exist, and the operations that had run before."""
    smp = namespace(engine)
    seen: list[str] = []

    def call(model: Any, x: Any) -> Any:
        x = noted(model.one(x), seen.append, "forward")
        with smp.partition(index):
            return model.two(x)

    model = model_of(smp, call)
    return caught(lambda: smp.step(lambda x: model(x))(tf.constant(X))), seen


def configured(engine: str, config: dict[str, Any]) -> str:
    """The error of a configuration, in init or where the model is made."""
    smp = namespace(engine)

    def script() -> None:
        smp.init(config)
        model_of(smp, two_layers(smp))

    return caught(script)


class KerasTraining:
    """A rank's training of a case, with a manager of checkpoints."""

    def __init__(self, engine: str, case: KerasCase, folder: str, **options: Any) -> None:
        smp = namespace(engine)
        self.case = case
        self.model = model = keras_script.build(case, smp.DistributedModel, smp.partition)
        self.optimizer = optimizer = keras_script.make_optimizer(case)
        self.counter = tf.Variable(0)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, counter=self.counter)
        self.manager = smp.CheckpointManager(checkpoint, folder, **options)
        self.body = smp.step(
            lambda x, y: keras_script.loss_and_gradients(case, model, optimizer, x, y)
        )

    def step(self, number: int) -> list[float]:
        """Train on the batch of this number, and return the microbatches' losses."""
        x, y = keras_script.data(self.case, number)
        loss, _, gradients = self.body(tf.constant(x), tf.constant(y))
        mean = [each.accumulate() for each in gradients]
        self.optimizer.apply_gradients(zip(mean, self.model.trainable_variables, strict=True))
        self.counter.assign_add(1)
        return [float(each) for each in loss.outputs]


Trained = tuple[list[list[float]], dict[str, Any], int]


def stopped(engine: str, case: KerasCase, folder: str, keep: int | None) -> Trained:
    """Train five steps, with a checkpoint after each of the first three."""
    training = KerasTraining(engine, case, folder, max_to_keep=keep)
    losses = []
    for number in range(5):
        losses.append(training.step(number))
        if number < 3:
            training.manager.save()
    return losses, keras_script.named(training.model.variables), int(training.counter)


def gone_on(engine: str, case: KerasCase, folder: str, prefix: str | None, before: bool) -> Trained:
    """Restore a checkpoint, before the first step or after one, and train on to the fifth."""
    training = KerasTraining(engine, case, folder)
    if not before:
        training.step(7)  # other variables than those that are restored
    training.manager.restore(restore_prefix=prefix)
    start = 3 if prefix is None else int(prefix.rpartition("-")[2])
    losses = [training.step(number) for number in range(start, 5)]
    return losses, keras_script.named(training.model.variables), int(training.counter)


def saved(engine: str, case: KerasCase, folder: str) -> None:
    """Train a step, save the whole model, and go on."""
    training = KerasTraining(engine, case, f"{folder}/checkpoints")
    training.step(0)
    training.model.save_model(f"{folder}/model")
    training.step(1)


def order_of_passes(engine: str, microbatches: int) -> list[tuple[str, int]]:
    """The forward and backward passes of this rank's part of a model, in order, with their microbatches."""
    smp = namespace(engine)
    seen: list[tuple[str, int]] = []

    def passed(x: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def both(tensor: Any, number: Any) -> Any:
            def run(phase: str) -> Any:
                def noting(array: Any, at: Any) -> Any:
                    seen.append((phase, int(at)))
                    return array

                return noting

            def called(phase: str, given: Any) -> Any:
                made = tf.numpy_function(run(phase), [given, number], tf.float32)
                return tf.ensure_shape(made, given.shape)

            return called("F", tensor), lambda dy: (called("B", dy), None)

        return both(x[0], x[1])

    def call(model: Any, x: Any) -> Any:
        number = x[0, 0]
        x = passed((model.one(x), number))
        if smp.pp_size() == 1:
            return model.two(x)  # whose passes would be noted beside those of the first
        with smp.partition(1):
            return passed((model.two(x), number))

    model, optimizer = model_of(smp, call), tf.keras.optimizers.SGD(0.0)

    @smp.step  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        loss = tf.reduce_sum(model(x))
        return loss, optimizer.get_gradients(loss, model.trainable_variables)

    x = np.repeat(np.arange(microbatches, dtype=np.float32), 2)[:, None] * np.ones((1, 3))
    step(tf.constant(x, tf.float32))
    return seen
