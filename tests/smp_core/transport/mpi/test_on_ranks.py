"""The mpi fabric on 8 ranks: one MPI job runs all checks, and each is a test here.

The job is that of the MPI which the environment holds, MPICH or Open MPI: its mpiexec lies beside
Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import checks_collectives, checks_objects, checks_runs, checks_traffic

HERE = Path(__file__).parent
MODULES = (checks_collectives, checks_objects, checks_runs, checks_traffic)
NAMES = [name for module in MODULES for name in vars(module) if name.startswith("check_")]
RANKS, LIMIT = 8, 800  # seconds


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Of each rank: what went wrong, by check."""
    folder = tmp_path_factory.mktemp("job")
    mpiexec = Path(sys.prefix, "bin", "mpiexec")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=600)
    options = (
        ["--oversubscribe", "--allow-run-as-root"] if "HYDRA" not in version.stdout.upper() else []
    )
    warnings = ["-W", "error", "-W", "ignore::FutureWarning"]  # torch's, of the coalesced calls
    files = [str(HERE / f"{module.__name__.rpartition('.')[2]}.py") for module in MODULES]
    command = [mpiexec, *options, "-n", str(RANKS), sys.executable, *warnings, HERE / "job.py"]
    environment = {**os.environ, "SMP_TEST_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(
            [*map(str, command), *files], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(LIMIT)
        finally:
            process.terminate()  # mpiexec passes it on to the ranks
            process.wait(60)
            output.seek(0)
            print(output.read())  # pytest shows it where this fails
    results: list[Any] = [
        json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))
    ]
    assert status == 0
    assert len(results) == RANKS
    return results


@pytest.mark.parametrize("name", NAMES)
def test_on_eight_ranks(problems: list[dict[str, str]], name: str) -> None:
    """See the check of this name."""
    told = [f"rank {rank}: {each[name]}" for rank, each in enumerate(problems) if each[name]]
    # Those whose run another rank's failure has ended say less.
    told.sort(key=lambda text: "another rank has failed" in text)
    assert not told, "\n".join(told)


def test_every_check_has_run(problems: list[dict[str, str]]) -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(set(each) == set(NAMES) for each in problems)
