"""smp.init: once, with one configuration, before anything else."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

import smp_core.torch as smp
from smp_core import runtime
from smp_core.config import Config
from smp_core.errors import (
    AlreadyInitializedError,
    BackendError,
    ConfigError,
    NotInitializedError,
)


def test_before_init_nothing_works_and_the_call_is_named(smp_world):
    def body():
        assert not smp.is_initialized()
        for call in (smp.rank, smp.barrier, lambda: smp.allgather(1, smp.WORLD)):
            with pytest.raises(NotInitializedError, match=r"smp\.\w+: rank \d has not called"):
                call()
        smp.init()
        assert smp.is_initialized()
        return smp.rank()

    assert smp_world.run(body, ranks=2, init=False) == [0, 1]


def test_init_again_with_the_same_configuration_changes_nothing(smp_world):
    def body():
        smp.init({"pipeline_parallel_degree": 2})
        smp.init({"partitions": 2})  # the same, by its alias
        smp.init()
        return smp.pp_size()

    assert smp_world.run(body, ranks=2, init=False) == [2, 2]


def test_init_again_with_another_configuration_is_refused(smp_world):
    def body():
        smp.init({"pipeline_parallel_degree": 2})
        message = r"rank \d is initialised with Config.*'pipeline_parallel_degree': 2.*shutdown"
        with pytest.raises(AlreadyInitializedError, match=message):
            smp.init({"microbatches": 4})
        smp.shutdown()
        smp.init({"microbatches": 4})
        return smp.pp_size()

    assert smp_world.run(body, ranks=2, init=False) == [1, 1]


def test_the_configuration_of_the_run_counts_as_the_first_init(smp_world):
    def body():
        smp.init({"pipeline_parallel_degree": 2})
        with pytest.raises(AlreadyInitializedError):
            smp.init({"pipeline_parallel_degree": 1})
        return smp.pp_rank()

    config = {"pipeline_parallel_degree": 2}
    assert smp_world.run(body, ranks=2, config=config) == [0, 1]


def test_a_body_that_initialises_by_itself_may_choose_the_configuration(smp_world):
    def body():
        smp.init({"pipeline_parallel_degree": 2})
        return smp.pp_rank()

    assert smp_world.run(body, ranks=2) == [0, 1]


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (None, None),
        (None, {}),
        (None, {"microbatches": 1}),
        ({"pipeline_parallel_degree": 2}, None),
        ({"pipeline_parallel_degree": 2}, {"partitions": 2}),
    ],
)
def test_init_waits_for_no_rank_that_was_initialised_by_itself(smp_world, config, given):
    def body():
        if dist.get_rank() == 0:
            smp.size()
        smp.init(given)
        return smp.rank()

    assert smp_world.run(body, ranks=2, config=config) == [0, 1]


def test_configurations_that_bodies_give_are_compared(smp_world):
    def body():
        with pytest.raises(ConfigError, match="microbatches: 2 on rank 0; 3 on rank 1"):
            smp.init({"microbatches": 2 + dist.get_rank()})

    smp_world.run(body, ranks=2)


def test_the_launcher_wins_over_the_dict(smp_world, monkeypatch):
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"pipeline_parallel_degree": 2}')

    def body():
        smp.init({"pipeline_parallel_degree": 4, "microbatches": 2})
        return smp.pp_size()

    assert smp_world.run(body, ranks=4) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[1]", "must hold a JSON object")]
)
def test_broken_parameters_of_the_launcher_are_named(monkeypatch, text, message):
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", text)
    with pytest.raises(ConfigError, match=f"SM_HP_MP_PARAMETERS.*{message}"):
        runtime.validate({}, 1)


@pytest.mark.parametrize("config", [7, "ddp", [("ddp", True)], {"ddp": []}, {1: 2}])
def test_what_is_no_configuration_is_a_config_error(config):
    with pytest.raises(ConfigError):
        runtime.validate(config, 1)


def test_bad_configuration_is_refused_before_any_rank_starts(smp_world):
    started = []
    with pytest.raises(ConfigError, match="pipeline_parallel_degree"):
        smp_world.run(lambda: started.append(1), ranks=3, config={"pipeline_parallel_degree": 2})
    assert not started


def test_a_plain_process_is_a_world_of_one_rank():
    assert not smp.is_initialized()
    try:
        smp.init({"microbatches": 2})
        assert (smp.rank(), smp.size(), smp.local_rank(), smp.local_size()) == (0, 1, 0, 1)
        assert smp.allgather({"a": [1]}, smp.WORLD) == [{"a": [1]}]
        smp.broadcast(1, smp.PP_GROUP)
        smp.barrier()
        with pytest.raises(smp_error()):
            smp.send(1, 0, smp.RankType.WORLD_RANK)
    finally:
        smp.shutdown()
    with pytest.raises(NotInitializedError, match=r"smp\.size: call smp\.init\(\) first"):
        smp.size()


def smp_error():
    from smp_core.errors import RankError

    return RankError


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set and RANK is not: start the ranks by a launcher"),
        ({"RANK": "1"}, "RANK=1 is set and WORLD_SIZE is not"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "torchrun: RANK=4 and WORLD_SIZE=4 do not say"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"},
            "rank 1 of 4: gloo under torchrun: .* Set MASTER_ADDR and MASTER_PORT",
        ),
    ],
)
def test_a_half_set_environment_of_a_launcher_is_refused(monkeypatch, environment, message):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendError, match=message):
        smp.init()
    assert not smp.is_initialized()


def test_a_configuration_that_does_not_fit_the_world_is_refused_before_anybody_is_met(monkeypatch):
    # Nobody listens at this address: to meet the others would end in another error, much later.
    met = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in met.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_degree.*3"):
        smp.init({"pipeline_parallel_degree": 2})


@pytest.mark.parametrize("first", [1, True, 1.0])
def test_what_was_accepted_before_does_not_decide_what_is_accepted_now(first):
    """1, True and 1.0 are equal, and 1 alone is a degree."""
    for value in (first, 1, True, 1.0):
        try:
            runtime.validate({"pipeline_parallel_degree": value}, 1)
            accepted = True
        except ConfigError:
            accepted = False
        assert accepted is (type(value) is int), value


def test_process_groups_of_another_configuration_are_other_groups(smp_world):
    def body():
        smp.init({"pipeline_parallel_degree": 2, "ddp": True})
        first = smp.get_dp_process_group()
        smp.shutdown()
        smp.init({"ddp": True})
        second = smp.get_dp_process_group()
        return first.size(), second.size()

    assert smp_world.run(body, ranks=4, init=False) == [(2, 4)] * 4


def test_a_process_group_of_a_destroyed_world_is_an_error(smp_world):
    def body():
        torch.distributed.destroy_process_group()
        with pytest.raises(NotInitializedError, match="has been destroyed"):
            smp.get_world_process_group()

    smp_world.run(body, ranks=2, config={"ddp": True})


def test_a_configuration_is_looked_at_once_not_on_every_rank_of_every_run(smp_world, monkeypatch):
    """Looking at all keys takes longer than a rank's whole part in a run."""
    seen = []
    looked_at = Config.without_effect

    def counting(config):
        seen.append(config)
        return looked_at(config)

    monkeypatch.setattr(Config, "without_effect", counting)
    config = {"pipeline_parallel_degree": 2, "microbatches": 31}  # in no other test
    for _ in range(3):
        assert smp_world.run(smp.pp_size, ranks=4, config=config) == [2] * 4
    assert len(seen) == 1
