"""A digits classifier in Keras, trained over however many ranks there are: a plain script of the SMP API.

    python train.py                                     # alone
    mpiexec -n 2 python train.py --pipeline 2           # two partitions, placed by hand
    mpiexec -n 2 python train.py --pipeline 2 --auto    # placed automatically
    mpiexec -n 4 python train.py --pipeline 2           # two pipelines of two partitions
    python train.py --plain                             # plain Keras

The curve of losses is that of plain Keras for one pipeline, whatever its partitions are; with ``--exact`` to the bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import smp_core.tensorflow as smp


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a training. ``batch`` is for all replicas together, ``microbatches`` for each replica."""

    pipeline: int = 1  # partitions
    microbatches: int = 2
    auto: bool = False  # partition automatically, not by hand
    exact: bool = False  # without the passes of TensorFlow that fuse operations of several segments
    steps: int = 60
    batch: int = 64
    checkpoints: str = ""  # a folder; training goes on from its latest checkpoint
    model: str = ""  # a folder for the trained model
    curve: str = ""  # a file for the losses of all steps, as JSON
    plain: bool = False


def layers() -> list[tf.keras.layers.Layer]:
    """The same layers on every rank: their weights are drawn from seeds."""

    def start(seed: int) -> tf.keras.initializers.Initializer:
        return tf.keras.initializers.GlorotUniform(seed=seed)

    return [
        tf.keras.layers.Conv2D(8, 3, activation="relu", kernel_initializer=start(1)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(48, activation="relu", kernel_initializer=start(2)),
        tf.keras.layers.Dense(10, kernel_initializer=start(3)),
    ]


class Classifier(smp.DistributedModel):
    """Images of (N, 8, 8, 1) to logits of (N, 10). Layers in no context are in the default partition, 0."""

    def __init__(self, partitions: int) -> None:
        super().__init__()
        self.conv, self.flatten, self.dense, self.head = layers()
        self.last = partitions - 1

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.flatten(self.conv(x))
        with smp.partition(self.last):
            return self.head(self.dense(x))


def data() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images of 8 x 8, as (N, 8, 8, 1), and the digits that they show, (N,)."""
    images, digits = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32).reshape(-1, 8, 8, 1), digits


def batches(options: Options, count: int) -> Iterator[np.ndarray]:
    """The indices of each step's batch, the same on every rank."""
    random = np.random.default_rng(0)
    for _ in range(options.steps):
        yield random.integers(0, count, options.batch)


def train(options: Options) -> list[float]:
    """Every rank calls this. Gives the loss of its replica for each step that it ran."""
    smp.init(
        {
            "partitions": options.pipeline,
            "microbatches": options.microbatches,
            "auto_partition": options.auto,
            "default_partition": 0,
            "horovod": True,  # gradients are averaged over replicas
        }
    )
    images, digits = data()
    model = Classifier(smp.pp_size())
    optimizer = tf.keras.optimizers.Adam(0.003)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    done = tf.Variable(0, trainable=False)

    @smp.register_post_partition_hook
    def tell() -> None:
        names = ", ".join(str(tuple(each.shape)) for each in model.trainable_variables)
        print(f"rank {smp.rank()}, partition {smp.pp_rank()}: variables of shapes {names}")

    @smp.step
    def gradients_of(x: tf.Tensor, y: tf.Tensor):
        loss = loss_of(y, model(x, training=True))
        return loss, optimizer.get_gradients(loss, model.trainable_variables)

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss, gradients = gradients_of(x, y)
        mean = [each.accumulate() for each in gradients]
        if mean:  # Keras refuses an empty list, and an automatic partition may be without variables
            optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    @smp.step
    def predict(x: tf.Tensor) -> tf.Tensor:
        return model(x, training=False)

    manager = None
    if options.checkpoints:
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, done=done)
        manager = smp.CheckpointManager(checkpoint, options.checkpoints, max_to_keep=2)
        manager.restore()

    share = options.batch // smp.dp_size()
    curve: list[float] = []
    for step, indices in enumerate(batches(options, len(images))):
        if step < int(done):
            continue
        mine = indices[smp.dp_rank() * share :][:share]
        curve.append(float(train_step(tf.constant(images[mine]), tf.constant(digits[mine]))))
        done.assign_add(1)
        if manager is not None and (step + 1) % 10 == 0:
            manager.save()

    whole = len(images) // options.microbatches * options.microbatches
    logits = predict(tf.constant(images[:whole])).merge()
    right = float(np.mean(np.argmax(logits, 1) == digits[:whole]))
    if options.model:
        model.save_model(options.model)
    report(curve, right, smp.rank() == 0)
    return curve


def plain(options: Options) -> list[float]:
    """The same in plain Keras: a batch is split into microbatches, whose gradients are averaged."""
    images, digits = data()
    model = tf.keras.Sequential([tf.keras.Input((8, 8, 1)), *layers()])
    optimizer = tf.keras.optimizers.Adam(0.003)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer.build(model.trainable_variables)

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        losses, sums = [], None
        for one, digit in zip(
            tf.split(x, options.microbatches), tf.split(y, options.microbatches), strict=True
        ):
            with tf.GradientTape() as tape:
                loss = loss_of(digit, model(one, training=True))
            found = tape.gradient(loss, model.trainable_variables)
            sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
            losses.append(loss)
        mean = [each / options.microbatches for each in sums]
        optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
        return tf.add_n(losses) / options.microbatches

    curve = [
        float(train_step(tf.constant(images[each]), tf.constant(digits[each])))
        for each in batches(options, len(images))
    ]
    right = float(np.mean(np.argmax(model(tf.constant(images)), 1) == digits))
    report(curve, right, True)
    return curve


def report(curve: list[float], right: float, first: bool) -> None:
    if first:
        for step in range(0, len(curve), 10):
            print(f"step {step:3}  loss {curve[step]:.6f}")
        print(f"{len(curve)} steps  right {right:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Options):
        kind = {"action": "store_true"} if field.type == "bool" else {"type": type(field.default)}
        parser.add_argument(f"--{field.name}", default=field.default, **kind)
    options = Options(**vars(parser.parse_args()))
    if options.exact:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        tf.config.threading.set_intra_op_parallelism_threads(1)
    curve = (plain if options.plain else train)(options)
    if options.curve and (options.plain or smp.rank() == 0):
        Path(options.curve).write_text(json.dumps(curve))


if __name__ == "__main__":
    main()
