"""Ranks that a launcher started: one pytest, its exit code, and what becomes of a job that loses a
rank. Every test starts a job, which takes seconds, so each looks at many things.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_smp.ranks.backends import find_backend, open_backend
from pytest_smp.ranks.processes import external
from pytest_smp.ranks.protocols import ExecutorOptions
from smp_core.errors import BackendError
from smp_core.launch.mpiexec import find_mpiexec
from smp_core.transport.launchers import launch_of
from tests.conftest import free_port

pytestmark = pytest.mark.timeout(900)

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--color=no"]


def torchrun(ranks: int) -> list[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*words, f"--nproc-per-node={ranks}", "-m", *PYTEST[2:]]


def mpiexec(ranks: int) -> list[str]:
    pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    try:
        return [*find_mpiexec("")[0], "-n", str(ranks), *PYTEST]
    except BackendError as error:
        pytest.skip(str(error))


LAUNCHERS = {"torchrun": torchrun, "mpiexec": mpiexec}


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> SimpleNamespace:
    """A launcher, and what it makes of an exit code: torchrun has 1 for all that are not 0."""
    name = request.param
    flattens = name == "torchrun"
    return SimpleNamespace(
        name=name,
        words=LAUNCHERS[name],
        fabric="gloo" if flattens else "mpi",
        code=lambda code: min(code, 1) if flattens else code,
    )


def counts(text: str) -> dict[str, int]:
    """pytest's last line, in numbers; there is one."""
    (line,) = re.findall(r"^(?:=+ )?((?:\d+ \w+(?:, )?)+) in [\d.]+s.*$", text, re.M)
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", line)}


# ---- A session -----------------------------------------------------------------------------------

SESSION = """
    import os, signal
    from pytest_smp.ranks.processes import run as _run
    _run._GRACE = 60.0  # nobody here goes on after a failure, and a busy machine may be slow to end
    import pytest
    import torch
    import torch.distributed as dist
    from hypothesis import given, settings, strategies as st
    from smp_core.transport.launchers import launch_of

    @pytest.mark.smp
    @given(objects=st.lists(st.integers(), min_size=3, max_size=3))
    @settings(max_examples=5)
    def test_property(smp, objects):
        assert smp.size() == 3
        assert smp.allgather(objects[smp.rank()], smp.WORLD) == objects

    @pytest.mark.smp(ranks=[1, 2, 8])
    def test_fewer(smp, pytestconfig=None):
        total = torch.ones(()) * (smp.rank() + 1)
        dist.all_reduce(total)
        assert total == {1: 1, 2: 3}[smp.size()]

    @pytest.mark.smp
    def test_last_rank_fails(smp):
        print("printed by", smp.rank())
        assert smp.rank() < 2, "the last one"

    @pytest.mark.smp
    def test_deadlock(smp):
        if smp.rank() != 1:
            smp.barrier()

    @pytest.mark.smp
    def test_mismatch(smp):
        dist.all_reduce(torch.ones(smp.rank() // 2 + 1))

    def test_no_rank_at_all():
        assert launch_of(os.environ) is None

    @pytest.mark.smp
    def test_goes_on(smp):
        smp.barrier()

    @pytest.mark.smp
    def test_crash(smp):
        smp.barrier()
        if smp.rank() == 1:
            os.write(2, b"its last words\\n")
            os.kill(os.getpid(), signal.SIGSEGV)
        smp.barrier()

    @pytest.mark.smp
    def test_next(smp):
        assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1, 2]
"""


