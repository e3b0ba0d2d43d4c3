"""The code of programs: it reads as expected, runs alone, and is what a failing test prints."""

from __future__ import annotations

import linecache
import re
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import smp_core.torch as api
from pytest_smp.ranks.protocols import Report
from pytest_smp.strategies import invalid_programs, programs
from pytest_smp.strategies.communication import InvalidProgram, Lie, Program, ProgramFault
from pytest_smp.strategies.communication.code import FILENAME
from pytest_smp.strategies.communication.program import Runnable
from smp_core.errors import ArgumentError

Make = Callable[..., Program]
Run = Callable[[Runnable], Report]


def body(program: Runnable) -> str:
    """The code below ``rank = ...``, without indentation."""
    _, _, text = program.code().partition("    rank = dist.get_rank()\n")
    return textwrap.dedent(text)


def test_code_of_several_calls_in_full(program: Make) -> None:
    made = program(
        3,
        {"operation": "all_reduce", "reduce_op": "SUM", "lags": (1, 1, 0)},
        {"operation": "gather", "group": "g1", "root": 0, "dtype": "int8", "shape": (2,)},
        {"operation": "send", "root": 2, "peer": 1, "tag": 2, "output": Lie("strided", 1)},
        {"operation": "smp.send", "group": "WORLD", "root": 1, "peer": 0},
        g1=(2, 0),
    )
    assert body(made) == textwrap.dedent("""\
        g1 = dist.new_group([2, 0], sort_ranks=False)

        v0 = {0: [1.0], 1: [2.0], 2: [3.0]}[rank]
        x0 = laid(v0, torch.float32, (1,))
        w0 = dist.all_reduce(x0, op=dist.ReduceOp.SUM, async_op=True)
        if rank == 2:
            w0.wait()
            check(x0, [6.0])

        if rank in (0, 2):
            v1 = {0: [22, 25], 2: [24, 27]}[rank]
            x1 = laid(v1, torch.int8, (2,))
        if rank == 0:
            y1 = [laid(None, torch.int8, (2,)) for _ in range(2)]
            dist.gather(x1, y1, dst=0, group=g1)
        if rank == 2:
            dist.gather(x1, None, dst=0, group=g1)
        if rank == 0:
            check(y1, [[24, 27], [22, 25]])
        if rank in (0, 2):
            check(x1, v1)
        if rank in (0, 1):
            w0.wait()
            check(x0, [6.0])

        if rank == 1:
            y2 = laid(None, torch.float32, (1,), (2,), offset=1)
            dist.recv(y2, 2, tag=2)
            check(y2, [45.010986328125])
        if rank == 2:
            v2 = [45.010986328125]
            x2 = laid(v2, torch.float32, (1,))
            dist.send(x2, 1, tag=2)
            check(x2, v2)

        if rank == 0:
            y3 = smp.recv_from(1, smp.RankType.WORLD_RANK)
            check_object(y3, 31)
        if rank == 1:
            v3 = 31
            smp.send(v3, 0, smp.RankType.WORLD_RANK)

        if rank in (0, 2):
            dist.destroy_process_group(g1)
        """)


def test_code_runs_alone_by_pytest(
    program: Make, tmp_path: Path, apart_pytest: Callable[..., pytest.RunResult]
) -> None:
    valid = program(
        2,
        {"operation": "all_to_all_single", "rows": ((1, 2), (0, 3)), "dtype": "complex64"},
        {"operation": "smp.allgather", "group": "WORLD"},
    )
    invalid = InvalidProgram(valid, ProgramFault("missing call", 1, 1))
    for name, each in (("valid", valid), ("invalid", invalid)):
        (tmp_path / f"test_{name}.py").write_text(each.code(), encoding="utf-8")
    done = apart_pytest("-q", "-p", "no:cacheprovider", "-W", "error", folder=tmp_path)
    assert done.parseoutcomes() == {"failed": 1, "passed": 1}
    (line,) = invalid.truth.lines
    assert "DeadlockError" in str(done.stdout)
    assert f"test_invalid.py:{line} in test_program" in str(done.stdout)


def test_every_call_and_wait_has_a_line_of_its_own(program: Make) -> None:
    made = program(
        2,
        {"operation": "barrier", "lags": (0, 0)},
        {"operation": "batch_isend_irecv", "shift": 1, "lags": (0, 0)},
        {"operation": "send", "root": 0, "peer": 1},
    )
    lines = made.code().splitlines()
    shown = {
        (rank, action.what, action.step.operation): lines[
            made._printed.lines[rank, action.slot] - 1
        ].strip()
        for rank, plan in enumerate(made.plans)
        for action in plan
    }
    assert shown[0, "call", "barrier"] == "w0 = dist.barrier(async_op=True)"
    assert shown[1, "wait", "barrier"] == "w0.wait()"
    assert shown[1, "wait", "batch_isend_irecv"] == "for work in w1: work.wait()"
    assert shown[0, "call", "send"] == "dist.send(x2, 1)"
    assert shown[1, "call", "send"] == "dist.recv(y2, 0)"


