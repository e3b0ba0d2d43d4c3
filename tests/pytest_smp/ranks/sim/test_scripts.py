"""Scripts on simulated ranks: names of their own, output behind the rank, verdicts, and exit codes."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from pytest_smp.ranks.sim import scripts
from smp_core.launch import command
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

    def start(
        text: str, *arguments: str, head: str = HEAD, init: str = INIT, **options: object
    ) -> Shown:
        path = tmp_path / "train.py"
        path.write_text(head + init + text)
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


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("7", 7, "exit code 7"),
        ("256", 1, "exit code 256"),
        ("-1", 255, "exit code -1"),
        ("'why'", 1, "why"),
    ],
)
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


def smp_run(path: Path, text: str, *options: str) -> int:
    """The exit code of ``smp-run`` for a script on two simulated ranks."""
    path.write_text(HEAD + INIT + text)
    return command.main(["-n", "2", "--backend", "sim", *options, str(path)])


def test_a_mismatch_is_a_verdict_of_smp_run(tmp_path, capsys):
    text = "torch.distributed.all_reduce(torch.ones(2 + smp.rank()))"
    assert smp_run(tmp_path / "train.py", text) == 1
    shown = capsys.readouterr().err
    assert "smp-run: mismatch\n" in shown
    assert "train.py:6" in shown


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
@pytest.mark.parametrize("trusts", [True, False])
def test_a_checkpoint_runs_code_if_the_command_trusts_it(tmp_path, capsys, trusts):
    """A file that another program has written: reading it makes the folder ``ran``."""
    ran, file = tmp_path / "ran", tmp_path / "state.pt"
    torch.save({"a": Runs(str(ran))}, file)
    text = f"smp.load({str(file)!r}, partial=False) if smp.rank() == 0 else None"
    options = ["--trust-checkpoints"] if trusts else []
    assert smp_run(tmp_path / "train.py", text, *options) == (0 if trusts else 1)
    assert ran.exists() == trusts
    assert trusts or f"CheckpointError: {file}" in capsys.readouterr().err


class Runs:
    """An object whose reading makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


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
    (tmp_path / "library_of_rank_0.py").write_text(library.replace("{'microbatches': 3}", ""))
    text = "import torch.distributed as dist\nif dist.get_rank() == 0: import library_of_rank_0\nsmp.init()"
    shown = run(text, init="")
    assert shown.code == 0, shown.err
    shown = run("print(smp.rank())", init="")
    assert shown.code == 1
    assert "rank 0 has not called smp.init()" in shown.err


def test_the_main_module_has_the_names_of_each_rank(run):
    """Dataclasses and typing look there for what an annotation means; libraries, by ``vars`` and ``setattr``."""
    shown = run(
        """
from __future__ import annotations
import os, sys
import smdistributed.modelparallel.torch as smp
import dataclasses, inspect, pickle, typing
from typing import ClassVar
smp.init({"ddp": True})
main = sys.modules[__name__]
@dataclasses.dataclass
class A:
    k: ClassVar[int] = 3
    y: int = 0
class B:
    a: A
assert [field.name for field in dataclasses.fields(A)] == ["y"]
assert typing.get_type_hints(B) == {"a": A}
assert inspect.get_annotations(B, eval_str=True) == {"a": A}
assert inspect.getsource(B) == "class B:\\n    a: A\\n"
assert inspect.getmodule(B) is main and inspect.ismodule(main)
assert pickle.loads(pickle.dumps(A(5))) == A(5)
assert vars(main) is globals() and vars(main)["A"] is A and "A" in dir(main)
setattr(main, "zz", smp.rank())
smp.barrier()
assert zz == smp.rank() == main.zz
from __main__ import zz as again
assert again == smp.rank()
delattr(main, "zz")
for missing in (lambda: zz, lambda: main.zz, lambda: delattr(main, "zz")):
    try:
        missing()
    except (NameError, AttributeError) as error:
        assert "'zz'" in str(error)
    else:
        raise AssertionError
main.__doc__ = "said"
assert __doc__ == main.__doc__ == "said" and main.__name__ == "__main__" and main.__file__ == __file__
""",
        head="",
        init="",
    )
    assert shown.code == 0, shown.err


