"""Marked tests on rank processes: the same tests as on `sim`, and what only processes can do."""

from __future__ import annotations

import re

import pytest

HELPER = """
    import threading
    lock = threading.Lock()  # cannot be copied

    class Colour:
        def __init__(self, name):
            self.name = name
        def __eq__(self, other):
            return type(other) is Colour and self.name == other.name
"""

CONFTEST = """
    import pytest
    from pytest_smp.ranks.processes import run
    run._GRACE = 60.0  # nobody here goes on after a failure, and a busy machine may be slow to end
    from helper import Colour

    @pytest.fixture
    def colour():
        return Colour("green")

    def pytest_assertrepr_compare(op, left, right):
        if isinstance(left, Colour) and isinstance(right, Colour):
            return [f"colours differ: {left.name} {op} {right.name}"]
"""

TESTS = """
    import os, signal, sys, threading, time
    import pytest
    import torch
    import torch.distributed as dist
    from hypothesis import given, settings, strategies as st
    import smp_core.torch as api
    from helper import Colour, lock

    seen = []
    guard = threading.Lock()

    class Point:
        def __init__(self, x):
            self.x = x
        def __eq__(self, other):
            return type(other) is Point and self.x == other.x
        def __repr__(self):
            return f"Point({self.x})"

    @pytest.mark.smp(ranks=3)
    def test_classes_are_one(smp, colour):
        with lock, guard:
            assert type(colour) is Colour
            assert smp.allgather(Point(smp.rank()), smp.WORLD)[2] == Point(2)
        seen.append(1)

    @pytest.mark.smp(ranks=2)
    def test_globals_stay(smp):
        assert seen == [1]

    @pytest.mark.smp(ranks=2, fresh=True)
    @given(number=st.integers())
    @settings(max_examples=3)
    def test_fresh(smp, number):
        assert 1 not in seen
        seen.append(2)

    @pytest.mark.smp(ranks=2)
    def test_fresh_once(smp):
        assert seen == [2, 2, 2]

    @pytest.mark.smp(ranks=[1, 2, 3], pipeline_parallel_degree=1)
    @given(points=st.lists(st.builds(Point, st.integers(0, 3)), min_size=1))
    @settings(max_examples=5)
    def test_property(smp, points):
        assert all(each == points for each in smp.allgather(points, smp.WORLD))

    class TestMethods:
        def setup_method(self):
            self.value = 5

        @pytest.mark.smp(ranks=2)
        def test_self(self, smp, smp_tmp_path):
            assert self.value == 5
            (smp_tmp_path / str(smp.rank())).touch()
            smp.barrier()
            assert sorted(each.name for each in smp_tmp_path.iterdir()) == ["0", "1"]

    @pytest.mark.smp(ranks=2)
    def test_skip(smp):
        pytest.skip("does not apply")

    @pytest.mark.smp(ranks=2)
    @pytest.mark.xfail(reason="expected", raises=ZeroDivisionError)
    def test_xfail(smp):
        1 / (smp.rank() - smp.rank())

    def test_world(smp_world):
        base = [4]
        def body(x):
            return base[0] + x + api.rank(), Point(1)
        assert smp_world.run(body, 10, ranks=2) == [(14, Point(1)), (15, Point(1))]

    @pytest.mark.smp(ranks=3)
    def test_diff(smp):
        left = [0, 1, smp.rank()]
        assert left == [0, 1, 0 if smp.rank() < 2 else 7]

    @pytest.mark.smp(ranks=2)
    def test_own_diff(smp, colour):
        assert colour == Colour("red")

    @pytest.mark.smp(ranks=3)
    @given(numbers=st.lists(st.integers(), min_size=3, max_size=3))
    def test_crash(smp, numbers):
        if smp.rank() == 0 and numbers[0] > 100:
            os.kill(os.getpid(), signal.SIGSEGV)
        smp.barrier()

    @pytest.mark.smp(ranks=2)
    @given(loops=st.booleans())
    def test_hang(smp, loops):
        while smp.rank() == 1 and loops:
            time.sleep(0.01)
        smp.barrier()

    @pytest.mark.smp(ranks=2)
    @given(data=st.data())
    def test_data(smp, data):
        pass

    @pytest.mark.smp(ranks=2)
    def test_print(smp):
        print("hello from", smp.rank())
        smp.barrier()  # a rank that has not printed yet would be ended by the other's failure
        assert False

    @pytest.mark.smp(ranks=2)
    def test_death_before_any_call(smp):
        if smp.rank():
            os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.smp(ranks=3)
    def test_next_is_green(smp):
        assert dist.get_world_size() == 3
        smp.barrier()
"""


@pytest.fixture
def folder(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(helper=HELPER)
    pytester.makepyfile(test_processes=TESTS)
    return pytester


@pytest.mark.parametrize(
    "arguments",
    [(), ("--import-mode=importlib", "-o", "pythonpath=.", "-n", "2", "--dist=loadfile")],
    ids=["prepend", "importlib with xdist"],
)
def test_tests_behave_as_on_sim(folder, apart_pytest, arguments):
    result = apart_pytest(
        "--smp-ranks=3",
        "--smp-backend=gloo",
        "--smp-timeout=30",
        "-p",
        "no:cacheprovider",
        "-vv",
        *arguments,
    )
    text = result.stdout.str()
    assert result.parseoutcomes() == {"passed": 10, "skipped": 1, "xfailed": 1, "failed": 7}, text
    assert "traceback entries are hidden" not in text
    for expected in (
        # pytest's own explanation, and a conftest's
        r"E +assert \[0, 1, 1\] == \[0, 1, 0\]\nE +\nE +At index 2 diff: 1 != 0",
        r"raised by rank 1 of 3 ranks \(gloo\); rank 2: the same line, other values",
        "colours differ: green == red",
        r"rank 0 crashed: killed by SIGSEGV \(signal 11\)",
        r"numbers=\[101, 0, 0\],\n",
        r"StuckError: timeout: the run did not end within .* s",
        r"rank 1 never came back\n +.*\n +(while|time.sleep)",
        r"loops=True,\n",
        r"argument 'data' is st.data\(\), which draws in the controller",
        r"Captured stdout \(rank 1\) .*\nhello from 1\n",
    ):
        assert re.search(expected, text), (expected, text)
