"""The automatic partition: layers in their order, balanced by cost, decided by one rank."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.tensorflow import auto
from tests.smp_core.tensorflow.small_models import Net, X, name, trained_automatically


def automatic() -> list[str]:
    model = Net()
    smp.step(lambda x: model(x))(tf.constant(X))
    return [name(each)[0] for each in model.trainable_variables]


def test_automatic_partition_gives_each_rank_layers_in_their_order(smp_world: Any) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    assert smp_world.run(automatic, ranks=2, config=config) == [["one", "one"], ["two", "two"]]


@pytest.mark.parametrize("others", [0, 9])
def test_a_network_in_one_attribute_is_split(smp_world: Any, others: int) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    found = smp_world.run(trained_automatically, "held", others, ranks=2, config=config)
    assert found == [[9, 3], [9, 3, 6, 2]]


def test_the_first_rank_decides_the_automatic_partition(
    smp_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = auto.decide

    def differing(*args: Any) -> dict[str, int]:
        return dict.fromkeys(decide(*args), 1) if smp.rank() else decide(*args)

    monkeypatch.setattr(auto, "decide", differing)
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    assert smp_world.run(automatic, ranks=2, config=config) == [["one", "one"], ["two", "two"]]


@pytest.mark.parametrize(
    ("costs", "count", "trains", "bounds"),
    [
        ([1, 1, 1, 1], 2, None, [(0, 2), (2, 4)]),
        ([5, 1, 1, 1], 2, None, [(0, 1), (1, 4)]),
        ([1, 1, 1, 9], 2, None, [(0, 3), (3, 4)]),
        ([4], 3, None, None),
        ([], 2, None, [(0, 0), (0, 0)]),
        # The expensive one trains nothing: alone it would leave a rank without variables.
        ([1, 1, 9], 2, [True, True, False], [(0, 1), (1, 3)]),
        ([9, 1, 1], 2, [False, True, True], [(0, 2), (2, 3)]),
        ([9, 1, 1], 3, [False, True, True], [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_the_split_is_balanced(
    costs: list[int], count: int, trains: list[bool] | None, bounds: Any
) -> None:
    found = auto.split(costs, count, trains)
    assert len(found) == count
    assert [at for start, end in found for at in range(start, end)] == list(range(len(costs)))
    assert bounds is None or found == bounds
