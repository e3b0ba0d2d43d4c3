"""The exit status of a session that certifies, whatever ends its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fork_server import ForkServer

ENDS = """
import atexit, ctypes, os, signal, sys, threading, pytest

LIBC = ctypes.CDLL(None)
END = os.environ.get("END", "")
AT_ONCE = {
    "_exit": lambda: os._exit(0),
    "_exit in C": lambda: LIBC._exit(0),
    "a thread": lambda: (thread := threading.Thread(target=os._exit, args=(0,))).start() or thread.join(),
    "exec": lambda: os.execv("/bin/true", ["/bin/true"]),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM to the parent": lambda: os.kill(os.getppid(), signal.SIGTERM) or signal.pause(),
    "SIGINT to the parent": lambda: os.kill(os.getppid(), signal.SIGINT) or signal.pause(),
}
"""

TESTS = """
from conftest import AT_ONCE, END
def test_end():
    AT_ONCE.get(END, lambda: None)()
    assert END not in ("atexit", "unconfigure")
"""

CONFTEST = f"""{ENDS}
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    if END == "ended early":
        pytest.exit("done", returncode=0)
    result = yield
    if END == "forgiven":
        session.exitstatus = 0
    return result

def pytest_unconfigure():
    if END == "unconfigure":
        os._exit(0)
if END == "atexit":
    atexit.register(os._exit, 0)
"""

THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"


def status(fork_server: ForkServer, folder: Path, end: str, *arguments: str) -> tuple[int, str]:
    (folder / "pytest.ini").write_text("[pytest]\nsmp_certify = true\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_end.py").write_text(TESTS)
    environment = {name: each for name, each in os.environ.items() if "PYTEST" not in name}
    ended = fork_server.python(
        *("-m", "pytest", "-p", "no:cacheprovider", *arguments),
        folder=folder,
        environment=environment | {"END": end},
        timeout=280,
    )
    return ended.code, ended.stdout + ended.stderr


NOTICE = "ended with exit code 0 before the session did: nothing is certified"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("_exit in C", 1),
        ("a thread", 1),
        ("exec", 1),
        ("SIGKILL", 137),
        ("SIGTERM to the parent", 143),
        ("SIGINT to the parent", 2),
        # The session had ended: its status stands.
        ("atexit", 1),
        ("unconfigure", 1),
    ],
)
def test_the_status_is_that_of_the_session(
    fork_server: ForkServer, tmp_path: Path, end: str, code: int
) -> None:
    found, output = status(fork_server, tmp_path, end)
    assert found == code, output
    at_once = code == 1 and end not in ("atexit", "unconfigure")
    assert (NOTICE in output) == at_once


@pytest.mark.parametrize("end", ["forgiven", "ended early"])
def test_a_status_of_others_certifies_nothing(
    fork_server: ForkServer, tmp_path: Path, end: str
) -> None:
    found, output = status(fork_server, tmp_path, end, "--smp-certify")
    assert found == 1, output
    assert "nothing is certified, whatever exit status a plugin has set" in output
    assert status(fork_server, tmp_path, end)[0] == 0  # the ini key is one of the suite


def test_a_thread_of_a_conftest_changes_nothing(tmp_path: Path) -> None:
    """The command is started anew, so the session here is a command."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nsmp_certify = true\n")
    (tmp_path / "conftest.py").write_text(f"{CONFTEST}\n{THREAD}")
    (tmp_path / "test_end.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    outside = {name: each for name, each in os.environ.items() if "PYTEST" not in name}
    for end, code in {"": 0, "_exit in C": 1, "SIGTERM to the parent": 143}.items():
        ended = subprocess.run(
            command, cwd=tmp_path, env=outside | {"END": end}, capture_output=True, text=True
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        assert (NOTICE in ended.stderr) == (code == 1)


def test_other_sessions_are_one_process(fork_server: ForkServer, tmp_path: Path) -> None:
    assert status(fork_server, tmp_path, "_exit", "-o", "smp_certify=false")[0] == 0
    assert status(fork_server, tmp_path, "", "--smp-certify", "--help")[0] == 0
