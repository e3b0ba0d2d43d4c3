"""Checkpoints: what comes back, under which names, and what is refused on every rank."""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.errors import ArgumentError, ArgumentTypeError
from smp_core.torch.checkpoint import full
from smp_core.torch.exceptions import CheckpointError

PIPELINE = {
    "pipeline_parallel_degree": 2,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
}
CONTENT = {"steps": 3, "args": {"lr": 0.1, "names": ["a", ("b", None)]}, "rng": torch.arange(3)}


class Net(nn.Module):
    def __init__(self, owners, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in owners)
        self.norm = nn.BatchNorm1d(4)
        if smp.pp_size() > 1:
            for layer, owner in zip(self.layers, owners, strict=True):
                smp.set_partition(layer, owner)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


@smp.step
def _train(model, x):
    loss = model(x).pow(3).mean()
    model.backward(loss)
    return loss


class Run:
    """Training on all ranks, from a seed."""

    def __init__(self, owners=(0, 1, 1), seed=1, optimizer=True):
        self.model = smp.DistributedModel(Net(owners, seed))
        self.optimizer = None
        if optimizer:
            adam = torch.optim.Adam(self.model.parameters(), lr=0.01)
            self.optimizer = smp.DistributedOptimizer(adam)

    def steps(self, *seeds):
        losses = []
        for seed in seeds:
            torch.manual_seed(seed)
            self.optimizer.zero_grad()
            losses.append(_train(self.model, torch.randn(4, 4)).reduce_mean().item())
            self.optimizer.step()
        return losses

    def save(self, path, tag="a", **arguments):
        arguments = {"model": self.model, "optimizer": self.optimizer, **arguments}
        smp.save_checkpoint(path, tag, **arguments)


def _state(model):
    """All values of the model, by name, on every rank."""
    part = {
        name: value.clone() for name, value in model.module.state_dict().items() if value.numel()
    }
    whole = {}
    for other in smp.allgather(part, smp.PP_GROUP):
        whole.update(other)
    return whole


def _equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoints"


def _saving(path, partial=True):
    run = Run()
    losses = run.steps(1, 2)
    run.save(path, partial=partial, user_content=CONTENT)
    state = _state(run.model)
    return losses + run.steps(3, 4), state


def _resuming(path, owners=(1, 0, 0), after=0, **arguments):
    run = Run(owners, seed=99)
    run.steps(*range(50, 50 + after))
    content = smp.resume_from_checkpoint(path, **arguments)
    losses = run.steps(3, 4)
    return losses, content, dict(run.model.placement.modules)


