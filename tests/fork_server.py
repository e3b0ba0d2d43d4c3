"""A fork server for tests that need a process of their own: pytest, its plugins and torch are imported once.

A process of Python takes seconds to import torch and pytest's plugins; one that is forked has them. The server runs
nothing else, so a forked process finds what a new one finds after its imports: no test, no rank and none of
``conformance``'s modules, whose registries tests replace. A server of other modules imports those, and nothing of ours.

This file is both sides: the fixture ``fork_server`` starts it as a script.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

#: Imported before any fork, and by nobody for its effects. `torch._dynamo` is what a process's first optimizer imports.
IMPORTS = (
    "hypothesis.strategies",
    "hypothesis.database",
    "hypothesis.internal.conjecture.shrinker",
    "hypothesis.internal.scrutineer",
    "hypothesis.vendor.pretty",
    "numpy.random",
    "torch._dynamo",
    "torch.nn.parallel",
    "smp_core.torch",
    "pytest_smp.marker",
    "pytest_smp.running",
    "pytest_smp.summary",
)

#: The program by which `python` runs its arguments.
AS_PYTHON = """
import os, runpy, sys
first, *rest = {arguments!r}
if first == "-m":
    name, *rest = rest
    sys.path[0] = os.getcwd()
    sys.argv[:] = [name, *rest]  # runpy puts the module's file in the name's place
    runpy.run_module(name, run_name="__main__", alter_sys=True)
else:
    sys.path[0] = os.path.dirname(os.path.abspath(first))
    sys.argv[:] = [first, *rest]
    runpy.run_path(first, run_name="__main__")
"""

_PROVIDERS = "hypothesis.internal.conjecture.providers"
_PR_SET_PDEATHSIG = 1


# ---- The test's side -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code, or the negative number of a signal, and its output."""

    code: int
    stdout: str
    stderr: str  #: empty where both streams were one


class ForkServer:
    """Runs programs, one after the other, each in a process that is forked for it.

    The process has ``modules`` imported; without any, pytest, its plugins, torch and ours. Modules are looked for in
    the folder ``path`` first.
    """

    def __init__(self, *modules: str, path: Path | None = None) -> None:
        self._modules = modules
        # The variables that pytest and xdist set for this session do not concern the programs started here.
        self._environment = {
            name: each for name, each in os.environ.items() if "PYTEST" not in name
        }
        if path is not None:
            self._environment["PYTHONPATH"] = str(path)
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self,
        program: str,
        folder: Path,
        environment: Mapping[str, str],
        timeout: float,
        one_stream: bool = False,
        stdin: bytes = b"",
    ) -> Ended:
        """Run the text of a program as ``python -c`` does, in this folder and with this environment.

        Where the environment has what only a new process reads (``PYTHONOPTIMIZE``), it is run in one. Raises
        subprocess.TimeoutExpired, once the process is killed.
        """
        if any(
            environment.get(name) != self._environment.get(name)
            for name in _read_at_start(environment)
        ):
            done = subprocess.run(
                [sys.executable, "-c", program],
                cwd=folder,
                env=environment,
                input=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if one_stream else subprocess.PIPE,
                timeout=timeout,
            )
            texts = (each.decode(errors="replace") for each in (done.stdout, done.stderr or b""))
            return Ended(done.returncode, *texts)
        with tempfile.TemporaryDirectory() as outputs:
            given, stdout, stderr = (Path(outputs, name) for name in ("in", "out", "error"))
            given.write_bytes(stdin)
            stderr.touch()
            job = {
                "program": program,
                "folder": str(folder),
                "environment": dict(environment),
                "files": [str(given), str(stdout), str(stdout if one_stream else stderr)],
            }
            code = self._run(job, timeout)
            ended = Ended(
                code or 0, *(each.read_text(errors="replace") for each in (stdout, stderr))
            )
        if code is None:
            raise subprocess.TimeoutExpired(program, timeout, ended.stdout, ended.stderr)
        return ended

    def python(
        self,
        *arguments: str,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        timeout: float = 600,
        stdin: bytes = b"",
    ) -> Ended:
        """Run ``python ARGUMENTS``, where the first argument is a script, or ``-m`` with a module as the second.

        Unlike ``python`` itself, the process has torch and ours imported: no test of imports runs by this.
        """
        outside = self._environment if environment is None else environment
        program = AS_PYTHON.format(arguments=arguments)
        return self.run(program, folder, outside, timeout, stdin=stdin)

    def _run(self, job: Mapping[str, object], timeout: float) -> int | None:
        """The exit code; None if the process had to be killed."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *self._modules],
                env={**self._environment, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # an answer that lay in a buffer could not be waited for
            )
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(json.dumps(job).encode() + b"\n")
            pid = _read(answers)
            ready, _, _ = select.select([answers], [], [], timeout)
            if not ready:
                _kill(pid)
            code = _read(answers)
        except BaseException:
            # A late answer of the server about this job would be taken for an answer to the next one.
            self._abandon()
            raise
        return code if ready else None

    def _abandon(self) -> None:
        """End the server, which kills the process of its job; the next run starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def close(self) -> None:
        """End the server."""
        if self._process is not None:
            self._process.communicate()