def test_one_session_that_all_ranks_serve(command, pytester, tmp_path, launcher):
    """Under torchrun another rank takes the place of one that has crashed. A job of MPI ends, with its verdict."""
    pytester.makepyfile(test_it=SESSION)
    above = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}  # srun may have started the launcher
    code, text = command([*launcher.words(3), str(pytester.path)], **above).end()
    replaced = launcher.fabric == "gloo"
    assert code == 1 if replaced else code != 0, text  # mpiexec: of the rank whose end it saw
    assert counts(text) == {"passed": 5 + replaced, "failed": 4, "skipped": 1}
    assert text.count("test session starts") == 1
    assert "smp: 3 ranks" not in text  # nobody chose any
    for expected in (
        r"AssertionError: the last one\n",
        r"raised by rank 2 of 3 ranks \(external\)\n +ranks 0-1: returned",
        r"Captured stdout \(rank 2\) .*\nprinted by 2\n",
        r"DeadlockError: deadlock: 2 of 3 ranks wait, and none can go on",
        r"CollectiveMismatchError: mismatch: call 1 on group WORLD differs in shape",
        r"needs 8 ranks, and \S+( \(.*\))? started 3: (mpiexec -n |torchrun --nproc-per-node=)8 pytest",
        r"rank 1 crashed: killed by SIGSEGV \(signal 11\)",
        r"it wrote last:\n.*its last words",
    ):
        assert re.search(expected, text), (expected, text)
    if not replaced:
        assert "JobLost: the job has lost its ranks" in text
        # Of rank 1, or of all, if the launcher has ended the others by the time of the next test.
        assert re.search(
            "the job has lost (rank .*1|its ranks).*, and its launcher starts no other", text
        )


# ---- Exit codes ----------------------------------------------------------------------------------

PLAIN = """
    def test_plain():
        pass
"""


@pytest.mark.parametrize(
    ("launcher", "arguments", "code", "words"),
    [
        ("mpiexec", ["-k", "no_such_test"], 5, "1 deselected"),
        ("mpiexec", ["--smp-ranks=3"], 4, "--smp-ranks=3: the launcher has started 2 ranks"),
    ],
    indirect=["launcher"],
    ids=["none collected", "too many ranks"],
)
def test_exit_codes(command, pytester, launcher, arguments, code, words):
    """mpiexec hands them on. In other tests of this file sessions end with 0, and with torchrun's 1."""
    pytester.makepyfile(test_it=PLAIN)
    ended, text = command([*launcher.words(2), str(pytester.path), *arguments]).end()
    assert ended == launcher.code(code), text
    assert words in text, text
    assert text.count("test session starts") <= 1, text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2"], "-n: a launcher's ranks serve one pytest"),
        (["--smp-backend=external:nccl"], "exchange data through gloo or mpi"),
    ],
    ids=["xdist", "unknown fabric"],
)
def test_what_a_job_cannot_do_is_refused_once(command, pytester, arguments, words):
    if "-n" in arguments:
        pytest.importorskip("xdist", reason="-n is xdist's")
    pytester.makepyfile(test_it=PLAIN)
    ended, text = command([*mpiexec(2), str(pytester.path), *arguments]).end()
    assert ended == 4, text
    assert words in text, text


@pytest.mark.parametrize("launcher", ["mpiexec"], indirect=True)
def test_another_backend_is_left_alone(command, pytester, launcher):
    """Each process of the job is a session of its own."""
    pytester.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.smp(ranks=3)
        def test_simulated(smp):
            smp.barrier()
        """
    )
    code, text = command([*launcher.words(2), "--smp-backend=sim", str(pytester.path)]).end()
    assert code == 0, text
    assert len(re.findall(r"1 passed in", text)) == 2, text


# ---- Who meets through what ----------------------------------------------------------------------


def test_a_fabric_that_the_launcher_cannot_give_is_refused(command, pytester, launcher):
    pytester.makepyfile(test_it=PLAIN)
    other = {"gloo": "mpi", "mpi": "gloo"}[launcher.fabric]
    code, text = command(
        [*launcher.words(2), f"--smp-backend=external:{other}", str(pytester.path)]
    ).end()
    assert code == launcher.code(4), text
    hint = {"gloo": "take mpiexec", "mpi": "Set MASTER_ADDR and MASTER_PORT"}[launcher.fabric]
    assert hint in text, text


def test_gloo_under_mpiexec(command, pytester):
    pytester.makepyfile(
        test_it="""
        import pytest
        import torch.distributed as dist

        @pytest.mark.smp
        def test_it(smp):
            assert dist.get_backend() == "gloo"
            assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]
        """
    )
    words = [*mpiexec(2), "--smp-backend=external:gloo", str(pytester.path)]
    started = command(words, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    code, text = started.end()
    assert (code, counts(text)) == (0, {"passed": 1}), text


# ---- The end from outside ------------------------------------------------------------------------

BUSY = """
    import os
    import pytest

    @pytest.mark.smp
    def test_busy(smp):
        if smp.rank() == 0:
            print("rank 0 computes", flush=True)
        while smp.rank() == 0:
            pass
        smp.barrier()

    def test_says_who(record_property):
        pass

    @pytest.fixture(autouse=True, scope="session")
    def _say():
        print("controller", os.getpid(), flush=True)
