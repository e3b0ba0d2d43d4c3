"""The common parts of all tests: pytest's own fixture for running pytest, one terminal for everybody, commands that
tests start, with the proof that nothing of them stays, and a process to fork programs from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from .fork_server import ForkServer

# On a busy machine drawing an example may take seconds: that says nothing of what is tested.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# A shell starts what it puts into the background with SIGINT ignored, and a program and its children stay so: the
# tests that send Ctrl-C to a session would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A program started by nohup ignores SIGHUP, and its children too: the tests that send it would wait in vain.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

pytest_plugins = ["pytester"]

#: TensorFlow is large, so environments of their own have it: `tox run -e tf,tf-legacy`.
_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
collect_ignore = [] if _TENSORFLOW else ["smp_core/tensorflow"]


def pytest_report_header() -> list[str]:
    """Say which tests are not collected."""
    return (
        []
        if _TENSORFLOW
        else ["not collected: tests/smp_core/tensorflow, which `tox run -e tf,tf-legacy` runs"]
    )


#: The files that take longest: their tests start jobs of a launcher, or sessions of pytest in processes of their own,
#: or compute for long. They have the marker ``slow``, and a tox environment of their own, in which xdist gives a worker
#: one test at a time (`--dist=loadgroup`). True: the tests of the file share what one of them makes, and are one
#: worker's. Those come first, because a long file that came last would leave the other workers idle.
SLOW = {
    "conformance/suite/test_recorded.py": True,
    "test_examples.py": True,
    "test_scripts.py": True,
    "test_clusters.py": True,
    "smp_core/transport/mpi/test_on_ranks.py": True,
    "pytest_smp/test_processes.py": True,
    "test_docs.py": True,
    "pytest_smp/test_slow_machines.py": True,
    "pytest_smp/ranks/processes/test_late_results.py": True,
    "test_recipes.py": True,
    "test_third_party.py": True,
    "pytest_smp/ranks/processes/test_several_hosts.py": False,
    "smp_core/launch/test_processes.py": False,
    "test_benchmarks.py": False,
    "conformance/suite/test_claims.py": False,
    "pytest_smp/ranks/processes/test_external.py": False,
    "tools/test_soak.py": False,
    "smp_core/transport/test_plain_scripts.py": False,
    "smp_core/transport/smddp/test_collectives_mutants.py": False,
    "smp_core/transport/smddp/test_flat_mutants.py": False,
    "smp_core/transport/smddp/test_folding_mutants.py": False,
    "smp_core/transport/smddp/test_futex_mutants.py": False,
    "smp_core/transport/smddp/test_inter_machine_mutants.py": False,
    "smp_core/transport/smddp/test_point_to_point_mutants.py": False,
    "smp_core/transport/smddp/test_process_group_mutants.py": False,
    "smp_core/transport/smddp/test_progress_mutants.py": False,
    "smp_core/transport/smddp/test_rounds_mutants.py": False,
    "smp_core/transport/smddp/test_segment_mutants.py": False,
    "smp_core/transport/smddp/test_streams_mutants.py": False,
    "smp_core/transport/smddp/test_work_mutants.py": False,
    "smp_core/transport/smddp/test_inter_machine.py": False,
    "smp_core/transport/smddp/test_distributed.py": False,
    "conformance/mutants/test_selftest.py": False,
    "pytest_smp/test_coverage.py": False,
    "smp_core/test_alone.py": False,
    "conformance/session/test_namesakes.py": False,
    "conformance/session/test_plugin.py": False,
    "conformance/session/test_sessions.py": False,
}

#: Of the other files those that take longest, the first of them most. xdist gives a file to one worker
#: (`--dist=loadfile`).
LONGEST = (
    "smp_core/torch/reduction/test_gather_backend.py",
    "pytest_smp/ranks/faults/test_strikes.py",
    "smp_core/torch/checkpoint/test_tensor_parallel.py",
    "test_findings.py",
    "pytest_smp/strategies/test_payloads.py",
    "smp_core/torch/sharding/test_sharded_checkpoints.py",
    "pytest_smp/test_timeout.py",
    "smp_core/torch/test_cuda_stand_in.py",
    "pytest_smp/ranks/processes/test_fork_pool.py",
    "smp_core/torch/nn/test_huggingface.py",
    "pytest_smp/test_trouble.py",
    "pytest_smp/strategies/test_strategies.py",
    "pytest_smp/strategies/test_mistakes.py",
    "pytest_smp/ranks/processes/test_killed_controllers.py",
    "pytest_smp/test_reports.py",
    "smp_core/torch/test_public_scripts.py",
    "test_packaging.py",
    "smp_core/tensorflow/test_failed_steps.py",
    "smp_core/tensorflow/test_public_scripts.py",
    "smp_core/tensorflow/test_segments.py",
    "smp_core/tensorflow/test_step.py",
    "smp_core/tensorflow/test_checkpoint.py",
    "smp_core/tensorflow/test_example.py",
)
_HERE = Path(__file__).parent
_SLOW = {_HERE / name for name in SLOW}


def pytest_configure(config: pytest.Config) -> None:
    missing = [name for name in (*SLOW, *LONGEST) if not (_HERE / name).exists()]
    assert not missing, f"tests/conftest.py: SLOW or LONGEST names {missing}"
    config.addinivalue_line(
        "markers", "slow: a test of a file that starts jobs or sessions, or computes for long"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the files that the two environments of tox.ini leave out by the marker ``slow``."""
    if collection_path.suffix != ".py" or config.option.markexpr not in (
        "slow",
        "not slow",
    ):
        return None
    slow = collection_path in _SLOW
    return True if slow is not (config.option.markexpr == "slow") else None


