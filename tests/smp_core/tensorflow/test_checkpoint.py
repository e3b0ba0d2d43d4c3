"""Checkpoints in a folder for each rank: what they restore, and when, and which of them all ranks have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from conformance.cases.keras_script import (
    named,
)
from smp_core.errors import ArgumentTypeError, CheckpointError, SmpError, StepAbortedError
from tests.smp_core.tensorflow.keras_training import CASE, Training, stopped
from tests.smp_core.tensorflow.small_models import ONES, GivenCall, check_refused, plain


def gone_on(folder: str, prefix: str | None, before: bool) -> Any:
    """Go on with step 3, or with the one after the named checkpoint."""
    training = Training(folder)
    start = 3 if prefix is None else int(prefix.rpartition("-")[2])
    if not before:
        training.step(7)  # other variables than those that are restored
    assert training.manager.restore(restore_prefix=prefix) is not None
    losses = [training.step(number) for number in range(start, 5)]
    return losses, named(training.model.variables), int(training.counter)


def uninterrupted(folder: str) -> Any:
    training = Training(folder)
    losses = [training.step(number) for number in range(5)]
    return losses, named(training.model.variables)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("prefix", [None, "ckpt-2"])
def test_a_restored_training_goes_on_as_one_without_a_stop(
    smp_world: Any, tmp_path: Path, prefix: str | None, before: bool
) -> None:
    config = CASE.config()
    smp_world.run(stopped, str(tmp_path / "a"), ranks=2, config=config)
    kept = sorted(each.name for each in (tmp_path / "a" / "mp_rank_1").glob("*.index"))
    assert kept == ["ckpt-2.index", "ckpt-3.index"]
    assert sorted(each.name for each in (tmp_path / "a").iterdir() if each.is_dir()) == [
        "mp_rank_0",
        "mp_rank_1",
    ]
    found = smp_world.run(gone_on, str(tmp_path / "a"), prefix, before, ranks=2, config=config)
    wanted = smp_world.run(uninterrupted, str(tmp_path / "b"), ranks=2, config=config)
    start = 3 if prefix is None else 2
    for (losses, variables, counter), (all_losses, all_variables) in zip(
        found, wanted, strict=True
    ):
        assert losses == all_losses[start:]
        assert counter == 5
        for name, value in all_variables.items():
            np.testing.assert_array_equal(variables[name], value, name)


def initialized(folder: str) -> Any:
    training = Training(folder)
    assert training.manager.restore_or_initialize() is not None
    return [training.step(number) for number in range(3, 5)]


def test_restore_or_initialize_restores(smp_world: Any, tmp_path: Path) -> None:
    config = CASE.config()
    smp_world.run(stopped, str(tmp_path / "a"), ranks=2, config=config)
    found = smp_world.run(initialized, str(tmp_path / "a"), ranks=2, config=config)
    wanted = smp_world.run(uninterrupted, str(tmp_path / "b"), ranks=2, config=config)
    assert found == [losses[3:] for losses, _ in wanted]


def counted(folder: str) -> tuple[int, int]:
    training = Training(folder)
    training.manager.restore()
    found = int(training.counter)  # where a script goes on from
    training.counter.assign_add(10)
    training.step(3)
    return found, int(training.counter)


def test_other_variables_are_restored_at_once(smp_world: Any, tmp_path: Path) -> None:
    smp_world.run(stopped, str(tmp_path), ranks=2, config=CASE.config())
    found = smp_world.run(counted, str(tmp_path), ranks=2, config=CASE.config())
    assert found == [(3, 14), (3, 14)]


def test_a_checkpoint_of_another_number_of_ranks_is_refused(smp_world: Any, tmp_path: Path) -> None:
    smp_world.run(stopped, str(tmp_path), ranks=2, config=CASE.config())
    with pytest.raises(CheckpointError, match="written by 2 partitions, and there are 1"):
        smp_world.run(
            gone_on,
            str(tmp_path),
            None,
            True,
            ranks=1,
            config=CASE.config(pipeline_parallel_degree=1),
        )


def restored_at_the_start(folder: str, prefix: str | None) -> Any:
    training = Training(folder)
    found = training.manager.restore(restore_prefix=prefix)
    training.step(0)
    return found


@pytest.mark.parametrize("prefix", [None, "ckpt-2"])
def test_nothing_is_restored_from_an_empty_folder(
    smp_world: Any, tmp_path: Path, prefix: str | None
) -> None:
    """A script that names the checkpoint to go on from begins where there is none."""
    arguments = (str(tmp_path), prefix)
    config = CASE.config()
    assert smp_world.run(restored_at_the_start, *arguments, ranks=2, config=config) == [None] * 2


def test_a_checkpoint_that_is_not_there_is_refused(smp_world: Any, tmp_path: Path) -> None:
    smp_world.run(stopped, str(tmp_path), ranks=2, config=CASE.config())
    with pytest.raises(CheckpointError, match=r"no checkpoint 'ckpt-1' .* there is ckpt-2, ckpt-3"):
        smp_world.run(gone_on, str(tmp_path), "ckpt-1", True, ranks=2, config=CASE.config())


def crashed(folder: str) -> list[str]:
    """Three saves, of which the last is one rank's alone; the latest is kept."""
    training = Training(folder, max_to_keep=1)
    for number in range(2):
        training.step(number)
        training.manager.save()
    training.step(2)
    if smp.rank():
        training.manager._try_on_all = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    else:
        training.manager._try_on_all = lambda name, action: [action()]
        # Up to the moment at which the ranks tell each other that they have written.
        training.manager._sweep = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        training.manager.save()
    return sorted(each.stem for each in Path(training.manager.directory).glob("*.index"))