def test_a_failing_property_prints_the_program_as_a_test_file(
    pytester: Any, apart_pytest: Callable[..., pytest.RunResult]
) -> None:
    pytester.makepyfile(
        """
        from hypothesis import given, settings, HealthCheck
        from pytest_smp.strategies import programs

        @settings(database=None, deadline=None, derandomize=True, max_examples=300)
        @given(program=programs())
        def test_fails(program):
            assert not any(step.operation == "reduce" for step in program.steps)
        """
    )
    done = apart_pytest("-q", "-p", "no:cacheprovider")
    text = "\n".join(line.removeprefix("E       ") for line in done.outlines)
    code = text[text.index("import pytest\n") : text.index("check(x0, [1.0])")] + "check(x0, [1.0])"
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert callable(namespace["test_program"])
    assert "dist.reduce(x0, dst=0, op=dist.ReduceOp.SUM)" in code
    assert "ranks=1" in code


def test_tracebacks_show_the_program_that_ran_last(program: Make, report: Run) -> None:
    for calls in (1, 2):
        made = program(1, *[{"operation": "barrier"}] * calls)
        report(made)
        assert "".join(linecache.getlines(FILENAME)) == made.code()


def test_an_error_of_one_rank_names_its_line(
    program: Make, report: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise ArgumentError("planted")

    monkeypatch.setattr(dist, "barrier", refused)
    failed = report(program(1, {"operation": "barrier"}))
    assert isinstance(failed.error, ArgumentError)
    (note,) = failed.error.__notes__
    assert re.fullmatch(r"in <program>:\d+:  dist\.barrier\(\)", note)


@pytest.mark.parametrize("kind", ["values", "objects", "deadlocks", "refusals"])
def test_one_bug_is_one_failure(
    drawn: Callable[..., list[Any]], report: Run, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many programs it breaks, in whichever lines. Hypothesis tells failures apart by the
    last line of the traceback, and would shrink each by itself.
    """

    def refused(*args: Any, **kwargs: Any) -> None:
        raise ArgumentError("planted")

    strategy: Any = programs(max_ranks=4)
    if kind == "values":
        real = dist.broadcast
        monkeypatch.setattr(
            dist, "broadcast", lambda x, *args, **kwargs: real(x.clone(), *args, **kwargs)
        )
    elif kind == "objects":
        for name in ("recv_from", "send", "broadcast"):
            monkeypatch.setattr(api, name, lambda *args: None)
    elif kind == "deadlocks":
        strategy = invalid_programs(max_ranks=4, faults=("wrong tag",))
    else:
        monkeypatch.setattr(dist, "all_reduce", refused)
    errors = [error for each in drawn(strategy, 60) if (error := report(each).error) is not None]
    last = [traceback.extract_tb(error.__traceback__)[-1] for error in errors]
    assert len(errors) > 3
    assert (
        len(
            {
                (type(error), frame.filename, frame.lineno)
                for error, frame in zip(errors, last, strict=True)
            }
        )
        == 1
    )


def test_the_examples_of_the_documentation_pass(
    tmp_path: Path, apart_pytest: Callable[..., pytest.RunResult]
) -> None:
    page = Path(__file__).parents[4] / "docs/programs.md"
    examples = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    assert len(examples) == 3
    # Few, the same ones, and however loaded the machine is.
    (tmp_path / "conftest.py").write_text(
        "from hypothesis import HealthCheck, settings\n"
        "settings.register_profile('few', max_examples=20, derandomize=True, "
        "suppress_health_check=list(HealthCheck))\n"
        "settings.load_profile('few')\n",
        "utf-8",
    )
    for number, example in enumerate(examples):
        (tmp_path / f"test_{number}.py").write_text(example, encoding="utf-8")
    done = apart_pytest("-q", "-p", "no:cacheprovider", "-W", "error", folder=tmp_path)
    assert done.parseoutcomes() == {"passed": 3}


def test_the_code_of_the_documentation_is_what_is_printed(program: Make) -> None:
    page = (Path(__file__).parents[4] / "docs/programs.md").read_text("utf-8")
    call = {"operation": "all_to_all_single", "rows": ((1, 1), (1, 1)), "group": "g1"}
    text = program(2, call, g1=(1, 0)).code()
    assert text[text.index("@pytest") :] in page