@pytest.hookimpl(tryfirst=True)  # the marker is there before `-m` looks for it
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, and run the files that take longest first; the others stay in their order."""
    places = {_HERE / name: place for place, name in enumerate((*SLOW, *LONGEST))}
    for item in items:
        if item.path in _SLOW:  # items may lie outside of this folder, such as the suite's
            item.add_marker("slow")
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of ``--dist=loadgroup``: a group is a file of SLOW whose tests share something.

    The scheduler of xdist 3.8 finds no group with pytest 9.2: a worker writes the group into a private attribute of
    the item, which pytest no longer reads, so that every worker would make anew what the tests share.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            together = SLOW.get(file.removeprefix("tests/"), False)
            return file if together else nodeid

    return Scheduler(config, log)


def pytest_collection_finish() -> None:
    """Keep modules and items, which stay to the end, out of every full search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail a test that leaves torch's process-wide state changed: every later test of the worker would see it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for what, now, default, restore in (
        ("default dtype", torch.get_default_dtype(), torch.float32, torch.set_default_dtype),
        ("gradient mode", torch.is_grad_enabled(), True, torch.set_grad_enabled),
        (
            "choice of deterministic algorithms",
            torch.are_deterministic_algorithms_enabled(),
            False,
            torch.use_deterministic_algorithms,
        ),
        (
            "choice of deterministic operations of cuDNN",
            torch.backends.cudnn.deterministic,
            False,
            torch._C._set_cudnn_deterministic,
        ),
    ):
        if now != default:
            restore(default)
            pytest.fail(
                f"{item.nodeid} leaves torch's {what} at {now}, not {default}", pytrace=False
            )


@pytest.fixture(scope="session", autouse=True)
def _no_ci() -> Iterator[None]:
    """Let the sessions of pytest inside tests print the same everywhere.

    Under CI pytest cuts no line and no list of its summary and Hypothesis prints a blob, and tests read those. tox
    hides CI from what it runs, and keeps it under a name that Hypothesis knows
    (https://github.com/tox-dev/tox/issues/3442).
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CI", "BUILD_NUMBER", "__TOX_ENVIRONMENT_VARIABLE_ORIGINAL_CI"):
            patch.delenv(name, raising=False)
        yield


def free_port() -> int:
    """A port of the loopback interface that is free, and below those that the kernel gives to listeners of others."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = random.SystemRandom().randrange(10_000, max(low, 30_000))
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    pytest.fail("no port of the loopback interface is free")


