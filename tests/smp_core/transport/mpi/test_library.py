"""No MPI, the wrong one, or not enough of it: each says what to do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from smp_core.errors import BackendError
from smp_core.transport.mpi import load_mpi

OPEN = """
import pathlib, sys
{before}
from pytest_smp.ranks.protocols import RankEnvironment
from smp_core.transport.mpi import open_fabric
from smp_core.errors import BackendError
environment = RankEnvironment(rank={rank}, size={size}, local_rank=0, local_size=1, folder=pathlib.Path(sys.argv[1]),
            forming=1, check=lambda: None, board=None)
try:
    open_fabric(environment)
except BackendError as error:
    print(error)
"""


def told(tmp_path: object, *, before: str = "", rank: int = 0, size: int = 1, **env: str) -> str:
    """The text of the error in a process that no mpiexec has started."""
    code = OPEN.format(before=before, rank=rank, size=size)
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendError, match=r"needs mpi4py.*pip install 'pytest-smp\[mpi\]'"):
        load_mpi()


def test_an_mpi4py_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    import mpi4py

    monkeypatch.setattr(mpi4py, "__version__", "3.1.6")
    with pytest.raises(BackendError, match=r"needs mpi4py 4\.0 or newer, this is 3\.1\.6.*pip"):
        load_mpi()


def test_without_an_mpi_library(tmp_path: object) -> None:
    text = told(tmp_path, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "mpi4py finds no MPI library: cannot load MPI library" in text
    assert "pip install 'pytest-smp[mpi]'" in text


@pytest.mark.parametrize("setting", ["thread_level = 'single'", "initialize = False"])
def test_mpi_without_threads(tmp_path: object, setting: str) -> None:
    text = told(tmp_path, before=f"import mpi4py; mpi4py.rc.{setting}")
    assert "needs MPI initialised for threads" in text


def test_a_job_that_is_too_small(tmp_path: object) -> None:
    text = told(tmp_path, size=3)
    assert "rank 0 of a world of 3 is rank 0 of an MPI job of 1" in text
    assert "mpiexec -n 3" in text


def test_another_rank_than_it_should_be(tmp_path: object) -> None:
    assert "rank 1 of a world of 1 is rank 0 of an MPI job of 1" in told(tmp_path, rank=1)
