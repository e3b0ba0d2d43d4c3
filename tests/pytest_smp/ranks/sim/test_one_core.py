"""While a run lasts its threads share a core; nobody else ever does, and nothing of it stays."""

from __future__ import annotations

import concurrent.futures
import errno
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Job, VerdictKind
from pytest_smp.ranks.sim import executor as rank_threads
from pytest_smp.ranks.sim.one_core import OneCore

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="there is one core, or no way to choose one",
)


def cores(path="/proc/thread-self/status"):
    """By the kernel's own word."""
    (line,) = [each for each in Path(path).read_text().splitlines() if "Cpus_allowed_list" in each]
    return line.split()[-1]


@pytest.fixture
def executor():
    executor = open_backend("sim")
    yield executor
    executor.close()


@pytest.fixture
def run(executor, monkeypatch):
    # A run that takes longer gives the controller its cores back before it ends.
    monkeypatch.setattr(rank_threads, "_SLICE", 60.0)

    def run(body, ranks=4, **how):
        return executor.open(ranks).run(Job(body=body, arguments=lambda rank: ((), {}), **how))

    return run


def test_all_ranks_share_one_core_and_the_controller_gets_its_own_back(run):
    before = cores()

    def body():
        first = cores()
        smp.barrier()
        return first, cores(), cores(f"/proc/{os.getpid()}/task/{os.getpid()}/status")

    seen = {core for each in run(body).values for core in each}
    assert len(seen) == 1
    assert seen.pop().isdecimal()
    assert cores() == before


def _fails():
    assert smp.rank() != 2


def _deadlock():
    if smp.rank() != 3:
        smp.barrier()


def _interrupts():
    raise KeyboardInterrupt


@pytest.mark.parametrize("body", [_fails, _deadlock, _interrupts])
def test_the_cores_are_given_back_however_a_run_ends(run, body):
    before, told = cores(), os.sched_getaffinity
    assert run(body).verdict is not VerdictKind.PASSED
    assert (cores(), os.sched_getaffinity) == (before, told)


def test_ranks_that_are_given_up_compute_elsewhere(run):
    """A thread that computes for ever on the core of the next run would take half of it."""
    before, ids, over = cores(), [], threading.Event()

    def body():
        if smp.rank() == 1:
            ids.append(threading.get_native_id())
            while not over.is_set():
                over.wait()  # catches what unwinds it, and goes on
        smp.barrier()

    try:
        assert run(body, timeout=0.2, patience=lambda: not ids).verdict is VerdictKind.TIMED_OUT
        assert cores() == before
        assert cores(f"/proc/self/task/{ids[0]}/status") == before
    finally:
        over.set()


def test_threads_that_outlive_the_run_have_all_cores(run):
    """A pool that a module keeps is often first used in a body."""
    before = cores()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # in the second run there is nothing new
            during = run(lambda: pool.submit(cores).result(), 2).values
            assert pool.submit(cores).result() == before
        assert during == [before] * 2
        assert (
            len(set(run(cores, 3).values)) == 1
        )  # the ranks' threads are on one core all the same


def policy(thread=0):
    return os.sched_getscheduler(thread)


def test_rank_threads_and_no_others_are_scheduled_as_batch(run):
    """A rank that is woken while another holds the interpreter lock would only sleep again."""
    before = policy()

    def body():
        worker = []
        thread = threading.Thread(target=lambda: worker.append(policy()))
        thread.start()
        thread.join()
        return policy(), *worker

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert set(run(body).values) == {(os.SCHED_BATCH, os.SCHED_BATCH)}
        assert run(lambda: pool.submit(policy).result(), 1).values == [os.SCHED_BATCH]
        assert pool.submit(policy).result() == before
    show = f"{sys.executable} -c 'import os; print(os.sched_getscheduler(0))'"
    (text,) = run(lambda: subprocess.check_output(show, shell=True, text=True), 1).values
    assert int(text) == before
    assert run(policy).values == [os.SCHED_BATCH] * 4  # a rank that started a process is again
    assert policy() == before


def test_ranks_that_are_given_up_have_the_default_policy(run):
    ids, over = [], threading.Event()

    def body():
        ids.append(threading.get_native_id())
        while not over.is_set():
            over.wait()  # catches what unwinds it, and goes on

    try:
        assert run(body, 1, timeout=0.2, patience=lambda: not ids).verdict is VerdictKind.TIMED_OUT
        assert policy(ids[0]) == policy()
    finally:
        over.set()


@pytest.mark.parametrize("name", ["sched_getscheduler", "sched_setscheduler"])
def test_a_system_without_policies_has_one_core_all_the_same(run, monkeypatch, name):
    def refuses(*_):
        raise OSError(errno.ENOSYS, "not implemented")

    before = cores()
    monkeypatch.setattr(os, name, refuses)
    assert len(set(run(cores).values)) == 1
    assert cores() == before


