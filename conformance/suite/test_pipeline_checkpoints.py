"""Properties of activation checkpointing, which changes no bit, and of resumed training."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import assume, given
from torch import Tensor

from conformance.cases.training import cases, namespace, raised, results, trials
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld, TmpPath
from pytest_smp.strategies import equality
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import Training
from pytest_smp.strategies.training_models import Block, Model
from pytest_smp.strategies.training_script import Script, Seen, compare, merged, train

# ---- Activations ---------------------------------------------------------------------------------


def train_checkpointed(engine: str, case: Training, paths: tuple[str, ...]) -> Seen:
    """Train with activation checkpointing of the modules at these paths."""
    smp = namespace(engine)
    script = Script(smp, case)
    for path in paths:
        smp.set_activation_checkpointing(script.module.get_submodule(path))
    oracle.seed(case, smp.dp_rank())
    return train(script, case, smp.dp_rank())


@requirement("PIPE-CHECKPOINTING")
@given(data=st.data(), paths=st.sampled_from([("body.0",), ("body.0", "body.1"), ("body.1",)]))
@trials(8)
def test_computing_again_changes_no_bit(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, paths: tuple[str, ...]
) -> None:
    parts = (Block("mlp", size=3), Block("residual", (Block("dropout"),)), Block("linear"))
    model = Model(Block("chain", parts), inputs=2, width=2)
    case = data.draw(
        cases(smp_world, smp_engine, least=2, automatic=False, real=True, model=model), "case"
    )
    # A checkpointed module must lie on one partition (API 1.9).
    at = data.draw(st.lists(st.integers(0, case.pp - 1), min_size=3, max_size=3), "partitions")
    where = tuple((f"body.{number}", owner) for number, owner in enumerate(at))
    case = dataclasses.replace(case, partition=where)
    again = smp_world.run(
        train_checkpointed, smp_engine, case, paths, ranks=case.ranks, config=case.config
    )
    compare(merged(results(smp_world, smp_engine, case), case.dp), again, what="no checkpointing")


# ---- Files ---------------------------------------------------------------------------------------


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Make an optimizer that has state."""
    return torch.optim.SGD(parameters, lr=oracle.LEARNING_RATE, momentum=0.5)


