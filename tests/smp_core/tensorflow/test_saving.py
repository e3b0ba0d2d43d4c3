"""The whole model as a SavedModel, which plain TensorFlow loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import smp_core.tensorflow as smp
from conformance.cases.keras_script import (
    SAMPLES,
    build,
    data,
    loss_and_gradients,
    make_optimizer,
    named,
)
from tests.smp_core.tensorflow.keras_training import CASE, Training


class Masked(smp.DistributedModel):
    """A model of two tensors."""

    def call(self, x: Any, training: bool = False, mask: Any = None) -> Any:
        return x if mask is None else x * mask


def saved_by_name(folder: str) -> Any:
    model = Masked()
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    smp.step(lambda x, mask: model(x, training=True, mask=mask))(x, x)
    model.save_model(folder)
    served = tf.saved_model.load(folder).signatures["serving_default"]
    _, named_inputs = served.structured_input_signature
    return served(**dict.fromkeys(named_inputs, x))["output_0"].numpy()


def test_a_saved_model_takes_the_arguments_that_were_given_by_name(
    smp_world: Any, tmp_path: Path
) -> None:
    config = CASE.config(pipeline_parallel_degree=1)
    (found,) = smp_world.run(saved_by_name, str(tmp_path), ranks=1, config=config)
    np.testing.assert_array_equal(found, [[1.0, 4.0], [9.0, 16.0]])


def saved(folder: str) -> Any:
    training = Training(f"{folder}/checkpoints")
    training.step(0)
    training.model.save_model(f"{folder}/model")
    training.step(1)  # the ranks have again what they own
    return named(training.model.variables)


LOADS = """
import sys, numpy as np, tensorflow as tf
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
model = tf.saved_model.load(sys.argv[1])
found = model.signatures["serving_default"](tf.constant(np.load(sys.argv[2])))["output_0"]
np.save(sys.argv[3], found.numpy())
assert not [name for name in sys.modules if name.startswith("smp_core")]
"""


def test_a_saved_model_is_whole_and_needs_nothing_of_ours(smp_world: Any, tmp_path: Path) -> None:
    smp_world.run(saved, str(tmp_path), ranks=2, config=CASE.config())
    x, _ = data(CASE, 9)
    np.save(tmp_path / "x.npy", x)
    names = [str(tmp_path / each) for each in ("model", "x.npy", "found.npy")]
    done = subprocess.run(
        [sys.executable, "-c", LOADS, *names],
        cwd=tmp_path,
        env={"PATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=120,
    )
    assert done.returncode == 0
    wanted = smp_world.run(predicted, x, ranks=1, config=CASE.config(pipeline_parallel_degree=1))
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), wanted[0])


def predicted(x: Any) -> Any:
    """The predictions of the unpartitioned model after the step."""
    import contextlib

    model = build(CASE, tf.keras.Model, lambda _: contextlib.nullcontext())
    optimizer = make_optimizer(CASE)
    first, target = data(CASE, 0)
    body = tf.function(lambda x, y: loss_and_gradients(CASE, model, optimizer, x, y)[2])
    one = body.get_concrete_function(tf.constant(first[:SAMPLES]), tf.constant(target[:SAMPLES]))
    parts = [
        one(tf.constant(first[at : at + SAMPLES]), tf.constant(target[at : at + SAMPLES]))
        for at in (0, SAMPLES)
    ]
    mean = [(a + b) / 2 for a, b in zip(*parts, strict=True)]
    optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
    return model(tf.constant(x), training=False).numpy()
