"""Checkpoints of sharded training: training goes on bit for bit at any degree, and what is not this rank's is
refused on every rank.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

import smp_core.torch as smp
from smp_core.torch.exceptions import CheckpointError
from tests.smp_core.torch.sharding.checkpoint_models import (
    OPTIMIZERS,
    Plain,
    Run,
    config,
    equal,
    expected,
    snapshot,
)

HUGE = 10**9


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoints"


# ---- Files ---------------------------------------------------------------------------------------


def saving(path, optimizer, partial, tag="a"):
    run = Run(optimizer)
    losses = run.steps(0, 1)
    smp.save_checkpoint(
        path, tag, partial, model=run.model, optimizer=run.optimizer, user_content={"at": 2}
    )
    return losses + run.steps(2)


def resuming(path, optimizer, partial, tag=None, **model):
    run = Run(optimizer, seed=99, **model)
    run.step(7)  # so that there is state, which has to go
    content = smp.resume_from_checkpoint(path, tag, partial)
    assert content == {"at": 2}
    return run.steps(2, 3), run.state()


#: From which degree, ranks and threshold to which.
MOVES = [
    ((4, 4, 0), (2, 4, 0)),
    ((2, 4, 0), (4, 4, 8)),
    ((2, 2, 8), (4, 4, 0)),
    ((4, 4, 8), (1, 4, 0)),
    ((1, 2, 0), (2, 2, HUGE)),
    ((2, 4, HUGE), (1, 1, 0)),
    ((1, 1, 0), (4, 4, 2)),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_full_checkpoint_goes_on_at_any_degree_and_size(
    smp_world, path, optimizer, before, after
):
    degree, ranks, threshold = before
    wanted, states = expected(optimizer, ranks, ranks, after[1], after[1])
    seen = smp_world.run(
        saving, path, optimizer, False, ranks=ranks, config=config(degree, threshold)
    )
    for rank, losses in enumerate(seen):
        equal(losses[:2], [each[rank] for each in wanted[:2]])
    degree, ranks, threshold = after
    seen = smp_world.run(
        resuming, path, optimizer, False, ranks=ranks, config=config(degree, threshold)
    )
    for rank, (losses, state) in enumerate(seen):
        equal(losses, [each[rank] for each in wanted[2:]])
        equal(state, states[-1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("threshold", [0, 8, HUGE])
def test_a_partial_checkpoint_goes_on_at_its_degree(smp_world, path, optimizer, threshold):
    """Also with another number of replicas."""
    wanted, states = expected(optimizer, 2, 2, 4, 4)
    smp_world.run(saving, path, optimizer, True, ranks=2, config=config(2, threshold))
    seen = smp_world.run(resuming, path, optimizer, True, ranks=4, config=config(2, threshold))
    for rank, (losses, state) in enumerate(seen):
        equal(losses, [each[rank] for each in wanted[2:]])
        equal(state, states[-1])


def test_a_full_checkpoint_is_plain_torchs(smp_world, path):
    _, states = expected("adamw", 4, 4)
    smp_world.run(saving, path, "adamw", False, ranks=4, config=config(4))
    content = torch.load(path / "a")
    plain = Plain("adamw")
    plain.model.load_state_dict(content["model"])
    plain.optimizer.load_state_dict(content["optimizer"])
    equal((dict(plain.model.state_dict()), plain.optimizer.state_dict()), states[-1])


def test_what_is_on_the_disk(smp_world, path):
    smp_world.run(saving, path, "adamw", True, ranks=4, config=config(2))
    names = [f"{kind}_{shard}.pt" for kind in ("model", "optimizer") for shard in (0, 1)]
    assert sorted(os.listdir(path / "a_partial")) == ["manifest.json", *names, "user_content.pt"]
    manifest = json.loads((path / "a_partial" / "manifest.json").read_text())
    assert manifest["degrees"]["sharded_data_parallel_degree"] == 2
    sizes = set()
    for shard in (0, 1):
        for kind in ("model", "optimizer"):
            content = torch.load(path / "a_partial" / f"{kind}_{shard}.pt")
            assert content["_smp_is_partial"]
            assert (content["shard"]["rank"], content["shard"]["degree"]) == (shard, 2)
            assert content["shard"]["split"]["embed.weight"] == [7, 6]
            if kind == "model":
                assert content["model"]["embed.weight"].shape == (21,)
            sizes.add(os.path.getsize(path / "a_partial" / f"{kind}_{shard}.pt"))
    smp_world.run(saving, path, "adamw", False, "full", ranks=4, config=config(2))
    assert max(sizes) < os.path.getsize(path / "full")


@pytest.mark.parametrize("threshold", [0, 8, HUGE])
def test_parameters_are_put_together_from_the_flat_groups_of_all_shards(smp_world, path, threshold):
    """As a reader of such files does that knows shapes, the order of the optimizer's groups, and no more."""
    _, states = expected("momentum", 4, 4)
    smp_world.run(saving, path, "momentum", True, ranks=4, config=config(4, threshold))
    files = [torch.load(path / "a_partial" / f"optimizer_{shard}.pt") for shard in range(4)]
    assert [file["partition_count"] for file in files] == [4] * 4
    (*groups,) = zip(*(file["fp32_flat_groups"] for file in files), strict=True)
    assert len(groups) == 1
    assert {(part.dtype, part.dim()) for part in groups[0]} == {(torch.float32, 1)}
    wanted, start = states[-1][0], 0
    for name, parameter in Plain("momentum").model.named_parameters():
        part = -(-parameter.numel() // 4)
        flat = torch.cat([rank[start : start + part] for rank in groups[0]])
        start += part
        assert torch.equal(flat[: parameter.numel()].view(parameter.shape), wanted[name]), name
        assert not flat[parameter.numel() :].any()
    assert {len(rank) for rank in groups[0]} == {start}


def test_a_model_s_file_has_its_state_as_module_too_and_stores_it_once(smp_world, path):
    smp_world.run(saving, path, "momentum", True, ranks=2, config=config(2))
    content = torch.load(path / "a_partial" / "model_1.pt")
    for name, value in content["model"].items():
        if isinstance(value, torch.Tensor):
            assert content["module"][name].data_ptr() == value.data_ptr()


# ---- Refused on every rank, in the same words, with nothing changed ------------------------------


def refused(smp_world, pattern, path, partial, degree=2, ranks=2, threshold=0, **arguments):
    """Resuming raises this on every rank, nothing has changed, and the ranks can still train."""

    def body():
        run = Run("adamw", seed=99, **arguments)
        run.step(7)
        before = run.state()
        with pytest.raises(CheckpointError, match=pattern) as error:
            smp.resume_from_checkpoint(path, partial=partial)
        equal(run.state(), before)
        run.step(8)
        return str(error.value)

    said = smp_world.run(body, ranks=ranks, config=config(degree, threshold))
    assert len(set(said)) == 1, said


def test_another_degree_is_named_by_both_numbers(smp_world, path):
    smp_world.run(saving, path, "adamw", True, ranks=4, config=config(2))
    said = (
        "saved with sharded_data_parallel_degree=2, and this run has sharded_data_parallel_degree="
    )
    for degree in (1, 4):
        refused(smp_world, f"{said}{degree}", path, True, degree, 4)


def copy(folder, kind, one, other):
    """Also in the list of files: of most models shards have the same sizes."""
    shutil.copy(folder / f"{kind}_{one}.pt", folder / f"{kind}_{other}.pt")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][f"{kind}_{other}.pt"] = manifest["files"][f"{kind}_{one}.pt"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def flip(file):
    content = bytearray(file.read_bytes())
    at = content.index(torch.load(file)["model"]["embed.weight"].numpy().tobytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (lambda at: (at / "model_1.pt").unlink(), r"model_1\.pt: missing"),
        (lambda at: os.truncate(at / "optimizer_1.pt", 100), r"optimizer_1\.pt: torn"),
        (lambda at: flip(at / "model_0.pt"), r"model_0\.pt: expected .* torn or damaged"),
        (
            lambda at: copy(at, "model", 0, 1),
            r"model_1\.pt: expected shard 1 of 2, found shard 0: the file has another one's name",
        ),
        (lambda at: copy(at, "optimizer", 1, 0), r"optimizer_0\.pt: expected shard 0 of 2, found"),
    ],
)
def test_damaged_and_mixed_up_shards(smp_world, path, damage, pattern):
    smp_world.run(saving, path, "adamw", True, ranks=2, config=config(2))
    damage(path / "a_partial")
    refused(smp_world, pattern, path, True)


