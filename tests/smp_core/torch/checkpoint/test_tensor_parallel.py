"""Checkpoints with tensor parallelism: training goes on bit for bit, slices become whole parameters and back, and what
is not this rank's is refused on every rank.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch.exceptions import CheckpointError, StepAbortedError
from smp_core.torch.tensor_parallel.translation import Translation
from tests.smp_core.torch.checkpoint.tensor_runs import (
    WORLDS,
    Net,
    Run,
    batch,
    module,
    train_step,
    world,
)
from tests.smp_core.torch.sharding.checkpoint_models import equal, own_part, snapshot


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoints"


# ---- Partial checkpoints -------------------------------------------------------------------------


def saving(path, optimizer="adamw", tag="a"):
    run = Run(optimizer)
    run.steps(0, 1, 2)
    run.save(path, tag, user_content={"at": 3})
    saved = run.state()
    return saved, run.steps(3, 4), run.state()


def resuming(path, optimizer, after, number=2):
    run = Run(optimizer, seed=99)
    run.steps(*range(50, 50 + after))
    assert smp.resume_from_checkpoint(path) == {"at": 3}
    loaded = run.state() if run.model.partitioned else None
    return loaded, run.steps(*range(3, 3 + number)), run.state()


def without_buffers(state):
    """A state without buffers, which until the next step differ between replicas."""
    model, optimizer = state
    return [{name: each for name, each in model.items() if "running" not in name}, optimizer]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [(name, "adamw") for name in WORLDS] + [("pp2tp2", "momentum"), ("tp2sdp2", "momentum")],
)
def test_training_goes_on_from_a_partial_checkpoint_as_if_it_had_not_stopped(
    smp_world, path, name, optimizer
):
    how = world(name)
    before = smp_world.run(saving, path, optimizer, **how)
    # Before the first step the load of a pipeline waits; after one the optimizer has a state that has to go.
    for after in (0, 1) if name == "pp2tp2" else (0,) if "pp" in name else (1,):
        resumed = smp_world.run(resuming, path, optimizer, after, **how)
        for (saved, *went_on), (loaded, *goes_on) in zip(before, resumed, strict=True):
            if loaded is not None:
                equal(*(without_buffers(each) for each in (loaded, saved)))
            equal(goes_on, went_on)


def test_a_partial_checkpoint_resumes_with_any_number_of_replicas(smp_world, path):
    def goes_on():
        run = Run(seed=99)
        smp.resume_from_checkpoint(path)
        return run.state()

    saved = smp_world.run(saving, path, **world("tp2rdp2"))
    for name, ranks in (("tp2", 2), ("tp2rdp2", 8)):
        how = {**world(name), "ranks": ranks}
        for rank, loaded in enumerate(smp_world.run(goes_on, **how)):
            equal(*(without_buffers(each) for each in (loaded, saved[rank % 2][0])))


#: The files of a partial folder, by the name of the world (API 1.11).
FILES = {
    "tp2rdp2": ["model_0_0", "model_0_1", "optimizer_0_0", "optimizer_0_1"],
    "pp2tp2fp16": [
        f"{kind}_{pp}_{tp}"
        for kind in ("fp16_states", "model", "optimizer")
        for pp in (0, 1)
        for tp in (0, 1)
    ],
    "tp2sdp2": [
        f"{kind}_0_{tp}_{shard}"
        for kind in ("model", "optimizer")
        for tp in (0, 1)
        for shard in (0, 1)
    ],
    "tp2rdp2parts": [
        *("model_0_0", "model_0_1"),
        *(f"optimizer_0_{tp}_{rdp}" for tp in (0, 1) for rdp in (0, 1)),
    ],
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_on_the_disk(smp_world, path, name):
    smp_world.run(saving, path, **world(name))
    assert sorted(os.listdir(path)) == ["a_partial", "newest"]
    files = [f"{each}.pt" for each in FILES[name]]
    assert sorted(os.listdir(path / "a_partial")) == sorted(
        ["manifest.json", "user_content.pt", *files]
    )
    if name == "tp2rdp2":
        one, other = (
            torch.load(path / "a_partial" / f"model_0_{tp}.pt", weights_only=True)["model"]
            for tp in (0, 1)
        )
        assert one["first.weight"].shape == (12, 4)
        assert not torch.equal(one["first.weight"], other["first.weight"])
        assert torch.equal(one["own.weight"], other["own.weight"])


def test_a_script_saves_parts_on_one_replica_and_loads_them_on_all(smp_world, path):
    """As public scripts do it, with `smp.save` under `rdp_rank() == 0`."""
    path.mkdir()
    name = path / "x.pt"

    def saves():
        run = Run()
        run.steps(0, 1)
        if smp.rdp_rank() == 0:
            model, optimizer = run.model.local_state_dict(), run.optimizer.local_state_dict()
            smp.save({"model": model, "optimizer": optimizer}, name, partial=True)
        return run.steps(2), run.state()

    def loads():
        run = Run(seed=99)
        part = smp.load(name, partial=True)
        run.model.load_state_dict(part["model"])
        run.optimizer.load_state_dict(part["optimizer"])
        return run.steps(2), run.state()

    how = world("pp2tp2rdp2")
    saved = smp_world.run(saves, **how)
    assert sorted(os.listdir(path)) == [f"x.pt_{pp}_{tp}" for pp in (0, 1) for tp in (0, 1)]
    for one, other in zip(smp_world.run(loads, **how), saved, strict=True):
        equal(one, other)


def test_a_list_of_all_parts_of_the_optimizers_state_loads_on_every_replica(smp_world, path):
    """As public scripts save it: the first replica's ranks get the parts of all, and write them."""
    path.mkdir()

    def saves():
        run = Run()
        run.steps(0, 1)
        parts = run.optimizer.local_state_dict(gather_if_shard=True)
        if smp.rdp_rank() == 0:
            assert len(parts) == 2
            smp.save(parts, path / "o.pt")
        return run.state()[1]

    def loads(wrong):
        run = Run(seed=99)
        run.step(0)
        name = f"o.pt_0_{1 - smp.tp_rank()}" if wrong else f"o.pt_0_{smp.tp_rank()}"
        run.optimizer.load_state_dict(smp.load(path / name, partial=False))
        return run.state()[1]

    how = world("tp2rdp2parts")
    saved = smp_world.run(saves, **how)
    equal(smp_world.run(loads, False, **how), saved)
    with pytest.raises(CheckpointError, match="expected the slices of tp rank"):
        smp_world.run(loads, True, **how)


