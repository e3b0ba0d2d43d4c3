"""The state of training on one rank: a session for each simulated rank, and the configurations that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from smp_core.errors import SmpError
from smp_core.tensorflow import session as sessions
from tests.smp_core.tensorflow.small_models import MANUAL, GivenCall, Net, plain


def sessions_by_rank() -> int:
    Net()
    return sessions.current("test").partition


def test_each_simulated_rank_has_a_session(smp_world: Any) -> None:
    assert smp_world.run(sessions_by_rank, ranks=2, config=MANUAL) == [0, 1]


def test_functions_run_eagerly_in_ranks_alone(smp_world: Any) -> None:
    def eager() -> bool:
        GivenCall(plain)
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
        smp_world.run(sessions_by_rank, ranks=2, config=config)
