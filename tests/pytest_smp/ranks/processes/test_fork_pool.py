"""The pool of rank processes: what bodies may do to it, and that the next run is clean."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.processes import run as run_module
from pytest_smp.ranks.processes import wire
from pytest_smp.ranks.processes.worker_pool import describe_exit
from pytest_smp.ranks.protocols import ExecutorOptions, Job, OutcomeKind, Report, VerdictKind
from smp_core.errors import BackendError, CrashError, DeadlockError, LeakError, RunTimeout
from smp_core.transport import current_rank

RANKS = 3
counted: list[int] = []  # a module global: each rank has its own


@dataclasses.dataclass
class Box:
    """A class of this module: one class on every rank, and here."""

    value: Any


class Strange(Exception):
    """An exception whose constructor takes what its args do not have."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


@pytest.fixture(scope="module")
def executor():
    executor = open_backend("gloo", ExecutorOptions(ranks=RANKS))
    yield executor
    executor.close()


@pytest.fixture
def run(executor):
    def run(body, *args, ranks=RANKS, timeout=20.0, **fields) -> Report:
        job = Job(body=body, arguments=_Arguments(args), timeout=timeout, **fields)
        return executor.open(ranks).run(job)

    yield run
    report = run(_ranks)  # whatever a test did, the next run is clean
    assert report.values == list(range(RANKS)), report


class _Arguments:
    def __init__(self, args):
        self._args = args

    def __call__(self, rank):
        return self._args, {}


def _ranks():
    return smp.allgather(smp.rank(), smp.WORLD)[smp.rank()]


def kinds(report: Report) -> list[OutcomeKind]:
    return [outcome.kind for outcome in report.outcomes]


# ---- One import ----------------------------------------------------------------------------------


def _count(box):
    assert type(box) is Box
    counted.append(box.value)
    return Box(list(counted))


def test_module_globals_stay_from_run_to_run_and_classes_are_one(run):
    assert run(_count, Box(1)).values == [Box([1])] * RANKS
    assert run(_count, Box(2)).values == [Box([1, 2])] * RANKS
    assert counted == []


def test_a_closure_sees_its_module(run):
    factor = 3

    def body(box):
        assert isinstance(box, Box)
        assert counted is sys.modules[__name__].counted
        return Box(box.value * factor + smp.rank())

    assert run(body, Box(2)).values == [Box(6), Box(7), Box(8)]


def test_a_closure_is_sent_as_it_is_now(run):
    factor = 3

    def body():
        return factor

    assert run(body).values == [3] * RANKS
    factor = 4
    assert run(body).values == [4] * RANKS


def test_a_lambda_and_a_method_are_bodies(run):
    assert run(lambda: smp.size()).values == [RANKS] * RANKS
    assert run(Box(4).__eq__, Box(4)).values == [True] * RANKS


# ---- Size, environment, output -------------------------------------------------------------------


def test_sizes_in_turn_cost_no_restart(run, executor):
    run(_ranks)
    before = executor.replaced
    pids = {}
    for ranks in (2, 3, 1, 2, 3):
        report = run(lambda: (smp.size(), dist.get_world_size(), os.getpid()), ranks=ranks)
        assert [value[:2] for value in report.values] == [(ranks, ranks)] * ranks
        for rank, value in enumerate(report.values):
            assert pids.setdefault(rank, value[2]) == value[2]
    assert executor.replaced == before


def _process_state():
    found = os.environ.get("SMP_TEST_COLOUR"), os.getcwd()
    os.environ["SMP_TEST_COLOUR"] = "spoilt"
    os.chdir("/")
    return found


def test_environment_and_folder_are_the_controllers(run, monkeypatch, tmp_path):
    monkeypatch.setenv("SMP_TEST_COLOUR", "green")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run(_process_state).values == [("green", str(tmp_path))] * RANKS
    monkeypatch.delenv("SMP_TEST_COLOUR")
    assert run(_process_state).values == [(None, str(tmp_path))] * RANKS


def _write():
    print("printed by", smp.rank())
    os.write(2, b"written below Python\n")


def test_output_is_kept_per_rank(run):
    for _ in range(2):
        report = run(_write, capture=True)
        assert [each.stdout for each in report.outcomes] == [
            f"printed by {rank}\n" for rank in range(RANKS)
        ]
        assert [each.stderr for each in report.outcomes] == ["written below Python\n"] * RANKS


def _draw():
    numbers = (torch.rand(1).item(), torch.get_default_dtype(), torch.is_grad_enabled())
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return numbers