def _read(answers: IO[bytes]) -> int:
    line = answers.readline()
    if not line:
        raise RuntimeError("the fork server has ended before it answered")
    number: int = json.loads(line)
    return number


def _kill(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended, or has no group yet
        os.killpg(leader, signal.SIGKILL)


def _read_at_start(environment: Mapping[str, str]) -> list[str]:
    names = [name for name in {*environment, *os.environ} if name.startswith("PYTHON")]
    return [name for name in names if name != "PYTHONPATH"]


# ---- The server ----------------------------------------------------------------------------------


def main() -> None:
    """Serve until standard input closes; in a forked process, run its program."""
    sys.path[0] = ""  # as `python -c` has it, and not the folder of this file
    # The programs' standard streams are not those by which the server is spoken to.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    if modules := sys.argv[1:]:
        _import_alone(modules)
    else:
        _import()
    while line := requests.readline():
        job = json.loads(line)
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            os.setsid()
            _die_with(server)
            requests.close()
            answers.close()
            _become(job)
            exec(compile(job["program"], "<string>", "exec"), vars(_new_main()))
            return  # and end as Python ends: `atexit` and all
        print(pid, file=answers, flush=True)
        print(_ended(pid, requests.fileno()), file=answers, flush=True)


def _import_alone(modules: Sequence[str]) -> None:
    import gc
    import importlib

    for name in modules:
        importlib.import_module(name)
    gc.freeze()


def _import() -> None:
    import gc
    import importlib

    gc.disable()  # there is no garbage in what is imported
    import pytest

    # A session imports pytest's plugins as pytest does: their assertions are rewritten.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("pytest.ini").write_text("[pytest]\n")
        Path("test_nothing.py").write_text("def test_nothing(): pass\n")
        pytest.main(["-p", "no:cacheprovider"])
    for name in IMPORTS:
        importlib.import_module(name)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("conformance", "test_nothing"):
            del sys.modules[name]
    # A session's first draw looks for constants in the source of every module of ours, for a second.
    search = getattr(importlib.import_module(_PROVIDERS), "_get_local_constants", None)  # private
    if search is not None:
        with tempfile.TemporaryDirectory() as folder:  # what it writes; that of pytest.main is gone
            sys.modules["hypothesis.configuration"].set_hypothesis_home_dir(folder)
            search()
    gc.enable()
    gc.freeze()  # nobody need look for garbage in it, and have its pages copied


def _die_with(server: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server:
            os._exit(1)


def _become(job: Mapping[str, Any]) -> None:
    """Take on the folder, the environment and the files of a job."""
    import importlib

    for number, file in enumerate(job["files"]):
        way = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        descriptor = os.open(file, way)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv[:] = ["-c"]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    importlib.invalidate_caches()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Of Python's own numbers a forked process draws others by itself.
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    if configuration := sys.modules.get("hypothesis.configuration"):
        configuration.set_hypothesis_home_dir(Path(".hypothesis").absolute())


def _new_main() -> Any:
    from types import ModuleType

    sys.modules["__main__"] = ModuleType("__main__")
    return sys.modules["__main__"]


def _ended(pid: int, requests: int) -> int:
    """The exit code of the process, which is killed when nobody asks any more."""
    if not hasattr(os, "pidfd_open"):
        return _ended_by_asking(pid, requests)
    descriptor = os.pidfd_open(pid)
    ready, _, _ = select.select([descriptor, requests], [], [])
    if descriptor not in ready:
        _kill(pid)
    os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _ended_by_asking(pid: int, requests: int) -> int:
    """The exit code, as `_ended` gives it, where the system does not tell that a process has ended."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        ready, _, _ = select.select([requests], [], [], 0.02)
        if ready:
            _kill(pid)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
