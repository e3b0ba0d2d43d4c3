"""Invalid configurations: each is refused for its one mistake, and every kind of mistake occurs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_smp.strategies import invalid_configs
from pytest_smp.strategies.mistakes import BAD_VALUES, BREACHES, KNOWN_NAMES, unknown_keys
from smp_core.config import ALIASES, RULES, Config
from smp_core.errors import ConfigError

Drawn = Callable[..., list[Any]]
Minimal = Callable[..., Any]


@pytest.fixture(scope="module")
def found(drawn: Drawn) -> list[Any]:
    return drawn(invalid_configs(8), 1500)


def complaint(parameters: dict[str, Any], size: int = 8) -> str:
    """Why ``parameters`` are refused; empty if they are not."""
    try:
        Config.parse(parameters).check_world(size)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_each_is_refused_once_with_the_keys_named(
    size: int, found: list[Any], drawn: Drawn
) -> None:
    for parameters, keys in found if size == 8 else drawn(invalid_configs(size), 200):
        message = complaint(parameters, size)
        assert message, parameters
        assert all(key in message for key in keys), (parameters, keys, message)
        assert len(message.splitlines()) == 1, (parameters, message)  # nothing else is wrong


def test_a_misspelt_key_is_all_that_is_wrong(found: list[Any]) -> None:
    for parameters, keys in found:
        if keys[0] not in KNOWN_NAMES:
            rest = {key: value for key, value in parameters.items() if key != keys[0]}
            Config.parse(rest).check_world(8)


def test_free_keys_surround_a_mistake(found: list[Any]) -> None:
    assert sum(len(parameters) > len(keys) + 1 for parameters, keys in found) > len(found) / 3


def test_the_tables_cover_every_key_and_every_rule() -> None:
    assert set(KNOWN_NAMES) == {*Config.model_fields, *ALIASES}
    assert set(BAD_VALUES) == set(KNOWN_NAMES)
    named = {frozenset(breach.keys) for breach in BREACHES}
    assert named >= {frozenset(rule.keys) for rule in RULES}


def test_every_kind_of_mistake_is_drawn(found: list[Any]) -> None:
    bad = {
        keys[0] for each, keys in found if len(keys) == 1 and each[keys[0]] in BAD_VALUES[keys[0]]
    }
    assert len(bad) > len(KNOWN_NAMES) / 3
    broken = {keys for _, keys in found} & {breach.keys for breach in BREACHES}
    assert len(broken) > len(BREACHES) / 2
    typos = [keys for _, keys in found if keys[0] not in KNOWN_NAMES]
    assert len(typos) > 100
    assert all(len(keys) == 2 and keys[1] in KNOWN_NAMES for keys in typos)


@pytest.mark.parametrize("key", KNOWN_NAMES)
def test_every_bad_value_of_a_key_is_refused(key: str) -> None:
    beside = {"ddp": True} if key in ("ddp_port", "ddp_dist_backend") else {}
    for value in BAD_VALUES[key]:
        assert key in complaint({**beside, key: value}), value


def test_every_misspelling_is_refused_with_the_key_that_was_meant() -> None:
    typos = list(unknown_keys())
    assert len(typos) > 500
    for parameters, keys in typos:
        assert all(key in complaint(parameters) for key in keys), keys
    assert {meant for _, (_, meant) in typos} == set(KNOWN_NAMES)


@pytest.mark.parametrize("rule", BREACHES, ids=lambda rule: "-".join(rule.keys))
def test_every_rule_is_broken(rule: Any, minimal: Minimal) -> None:
    parameters, _ = minimal(invalid_configs(8), lambda drawn: drawn[1] == rule.keys)
    assert complaint(parameters)
    assert set(parameters) <= {*rule.keys, *rule.degrees, *rule.parameters}


@pytest.mark.parametrize("name", ["pipeline_parallel_degree", "partitions"])
def test_degrees_that_do_not_fit_and_partitions_that_do_not_exist(
    name: str, minimal: Minimal
) -> None:
    beyond = minimal(
        invalid_configs(6), lambda d: d[1] == ("default_partition", name) and d[0].get(name, 1) > 1
    )
    assert beyond[0] == {name: 2, "default_partition": 2}
    misfit = minimal(
        invalid_configs(6), lambda d: d[1] == ("pipeline_parallel_degree", "tensor_parallel_degree")
    )
    assert misfit[0] == {
        "pipeline_parallel_degree": 2,
        "tensor_parallel_degree": 2,
        "ddp": True,
    }


def test_what_mistakes_shrink_to(minimal: Minimal) -> None:
    def shrunk(*keys: str) -> Any:
        return minimal(invalid_configs(8), lambda drawn: drawn[1] == keys)[0]

    assert minimal(invalid_configs(8)) == ({"microbatches": 0}, ("microbatches",))
    assert shrunk("tensor_parallel_degree", "ddp") == {"tensor_parallel_degree": 2}
    assert shrunk("bf16", "sharded_data_parallel_degree") == {"bf16": True}
    assert shrunk("partitions", "pipeline_parallel_degree") == {
        "partitions": 1,
        "pipeline_parallel_degree": 2,
    }
    sharded_over_tensors = minimal(
        invalid_configs(8),
        lambda drawn: drawn[1] == ("sharded_data_parallel_degree",) and "ddp" in drawn[0],
    )
    assert sharded_over_tensors[0] == {  # 8.3: it must divide 8 / 2
        "tensor_parallel_degree": 2,
        "ddp": True,
        "sharded_data_parallel_degree": 8,
        "prescaled_batch": True,
    }


def test_a_world_of_one_rank_breaks_no_rule_between_degrees(drawn: Drawn) -> None:
    seen = {keys for _, keys in drawn(invalid_configs(1), 400)}
    assert ("bf16", "sharded_data_parallel_degree") in seen
    assert ("sharded_data_parallel_degree", "pipeline_parallel_degree") not in seen
