"""Mismatches and deadlocks say where the ranks parted, and which of them came to a line more often."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session

TESTS = """
    @pytest.mark.smp(ranks=3)
    def test_branch(smp):
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        if smp.rank() == 0:
            dist.all_reduce(torch.ones(2))  # the branch
        dist.all_reduce(torch.ones(2))  # of all
        dist.barrier()

    @pytest.mark.smp(ranks=3)
    def test_branch_of_objects(smp):
        smp.barrier()
        if smp.rank() == 2:
            smp.allgather(1, smp.WORLD)  # the object's branch
        smp.allgather(1, smp.WORLD)  # objects of all

    @pytest.mark.smp(ranks=3)
    def test_uneven_batches(smp):
        for _ in range(3 + (smp.rank() == 1)):
            work = dist.all_reduce(torch.ones(2), async_op=True)  # a batch
            work.wait()

    @pytest.mark.smp(ranks=3)
    def test_uneven_objects(smp):
        for _ in range(1 + smp.rank()):
            smp.barrier()  # a turn

    @pytest.mark.smp(ranks=3)
    def test_roots_have_lines_of_their_own(smp):
        if smp.rank() == 0:
            dist.broadcast(torch.ones(2), 0)
        else:
            dist.broadcast(torch.zeros(2), 0)
        if smp.rank() == 1:
            dist.barrier()
"""


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_verdicts_tell_where_ranks_parted(session: Session, backend: str) -> None:
    ended = session(TESTS, f"--smp-backend={backend}", ranks=3)
    assert ended.counts == {"failed": 5}, ended.text
    line = session.line_of
    ended = ended.end
    shown = {
        "test_branch": (
            "CollectiveMismatchError",
            "on group WORLD calls 1 to 3 matched from the same lines; at call 4 ",
            f"rank 0 was at {line('# the branch')}, ranks 1-2 were at {line('# of all')}",
        ),
        "test_branch_of_objects": (
            "DeadlockError",
            "on group WORLD call 1 matched from the same lines; at call 2 ",
            f"ranks 0-1 were at {line('# objects of all')}, rank 2 was at {line('# the object')}",
        ),
        "test_uneven_batches": (
            "DeadlockError",
            f"{line('# a batch')} communicated 3 times on ranks 0, 2 and 4 times on rank 1",
        ),
        "test_uneven_objects": (
            f"{line('# a turn')} communicated once on rank 0 and 2 times on ranks 1-2",
        ),
    }
    for name, texts in shown.items():
        part = ended.partition(f"test_it.py::{name}\n")[2].partition("\ntest_it.py::")[0]
        for text in texts:
            assert text in part, (name, text, part)
    rest = ended.partition("test_roots_have_lines_of_their_own\n")[2]
    assert "DeadlockError" in rest
    assert "matched from" not in rest
    assert "communicated" not in rest
