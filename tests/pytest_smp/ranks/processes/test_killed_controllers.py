"""Nothing outlives a controller, however it ends: no process, also of those that bodies put into
sessions of their own, and no folder.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

SCRIPT = """
import os, subprocess, sys, time
import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job

def body():
    if smp.rank() == 1:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
    smp.barrier()
    if smp.rank() == 0:
        open(path, "w").write("started")
    smp.barrier()
    time.sleep(600)

if __name__ == "__main__":
    backend, path = sys.argv[1:]
    executor = open_backend(backend, ExecutorOptions(ranks=2))
    executor.open(2).run(Job(body=body, arguments=lambda rank: ((), {})))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.timeout(900)
def test_nothing_outlives_a_killed_script(command, tmp_path, backend, number):
    if backend == "mpi":
        pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    script, note = tmp_path / "script.py", tmp_path / "note"
    script.write_text(SCRIPT)
    started = command([sys.executable, str(script), backend, str(note)])
    _until(started, note)
    os.kill(started.process.pid, number)
    started.end()


def _until(started, note):
    deadline = time.monotonic() + 300
    while not note.exists() or note.read_text() != "started":
        assert started.process.poll() is None, started.text
        assert time.monotonic() < deadline, started.text
        time.sleep(0.02)
