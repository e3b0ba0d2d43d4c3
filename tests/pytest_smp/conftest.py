"""Sessions of pytest inside a test: most in this process, because importing torch takes longer than
all of them.
"""

from __future__ import annotations

import importlib
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

# pytester takes what a session has imported out of sys.modules again. Of these a second copy cannot
# exist (torch), or would be a stranger to the first (ours, Hypothesis's).
_STAY = (
    "numpy.random",
    "torch.nn.parallel",
    "hypothesis.strategies",
    "hypothesis.database",
    "hypothesis.internal.conjecture.shrinker",
    "hypothesis.internal.scrutineer",
    "hypothesis.vendor.pretty",
    "smp_core.torch",
    "pytest_smp.ranks.sim.fabric",
    "pytest_smp.marker",
    "pytest_smp.running",
    "pytest_smp.summary",
)

_HEAD = """
import os, random, sys, threading, time, unittest
from pathlib import Path
import pytest
from hypothesis import assume, event, example, given, note, settings, target, strategies as st
import torch
import torch.distributed as dist
import smp_core.torch as api
from smp_core import errors
"""

_CALM = """
from hypothesis import settings
settings.register_profile("calm", derandomize=True, deadline=None)
settings.load_profile("calm")
"""


class Ended:
    """A session that has ended."""

    def __init__(self, result: pytest.RunResult) -> None:
        self.code = int(result.ret)
        self.text = f"{result.stdout}\n{result.stderr}"
        self.counts = {}
        if re.search(r" in [\d.]+s\b", self.text):  # the last line of a session that was not killed
            self.counts = result.parseoutcomes()

    def shows(self, *texts: str) -> None:
        """Assert that the output has these texts, one below the other, however it is indented."""
        rest = _narrow(self.text)
        for text in texts:
            assert _narrow(text) in rest
            rest = rest.partition(_narrow(text))[2]

    def hides(self, *texts: str) -> None:
        """Assert that the output has none of these texts."""
        for text in texts:
            assert text not in self.text

    def hides_ours(self, *texts: str) -> None:
        """As ``hides``, and no line of ours is in a traceback: what failed is the user's."""
        self.hides(
            "smp_core/", "pytest_smp/", "threading.py", "contextlib.py", "INTERNALERROR", *texts
        )

    @property
    def end(self) -> str:
        """The end of the output: the section on failures on ranks, and below."""
        return self.text.partition("= failures on ranks =")[2]


def _narrow(text: str) -> str:
    return re.sub(" +", " ", text)


class Session:
    """Runs pytest on one test file. The given source stands below the usual imports."""

    def __init__(
        self, pytester: pytest.Pytester, apart_pytest: Callable[..., pytest.RunResult]
    ) -> None:
        self.pytester, self._apart = pytester, apart_pytest

    def __call__(self, source: str, *args: str, ranks: int | None = 4, head: str = _HEAD) -> Ended:
        """Run it in this process."""
        self.write(source, head)
        return self.run(*args, ranks=ranks)

    def run(self, *args: str, ranks: int | None = 4) -> Ended:
        """Run what has been written, in this process."""
        arguments = self._arguments(ranks, args)
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # this session's filters are not those of users
            return Ended(self.pytester.runpytest_inprocess(*arguments, no_reraise_ctrlc=True))

    def apart(
        self, source: str, *args: str, ranks: int | None = 4, head: str = _HEAD, **how: Any
    ) -> Ended:
        """Run it in a process of its own, which has torch imported."""
        self.write(source, head)
        return self.run_apart(*self._arguments(ranks, args), **how)

    def run_apart(self, *arguments: str, **how: Any) -> Ended:
        """Run what has been written with these arguments, and no others, in a process that has torch imported."""
        return Ended(self._apart(*arguments, folder=self.pytester.path, **how))

    def anew(
        self, source: str, *args: str, ranks: int | None = 4, head: str = _HEAD, **how: Any
    ) -> Ended:
        """Run it in a process that imports what it needs."""
        return Ended(self.pytester.run(*self.command(source, *args, ranks=ranks, head=head), **how))

    def command(
        self, source: str, *args: str, ranks: int | None = 4, head: str = _HEAD
    ) -> list[str]:
        """The command line of a process of its own."""
        self.write(source, head)
        return [*map(str, self.pytester._getpytestargs()), *self._arguments(ranks, args)]

    def write(self, source: str, head: str = _HEAD) -> None:
        """Write the test file alone."""
        self.pytester.makepyfile(test_it=head + textwrap.dedent(source))

    def line_of(self, text: str) -> str:
        """``test_it.py:NN``, where the one line with this text stands."""
        lines = self.pytester.path.joinpath("test_it.py").read_text().splitlines()
        (number,) = [number for number, line in enumerate(lines, 1) if text in line]
        return f"test_it.py:{number}"

    @staticmethod
    def _arguments(ranks: int | None, args: tuple[str, ...]) -> list[str]:
        number = [] if ranks is None else [f"--smp-ranks={ranks}"]
        return ["-p", "no:cacheprovider", *number, *args]


@pytest.fixture(scope="session")
def _modules() -> None:
    for name in _STAY:
        importlib.import_module(name)


@pytest.fixture
def session(
    _modules: None,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    apart_pytest: Callable[..., pytest.RunResult],
) -> Iterator[Session]:
    """Runs pytest apart from this project's settings; examples depend neither on chance nor on
    earlier runs.
    """
    for name in ("PYTEST_ADDOPTS", "SM_HP_MP_PARAMETERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pytester.makeconftest(_CALM)
    profile = settings.get_current_profile_name()
    yield Session(pytester, apart_pytest)
    settings.load_profile(profile)