def start(path: Path, text: str, *options: str) -> subprocess.Popen[str]:
    """A script on two simulated ranks of another process."""
    path.write_text(HEAD + INIT + text)
    command = [sys.executable, "-m", "smp_core.launch", "-n", "2", "--backend", "sim"]
    return subprocess.Popen(
        [*command, *options, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


@pytest.mark.parametrize("style", ["prefix", "group"])
def test_a_forked_child_ends_as_python_does(tmp_path, style):
    """By its own exit code, and with its output, be it a line without an end."""
    script = start(
        tmp_path / "train.py",
        """
import signal
ends = ["sys.exit(7)", "sys.exit(256)", "sys.exit()", "pass", "sys.exit('why')", "raise ValueError('broken')"]
if smp.rank() == 1:
    print("parent", end=" ")
for number, end in enumerate(ends) if smp.rank() == 1 else ():
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that goes on as a rank
        print("child", number, end="")
        exec(end)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end=" ")
else:
    smp.barrier()
""",
        f"--output={style}",
    )
    out, err = script.communicate()
    assert script.returncode == 0, err
    lines = out.splitlines()
    assert [line for line in lines if "child" in line] == [
        f"[rank 1] child {number}" for number in range(6)
    ]
    parent = "parent 7 1 0 0 1 1 "
    assert lines[-1] == parent if style == "group" else f"[rank 1] {parent}"
    assert "[rank 1] why\n" in err
    assert "[rank 1] ValueError: broken\n" in err
    assert "scripts.py" not in err
    assert err.count("Traceback") == 1


def test_the_script_waits_for_its_threads_and_tasks(run, tmp_path):
    """Each has its work done after the script's last line; the verdict and the exit code come later."""
    shown = run(
        """
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
def work(name, before):
    before()
    Path(sys.argv[1], f"{name}{rank}").touch()
def nested():
    ended.wait()
    inner = threading.Thread(target=work, args=("inner", outer.join))
    assert not inner.daemon
    inner.start()
rank = smp.rank()
ended = threading.Event()
outer = threading.Thread(target=nested)
assert not outer.daemon
outer.start()
assert not outer.daemon
daemon = threading.Thread(target=threading.Event().wait, daemon=True)  # never ends
daemon.start()
assert daemon.daemon and threading.current_thread().daemon is False
POOLS = sys.modules.setdefault("pools_of_all_ranks", {})  # as a library's: no rank may shut it down
pool = POOLS.setdefault("pool", None) or ThreadPoolExecutor(1)
POOLS["pool"] = pool
pool.submit(work, "task", ended.wait)
threading.Thread(target=work, args=("thread", ended.wait)).start()
last = threading.Thread(target=ended.set)
last.start()
""",
        str(tmp_path),
    )
    sys.modules.pop("pools_of_all_ranks")["pool"].shutdown()
    assert shown.code == 0, shown.err
    made = {path.name for path in tmp_path.iterdir()}
    expected = {f"{name}{rank}" for name in ("inner", "task", "thread") for rank in range(3)}
    assert made >= expected
    assert not shown.err


def test_the_script_waits_for_a_task_without_threads_of_its_own(run, tmp_path, monkeypatch):
    waiting, wait = threading.Event(), concurrent.futures.wait

    def noted(*arguments):
        waiting.set()
        return wait(*arguments)

    monkeypatch.setattr(concurrent.futures, "wait", noted)
    monkeypatch.setitem(sys.modules, "events_of_the_test", waiting)
    shown = run(
        """
from concurrent.futures import ThreadPoolExecutor
waiting = sys.modules["events_of_the_test"]
def work():
    assert waiting.wait(60)  # the script has ended, and its run has not
    open(os.path.join(sys.argv[1], "done"), "w").close()
if smp.rank() == 2:
    ThreadPoolExecutor(1).submit(work)
""",
        str(tmp_path),
    )
    assert shown.code == 0, shown.err
    assert (tmp_path / "done").exists()


def test_the_script_waits_for_a_thread_that_is_being_started(run, tmp_path, monkeypatch):
    """By another thread of its own; the wait has looked at it before it runs."""
    starting, seen = threading.Event(), threading.Event()
    start, wait, waits = threading.Thread.start, concurrent.futures.wait, []

    def start_late(thread):
        if thread.name == "inner":
            starting.set()
            assert seen.wait(60)
        start(thread)

    def noted(*arguments):
        waits.append(starting.is_set())
        if waits.count(True) == 2:  # between two of them every thread was looked at
            seen.set()
        return wait(*arguments)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    monkeypatch.setattr(concurrent.futures, "wait", noted)
    shown = run(
        """
import threading
def work():
    open(os.path.join(sys.argv[1], "done"), "w").close()
if smp.rank() == 2:
    outer = threading.Thread(target=lambda: threading.Thread(target=work, name="inner").start())
    outer.start()
    assert not outer.daemon
""",
        str(tmp_path),
    )
    assert shown.code == 0, shown.err
    assert (tmp_path / "done").exists()


def test_ctrl_c_ends_a_script_whose_thread_never_ends(tmp_path):
    script = start(
        tmp_path / "train.py",
        """
import threading
threading.Thread(target=threading.Event().wait).start()
print("last line")
""",
    )
    assert script.stdout is not None
    assert re.fullmatch(r"\[rank [01]\] last line\n", script.stdout.readline())
    script.send_signal(signal.SIGINT)
    try:
        _, err = script.communicate(timeout=60)
    finally:
        script.kill()
    assert script.returncode == 130
    assert err.splitlines()[-1] == "smp-run: interrupted"


def test_each_rank_has_signal_handlers_of_its_own(run):
    before = signal.getsignal(signal.SIGTERM)
    shown = run(
        """
import signal, threading
def handle(*_): pass
before = signal.getsignal(signal.SIGTERM)
assert signal.signal(signal.SIGTERM, handle) is before is not handle
smp.barrier()
assert signal.getsignal(signal.SIGTERM) is handle
assert signal.signal(signal.SIGTERM, signal.SIG_IGN) is handle
assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
for bad, error in (((signal.SIGTERM, "no"), TypeError), ((1000, handle), ValueError)):
    try:
        signal.signal(*bad)
    except error:
        continue
    raise AssertionError(bad)
refused = []
def set_in_thread():
    try:
        signal.signal(signal.SIGTERM, handle)
    except ValueError:
        refused.append(True)
thread = threading.Thread(target=set_in_thread)
thread.start()
thread.join()
assert refused
"""
    )
    assert shown.code == 0, shown.err
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_streams_are_as_those_of_a_process(tmp_path):
    """Child processes write to the descriptor; bytes, and the text of a wrapper, are behind their rank."""
    script = start(
        tmp_path / "train.py",
        """
import faulthandler, io, subprocess
assert (sys.stdout.name, sys.stderr.name) == ("<stdout>", "<stderr>")
assert (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
assert sys.stdout.encoding == "utf-8" and sys.stdout.mode == "w" and not sys.stdout.isatty()
sys.stdout.buffer.write("ä".encode()[:1])
sys.stdout.buffer.write("ä".encode()[1:] + b"\\n")
sys.stdout.buffer.flush()
sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
print("\\udcff")
faulthandler.enable()
if smp.rank() == 0:
    subprocess.run(["echo", "from a child"], stdout=sys.stdout, check=True)
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
sys.stdout.write("flushed at the end")
""",
    )
    out, err = script.communicate()
    assert script.returncode == 0, err
    expected = [
        f"[rank {rank}] {text}"
        for rank in range(2)
        for text in ("ä", "\\udcff", "flushed at the end")
    ]
    assert sorted(out.splitlines()) == sorted([*expected, "from a child"])