def test_a_partial_checkpoint_from_before_there_were_slices_loads(smp_world, path):
    """Files of former versions do not tell of slices."""
    how = {
        "ranks": 2,
        "config": {"pipeline_parallel_degree": 2, "microbatches": 2, "auto_partition": False},
    }
    how["config"]["default_partition"] = 0
    before = smp_world.run(saving, path, **how)
    manifest = json.loads((path / "a_partial" / "manifest.json").read_text())
    for name in manifest["files"]:
        if name != "user_content.pt":
            content = torch.load(path / "a_partial" / name)
            assert content.pop("slices") is None
            torch.save(content, path / "a_partial" / name, pickle_protocol=2)
            manifest["files"][name] = (path / "a_partial" / name).stat().st_size
    (path / "a_partial" / "manifest.json").write_text(json.dumps(manifest))
    for (_, *went_on), (_, *goes_on) in zip(
        before, smp_world.run(resuming, path, "adamw", 0, **how), strict=True
    ):
        equal(goes_on, went_on)


def test_partial_states_of_another_partition_are_merged_over_the_ranks_that_hold_the_same_slices(
    smp_world, path
):
    def saves():
        run = Run()
        run.steps(0, 1)
        smp.save([run.model.local_state_dict(), run.optimizer.local_state_dict()], path / "x")
        return smp.allgather(run.state(), smp.PP_GROUP)

    def loads():
        run = Run(seed=99)
        for child in (run.model.module.own, run.model.module.norm, run.model.module.embed):
            smp.set_partition(child, 1 - smp.state.cfg.default_partition)
        smp.set_partition(run.model.module.last, 0)
        model, optimizer = smp.load(path / "x")
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)
        run.optimizer.param_groups[0].update(lr=0.0)  # the load waits for a step
        run.model.register_post_step_hook(lambda *_: found.append(run.state()))
        found = []
        train_step(run.model, batch(2))
        (state,) = found
        return state

    path.mkdir()
    before = smp_world.run(saves, **world("pp2tp2"))
    for saved, (model, optimizer) in zip(
        before, smp_world.run(loads, **world("pp2tp2")), strict=True
    ):
        whole = {name: each for part in saved for name, each in part[0].items()}
        states = {index: each for part in saved for index, each in part[1]["state"].items()}
        assert len(optimizer["state"]) > 2
        parameters = {name: each for name, each in model.items() if "norm.running" not in name}
        for name in parameters.keys() - {"norm.num_batches_tracked"}:
            equal(parameters[name], whole[name], name)
        for index, each in optimizer["state"].items():
            equal(each, states[index], str(index))