def test_every_run_starts_from_the_same_random_state(run):
    first = run(_draw, seed=7).values
    assert run(_draw, seed=7).values == first
    assert first[0] == first[1]
    assert first[0][1:] == (torch.float32, True)
    assert run(_draw, seed=8).values != first


# ---- Failures ------------------------------------------------------------------------------------


def _strange():
    raise Strange(5, why="test")


def test_an_exception_comes_back_with_its_class_and_line(run):
    report = run(_strange)
    assert report.verdict is VerdictKind.FAILED
    assert type(report.error) is Strange
    assert (str(report.error), report.error.code) == ("5: test", 5)
    assert report.error.__traceback__.tb_frame.f_code.co_name == "_strange"


class Reading:
    """Calls a function with arguments whenever its pickle is read."""

    def __init__(self, function, *args):
        self._call = function, args

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize(
    ("call", "verdict", "text"),
    [
        ((os._exit, 0), VerdictKind.CRASHED, "rank 1 crashed: exit code 0"),
        ((signal.raise_signal, 9), VerdictKind.CRASHED, "rank 1 crashed: killed by SIGKILL"),
        ((sys.exit, 0), VerdictKind.FAILED, "cannot be pickled: SystemExit: 0"),
        ((exec, "raise KeyboardInterrupt"), VerdictKind.FAILED, "pickled: KeyboardInterrupt"),
        ((threading.Event.wait, 1), VerdictKind.FAILED, "cannot be pickled: AttributeError"),
        ((exec, "import threading; threading.Event().wait()"), VerdictKind.TIMED_OUT, "rank 1"),
    ],
    ids=["exit", "signal", "sys.exit", "interrupt", "raises", "waits"],
)
def test_a_returned_value_that_harms_its_reader_harms_its_rank(run, call, verdict, text):
    def body():
        return [Reading(*call)] if dist.get_rank() == 1 else 0

    report = run(body, timeout=1.0 if verdict is VerdictKind.TIMED_OUT else 20.0)
    assert report.verdict is verdict
    assert text in str(report.error)


def test_what_cannot_be_pickled_is_an_error_of_the_rank(run):
    report = run(lambda: threading.Lock())
    assert report.verdict is VerdictKind.FAILED
    assert "rank 0: what the body returned, a lock, cannot be pickled" in str(report.error)

    class Local(Exception):
        def __init__(self):
            super().__init__("local")
            self.lock = threading.Lock()

    def body():
        raise Local

    assert "Local: local" in str(run(body).error)


def _segfault():
    ctypes.string_at(0)


ENDINGS = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"killed by SIGKILL \(signal 9\)"),
    "SIGSEGV": (_segfault, r"killed by SIGSEGV \(signal 11\)"),
    "abort": (lambda: os.abort(), r"killed by SIGABRT \(signal 6\)"),
    "exit code 0": (lambda: os._exit(0), "exit code 0"),
    "exit code 3": (lambda: os._exit(3), "exit code 3"),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("where", ["first", "between", "while the others wait", "at the end"])
def test_a_rank_that_dies_is_named_with_its_end(run, ending, where):
    die = ENDINGS[ending][0]

    def body():
        if where != "first":
            smp.barrier()
        if smp.rank() == 1 and where != "at the end":
            die()
        dist.barrier()
        if smp.rank() == 1:
            die()

    report = run(body)
    assert report.verdict is VerdictKind.CRASHED, report.error
    assert report.root == 1
    assert isinstance(report.error, CrashError)
    last = ("" if where == "at the end" else "smp.") + "barrier() [group WORLD, call 1]"
    where_text = (
        ""
        if where == "first"
        else f" after {re.escape(last)}\n +.*test_fork_pool.py:[0-9]+ in body"
    )
    assert re.search(f"rank 1 crashed: {ENDINGS[ending][1]}{where_text}", str(report.error))
    assert report.outcomes[1].kind is OutcomeKind.CRASHED


@pytest.mark.parametrize("call", ["send", "isend", "irecv", "recv"])
def test_a_peer_that_ends_the_process_is_named_with_the_call(run, call):
    """Gloo looks the pair up in its table without a check."""

    def body():
        if smp.rank() == 1:
            work = getattr(dist, call)(torch.zeros(2), 2**31 - 1)
            if isinstance(work, dist.Work):
                work.wait()
        smp.barrier()

    report = run(body)
    assert report.verdict is VerdictKind.CRASHED, report.error
    assert report.root == 1
    way = "send to" if call.endswith("send") else "recv from"
    assert re.search(
        rf"rank 1 crashed: killed by SIG\w+ .* (in|after) {way} rank 2147483647 \(float32, shape \[2\], "
        r"tag 0\) \[group WORLD\]: rank 2147483647 is not in the group; group ranks are 0 to 2\n"
        r" +.*test_fork_pool.py:[0-9]+ in body: +work = getattr",
        str(report.error),
    ), report.error


