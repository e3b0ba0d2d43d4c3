"""Valid configurations: they are valid, every key and hard case occurs, and they shrink to {}."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pytest_smp.strategies import configs
from smp_core.config import ALIASES, IGNORED_KEYS, Config, IgnoredKeyWarning

Drawn = Callable[..., list[Any]]
Minimal = Callable[..., Any]


@pytest.fixture(scope="module")
def found(drawn: Drawn) -> list[dict[str, Any]]:
    return drawn(configs(8), 800)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12])
def test_they_are_valid_in_their_world(size: int, drawn: Drawn) -> None:
    for parameters in drawn(configs(size), 100):
        Config.parse(parameters).check_world(size)


def test_every_key_that_is_known_occurs_and_most_are_left_out(found: list[Any]) -> None:
    keys = Counter(key for parameters in found for key in parameters)
    assert set(keys) == {*Config.model_fields, *ALIASES}
    assert {} in found
    assert sum(len(parameters) for parameters in found) / len(found) < 10


def test_every_default_is_departed_from(found: list[Any]) -> None:
    defaults = dict(Config())
    departed = set()
    for parameters in found:
        config = Config.parse(parameters)
        departed |= {key for key, value in config if value != defaults[key]}
    assert departed == set(defaults)


@pytest.mark.parametrize(
    "condition",
    [
        lambda c: c.get("sharded_data_parallel_degree", 1) > 1,
        lambda c: c.get("sharded_data_parallel_degree", 1) > 1 and c.get("bf16"),
        lambda c: (
            c.get("sharded_data_parallel_degree", 1) > 1 and c.get("tensor_parallel_degree", 1) > 1
        ),
        lambda c: (
            c.get("tensor_parallel_degree", 1) > 1 and c.get("pipeline_parallel_degree", 1) > 1
        ),
        lambda c: c.get("tensor_parallel_degree") == 1,  # said, though it is the default
        lambda c: "partitions" in c and "pipeline_parallel_degree" in c,
        lambda c: c.get("auto_partition", True) in (False, 0),
        lambda c: c.get("ddp") == 1 and c.get("ddp") is not True,
        lambda c: c.get("sdp_reduce_bucket_size") == 5e8,
    ],
    ids=["sdp", "bf16", "sdp+tp", "tp+pp", "tp=1", "alias", "manual", "ddp=1", "5e8"],
)
def test_hard_cases_are_drawn(condition: Callable[[Any], Any], found: list[Any]) -> None:
    assert any(map(condition, found))


def test_they_shrink_to_what_is_needed(minimal: Minimal) -> None:
    assert minimal(configs(8)) == {}
    assert minimal(configs(8), lambda c: "microbatches" in c) == {"microbatches": 1}
    assert minimal(configs(8), lambda c: c.get("tensor_parallel_degree", 1) > 1) == {
        "tensor_parallel_degree": 2,
        "ddp": True,
    }
    assert minimal(configs(8), lambda c: c.get("auto_partition") is False) == {
        "auto_partition": False,
        "default_partition": 0,
    }
    assert minimal(configs(8), lambda c: c.get("bf16")) == {
        "sharded_data_parallel_degree": 2,
        "bf16": True,
    }


def test_ignored_keys_occur_on_request_only(drawn: Drawn) -> None:
    without = {key for parameters in drawn(configs(4), 100) for key in parameters}
    assert without.isdisjoint(IGNORED_KEYS)
    seen = set()
    for parameters in drawn(configs(4, ignored=True), 200):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IgnoredKeyWarning)
            Config.parse(parameters).check_world(4)
        seen |= set(parameters)
    assert seen >= set(IGNORED_KEYS)