# ---- Full checkpoints ----------------------------------------------------------------------------


def saving_fully(path):
    run = Run()
    run.steps(0, 1)
    run.save(path, "whole", partial=False, user_content={"at": 2})
    return run.state()[0]


def put_together(saved, how):
    """The plain module's state from the parts of the ranks, of which slices all are split along axis 1."""
    config, whole = how["config"], {}
    assert config.get("placement_strategy", "cluster") == "cluster"  # tp ranks come first
    tp = config["tensor_parallel_degree"]
    for rank in range(tp * config.get("pipeline_parallel_degree", 1)):
        part = unsharded(saved[rank::tp][: config.get("sharded_data_parallel_degree", 1)])
        for name, value in part.items():
            if name in part["_smp_tensor"]["split"] and rank % tp:
                whole[name] = torch.cat([whole[name], value], dim=1)
            elif isinstance(value, torch.Tensor):
                whole.setdefault(name, value)
    return whole


def unsharded(parts):
    """The part of a tp rank from those of its shard group, in which parameters lie flat."""
    shapes = parts[0].get("_smp_shard", {"split": {}})["split"]
    flat = {name: torch.cat([each[name] for each in parts]) for name in shapes}
    return {**parts[0], **{name: flat[name].view(shape) for name, shape in shapes.items()}}


#: Where a full checkpoint is saved, and where it is loaded.
MOVES = [
    ("tp2", "tp4"),
    ("tp4", "tp2sdp2"),
    ("pp2tp2", "tp2rdp2"),
    ("tp2rdp2", "pp2tp2"),
    ("tp2sdp2", "pp2tp2"),
    ("tp2rdp2parts", "pp2tp2rdp2"),
    ("tp2fp16", "tp2sdp2fp16"),
]


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_full_checkpoint_is_the_plain_modules_state_and_loads_at_any_degree(
    smp_world, path, before, after
):
    how = world(before)
    saved = smp_world.run(saving_fully, path, **how)
    assert sorted(os.listdir(path)) == ["newest", "user_content_whole", "whole"]
    found = torch.load(path / "whole", weights_only=True)
    plain = Net(99)
    if "fp16" in before:
        plain.half()
    plain.load_state_dict(found)
    assert list(found) == list(plain.state_dict())
    whole = put_together(saved, how)
    equal({name: whole[name] for name in found}, found)

    def loads():
        run = Run(seed=7)
        if run.model.partitioned:
            run.step(0)
        assert smp.resume_from_checkpoint(path, partial=False, load_optimizer=False) == {"at": 2}
        if not run.model.partitioned:
            run.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
            run.step(0)  # loads; nothing is learnt
        whole = run.model.state_dict()
        return snapshot(without_running(whole))

    for loaded in smp_world.run(loads, **world(after)):
        equal(loaded, without_running(found))