"""


#: The controller computes for ever, and its ranks wait for a run.
BUSY_CONTROLLER = """
    import pytest
    from pytest_smp.ranks.processes import external
    external._LAST_WORDS = 0.0

    @pytest.mark.smp
    def test_ranks(smp):
        smp.barrier()

    def test_busy():
        print("controller 0, rank 0 computes", flush=True)
        while True:
            pass
"""


def busy(command, pytester, launcher, source=BUSY) -> Any:
    """A job that computes for ever, on rank 0 or in its controller; and its controller."""
    pytester.makepyfile(test_it=source)
    started = command([*launcher.words(2), "-s", "--smp-timeout=100", str(pytester.path)])
    started.shows("rank 0 computes")
    found = re.search(r"controller (\d+)", started.text)
    assert found, started.text
    return started, int(found[1])


def test_interrupting_the_launcher_ends_everything(command, pytester, launcher):
    started, _ = busy(command, pytester, launcher)
    started.process.send_signal(signal.SIGINT)
    code, text = started.end(55)  # and does not wait the minutes that a rank gets to start
    assert code != 0, text
    assert "KeyboardInterrupt" in text, text


def test_nobody_survives_the_controller(command, pytester, launcher):
    started, controller = busy(command, pytester, launcher)
    os.kill(controller, signal.SIGKILL)
    code, text = started.end()
    assert code != 0, text


@pytest.mark.parametrize("launcher", ["torchrun"], indirect=True)
def test_nobody_survives_the_launcher(command, pytester, launcher):
    started, _ = busy(command, pytester, launcher, BUSY_CONTROLLER)
    started.process.kill()
    started.end()


# ---- Without a launcher --------------------------------------------------------------------------


def test_a_process_that_was_started_alone_is_told_what_to_do():
    with pytest.raises(BackendError, match=r"started alone: mpiexec -n 8 pytest"):
        open_backend("external", ExecutorOptions())


@pytest.mark.parametrize("fabric", ["gloo", "mpi"])
def test_what_external_claims_is_what_its_fabric_claims(fabric):
    backend, known = find_backend(f"external:{fabric}"), find_backend(fabric)
    assert backend.name == f"external:{fabric}"
    assert backend.capabilities == known.capabilities
    assert backend.expectations == known.expectations


def test_a_fabric_that_is_none_of_ours_is_refused():
    with pytest.raises(BackendError, match="exchange data through gloo or mpi"):
        find_backend("external:nccl")


def test_ranks_that_never_come_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller waits once, and not again for every test."""
    launch = launch_of({"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"})
    assert launch is not None
    monkeypatch.setattr(external, "_GATHER", 0.2)
    monkeypatch.setattr(external.ExternalJob, "current", external.ExternalJob(launch, "gloo", True))
    executor = open_backend("external", ExecutorOptions(ranks=3))
    try:
        for _ in range(2):
            with pytest.raises(BackendError, match=r"ranks \[0, 1, 2\] of 3 have not come"):
                executor.open(3).run(external_job())
        monkeypatch.setattr(external, "_GATHER", 1000.0)
        start = time.monotonic()
        with pytest.raises(BackendError, match="have not come"):
            executor.open(3).run(external_job())
        assert time.monotonic() - start < 500
    finally:
        executor.close()


def external_job() -> Any:
    from pytest_smp.ranks.protocols import Job

    return Job(body=_nothing, arguments=_no_arguments, timeout=5.0)


def _nothing() -> None:
    pass


def _no_arguments(rank: int) -> tuple[tuple[()], dict[str, Callable[..., Any]]]:
    return (), {}
