"""Sessions of pytest as a third party runs them: in a folder that knows nothing of this project."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from tests.fork_server import ForkServer

#: Runs one session after the other in one process (imports are paid for once), and tells them apart.
DRIVER = """
import os, pytest, sys
for environment, arguments in {sessions!r}:
    os.environ.update(environment)
    print("=== session", *arguments, flush=True)
    code = int(pytest.main(["-p", "no:cacheprovider", "-p", "planted", *arguments]))
    sys.stderr.flush()
    print("=== exit", code, flush=True)
    for name in environment:
        del os.environ[name]
"""


class Sessions(Protocol):
    """Runs sessions; a session is its arguments, led by environment variables ``NAME=value``."""

    def __call__(self, *sessions: Sequence[str], plugin: str = "", code: int = 0) -> list[str]:
        """The output of each; ``plugin`` is loaded by all of them, ``code`` is how the process ends."""


def _split(session: Sequence[str]) -> tuple[Mapping[str, str], list[str]]:
    variables = [each for each in session if each.partition("=")[0].isupper()]
    environment = dict(each.split("=", 1) for each in variables)
    return environment, [each for each in session if each not in variables]


@pytest.fixture
def sessions(tmp_path: Path, fork_server: ForkServer) -> Sessions:
    def run(*sessions: Sequence[str], plugin: str = "", code: int = 0) -> list[str]:
        (tmp_path / "pytest.ini").touch()
        if not (tmp_path / "pytest.ini").read_text():
            (tmp_path / "pytest.ini").write_text("[pytest]\n")
        if plugin or not (tmp_path / "planted.py").exists():
            (tmp_path / "planted.py").write_text(plugin)
        # The variables that pytest and xdist set for this session do not concern the sessions started here.
        outside = {name: each for name, each in os.environ.items() if "PYTEST" not in name}
        environment = {**outside, "PYTHONPATH": str(tmp_path), "COLUMNS": "80"}
        program = DRIVER.format(sessions=[_split(each) for each in sessions])
        # The limit is one for a busy machine, too.
        ended = fork_server.run(program, tmp_path, environment, timeout=280, one_stream=True)
        assert ended.code == code, ended.stdout
        return ended.stdout.split("=== session")[1:]

    return run


#: A suite of five requirements in the place of ours: small, and it does what it is told to.
PLANTED = """
import pathlib
from conformance.requirements import catalogue
from conformance.requirements.registry import Capability, Level, Registry, Requirement
from conformance.session import results, session
from pytest_smp import suite

suite.HERE = session.HERE = results.HERE = pathlib.Path(__file__).parent / "small"
results.ADDRESS = "small"
catalogue.REQUIREMENTS = Registry(*(
    Requirement(id, f"{id} holds.", "AWS Common API", level, frozenset(needs))
    for id, level, *needs in [
        ("LIFE-START", Level.L0, Capability.RANKS),
        ("COMM-ORDER", Level.L1, Capability.RANKS),
        ("COMM-REDUCE", Level.L1, Capability.PROCESS_GROUPS, Capability.ALL_REDUCE),
        ("COMM-DTYPES", Level.L1, Capability.RANKS),
        ("ERROR-RANK", Level.L2, Capability.RANKS),
    ]
))
OPEN = session.SuiteSession.open_backend
session.SuiteSession.open_backend = lambda *arguments: None  # which imports torch
"""

SUITE = """
import os, pathlib, signal
import pytest
from hypothesis import given, settings, strategies as st
from conformance.session.verdicts import not_supported
from smp_core.errors import RunTimeout

def told(id):
    return id in os.environ.get("FAIL", "").split()

@pytest.mark.requirement("LIFE-START")
def test_start():
    assert not told("LIFE-START"), "no start"

@pytest.mark.requirement("COMM-ORDER")
@given(number=st.integers(0, 10**9))
@settings(deadline=None)
def test_order(number):
    with open(os.environ.get("NUMBERS", "numbers.txt"), "a") as file:
        print(number, file=file)
    assert not (told("COMM-ORDER") and number > 1000)

@pytest.mark.requirement("COMM-ORDER")
def test_order_again():
    assert not told("COMM-ORDER-AGAIN")

@pytest.mark.requirement("COMM-REDUCE")
def test_reduce():
    assert not told("COMM-REDUCE")

@pytest.mark.requirement("COMM-DTYPES")
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_dtypes(dtype):
    if dtype == "bool" or told("COMM-DTYPES"):
        not_supported(f"no {dtype}")

@pytest.fixture
def trouble():
    assert os.environ.get("STOP") != "setup", "no set-up"

@pytest.mark.requirement("ERROR-RANK")
def test_rank(trouble):
    match os.environ.get("STOP"):
        case "interrupt": raise KeyboardInterrupt
        case "signal": os.kill(os.getpid(), signal.SIGINT)
        case "exit": pytest.exit("enough")
        case "die": os._exit(9)
        case "crash":
            if not os.path.exists("crashed"):
                pathlib.Path("crashed").touch()
                os._exit(9)
        case "timeout": raise RunTimeout("it took too long")
        case "skip": pytest.skip("not today")
    assert not told("ERROR-RANK")

@pytest.mark.requirement("ERROR-RANK")
def test_rank_again():
    pass
"""


@pytest.fixture
def small(sessions: Sessions, tmp_path: Path) -> Sessions:
    """Sessions of a small suite in the folder ``small``."""
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "test_small.py").write_text(SUITE)
    return sessions