def test_a_shard_of_another_save(smp_world, path):
    smp_world.run(saving, path, "adamw", True, "b", ranks=2, config=config(2))
    smp_world.run(saving, path, "adamw", True, "a", ranks=2, config=config(2))
    shutil.copy(path / "b_partial" / "model_1.pt", path / "a_partial" / "model_1.pt")
    refused(smp_world, r"model_1\.pt: is not of the save", path, True)


def test_another_threshold_is_told(smp_world, path):
    smp_world.run(saving, path, "adamw", True, ranks=2, config=config(2, 8))
    pattern = (
        r"has parameter 'blocks\.0\.0\.bias' whole, and this run has it split.*another sdp_param"
    )
    refused(smp_world, pattern, path, True, threshold=0)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_checkpoint_of_another_model(smp_world, path, degree):
    smp_world.run(saving, path, "adamw", True, ranks=2, config=config(degree))
    smp_world.run(saving, path, "adamw", False, "full", ranks=2, config=config(degree))
    refused(
        smp_world,
        r"does not fit the model of this run, which is unchanged: Error[\s\S]* mismatch for embed",
        path,
        False,
        degree,
        features=8,
    )
    (path / "newest").write_text("a")
    pattern = (
        "embed" if degree == 1 else r"of another model: parameter 'blocks\.0\.0\.weight' is of"
    )
    refused(smp_world, pattern, path, True, degree, features=8)


