"""The names of SMDDP that public scripts import, on the backend `smddp`."""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from pytest_smp.proxies import SmpWorld
from smp_core.errors import BackendError
from smp_core.transport.launchers import LAUNCHERS, RENDEZVOUS
from smp_core.transport.smddp import distributed
from tests.smp_core.transport.smddp.rank_processes import on_machines, on_ranks


def test_the_local_rank_is_that_on_the_machine(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[int, int]:
        return distributed.get_local_rank(), distributed.get_local_size()

    assert on_ranks(tmp_path, 4, body, on_machines("abbb")) == [(0, 1), (0, 3), (1, 3), (2, 3)]


SCRIPT = """
import sys
import torch
import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP
import smdistributed.dataparallel.torch.parallel as parallel

assert parallel.DistributedDataParallel is parallel.distributed.DistributedDataParallel is DDP
assert dist.is_available() and not dist.is_initialized()
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
assert dist.get_local_rank() == rank and dist.get_local_size() == size

# All numbers are small multiples of powers of two, so that sums are exact.
model = torch.nn.Linear(2, 1, bias=False)
model.weight.data = torch.tensor([[rank + 1.0, 2.0]])  # DDP takes that of rank 0
model = DDP(model, device_ids=[dist.get_local_rank()], output_device=dist.get_local_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model(torch.tensor([[1.0 + rank, 4.0]])).sum().backward()
optimizer.step()
total = torch.ones(1)
dist.all_reduce(total, op=dist.ReduceOp.SUM)
dist.barrier()
assert total.item() == size
for backend in ("gloo", "gloo", "smddp"):
    dist.destroy_process_group()
    dist.init_process_group(backend)
    total[:] = 1
    dist.all_reduce(total)
    assert total.item() == size
sys.stdout.write(f"{rank} {size} {dist.get_backend()} {model.module.weight.tolist()}\\n")  # at once
"""


#: The gradient of rank r is [1 + r, 4]; the step subtracts half of their mean.
EXPECTED = {size: [[1.0 - (size + 1) / 4, 0.0]] for size in (1, 2)}


@pytest.mark.parametrize("command", ["", "smp-run", "torchrun"])
def test_a_script_of_smddp(tmp_path: Path, command: str) -> None:
    path, size = tmp_path / "train.py", 1 if not command else 2
    path.write_text("import smp_core; smp_core.install_import_names()\n" + SCRIPT)
    words = {
        "": [],
        "smp-run": ["-m", "smp_core.launch", "-n", "2", "--backend", "gloo", "--output", "plain"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    }[command]
    names = {name for each in LAUNCHERS for name in (each.rank, each.size)}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, *words, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "smddp" in line]
    assert sorted(lines) == [f"{rank} {size} smddp {EXPECTED[size]}" for rank in range(size)]


def test_a_launcher_without_a_place_to_meet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        BackendError, match=r"mpiexec \(Open MPI\) gives its ranks no place to meet"
    ):
        distributed.init_process_group()


def test_a_launcher_that_is_half_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _launched(monkeypatch, RANK="1")
    with pytest.raises(BackendError, match="RANK=1 is set and WORLD_SIZE is not"):
        distributed.init_process_group()


def test_the_only_rank_of_a_launcher_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _launched(monkeypatch, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1")
    assert distributed._launch() is None


def test_a_limit_holds_for_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:  # bound, and does not listen
        nobody.bind(("127.0.0.1", 0))
        port = str(nobody.getsockname()[1])
        _launched(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(BackendError, match=r"rank 1 of 2 has not met the others"):
            distributed.init_process_group(timeout=datetime.timedelta(seconds=1))
    assert not dist.is_initialized()


def test_the_local_rank_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    _launched(monkeypatch, RANK="1", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert (distributed.get_local_rank(), distributed.get_local_size()) == (0, 1)


def test_ranks_of_a_test_join_those_that_are_there(smp_world: SmpWorld) -> None:
    def body() -> int:
        distributed.init_process_group(backend="nccl")
        size = distributed.get_world_size()
        distributed.destroy_process_group()
        assert not dist.is_initialized()
        return size

    assert smp_world.run(body, ranks=2) == [2, 2]


def test_a_backend_of_torchs_means_smddp() -> None:
    distributed.init_process_group(backend="nccl")
    try:
        assert dist.get_backend() == "smddp"
    finally:
        dist.destroy_process_group()


def test_names_that_are_nowhere_are_not_torch_s() -> None:
    with pytest.raises(AttributeError, match=r"module 'smp_core.*no attribute 'all_the_best'"):
        distributed.all_the_best  # noqa: B018
    assert not hasattr(distributed, "__path__")


def _launched(patch: pytest.MonkeyPatch, **environment: str) -> None:
    """Let this process look as if a launcher with these variables had started it."""
    for name in {name for each in LAUNCHERS for name in (each.rank, each.size)} | {*RENDEZVOUS}:
        patch.delenv(name, raising=False)
    for name, value in environment.items():
        patch.setenv(name, value)


def test_arguments_of_torch_are_torch_s_and_a_second_world_is_a_new_one(tmp_path: Path) -> None:
    def body(rank: int) -> list[float]:
        dist.destroy_process_group()
        sums = []
        for number in range(2):
            store = dist.FileStore(str(tmp_path / f"again {number}"), 2)  # type: ignore[attr-defined]
            distributed.init_process_group(store=store, rank=rank, world_size=2)
            tensor = torch.tensor([rank + 1.0 + number])
            distributed.all_reduce(tensor)
            sums.append(tensor.item())
            distributed.destroy_process_group()
        return sums

    assert on_ranks(tmp_path, 2, body) == [[3.0, 5.0]] * 2
