"""Properties of configurations: valid ones are accepted, and broken rules refused before a rank starts."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

import smp_core.torch as smp
from conformance.cases.draws import divisors, on_ranks, sizes, worlds
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld, TmpPath
from pytest_smp.strategies import configs, placements
from smp_core.errors import ConfigError

#: Valid values of keys that occur in no rule between keys (API 3.1, 3.3).
neutral = st.fixed_dictionaries(
    {},
    optional={
        "microbatches": st.integers(1, 16),
        "pipeline": st.sampled_from(["interleaved", "simple"]),
        "optimize": st.sampled_from(["memory", "speed"]),
        "memory_weight": st.floats(0, 1),
        "active_microbatches": st.integers(1, 16),
        "deterministic_server": st.booleans(),
        "skip_tracing": st.booleans(),
        "offload_activations": st.booleans(),
        "activation_loading_horizon": st.integers(1, 8),
        "placement_strategy": st.sampled_from(["cluster", "spread", "PTD", "TDP"]),
    },
)


def leave_trace(trace: Path) -> None:
    """Show that a rank has started."""
    trace.touch()


def initialize(config: dict[str, Any]) -> tuple[str | None, bool]:
    """Call init; return the text of its ConfigError, or None, and whether the rank is then initialised."""
    try:
        smp.init(config)
    except ConfigError as error:
        return str(error), smp.is_initialized()
    return None, smp.is_initialized()


def check_refused(
    smp_world: SmpWorld, folder: TmpPath, config: dict[str, Any], ranks: int, names: list[str]
) -> None:
    """Check that a configuration is refused before a rank starts, and by init on every rank.

    Every error must contain all of ``names``.
    """
    trace = folder.fresh() / "started"
    with pytest.raises(ConfigError) as refused:
        smp_world.run(leave_trace, trace, ranks=ranks, config=config)
    assert not trace.exists()
    messages = [str(refused.value)]
    for message, initialized in smp_world.run(initialize, config, ranks=ranks, init=False):
        assert message is not None, f"init accepted {config}"
        assert not initialized
        messages.append(message)
    for name in names:
        assert all(name in message for message in messages)


def initialize_by_rank(configs: list[dict[str, Any]], ranks: list[int]) -> tuple[str | None, bool]:
    """Call init as ``initialize`` does, with the configuration whose index ``ranks`` has for this rank."""
    smp.init()
    rank = smp.rank()
    smp.shutdown()
    return initialize(configs[ranks[rank]])


@requirement("CONF-AGREED")
@pytest.mark.filterwarnings("ignore::smp_core.config.IgnoredKeyWarning")  # drawn as well
@given(data=st.data())
@on_ranks
def test_configurations_that_differ_are_refused(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world, 2), "ranks")
    first, second = data.draw(st.tuples(neutral, neutral), "configurations")
    count = data.draw(st.integers(1, 15), "microbatches")
    first["microbatches"], second["microbatches"] = count, count + 1
    # A key that a rank leaves out has its default (API 3.1).
    if count == 1 and data.draw(st.booleans(), "left out"):
        del first["microbatches"]
    has = data.draw(st.lists(st.sampled_from([0, 1]), min_size=ranks, max_size=ranks), "has")
    assume(len({*has}) == 2)
    seen = smp_world.run(initialize_by_rank, [first, second], has, ranks=ranks, init=False)
    assert {initialized for _, initialized in seen} == {False}
    assert len({*seen}) == 1
    message = str(seen[0][0])
    for index, config in enumerate([first, second]):
        value, members = config.get("microbatches", 1), [r for r in range(ranks) if has[r] == index]
        (text,) = re.findall(rf"\n  microbatches: .*?\b{value} on ranks? ([\d, -]+)", message)
        assert members_of(text) == members
    for key in first.keys() & second.keys():
        assert (f"  {key}: " in message) == (first[key] != second[key])


def members_of(text: str) -> list[int]:
    """The ranks of a text such as 0-2, 5."""
    bounds = [part.partition("-") for part in text.replace(" ", "").strip(",").split(",")]
    return [rank for low, _, high in bounds for rank in range(int(low), int(high or low) + 1)]


@requirement("CONF-VALID")
@pytest.mark.filterwarnings("ignore::smp_core.config.IgnoredKeyWarning")  # drawn as well
@given(data=st.data())
@on_ranks
def test_what_is_valid_is_accepted(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    placement = data.draw(placements(), "placement")
    config = {**data.draw(configs(ranks), "config"), "placement_strategy": placement}
    seen = smp_world.run(initialize, config, ranks=ranks, init=False)
    assert seen == [(None, True)] * ranks


def initialize_and_count(config: dict[str, Any]) -> int:
    """Call init and return the number of partitions."""
    smp.init(config)
    return smp.pp_size()


@requirement("CONF-PARTITIONS")
@given(data=st.data())
@on_ranks
def test_partitions_is_an_alias(smp_world: SmpWorld, data: st.DataObject) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    degree = data.draw(st.sampled_from(divisors(ranks)), "degree")
    both = {"partitions": degree, "pipeline_parallel_degree": degree}
    chosen = data.draw(st.sets(st.sampled_from(list(both)), min_size=1), "names")
    config = {name: both[name] for name in both if name in chosen}
    assert smp_world.run(initialize_and_count, config, ranks=ranks, init=False) == [degree] * ranks


@requirement("CONF-PARTITIONS")
@given(one=st.integers(1, 8), other=st.integers(1, 8))
@on_ranks
def test_unequal_partitions_are_refused(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, one: int, other: int
) -> None:
    assume(one != other)
    config = {"partitions": one, "pipeline_parallel_degree": other}
    check_refused(smp_world, smp_tmp_path, config, 1, list(config))


@requirement("CONF-UNKNOWN-KEY")
@given(
    key=st.sampled_from(["tracing", "microbatch", "DDP", "pipeline_parallel_size", "tp", "x" * 40]),
    others=neutral,
)
@on_ranks
def test_an_unknown_key_is_refused(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, key: str, others: dict[str, Any]
) -> None:
    check_refused(smp_world, smp_tmp_path, {**others, key: 1}, 1, [key])


#: Values that the documentation excludes.
BAD_VALUES: dict[str, list[Any]] = {
    "pipeline_parallel_degree": [0, -1, 1.5, "two"],
    "partitions": [0, -2, 0.5],
    "microbatches": [0, -4, 2.5, "four"],
    "tensor_parallel_degree": [0, -2, "2x"],
    "sharded_data_parallel_degree": [0, -2, "all"],
    "active_microbatches": [0, -1],
    "pipeline": ["gpipe", "Interleaved", 1],
    "optimize": ["size", 0],
    "placement_strategy": ["clusters", "DP", "DPP", "dpt", "DPTT", ""],
    "auto_partition": ["yes", 2],
    "ddp": ["true", 2],
    "memory_weight": [-0.1, 1.1, "half"],
    "default_partition": [-1, "first"],
    "activation_loading_horizon": [0, -4],
    "sdp_gradient_clipping": ["none"],
}


@requirement("CONF-VALUE")
@pytest.mark.parametrize("key", BAD_VALUES)
def test_a_bad_value_is_refused(smp_world: SmpWorld, smp_tmp_path: TmpPath, key: str) -> None:
    for value in BAD_VALUES[key]:
        check_refused(smp_world, smp_tmp_path, {key: value}, 1, [key])


@requirement("CONF-WORLD-SIZE")
@given(data=st.data())
@on_ranks
def test_a_world_that_does_not_factor_is_refused(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, data: st.DataObject
) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    pipeline = data.draw(st.integers(1, 9), "pipeline")
    tensor = data.draw(st.integers(1, 9), "tensor")
    assume(ranks % (pipeline * tensor))
    config = {
        **data.draw(neutral, "others"),
        "pipeline_parallel_degree": pipeline,
        "tensor_parallel_degree": tensor,
        "ddp": True,
    }
    check_refused(smp_world, smp_tmp_path, config, ranks, ["pipeline_parallel_degree", str(ranks)])


#: Configurations that break one rule between keys, and the keys that the refusal names. Each one is tried
#: in a world of the right size, so that no other rule is broken.
BROKEN_RULES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("CONF-TENSOR-DDP", {"tensor_parallel_degree": 2}, ["tensor_parallel_degree", "ddp"]),
    (
        "CONF-TENSOR-DDP",
        {"tensor_parallel_degree": 2, "ddp": False},
        ["tensor_parallel_degree", "ddp"],
    ),
    ("CONF-BF16-SHARDED", {"bf16": True}, ["bf16", "sharded_data_parallel_degree"]),
    (
        "CONF-BF16-SHARDED",
        {"bf16": True, "sharded_data_parallel_degree": 1},
        ["bf16", "sharded_data_parallel_degree"],
    ),
    (
        "CONF-FP16-BF16",
        {"fp16": True, "bf16": True, "sharded_data_parallel_degree": 2, "ddp": True},
        ["fp16", "bf16"],
    ),
    (
        "CONF-SHARDED-PIPELINE",
        {"sharded_data_parallel_degree": 2, "pipeline_parallel_degree": 2, "ddp": True},
        ["sharded_data_parallel_degree", "pipeline_parallel_degree"],
    ),
    (
        "CONF-SHARDED-PIPELINE",
        {"sharded_data_parallel_degree": 2, "partitions": 2, "ddp": True},
        ["sharded_data_parallel_degree", "partitions"],
    ),
    (
        "CONF-SHARDED-OPTIMIZER",
        {"sharded_data_parallel_degree": 2, "shard_optimizer_state": True, "ddp": True},
        ["sharded_data_parallel_degree", "shard_optimizer_state"],
    ),
    (
        "CONF-SHARDED-PRESCALED",
        {"sharded_data_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True},
        ["sharded_data_parallel_degree", "tensor_parallel_degree", "prescaled_batch"],
    ),
    ("CONF-DEFAULT-PARTITION", {"auto_partition": False}, ["auto_partition", "default_partition"]),
    (
        "CONF-DEFAULT-PARTITION",
        {"auto_partition": False, "default_partition": 2, "pipeline_parallel_degree": 2},
        ["default_partition", "pipeline_parallel_degree"],
    ),
]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        pytest.param(config, names, marks=requirement(id), id=f"{id}-{', '.join(config)}")
        for id, config, names in BROKEN_RULES
    ],
)
@given(others=neutral)
@on_ranks
def test_a_broken_rule_is_refused(
    smp_world: SmpWorld,
    smp_tmp_path: TmpPath,
    config: dict[str, Any],
    names: list[str],
    others: dict[str, Any],
) -> None:
    degrees = ("pipeline_parallel_degree", "partitions", "tensor_parallel_degree")
    fitting = math.prod(config.get(key, 1) for key in (*degrees, "sharded_data_parallel_degree"))
    ranks = min(fitting, smp_world.ranks)
    check_refused(smp_world, smp_tmp_path, {**others, **config}, ranks, names)


@requirement("CONF-SHARDED-DIVIDES")
@given(data=st.data())
@on_ranks
def test_sharding_divides_reduced_data(
    smp_world: SmpWorld, smp_tmp_path: TmpPath, data: st.DataObject
) -> None:
    world = data.draw(worlds(smp_world), "world")
    degree = data.draw(st.integers(2, 9), "degree")
    assume((world.size // world.tensor) % degree)
    config = {
        "tensor_parallel_degree": world.tensor,
        "sharded_data_parallel_degree": degree,
        "ddp": True,
        "prescaled_batch": True,
    }
    # No pipeline degree is given, because another rule excludes a pipeline with sharding.
    check_refused(smp_world, smp_tmp_path, config, world.size, ["sharded_data_parallel_degree"])