def test_a_death_by_sigbus_says_how_much_shared_memory_there_is():
    text = describe_exit(-signal.SIGBUS)
    total = shutil.disk_usage("/dev/shm").total
    assert text.startswith("killed by SIGBUS (signal 7); shared memory that is full or too small")
    assert text.endswith(f"free of {total // 1024} KiB")


def test_sys_exit_is_an_exception_of_the_body(run):
    def body():
        if smp.rank() == 2:
            sys.exit(0)
        smp.barrier()

    report = run(body)
    assert report.root == 2
    assert isinstance(report.error, SystemExit)


def test_what_a_dying_rank_writes_is_kept(run):
    def body():
        if smp.rank() == 1:
            os.write(2, b"out of memory, or so\n")
            os._exit(9)

    report = run(body)
    assert "out of memory, or so" in str(report.error)
    assert report.outcomes[1].stderr == "out of memory, or so\n"


def test_who_dies_after_its_result_was_sent_is_replaced_and_told(run, executor):
    def body():
        pid = os.getpid()
        if smp.rank() == 1 and os.fork() == 0:
            os.setsid()
            os.kill(pid, signal.SIGSTOP)  # not before the result was sent: the parent is stopped
            os._exit(0)
        return pid

    victim = run(_pids).values[1]
    os.kill(victim, signal.SIGKILL)
    _gone(victim)
    report = run(_pids)
    assert report.verdict is VerdictKind.PASSED
    assert report.values[1] != victim
    (news,) = report.warnings
    assert "the process of rank 1 ended after its last run (killed by SIGKILL" in news


def _pids():
    return os.getpid()


def _gone(pid: int) -> None:
    """Until the process is no more, zombies included: its parent has seen its end."""
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- Hangs ---------------------------------------------------------------------------------------


def _loop():
    smp.barrier()
    while smp.rank() == 1:
        pass
    smp.barrier()


def test_a_loop_is_stuck_with_its_stack(run):
    report = run(_loop, timeout=5.0)
    assert report.verdict is VerdictKind.TIMED_OUT
    assert isinstance(report.error, RunTimeout)
    assert [each.kind for each in report.outcomes] == [OutcomeKind.STUCK] * RANKS
    text = str(report.error)
    assert re.search(r"^ +(while smp\.rank\(\) == 1:|pass)$", text, re.MULTILINE), text
    first, second = text.index("rank 1 "), text.index("rank 0 in smp.barrier()")
    assert first < second


def test_a_deadlock_needs_no_time_limit(run):
    def body():
        if smp.rank() != 2:
            dist.barrier()

    report = run(body, timeout=None)
    assert report.verdict is VerdictKind.DEADLOCK
    assert isinstance(report.error, DeadlockError)
    assert kinds(report) == [OutcomeKind.STUCK, OutcomeKind.STUCK, OutcomeKind.RETURNED]


def test_a_message_that_nobody_receives_is_a_leak(run):
    def body():
        if smp.rank() == 0:
            dist.isend(torch.ones(2), dst=1)

    report = run(body)
    assert report.verdict is VerdictKind.LEAK
    assert isinstance(report.error, LeakError)
    assert "rank 0: " in str(report.error)


# ---- Clean ranks ---------------------------------------------------------------------------------


def _leave(what: str) -> int:
    if smp.rank() == 1:
        if what == "thread":
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        elif what == "descriptor":
            os.open("/dev/null", os.O_RDONLY)
        elif what == "process" and os.fork() == 0:
            time.sleep(1000)
        elif what == "fork that comes back":
            os.fork()
    return os.getpid()


@pytest.mark.parametrize("what", ["thread", "descriptor", "process", "fork that comes back"])
def test_a_rank_that_is_not_clean_is_replaced(run, what):
    report = run(_leave, what)
    assert report.verdict is VerdictKind.PASSED, report.error
    left = report.values
    after = run(_pids).values
    assert [after[0], after[2]] == [left[0], left[2]]
    if what != "fork that comes back":  # its child may have ended before the rank looked
        assert after[1] != left[1]