def without_running(state):
    return {name: value for name, value in state.items() if "norm." not in name}


def part_of(whole, like, split):
    """A rank's elements of a whole tensor: its slice, and of that its range, if the part is flat."""
    if split:
        whole = whole.chunk(smp.tp_size(), dim=1)[smp.tp_rank()]
    if like.shape != whole.shape:
        size = -(-whole.numel() // smp.rdp_size())
        whole = whole.reshape(-1)[smp.rdp_rank() * size :][:size]
    return whole


@pytest.mark.parametrize(
    "name",
    ["tp2", "pp2tp2", "tp2rdp2parts", "tp2sdp2", "tp2fp16", "tp2rdp2partsfp16", "tp2sdp2fp16"],
)
def test_a_full_checkpoint_without_tensor_parallelism_moves_to_slices(smp_world, path, name):
    """With the optimizer's state: each rank takes its part of moments and masters."""

    def saves():
        run = Run()
        run.steps(0, 1)
        run.save(path, partial=False, optimizer=run.optimizer)
        return snapshot([run.model.state_dict(), run.optimizer.state_dict()])

    half = {"fp16": True} if "fp16" in name else {}
    ((whole, states),) = smp_world.run(saves, ranks=1, config=half)

    def loads():
        run = Run(seed=7)
        run.step(0)
        names = [each for each, _ in run.model.module.named_parameters()]
        smp.resume_from_checkpoint(path, partial=False)
        equal(snapshot(run.model.state_dict()), whole)
        optimizer = own_part(run.optimizer)
        split = run.model.local_state_dict()["_smp_tensor"]["split"]
        seen = 0
        for index, state in optimizer["state"].items():
            for key, value in state.items():
                wanted = states["state"][index][key]
                if wanted.dim():
                    seen += 1
                    wanted = part_of(wanted, value, names[index] in split)
                equal(value, wanted, f"{names[index]}, {key}")
        assert seen > 5
        if half:
            equal(optimizer["fp16_states"]["loss_scaler"], states["fp16_states"]["loss_scaler"])
            masters = optimizer["fp16_states"]["masters"]
            for each, value in masters.items():
                wanted = part_of(states["fp16_states"]["masters"][each], value, each in split)
                equal(value, wanted, each)
            assert len(masters) == len(names)

    smp_world.run(loads, **world(name))


def test_a_full_checkpoint_of_slices_loads_without_tensor_parallelism(smp_world, path):
    def loads():
        run = Run(seed=7)
        smp.resume_from_checkpoint(path, partial=False)
        return snapshot(run.model.state_dict())

    saved = smp_world.run(saving_fully, path, **world("tp2"))
    (found,) = smp_world.run(loads, ranks=1)
    whole = put_together(saved, world("tp2"))
    equal(found, {each: whole[each] for each in found})


def test_training_with_an_optimizers_whole_state_goes_on_as_without_tensor_parallelism(
    smp_world, path
):
    """Small multiples of powers of 2, with which every sum is exact, so that degrees do not matter."""

    def lattice(state):
        return {
            name: torch.arange(each.numel()).remainder(5).sub(2).view(each.shape) / 4
            for name, each in state.items()
        }

    def trains(*numbers):
        torch.set_default_dtype(torch.float64)
        layers = [nn.Linear(8, 4), nn.Linear(4, 2)]
        for layer in layers:
            smp.set_tensor_parallelism(layer)
        model = smp.DistributedModel(nn.Sequential(*layers))
        sgd = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
        optimizer = smp.DistributedOptimizer(sgd)
        if 0 in numbers:
            model.load_state_dict(lattice(model.state_dict()))
        else:
            smp.resume_from_checkpoint(path, partial=False)
        for number in numbers:
            optimizer.zero_grad()
            squares(model, torch.arange(16.0).remainder(3).view(2, 8) + number)
            optimizer.step()
            if number == 0:
                smp.save_checkpoint(path, "a", False, model=model, optimizer=optimizer)
        return snapshot(dict(model.state_dict()))

    (wanted,) = smp_world.run(trains, 0, 1, ranks=1)
    config = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
    for found in smp_world.run(trains, 1, ranks=2, config=config):
        equal(found, wanted)


@smp.step
def squares(model, x):
    loss = model(x).square().sum() / 8
    model.backward(loss)
    return loss


def test_an_optimizers_full_state_of_other_parameters_is_refused(smp_world, path):
    def saves():
        run = Run(width=16)
        run.step(0)
        run.save(path, partial=False, model=None, optimizer=run.optimizer)
        return snapshot(run.optimizer.state_dict())

    (state,) = smp_world.run(saves, ranks=1)

    def loads():
        run = Run()
        run.step(0)
        before = run.state()
        pattern = (
            r"the state is of another model: 'exp_avg' of parameter 1 is of shape \[7, 16\], and the parameter of "
            r"\[7, 8\].*load_optimizer=False"
        )
        with pytest.raises(CheckpointError, match=pattern):
            run.optimizer.load_state_dict(state)
        with pytest.raises(CheckpointError, match=pattern) as error:
            smp.resume_from_checkpoint(path, partial=False)
        equal(run.state(), before)
        run.step(1)
        return str(error.value)

    for name in ("tp2", "tp2sdp2", "tp2rdp2partsfp16"):
        assert len(set(smp_world.run(loads, **world(name)))) == 1


def test_an_optimizers_full_state_says_nothing_of_modules_with_other_parameters(smp_world):
    """As of Hugging Face's: their weights are translated, and the optimizer counts parameters."""

    def body():
        run = Run()
        run.step(0)
        run.model._translations = {"first": Translation(())}
        part = run.optimizer.local_state_dict(False)
        full = {key: value for key, value in part.items() if not key.startswith("_smp")}
        with pytest.raises(CheckpointError, match="as that of 'first', has other parameters"):
            run.optimizer.load_state_dict(full)
        run.optimizer.load_state_dict(part)

    smp_world.run(body, **world("tp2"))


def test_a_plain_torch_state_loads_at_any_degree(smp_world, path):
    path.mkdir()
    plain = Net(3)
    torch.save(plain.state_dict(), path / "plain")

    def loads():
        run = Run(seed=99)
        if not run.model.partitioned:
            run.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
        smp.resume_from_checkpoint(path, "plain", partial=False)
        if not run.model.partitioned:
            run.step(0)
        return snapshot(without_running(run.model.state_dict()))

    for name in ("tp2", "tp4", "pp2tp2", "tp2sdp2"):
        for found in smp_world.run(loads, **world(name)):
            equal(found, without_running(dict(plain.state_dict())))


def test_a_full_checkpoint_of_another_model_is_refused_before_anything_is_loaded(smp_world, path):
    smp_world.run(saving_fully, path, **world("tp2"))
    pattern = (
        r"does not fit the model of this run, which is unchanged: [\s\S]*mismatch for embed.weight"
    )
    how = world("tp2rdp2")
    refused(smp_world, pattern, path, how, partial=False, width=16)


# ---- Refusals ------------------------------------------------------------------------------------


def refused(smp_world, pattern, path, how, partial=True, **arguments):
    """Resuming raises this on every rank in the same words, nothing has changed, and the ranks can still train."""

    def body():
        run = Run(seed=99, **arguments)
        run.step(7)
        before = run.state()
        with pytest.raises(CheckpointError, match=pattern) as error:
            smp.resume_from_checkpoint(path, partial=partial, load_optimizer=partial)
        equal(run.state(), before)
        run.step(8)
        return str(error.value)

    said = smp_world.run(body, **how)
    assert len(set(said)) == 1, said


@pytest.mark.parametrize(
    ("before", "after", "key", "numbers"),
    [
        ("tp2", "tp4", "tensor_parallel_degree", (2, 4)),
        ("tp4", "tp2", "tensor_parallel_degree", (4, 2)),
        ("tp2", "pp2tp2", "pipeline_parallel_degree", (1, 2)),
        ("pp2tp2", "tp2rdp2", "pipeline_parallel_degree", (2, 1)),
        ("tp2sdp2", "tp2rdp2", "sharded_data_parallel_degree", (2, 1)),
        ("tp2rdp2", "tp2sdp2", "sharded_data_parallel_degree", (1, 2)),
    ],
)
def test_another_degree_is_named_by_both_numbers(smp_world, path, before, after, key, numbers):
    smp_world.run(saving, path, **world(before))
    then, now = numbers
    pattern = (
        rf"saved with {key}={then}, and this run has {key}={now}\. A partial checkpoint does not change degrees: run "
        r"with .* save a full one \(partial=False\)"
    )
    refused(smp_world, pattern, path, world(after))


def test_degree_one_is_another_degree_in_both_directions(smp_world, path):
    one = {"ranks": 2, "config": {"ddp": True}}
    pattern = "saved with tensor_parallel_degree={}, and this run has tensor_parallel_degree={}"
    smp_world.run(saving, path / "tp", **world("tp2"))
    refused(smp_world, pattern.format(2, 1), path / "tp", one)
    smp_world.run(saving, path / "one", **one)
    refused(smp_world, pattern.format(1, 2), path / "one", world("tp2"))


def copy(folder, kind, one, other):
    """Copy a file over another one, also in the list of files: slices of different ranks have the same sizes."""
    shutil.copy(folder / f"{kind}_{one}.pt", folder / f"{kind}_{other}.pt")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][f"{kind}_{other}.pt"] = manifest["files"][f"{kind}_{one}.pt"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "damage", "pattern"),
    [
        ("tp2", lambda at: (at / "model_0_1.pt").unlink(), r"model_0_1\.pt: missing"),
        ("pp2tp2", lambda at: (at / "optimizer_1_0.pt").unlink(), r"optimizer_1_0\.pt: missing"),
        ("tp2", lambda at: os.truncate(at / "optimizer_0_1.pt", 100), r"_0_1\.pt: torn"),
        (
            "tp2",
            lambda at: copy(at, "model", "0_0", "0_1"),
            r"model_0_1\.pt: expected the slices of tp rank 1 of 2, found .* rank 0 of 2.* 'embed\.weight': the file",
        ),
        (
            "pp2tp2",
            lambda at: copy(at, "optimizer", "1_1", "1_0"),
            r"optimizer_1_0\.pt: expected the slices of tp rank 0 of 2, found the slices of tp rank 1",
        ),
        (
            "tp2fp16",
            lambda at: copy(at, "fp16_states", "0_1", "0_0"),
            r"fp16_states_0_0\.pt: expected the slices of tp rank 0 of 2, found the slices of tp rank 1",
        ),
        (
            "tp2sdp2",
            lambda at: copy(at, "optimizer", "0_1_1", "0_0_1"),
            r"optimizer_0_0_1\.pt: expected the slices of tp rank 0 of 2, found the slices of tp rank 1",
        ),
    ],
    ids=["missing", "missing of a partition", "torn", "model", "optimizer", "masters", "shard"],
)
def test_files_of_one_tp_rank_that_are_damaged_or_mixed_up(smp_world, path, name, damage, pattern):
    smp_world.run(saving, path, **world(name))
    damage(path / "a_partial")
    refused(smp_world, pattern, path, world(name))


