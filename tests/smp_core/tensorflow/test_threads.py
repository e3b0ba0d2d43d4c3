"""A step inside of a function needs two threads of TensorFlow's, and a function that an operation of it calls needs
more: it has them on one core, and says when it has not.
"""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import tensorflow as tf

import smp_core.tensorflow as smp

smp.init({"microbatches": 2})


class Model(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)


model = Model()
step = smp.step(lambda x: tf.reduce_sum(model(x)))
train = tf.function(lambda x: step(x).reduce_sum())
print(float(train(tf.ones((4, 3)))))
"""


#: An operation of the model calls a function, which needs a thread beside that of the operation and that of the step.
CALLING = SCRIPT.replace(
    "        return self.dense(x)",
    "        return tf.ensure_shape(tf.py_function(doubled, [self.dense(x)], tf.float32), (None, 1))",
).replace("model = Model()", "doubled = tf.function(lambda x: x * 2.0)\nmodel = Model()")


def ran(threads: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TF_NUM_INTEROP_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_step_runs_on_one_core() -> None:
    found = ran("")
    assert found.returncode == 0, found.stderr
    assert found.stdout == "12.0\n"


def test_one_thread_is_refused() -> None:
    found = ran("1")
    assert found.returncode == 1
    assert "TensorFlow has one inter-op thread" in found.stderr
    assert "Set TF_NUM_INTEROP_THREADS=2" in found.stderr


def test_an_operation_of_a_step_may_call_a_function() -> None:
    found = ran("", CALLING)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "24.0\n"
