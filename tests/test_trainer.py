"""Hugging Face's Trainer under smp-run, in the last version that knows SMP: examples/scripts/trainer.py as it is.

A resumed run has the losses, and in the end the weights, of the run that was not interrupted, to the last digit. And
libraries that look for a launcher's variables make no world of their own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import Started

ROOT = Path(__file__).parents[1]
RANKS, STEPS, SAVED = 4, 8, 4
LAST = "4.35.2"

pytestmark = pytest.mark.timeout(900)


def installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


needs_trainer = pytest.mark.skipif(
    installed("transformers") != LAST or installed("accelerate") == "none",
    reason=f"needs accelerate and transformers {LAST} (here: {installed('transformers')}), the last version whose "
    "Trainer was tried with SMP: tox -e transformers435. Later ones drop SMP: "
    "https://github.com/huggingface/transformers/blob/v4.35.2/src/transformers/trainer.py",
)
needs_accelerate = pytest.mark.skipif(
    installed("accelerate") == "none",
    reason="needs accelerate (https://pypi.org/project/accelerate): tox -e transformers435",
)


@pytest.fixture
def run(command: Callable[..., Started]) -> Callable[..., None]:
    """Runs a script under smp-run on rank processes, and waits for it to succeed."""

    def start(words: list[str], launcher: tuple[str, ...] = (), **environment: str) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        started = command(
            [sys.executable, *launcher, "-m", "smp_core.launch", "--cpu", *words],
            PYTHONPATH=path,
            **environment,
        )
        assert started.process.wait() == 0, started.text

    return start


SHARDED = ["ddp=True", "sharded_data_parallel_degree=2", "sdp_param_persistence_threshold=100"]


@needs_trainer
@pytest.mark.parametrize(
    ("backend", "parameters", "whole", "resumed"),
    [
        (
            "gloo",
            ["ddp=True", "pipeline_parallel_degree=2", "microbatches=2", "fp16=True"],
            ["--fp16"],
            ["--fp16", "--gradient_checkpointing"],  # which leaves losses alone
        ),
        ("mpi", [*SHARDED, "partitions=1"], [], []),
        ("gloo", [*SHARDED, "partitions=1", "fp16=True"], ["--fp16"], ["--fp16"]),
        ("sim", ["ddp=True", "pipeline_parallel_degree=2", "microbatches=2"], [], []),
    ],
    ids=["pipeline-fp16", "sharded", "sharded-fp16", "pipeline"],
)
def test_a_resumed_run_of_trainer_goes_on_to_the_last_digit(
    run: Callable[..., None],
    tmp_path: Path,
    backend: str,
    parameters: list[str],
    whole: list[str],
    resumed: list[str],
) -> None:
    options = ["-n", str(RANKS), f"--backend={backend}", "--trust-checkpoints"]
    options += [word for each in parameters for word in ("-p", each)]
    folders = tmp_path / "whole", tmp_path / "resumed"

    def train(folder: Path, *words: str) -> list[float]:
        file = folder.with_suffix(".json")
        run(
            [
                *options,
                str(ROOT / "examples" / "scripts" / "trainer.py"),
                f"--output_dir={folder}",
                f"--losses={file}",
                f"--max_steps={STEPS}",
                f"--save_steps={SAVED}",
                "--per_device_train_batch_size=4",
                "--learning_rate=5e-3",
                "--logging_steps=1",
                "--report_to=none",
                "--disable_tqdm=True",
                "--save_safetensors=False",
                *words,
            ]
        )
        losses: list[float] = json.loads(file.read_text())
        return losses

    wanted = train(folders[0], *whole)
    assert len(wanted) == STEPS
    assert len(set(wanted)) > SAVED  # those of float16 are coarse
    folders[1].mkdir()
    shutil.copytree(folders[0] / f"checkpoint-{SAVED}", folders[1] / f"checkpoint-{SAVED}")
    assert train(folders[1], *resumed, "--resume_from_checkpoint=last") == wanted[SAVED:]
    ends = [
        torch.load(folder / f"checkpoint-{STEPS}" / "pytorch_model.bin", weights_only=True)
        for folder in folders
    ]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(one, ends[1][name]) for name, one in ends[0].items())


PARTIAL_STATE = """
import sys
import torch.distributed as dist
import smdistributed.modelparallel.torch as smp
from accelerate import PartialState

if sys.argv[1] == "before":
    assert PartialState().num_processes == 1
smp.init({"ddp": True})
state = PartialState()
assert (state.num_processes, state.process_index, str(state.distributed_type)) == (1, 0, "DistributedType.NO"), state
assert (dist.get_world_size(), dist.get_rank()) == (smp.size(), smp.rank()) == (2, smp.rank())
assert sorted(smp.allgather(smp.rank(), smp.WORLD)) == [0, 1]
"""


@needs_accelerate
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("launcher", ["smp-run", "torchrun"])
def test_accelerate_makes_no_second_world(
    run: Callable[..., None], tmp_path: Path, launcher: str, when: str
) -> None:
    """Accelerate makes one of the variables RANK, WORLD_SIZE and LOCAL_RANK, where they are set."""
    script = tmp_path / "script.py"
    script.write_text(PARTIAL_STATE)
    if launcher == "smp-run":
        run(["-n", "2", "--backend=gloo", str(script), when])
    else:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        run([str(script), when], torchrun)
