"""Scripts on simulated ranks: names of their own, output behind the rank, verdicts, and exit codes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from pytest_smp.ranks.sim import scripts
from smp_core.launch.job import ScriptJob
from smp_core.launch.output import OutputStyle, RankOutput

HEAD = """
import os, sys
import torch
import smdistributed.modelparallel.torch as smp
"""
INIT = """smp.init({"ddp": True})
"""


class Shown:
    """A script's exit code, and what was shown."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Runs a script on three simulated ranks."""

    def start(text: str, *arguments: str, init: str = INIT, **options: object) -> Shown:
        path = tmp_path / "train.py"
        path.write_text(HEAD + init + text)
        job = ScriptJob(script=str(path), arguments=arguments, ranks=3, **options)
        capsys.readouterr()
        code = scripts.run(job, RankOutput(OutputStyle.PREFIX, 3))
        return Shown(code, *capsys.readouterr())

    return start


def test_each_rank_has_names_of_its_own(run):
    before = dict(os.environ), list(sys.path), list(sys.argv), sys.modules["__main__"], sys.stdout
    shown = run(
        """
class Own:
    def __init__(self, rank):
        self.rank = rank

own = Own(smp.rank())
smp.send(own, (smp.rank() + 1) % 3, smp.RankType.WORLD_RANK) if smp.rank() else None
found = smp.recv_from(smp.rank() - 1 if smp.rank() else 2, smp.RankType.WORLD_RANK) if smp.rank() != 1 else None
assert found is None or type(found) is Own and found.rank == (smp.rank() - 1) % 3
assert own.rank == smp.rank() and __name__ == "__main__"
assert sys.argv[1:] == ["a"] and sys.path[0] == os.path.dirname(__file__)
assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & os.environ.keys()
print("rank", smp.rank(), smp.state.cfg.microbatches)
print("error", smp.rank(), file=sys.stderr)
""",
        "a",
        parameters={"microbatches": 5},
    )
    assert shown.code == 0, shown.err
    assert sorted(shown.out.splitlines(True)) == [
        f"[rank {rank}] rank {rank} 5\n" for rank in range(3)
    ]
    assert sorted(shown.err.splitlines(True)) == [
        f"[rank {rank}] error {rank}\n" for rank in range(3)
    ]
    after = dict(os.environ), list(sys.path), list(sys.argv), sys.modules["__main__"], sys.stdout
    assert after == before
    assert "smdistributed" not in sys.modules


def test_a_run_is_the_same_every_time(run):
    text = """
print(torch.rand(1).item(), sum(smp.allgather(torch.rand(1).item(), smp.WORLD)))
"""
    assert run(text).out == run(text).out != ""


def test_a_failure_is_the_scripts_own(run):
    shown = run("if smp.rank() == 2:\n    raise ValueError('broken')\nsmp.barrier()")
    assert shown.code == 1
    assert shown.err.startswith("smp-run: rank 2 failed\nTraceback (most recent call last):\n")
    assert "ValueError: broken" in shown.err
    assert "line 7, in <module>" in shown.err
    assert "scripts.py" not in shown.err
    assert "ranks 0-1: cancelled because of rank 2" in shown.err


@pytest.mark.parametrize(("end", "code", "said"), [("7", 7, "exit code 7"), ("'why'", 1, "why")])
def test_an_exit_is_the_ranks_own(run, end, code, said):
    shown = run(f"if smp.rank() == 1:\n    sys.exit({end})\nsmp.barrier()")
    assert shown.code == code
    assert shown.err.startswith(f"smp-run: rank 1 failed: {said}\n")
    assert run("sys.exit(0)").code == 0


def test_a_deadlock_is_a_verdict(run):
    shown = run("if smp.rank():\n    smp.barrier()")
    assert shown.code == 1
    assert shown.err.startswith("smp-run: deadlock\n")
    assert "ranks 1-2 wait in smp.barrier()" in shown.err
    assert "rank 0 has returned" in shown.err
    assert "train.py:7" in shown.err


@pytest.mark.parametrize("package", [False, True])
def test_the_next_script_has_modules_of_its_own_and_the_libraries_that_were_imported(
    run, tmp_path, monkeypatch, package
):
    """Many libraries cannot be imported twice: torch's register operators."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "imported_once.py").touch()
    monkeypatch.syspath_prepend(library)
    text = "import beside, imported_once\nprint(beside.NUMBER, id(imported_once))"
    folder = tmp_path / "folder" if package else tmp_path
    file = folder / "beside" / "__init__.py" if package else folder / "beside.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    found = []
    for number in (1, 22):
        file.write_text(f"NUMBER = {number}\n")
        shown = run(text, folder=str(folder) if package else "")
        assert shown.code == 0, shown.err
        found.append({line.split("] ")[1] for line in shown.out.splitlines()})
    (first,), (second,) = found
    assert [first.split()[0], second.split()[0]] == ["1", "22"]
    assert first.split()[1] == second.split()[1]
    assert "beside" not in sys.modules
    del sys.modules["imported_once"]


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
@pytest.mark.parametrize("trusts", [True, False])
def test_files_run_code_if_the_user_trusts_them(run, tmp_path, trusts):
    """Those of SMP, and those that a library loads by ``torch.load`` alone."""
    torch.save(Path("anywhere"), tmp_path / "file")
    text = """
from pathlib import Path
for load in (torch.load, lambda path: smp.load(path, partial=False)):
    assert load(os.path.join(sys.argv[1], "file")) == Path("anywhere")
"""
    shown = run(text, str(tmp_path), trusts_checkpoints=trusts)
    assert (shown.code == 0) is trusts, shown.err
    assert ("weights_only" in shown.err) is not trusts


def test_a_library_that_initialises_when_it_is_imported(run, tmp_path):
    """As transformers.trainer does: all ranks have one copy of it, which one of them imports."""
    library = "import smdistributed.modelparallel.torch as smp\nsmp.init({'microbatches': 3})\n"
    (tmp_path / "library_of_ranks.py").write_text(library)
    shown = run("import library_of_ranks\nprint(smp.rank(), smp.state.cfg.microbatches)", init="")
    assert shown.code == 0, shown.err
    assert sorted(shown.out.splitlines()) == [f"[rank {rank}] {rank} 3" for rank in range(3)]
    shown = run("print(smp.rank())", init="")
    assert shown.code == 1
    assert "rank 0 has not called smp.init()" in shown.err