def test_a_rank_whose_call_goes_on_without_it_is_replaced(run, monkeypatch):
    """Its process group waits for a partner for ever, and would keep whoever destroys it."""
    monkeypatch.setattr(run_module, "_GRACE", 60.0)  # the others are slow to end on a busy machine

    def body():
        if smp.rank() == 0:
            tensor = torch.ones(2)
            dist.all_reduce(tensor, async_op=True)
            raise ValueError("planted")
        return os.getpid()

    before = run(_pids).values
    assert type(run(body).error) is ValueError
    after = run(_pids, timeout=60.0).values
    assert after[0] != before[0]
    assert after[1:] == before[1:]


def test_a_process_group_left_is_destroyed(run):
    def body():
        return dist.new_group([0, 2]) is not None

    report = run(body)
    assert report.verdict is VerdictKind.PASSED
    assert any("was never destroyed" in text for text in report.warnings)
    assert run(body, strict=True).verdict is VerdictKind.LEAK


# ---- Who may enter, and who stays ----------------------------------------------------------------


def test_a_stranger_is_refused_and_the_run_goes_on(run, executor, caplog):
    address, refused = executor._pool.address, executor.refused
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(address)
        with pytest.raises((wire.AuthenticationError, OSError, EOFError)):
            wire.connect(address, b"not the secret", {"slot": 0, "pid": 1, "wire": "control"})
        assert run(_ranks).values == list(range(RANKS))
        stranger.sendall(b"\0\0\0\5hello" * 100)
    deadline = time.monotonic() + 20
    while executor.refused < refused + 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "does not know the secret" in caplog.text


def test_the_folder_is_private(executor):
    assert os.stat(executor._pool.folder).st_mode & 0o077 == 0


SCRIPT = """
import sys
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Job
sys.path.insert(0, {folder!r})
import bodies
if __name__ == "__main__":
    executor = open_backend("gloo")
    world = executor.open(2)
    report = world.run(Job(body=bodies.pids, arguments=lambda rank: ((), {{}}), timeout=60))
    print(executor._pool.folder, *report.values, flush=True)
    world.run(Job(body=bodies.{busy}, arguments=lambda rank: ((), {{}})))
"""
BODIES = """
import os
import smp_core.torch as smp
def pids(): return os.getpid()
def loop():
    while True: pass
def wait():
    if smp.rank() == 0: smp.recv_from(1, smp.RankType.WORLD_RANK)
    else: input_from_nobody()
def input_from_nobody():
    import select
    select.select([], [], [])
"""


@pytest.mark.parametrize("busy", ["loop", "wait"])
def test_nothing_survives_the_controller(tmp_path, busy):
    (tmp_path / "bodies.py").write_text(BODIES)
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(tmp_path), busy=busy))
    controller = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")], stdout=subprocess.PIPE, text=True
    )
    with controller:
        try:
            folder, *pids = controller.stdout.readline().split()
            assert len(pids) == 2
        finally:
            controller.kill()
    for pid in pids:
        _gone(int(pid))
    deadline = time.monotonic() + 20
    while Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_world_of_no_ranks_is_refused(executor):
    with pytest.raises(BackendError, match="at least one rank"):
        executor.open(0)


# ---- What a killed rank and a killed fork server leave ------------------------------------------------