# ---- Trouble while saving ------------------------------------------------------------------------


@pytest.mark.parametrize(  # rank 0 alone writes a full checkpoint
    ("partial", "rank", "room"),
    [(True, 0, 0), (True, 1, 4000), (True, 0, 4000), (False, 0, 0), (False, 0, 4000)],
)
def test_a_full_disk_leaves_the_checkpoint_from_before(
    smp_world, smp_faults, path, partial, rank, room
):
    how = {"ranks": 2, "config": config(2)}
    wanted, states = expected("adamw", 2, 2, 2, 2)

    def again():
        run = Run("adamw", seed=3)
        run.step(5)
        with pytest.raises(CheckpointError, match="No space left on device") as error:
            smp.save_checkpoint(
                path, "a", partial, model=run.model, optimizer=run.optimizer, user_content={}
            )
        run.step(6)
        return str(error.value)

    smp_world.run(saving, path, "adamw", partial, **how)
    with smp_faults.full_disk(rank=rank, below=path, after=room):
        said = smp_world.run(again, **how)
    assert said[0] == said[1]
    for rank, (losses, state) in enumerate(smp_world.run(resuming, path, "adamw", partial, **how)):
        equal(losses, [each[rank] for each in wanted[2:]])
        equal(state, states[-1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_lost_while_saving_leaves_the_old_checkpoint_or_the_new(
    smp_world, smp_faults, path, rank
):
    """The rank is lost at each of the moments at which a save meets the others."""
    how = {"ranks": 2, "config": config(2)}

    def save(seed):
        run = Run("adamw", seed=seed)
        smp.save_checkpoint(path, "a", model=run.model, optimizer=run.optimizer, user_content=seed)

    def content():
        run = Run("adamw", seed=99)
        found = smp.resume_from_checkpoint(path, "a")
        return found, run.state()[0]

    smp_world.run(save, 1, **how)
    old = smp_world.run(content, **how)[0]
    found = []
    for nth in range(1, 25):
        smp_faults.kill(rank=rank, at="allgather", nth=nth, required=False)
        report = smp_world.report(save, 2, **how)
        smp_faults.clear()
        seed, state = smp_world.run(content, **how)[0]
        if seed == 1:
            equal(state, old[1])
        found.append(seed)
        if report.error is None:
            break
    assert found == sorted(found)
    assert set(found) == {1, 2}


# ---- 16 bits -------------------------------------------------------------------------------------

#: The first scale overflows, so that the scaler has something to remember.
SCALES = {
    "dynamic_loss_scale": True,
    "dynamic_loss_args": {"init_scale": 2.0**18, "scale_factor": 2.0**8, "scale_window": 3},
}


def precise(run):
    """All that training depends on: parameters, masters, the optimizer's state, the scaler's."""
    state = run.state()
    assert state[1]["fp16_states"]["masters"]["embed.weight"].dtype is torch.float32
    assert state[0]["embed.weight"].dtype is not torch.float32
    return state


def saving_precisely(path, partial):
    run = Run("adamw", **SCALES)
    overflows = [run.overflowed(number) for number in range(3)]
    saved = precise(run)
    smp.save_checkpoint(path, "a", partial, model=run.model, optimizer=run.optimizer)
    return overflows, saved, run.steps(3, 4), precise(run)


def resuming_precisely(path, partial):
    run = Run("adamw", seed=99, **SCALES)
    run.step(7)
    smp.resume_from_checkpoint(path, partial=partial)
    return precise(run), run.steps(3, 4), precise(run)


@pytest.mark.parametrize(
    ("half", "partial", "before", "after"),
    [
        ("bf16", True, (2, 0), (2, 0)),
        ("bf16", False, (4, 0), (2, 8)),
        ("fp16", True, (4, 8), (4, 8)),
        ("fp16", False, (2, 0), (4, 0)),
        ("fp16", False, (1, 0), (4, 0)),
        ("fp16", False, (4, 8), (1, 0)),
    ],
)
def test_training_in_16_bits_goes_on_with_masters_and_scaler(
    smp_world, path, half, partial, before, after
):
    how = {"ranks": 4, "config": config(*before, **{half: True})}
    seen = smp_world.run(saving_precisely, path, partial, **how)
    how["config"] = config(*after, **{half: True})
    resumed = smp_world.run(resuming_precisely, path, partial, **how)
    for (overflows, saved, *went_on), (loaded, *goes_on) in zip(seen, resumed, strict=True):
        equal(loaded, saved)
        equal(goes_on, went_on)
        assert any(overflows) == (half == "fp16")
        masters = saved[1]["fp16_states"]["masters"]
        rounded = {name: each.to(saved[0][name].dtype) for name, each in masters.items()}
        equal(rounded, {name: saved[0][name] for name in masters})
        assert any(bool((rounded[name].float() != masters[name]).any()) for name in masters)


def test_the_sharded_optimizer_state_can_be_left_out(smp_world, path):
    """Masters and the loss scaler come all the same."""

    def resuming():
        run = Run("adamw", seed=99, **SCALES)
        before = snapshot(run.optimizer.state_dict())
        smp.resume_from_checkpoint(path, load_sharded_optimizer_state=False)
        return before, precise(run)

    how = {"ranks": 2, "config": config(2, fp16=True)}
    seen = smp_world.run(saving_precisely, path, True, **how)
    for (_, saved, *_), (before, (model, state)) in zip(
        seen, smp_world.run(resuming, **how), strict=True
    ):
        equal(model, saved[0])
        equal(state.pop("fp16_states"), saved[1]["fp16_states"])
        before.pop("fp16_states")
        equal(state, before)