def test_a_partial_checkpoint_of_another_model(smp_world, path):
    smp_world.run(saving, path, **world("tp2"))
    pattern = (
        r"model_0_0\.pt: is of another model.*: parameter 'embed\.weight' is split as .* there and split as "
        r".*Build the model that was saved"
    )
    refused(smp_world, pattern, path, world("tp2"), width=16)


def test_other_distributed_modules_are_another_model(smp_world, path):
    def saves():
        net = module(1)
        smp.set_tensor_parallelism(net.first, False)
        model = smp.DistributedModel(net)
        smp.save_checkpoint(path, "a", model=model)

    smp_world.run(saves, **world("tp2"))
    pattern = r"parameter 'first\.weight' is whole, or not at all, there and split as .* here"
    refused(smp_world, pattern, path, world("tp2"))


def test_a_part_of_another_tp_rank_is_refused_with_its_rank_and_parameter(smp_world):
    def body():
        run = Run()
        run.step(0)
        model, optimizer = (
            smp.allgather(part, smp.TP_GROUP)[1 - smp.tp_rank()]
            for part in (run.model.local_state_dict(), run.optimizer.local_state_dict())
        )
        before = run.state()
        mine, other = smp.tp_rank(), 1 - smp.tp_rank()
        pattern = (
            f"the state: expected the slices of tp rank {mine} of 2, found the slices of tp rank {other} of 2, as of "
            "parameter {}: another rank's"
        )
        with pytest.raises(CheckpointError, match=pattern.format(r"'embed\.weight'")):
            run.model.load_state_dict(model)
        with pytest.raises(CheckpointError, match=pattern.format(r"\d")):
            run.optimizer.load_state_dict(optimizer)
        whole = {**run.optimizer.local_state_dict(), "_smp_tensor": None}
        with pytest.raises(CheckpointError, match="holds whole parameters only, and this run has"):
            run.optimizer.load_state_dict(whole)
        equal(run.state(), before)
        smp.barrier()

    for name in ("tp2", "pp2tp2", "tp2fp16"):
        smp_world.run(body, **world(name))