# Commands that tests start.


_MARK = "SMP_TEST_JOB"
# Limits of what ends by itself. A machine at work takes a minute for the imports of a launcher and its ranks alone.
_GONE = 120.0  # seconds for what is left to end: a controller gets 20 to say why


@dataclasses.dataclass
class Started:
    """A command that runs in a session of its own."""

    process: subprocess.Popen[bytes]
    output: Path
    mark: str
    folder: Path  # its TMPDIR

    @property
    def text(self) -> str:
        """The output that the command has written so far."""
        return self.output.read_text(errors="replace")

    def shows(self, words: str, timeout: float = 300.0) -> None:
        """Wait until it has written this."""
        self._until(lambda: words in self.text, timeout)

    def makes(self, path: Path, timeout: float = 300.0) -> None:
        """Wait until it has made this file."""
        self._until(path.exists, timeout)

    def _until(self, seen: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not seen():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)

    def end(self, timeout: float = 600.0) -> tuple[int, str]:
        """Its exit code, and all that it wrote, once nothing of it is left."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end within {timeout:g} s and wrote\n{self.text}")
        self.leaves_nothing()
        return code, self.text

    def processes(self) -> dict[int, str]:
        """The command lines of the command's processes that are alive, by process id."""
        found = {}
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdecimal() and self.mark.encode() in (path / "environ").read_bytes():
                    words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if words:  # a zombie has none
                        found[int(path.name)] = words
            except OSError:
                pass
        return found

    def without(self, program: str) -> None:
        """Wait until no process of this program is left."""
        deadline = time.monotonic() + _GONE
        while left := [each for each in self.processes().values() if each.startswith(program)]:
            assert time.monotonic() < deadline, f"{left}\n{self.text}"
            time.sleep(0.05)

    def leaves_nothing(self) -> None:
        """No process, and no folder of ours."""
        deadline = time.monotonic() + _GONE
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"{left}\n{self.text}"
        assert not list(self.folder.glob("smp-*")), self.text


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts commands; ends what is left of them."""
    started = []
    folders = []

    def start(words: Sequence[str], **environment: str) -> Started:
        mark = uuid.uuid4().hex
        output = tmp_path / f"{mark}.log"
        folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short: sockets are made in it
        folders.append(folder)
        inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        with output.open("wb") as file:
            process = subprocess.Popen(
                words,
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={
                    **inherited,
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(folder),
                    "COLUMNS": "200",
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    _MARK: mark,
                    **environment,
                },
                start_new_session=True,
            )
        started.append(Started(process, output, mark, folder))
        return started[-1]

    yield start
    for each in started:
        for pid in each.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.process.wait()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def fork_server(_no_ci: None) -> Iterator[ForkServer]:
    """Runs programs in processes that have pytest and torch imported."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def apart_pytest(fork_server: ForkServer) -> Callable[..., pytest.RunResult]:
    """Runs ``python -m pytest`` in a process of its own, which has torch and ours imported."""

    def run(
        *arguments: str | Path, folder: Path | None = None, stdin: bytes = b"", **environment: str
    ) -> pytest.RunResult:
        """Run it in a folder, the present one if none is given, with these arguments and variables."""
        folder, started = folder or Path.cwd(), time.monotonic()
        # The variables that pytest and xdist set for this session do not concern the one that is started.
        outside = {name: each for name, each in os.environ.items() if "PYTEST" not in name}
        done = fork_server.python(
            *("-m", "pytest", *map(str, arguments)),
            folder=folder,
            environment={**outside, "PYTHONPATH": str(folder), **environment},
            stdin=stdin,
        )
        lines = done.stdout.splitlines(), done.stderr.splitlines()
        return pytest.RunResult(done.code, *lines, time.monotonic() - started)

    return run
