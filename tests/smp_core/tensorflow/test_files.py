"""Checkpoints of a folder for each rank, and the whole model as a SavedModel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from conformance.cases.keras import KerasCase as Case
from conformance.cases.keras_script import (
    DROPOUT,
    SAMPLES,
    build,
    data,
    loss_and_gradients,
    make_optimizer,
    named,
)
from smp_core.errors import CheckpointError, StepAbortedError
from smp_core.tensorflow import tensorflow_parts as parts

CASE = Case((("dense", 0), ("batch norm", 1), (DROPOUT, 1)), 0, 1, False, 0, 2)


class Training:
    """A rank's training of the case, with a manager of checkpoints."""

    def __init__(self, folder: str, **options: Any) -> None:
        self.model = model = build(CASE, smp.DistributedModel, smp.partition)
        self.optimizer = optimizer = make_optimizer(CASE)
        self.counter = tf.Variable(0)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, counter=self.counter)
        self.manager = smp.CheckpointManager(checkpoint, folder, **options)

        @smp.step
        def body(x: Any, y: Any) -> Any:
            return loss_and_gradients(CASE, model, optimizer, x, y)

        self.body = body

    def step(self, number: int) -> list[float]:
        x, y = data(CASE, number)
        loss, _, gradients = self.body(tf.constant(x), tf.constant(y))
        mean = [each.accumulate() for each in gradients]
        self.optimizer.apply_gradients(zip(mean, self.model.trainable_variables, strict=True))
        self.counter.assign_add(1)
        return [float(each) for each in loss.outputs]


def stopped(folder: str) -> None:
    training = Training(folder, max_to_keep=2)
    for number in range(3):
        training.step(number)
        training.manager.save()


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


class Masked(smp.DistributedModel):
    """A model of two tensors."""

    def call(self, x: Any, training: bool = False, mask: Any = None) -> Any:
        return x if mask is None else x * mask


def saved_by_name(folder: str) -> Any:
    model = Masked()
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    smp.step(lambda x, mask: model(x, training=True, mask=mask))(x, x)
    model.save_model(folder)
    served = tf.saved_model.load(folder).signatures["serving_default"]
    _, named_inputs = served.structured_input_signature
    return served(**dict.fromkeys(named_inputs, x))["output_0"].numpy()


def test_a_saved_model_takes_the_arguments_that_were_given_by_name(
    smp_world: Any, tmp_path: Path
) -> None:
    config = CASE.config(pipeline_parallel_degree=1)
    (found,) = smp_world.run(saved_by_name, str(tmp_path), ranks=1, config=config)
    np.testing.assert_array_equal(found, [[1.0, 4.0], [9.0, 16.0]])


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
        training.manager._together = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    else:
        training.manager._together = lambda name, action: [action()]
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