def _with_a_daemon(box):
    """A child in a session of its own, which outlives its rank unless somebody ends it."""
    if smp.rank() != 1:
        smp.barrier()
    started = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(box.value).write_text(str(started.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_takes_its_daemons_with_it(run, tmp_path):
    note = tmp_path / "pid"
    assert run(_with_a_daemon, Box(str(note))).verdict is VerdictKind.CRASHED
    run(_ranks)  # by now the rank's place is taken
    assert not Path("/proc", note.read_text()).exists()


def _fork_server(box=None):
    return os.getppid()


def test_a_killed_fork_server_is_replaced(run, caplog):
    before = run(_fork_server).values[0]
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    report = run(_fork_server)
    assert report.verdict is VerdictKind.PASSED, report.error
    assert report.values[0] != before
    assert "another one takes its place" in caplog.text
    assert "killed by SIGKILL" in report.warnings[0]


def test_a_stopped_fork_server_goes_on(run, caplog):
    def body():
        if smp.rank() == 0:
            os.kill(os.getppid(), signal.SIGSTOP)
        smp.barrier()
        assert smp.rank() != 1  # its partners are killed in their barrier, and others are forked
        smp.barrier()

    assert run(body).verdict is VerdictKind.FAILED
    assert run(_ranks).values == list(range(RANKS))
    assert "was stopped, and goes on" in caplog.text


def test_a_death_beside_a_stopped_fork_server_is_told_with_its_signal(run, monkeypatch):
    def body():
        if smp.rank() == 1:
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        smp.barrier()

    monkeypatch.setattr(run_module, "_TOLD_OF_ENDS", 1000.0)  # all the time that it takes
    report = run(body)
    assert report.verdict is VerdictKind.CRASHED
    assert "rank 1 crashed: killed by SIGKILL (signal 9)" in str(report.error)


_SYS_EXIT = {"x86_64": 60, "aarch64": 93}


def test_a_rank_whose_main_thread_alone_ends_has_crashed(run, monkeypatch):
    number = _SYS_EXIT[platform.machine()]

    def body():
        if smp.rank() == 1:
            ctypes.CDLL(None).syscall(number, 0)
        smp.barrier()

    report = run(body, timeout=1000.0)
    assert report.verdict is VerdictKind.CRASHED
    assert "rank 1 crashed: its main thread has ended alone" in str(report.error)


def _kills_the_fork_server():
    if smp.rank() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    smp.barrier()
    time.sleep(60)


def test_a_fork_server_killed_in_a_run_is_a_crash(run):
    report = run(_kills_the_fork_server)
    assert report.verdict is VerdictKind.CRASHED
    assert "its fork server has ended: killed by SIGKILL" in str(report.error)


def _masks():
    mask = os.umask(0)
    return mask


def test_the_next_body_finds_the_umask_of_the_session(run):
    mask = os.umask(0o077)
    os.umask(mask)
    assert run(_masks).values == [mask] * RANKS
    assert run(_masks).values == [mask] * RANKS


def _python_path():
    return os.environ.get("PYTHONPATH")


def test_bodies_see_the_sessions_python_path(run):
    assert run(_python_path).values == [os.environ.get("PYTHONPATH")] * RANKS


# ---- What a body may spoil for the next one ------------------------------------------------------


def test_a_body_that_leaves_a_daemon_is_told_and_its_rank_replaced(run, executor, tmp_path):
    note = tmp_path / "pid"

    def leaves(box):
        if smp.rank() == 1:
            script = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=2).pid)"
            told = subprocess.run([sys.executable, "-c", script], stdout=-1, check=True)
            Path(box.value).write_bytes(told.stdout)

    before = executor.replaced
    assert run(leaves, Box(str(note))).verdict is VerdictKind.PASSED
    run(_ranks)
    assert executor.replaced == before + 1
    assert not Path("/proc", note.read_text().strip()).exists()


def _detaches():
    sys.stdout.detach()


def _reconfigures():
    sys.stderr.reconfigure(errors="ignore")


def _prints():
    print("hello", "\N{SNOWMAN}")
    return sys.stderr.errors


@pytest.mark.parametrize("spoils", [_detaches, _reconfigures])
def test_the_next_body_has_whole_streams(run, spoils):
    first = run(_prints).values
    assert run(spoils).verdict is VerdictKind.PASSED
    report = run(_prints)
    assert report.values == first
    assert "hello" in report.outcomes[1].stdout