def test_a_part_that_one_rank_of_a_pipeline_refuses_is_refused_before_any_waits(smp_world):
    """The load waits for the first step, and merges the parts of all pp ranks."""

    def body():
        run = Run()
        part = run.model.local_state_dict()
        wrong = smp.allgather(part, smp.TP_GROUP)[1 - smp.tp_rank()]
        run.model.load_state_dict({**(wrong if smp.rank() == 2 else part), "_smp_is_partial": True})
        with pytest.raises((CheckpointError, StepAbortedError), match="slices of tp rank"):
            train_step(run.model, batch(0))
        smp.barrier()

    smp_world.run(body, **world("pp2tp2"))


def test_a_full_checkpoint_of_the_optimizer_is_refused(smp_world, path):
    def body():
        run = Run()
        run.step(0)
        with pytest.raises(CheckpointError, match=r"tensor parallelism.* Save with partial=True"):
            smp.save_checkpoint(path, "a", False, model=run.model, optimizer=run.optimizer)
        run.step(1)

    smp_world.run(body, **world("tp2rdp2"))
    assert not path.exists()


def test_ranks_of_one_tp_group_that_give_different_tags(smp_world, path):
    def body():
        run = Run()
        with pytest.raises(CheckpointError, match=r"ranks do not call it alike .*'t0'.*'t1'"):
            run.save(path, f"t{smp.tp_rank()}")
        run.step(0)

    smp_world.run(body, **world("tp2"))
    assert not path.exists()


