"""One step on one rank: what is made once and used by every later step."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.tensorflow import runner

CONFIG = {
    "pipeline_parallel_degree": 2,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
}


class Net(smp.DistributedModel):
    """A layer on each of two partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (tf.keras.layers.Dense(2, kernel_initializer="ones") for _ in range(2))

    def call(self, x: Any) -> Any:
        x = self.one(x)
        with smp.partition(1):
            return self.two(x)


def steps(sizes: list[int]) -> list[float]:
    model = Net()
    step = smp.step(lambda x: tf.reduce_sum(model(x)))
    return [float(step(tf.ones((size, 2))).reduce_sum()) for size in sizes]


def test_the_order_of_a_step_is_made_once_for_each_of_its_plans(
    smp_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    orders = runner.orders
    monkeypatch.setattr(runner, "orders", lambda *args: made.append(1) or orders(*args))
    found = smp_world.run(steps, [4, 4, 6, 4, 6], ranks=2, config=CONFIG)
    assert found == [[8.0 * size for size in (4, 4, 6, 4, 6)]] * 2
    assert len(made) == 2 * 2  # two ranks, two sizes