def _sets_timers():
    # Longer than the body takes to end, of a core's time and of a busy machine's.
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.3)
    signal.setitimer(signal.ITIMER_PROF, 0.3)
    faulthandler.dump_traceback_later(2.0, exit=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    gc.disable()


def _works_a_while():
    until, later = time.process_time() + 0.6, time.monotonic() + 2.5
    while time.process_time() < until or time.monotonic() < later:
        pass
    return gc.isenabled(), signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_nothing_of_a_body_strikes_the_next_one(run):
    assert run(_sets_timers).verdict is VerdictKind.PASSED
    report = run(_works_a_while)
    assert report.verdict is VerdictKind.PASSED, report.error
    assert report.values == [(True, False)] * RANKS


def _variable():
    return os.environ.get("SMP_TEST_VARIABLE")


def test_a_new_fork_server_does_not_keep_what_was_set_when_it_started(run, monkeypatch):
    fork_server = run(_fork_server).values[0]
    monkeypatch.setenv("SMP_TEST_VARIABLE", "1")
    os.kill(fork_server, signal.SIGKILL)
    os.waitid(os.P_PID, fork_server, os.WEXITED | os.WNOWAIT)
    assert run(_variable).values == ["1"] * RANKS
    monkeypatch.delenv("SMP_TEST_VARIABLE")
    assert run(_variable).values == [None] * RANKS


def test_a_body_is_sent_as_it_is_now(run):
    state = [1]
    shows = lambda kept=state: kept[0]  # noqa: E731
    assert run(shows).values == [1] * RANKS
    state[0] = 2
    assert run(shows).values == [2] * RANKS
    calls: list[int] = []

    def counts():
        calls.append(1)
        return len(calls)

    assert [run(counts).values for _ in range(2)] == [[1] * RANKS] * 2  # as the list is here


def _uses_up_descriptors():
    kept = []
    with contextlib.suppress(OSError):
        while True:
            kept.append(os.dup(0))
    return len(kept) > 10


def test_a_body_that_uses_up_all_descriptors(run, executor):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def body():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        return _uses_up_descriptors()

    before = executor.replaced
    report = run(body)
    assert report.values == [True] * RANKS, report.error
    run(_ranks)
    assert executor.replaced == before + RANKS


def _exchanges_descriptors():
    kept.append(os.open(os.devnull, os.O_RDONLY))
    os.close(0)


kept: list[int] = []


def test_a_descriptor_left_in_the_place_of_another(run, executor):
    before = executor.replaced
    run(_exchanges_descriptors)
    run(_ranks)
    assert executor.replaced == before + RANKS


def test_a_rank_that_retires_is_replaced_after_the_run_however_it_ended(run, monkeypatch):
    monkeypatch.setattr(run_module, "_GRACE", 60.0)  # the others are slow to end on a busy machine

    def body(retires, fails):
        if dist.get_rank() in retires:
            current_rank.retire("it has trained")
        if fails:
            raise ValueError("on every rank")
        return os.getpid()

    def pids(*args):
        return [outcome.value for outcome in run(body, *args).outcomes]

    first = pids((), False)
    assert pids((1,), False) == first  # it ends its run first
    second = pids((), False)
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, True]
    run(body, (0, 2), True)
    third = pids((), False)
    assert [one == other for one, other in zip(second, third, strict=True)] == [False, True, False]


def test_ranks_that_are_threads_cannot_retire(smp_world):
    with pytest.raises(BackendError, match=r"it has trained.*--smp-backend=gloo"):
        smp_world.run(current_rank.retire, "it has trained", ranks=2)


def test_a_body_that_makes_every_descriptor_non_blocking_harms_no_later_run(run):
    def body(changes):
        for name in os.listdir("/proc/self/fd") if changes else ():
            with contextlib.suppress(OSError):
                os.set_blocking(int(name), False)
        smp.barrier()
        return os.getpid()

    first, *others = ([o.value for o in run(body, changes).outcomes] for changes in (1, 0, 0, 1, 0))
    assert others == [first] * 4


# ---- The folder ----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "world"])
def test_a_pool_whose_folder_was_removed_begins_with_a_new_one(run, executor, caplog, part):
    assert run(_ranks).values == list(range(RANKS))
    pool = executor._pool
    removed = executor._folders[RANKS] if part == "world" else os.path.join(pool.folder, part)
    (shutil.rmtree if os.path.isdir(removed) else os.unlink)(removed)
    assert run(_ranks).values == list(range(RANKS))
    assert run(lambda: os.getpid() if smp.rank() else os.abort()).verdict is VerdictKind.CRASHED
    assert removed.rstrip("/") in caplog.text
    assert not os.path.exists(pool.folder)


# ---- The time limit ------------------------------------------------------------------------------

_SLOW_TO_IMPORT = """
import os, pathlib, time

controller, folder = int(os.environ["CONTROLLER"]), pathlib.Path(__file__).parent
if os.getpid() != controller:
    time.sleep(0.5)  # several times the limit

def body():
    (folder / f"{os.getpid()}.begun").touch()
"""


def test_imports_of_fresh_ranks_do_not_count_against_the_limit(run, monkeypatch, tmp_path):
    monkeypatch.setenv("CONTROLLER", str(os.getpid()))
    tmp_path.joinpath("slow_to_import.py").write_text(_SLOW_TO_IMPORT)
    monkeypatch.syspath_prepend(tmp_path)
    body = importlib.import_module("slow_to_import").body
    begun: list[int] = []  # ranks that had the body whenever time was up

    def patience():
        begun.append(len([*tmp_path.glob("*.begun")]))
        return True

    assert run(body, timeout=0.05, patience=patience).verdict is VerdictKind.PASSED
    assert set(begun) <= {RANKS}
