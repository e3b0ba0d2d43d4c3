"""The scripts of examples/scripts, started by smp-run as they are: their losses are those of plain PyTorch.

Float32 with pipelines and replicas, and 16 bits with sharded data parallelism, promise equal bits: gradients are added
up in the published order. Tensor parallelism is held to the ratio rule (docs/spec/engines.md#2.2).
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pytest_smp import replay
from smp_core.errors import BackendError
from smp_core.launch import command as smp_run
from smp_core.launch.mpiexec import find_mpiexec
from tests.conftest import Started

FOLDER = Path(__file__).parents[1] / "examples" / "scripts"
RANKS, STEPS, CLIP = 4, 6, 0.25
SIM = ["-n", str(RANKS), "--backend", "sim", "--cpu"]
DIGITS = ["digits.py", "--epochs=1", f"--steps={STEPS}", "--microbatches=4"]
PIPELINE = ["gpt2.py", "--pipeline_parallel_degree=2", "--microbatches=2", "--manual_partition=1"]
SHARDED = ["gpt2.py", "--sharded_data_parallel_degree=2", "--bf16=1", f"--grad_clip={CLIP}"]
TENSOR = [
    "gpt2.py",
    "--tensor_parallel_degree=2",
    "--prescaled_batch=1",
    "--fp16=1",
    f"--grad_clip={CLIP}",
]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def twin() -> Iterator[ModuleType]:
    """The module of the twins in plain PyTorch. Scripts are no part of what is installed."""
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    pytest.importorskip("transformers", reason="GPT-2 is Hugging Face's")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("plain")


@functools.cache
def expected(twin: ModuleType, name: str, **options: int) -> list[float]:
    """Plain PyTorch's losses, in float32."""
    losses: list[float] = twin.losses_of(getattr(twin, name)(torch.float32), steps=STEPS, **options)
    assert len(losses) == len(set(losses)) == STEPS
    return losses


@pytest.fixture
def sim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[float]]:
    """Runs a script on simulated ranks, in this process; gives the losses that it has written."""

    def run(script: str, *words: str) -> list[float]:
        file = tmp_path / "losses.json"
        given = [
            *words,
            f"--losses={file}",
            "--mp_parameters=ddp=True",
        ]  # the last as LocalEstimator does
        code = smp_run.main([*SIM, str(FOLDER / script), *given])
        assert code == 0, "\n".join(capsys.readouterr())
        losses: list[float] = json.loads(file.read_text())
        return losses

    return run


@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
def test_digits_have_the_losses_of_plain_pytorch(sim, twin, schedule, tmp_path):
    wanted = expected(twin, "Digits", replicas=2, microbatches=4)
    saved = f"--checkpoint={tmp_path / 'digits.pt'}"
    assert sim(*DIGITS, f"--pipeline={schedule}", saved) == wanted
    assert {path.name for path in tmp_path.glob("digits.pt*")} == {"digits.pt_0", "digits.pt_1"}


@pytest.mark.parametrize("partition", ["manual", "auto"])
def test_gpt2_in_a_pipeline_has_the_losses_of_plain_pytorch(sim, twin, partition, capsys):
    words = [*PIPELINE, f"--manual_partition={int(partition == 'manual')}"]
    assert sim(*words) == expected(twin, "GPT2", replicas=2, microbatches=2)
    shown = capsys.readouterr().out
    assert shown.count("[rank 3] pp rank 1 of 2: ") == 1
    assert shown.count("after the first step: at most 0.00 GiB") == RANKS


def test_gpt2_goes_on_from_a_checkpoint(sim, twin, tmp_path):
    saved = f"--checkpoint_dir={tmp_path / 'saved'}"
    wanted = expected(twin, "GPT2", replicas=2, microbatches=2)
    assert sim(*PIPELINE, saved, "--max_steps=4") == wanted[:4]
    words = [*PIPELINE, saved, "--load_partial=1", "--save_final_full_model=1"]
    assert sim(*words) == wanted  # the first three are from the checkpoint, as they were
    whole = torch.load(tmp_path / "saved" / "fullmodel.pt", weights_only=True)
    assert whole.keys() == twin.GPT2(torch.float32).model.state_dict().keys()