WORLDS = [
    pytest.param({"ranks": 2, "config": PIPELINE}, id="pp2"),
    pytest.param({"ranks": 4, "config": {**PIPELINE, "ddp": True}}, id="pp2dp2"),
    pytest.param(
        {"ranks": 4, "config": {**PIPELINE, "ddp": True, "placement_strategy": "spread"}},
        id="spread",
    ),
    pytest.param({"ranks": 1, "config": {}}, id="one"),
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("auto", [False, True])
def test_training_goes_on_as_if_it_had_not_stopped(smp_world, path, world, auto):
    before = smp_world.run(_saving, path, **world)
    if auto:
        world = {**world, "config": {**world["config"], "auto_partition": True}}
    after = smp_world.run(_resuming, path, **world)
    for (losses, _), (resumed, content, modules) in zip(before, after, strict=True):
        assert resumed == losses[2:]
        assert str(content) == str(CONTENT)
        if world["ranks"] > 1:  # the partition of the checkpoint, not this run's
            assert [modules[f"layers.{index}"] for index in range(3)] == [0, 1, 1]


def test_a_model_that_is_partitioned_already_takes_its_part_at_once(smp_world, path):
    world = {"ranks": 2, "config": PIPELINE}
    before = smp_world.run(_saving, path, **world)
    after = smp_world.run(_resuming, path, (0, 1, 1), 1, **world)
    assert [losses for losses, *_ in after] == [losses[2:] for losses, _ in before]
    with pytest.raises(
        CheckpointError, match=r"has 'layers\.0' on partition 0, and this run.* on 1"
    ):
        smp_world.run(_resuming, path, (1, 1, 1), 1, **world)


def test_what_is_on_the_disk(smp_world, path):
    smp_world.run(_saving, path, ranks=4, config={**PIPELINE, "ddp": True})
    assert sorted(os.listdir(path)) == ["a_partial", "newest"]
    assert (path / (path / "newest").read_text()).is_dir()  # as scripts join it
    assert sorted(os.listdir(path / "a_partial")) == [
        "manifest.json",
        "model_0.pt",
        "model_1.pt",
        "optimizer_0.pt",
        "optimizer_1.pt",
        "user_content.pt",
    ]
    assert str(torch.load(path / "a_partial" / "user_content.pt")) == str(CONTENT)
    model = torch.load(path / "a_partial" / "model_1.pt")
    assert model["_smp_is_partial"]
    assert model["partition"]["modules"]["layers.2"] == 1
    assert {name for name in model["model"] if name.startswith("layers")} == {
        "layers.1.weight",
        "layers.1.bias",
        "layers.2.weight",
        "layers.2.bias",
    }


def _full(path):
    run = Run()
    run.steps(1, 2)
    run.save(path, "whole", partial=False, user_content=CONTENT)
    return _state(run.model)


def _load_full(path, owners, after, partial=False, **arguments):
    run = Run(owners, seed=99)
    run.steps(*range(50, 50 + after))
    content = smp.resume_from_checkpoint(path, partial=partial, load_optimizer=False, **arguments)
    if not run.model.partitioned:
        run.optimizer.param_groups[0]["lr"] = 0.0
        run.steps(1)  # loads; nothing is learnt
    return _state(run.model), content


def test_a_full_checkpoint_loads_into_any_partition(smp_world, path):
    saved = smp_world.run(_full, path, ranks=4, config={**PIPELINE, "ddp": True})[0]
    assert sorted(os.listdir(path)) == ["newest", "user_content_whole", "whole"]
    assert str(torch.load(path / "user_content_whole")) == str(CONTENT)
    content = torch.load(path / "whole")
    with torch.no_grad():
        plain = _PlainNet()
    plain.load_state_dict(content["model"])
    assert _equal(dict(plain.state_dict()), saved)
    adam = torch.optim.Adam(plain.parameters(), lr=1.0)
    adam.load_state_dict(content["optimizer"])
    assert len(adam.state_dict()["state"]) == 8

    def weights(state):
        return {name: value for name, value in state.items() if name.startswith("layers")}

    auto = {**PIPELINE, "auto_partition": True}
    three = {**PIPELINE, "pipeline_parallel_degree": 3}
    for ranks, config, owners, after in (
        (2, PIPELINE, (1, 1, 0), 0),
        (2, PIPELINE, (1, 0, 1), 1),
        (2, auto, (0, 0, 0), 0),
        (3, three, (2, 1, 0), 0),
        (1, {}, (0, 0, 0), 0),
    ):
        for found, user in smp_world.run(
            _load_full, path, owners, after, ranks=ranks, config=config
        ):
            assert _equal(weights(found), weights(saved)), (ranks, owners)
            assert str(user) == str(CONTENT)


def test_a_full_checkpoint_brings_the_optimizer_to_other_degrees(smp_world, path):
    before = smp_world.run(_saving, path, False, ranks=2, config=PIPELINE)
    for ranks, config, owners in ((2, PIPELINE, (1, 0, 1)), (1, {"microbatches": 2}, (0, 0, 0))):
        for losses, *_ in smp_world.run(
            lambda: _resuming(path, owners, partial=False),  # noqa: B023  run in the loop
            ranks=ranks,
            config=config,
        ):
            assert losses == before[0][0][2:]


class _PlainNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)


def test_a_plain_state_dict_is_a_full_checkpoint_and_can_be_translated(smp_world, path):
    path.mkdir()
    plain = _PlainNet()
    torch.save({f"old.{name}": value for name, value in plain.state_dict().items()}, path / "hf")

    def translate(state):
        return {name.removeprefix("old."): value for name, value in state.items()}

    def body():
        return _load_full(path, (0, 1, 1), 1, tag="hf", translate_function=translate)

    for found, content in smp_world.run(body, ranks=2, config=PIPELINE):
        assert torch.equal(found["layers.1.weight"], plain.layers[1].weight)
        assert content is None


