"""Correct properties hold on a slow machine. Its slowness is made up: a clock that Hypothesis reads,
and that steps forward whenever something happens that a slow or busy machine takes long for.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING

import hypothesis
import pytest

from pytest_smp.ranks.sim.executor import ThreadExecutor

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session

#: Every import, start of a thread and search for constants takes ten seconds. Those within an
#: example or its drawing are written down.
_SLOW = """
    import importlib.abc, sys, threading, time
    import hypothesis.internal.conjecture.providers as providers
    from hypothesis import currently_in_test_context

    ahead = 0.0
    late = []  # what happened in examples
    time.perf_counter = lambda: ahead  # a machine at work is slow, too, and nobody's fault

    def takes_long(what):
        global ahead
        ahead += 10
        if currently_in_test_context():
            late.append(what)

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            takes_long(f"import {name}")

    sys.meta_path.insert(0, Finder())

    start = threading.Thread.start
    def slow_start(self):
        takes_long(f"start {self.name}")
        start(self)
    threading.Thread.start = slow_start

    search = providers.constants_from_module
    def slow_search(module, **how):
        takes_long(f"search {module.__name__}")
        return search(module, **how)
    providers.constants_from_module = slow_search
"""

#: Nothing here imports torch.
_HEAD = """
import hypothesis
import pytest
from hypothesis import given, settings, strategies as st
import slow

drawn = given(objects=st.lists(st.integers(), min_size=8, max_size=8), number=st.floats())
"""

_MARKED = """
        @pytest.mark.smp
        @settings(SETTINGS)
        @drawn
        def test_property(smp, objects, number):
            assert smp.allgather(objects[smp.rank()], smp.WORLD) == objects
"""

_SMP_WORLD = """
        def gather(objects):
            import smp_core.torch as smp
            return smp.allgather(objects[smp.rank()], smp.WORLD)

        @settings(SETTINGS)
        @drawn
        def test_property(smp_world, objects, number):
            assert smp_world.run(gather, objects) == [objects] * 8
"""

_DDP = """
        @pytest.mark.smp
        @settings(SETTINGS)
        @drawn
        def test_property(smp, objects, number):
            import torch
            module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
            module(torch.ones(1)).sum().backward()
"""


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        (_MARKED, "max_examples=100"),
        (_MARKED, "deadline=200"),
        (_SMP_WORLD, "max_examples=100"),
        (_SMP_WORLD, "deadline=200"),
        (_DDP, "deadline=200, max_examples=10"),
    ],
    ids=["marked", "marked, deadline", "smp_world", "smp_world, deadline", "DDP, deadline"],
)
def test_all_is_ready_before_the_first_example(
    session: Session, source: str, settings: str
) -> None:
    """A property holds although all that happens once takes ten seconds: with the default deadline,
    and with one that its author insists on, which is in force from the first example on.
    """
    session.pytester.makepyfile(slow=_SLOW)
    session.pytester.makeconftest("import slow")
    source = source.replace("SETTINGS", settings)
    source += """
        def test_nothing_was_late():
            assert slow.late == []
"""
    ended = session.anew(source, ranks=8, head=_HEAD)
    assert ended.counts == {"passed": 2}


@pytest.fixture(scope="module")
def _torchs() -> None:
    """Imported before pytester notes what to remove again: torch cannot be imported twice."""
    importlib.import_module("torch._dynamo")


class _Clock:
    """Stands in for time.perf_counter."""

    def __init__(self) -> None:
        self.ahead, self._read = 0.0, time.perf_counter

    def __call__(self) -> float:
        return self._read() + self.ahead


_SLOW_EXAMPLES = """
        import time

        def takes_long():
            time.perf_counter.ahead += 10

        @pytest.mark.smp(ranks=2)
        @settings(SETTINGS)
        @given(number=st.integers())
        def test_marked(smp, number):
            takes_long()

        class Test:
            @pytest.mark.smp(ranks=2)
            @settings(SETTINGS)
            @given(number=st.integers())
            def test_method(self, smp, number):
                takes_long()

        @settings(SETTINGS)
        @given(number=st.integers())
        def test_smp_world(smp_world, number):
            smp_world.run(takes_long, ranks=2)
"""

_PROFILE = """
from hypothesis import settings
settings.register_profile("ours", PROFILE)
settings.load_profile("ours")
"""


@pytest.mark.usefixtures("_torchs")
@pytest.mark.parametrize("processes", [False, True], ids=["sim", "rank processes"])
@pytest.mark.parametrize(
    ("settings", "profile", "asked"),
    [
        ("max_examples=20", None, False),
        ("deadline=None", None, False),
        ("max_examples=20", "print_blob=True", False),
        ("max_examples=20", "deadline=None", False),
        ("deadline=None", "deadline=200", False),
        ("deadline=100", None, True),
        ("deadline=200", None, True),  # the number that is Hypothesis's default
        ("max_examples=20", "deadline=100", True),
        ("max_examples=20", "deadline=200", True),
    ],
)
def test_a_deadline_is_in_force_if_somebody_asked_for_it(
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    settings: str,
    profile: str | None,
    asked: bool,
    processes: bool,
) -> None:
    """And on rank processes none, for an example may wait for ranks that are started or replaced."""
    monkeypatch.setattr(time, "perf_counter", _Clock())
    monkeypatch.setattr(ThreadExecutor, "steady", not processes, raising=False)
    session.pytester.makeconftest("" if profile is None else _PROFILE.replace("PROFILE", profile))
    if profile is None:
        hypothesis.settings.load_profile("default")
    ended = session(_SLOW_EXAMPLES.replace("SETTINGS", settings))
    assert ended.counts == {"failed" if asked and not processes else "passed": 3}
