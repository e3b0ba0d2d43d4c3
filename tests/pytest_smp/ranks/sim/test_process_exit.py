"""The end of the process, asked for on one rank of `sim`: a crash of that rank, and never a pass."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from pytest_smp.ranks.protocols import OutcomeKind, VerdictKind
from smp_core.errors import CrashError

STATUSES = st.sampled_from([None, 0, False, "", 0.0, -1, 256, 1, "why"])
EXITS = {
    "sys.exit": sys.exit,
    "quit": lambda status: quit(status),
    "raise": lambda status: (_ for _ in ()).throw(SystemExit(status)),
}


@given(data=st.data(), ranks=st.integers(1, 3))
def test_no_status_makes_a_run_pass(smp_world: Any, data: Any, ranks: int) -> None:
    leave = EXITS[data.draw(st.sampled_from(sorted(EXITS)))]
    status, who = data.draw(STATUSES), data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))

    def body() -> None:
        if dist.get_rank() in who:
            leave(status)

    report = smp_world.report(body, ranks=ranks)
    assert report.verdict is VerdictKind.FAILED
    assert isinstance(report.error, SystemExit)
    assert report.root in who


ENDS = {
    "exit 0": (lambda: os._exit(0), "exit code 0 by os._exit"),
    "exit 3": (lambda: os._exit(status=3), "exit code 3 by os._exit"),
    "exec": (lambda: os.execl("/bin/true", "true"), "replaced by /bin/true by os.execv"),
    "exec in a path": (lambda: os.execvpe("true", ["true"], {}), r"replaced by .*true"),
}


@pytest.mark.parametrize("caught", [False, True], ids=["", "caught"])
@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_the_process_is_a_crash_of_the_rank(
    smp_world: Any, end: str, caught: bool
) -> None:
    call, said = ENDS[end]

    def body() -> None:
        with contextlib.suppress(BaseException) if caught else contextlib.nullcontext():
            if dist.get_rank() == 1:
                call()
        dist.barrier()

    report = smp_world.report(body, ranks=3)
    assert report.verdict is VerdictKind.CRASHED
    assert isinstance(report.error, CrashError)
    assert report.error.args[0].startswith("rank 1 crashed: ")
    assert re.search(said, str(report.error))
    assert (report.root, report.outcomes[1].kind) == (1, OutcomeKind.CRASHED)
    assert "test_process_exit.py:" in str(report.error)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_the_process_ends_its_rank(smp_world: Any) -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            thread = threading.Thread(target=os._exit, args=(0,), name="saver")
            thread.start()
            thread.join()
        dist.barrier()

    report = smp_world.report(body, ranks=2)
    assert report.verdict is VerdictKind.CRASHED
    assert "rank 1 crashed: exit code 0 by os._exit in thread 'saver'" in str(report.error)


def test_a_forked_child_ends_itself(smp_world: Any) -> None:
    def body() -> int:
        child = os.fork()
        if child == 0:
            os._exit(3)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert smp_world.run(body, ranks=2) == [3, 3]