def train_and_save(
    engine: str, case: Training, folder: str, partial: bool, content: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train one step, save a checkpoint, and train one more step.

    Returns this rank's parameters at the checkpoint and at the end.
    """
    smp = namespace(engine)
    script = Script(smp, case, optimizer=momentum)
    step(script, case, 0)
    saved = script.parameters()
    smp.save_checkpoint(
        folder,
        tag="it",
        partial=partial,
        model=script.model,
        optimizer=script.optimizer if partial else None,
        user_content=content,
    )
    smp.barrier()
    step(script, case, 1)
    return saved, script.parameters()


def resume(
    engine: str, case: Training, folder: str, partial: bool, steps: int
) -> tuple[dict[str, Tensor], Any]:
    """Resume from the checkpoint and train so many steps.

    Returns this rank's parameters and the user's content.
    """
    smp = namespace(engine)
    script = Script(smp, case, salt="fresh", optimizer=momentum)
    content = smp.resume_from_checkpoint(folder, tag="it", partial=partial)
    for number in range(1, steps + 1):
        step(script, case, number)
    if not script.model.partitioned:  # weights are loaded when the first step partitions the model
        step(script, case, 1, update=False)
    return script.parameters(), content


def step(script: Script, case: Training, number: int, update: bool = True) -> None:
    """Run one training step of this replica; ``update`` says whether the optimizer steps."""
    script.zero_grad()
    script.backward(oracle.batch(case, script.api.dp_rank(), number))
    if update:
        script.step()


def single(case: Training) -> Training:
    """The case with one pass and one window, whose ``zero_grad`` sets gradients to None.

    Checkpoints hold no gradients. With zeros, a parameter that only the step before the save has used would
    have a zero gradient in the run that goes on, and momentum would move it. In the resumed run it would
    have no gradient and not move. Plain torch behaves the same.
    """
    return dataclasses.replace(case, passes=1, windows=1, set_to_none=True)


def union(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The parameters of all ranks together, by name."""
    return {name: value for each in ranks for name, value in each.items()}


def same(first: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Assert that both dicts hold the same names and values, to the bit."""
    assert set(first) == set(other)
    for name, value in first.items():
        # By bits: training may diverge, and torch.equal finds no nan equal to itself.
        assert equality.same(value, other[name]), f"{name}: {other[name]}, not {value}"


CONTENT = {"epoch": 3, "names": ["a", None], "where": (1, 2.5)}


@requirement("CKPT-PARTIAL")
@given(data=st.data())
@trials(5)
def test_training_goes_on_where_it_stopped(
    smp_world: SmpWorld, smp_engine: str, smp_tmp_path: TmpPath, data: st.DataObject
) -> None:
    case = single(data.draw(cases(smp_world, smp_engine, least=2), "case"))
    folder = str(smp_tmp_path.fresh())
    how: dict[str, Any] = {"ranks": case.ranks, "config": case.config}
    first = smp_world.run(train_and_save, smp_engine, case, folder, True, CONTENT, **how)
    then = smp_world.run(resume, smp_engine, case, folder, True, 1, **how)
    for (_, went_on), (resumed, content) in zip(first, then, strict=True):
        same(went_on, resumed)
        assert content == CONTENT


@requirement("CKPT-FULL")
@given(data=st.data())
@trials(5)
def test_a_full_checkpoint_fits_any_partition(
    smp_world: SmpWorld, smp_engine: str, smp_tmp_path: TmpPath, data: st.DataObject
) -> None:
    case = single(data.draw(cases(smp_world, smp_engine, least=2), "case"))
    drawn = cases(smp_world, smp_engine, model=case.model, seed=case.seed, passes=1, windows=1)
    other = data.draw(drawn, "other")
    folder = str(smp_tmp_path.fresh())
    first = smp_world.run(
        train_and_save,
        smp_engine,
        case,
        folder,
        False,
        CONTENT,
        ranks=case.ranks,
        config=case.config,
    )
    then = smp_world.run(
        resume, smp_engine, other, folder, False, 0, ranks=other.ranks, config=other.config
    )
    same(union([saved for saved, _ in first]), union([resumed for resumed, _ in then]))
    assert all(content == CONTENT for _, content in then)


def resume_what_is_not_there(
    engine: str, case: Training, folder: str, tag: str | None, partial: bool
) -> str | None:
    """The type of the exception that resuming or the first step after it raises, or None."""
    smp = namespace(engine)

    def go() -> None:
        script = Script(smp, case)
        smp.resume_from_checkpoint(folder, tag=tag, partial=partial)
        step(script, case, 0)

    return raised(go)


@requirement("CKPT-MISSING")
@given(data=st.data(), partial=st.booleans(), torn=st.booleans())
@trials(4)
def test_what_is_missing_or_torn_is_refused(
    smp_world: SmpWorld,
    smp_engine: str,
    smp_tmp_path: TmpPath,
    data: st.DataObject,
    partial: bool,
    torn: bool,
) -> None:
    case = single(data.draw(cases(smp_world, smp_engine, automatic=False), "case"))
    folder, tag = smp_tmp_path.fresh(), data.draw(st.sampled_from(["it", "other", None]), "tag")
    how: dict[str, Any] = {"ranks": case.ranks, "config": case.config}
    if torn:
        smp_world.run(train_and_save, smp_engine, case, str(folder), partial, None, **how)
        tear(folder)
        tag = "it"
    seen = smp_world.run(
        resume_what_is_not_there, smp_engine, case, str(folder), tag, partial, **how
    )
    assert all(each is not None for each in seen), seen


def tear(folder: Path) -> None:
    """Cut every file of a checkpoint in half, but not ``newest`` and the user's content."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "newest"]
    torn = [path for path in found if not path.name.startswith("user_content")]
    assume(bool(torn))
    for path in torn:
        os.truncate(path, path.stat().st_size // 2)


def read_state(engine: str, case: Training) -> dict[str, Tensor]:
    """The tensors of the model's state_dict after one step."""
    smp = namespace(engine)
    script = Script(smp, case)
    step(script, case, 0)
    found = script.model.state_dict()
    return {name: each for name, each in found.items() if isinstance(each, Tensor)}


def load_state(engine: str, case: Training, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Load a state before the model is partitioned; return the tensors of its state_dict after a step.

    The step has no optimizer step, so the state must be the loaded one.
    """
    smp = namespace(engine)
    script = Script(smp, case, salt="fresh")
    script.model.load_state_dict(state)
    step(script, case, 0, update=False)
    found = script.model.state_dict()
    return {name: each for name, each in found.items() if isinstance(each, Tensor)}


@requirement("CKPT-STATE")
@given(data=st.data())
@trials(5)
def test_the_state_moves_to_another_partition(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject
) -> None:
    case = single(data.draw(cases(smp_world, smp_engine, least=2), "case"))
    drawn = cases(smp_world, smp_engine, model=case.model, seed=case.seed, passes=1, windows=1)
    other = data.draw(drawn, "other")
    states = smp_world.run(read_state, smp_engine, case, ranks=case.ranks, config=case.config)
    for state in states:
        assert set(state) == set(oracle.make(case).state_dict())
        same(states[0], state)
    loaded = smp_world.run(
        load_state, smp_engine, other, states[0], ranks=other.ranks, config=other.config
    )
    for state in loaded:
        same(states[0], state)
