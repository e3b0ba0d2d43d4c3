"""Bugs of the configuration: valid values are refused, and broken rules accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import smp_core.torch as smp
from conformance.mutants.blocks import parse_without
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from smp_core import config, runtime, topology
from smp_core.errors import ConfigError

BUGS = Bugs("configuration")


@BUGS.enter("CONF-VALID")
def sharding_below_data_parallel(patch: Patch) -> None:
    """the sharded degree must be less than the degree of data parallelism (API 8.1)"""
    check = config.Config.check_world

    def check_world(self: config.Config, size: int) -> None:
        check(self, size)
        if 1 < self.sharded_data_parallel_degree == size // self.tensor_parallel_degree:
            raise ConfigError("sharded_data_parallel_degree is too large")

    patch.setattr(config.Config, "check_world", check_world)


@BUGS.enter("CONF-VALID")
def no_permutations(patch: Patch) -> None:
    """placements are cluster and spread only, as in the client-side check (API 8.6)"""
    parse = runtime._parse

    def parse_strictly(given: Any, launcher: str) -> config.Config:
        parsed = parse(given, launcher)
        if parsed.placement_strategy not in ("cluster", "spread"):
            raise ConfigError("placement_strategy")
        return parsed

    patch.setattr(runtime, "_parse", parse_strictly)


@BUGS.enter("CONF-AGREED")
def each_rank_its_own(patch: Patch) -> None:
    """init does not compare the configurations of the ranks"""
    patch.setattr(runtime, "_check_agreement", lambda made: None)


@BUGS.enter("CONF-AGREED")
def only_others_are_told(patch: Patch) -> None:
    """rank 0, whose configuration counts, accepts ranks with another one"""
    check = runtime._check_agreement

    def check_others(made: runtime.Runtime) -> None:
        try:
            check(made)
        except ConfigError:
            if made.rank:
                raise

    patch.setattr(runtime, "_check_agreement", check_others)


@BUGS.enter("CONF-PARTITIONS", *ASSERTION, ConfigError)
def no_alias(patch: Patch) -> None:
    """partitions is an unknown key"""
    patch.setattr(config, "ALIASES", {})


@BUGS.enter("CONF-PARTITIONS")
def alias_loses(patch: Patch) -> None:
    """one of two unequal names of the pipeline degree wins"""

    def forget(given: dict[str, Any]) -> dict[str, Any]:
        if "pipeline_parallel_degree" in given:
            given.pop("partitions", None)
        return {**given, "pipeline_parallel_degree": 1} if "partitions" not in given else given

    parse_without(patch, forget)


@BUGS.enter("CONF-UNKNOWN-KEY")
def unknown_keys_pass(patch: Patch) -> None:
    """unknown keys are dropped, as in the client-side check (API 3.4)"""
    known = {*config.Config.model_fields, *config.ALIASES, *config.IGNORED_KEYS}
    parse_without(patch, lambda given: {key: v for key, v in given.items() if key in known})


@BUGS.enter("CONF-VALUE")
def degrees_are_clamped(patch: Patch) -> None:
    """a number below 1 counts as 1"""
    parse_without(
        patch,
        lambda given: {
            key: max(1, value) if type(value) is int and key != "default_partition" else value
            for key, value in given.items()
        },
    )


@BUGS.enter("CONF-VALUE")
def placements_in_lower_case(patch: Patch) -> None:
    """placements are accepted in lower case"""

    def forget(given: dict[str, Any]) -> dict[str, Any]:
        if given.get("placement_strategy") == "dpt":
            given["placement_strategy"] = "DPT"
        return given

    parse_without(patch, forget)


def no_topology_check(patch: Patch) -> None:
    """the second line of defence is gone"""
    patch.setattr(topology.Topology, "__post_init__", lambda self: None)


@BUGS.enter("CONF-WORLD-SIZE")
def ranks_left_over(patch: Patch) -> None:
    """ranks that do not fit are left over"""
    no_topology_check(patch)
    patch.setattr(config.Config, "check_world", lambda self, size: None)


@BUGS.enter("CONF-SHARDED-DIVIDES")
def sharding_divides_data_parallel(patch: Patch) -> None:
    """the sharded degree must divide the DP degree, not the RDP degree (API 8.3)"""
    no_topology_check(patch)

    def check_world(self: config.Config, size: int) -> None:
        if (size // self.pipeline_parallel_degree) % self.sharded_data_parallel_degree:
            raise ConfigError("sharded_data_parallel_degree")

    patch.setattr(config.Config, "check_world", check_world)


def without_rule(*keys: str) -> Callable[[Patch], None]:
    """Make a plant that removes the rule between these keys of the configuration."""

    def plant(patch: Patch) -> None:
        left = tuple(rule for rule in config.RULES if rule.keys != keys)
        assert len(left) == len(config.RULES) - 1
        patch.setattr(config, "RULES", left)

    return plant


for _id, *_keys in [
    ("CONF-TENSOR-DDP", "tensor_parallel_degree", "ddp"),
    ("CONF-BF16-SHARDED", "bf16", "sharded_data_parallel_degree"),
    ("CONF-FP16-BF16", "fp16", "bf16"),
    ("CONF-SHARDED-PIPELINE", "sharded_data_parallel_degree", "pipeline_parallel_degree"),
    ("CONF-SHARDED-OPTIMIZER", "sharded_data_parallel_degree", "shard_optimizer_state"),
    (
        "CONF-SHARDED-PRESCALED",
        *("sharded_data_parallel_degree", "tensor_parallel_degree", "prescaled_batch"),
    ),
    ("CONF-DEFAULT-PARTITION", "auto_partition", "default_partition"),
    ("CONF-DEFAULT-PARTITION", "default_partition", "pipeline_parallel_degree"),
]:
    _plant = without_rule(*_keys)
    _plant.__doc__ = f"no rule between {', '.join(_keys)}"
    _plant.__name__ = "_".join(["no_rule", *_keys])
    BUGS.enter(_id)(_plant)


@BUGS.enter("CONF-BF16-SHARDED")
def init_knows_no_rules(patch: Patch) -> None:
    """init accepts what the harness refuses"""
    init = smp.init

    def accept(given: Any = None) -> None:
        try:
            init(given)
        except ConfigError:
            init()

    patch.setattr(smp, "init", accept)