# Refused on every rank, in the same words.


def _refused(smp_world, kind, pattern, body, *args, ranks=2, config=PIPELINE):
    """The body raises this error on every rank, and the next call on the same ranks works."""

    def caught():
        with pytest.raises(kind, match=pattern) as error:
            body(*args)
        smp.barrier()
        return type(error.value).__name__, str(error.value)

    said = smp_world.run(caught, ranks=ranks, config=config)
    assert len(set(said)) == 1, said


def test_other_degrees_are_named_by_both_numbers(smp_world, path):
    smp_world.run(_saving, path, ranks=2, config=PIPELINE)
    pattern = r"saved with pipeline_parallel_degree=2, and this run has pipeline_parallel_degree="
    _refused(
        smp_world,
        CheckpointError,
        pattern + "3",
        _resuming,
        path,
        ranks=3,
        config={**PIPELINE, "pipeline_parallel_degree": 3},
    )
    _refused(smp_world, CheckpointError, pattern + "1", _resuming, path, ranks=2, config={})


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (lambda folder: (folder / "model_1.pt").unlink(), r"model_1\.pt: missing"),
        (lambda folder: os.truncate(folder / "optimizer_0.pt", 100), r"optimizer_0\.pt: torn"),
        (lambda folder: os.truncate(folder / "manifest.json", 10), r"manifest\.json: expected"),
        (
            lambda folder: (folder / "manifest.json").unlink(),
            r"manifest\.json: expected .* no such",
        ),
        (lambda folder: _flip(folder / "model_1.pt"), r"model_1\.pt: expected the model's part"),
        (shutil.rmtree, r"a_partial: expected the folder .* has none"),
    ],
)
def test_a_damaged_checkpoint_is_refused_on_every_rank(smp_world, path, damage, pattern):
    smp_world.run(_saving, path, ranks=2, config=PIPELINE)
    damage(path / "a_partial")
    _refused(smp_world, CheckpointError, pattern, _resuming, path)