def test_a_full_disk_on_one_tp_rank_is_an_error_on_all_and_leaves_the_checkpoint_from_before(
    smp_world, smp_faults, path
):
    def saves_again():
        run = Run(seed=5)
        run.step(0)
        with pytest.raises(CheckpointError, match=r"model_1_1\.pt.* No space left") as error:
            run.save(path)
        run.step(1)
        return str(error.value)

    how = world("pp2tp2")
    before = smp_world.run(saving, path, **how)
    files = sorted(os.listdir(path / "a_partial"))
    with smp_faults.full_disk(rank=3, below=path, after=500):
        assert len(set(smp_world.run(saves_again, **how))) == 1
    assert sorted(os.listdir(path)) == ["a_partial", "newest"]
    assert sorted(os.listdir(path / "a_partial")) == files
    for (_, *went_on), (_, *goes_on) in zip(
        before, smp_world.run(resuming, path, "adamw", 0, **how), strict=True
    ):
        equal(goes_on, went_on)


# ---- Transformer modules -------------------------------------------------------------------------


class LanguageRun(Run):
    """Training of a transformer, whose head is tied to its embedding and whose norms may be split."""

    def __init__(self, seed=1, pre=True):
        torch.manual_seed(seed)
        net = smp.nn.DistributedTransformerLMHead(
            num_layers=2,
            num_attention_heads=4,
            attention_head_size=4,
            hidden_size=16,
            intermediate_size=32,
            vocab_size=12,
            num_positions=8,
            attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
            causal_mask_size=8,
            pre_layernorm=pre,
            distribute_embedding=True,
        )
        self.model = smp.DistributedModel(net)
        made = torch.optim.AdamW(self.model.parameters(), lr=0.03)
        self.optimizer = smp.DistributedOptimizer(made)

    def step(self, number):
        self.optimizer.zero_grad()
        ids = batch(number)
        loss = language_step(self.model, ids, torch.roll(ids, 1, -1)).reduce_mean()
        self.optimizer.step()
        return loss.detach().clone()


