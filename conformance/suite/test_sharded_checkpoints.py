"""Properties of sharded checkpoints: unsharded states, one file for each shard, and resuming at any degree."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from conformance.cases.training import namespace, raised, sharded_cases, trials, without
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld, TmpPath
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training_models import Block, Model
from pytest_smp.strategies.training_script import Script
from pytest_smp.strategies.training_sharding import NO_CLIPPING, ShardedTraining, divisors

CONTENT = {"epoch": 3, "names": ["a", None], "where": (1, 2.5)}

#: The unsharded states of model and optimizer.
State = tuple[dict[str, Any], dict[str, Any]]


def sharded(smp_world: SmpWorld, engine: str, **fixed: Any) -> st.SearchStrategy[ShardedTraining]:
    """Draw a case of one pass and one window, whose ranks use the same parameters.

    In such a case the sharding degree changes no bit (ENGINES 2.1).
    """
    fixed.setdefault("without", (*without(engine), "route"))
    optimizer = st.sampled_from(["momentum", "adam", "adamw"])
    how: dict[str, Any] = {
        "least": 2,
        "sharding": (2, 4),
        "passes": 1,
        "windows": 1,
        "clip": NO_CLIPPING,
    }
    drawn = sharded_cases(smp_world, engine, **how | fixed)
    return st.builds(lambda case, name: dataclasses.replace(case, optimizer=name), drawn, optimizer)


def step(script: Script, case: ShardedTraining, number: int) -> None:
    """Run one training step of this replica."""
    script.zero_grad()
    script.backward(oracle.batch(case, script.api.dp_rank(), number))
    script.step()


def copied(value: Any) -> Any:
    """Copy a tensor tree with its tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list | tuple) else value


def state_of(script: Script) -> State:
    """Copy the states of model and optimizer; every rank must call."""
    return copied(script.model.state_dict()), copied(script.optimizer.state_dict())


