"""The core without pytest and Hypothesis: its own script passes alone, under torchrun and under mpiexec."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smp_core.launch.mpiexec import find_mpiexec

SCRIPT = Path(__file__).parent / "alone.py"


def launched(name: str) -> list[str]:
    if name == "mpiexec":
        pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
        return [*find_mpiexec("")[0], "-n", "2", sys.executable]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [sys.executable, *(torchrun if name == "torchrun" else [])]


@pytest.mark.parametrize(("name", "ranks"), [("alone", 1), ("torchrun", 2), ("mpiexec", 2)])
def test_the_script_passes(name: str, ranks: int) -> None:
    made = subprocess.run(
        [*launched(name), str(SCRIPT)], capture_output=True, text=True, timeout=600
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert made.stdout.count("passed\n") == ranks