def restored(folder: str, prefix: str | None = None) -> Any:
    training = Training(folder)
    path = training.manager.restore(prefix)
    return path and Path(path).name, int(training.counter)


def test_after_a_crash_between_two_ranks_all_restore_the_newest_that_all_have(
    smp_world: Any, tmp_path: Path
) -> None:
    config = CASE.config()
    first, second = smp_world.run(crashed, str(tmp_path), ranks=2, config=config)
    assert second == ["ckpt-2"]
    assert {"ckpt-2", "ckpt-3"} <= set(first)  # nothing is deleted before all have the next one
    found = smp_world.run(restored, str(tmp_path), ranks=2, config=config)
    assert found == [("ckpt-2", 2)] * 2
    with pytest.raises(CheckpointError, match=r"'ckpt-3' .*not on rank 1.* there is ckpt-2"):
        smp_world.run(restored, str(tmp_path), "ckpt-3", ranks=2, config=config)


def test_checkpoints_of_one_name_and_two_saves_are_none(smp_world: Any, tmp_path: Path) -> None:
    config = CASE.config()
    for name in ("a", "b"):
        smp_world.run(stopped, str(tmp_path / name), ranks=2, config=config)
    shutil.rmtree(tmp_path / "a" / "mp_rank_1")
    (tmp_path / "b" / "mp_rank_1").rename(tmp_path / "a" / "mp_rank_1")
    found = smp_world.run(restored, str(tmp_path / "a"), ranks=2, config=config)
    assert found == [(None, 0)] * 2
    with pytest.raises(CheckpointError, match="different saves"):
        smp_world.run(restored, str(tmp_path / "a"), "ckpt-3", ranks=2, config=config)


def loaded_late(folder: str) -> Any:
    """A load that fails on rank 1 in the first step, and works in the second."""
    training = Training(folder)
    load, failed = training.manager._load, list[bool]()

    def torn(*args: Any) -> None:
        if smp.rank() and not failed:
            failed.append(True)
            raise OSError("torn")
        load(*args)

    training.manager._load = torn
    hooks: list[int] = []
    smp.register_post_partition_hook(lambda: hooks.append(len(training.model.variables)))
    training.manager.restore()
    with pytest.raises((OSError, StepAbortedError), match="torn"):
        training.step(3)
    losses = [training.step(number) for number in range(3, 5)]
    empty = sum(not each.numpy().size for each in training.model.all_variables())
    return losses, named(training.model.variables), hooks, empty


def test_the_step_after_a_load_that_failed_loads_again(smp_world: Any, tmp_path: Path) -> None:
    config = CASE.config()
    smp_world.run(stopped, str(tmp_path / "a"), ranks=2, config=config)
    found = smp_world.run(loaded_late, str(tmp_path / "a"), ranks=2, config=config)
    wanted = smp_world.run(uninterrupted, str(tmp_path / "b"), ranks=2, config=config)
    counts = [len(variables) for _, variables in wanted]
    for rank, (losses, variables, hooks, empty) in enumerate(found):
        assert losses == wanted[rank][0][3:]
        assert hooks == [counts[rank]]
        assert empty == counts[1 - rank]
        for name, value in wanted[rank][1].items():
            np.testing.assert_array_equal(variables[name], value, name)


#: A place that no folder can be made in, should a call that is to be refused go on.
NOWHERE = "/dev/null/nowhere"


def early_save() -> None:
    smp.CheckpointManager(tf.train.Checkpoint(model=GivenCall(plain)), NOWHERE).save()


def no_checkpoint() -> None:
    smp.CheckpointManager(GivenCall(plain), NOWHERE)


def unnamed_checkpoint() -> None:
    model = GivenCall(plain)
    manager = smp.CheckpointManager(tf.train.Checkpoint(model), NOWHERE)
    smp.step(lambda x: model(x))(tf.constant(ONES))
    manager.save()


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (early_save, CheckpointError, "save after the first step"),
        (no_checkpoint, ArgumentTypeError, "not a tf.train.Checkpoint"),
        (unnamed_checkpoint, CheckpointError, "has no named parts"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_mistake_is_told(
    smp_world: Any, body: Callable[[], None], kind: type[SmpError], words: str
) -> None:
    check_refused(smp_world, body, kind, words)
