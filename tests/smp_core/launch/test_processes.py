"""``smp-run`` on rank processes: scripts of every kind of end. Each test starts a job, so it looks at many things."""

from __future__ import annotations

import ast
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from smp_core.launch import processes
from smp_core.launch.job import ScriptJob
from smp_core.launch.mpiexec import find_mpiexec
from smp_core.launch.output import OutputStyle, RankOutput
from smp_core.launch.script import exit_code
from tests.conftest import Started

pytestmark = pytest.mark.timeout(900)

Run = Callable[..., Started]

#: Ranks of a job. Those on gloo are forked from one process; each of an MPI job imports torch for seconds.
RANKS = {"gloo": 3, "mpi": 2}

HEAD = """
import os, sys
import torch
import smdistributed.modelparallel.torch as smp
"""


@pytest.fixture(params=["gloo", "mpi"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "mpi":
        pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    name: str = request.param
    return name


@pytest.fixture
def run(command: Callable[..., Started], tmp_path: Path) -> Run:
    """Starts a script on as many ranks as RANKS has for the backend."""

    def start(
        backend: str, text: str, *arguments: str, options: tuple[str, ...] = (), **environment: str
    ) -> Started:
        path = tmp_path / "scripts" / "train.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(HEAD + text)
        count = str(RANKS[backend])
        words = [sys.executable, "-m", "smp_core.launch", "-n", count, "--backend", backend]
        return command([*words, *options, str(path), *arguments], **environment)

    return start


def test_a_script_runs(run: Run, backend: str, tmp_path: Path) -> None:
    """With its arguments, its folder, the launcher's parameters, and SMP's names; its classes can be sent, and
    generators that it does not seed differ by rank.
    """
    text = """
import random
import numpy
import beside

class Own:
    def __init__(self, rank): self.rank = rank

smp.init({"microbatches": 2, "ddp": True})
assert smp.state.cfg.microbatches == 4, smp.state.cfg
assert sys.argv[1:] == ["--lr", "0.1"], sys.argv
assert os.path.abspath(sys.argv[0]) == os.path.abspath(__file__) and __name__ == "__main__"
assert sys.path[0] == os.path.dirname(os.path.abspath(__file__)) and beside.HERE
assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "SMP_RUN_RANK"} & os.environ.keys()
count = smp.size()
assert smp.local_rank() == smp.rank()
total = torch.tensor([2.0 ** smp.rank()])
torch.distributed.all_reduce(total)
assert [each.rank for each in smp.allgather(Own(smp.rank()), smp.WORLD)] == list(range(count))
for seed in (torch.initial_seed(), random.random(), numpy.random.rand()):
    assert len(set(smp.allgather(seed, smp.WORLD))) == count, seed
print("rank", smp.rank(), "has", total.item() + 1)
print("to stderr", file=sys.stderr)
os.write(1, b"below Python\\n")
"""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("HERE = True\n")
    code, shown = run(backend, text, "--lr", "0.1", options=("-p", "microbatches=4")).end()
    assert code == 0, shown
    count = RANKS[backend]
    assert f"smp-run: train.py on {count} ranks" in shown
    for rank in range(count):
        assert f"[rank {rank}] rank {rank} has {2.0**count}\n" in shown
    assert len(re.findall(r"^\[rank \d\] to stderr$", shown, re.MULTILINE)) == count
    assert len(re.findall(r"^\[rank \d\] below Python$", shown, re.MULTILINE)) == count


@pytest.mark.parametrize("cpu", [(), ("--cpu",)], ids=["names", "names and stand-in"])
def test_children_know_the_names_and_the_stand_in(run: Run, cpu: tuple[str, ...]) -> None:
    """Children that import the script anew; with the stand-in by both start methods, and their children."""
    text = """
import multiprocessing

def devices(deeper):
    if deeper:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(devices, (False,))
    return torch.cuda.device_count()

class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return torch.tensor(devices(False))

if __name__ == "__main__":
    smp.init()
    seen = torch.cuda.device_count()
    if smp.rank() == 0:
        method = "forkserver" if seen else "spawn"
        loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=method)
        assert torch.cat(list(loader)).tolist() == [seen] * 2
        if seen:
            with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                assert pool.submit(devices, True).result() == seen
    smp.barrier()
    print("rank", smp.rank(), "saw", seen)
"""
    code, shown = run(
        "gloo", "import concurrent.futures\n" + text, options=cpu, CUDA_VISIBLE_DEVICES=""
    ).end()
    assert code == 0, shown
    for rank in range(3):
        assert f"rank {rank} saw {3 if cpu else 0}\n" in shown


# A rank tells of an error and of an exit by itself, on each backend by the same lines; a kill is told by others.
@pytest.mark.parametrize(
    ("backend", "end", "code", "words"),
    [
        ("gloo", "raise ValueError('broken')", 1, ["ValueError: broken", "line 8, in <module>"]),
        ("gloo", "sys.exit('in words')", 1, ["in words"]),
        ("gloo", "os.kill(os.getpid(), 9)", 137, ["rank 1 was ended by SIGKILL"]),
        ("mpi", "sys.exit(7)", 7, ["exit code 7"]),
        ("mpi", "os.kill(os.getpid(), 9)", 137, ["rank 1 was ended by SIGKILL"]),
    ],
    indirect=["backend"],
)
def test_the_first_failure_is_told_first(
    run: Run, backend: str, end: str, code: int, words: list[str]
) -> None:
    text = f"""
smp.init()
if smp.rank() == 1:
    {end}
smp.barrier()
"""
    found, shown = run(backend, text).end()
    assert found == code, shown
    told = shown[shown.index("smp-run: rank ") :]
    assert told.startswith("smp-run: rank 1 "), shown
    for word in words:
        assert word in told, shown
    assert "smp_core/launch" not in told, shown
    assert "[rank1]" not in shown, (
        shown
    )  # as torch's exception hook writes: a traceback is shown once


@pytest.mark.parametrize(
    ("backend", "text", "words"),
    [
        (
            "mpi",
            "import nothing_of_this_name",
            ["ModuleNotFoundError: No module named 'nothing_of_this_name'"],
        ),
        (
            "gloo",
            "smp.step(lambda x: x)(torch.ones(2))",
            ["NotInitializedError", "call smp.init() first"],
        ),
    ],
    ids=["import", "step"],
    indirect=["backend"],
)
def test_a_script_that_fails_before_init(
    run: Run, backend: str, text: str, words: list[str]
) -> None:
    code, shown = run(backend, text).end()
    assert code == 1, shown
    for word in words:
        assert word in shown, shown


def test_a_rank_that_goes_on_is_ended(run: Run) -> None:
    text = """
import time
smp.init()
if smp.rank() == 1:
    raise ValueError("broken")
time.sleep(1000)
"""
    code, shown = run("gloo", text).end()
    assert code == 1, shown
    assert "smp-run: ranks 0, 2 went on, and had to be ended" in shown


def test_an_interruption_ends_all(run: Run, backend: str) -> None:
    text = """
import time
smp.init()
print("waits", flush=True)
time.sleep(1000)
"""
    started = run(backend, text)
    started.shows("waits")
    started.process.send_signal(signal.SIGINT)
    code, shown = started.end()
    assert code == 130, shown
    assert "smp-run: ended by SIGINT; no rank is left" in shown


def test_a_killed_launcher_leaves_nothing(run: Run, backend: str) -> None:
    text = """
import time
smp.init()
print("waits", flush=True)
time.sleep(1000)
"""
    started = run(backend, text)
    started.shows("waits")
    started.process.kill()
    started.process.wait()
    started.leaves_nothing()


def test_calls_that_differ_are_named(run: Run) -> None:
    text = """
smp.init()
smp.barrier() if smp.rank() == 1 else smp.allgather(1, smp.WORLD)
"""
    code, shown = run("gloo", text).end()
    assert code == 1, shown
    assert re.search(r"mismatch: a call on group WORLD .*differs in operation", shown), shown
    assert "rank 1: smp.barrier" in shown
    assert re.search(r"rank [02]: smp.allgather", shown), shown


def test_a_rank_finds_what_a_plain_process_finds(run: Run, tmp_path: Path) -> None:
    """Its path, its streams, its hooks, its children, and its exit code."""
    text = """
import subprocess
assert os.environ.get("PYTHONPATH") == os.environ["EXPECTED"]
assert os.getcwd() not in sys.path
with open("/dev/stdout", "w") as file:
    print("by the device", file=file)
print("by a child", file=sys.stdout, flush=True)
subprocess.run(["echo", "by a program"], stdout=sys.stdout, check=True)
assert __builtins__.print is print
smp.init()
child = os.fork()
if child == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
smp.barrier()
sys.excepthook = lambda kind, error, trace: print("hooked", error)
if smp.rank() == 2:
    raise ValueError("at last")
smp.barrier()
"""
    root = str(Path(__file__).parents[3])
    code, shown = run("gloo", text, PYTHONPATH=root, EXPECTED=root).end()
    assert code == 1, shown
    for line in ("by the device", "by a child", "by a program"):
        for rank in range(3):
            assert f"[rank {rank}] {line}\n" in shown, shown
    assert "[rank 2] hooked at last" in shown
    assert "smp-run: rank 2 failed with exit code 1\nTraceback" in shown


def test_a_process_that_leaves_an_mpi_job_unseen_is_no_success(run: Run) -> None:
    """MPICH ends the others and is content."""
    pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    text = """
smp.init()
if smp.rank() == 1:
    os._exit(0)
smp.barrier()
"""
    code, shown = run("mpi", text).end()
    assert code != 0, shown
    assert re.search(r"smp-run: ranks? .* (was ended|failed)", shown), shown


def test_a_signal_is_handed_on(run: Run) -> None:
    """As batch systems send it, so that a script can save."""
    text = """
import signal, time
def save(number, frame):
    os.write(1, b"saved\\n")  # print fails where the signal comes while the script prints
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
smp.init()
print("waits", flush=True)
while True:
    time.sleep(0.1)
"""
    started = run("gloo", text)
    for rank in range(3):
        started.shows(f"[rank {rank}] waits")
    started.process.send_signal(signal.SIGTERM)
    code, shown = started.end()
    assert code == 143, shown
    assert shown.count("] saved\n") == 3
    assert "smp-run: ended by SIGTERM; no rank is left" in shown


def test_an_interruption_before_the_ranks_start(run: Run) -> None:
    started = run("gloo", "print('ran')")
    started.shows("starting")
    started.process.send_signal(signal.SIGINT)
    code, shown = started.end()
    assert code == 130, shown


def test_a_signal_ends_a_job_whose_output_nobody_reads(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("while True: print('x' * 5000, flush=True)\n")
    words = [sys.executable, "-m", "smp_core.launch", "-n", "2", "--backend=gloo", str(script)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while b"xxx" not in process.stdout.readline():
            pass
        with open(f"/proc/{process.pid}/fd/1", "wb") as pipe:
            while select.select([], [pipe], [], 0)[1]:  # until it is full: its reader has stopped
                time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 143
    assert not list(tmp_path.glob("smp-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_just_after_the_folder_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A signal that nobody has acted upon is as if it had come after the run."""
    folder = tmp_path / "of-the-run"
    came: list[int] = []

    def private_folder() -> str:
        folder.mkdir()
        signal.raise_signal(number)
        return str(folder)

    before = signal.signal(number, lambda number, _: came.append(number))
    try:
        monkeypatch.setattr(processes, "private_folder", private_folder)
        monkeypatch.setattr(processes._Run, "follow", lambda *_: None)
        monkeypatch.setattr(processes._Run, "conclude", lambda _: 0)
        job = ScriptJob(script="train.py", ranks=3)
        assert processes.run_processes(job, RankOutput(OutputStyle.PREFIX, 3)) == 0
    finally:
        signal.signal(number, before)
    assert came == [number]
    assert not folder.exists()


def test_ranks_that_wait_for_one_that_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "_LEFT", 0.1)
    script, seen = tmp_path / "train.py", tmp_path / "seen"
    script.write_text(
        HEAD
        + f"""
import pathlib, time
smp.init()
if smp.rank() == 1:
    sys.exit(0)
while not pathlib.Path({str(seen)!r}).exists():
    time.sleep(0.05)
raise ValueError("broken")
"""
    )

    class Watching(RankOutput):
        def say(self, text: str) -> None:
            super().say(text)
            if "rank 1 has ended the script without an error; ranks 0, 2 goes on" in text:
                seen.touch()

    job = ScriptJob(script=str(script), ranks=3)
    assert processes.run_processes(job, Watching(OutputStyle.PREFIX, 3)) == 1
    shown = capfd.readouterr().err
    assert "smp-run: before, rank 1 has ended the script without an error\n" in shown


@pytest.mark.parametrize("said", ["256", "-1", "True"])
def test_no_exit_code_becomes_a_success(said: str) -> None:
    assert exit_code(ast.literal_eval(said)) in (1, 255)
    assert exit_code(0) == exit_code(None) == 0


EARLY = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank:
    raise ValueError("early")
smp.init()
"""


def test_a_rank_of_mpiexec_that_fails_before_init_ends_the_job(
    command: Callable[..., Started], tmp_path: Path
) -> None:
    pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    script = tmp_path / "train.py"
    script.write_text(HEAD + EARLY)
    words, _ = find_mpiexec("")
    code, shown = command(
        [*words, "-n", "2", sys.executable, "-m", "smp_core.launch", str(script)]
    ).end()
    assert code != 0, shown
    assert "ValueError: early" in shown