def _flip(file):
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:  # entries are aligned: between them a byte says nothing
        entry = archive.read(max(archive.infolist(), key=lambda each: each.file_size))
    content[content.index(entry) + len(entry) // 2] ^= 1
    file.write_bytes(content)


def test_a_checkpoint_of_another_model_is_refused(smp_world, path):
    smp_world.run(_saving, path, ranks=2, config=PIPELINE)
    pattern = r"is of another model: this one has a module 'layers\.3', and that one has not"
    _refused(smp_world, CheckpointError, pattern, _resuming, path, (0, 0, 0, 0))


BAD = [
    (ArgumentError, "tag='' is empty", {"tag": ""}),
    (ArgumentError, "tag='a/b' has a slash", {"tag": "a/b"}),
    (ArgumentError, "a name that checkpoints use", {"tag": "newest"}),
    (ArgumentError, "a name that checkpoints use", {"tag": ".."}),
    (ArgumentError, "file of another checkpoint", {"tag": "a_partial"}),
    (ArgumentTypeError, "tag must be a str", {"tag": 3}),
    (ArgumentError, "must be at least 1", {"num_kept_partial_checkpoints": 0}),
    (ArgumentTypeError, "must be an int or None", {"num_kept_partial_checkpoints": 1.5}),
    (ArgumentTypeError, "path must be a str", {"path": 1}),
    (ArgumentTypeError, r"model must be the smp\.DistributedModel", {"model": nn.Linear(1, 1)}),
    (
        CheckpointError,
        r"user_content\['a'\]\[0\] is a collections\.deque",
        {"user_content": {"a": [collections.deque()]}},
    ),
    (CheckpointError, "not partitioned yet", {}),
]


@pytest.mark.parametrize(("kind", "pattern", "arguments"), BAD)
@pytest.mark.parametrize("everywhere", [True, False])
def test_bad_arguments_of_save_checkpoint(smp_world, path, kind, pattern, arguments, everywhere):
    def body():
        run = Run()
        bad = arguments if everywhere or smp.rank() == 1 else {}
        good = {"path": path, "tag": "a", "partial": False, "optimizer": None}
        if not arguments:
            good["partial"] = not (everywhere or smp.rank() == 1)
            bad = {"partial": True}
        smp.save_checkpoint(**{**good, "model": run.model, **bad})

    _refused(smp_world, kind, pattern, body)
    assert not path.exists()


def test_ranks_that_call_it_differently(smp_world, path):
    def body():
        smp.save_checkpoint(path, f"tag{smp.rank()}", user_content=1)

    pattern = "ranks do not call it alike .*world rank 0 says .*'tag0'.* rank 1 says .*'tag1'"
    _refused(smp_world, CheckpointError, pattern, body)
    assert not path.exists()


def test_resuming_without_what_the_checkpoint_holds(smp_world, path):
    smp_world.run(_saving, path, ranks=2, config=PIPELINE)

    def without_model():
        smp.resume_from_checkpoint(path)

    def without_optimizer():
        Run(optimizer=False)
        smp.resume_from_checkpoint(path)

    pattern = r"this run has no smp\.Distributed{} yet"
    _refused(smp_world, CheckpointError, pattern.format("Model"), without_model)
    _refused(smp_world, CheckpointError, pattern.format("Optimizer"), without_optimizer)
    _refused(smp_world, CheckpointError, "this tag is of a partial", _load_full, path, (0, 1, 1), 0)
    _refused(smp_world, CheckpointError, "newest: .* no such file", _resuming, path.parent)


def test_the_content_of_newest_is_a_tag_to_resume_from(smp_world, path):
    """Scripts read the file, and give its text as the tag."""

    def body():
        smp.save_checkpoint(path, "a", user_content=1)
        partial = smp.resume_from_checkpoint(path, (path / "newest").read_text())
        smp.save_checkpoint(path, "b", partial=False, user_content=2)
        return partial, smp.resume_from_checkpoint(
            path, (path / "newest").read_text(), partial=False
        )

    assert smp_world.run(body, ranks=2, config=PIPELINE) == [(1, 2)] * 2
    pattern = "tag='a_partial' would be taken for a file of another checkpoint"
    _refused(
        smp_world,
        ArgumentError,
        pattern,
        lambda: smp.resume_from_checkpoint(path, "a_partial", partial=False),
    )


def test_user_content_alone(smp_world, path):
    def body():
        smp.save_checkpoint(path, "a", user_content=CONTENT)
        smp.save_checkpoint(path, "b", partial=False, user_content=[smp.rank()])
        return smp.resume_from_checkpoint(path, "a"), smp.resume_from_checkpoint(
            path, partial=False
        )

    for one, two in smp_world.run(body, ranks=2, config=PIPELINE):
        assert str(one) == str(CONTENT)
        assert two == [0]


def test_the_oldest_partial_checkpoints_go(smp_world, path):
    def body():
        for index in (3, 1, 2, 5, 1):
            smp.save_checkpoint(path, f"t{index}", user_content=index)
        smp.save_checkpoint(path, "last", user_content=0, num_kept_partial_checkpoints=2)

    (path / "other_partial").mkdir(parents=True)
    smp_world.run(body, ranks=2, config=PIPELINE)
    assert sorted(os.listdir(path)) == ["last_partial", "newest", "other_partial", "t1_partial"]
    assert (path / "newest").read_text() == "last_partial"


def _full_without_optimizer(path, tag, steps):
    run = Run()
    run.steps(*steps)
    smp.save_checkpoint(path, tag, partial=False, model=run.model, user_content={"steps": steps})
    return _state(run.model)


def test_a_full_checkpoint_without_an_optimizer_is_the_model_s_plain_state(smp_world, path):
    """Scripts and libraries read it by its name, with nothing of SMP's in it."""
    world = {"ranks": 4, "config": {**PIPELINE, "ddp": True}}
    saved = smp_world.run(_full_without_optimizer, path, "whole", (1, 2), **world)[0]
    with torch.no_grad():
        plain = _PlainNet()
    plain.load_state_dict(torch.load(path / "whole"))
    assert _equal(dict(plain.state_dict()), saved)
    assert torch.load(path / "user_content_whole") == {"steps": (1, 2)}
    assert (path / "newest").read_text() == "whole"
    for _, user in smp_world.run(_load_full, path, (0, 0, 0), 0, ranks=1):
        assert user == {"steps": (1, 2)}


@pytest.mark.parametrize("moves", [0, 1])
def test_a_full_save_that_is_cut_off_between_its_two_files_is_there_whole(
    smp_world, path, monkeypatch, moves
):
    smp_world.run(_full_without_optimizer, path, "whole", (1,), ranks=1)
    right, left = full.os.replace, [moves]

    def replace(source, target):
        if ".smp-ready" in str(source):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        right(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(full.os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            smp_world.run(_full_without_optimizer, path, "whole", (1, 2), ranks=1)
    expected = smp_world.run(_full_without_optimizer, path.parent / "x", "whole", (1, 2), ranks=1)
    (found, user), *_ = smp_world.run(_load_full, path, (0, 0, 0), 0, ranks=1)
    assert user == {"steps": (1, 2)}
    assert all(torch.equal(found[name], expected[0][name]) for name in expected[0])
    smp_world.run(_full_without_optimizer, path, "whole", (3,), ranks=1)
    assert sorted(os.listdir(path)) == ["newest", "user_content_whole", "whole"]
    assert torch.load(path / "user_content_whole") == {"steps": (3,)}


def test_a_full_file_that_holds_the_user_content_itself_is_read_too(smp_world, path):
    smp_world.run(_full, path, ranks=1)
    (path / "user_content_whole").unlink()
    torch.save({**torch.load(path / "whole"), "user_content": CONTENT}, path / "whole")
    ((_, user),) = smp_world.run(_load_full, path, (0, 0, 0), 0, ranks=1)
    assert str(user) == str(CONTENT)


def _load_each_way(path):
    found = []
    for weights_only in (None, True, False):
        how = {} if weights_only is None else {"weights_only": weights_only}
        try:
            smp.load(path, partial=False, **how)
        except (CheckpointError, ArgumentError) as error:
            found.append(type(error).__name__)
        else:
            found.append("ran")
    return found


def test_what_a_script_says_of_one_file_counts_for_it_where_files_are_trusted(smp_world, tmp_path):
    def trusting(path):
        with smp.trust_checkpoints():
            return _load_each_way(path)

    torch.save({"queue": collections.deque()}, tmp_path / "x.pt")
    (found,) = smp_world.run(_load_each_way, tmp_path / "x.pt", ranks=1)
    assert found == ["CheckpointError", "CheckpointError", "ArgumentError"]
    (found,) = smp_world.run(trusting, tmp_path / "x.pt", ranks=1)
    assert found == ["ran", "CheckpointError", "ran"]


def test_a_pointer_without_the_folder_s_suffix_is_followed_too(smp_world, path):
    smp_world.run(_saving, path, ranks=2, config=PIPELINE)
    (path / "newest").write_text("a\n")
    for _, content, _ in smp_world.run(_resuming, path, ranks=2, config=PIPELINE):
        assert str(content) == str(CONTENT)


# Trouble with the disk, and with ranks.


def _save_again(path, partial):
    run = Run()
    run.steps(7)
    try:
        run.save(path, "a", partial=partial, user_content="new")
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("room", [0, 500, 4000])
def test_a_full_disk_on_one_rank_is_an_error_on_all(
    smp_world, smp_faults, path, partial, rank, room
):
    before = smp_world.run(_saving, path, partial, ranks=2, config=PIPELINE)
    if rank == 1 and not partial:
        return  # it writes nothing
    names = _names(path)
    with smp_faults.full_disk(rank=rank, below=path, after=room):
        said = smp_world.run(_save_again, path, partial, ranks=2, config=PIPELINE)
    assert said[0] == said[1]
    assert "No space left on device" in said[0]
    assert _names(path) == names
    if partial:
        after = smp_world.run(_resuming, path, ranks=2, config=PIPELINE)
        assert [losses for losses, *_ in after] == [losses[2:] for losses, _ in before]
    else:
        found = torch.load(path / "user_content_a")
        assert str(found) == str(CONTENT)


def _names(path):
    return sorted(str(Path(root, name)) for root, _, names in os.walk(path) for name in names)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_lost_at_any_moment_leaves_the_old_checkpoint_or_the_new(
    smp_world, smp_faults, path, rank
):
    """A save meets the other ranks a few times; the rank is lost at each of these."""

    def save():
        smp.save_checkpoint(path, "a", user_content="new")

    def content():
        return smp.resume_from_checkpoint(path, "a")

    smp_world.run(
        lambda: smp.save_checkpoint(path, "a", user_content="old"), ranks=2, config=PIPELINE
    )
    found = []
    for nth in range(1, 20):
        smp_faults.kill(rank=rank, at="allgather", nth=nth, required=False)
        report = smp_world.report(save, ranks=2, config=PIPELINE)
        smp_faults.clear()
        found.append(smp_world.run(content, ranks=2, config=PIPELINE)[0])
        if report.error is None:
            break
    assert found == sorted(found, reverse=True)
    assert set(found) == {"old", "new"}
    assert len(found) > 3


# smp.save and smp.load.


def _roundtrip(path):
    name = os.fspath(path / "x.pt")
    if smp.rdp_rank() == 0:
        smp.save({"mine": smp.pp_rank()}, name)
        smp.save([smp.pp_rank()], name, True)  # partial, by position
    if smp.rank() == 0:
        smp.save({"whole": torch.ones(2)}, name, partial=False)
    smp.save(smp.rank(), name + "v3", v3=True)
    smp.barrier()
    assert torch.equal(smp.load(name, partial=False)["whole"], torch.ones(2))
    return smp.load(name), smp.load(name + "v3")


def test_names_of_files(smp_world, path):
    path.mkdir()
    values = smp_world.run(_roundtrip, path, ranks=4, config={**PIPELINE, "ddp": True})
    assert values == [([0], 0), ([1], 1), ([0], 2), ([1], 3)]
    partial = ["x.pt", "x.pt_0", "x.pt_1"]
    names = [f"x.ptv3_{pp}_0_{rdp}" for pp in (0, 1) for rdp in (0, 1)]
    assert sorted(os.listdir(path)) == [*partial, *names]


def test_names_of_files_with_tensor_parallelism(smp_world, path):
    path.mkdir()

    def body():
        smp.save((smp.pp_rank(), smp.tp_rank()), path / "x.pt")
        smp.barrier()
        found = smp.load(path / "x.pt")
        assert found == (smp.pp_rank(), smp.tp_rank())
        if smp.rank() == 0:
            for pp in (0, 1):
                for tp in (0, 1):
                    (path / f"x.pt_{pp}_{tp}").rename(path / f"x.pt_{2 * pp + tp}")
        smp.barrier()
        return smp.load(path / "x.pt", back_compat=True), smp.mp_rank()

    config = {**PIPELINE, "ddp": True, "tensor_parallel_degree": 2}
    for (pp, tp), mp in smp_world.run(body, ranks=4, config=config):
        assert mp == 2 * pp + tp


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2)
def test_what_smp_save_and_load_refuse(smp, smp_tmp_path):
    name = smp_tmp_path / "x.pt"
    for arguments in ({"pickle_protocol": 4}, {"pickle_module": argparse}):
        with pytest.raises(ArgumentError, match="without running code"):
            smp.save(1, name, **arguments)
    with pytest.raises(CheckpointError, match=r"smp\.save: obj\['a'\] is a collections\.deque"):
        smp.save({"a": collections.deque()}, name)
    with pytest.raises(
        CheckpointError, match=r"x\.pt_\d: expected what smp\.save wrote on pp_rank"
    ):
        smp.load(name)
    with pytest.raises(ArgumentError, match="weights_only=False would run"):
        smp.load(name, weights_only=False)
    with pytest.raises(ArgumentTypeError, match="f must be a str"):
        smp.save(1, None)
    assert list(smp_tmp_path.iterdir()) == []
