"""Drawn Keras models: their training unpartitioned in one process, and partitioned over ranks.

The same ``call`` builds both models; only the base class and the context ``partition`` differ. Ranks import this
module, and so TensorFlow; properties do when they run (:func:`conformance.cases.keras.script`).
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_math_ops

from conformance.cases.keras import KerasCase
from conformance.cases.training import namespace

# TensorFlow's passes over a graph would rewrite other operations in the unpartitioned graph than in segments.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
# On several threads the last bits of some kernels depend on what the process has run before.
with contextlib.suppress(RuntimeError):  # TensorFlow runs already
    tf.config.threading.set_intra_op_parallelism_threads(1)


def add_in_order(inputs: Any, name: str | None = None) -> Any:
    """The sum of gradients from the first to the last.

    TensorFlow's AddN begins with an input whose memory it can take over, so its last bit depends on what else is in
    the graph.
    """
    return tf.identity(functools.reduce(gen_math_ops.add_v2, inputs), name=name)


gen_math_ops.add_n = add_in_order

WIDTH, VOCABULARY, TOKENS, SAMPLES = 4, 5, 3, 2
#: Keras 2 keeps the state of a Dropout in the kernel of an operation: no checkpoint has it, and a graph that holds a
#: segment twice has it twice.
STATE_IN_KERNELS = tf.keras.layers.Layer.__module__.startswith("tf_keras")
DROPOUT = "layer norm" if STATE_IN_KERNELS else "dropout"


def build(case: KerasCase, base: Any, partition: Any) -> Any:
    """The model of a case."""
    layers = tf.keras.layers
    tf.keras.backend.clear_session()  # names are counted from the start

    def start(seed: int) -> Any:
        return tf.keras.initializers.RandomUniform(-0.5, 0.5, seed=seed)

    def made(kind: str, at: int) -> Any:
        name = f"block_{at}"
        if kind == "batch norm":
            return layers.BatchNormalization(name=name)
        if kind == "layer norm":
            return layers.LayerNormalization(name=name)
        if kind == "dropout":
            return layers.Dropout(0.25, seed=at, name=name)
        activation = "tanh" if kind == "nested" else None
        return layers.Dense(
            WIDTH,
            activation=activation,
            kernel_initializer=start(at),
            bias_initializer=start(50 + at),
            name=name,
        )

    class Drawn(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="drawn")
            self.embedding = layers.Embedding(
                VOCABULARY, WIDTH, embeddings_initializer=start(100), name="embedding"
            )
            self.blocks = [made(kind, at) for at, (kind, _) in enumerate(case.blocks)]
            self.head = (
                None
                if case.tied
                else layers.Dense(VOCABULARY, kernel_initializer=start(200), name="head")
            )

        def call(self, tokens: Any, training: bool = True) -> Any:
            with partition(case.embedding):
                x = first = self.embedding(tokens)
            for (kind, place), layer in zip(case.blocks, self.blocks, strict=True):
                with partition(place):
                    x = self.block(kind, place, layer, x, first, training)
            x = x * 2.0  # in the default partition
            with partition(case.head):
                if self.head is not None:
                    return self.head(x)
                return tf.matmul(x, self.embedding.embeddings, transpose_b=True)

        def block(
            self, kind: str, place: int, layer: Any, x: Any, first: Any, training: bool
        ) -> Any:
            if kind in ("batch norm", "dropout"):
                return layer(x, training=training)
            if kind == "skip":
                return layer(x) + first
            if kind == "nested":
                with partition((place + 1) % case.partitions):
                    inner = layer(x)
                return inner + x
            if kind == "cond":
                return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: x - 1.0) + layer(x)
            if kind == "while":
                done = tf.while_loop(
                    lambda i, _: i < 3,
                    lambda i, y: (i + 1, tf.sin(y) + y),
                    [tf.constant(0), layer(x)],
                )
                return done[1]
            return layer(x)

    return Drawn()


def data(case: KerasCase, step: int) -> tuple[Any, Any]:
    """The batch of a step."""
    random = np.random.default_rng(step)
    size = (case.microbatches * SAMPLES, TOKENS)
    return random.integers(0, VOCABULARY, size), random.standard_normal((*size, VOCABULARY)).astype(
        np.float32
    )


def loss_and_gradients(
    case: KerasCase, model: Any, optimizer: Any, x: Any, y: Any, gradients_of: Any = None
) -> Any:
    """The body of both trainings; ``gradients_of`` is the optimizer's ``get_gradients`` if not given."""
    if case.tape:
        with tf.GradientTape() as tape:
            outputs = model(x)
            loss = tf.reduce_mean((outputs - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [tf.convert_to_tensor(each) for each in gradients]
    else:
        outputs = model(x)
        loss = tf.reduce_mean((outputs - y) ** 2)
        gradients = (gradients_of or optimizer.get_gradients)(loss, model.trainable_variables)
    return loss, outputs, gradients


def unpartitioned_gradients(loss: Any, variables: Any) -> list[Any]:
    """The gradients of a loss by TensorFlow alone: a process without ranks does not import the engine."""
    values = [getattr(each, "value", each) for each in variables]  # in Keras 2 a method
    found = tf.gradients(
        loss,
        [each if callable(value) else value for each, value in zip(variables, values, strict=True)],
    )
    return [tf.convert_to_tensor(each) for each in found]


def make_optimizer(case: KerasCase) -> Any:
    """The optimizer of a case."""
    return getattr(tf.keras.optimizers, case.optimizer)(0.05)


def named(variables: Any) -> dict[str, Any]:
    """The values of variables by name."""
    return {getattr(each, "path", each.name): each.numpy() for each in variables}


def unpartitioned(
    case: KerasCase, steps: int, outer: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """Losses and outputs of all microbatches, and the variables in the end, of the model in one process."""
    model = build(case, tf.keras.Model, lambda _: contextlib.nullcontext())
    return _trained(case, model, steps, outer), named(model.variables)


def _trained(case: KerasCase, model: Any, steps: int, outer: bool) -> list[Any]:
    """Train an unpartitioned model; return losses and outputs of all microbatches."""
    optimizer = make_optimizer(case)
    x, y = (tf.constant(each[:SAMPLES]) for each in data(case, 0))
    body = tf.function(
        lambda x, y: loss_and_gradients(case, model, optimizer, x, y, unpartitioned_gradients)
    )
    one = body.get_concrete_function(x, y)

    def update(sums: Any) -> None:
        mean = [each / case.microbatches for each in sums]
        optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))

    # As the rank does it: a graph rounds the update of Adam in another way than single operations do.
    updates = tf.function(update) if outer else update
    seen = []
    for step in range(steps):
        x, y = data(case, step)
        sums: list[Any] | None = None
        for at in range(case.microbatches):
            part = slice(at * SAMPLES, (at + 1) * SAMPLES)
            loss, outputs, gradients = one(tf.constant(x[part]), tf.constant(y[part]))
            seen.append((loss.numpy(), outputs.numpy()))
            sums = (
                gradients if sums is None else [a + b for a, b in zip(sums, gradients, strict=True)]
            )
        updates(sums)
    return seen


def train(
    engine: str, case: KerasCase, steps: int, outer: bool = False
) -> tuple[list[Any], dict[str, Any], int]:
    """The same on a rank, with this rank's variables, and the number of the optimizer's."""
    smp = namespace(engine)
    model = build(case, smp.DistributedModel, smp.partition)
    optimizer = make_optimizer(case)

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def train_step(x: Any, y: Any) -> Any:
        return loss_and_gradients(case, model, optimizer, x, y)

    def whole(x: Any, y: Any) -> Any:
        loss, outputs, gradients = train_step(x, y)
        mean = [each.accumulate() for each in gradients]
        if mean:  # Keras refuses an empty list, and a partition may be without variables
            optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
        return loss.outputs, outputs.outputs

    call = tf.function(whole) if outer else whole
    seen = []
    for step in range(steps):
        x, y = data(case, step)
        losses, outputs = call(tf.constant(x), tf.constant(y))
        seen += [(a.numpy(), b.numpy()) for a, b in zip(losses, outputs, strict=True)]
    return seen, named(model.variables), len(model.trainable_variables)


def check(case: KerasCase, found: list[Any], steps: int, outer: bool = False) -> None:
    """Compare what the ranks of one replica found with the unpartitioned model, bit for bit."""
    seen, variables = unpartitioned(case, steps, outer)
    for rank, (mine, _, _) in enumerate(found):
        assert len(mine) == len(seen)
        for at, (one, other) in enumerate(zip(mine, seen, strict=True)):
            # NaN is equal to NaN: a drawn model may diverge.
            np.testing.assert_array_equal(one[0], other[0], f"rank {rank}: loss {at}")
            np.testing.assert_array_equal(one[1], other[1], f"rank {rank}: outputs {at}")
    names = [name for _, own, _ in found for name in own]
    assert sorted(names) == sorted(variables)  # each belongs to one rank
    for _, own, _ in found:
        for name, value in own.items():
            np.testing.assert_array_equal(value, variables[name], name)


def trainable(case: KerasCase) -> list[str]:
    """The names of the trainable variables of the unpartitioned model, in the order of the alphabet."""
    model = build(case, tf.keras.Model, lambda _: contextlib.nullcontext())
    model(tf.constant(data(case, 0)[0]))
    return sorted(named(model.trainable_variables))


def predicted(case: KerasCase, x: Any) -> Any:
    """The predictions of the unpartitioned model for a batch, after one step of training."""
    model = build(case, tf.keras.Model, lambda _: contextlib.nullcontext())
    _trained(case, model, 1, outer=False)
    return model(tf.constant(x), training=False).numpy()
