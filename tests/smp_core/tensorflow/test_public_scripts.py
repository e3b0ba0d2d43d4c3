"""Scripts of the shape of public ones for SMP run with nothing changed but the import, or with nothing changed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

SCRIPTS = Path(__file__).parent / "public_scripts"
IMPORT = "import smdistributed.modelparallel.tensorflow as smp"
ROOT = Path(__file__).parents[3]


def started(
    script: Path, ranks: int, *words: str, arguments: tuple[str, ...] = ()
) -> dict[int, list[float]]:
    """Run a script on ranks of smp-run, and return the losses that each rank printed."""
    text = printed(script, ranks, *words, arguments=arguments)
    losses = by_rank(r"(?:epoch|step) \d+ loss (\S+)", text, ranks)
    return {rank: [float(each) for each in found] for rank, found in losses.items()}


def by_rank(pattern: str, text: str, ranks: int) -> dict[int, list[str]]:
    """The text that the group of the pattern matched in the lines of each rank, in order."""
    found: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    for rank, each in re.findall(rf"\[rank (\d+)\] {pattern}", text):
        found[int(rank)].append(each)
    return found


def printed(script: Path, ranks: int, *words: str, arguments: tuple[str, ...] = ()) -> str:
    """Run a script on ranks of smp-run, and return what it printed."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "smp_core.launch",
            f"-n{ranks}",
            *words,
            str(script),
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture
def changed(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The script with another import."""
    text = (SCRIPTS / request.param).read_text(encoding="utf-8")
    assert text.count(IMPORT) == 1
    path = tmp_path / request.param
    path.write_text(text.replace(IMPORT, "import smp_core.tensorflow as smp"), encoding="utf-8")
    return path


@pytest.mark.parametrize("changed", ["epochs.py"], indirect=True)
def test_epochs_with_metrics(changed: Path) -> None:
    words = ("-p", "partitions=2", "-p", "microbatches=4", "-p", "auto_partition=false")
    losses = started(changed, 2, *words, "-p", "default_partition=0")
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("changed", ["horovod.py"], indirect=True)
def test_replicas_of_an_automatic_partition(changed: Path) -> None:
    text = printed(changed, 4)
    losses = by_rank(r"epoch \d+ loss (\S+)", text, 4)
    ours = [list(map(float, each)) for each in losses.values() if each]
    assert len(ours) == 2  # the ranks of the first replica
    assert ours[0] == ours[1]
    assert len(ours[0]) == 6
    assert ours[0][-1] < ours[0][0] / 2
    # Replicas of the same weights, whose batches differ, have the same weights in the end.
    weights = by_rank(r"weights (.+)", text, 4)
    assert all(len(each) == 1 for each in weights.values())
    assert (weights[0], weights[1]) == (weights[2], weights[3])
    assert weights[0] != weights[1]
    # The hook runs once on each rank; two layers, a normalization and an output have two variables each.
    hooks = by_rank(r"partitioned; variables here: (\d+)", text, 4)
    assert hooks[0] == hooks[2]
    assert hooks[1] == hooks[3]
    assert int(*hooks[0]) + int(*hooks[1]) == 8


@pytest.mark.parametrize("unchanged", [False, True])
@pytest.mark.parametrize("changed", ["checkpoints.py"], indirect=True)
def test_checkpoints_restored_at_the_first_step(
    changed: Path, unchanged: bool, tmp_path: Path
) -> None:
    script = SCRIPTS / "checkpoints.py" if unchanged else changed
    first = started(script, 2, arguments=(str(tmp_path),))
    again = started(script, 2, arguments=(str(tmp_path),))
    assert first[0] == first[1]
    assert len(first[0]) == len(again[0]) == 12
    assert again[0][0] < first[0][0] / 2  # it went on from the trained weights
    model = tf.saved_model.load(str(tmp_path / "model"))
    assert model.signatures["serving_default"](tf.ones((3, 6)))["output_0"].shape == (3, 1)
