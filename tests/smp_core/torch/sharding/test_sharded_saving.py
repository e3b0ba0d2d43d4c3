"""Shards that a script saves, loads and copies by itself: each rank gets its own back, or is told."""

from __future__ import annotations

import pytest

import smp_core.torch as smp
from smp_core.torch.exceptions import CheckpointError
from tests.smp_core.torch.sharding.checkpoint_models import Run, config, equal, snapshot


@pytest.mark.parametrize("v3", [False, True])
def test_each_rank_loads_the_shard_that_it_saved(smp_world, tmp_path, v3):
    """Shards of an even model have the same sizes on both ranks."""

    def body():
        run = Run("momentum")
        run.steps(0)
        before = snapshot(run.model.state_dict())
        smp.save(run.model.local_state_dict(), tmp_path / "model", partial=True, v3=v3)
        smp.save(
            run.optimizer.local_state_dict(gather_if_shard=False), tmp_path / "optimizer", v3=v3
        )
        run.steps(1)
        smp.barrier()
        run.model.load_state_dict(smp.load(tmp_path / "model", partial=True))
        run.optimizer.load_state_dict(smp.load(tmp_path / "optimizer", partial=True))
        equal(snapshot(run.model.state_dict()), before)

    smp_world.run(body, ranks=4, config=config(2))
    names = {"0_0_0", "0_0_1", "0_0_2", "0_0_3"} if v3 else {"0", "1"}
    assert {each.name for each in tmp_path.iterdir()} == {
        f"{what}_{name}" for what in ("model", "optimizer") for name in names
    }


def test_what_the_first_rank_saved_for_all_is_found(smp_world, tmp_path):
    """The list of all parts is one file, ``{f}_{mp_rank}``."""

    def body():
        run = Run("momentum")
        run.steps(0)
        before = snapshot(run.optimizer.state_dict())
        parts = run.optimizer.local_state_dict()
        if smp.rdp_rank() == 0:
            smp.save(parts, tmp_path / "optimizer", partial=True)
        run.steps(1)
        smp.barrier()
        run.optimizer.load_state_dict(smp.load(tmp_path / "optimizer", partial=True))
        equal(snapshot(run.optimizer.state_dict()), before)

    smp_world.run(body, ranks=2, config=config(2))


def test_the_shards_of_another_rank_or_degree_are_refused(smp_world):
    def body():
        run = Run("momentum")
        parts = smp.allgather(snapshot(run.model.local_state_dict()), smp.WORLD)
        before = snapshot(run.model.state_dict())
        mine, other = smp.rank(), 1 - smp.rank()
        with pytest.raises(
            CheckpointError, match=f"state: expected shard {mine} of 2, found shard {other}: it is"
        ):
            run.model.load_state_dict(parts[other])
        equal(snapshot(run.model.state_dict()), before)
        return parts[0]

    part = smp_world.run(body, ranks=2, config=config(2))[0]

    def elsewhere(said):
        model = Run("momentum").model
        before = snapshot(model.state_dict())
        with pytest.raises(CheckpointError, match=said):
            model.load_state_dict(part)
        equal(snapshot(model.state_dict()), before)

    said = "holds a shard of sharded_data_parallel_degree=2, and this run has 4"
    smp_world.run(elsewhere, said, ranks=4, config=config(4))
    smp_world.run(elsewhere, "expected parameters that are whole, as in this run, found", ranks=1)
