"""No key of the configuration is ignored in silence: each is read by what trains, or warned of."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smp_core.config
import smp_core.runtime
import smp_core.torch as smp
from smp_core.config import Config, IgnoredKeyWarning

RANKS = 4
TWO = {"microbatches": 2}
PIPELINE = {"pipeline_parallel_degree": 2, **TWO}
SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2}
#: For each key, a configuration in which its value is not the default, and matters if it ever does.
SET: dict[str, dict[str, Any]] = {
    "pipeline_parallel_degree": PIPELINE,
    "microbatches": TWO,
    "pipeline": {**PIPELINE, "pipeline": "simple"},
    "optimize": {**PIPELINE, "optimize": "speed"},
    "placement_strategy": {**PIPELINE, "placement_strategy": "spread"},
    "auto_partition": {**PIPELINE, "auto_partition": False, "default_partition": 0},
    "default_partition": {**PIPELINE, "auto_partition": False, "default_partition": 1},
    "contiguous": {**PIPELINE, "contiguous": False},
    "horovod": {"horovod": True},
    "xla": {"xla": True},
    "fork": {"fork": True},
    "memory_weight": {**PIPELINE, "memory_weight": 0.5},
    "active_microbatches": {**PIPELINE, "active_microbatches": 1},
    "deterministic_server": {**PIPELINE, "deterministic_server": True},
    "skip_tracing": {**PIPELINE, "skip_tracing": True},
    "load_partition": {**PIPELINE, "load_partition": True},
    "partition_file": {**PIPELINE, "partition_file": "there/is/no/such/file"},
    "ddp": {"ddp": True},
    "ddp_port": {"ddp": True, "ddp_port": 1234},
    "ddp_dist_backend": {"ddp": True, "ddp_dist_backend": "nccl"},
    "prescaled_batch": {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True},
    "tensor_parallel_degree": {"ddp": True, "tensor_parallel_degree": 2},
    "shard_optimizer_state": {"ddp": True, "fp16": True, "shard_optimizer_state": True},
    "offload_activations": {**TWO, "offload_activations": True},
    "activation_loading_horizon": {
        **TWO,
        "offload_activations": True,
        "activation_loading_horizon": 1,
    },
    "delayed_parameter_initialization": {"delayed_parameter_initialization": True},
    "fp16": {"ddp": True, "fp16": True},
    "fp16_params": {"fp16_params": True},
    "bf16": {**SHARDED, "bf16": True},
    "sharded_data_parallel_degree": SHARDED,
    "sdp_reduce_bucket_size": {**SHARDED, "sdp_reduce_bucket_size": 10},
    "sdp_param_persistence_threshold": {**SHARDED, "sdp_param_persistence_threshold": 0},
    "sdp_max_live_parameters": {**SHARDED, "sdp_max_live_parameters": 10},
    "sdp_hierarchical_allgather": {**SHARDED, "sdp_hierarchical_allgather": False},
    "sdp_gradient_clipping": {**SHARDED, "sdp_gradient_clipping": 0.5},
    "ranks_per_node": {**SHARDED, "ranks_per_node": 1},
}
#: Keys whose values other code is handed by a default, or is asked for elsewhere, and where.
ELSEWHERE = {
    "optimize": "test_config.py: the default of memory_weight follows it",
    "ddp_dist_backend": "hosts/test_external.py: it names the backends of a launched script",
    "prescaled_batch": "the script: it says which ranks are given the same batch",
}


WARNS = smp_core.runtime._warn_of_keys_without_effect.__name__


@smp.step
def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().sum()
    model.backward(loss)
    return loss


def train() -> None:
    with smp.model_creation():
        module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model = smp.DistributedModel(module)
    smp.set_activation_checkpointing(module[0])
    if "ddp" in smp_core.runtime.current("the test").config.model_fields_set:
        smp.get_world_process_group()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    train_step(model, torch.ones(2, 2))
    optimizer.step()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys that code outside of the configuration's own file reads."""
    keys: set[str] = set()
    own = {Path(smp_core.config.__file__).name, "main.py"}  # pydantic's
    right = Config.__getattribute__

    def noted(self: Config, name: str) -> Any:
        code = sys._getframe(1).f_code
        if name in SET and Path(code.co_filename).name not in own and code.co_name != WARNS:
            keys.add(name)
        return right(self, name)

    monkeypatch.setattr(Config, "__getattribute__", noted)
    smp_core.runtime._topology.cache_clear()  # what an earlier test has read is not read again
    return keys


def test_the_table_has_every_key() -> None:
    assert SET.keys() == Config.model_fields.keys()
    for key, config in SET.items():
        assert (
            getattr(Config.parse(config), key) != getattr(Config(), key)
            or key
            in (
                "ddp_dist_backend",
                "auto_partition",
            )
            or key == "default_partition"
        )


@pytest.mark.parametrize("key", SET)
def test_a_key_is_read_or_warned_of(key: str, smp_world: Any, read: set[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        smp_world.run(train, ranks=RANKS, config=SET[key])
    told = {str(each.message) for each in caught if each.category is IgnoredKeyWarning}
    warned = any(f"{key}=" in each for each in told)
    assert warned or key in read or key in ELSEWHERE, f"{key} is accepted and ignored"
    about = Config.model_fields[key].json_schema_extra
    assert isinstance(about, dict)
    if about["without_effect"] is not None:
        assert warned


def test_a_key_that_nobody_reads_would_be_found(smp_world: Any, read: set[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IgnoredKeyWarning)
        smp_world.run(train, ranks=RANKS, config=SET["horovod"])
    assert "horovod" not in read


@pytest.mark.parametrize("config", [{}, SHARDED, {"ddp": True, "microbatches": 2}, PIPELINE])
def test_what_has_an_effect_is_not_warned_of(config: dict[str, Any], smp_world: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", IgnoredKeyWarning)
        smp_world.run(train, ranks=RANKS, config=config)


def test_the_warning_says_key_value_and_why(smp_world: Any) -> None:
    with pytest.warns(IgnoredKeyWarning, match=r"ddp_port=1234 has no effect: .*MASTER_PORT"):
        smp_world.run(train, ranks=1, config=SET["ddp_port"])
