"""The fork server of these tests gives each run its own exit code, whatever became of the run before."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path
from typing import Any

import pytest

from . import fork_server
from .fork_server import ForkServer


def test_a_run_that_is_broken_off_leaves_nothing_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {name: each for name, each in os.environ.items() if "PYTEST" not in name}
    server = ForkServer("json")  # which is there at once

    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    try:
        with monkeypatch.context() as patch:
            patch.setattr(select, "select", interrupt)
            with pytest.raises(KeyboardInterrupt):
                server.run("raise SystemExit(5)", tmp_path, environment, 100)
        assert server.run("raise SystemExit(3)", tmp_path, environment, 100).code == 3
        with pytest.raises(RuntimeError, match="has ended before it answered"):
            server.run("import os; os.kill(os.getppid(), 9)", tmp_path, environment, 100)
        assert server._process is None
    finally:
        server.close()


def test_a_process_that_has_ended_is_killed_without_an_error() -> None:
    done = subprocess.Popen(["true"], start_new_session=True)
    done.wait()
    fork_server._kill(done.pid)


def test_an_end_is_seen_without_descriptors_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    reading, writing = os.pipe()
    by_itself = subprocess.Popen(["sh", "-c", "exit 3"], start_new_session=True)
    assert fork_server._ended(by_itself.pid, reading) == 3
    os.close(writing)  # nobody asks any more
    lasting = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    assert fork_server._ended(lasting.pid, reading) == -9
    by_itself.wait()  # which finds that they are gone
    lasting.wait()
    os.close(reading)