@smp.step
def language_step(model, ids, labels):
    loss, _ = model((ids, None, None, None, labels))
    model.backward(loss)
    return loss


def language_world(name, optimize="memory"):
    auto = {"auto_partition": True} if "pp" in name else {}
    return world(name, optimize=optimize, **auto)


@pytest.mark.parametrize(
    ("name", "optimize"), [("tp2rdp2", "speed"), ("pp2tp2", "memory"), ("tp2sdp2", "memory")]
)
def test_a_transformer_goes_on_and_moves_between_degrees(smp_world, path, name, optimize):
    def saves():
        run = LanguageRun()
        run.steps(0, 1)
        run.save(path)
        run.save(path, "whole", partial=False)
        whole = snapshot(run.model.state_dict())
        return whole, run.steps(2, 3), run.state()

    def goes_on():
        run = LanguageRun(seed=9)
        smp.resume_from_checkpoint(path, "a")
        return run.steps(2, 3), run.state()

    def loads():
        run = LanguageRun(seed=9)
        run.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
        smp.resume_from_checkpoint(path, "whole", partial=False, load_optimizer=False)
        if not run.model.partitioned:
            run.step(0)
        return snapshot(run.model.state_dict())

    how = language_world(name, optimize)
    saved = smp_world.run(saves, **how)
    whole = saved[0][0]
    for (_, *went_on), goes in zip(saved, smp_world.run(goes_on, **how), strict=True):
        equal(list(goes), went_on)
    found = torch.load(path / "whole", weights_only=True)
    equal(found, whole)
    other = {"memory": "speed", "speed": "memory"}[optimize]
    for after in ("tp4", "pp2tp2"):
        for loaded in smp_world.run(loads, **language_world(after, other)):
            equal(loaded, whole)
    ((alone),) = smp_world.run(loads, ranks=1)
    equal(alone, whole)


def test_a_partial_checkpoint_of_another_layout_is_refused(smp_world, path):
    def saves():
        run = LanguageRun()
        run.save(path)

    def resumes():
        LanguageRun()
        with pytest.raises(CheckpointError, match=r"parameter '.*' is split as .* whole, or not"):
            smp.resume_from_checkpoint(path)

    smp_world.run(saves, **language_world("tp2"))
    smp_world.run(resumes, **language_world("tp2", "speed"))