class TwoLayers(smp.DistributedModel):
    """A layer on each of two partitions, of equal kernels and biases' shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (tf.keras.layers.Dense(3, name=name) for name in ("one", "other"))

    def call(self, x: Any) -> Any:
        x = self.other(self.one(x))
        with smp.partition(1):
            return x * 2.0


def slots(folder: str, saving: bool, before: bool) -> Any:
    """Two optimizers, each for one layer; after the restart they are built for the variables in another order."""
    model = TwoLayers()
    kinds = [tf.keras.optimizers.Adam(0.1), tf.keras.optimizers.Adam(0.1)]
    checkpoint = tf.train.Checkpoint(model=model, first=kinds[0], second=kinds[1])
    manager = smp.CheckpointManager(checkpoint, folder)

    @smp.step
    def body(x: Any) -> Any:
        return kinds[0].get_gradients(tf.reduce_sum(model(x)), model.trainable_variables)

    def step() -> None:
        gradients = body(tf.constant(np.eye(4, 3), tf.float32))
        pairs = [
            (each.accumulate() * (at + 1.0), variable)
            for at, (each, variable) in enumerate(
                zip(gradients, model.trainable_variables, strict=True)
            )
        ]
        if not saving:
            pairs.reverse()
        for optimizer, layer in zip(kinds, (model.one, model.other), strict=True):
            own = {id(parts.inner(each)) for each in layer.trainable_variables}
            mine = [each for each in pairs if id(parts.inner(each[1])) in own]
            if mine:
                optimizer.apply_gradients(mine)

    if saving:
        step()
        step()
        manager.save()
    else:
        if not before:
            step()
        manager.restore()
    step()
    return [each.numpy() for each in model.trainable_variables]


@pytest.mark.parametrize("before", [True, False])
def test_slots_go_by_variable_whatever_the_order(
    smp_world: Any, tmp_path: Path, before: bool
) -> None:
    config = CASE.config()
    wanted = smp_world.run(slots, str(tmp_path), True, before, ranks=2, config=config)
    found = smp_world.run(slots, str(tmp_path), False, before, ranks=2, config=config)
    assert len(wanted[0]) == 4
    for one, other in zip(wanted, found, strict=True):
        for want, have in zip(one, other, strict=True):
            np.testing.assert_array_equal(have, want)


def failing(folder: str, what: str) -> str:
    """The error of this rank when rank 1 fails in a call that all ranks make."""
    if what in ("load", "early"):
        training = Training(folder)
        if smp.rank() and what == "load":
            training.manager._load = lambda *_: (_ for _ in ()).throw(OSError("torn"))
        elif smp.rank():
            for each in Path(training.manager.directory).glob("*.data*"):
                each.write_bytes(b"")
        action = [training.manager.restore, lambda: training.step(0)]
    else:
        training = Training(folder)
        training.step(0)
        if what == "save" and smp.rank():
            Path(training.manager.directory).write_text("no folder")
        if what == "save_model":
            Path(folder, "model").parent.mkdir(exist_ok=True)
            Path(folder, "model").write_text("no folder")
        action = [
            training.manager.save
            if what == "save"
            else lambda: training.model.save_model(f"{folder}/model")
        ]
    try:
        for each in action:
            each()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "failed", "kind", "call"),
    [
        ("load", 1, "StepAbortedError", "CheckpointManager.restore"),
        ("early", 1, "CheckpointError", "CheckpointManager.restore"),
        ("save", 1, "CheckpointError", "CheckpointManager.save"),
        ("save_model", 0, "CheckpointError", "DistributedModel.save_model"),
    ],
)
def test_all_ranks_learn_which_rank_failed_and_why(
    smp_world: Any, tmp_path: Path, what: str, failed: int, kind: str, call: str
) -> None:
    config = CASE.config()
    if what in ("load", "early"):
        smp_world.run(stopped, str(tmp_path), ranks=2, config=config)
    found = smp_world.run(failing, str(tmp_path), what, ranks=2, config=config)
    own = found[failed]
    assert not own.startswith((kind, "nothing"))
    assert found[1 - failed] == f"{kind}: smp.{call}: failed on rank {failed}: {own}"


def saved(folder: str) -> Any:
    training = Training(f"{folder}/checkpoints")
    training.step(0)
    training.model.save_model(f"{folder}/model")
    training.step(1)  # the ranks have again what they own
    return named(training.model.variables)


LOADS = """
import sys, numpy as np, tensorflow as tf
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
model = tf.saved_model.load(sys.argv[1])
found = model.signatures["serving_default"](tf.constant(np.load(sys.argv[2])))["output_0"]
np.save(sys.argv[3], found.numpy())
assert not [name for name in sys.modules if name.startswith("smp_core")]
"""


def test_a_saved_model_is_whole_and_needs_nothing_of_ours(smp_world: Any, tmp_path: Path) -> None:
    smp_world.run(saved, str(tmp_path), ranks=2, config=CASE.config())
    x, _ = data(CASE, 9)
    np.save(tmp_path / "x.npy", x)
    names = [str(tmp_path / each) for each in ("model", "x.npy", "found.npy")]
    done = subprocess.run(
        [sys.executable, "-c", LOADS, *names],
        cwd=tmp_path,
        env={"PATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=120,
    )
    assert done.returncode == 0
    wanted = smp_world.run(predicted, x, ranks=1, config=CASE.config(pipeline_parallel_degree=1))
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), wanted[0])


def predicted(x: Any) -> Any:
    """What the unpartitioned model predicts after the step."""
    import contextlib

    model = build(CASE, tf.keras.Model, lambda _: contextlib.nullcontext())
    optimizer = make_optimizer(CASE)
    first, target = data(CASE, 0)
    body = tf.function(lambda x, y: loss_and_gradients(CASE, model, optimizer, x, y)[2])
    one = body.get_concrete_function(tf.constant(first[:SAMPLES]), tf.constant(target[:SAMPLES]))
    parts = [
        one(tf.constant(first[at : at + SAMPLES]), tf.constant(target[at : at + SAMPLES]))
        for at in (0, SAMPLES)
    ]
    mean = [(a + b) / 2 for a, b in zip(*parts, strict=True)]
    optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
    return model(tf.constant(x), training=False).numpy()