@functools.cache
def in_order(twin: ModuleType, degree: int, ranks: int) -> list[float]:
    """The losses of a loop on one process in bfloat16 that adds up and clips in the order that is published for this
    degree and number of ranks (docs/sharding.md).
    """
    task = twin.GPT2(torch.bfloat16)
    masters = copy.deepcopy(task.model).float()
    optimizer, scheduler = task.optimizer(masters)
    losses = []

    def body(*batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = task.loss(task.model, *batch)
        loss.backward()
        return loss.detach()

    for batch, _ in zip(twin.batches(task, ranks), range(STEPS), strict=False):
        found = [replay.gradients(task.model, body, [each], wide=True) for each in batch]
        gradients = replay.reduce_sharded([[each.gradients] for each in found], degree, ranks)
        coefficient = min(1.0, CLIP / (replay.norm(gradients, degree) + 1e-6))
        assert coefficient < 1
        for name, master in masters.named_parameters():
            master.grad = gradients[name] * coefficient
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for parameter, master in zip(
                task.model.parameters(), masters.parameters(), strict=True
            ):
                parameter.copy_(master)
        losses.append(twin.pairwise([each.results[0] for each in found]).item() / ranks)
    return losses


def test_sharded_gpt2_in_bfloat16_has_the_losses_of_its_published_order(sim, twin):
    losses = sim(*SHARDED)
    assert losses == in_order(twin, degree=2, ranks=RANKS)
    assert within_ratio(twin, losses, torch.bfloat16, replicas=RANKS, clip=CLIP)


@pytest.mark.filterwarnings("ignore::smp_core.torch.fused.PlainEquivalentWarning")
@pytest.mark.parametrize("former", [0, 1], ids=["SMP 1.15", "before SMP 1.10"])
def test_tensor_parallel_gpt2_in_float16_is_as_near_to_the_truth_as_plain_pytorch(
    sim, twin, former
):
    losses = sim(*TENSOR, f"--former_style={former}")
    assert within_ratio(twin, losses, torch.float16, replicas=2, clip=CLIP, scale=2.0**12)


@pytest.mark.filterwarnings("ignore::smp_core.torch.fused.PlainEquivalentWarning")
def test_gpt2_with_new_weights_begins_alike_at_every_tensor_parallel_degree(sim, twin, monkeypatch):
    """Public scripts switch the initialisation of the model off that is replaced."""
    base = importlib.import_module("transformers").PreTrainedModel
    monkeypatch.setattr(base, "init_weights", base.init_weights)  # which the script replaces
    words = ["gpt2.py", "--new_weights=1", "--max_steps=1", "--prescaled_batch=1"]
    one, two, four = (
        torch.tensor(sim(*words, f"--tensor_parallel_degree={degree}", batch))
        for degree, batch in (
            (1, "--train_batch_size=4"),
            (2, "--train_batch_size=8"),
            (4, "--train_batch_size=16"),
        )
    )
    torch.testing.assert_close(two, one)
    torch.testing.assert_close(four, one)


def within_ratio(
    twin: ModuleType, losses: list[float], dtype: torch.dtype, **options: float
) -> bool:
    """True if the greatest error of losses is at most four times that of the plain loop in 16 bits; the truth is the
    same loop in float64, from the same weights.
    """
    plain, truth = (
        twin.losses_of(twin.GPT2(dtype), steps=STEPS, **options, wide=wide)
        for wide in (None, torch.float64)
    )

    def error(found: list[float]) -> float:
        return max(abs(one - true) for one, true in zip(found, truth, strict=True))

    moved = max(truth) - min(truth)
    assert error(plain) < moved / 16  # else the comparison would say nothing
    return error(losses) <= 4 * error(plain)


def started_by(launcher: str, ranks: int) -> list[str]:
    """The command that runs a script on ranks."""
    run = [sys.executable, "-m", "smp_core.launch"]
    if launcher == "gloo":
        return [*run, "-n", str(ranks), "--backend=gloo", "--cpu"]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, f"--nproc-per-node={ranks}", "-m", "smp_core.launch", "--cpu"]
    pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    try:
        mpiexec, _ = find_mpiexec("")
    except BackendError as error:
        pytest.skip(str(error))
    return [*mpiexec, "-n", str(ranks), *run, "--cpu"]


# Ranks of smp-run on gloo are forked from one process. Each of the others imports torch for seconds: two are enough.
# The start of smp-run's MPI jobs is tested in smp_core/launch/test_processes.py.
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [("gloo", 4), ("mpiexec", 2), ("torchrun", 2)],
    ids=["gloo", "mpiexec", "torchrun"],
)
def test_scripts_have_the_same_losses_whoever_starts_them(
    twin: ModuleType,
    command: Callable[..., Started],
    launcher: str,
    ranks: int,
    tmp_path: Path,
) -> None:
    name, *words = PIPELINE if launcher == "gloo" else DIGITS
    file = tmp_path / "losses.json"
    path = os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")])
    started = command(
        [*started_by(launcher, ranks), str(FOLDER / name), *words, f"--losses={file}"],
        PYTHONPATH=path,
    )
    assert started.process.wait() == 0, started.text
    wanted = (
        expected(twin, "GPT2", replicas=ranks // 2, microbatches=2)
        if launcher == "gloo"
        else expected(twin, "Digits", replicas=ranks // 2, microbatches=4)
    )
    assert json.loads(file.read_text()) == wanted


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_sharded_gpt2_has_the_losses_of_its_published_order_on_processes(
    twin: ModuleType, command: Callable[..., Started], backend: str, tmp_path: Path
) -> None:
    """On as few ranks as can be: those of MPI import torch for seconds."""
    if backend == "mpi":
        started_by("mpiexec", 2)  # skips the test without an MPI
    file, (name, *words) = tmp_path / "losses.json", SHARDED
    run = [sys.executable, "-m", "smp_core.launch", "-n", "2", f"--backend={backend}", "--cpu"]
    path = os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")])
    started = command([*run, str(FOLDER / name), *words, f"--losses={file}"], PYTHONPATH=path)
    assert started.process.wait() == 0, started.text
    assert json.loads(file.read_text()) == in_order(twin, degree=2, ranks=2)
