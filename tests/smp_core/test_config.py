"""The configuration against API 3 and AWS Sharded Data Parallelism: defaults, bad values, rules, worlds."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_core.config import IGNORED_KEYS, RULES, Config, IgnoredKeyWarning
from smp_core.errors import ConfigError

# ---- What the specification says, written down a second time -------------------------------------

#: API 3.1 to 3.3. Where these tables say unknown or none: what `smp_core.config` decided, and says why.
DEFAULTS = {
    "pipeline_parallel_degree": 1,
    "microbatches": 1,
    "pipeline": "interleaved",
    "optimize": "memory",
    "placement_strategy": "cluster",
    "auto_partition": True,
    "default_partition": 0,
    "contiguous": True,
    "horovod": False,
    "xla": False,  # ?
    "fork": False,  # ?
    "memory_weight": 0.8,  # the value for optimize="memory"
    "ddp": False,
    "ddp_port": None,  # dash
    "ddp_dist_backend": "auto",
    "active_microbatches": 3,  # partitions + 2
    "deterministic_server": False,
    "offload_activations": False,
    "activation_loading_horizon": 4,
    "tensor_parallel_degree": 1,
    "fp16": False,
    "fp16_params": False,
    "bf16": False,
    "shard_optimizer_state": False,
    "prescaled_batch": False,
    "skip_tracing": False,
    "delayed_parameter_initialization": False,  # ?
    "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 5e8,
    "sdp_param_persistence_threshold": 1e6,
    "sdp_max_live_parameters": 1e9,
    "sdp_hierarchical_allgather": True,
    "sdp_gradient_clipping": 1.0,
    "ranks_per_node": None,  # no published key
    "load_partition": False,  # dash
    "partition_file": None,  # dash
}

#: API 3.1, 8.5.
ALIAS = {"partitions": "pipeline_parallel_degree"}

#: "since" in API 3.1 and 3.3; every other key has none.
SINCE = {
    "pipeline_parallel_degree": "1.6",
    "ddp_dist_backend": "1.13",
    "active_microbatches": "1.3",
    "deterministic_server": "1.3",
    "offload_activations": "1.6",
    "activation_loading_horizon": "1.6",
    "tensor_parallel_degree": "1.6",
    "fp16": "1.10",
    "fp16_params": "1.6",
    "shard_optimizer_state": "1.6",
    "prescaled_batch": "1.6",
    "skip_tracing": "1.6",
    "sharded_data_parallel_degree": "1.11",
}

#: The last row of the table in API 3.3.
IGNORED = [
    "static_mode",
    "fast_mode",
    "_match_weights",
    "_fp32_grad_accumulation",
    "checkpoint_attentions",
    "_prescaled_batch",
    "overlapping_allreduce",
]

PLACEMENTS = ["cluster", "spread", *map("".join, itertools.permutations("DPT"))]

COUNTS = [
    "pipeline_parallel_degree",
    "microbatches",
    "active_microbatches",
    "activation_loading_horizon",
    "tensor_parallel_degree",
    "sharded_data_parallel_degree",
]
SIZES = ["sdp_reduce_bucket_size", "sdp_param_persistence_threshold", "sdp_max_live_parameters"]
FLAGS = [name for name, default in DEFAULTS.items() if isinstance(default, bool)]
CHOICES = {
    "pipeline": ["interleaved", "simple"],
    "optimize": ["memory", "speed"],
    "placement_strategy": PLACEMENTS,
    "ddp_dist_backend": ["auto", "nccl"],
}
TENSOR_2 = {"tensor_parallel_degree": 2, "ddp": True}
SHARDED_2 = {"sharded_data_parallel_degree": 2}

#: The keys that another key needs beside it to be free to take any of its values.
COMPANIONS: dict[str, dict[str, Any]] = {
    "auto_partition": {"default_partition": 0},
    "default_partition": {"partitions": 9},
    "ddp_port": {"ddp": True},
    "ddp_dist_backend": {"ddp": True},
    "tensor_parallel_degree": {"ddp": True},
    "bf16": SHARDED_2,
}


def refusal(parameters: Any, **options: Any) -> list[str]:
    """The lines of the error that refuses these parameters."""
    with pytest.raises(ConfigError) as caught:
        Config.parse(parameters, **options)
    return str(caught.value).splitlines()


def test_module_does_not_import_torch() -> None:
    program = "import sys, smp_core.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


# ---- Keys ----------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert dict(Config.parse()) == DEFAULTS
    assert Config.parse() == Config.parse({}) == Config.parse(None, launcher={}) == Config()


def test_defaults_have_the_types_of_their_keys() -> None:
    kinds = {name: type(value) for name, value in Config.parse()}
    assert {kinds[name] for name in COUNTS + SIZES} == {int}
    assert {kinds[name] for name in FLAGS} == {bool}
    assert kinds["memory_weight"] is kinds["sdp_gradient_clipping"] is float


def test_every_key_has_a_meaning_a_source_and_its_version() -> None:
    for name, field in Config.model_fields.items():
        about = field.json_schema_extra
        assert isinstance(about, dict)
        assert field.description
        assert str(about["source"]).startswith("API 3.")
        assert about["since"] == SINCE.get(name)


@pytest.mark.parametrize("partitions", [1, 2, 7])
def test_active_microbatches_default_to_two_more_than_partitions(partitions: int) -> None:
    assert Config.parse({"partitions": partitions}).active_microbatches == partitions + 2
    given = {"partitions": partitions, "active_microbatches": 1}
    assert Config.parse(given).active_microbatches == 1


@pytest.mark.parametrize(("optimize", "weight"), [("speed", 0.2), ("memory", 0.8)])
def test_memory_weight_defaults_by_what_is_optimized(optimize: str, weight: float) -> None:
    assert Config.parse({"optimize": optimize}).memory_weight == weight
    assert Config.parse({"optimize": optimize, "memory_weight": 0.5}).memory_weight == 0.5


GOOD: list[tuple[str, Any, Any]] = [
    *((name, value, value) for name in COUNTS for value in (1, 2, 1000)),
    *((name, value, value) for name in SIZES for value in (1, 10**12)),
    *((name, 5e8, 500_000_000) for name in SIZES),
    *((name, value, bool(value)) for name in FLAGS for value in (True, False, 1, 0)),
    *((name, value, value) for name, values in CHOICES.items() for value in values),
    ("sdp_param_persistence_threshold", 0, 0),
    ("sdp_param_persistence_threshold", 0.0, 0),
    ("default_partition", 0, 0),
    ("default_partition", 8, 8),
    ("ranks_per_node", None, None),
    ("ranks_per_node", 1, 1),
    ("ranks_per_node", 8, 8),
    ("ddp_port", None, None),
    ("ddp_port", 0, 0),
    ("ddp_port", 65535, 65535),
    ("memory_weight", 0, 0.0),
    ("memory_weight", 1, 1.0),
    ("memory_weight", 0.25, 0.25),
    ("sdp_gradient_clipping", 3, 3.0),
    ("sdp_gradient_clipping", 1e-30, 1e-30),
    ("partition_file", "a/b", "a/b"),
    ("partition_file", None, None),
]


@pytest.mark.parametrize(("name", "value", "taken"), GOOD, ids=repr)
def test_good_value(name: str, value: object, taken: object) -> None:
    got = getattr(Config.parse({**COMPANIONS.get(name, {}), name: value}), name)
    assert got == taken
    assert type(got) is type(taken)


NO_INTS: list[Any] = [True, False, 2.5, "2", b"2", None, [2], math.nan, math.inf, 1j]
BAD: list[tuple[str, Any]] = [
    *((name, value) for name in COUNTS for value in (0, -1, 2.0, *NO_INTS)),
    *((name, value) for name in SIZES for value in (-1, -5e8, *NO_INTS)),
    *((name, 0) for name in SIZES if name != "sdp_param_persistence_threshold"),
    *((name, value) for name in FLAGS for value in (2, -1, 1.0, 0.0, "True", "1", None, [1])),
    *((name, value) for name in CHOICES for value in ("", "Cluster", 1, None, True, ["auto"])),
    # The client-side check lets the first through; see the remark beside the key.
    ("pipeline", "_only_forward"),
    ("placement_strategy", "dpt"),
    ("placement_strategy", "DP"),
    ("placement_strategy", "DPP"),
    ("placement_strategy", "DPTT"),
    ("ddp_dist_backend", "gloo"),
    ("default_partition", -1),
    *(("default_partition", value) for value in (0.0, *NO_INTS)),
    ("ranks_per_node", 0),
    *(("ranks_per_node", value) for value in (8.0, *NO_INTS) if value is not None),
    ("ddp_port", -1),
    ("ddp_port", 65536),
    *(("ddp_port", value) for value in (8080.0, *NO_INTS) if value is not None),
    *(("memory_weight", value) for value in (-0.1, 1.1, -1, 2, math.nan, math.inf)),
    *(("memory_weight", value) for value in (True, "0.5", None)),
    *(("sdp_gradient_clipping", value) for value in (0, 0.0, -1.0, math.nan, math.inf, -math.inf)),
    *(("sdp_gradient_clipping", value) for value in (True, "1.0", None)),
    *(("partition_file", value) for value in (1, True, b"a", Path("a"))),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=repr)
def test_bad_value_is_refused_with_key_value_constraint_and_source(
    name: str, value: object
) -> None:
    (line,) = refusal({**COMPANIONS.get(name, {}), name: value})
    assert line.startswith(f"{name}={value!r}: must be ")
    assert re.search(r"\. See docs/spec/api\.md#3\.[123]$", line)


def test_constraints_are_worded() -> None:
    assert refusal({"microbatches": 0}) == [
        "microbatches=0: must be an int of at least 1. See docs/spec/api.md#3.1"
    ]
    assert refusal({"pipeline": "1F1B"}) == [
        "pipeline='1F1B': must be 'interleaved' or 'simple'. See docs/spec/api.md#3.1"
    ]
    assert refusal({"memory_weight": 2}) == [
        "memory_weight=2: must be a number from 0 to 1. See docs/spec/api.md#3.3"
    ]


class Lines:
    def __repr__(self) -> str:
        return "first\n  second"


class Rude:
    """A value passed by mistake, which may fail in any way."""

    def __repr__(self) -> str:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("name", [*DEFAULTS, "partitions"])
@pytest.mark.parametrize("value", [Rude(), Lines(), -(10**5000), ["c" * 400]], ids=type)
def test_foreign_value_is_refused_on_one_short_line(name: str, value: object) -> None:
    (line,) = refusal({name: value})
    assert line.startswith(f"{name}=")
    assert len(line) < 300


@pytest.mark.parametrize("value", [Rude(), -(10**5000)], ids=type)
def test_foreign_value_by_two_names_is_refused(value: object) -> None:
    (line,) = refusal({"partitions": value, "pipeline_parallel_degree": value})
    assert "must be" in line


# ---- Names ---------------------------------------------------------------------------------------


def test_partitions_is_another_name_of_the_pipeline_degree() -> None:
    config = Config.parse({"partitions": 4})
    assert config == Config.parse({"pipeline_parallel_degree": 4})
    assert config == Config.parse({"partitions": 4, "pipeline_parallel_degree": 4})
    assert config.pipeline_parallel_degree == config.partitions == 4


@pytest.mark.parametrize(("old", "new"), [(2, 4), (1, 2), (2, 1), (True, 1), (1, True), ("2", 2)])
def test_unequal_values_by_two_names_are_refused(old: object, new: object) -> None:
    (line,) = refusal({"partitions": old, "pipeline_parallel_degree": new})
    assert line.startswith(f"partitions={old!r} with pipeline_parallel_degree={new!r}: ")
    assert line.endswith(". See docs/spec/api.md#8.5")


def test_messages_call_a_key_by_the_name_that_was_used() -> None:
    (line,) = refusal({"partitions": 0})
    assert line.startswith("partitions=0: ")
    (line,) = refusal({"partitions": 2, "default_partition": 2})
    assert line.startswith("default_partition=2 with partitions=2: ")


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("microbatch", "microbatches"),
        ("tensor_parallel_size", "tensor_parallel_degree"),
        ("sharded_data_parallel", "sharded_data_parallel_degree"),
        ("partition", "partitions"),
        ("DDP", "ddp"),
        ("placement-strategy", "placement_strategy"),
        ("self", None),
        ("", None),
        ("quux", None),
    ],
)
def test_unknown_key_is_refused_naming_the_nearest(typo: str, meant: str | None) -> None:
    (line,) = refusal({typo: 1})
    assert line.startswith(f"unknown key {typo!r}: ")
    if meant:
        assert line == f"unknown key {typo!r}: did you mean {meant}? See docs/spec/api.md#3"
    else:
        listed = line.partition("the known keys are ")[2].partition(". See ")[0].split(", ")
        assert sorted(listed) == sorted([*DEFAULTS, "partitions"])


def test_ignored_keys_are_those_of_the_specification() -> None:
    assert sorted(IGNORED_KEYS) == sorted(IGNORED)


@pytest.mark.parametrize("name", IGNORED)
@pytest.mark.parametrize("value", [True, False, None, "anything"])
def test_ignored_key_warns_and_has_no_effect(name: str, value: object) -> None:
    with pytest.warns(IgnoredKeyWarning, match=f": {name}\\.") as caught:
        config = Config.parse({name: value, "microbatches": 2})
    assert config == Config.parse({"microbatches": 2})
    assert caught[0].filename == __file__


def test_ignored_keys_share_one_warning() -> None:
    with pytest.warns(IgnoredKeyWarning, match="static_mode, fast_mode") as caught:
        Config.parse({"static_mode": 1, "fast_mode": 2})
    assert len(caught) == 1


# ---- Rules ---------------------------------------------------------------------------------------

#: For each rule, configurations that break it and no other, and their nearest ones that do not.
#: Source: API 3.1, 3.4, 3.5, 8.11; AWS Sharded Data Parallelism.
CASES: dict[tuple[str, ...], tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    ("tensor_parallel_degree", "ddp"): (
        [{"tensor_parallel_degree": 2}, {"tensor_parallel_degree": 2, "ddp": 0}],
        [{"tensor_parallel_degree": 2, "ddp": True}, {"tensor_parallel_degree": 1, "ddp": False}],
    ),
    ("bf16", "sharded_data_parallel_degree"): (
        [{"bf16": True}, {"bf16": True, "sharded_data_parallel_degree": 1}],
        [{"bf16": True, **SHARDED_2}, {"bf16": False}],
    ),
    ("fp16", "bf16"): (
        [{"fp16": True, "bf16": True, **SHARDED_2}],
        [{"fp16": True, "bf16": False, **SHARDED_2}, {"bf16": True, **SHARDED_2}],
    ),
    ("sharded_data_parallel_degree", "pipeline_parallel_degree"): (
        [{**SHARDED_2, "partitions": 2}],
        [{**SHARDED_2, "partitions": 1}, {"sharded_data_parallel_degree": 1, "partitions": 2}],
    ),
    ("sharded_data_parallel_degree", "shard_optimizer_state"): (
        [{**SHARDED_2, "shard_optimizer_state": True}],
        [
            {**SHARDED_2, "shard_optimizer_state": False},
            {"sharded_data_parallel_degree": 1, "shard_optimizer_state": True},
        ],
    ),
    ("sharded_data_parallel_degree", "tensor_parallel_degree", "prescaled_batch"): (
        [{**SHARDED_2, **TENSOR_2}],
        [{**SHARDED_2, **TENSOR_2, "prescaled_batch": True}, SHARDED_2, TENSOR_2],
    ),
    ("auto_partition", "default_partition"): (
        [{"auto_partition": False}, {"auto_partition": 0, "partitions": 2}],
        [{"auto_partition": False, "default_partition": 0}, {"auto_partition": True}],
    ),
    ("default_partition", "pipeline_parallel_degree"): (
        [
            {"default_partition": 1},
            {"default_partition": 2, "partitions": 2},
            {"default_partition": 2, "partitions": 2, "auto_partition": False},
        ],
        [{"default_partition": 1, "partitions": 2}, {"default_partition": 0, "partitions": 1}],
    ),
    ("ddp_port", "ddp"): (
        [{"ddp_port": 0}, {"ddp_port": 8080, "ddp": False}],
        [{"ddp_port": 8080, "ddp": True}, {"ddp_port": None}],
    ),
    ("ddp_dist_backend", "ddp"): (
        [{"ddp_dist_backend": "auto"}, {"ddp_dist_backend": "nccl", "ddp": False}],
        [{"ddp_dist_backend": "nccl", "ddp": True}, {"ddp": False}],
    ),
    ("horovod", "ddp"): (
        [{"horovod": True, "ddp": True}],
        [{"horovod": True}, {"ddp": True}, {"horovod": False, "ddp": True}],
    ),
}
BREAKING = [(keys, each) for keys, (breaking, _) in CASES.items() for each in breaking]
KEEPING = [each for _, keeping in CASES.values() for each in keeping]


def test_every_rule_has_cases_and_every_case_a_rule() -> None:
    assert sorted(rule.keys for rule in RULES) == sorted(CASES)


@pytest.mark.parametrize(("keys", "parameters"), BREAKING)
def test_breaking_one_rule(keys: tuple[str, ...], parameters: dict[str, Any]) -> None:
    (line,) = refusal(parameters)
    (rule,) = (rule for rule in RULES if rule.keys == keys)
    given = {ALIAS.get(name, name): (name, value) for name, value in parameters.items()}
    for name in keys:
        # By the name and with the value that the user wrote (flags: as what they count for).
        used, value = given.get(name, (name, DEFAULTS[name]))
        value = bool(value) if name in FLAGS else value
        assert f"{used}={value!r}{'' if name in given else ' (the default)'}" in line
    section = rule.source.removeprefix("API ").partition(",")[0]
    assert line.endswith(f": {rule.sentence}. See docs/spec/api.md#{section}")


@pytest.mark.parametrize("parameters", KEEPING)
def test_keeping_every_rule(parameters: dict[str, Any]) -> None:
    config = Config.parse(parameters)
    assert all(rule.holds(config) for rule in RULES)


def test_message_of_a_broken_rule() -> None:
    assert refusal({"bf16": True, "sharded_data_parallel_degree": 1}) == [
        (
            "bf16=True with sharded_data_parallel_degree=1: bf16 needs sharded data parallelism "
            "(sharded_data_parallel_degree > 1). See docs/spec/api.md#3.5"
        ),
    ]
    assert refusal({"auto_partition": False}) == [
        (
            "auto_partition=False with default_partition=0 (the default): without auto_partition, "
            "default_partition must be given. See docs/spec/api.md#3.4"
        ),
    ]


def test_everything_wrong_is_reported_at_once() -> None:
    lines = refusal(
        {
            "microbatches": 0,
            "microbatchs": 2,
            "fp16": 1,
            "bf16": 1,
            "partitions": 2,
            "pipeline_parallel_degree": 3,
            "tensor_parallel_degree": 2,
            "ddp": "yes",
            "default_partition": 1,
        }
    )
    assert sorted(line.split(":")[0] for line in lines) == [
        "bf16=True with sharded_data_parallel_degree=1 (the default)",
        "ddp='yes'",
        "fp16=True with bf16=True",
        "microbatches=0",
        "partitions=2 with pipeline_parallel_degree=3",
        "unknown key 'microbatchs'",
        # Not judged, because ddp has no value to judge by: tensor parallelism needs ddp. Nor, for
        # want of a number of partitions: default_partition.
    ]


def test_construction_by_keywords_keeps_the_rules() -> None:
    assert Config(partitions=2, ddp=1) == Config.parse({"partitions": 2, "ddp": True})
    with pytest.raises(ConfigError, match="needs ddp"):
        Config(tensor_parallel_degree=2)
    with pytest.raises(ConfigError, match="must be an int"):
        Config(microbatches="2")


# Published configurations: AWS Run a Distributed Model Parallel Training Job and AWS Sharded Data Parallelism.
@pytest.mark.parametrize(
    "parameters",
    [
        {
            "partitions": 2,
            "microbatches": 4,
            "placement_strategy": "spread",
            "pipeline": "interleaved",
            "optimize": "speed",
            "ddp": True,
        },
        {
            "ddp": True,
            "sharded_data_parallel_degree": 2,
            "sdp_reduce_bucket_size": int(5e8),
            "sdp_param_persistence_threshold": int(1e6),
            "sdp_max_live_parameters": int(1e9),
            "sdp_hierarchical_allgather": True,
            "sdp_gradient_clipping": 1.0,
        },
        {
            "partitions": 1,
            "ddp": True,
            "sharded_data_parallel_degree": 64,
            "bf16": True,
            "ddp_dist_backend": "auto",
        },
        {"ddp": True, "sharded_data_parallel_degree": 2, "fp16": True},
        {
            "ddp": True,
            "fp16": True,
            "prescaled_batch": True,
            "sharded_data_parallel_degree": 4,
            "tensor_parallel_degree": 4,
        },
    ],
)
def test_published_configurations(parameters: dict[str, Any]) -> None:
    config = Config.parse(parameters)
    assert {name: getattr(config, name) for name in parameters} == parameters


# ---- The launcher --------------------------------------------------------------------------------


def test_launcher_wins_key_by_key() -> None:
    config = Config.parse(
        {"microbatches": 2, "fp16": True}, launcher={"microbatches": 4, "ddp": True}
    )
    assert config == Config(microbatches=4, fp16=True, ddp=True)


@pytest.mark.parametrize("script", ["partitions", "pipeline_parallel_degree"])
@pytest.mark.parametrize("launcher", ["partitions", "pipeline_parallel_degree"])
def test_launcher_wins_by_either_name(script: str, launcher: str) -> None:
    assert Config.parse({script: 2}, launcher={launcher: 4}).partitions == 4


def test_launcher_covers_a_bad_value() -> None:
    assert Config.parse({"microbatches": 0}, launcher={"microbatches": 4}).microbatches == 4


def test_error_tells_what_the_launcher_set() -> None:
    assert refusal({"tensor_parallel_degree": 2, "ddp": True}, launcher={"ddp": False}) == [
        (
            "tensor_parallel_degree=2 with ddp=False: tensor parallelism (tensor_parallel_degree > 1) "
            "needs ddp. See docs/spec/api.md#3.5"
        ),
        "The launcher set ddp; its values win.",
    ]


def test_launcher_may_satisfy_a_rule() -> None:
    assert Config.parse({"tensor_parallel_degree": 2}, launcher={"ddp": True}) == Config(**TENSOR_2)


@pytest.mark.parametrize("name", ["partitions", "pipeline_parallel_degree"])
def test_a_partition_that_sharding_implies_does_not_hide_the_script_s_own(name: str) -> None:
    """A launcher adds it for libraries that look for the key."""
    launcher = {"ddp": True, "sharded_data_parallel_degree": 2, "partitions": 1}
    assert "sharded_data_parallel_degree=2" in refusal({name: 2}, launcher=launcher)[0]
    assert Config.parse({name: 1}, launcher=launcher).partitions == 1


def test_arguments_are_left_alone() -> None:
    script, launcher = {"partitions": 2}, {"pipeline_parallel_degree": 4}
    Config.parse(script, launcher=launcher)
    assert (script, launcher) == ({"partitions": 2}, {"pipeline_parallel_degree": 4})


@pytest.mark.parametrize("argument", ["parameters", "launcher"])
@pytest.mark.parametrize("value", [[], [("ddp", True)], 1, True, {"ddp"}, Config()])
def test_no_mapping(argument: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.parse(**{argument: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{argument}={value!r}: must be a mapping")
    assert f"not {type(value).__name__}" in message


@pytest.mark.parametrize("value", ["smp.json", '{"ddp": true}', b"{}", Path("smp.json")])
def test_json_is_for_the_caller_to_read(value: object) -> None:
    (line,) = refusal(value)
    assert "json" in line.partition(": ")[2]


@pytest.mark.parametrize("argument", ["parameters", "launcher"])
@pytest.mark.parametrize(
    ("keys", "message"),
    [([1], "has a key that must be str: 1."), ([1, None], "has keys that must be str: 1, None.")],
)
def test_keys_that_are_no_str(argument: str, keys: list[Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.parse(**{argument: {"ddp": True, **dict.fromkeys(keys)}})
    assert str(caught.value) == f"{argument} {message}"


# ---- The world -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "tensor", "sharded"),
    [
        (pipeline, tensor, sharded)
        for pipeline in range(1, 6)
        for tensor in range(1, 6)
        for sharded in range(1, 7)
        if pipeline == 1 or sharded == 1
    ],
)
def test_worlds_that_fit(pipeline: int, tensor: int, sharded: int) -> None:
    config = Config(
        partitions=pipeline,
        tensor_parallel_degree=tensor,
        sharded_data_parallel_degree=sharded,
        ddp=True,
        prescaled_batch=True,
    )
    # The definition: world = pipeline * tensor * (replicas * sharded), all of them whole.
    fitting = {pipeline * tensor * replicas * sharded for replicas in range(1, 62)}
    for size in range(1, 61):
        try:
            config.check_world(size)
        except ConfigError as error:
            assert size not in fitting
            message = str(error)
            assert f"in a world of {size}: " in message
            if size % (pipeline * tensor):
                assert f"pipeline_parallel_degree={pipeline} with " in message
                assert f"tensor_parallel_degree={tensor} " in message
            else:
                assert message.startswith(f"sharded_data_parallel_degree={sharded} ")
        else:
            assert size in fitting


@pytest.mark.parametrize(
    ("parameters", "size", "advice"),
    [
        ({"partitions": 4}, 6, "Use 4 or 8 ranks, or degrees whose product is one of 1, 2, 3, 6."),
        ({"partitions": 4}, 2, "Use 4 ranks, or degrees whose product is one of 1, 2."),
        ({"partitions": 5}, 36, "product is one of 1, 2, 3, 4, 6, 9, 12, 18, 36."),
        # AWS Sharded Data Parallelism (Selecting the degree of sharded data parallelism): 2, 4 or 8 for 8.
        ({"sharded_data_parallel_degree": 3}, 8, "Use one of 1, 2, 4, 8."),
        (
            # The degree divides the DP size 8, but not the RDP size 4 (API 8.3).
            {**TENSOR_2, "sharded_data_parallel_degree": 8, "prescaled_batch": True},
            8,
            "8 / (1 * 2) = 4. Use one of 1, 2, 4.",
        ),
    ],
)
def test_misfit_suggests_what_fits(parameters: dict[str, Any], size: int, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.parse(parameters).check_world(size)
    assert advice in str(caught.value)


@pytest.mark.parametrize("size", [0, -8, True, 8.0, "8", None])
def test_world_size_is_a_positive_int(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"^world size .*: must be an int of at least 1\.$"):
        Config().check_world(size)


# ---- A configuration is a value ------------------------------------------------------------------

VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{name: st.integers(1, 10) for name in COUNTS},
    **{name: st.integers(1, 10**10) | st.integers(1, 1000).map(float) for name in SIZES},
    **{name: st.booleans() | st.integers(0, 1) for name in FLAGS},
    **{name: st.sampled_from(values) for name, values in CHOICES.items()},
    "default_partition": st.integers(0, 10),
    "memory_weight": st.floats(0, 1) | st.integers(0, 1),
    "ddp_port": st.none() | st.integers(0, 65535),
    "ranks_per_node": st.none() | st.integers(1, 64),
    "sdp_gradient_clipping": st.floats(0, 1e300, exclude_min=True),
    "partition_file": st.none() | st.text(),
}


@st.composite
def valid_parameters(draw: st.DrawFn) -> dict[str, Any]:
    """Parameters with good values, made to keep the rules by dropping or setting keys."""
    drawn: dict[str, Any] = draw(st.fixed_dictionaries({}, optional=VALUES))
    if drawn.get("sharded_data_parallel_degree", 1) > 1:
        drawn.pop("pipeline_parallel_degree", None)
        drawn.pop("shard_optimizer_state", None)
        if drawn.get("tensor_parallel_degree", 1) > 1:
            drawn["prescaled_batch"] = True
    else:
        drawn.pop("bf16", None)
    if drawn.get("fp16"):
        drawn.pop("bf16", None)
    if drawn.keys() & {"ddp_port", "ddp_dist_backend"} or drawn.get("tensor_parallel_degree"):
        drawn["ddp"] = True
    if drawn.get("ddp"):
        drawn.pop("horovod", None)
    below = drawn.get("pipeline_parallel_degree", 1)
    if "default_partition" in drawn or not drawn.get("auto_partition", True):
        drawn["default_partition"] = drawn.get("default_partition", 0) % below
    return drawn


@given(parameters=valid_parameters())
def test_round_trips(parameters: dict[str, Any]) -> None:
    config = Config.parse(parameters)
    assert {name: getattr(config, name) for name in parameters} == parameters
    short = config.to_parameters()
    assert short.keys() <= parameters.keys()
    for again in (
        Config.parse(short),
        Config.parse(json.loads(json.dumps(short))),
        Config.parse(dict(config) if config.ddp else short),
        eval(repr(config), {"Config": Config}),
        pickle.loads(pickle.dumps(config)),
    ):
        assert again == config
        assert hash(again) == hash(config)
        assert again.to_parameters() == short


@given(first=valid_parameters(), second=valid_parameters())
def test_equality_is_equality_of_all_values(first: dict[str, Any], second: dict[str, Any]) -> None:
    one, two = Config.parse(first), Config.parse(second)
    assert (one == two) == (dict(one) == dict(two)) == (one.to_parameters() == two.to_parameters())


def test_defaults_given_or_not_are_the_same_configuration() -> None:
    given = {name: value for name, value in DEFAULTS.items() if name != "ddp_dist_backend"}
    assert Config.parse(given) == Config()
    assert hash(Config.parse(given)) == hash(Config())
    assert Config.parse(given).to_parameters() == {}


def test_repr_is_code_that_shows_what_differs_from_the_defaults() -> None:
    assert repr(Config()) == str(Config()) == "Config.parse({})"
    config = Config(partitions=2, microbatches=1, ddp=1)
    assert repr(config) == "Config.parse({'pipeline_parallel_degree': 2, 'ddp': True})"
    # Equal to the default that goes with the other values, or not.
    assert repr(Config(partitions=2, active_microbatches=4)) == repr(Config(partitions=2))
    assert "active_microbatches" in repr(Config(partitions=2, active_microbatches=3))
    # A default that must be said.
    manual = Config(auto_partition=False, default_partition=0)
    assert manual.to_parameters() == {"auto_partition": False, "default_partition": 0}


def test_frozen() -> None:
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.microbatches = 2  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.partitions = 2  # type: ignore[misc]


def test_a_configuration_equals_its_like_from_another_process() -> None:
    """Texts hash otherwise in each process: nothing that is kept of a configuration may depend on it."""
    program = "import pickle, sys; from smp_core.config import Config; "
    program += "sys.stdout.buffer.write(pickle.dumps(Config(ddp=True)))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        timeout=600,
        env=environment,
    )
    there, here = pickle.loads(done.stdout), Config(ddp=True)
    assert there == here
    assert hash(there) == hash(here)
    assert Config().model_copy(update={"ddp": True}) == here