def same(one: Any, other: Any, place: str = "state") -> None:
    """Assert that two containers hold the same values, to the bit; ``place`` names them in messages."""
    if isinstance(other, Tensor):
        assert isinstance(one, Tensor), place
        assert one.shape == other.shape, f"{place}: {one.shape}, not {other.shape}"
        equal = (one == other) | (one.isnan() & other.isnan())
        assert one.dtype is other.dtype, f"{place}: {one.dtype}, not {other.dtype}"
        assert bool(equal.all()), f"{place}: {one}, not {other}"
    elif isinstance(other, dict):
        assert set(one) == set(other), f"{place}: {set(one)}, not {set(other)}"
        for key in other:
            same(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(other, list | tuple):
        assert len(one) == len(other), place
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{place}[{index}]")
    else:
        assert one == other, f"{place}: {one}, not {other}"


def how(case: ShardedTraining) -> dict[str, Any]:
    """The arguments ``ranks`` and ``config`` of a run of the case."""
    return {"ranks": case.ranks, "config": case.config}


# ---- States --------------------------------------------------------------------------------------


def plain_state(case: ShardedTraining) -> State:
    """The states of plain torch's module and optimizer after one step."""
    module = oracle.make(case)
    optimizer = oracle.optimizer_of(case, module.parameters())
    gradients = oracle.plain(case).gradients[0]
    for name, each in oracle.parameters(module).items():
        each.grad = gradients[name]
    optimizer.step()
    return copied(dict(module.state_dict())), copied(optimizer.state_dict())


def make_step(engine: str, case: ShardedTraining) -> State:
    """Train one step and return the states."""
    script = Script(namespace(engine), case)
    step(script, case, 0)
    return state_of(script)


def load_state(engine: str, case: ShardedTraining, state: State) -> State:
    """Train one step, load these states over its results, and return the states."""
    script = Script(namespace(engine), case, salt="fresh")
    step(script, case, 1)
    script.model.load_state_dict(state[0])
    script.optimizer.load_state_dict(state[1])
    return state_of(script)


@requirement("SHARD-CKPT-STATE")
@given(data=st.data())
@trials(6)
def test_whole_states_are_plain_torchs(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject
) -> None:
    case = data.draw(sharded(smp_world, smp_engine), "case")
    expected = plain_state(case)
    for state in smp_world.run(make_step, smp_engine, case, **how(case)):
        same(state, expected)


@requirement("SHARD-CKPT-STATE")
@given(data=st.data())
@trials(3)
def test_whole_states_load_at_any_degree(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject
) -> None:
    case = data.draw(sharded(smp_world, smp_engine), "case")
    expected = plain_state(case)
    for state in smp_world.run(load_state, smp_engine, case, expected, **how(case)):
        same(state, expected)


# ---- Files ---------------------------------------------------------------------------------------


def with_scale(script: Script) -> tuple[State, float]:
    """The states, and the loss scale, which is 1 without fp16."""
    fp16 = script.case.dtype == "float16"
    return state_of(script), script.optimizer.loss_scale if fp16 else 1.0


def train_and_save(
    engine: str, case: ShardedTraining, folder: str, partial: bool
) -> tuple[tuple[State, float], tuple[State, float]]:
    """Train one step, save a checkpoint, and train one more step.

    Returns the states and the loss scale at the checkpoint, and at the end.
    """
    smp = namespace(engine)
    script = Script(smp, case)
    step(script, case, 0)
    if case.dtype == "float16":
        script.optimizer.loss_scale = 4.0
    saved = with_scale(script)
    smp.save_checkpoint(
        folder,
        tag="it",
        partial=partial,
        model=script.model,
        optimizer=script.optimizer,
        user_content=CONTENT,
    )
    smp.barrier()
    step(script, case, 1)
    return saved, with_scale(script)


def resume(
    engine: str, case: ShardedTraining, folder: str, partial: bool
) -> tuple[Any, tuple[State, float], tuple[State, float]]:
    """Resume from the checkpoint and train one step.

    Returns the user's content, and the states and the loss scale after loading, and at the end.
    """
    smp = namespace(engine)
    script = Script(smp, case, salt="fresh")
    content = smp.resume_from_checkpoint(folder, tag="it", partial=partial)
    loaded = with_scale(script)
    step(script, case, 1)
    return content, loaded, with_scale(script)


def goes_on(
    smp_world: SmpWorld,
    engine: str,
    folder: str,
    partial: bool,
    case: ShardedTraining,
    other: ShardedTraining,
) -> None:
    """Check that training of ``other`` goes on from the checkpoint of ``case``."""
    __tracebackhide__ = True
    saved, then = smp_world.run(train_and_save, engine, case, folder, partial, **how(case))[0]
    for content, loaded, went_on in smp_world.run(
        resume, engine, other, folder, partial, **how(other)
    ):
        assert content == CONTENT
        same(loaded, saved)
        if other.dp == case.dp:  # other numbers of replicas train on other data
            same(went_on, then)


@requirement("SHARD-CKPT-PARTIAL")
@given(data=st.data())
@trials(4)
def test_training_goes_on_where_it_stopped(
    smp_world: SmpWorld, smp_engine: str, smp_tmp_path: TmpPath, data: st.DataObject
) -> None:
    case = data.draw(sharded(smp_world, smp_engine), "case")
    most = min(4, smp_world.ranks)
    worlds = [dp for dp in (4, 2) if dp <= most and dp % case.sharding == 0]
    other = dataclasses.replace(case, dp=data.draw(st.sampled_from(worlds), "ranks"))
    goes_on(smp_world, smp_engine, str(smp_tmp_path.fresh()), True, case, other)


@requirement("SHARD-CKPT-FULL")
@given(data=st.data())
@trials(6)
def test_a_full_checkpoint_fits_any_degree(
    smp_world: SmpWorld, smp_engine: str, smp_tmp_path: TmpPath, data: st.DataObject
) -> None:
    case = data.draw(sharded(smp_world, smp_engine, sharding=(1, 2, 4)), "case")
    worlds = [dp for dp in (1, 2, 4) if dp <= min(4, smp_world.ranks)]
    dp = data.draw(st.sampled_from([case.dp, case.dp, *worlds]), "ranks")
    other = dataclasses.replace(
        case,
        dp=dp,
        sharding=data.draw(st.sampled_from(list(divisors(dp))[::-1]), "degree"),
        threshold=data.draw(st.sampled_from([0, case.threshold]), "threshold"),
        per_node=None,
    )
    goes_on(smp_world, smp_engine, str(smp_tmp_path.fresh()), False, case, other)


def in_16_bits(
    smp_world: SmpWorld, engine: str, folder: str, data: st.DataObject, dtype: str
) -> None:
    """Draw a case of this dtype, save a checkpoint, and check that training goes on from it."""
    __tracebackhide__ = True
    case = data.draw(sharded(smp_world, engine, dtypes=(dtype,)), "case")
    partial = data.draw(st.booleans(), "partial")
    degrees = [each for each in divisors(case.dp) if each > 1 or dtype == "float16"]
    degree = case.sharding if partial else data.draw(st.sampled_from(degrees), "degree")
    other = dataclasses.replace(case, sharding=degree)
    goes_on(smp_world, engine, folder, partial, case, other)


@requirement("SHARD-CKPT-BF16")
@given(data=st.data())
@trials(3)
def test_masters_of_bf16_go_on(
    smp_world: SmpWorld, smp_engine: str, smp_tmp_path: TmpPath, data: st.DataObject
) -> None:
    in_16_bits(smp_world, smp_engine, str(smp_tmp_path.fresh()), data, "bfloat16")


@requirement("SHARD-CKPT-FP16")
@given(data=st.data())
@trials(3)
def test_masters_and_scale_of_fp16_go_on(
    smp_world: SmpWorld, smp_engine: str, smp_tmp_path: TmpPath, data: st.DataObject
) -> None:
    in_16_bits(smp_world, smp_engine, str(smp_tmp_path.fresh()), data, "float16")


# ---- What is on the disk, and what is refused ----------------------------------------------------

#: A model whose parameters every degree divides, so that files of different shards have equal sizes.
EVEN = Model(Block("chain", (Block("linear"), Block("linear"))), inputs=4, width=4, outputs=4)


def even(smp_world: SmpWorld, engine: str, **fixed: Any) -> st.SearchStrategy[ShardedTraining]:
    """Draw a case of the model EVEN with every parameter sharded."""
    return sharded(smp_world, engine, model=EVEN, threshold=0, **fixed)


def parts(folder: Path, kind: str) -> list[Path]:
    """The files of a kind in a partial checkpoint."""
    return sorted((folder / "it_partial").glob(f"{kind}_*.pt"))


def largest(content: Any) -> int:
    """The number of elements of the largest tensor in a tensor tree."""
    if isinstance(content, Tensor):
        return content.numel()
    each = content.values() if isinstance(content, dict) else content
    nested = isinstance(content, dict | list | tuple)
    return max(map(largest, each), default=0) if nested else 0


@requirement("SHARD-CKPT-FILES")
@given(data=st.data())
@trials(2)
def test_each_shard_has_its_files(
    smp_world: SmpWorld, smp_engine: str, smp_tmp_path: TmpPath, data: st.DataObject
) -> None:
    case = data.draw(even(smp_world, smp_engine), "case")
    folder = Path(smp_tmp_path.fresh())
    smp_world.run(train_and_save, smp_engine, case, str(folder), True, **how(case))
    numels = [each.numel() for each in oracle.make(case).parameters()]
    for kind in ("model", "optimizer"):
        files = parts(folder, kind)
        assert len(files) == case.sharding, files
        for file in files:
            content = torch.load(file)
            # Each flat group holds the shard's parts of many parameters, one after the other.
            flat = largest(content.pop("fp32_flat_groups", ()))
            shares = [-(-numel // case.sharding) for numel in numels]
            assert flat <= sum(shares), f"{file.name}: a flat group of {flat} elements"
            most = largest(content)
            assert most <= max(shares), f"{file.name}: a tensor of {most} elements"


def refuse(engine: str, case: ShardedTraining, folder: str) -> tuple[str | None, State, State]:
    """Try to resume; return the type of the exception, or None, and the states before and after."""
    smp = namespace(engine)
    script = Script(smp, case, salt="fresh")
    step(script, case, 0)
    before = state_of(script)
    error = raised(lambda: smp.resume_from_checkpoint(folder, tag="it"))
    smp.barrier()
    return error, before, state_of(script)


def is_refused(smp_world: SmpWorld, engine: str, folder: Path, case: ShardedTraining) -> None:
    """Check that resuming is refused on every rank and changes no state."""
    __tracebackhide__ = True
    for error, before, after in smp_world.run(refuse, engine, case, str(folder), **how(case)):
        assert error is not None
        same(after, before)


@requirement("SHARD-CKPT-DEGREE")
@given(data=st.data())
@trials(2)
def test_another_degree_is_refused(
    smp_world: SmpWorld, smp_engine: str, smp_tmp_path: TmpPath, data: st.DataObject
) -> None:
    case = data.draw(even(smp_world, smp_engine, sharding=(1, 2, 4)), "case")
    degrees = [each for each in (1, 2, 4) if each <= smp_world.ranks and each != case.sharding]
    degree = data.draw(st.sampled_from(degrees), "degree")
    other = dataclasses.replace(case, dp=max(case.dp, degree), sharding=degree)
    folder = Path(smp_tmp_path.fresh())
    smp_world.run(train_and_save, smp_engine, case, str(folder), True, **how(case))
    is_refused(smp_world, smp_engine, folder, other)


def mixed_up(files: list[Path], at: int) -> None:
    """Damage a checkpoint: one file gets the content of the file before it."""
    shutil.copy(files[at - 1], files[at])


def torn(files: list[Path], at: int) -> None:
    """Damage a checkpoint: one file loses its second half."""
    os.truncate(files[at], files[at].stat().st_size // 2)


def missing(files: list[Path], at: int) -> None:
    """Damage a checkpoint: one file is removed."""
    files[at].unlink()


@requirement("SHARD-CKPT-DAMAGED")
@given(data=st.data(), damage=st.sampled_from([mixed_up, mixed_up, torn, missing]))
@trials(4)
def test_damaged_and_mixed_up_shards_are_refused(
    smp_world: SmpWorld, smp_engine: str, smp_tmp_path: TmpPath, data: st.DataObject, damage: Any
) -> None:
    case = data.draw(even(smp_world, smp_engine), "case")
    folder = Path(smp_tmp_path.fresh())
    smp_world.run(train_and_save, smp_engine, case, str(folder), True, **how(case))
    files = parts(folder, data.draw(st.sampled_from(["model", "optimizer"]), "kind"))
    damage(files, data.draw(st.integers(0, case.sharding - 1), "file"))
    is_refused(smp_world, smp_engine, folder, case)
