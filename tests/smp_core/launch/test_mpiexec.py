"""The MPI of a job: the choice of the backend by what is there, and options of Open MPI's command: given to it, and
left out with a line for another MPI.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smp_core.launch import backends, command, mpiexec, processes
from smp_core.launch.job import ScriptJob
from smp_core.launch.output import OutputStyle, RankOutput


@pytest.mark.parametrize(
    ("version", "given"), [("mpirun (Open MPI) 4.1.6", True), ("HYDRA build details:", False)]
)
def test_options_are_of_open_mpi(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
    given: bool,
) -> None:
    started: list[list[str]] = []

    def follow(self: object, starter: list[str], environment: dict[str, str]) -> None:
        started.append(starter)

    monkeypatch.setattr(mpiexec, "has_mpi4py", lambda: True)
    monkeypatch.setattr(processes, "private_folder", lambda: str(tmp_path))
    monkeypatch.setattr(processes._Run, "follow", follow)
    monkeypatch.setattr(processes._Run, "conclude", lambda _: 0)
    program = tmp_path / "mpiexec"
    program.write_text(f"#!{sys.executable}\nprint({version!r})\n")
    program.chmod(0o755)
    options = ("--mca", "a b", "c")
    job = ScriptJob(script="x.py", ranks=3, mpiexec=str(program), mpi_options=options)
    assert processes.run_mpi(job, RankOutput(OutputStyle.PREFIX, 3)) == 0
    (words,) = started
    before = words[: words.index("-n")]
    assert (tuple(before[-3:]) == options) == given
    assert ("--mca" in words) == given
    shown = capsys.readouterr().err
    line = f"smp-run: {program} is not Open MPI's: left out --mca 'a b' c\n"
    assert shown == ("" if given else line)


HYDRA, OPEN_MPI = "HYDRA build details:", "mpiexec (Open MPI) 5.0.7"
OPEN_RTE = (
    "mpiexec (OpenRTE) 4.1.4"  # Open MPI's before version 5, where only mpirun has the other name
)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str | None], str]:
    """Makes the only mpiexec that is there, by its version, and mpi4py on a library; None: there is no mpi4py."""

    def install(version: str, library: str | None) -> str:
        program = tmp_path / "bin" / "mpiexec"
        program.parent.mkdir()
        if version:
            program.write_text(f"#!{sys.executable}\nprint({version!r})\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))
        monkeypatch.setattr(mpiexec, "_beside_python", lambda: program)
        monkeypatch.setattr(mpiexec, "has_mpi4py", lambda: library is not None)
        monkeypatch.setattr(mpiexec, "library", lambda: library)
        return str(program)

    return install


@pytest.mark.parametrize(
    ("version", "library", "name", "told"),
    [
        (HYDRA, "MPICH Version:      5.0.2", "mpi", ""),
        (OPEN_MPI, "Open MPI v5.0.7, package: Open MPI", "mpi", ""),
        ("slurm 23.02", "Open MPI v5.0.7", "mpi", ""),  # nothing says that it does not fit
        (OPEN_MPI, "MPICH Version:      5.0.2", "gloo", "mpi4py has MPICH Version: 5.0.2"),
        (OPEN_RTE, "MPICH Version:      5.0.2", "gloo", "mpi4py has MPICH Version: 5.0.2"),
        (HYDRA, "Open MPI v5.0.7, package: Open MPI", "gloo", "mpi4py has Open MPI v5.0.7"),
        (HYDRA, "", "gloo", "mpi4py finds no MPI"),
        (HYDRA, None, "gloo", ""),
        ("", "MPICH Version:      5.0.2", "gloo", ""),
    ],
)
def test_the_default_is_what_can_run(
    installed: Callable[[str, str | None], str],
    version: str,
    library: str | None,
    name: str,
    told: str,
) -> None:
    program = installed(version, library)
    found, reason = backends.default("")
    assert found == name
    assert told in reason
    assert bool(reason) == bool(told)
    assert not told or not library or program in reason


@pytest.mark.parametrize(
    ("version", "library", "said"),
    [
        ("", "MPICH Version:      5.0.2", "there is no mpiexec"),
        (HYDRA, None, "mpi4py is not installed"),
    ],
)
def test_a_missing_mpi_is_told_before_a_rank_starts(
    installed: Callable[[str, str | None], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    version: str,
    library: str | None,
    said: str,
) -> None:
    installed(version, library)
    script = tmp_path / "train.py"
    script.touch()
    assert command.main(["-n", "2", "--backend", "mpi", str(script)]) == 2
    assert said in capsys.readouterr().err


def test_the_library_of_mpi4py_is_read_in_another_process() -> None:
    pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    assert "MPI" in mpiexec.library()
