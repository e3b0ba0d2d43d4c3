"""Properties of checkpoints of Keras models, in a folder for each rank, and of the whole model as a SavedModel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.cases.keras import KerasCase, bodies, script, two
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld

CASE = KerasCase((("dense", 0), ("batch norm", 1), ("layer norm", 1)), 0, 1, False, 0, 2)


def stopped(smp_world: SmpWorld, engine: str, folder: Path, keep: int | None = None) -> Any:
    """Train five steps on two ranks, or on one, with three checkpoints."""
    body, case = bodies(smp_world).stopped, CASE.on(two(smp_world))
    arguments = (case, str(folder), keep)
    return smp_world.run(body, engine, *arguments, ranks=case.partitions, config=case.config())


def same(found: Any, wanted: Any, start: int) -> None:
    """Compare what the ranks did from a step on with the training that was not stopped."""
    for (losses, variables, counter), (all_losses, all_variables, all_counted) in zip(
        found, wanted, strict=True
    ):
        assert losses == all_losses[start:]
        assert counter == all_counted
        assert variables.keys() == all_variables.keys()
        for name, value in all_variables.items():
            np.testing.assert_array_equal(variables[name], value, name)


def kept(folder: Path, rank: int) -> list[str]:
    """The checkpoints in a rank's folder."""
    return sorted(each.stem for each in (folder / f"mp_rank_{rank}").glob("*.index"))


@requirement("TF-CKPT-RANK-DIRS")
def test_each_rank_has_a_folder(smp_world: SmpWorld, smp_engine: str, tmp_path: Path) -> None:
    stopped(smp_world, smp_engine, tmp_path)
    folders = sorted(each.name for each in tmp_path.iterdir() if each.is_dir())
    assert folders == [f"mp_rank_{rank}" for rank in range(two(smp_world))]
    assert all((tmp_path / each / "checkpoint").is_file() for each in folders)


@requirement("TF-CKPT-MAX")
@pytest.mark.parametrize("keep", [None, 2, 1])
def test_the_latest_are_kept(
    smp_world: SmpWorld, smp_engine: str, tmp_path: Path, keep: int | None
) -> None:
    stopped(smp_world, smp_engine, tmp_path, keep)
    for rank in range(two(smp_world)):
        assert kept(tmp_path, rank) == ["ckpt-1", "ckpt-2", "ckpt-3"][-(keep or 3) :]


@requirement("TF-CKPT-PREFIX")
@pytest.mark.parametrize("prefix", ["ckpt-1", "ckpt-2", "ckpt-3", None])
def test_the_named_checkpoint_is_restored(
    smp_world: SmpWorld, smp_engine: str, tmp_path: Path, prefix: str | None
) -> None:
    wanted = stopped(smp_world, smp_engine, tmp_path)
    body, case = bodies(smp_world).gone_on, CASE.on(two(smp_world))
    arguments = (case, str(tmp_path), prefix, False)
    found = smp_world.run(body, smp_engine, *arguments, ranks=case.partitions, config=case.config())
    same(found, wanted, 3 if prefix is None else int(prefix[-1]))


@requirement("TF-CKPT-STOP-AND-GO")
@pytest.mark.parametrize("before", [True, False])
def test_restored_training_goes_on_as_if_it_had_not_stopped(
    smp_world: SmpWorld, smp_engine: str, tmp_path: Path, before: bool
) -> None:
    wanted = stopped(smp_world, smp_engine, tmp_path)
    body, case = bodies(smp_world).gone_on, CASE.on(two(smp_world))
    arguments = (case, str(tmp_path), None, before)
    found = smp_world.run(body, smp_engine, *arguments, ranks=case.partitions, config=case.config())
    same(found, wanted, 3)


#: A process that imports nothing but TensorFlow, and predicts.
LOADS = """
import sys, numpy as np, tensorflow as tf
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
model = tf.saved_model.load(sys.argv[1])
found = model.signatures["serving_default"](tf.constant(np.load(sys.argv[2])))
np.save(sys.argv[3], found["output_0"].numpy())
assert not [name for name in sys.modules if name.startswith("smp")]
"""


@requirement("TF-SAVE-WHOLE")
def test_a_saved_model_is_whole(smp_world: SmpWorld, smp_engine: str, tmp_path: Path) -> None:
    keras, case = script(smp_world), CASE.on(two(smp_world))
    body, count = bodies(smp_world).saved, case.partitions
    smp_world.run(body, smp_engine, case, str(tmp_path), ranks=count, config=case.config())
    x, _ = keras.data(CASE, 9)
    np.save(tmp_path / "x.npy", x)
    outside = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [
            sys.executable,
            "-c",
            LOADS,
            *(str(tmp_path / each) for each in ("model", "x.npy", "y.npy")),
        ],
        cwd=tmp_path,
        env=outside,
        check=True,
        timeout=120,
    )
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), keras.predicted(CASE, x))