@pytest.mark.parametrize("chosen", ["SCHED_BATCH", "SCHED_IDLE"])
def test_a_policy_that_somebody_chose_is_left_alone(chosen):
    """In a process of its own: no way leads back from SCHED_IDLE without a privilege."""
    program = f"""
import os, threading
from pytest_smp.ranks.sim.one_core import OneCore
os.sched_setscheduler(0, os.{chosen}, os.sched_param(0))
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
with OneCore([thread]):
    assert os.sched_getscheduler(thread.native_id) == os.{chosen}
assert os.sched_getscheduler(0) == os.{chosen}
over.set()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_thread_that_chose_its_cores_keeps_them(run):
    """Not the run's core, so nothing of the run."""
    mine = os.sched_getaffinity(0)

    def choose():
        (other, *_) = mine - {int(cores())}
        os.sched_setaffinity(0, {other})
        return str(other)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        (chosen,) = run(lambda: pool.submit(choose).result(), 1).values
        assert pool.submit(cores).result() == chosen


def test_an_interruption_gives_the_cores_back(run, monkeypatch):
    before = cores()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rank_threads, "_await", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(smp.barrier)
    assert cores() == before


def test_a_body_is_told_the_cores_of_the_process(run):
    """torch's DataLoader warns of more workers than there are cores; libraries size pools by it."""
    before = os.sched_getaffinity(0)
    (told,) = run(lambda: os.sched_getaffinity(0), 1).values
    assert told == before


_PRINT = "print([line for line in open('/proc/self/status') if 'Cpus_allowed_list' in line])"


def _by_popen(folder):
    return subprocess.check_output([sys.executable, "-c", _PRINT], text=True)


def _by_system(folder):
    os.system(f"grep Cpus_allowed_list /proc/self/status > {folder}/out")
    return (folder / "out").read_text()


def _by_posix_spawn(folder):
    out = os.open(folder / "out", os.O_WRONLY | os.O_CREAT)
    program = [sys.executable, "-c", _PRINT]
    actions = [(os.POSIX_SPAWN_DUP2, out, 1)]
    pid = os.posix_spawn(sys.executable, program, dict(os.environ), file_actions=actions)
    os.waitpid(pid, 0)
    os.close(out)
    return (folder / "out").read_text()


def _write(folder):
    (folder / "out").write_text(cores("/proc/self/status"))


def _by_multiprocessing(folder, method):
    process = multiprocessing.get_context(method).Process(target=_write, args=(folder,))
    process.start()
    process.join()
    return (folder / "out").read_text()


def _by_fork(folder):
    return _by_multiprocessing(folder, "fork")


def _by_spawn(folder):
    return _by_multiprocessing(folder, "spawn")


def _by_another_thread(folder):
    texts = []
    thread = threading.Thread(target=lambda: texts.append(_by_popen(folder)))
    thread.start()
    thread.join()
    return texts[0]


@pytest.mark.parametrize(
    "start",
    [_by_popen, _by_system, _by_posix_spawn, _by_fork, _by_spawn, _by_another_thread],
)
def test_processes_that_a_body_starts_have_all_cores(run, tmp_path, start):
    before = cores()
    (text,) = run(lambda: start(tmp_path), 1, timeout=60).values
    assert text.strip().strip("[]'\\n").split("\\t")[-1].split()[-1] == before


def test_the_next_run_is_on_one_core_again(run, tmp_path):
    run(lambda: _by_popen(tmp_path), 2)
    assert len(set(run(cores, 2).values)) == 1
    assert run(cores, 1).values[0].isdecimal()


def test_a_body_that_chooses_cores_chooses_for_its_run(run):
    both = os.sched_getaffinity(0)

    def body():
        os.sched_setaffinity(0, both)
        return cores()

    before = cores()
    assert run(body, 1).values == [before]
    assert run(cores, 1).values[0].isdecimal()


def test_a_process_that_is_allowed_one_core_is_left_alone(run):
    before = os.sched_getaffinity(0)
    one = {min(before)}
    os.sched_setaffinity(0, one)
    try:
        run(smp.barrier)
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, before)


def test_a_system_that_refuses_is_left_alone(run, monkeypatch):
    def refuses(*_):
        raise PermissionError

    before = cores()
    monkeypatch.setattr("pytest_smp.ranks.sim.one_core._set", refuses)
    assert set(run(cores).values) == {before}


def test_a_long_run_follows_the_controller(monkeypatch):
    """To a core with room: the operating system moves the controller there, and not the ranks."""
    before = os.sched_getaffinity(0)
    first, second = sorted(before)[:2]
    where = [first]
    monkeypatch.setattr("pytest_smp.ranks.sim.one_core._current_core", lambda: where[0])
    woken, told = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (told.set(), woken.wait()))
    thread.start()
    path = f"/proc/self/task/{thread.native_id}/status"
    try:
        with OneCore([thread]) as one_core:
            assert cores() == cores(path) == str(first)
            where[0] = second
            one_core.follow()
            assert cores(path) == str(second)
            assert os.sched_getaffinity(0) == before
            assert cores() != str(first)  # it is not held any longer
    finally:
        woken.set()
        thread.join()
    assert os.sched_getaffinity(0) == before
