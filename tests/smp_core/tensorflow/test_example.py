"""The example in Keras trains as plain Keras does, on simulated ranks and on those of mpiexec."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from conformance.cases import keras_script  # without the passes that fuse

ROOT = Path(__file__).parents[3]
STEPS = 12


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the script, which is no part of what is installed."""
    import importlib

    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    monkeypatch.syspath_prepend(ROOT)
    assert keras_script.WIDTH
    return importlib.import_module("examples.keras.train")


@pytest.fixture
def eager() -> Iterator[None]:
    """Functions run eagerly, as on simulated ranks: a graph rounds the update of Adam in another way."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize(
    ("ranks", "auto"), [(1, False), (2, False), (2, True), (4, False), (4, True)]
)
def test_on_simulated_ranks_the_curve_is_that_of_plain_keras(
    smp_world: Any, example: Any, eager: None, ranks: int, auto: bool
) -> None:
    options = example.Options(pipeline=ranks, auto=auto, steps=STEPS)
    curves = smp_world.run(example.train, options, ranks=ranks, init=False)
    wanted = example.plain(options)
    assert len(wanted) == STEPS
    assert curves == [wanted] * ranks
    assert wanted[-1] < wanted[0]


def test_training_goes_on_from_its_checkpoint(
    smp_world: Any, example: Any, eager: None, tmp_path: Path
) -> None:
    options = example.Options(pipeline=2, checkpoints=str(tmp_path), steps=STEPS)
    (whole, _) = smp_world.run(example.train, options, ranks=2, init=False)
    (rest, _) = smp_world.run(example.train, options, ranks=2, init=False)
    assert rest == whole[10:]
    more = dataclasses.replace(options, steps=STEPS + 2)
    (longer, _) = smp_world.run(example.train, more, ranks=2, init=False)
    assert longer[:2] == whole[10:]
    assert len(longer) == 4


def run(tmp_path: Path, name: str, *words: str) -> list[float]:
    """The curve of the script as a program."""
    path = tmp_path / f"{name}.json"
    done = subprocess.run(
        [*words, f"--steps={STEPS}", "--exact", f"--curve={path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    curve: list[float] = json.loads(path.read_text())
    return curve


def test_as_a_program_it_has_the_curve_of_plain_keras(example: Any, tmp_path: Path) -> None:
    script = [sys.executable, "-m", "examples.keras.train"]
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    if mpiexec is None:
        pytest.skip("there is no mpiexec beside this Python: pip install mpich")
    wanted = run(tmp_path, "plain", *script, "--plain")
    assert run(tmp_path, "alone", *script) == wanted
    folder = tmp_path / "model"
    found = run(tmp_path, "two", mpiexec, "-n", "2", *script, "--pipeline=2", f"--model={folder}")
    assert found == wanted
    served = tf.saved_model.load(str(folder)).signatures["serving_default"]
    images, digits = example.data()
    logits = served(tf.constant(images))["output_0"].numpy()
    right = np.mean(np.argmax(logits, 1) == digits)
    assert right > 0.3  # of ten digits, after a few steps
