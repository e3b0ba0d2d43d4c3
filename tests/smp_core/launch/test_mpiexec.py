"""Options of Open MPI's command: given to it, and left out with a line for another MPI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from smp_core.launch import processes
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
