"""Marked tests that fail: which rank is named, what the others did, and the user's line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Ended, Session


def failed(ended: Ended, *texts: str) -> None:
    """Assert that one test failed with these texts, and that no line of ours is in its traceback."""
    assert ended.counts.get("failed") == 1
    assert ended.code == pytest.ExitCode.TESTS_FAILED
    ended.shows(*texts)
    ended.hides_ours()


def test_one_rank_raises(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            smp.allgather(0, smp.WORLD)
            if smp.rank() == 2:
                raise ValueError("bad weight")
            smp.barrier()

        @pytest.mark.smp
        def test_next(smp):
            assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1, 2, 3]
        """
    )
    failed(
        ended,
        '>           raise ValueError("bad weight")',
        "E           ValueError: bad weight",
        "raised by rank 2 of 4 ranks (sim)",
        f"{session.line_of('raise ValueError')}: ValueError",
    )
    assert ended.counts["passed"] == 1
    ended.hides("the same")
    assert "ValueError: bad weight" in ended.end
    assert f"{session.line_of('raise ValueError')}: raise ValueError" in ended.end
    assert "raised by rank 2 of 4 ranks (sim)" in ended.end
    assert "ranks 0-1, 3: cancelled because of rank 2" in ended.end


def test_all_ranks_raise_the_same(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            raise ValueError("bad weight")
        """
    )
    failed(
        ended,
        "ValueError: bad weight",
        "raised by rank 0 of 4 ranks (sim); ranks 1-3: the same",
    )
    assert ended.text.count('>       raise ValueError("bad weight")') == 1


def test_ranks_raise_at_the_same_line_with_other_values(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            parity = smp.rank() % 2
            assert parity == 2
        """
    )
    failed(
        ended,
        "assert 0 == 2",
        "raised by rank 0 of 4 ranks (sim); rank 2: the same; ranks 1, 3: the same line, other values",
    )


def test_ranks_raise_different_errors(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() == 0:
                raise ValueError("bad weight")
            if smp.rank() in (1, 2):
                {}["no such key"]
        """
    )
    failed(ended, "ValueError: bad weight", "raised by rank 0 of 4 ranks (sim)")
    key = session.line_of('{}["no such key"]')
    assert f"ranks 1-2: raised: KeyError: 'no such key' ({key})" in ended.end
    assert "rank 3: returned" in ended.end
    ended.hides("ExceptionGroup")


def test_an_error_deep_in_the_users_code_keeps_its_whole_stack(session: Session) -> None:
    ended = session(
        """
        def outer(smp):
            inner(smp.rank())

        def inner(rank):
            if rank == 1:
                raise LookupError("deep")

        @pytest.mark.smp
        def test_x(smp):
            outer(smp)
        """
    )
    failed(
        ended, ">       outer(smp)", "inner(smp.rank())", '>           raise LookupError("deep")'
    )
    ended.shows("raised by rank 1 of 4 ranks (sim)", "ranks 0, 2-3: returned")


def test_an_error_inside_a_library_is_summed_up_by_the_users_line(session: Session) -> None:
    ended = session(
        """
        import json

        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() == 1:
                json.loads("{")
        """
    )
    failed(
        ended, '>           json.loads("{")', "JSONDecodeError", "raised by rank 1 of 4 ranks (sim)"
    )
    assert f"{session.line_of('json.loads')}: json.loads" in ended.end


def test_an_error_with_a_cause_shows_it(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            try:
                {}["weight"]
            except KeyError as error:
                raise RuntimeError("no weight") from error
        """
    )
    failed(
        ended,
        "KeyError: 'weight'",
        "direct cause",
        "RuntimeError: no weight",
        "ranks 1-3: the same",
    )


def test_one_rank_alone_says_so_without_a_plural(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=1)
        def test_x(smp):
            assert smp.size() == 2
        """
    )
    failed(ended, "raised by rank 0 of 1 rank (sim)")


def test_ranks_wait_for_one_that_returned(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() != 1:
                smp.barrier()
        """
    )
    place = session.line_of("smp.barrier()")
    failed(
        ended,
        ">           smp.barrier()",
        "DeadlockError: deadlock: 3 of 4 ranks wait, and none can go on",
        "ranks 0, 2-3 wait in smp.barrier() [group WORLD, call 1] for rank 1",
        f"{place} in test_x:  smp.barrier()",
        "rank 1 has returned",
        "wait-for: rank 0 waits for rank 1, which has returned without a matching call",
        "verdict: deadlock (4 ranks, sim)",
    )
    assert "DeadlockError: deadlock: 3 of 4 ranks wait" in ended.end
    assert f"{place}: smp.barrier()" in ended.end


def test_ranks_wait_in_a_cycle(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            smp.recv_from((smp.rank() + 1) % smp.size(), smp.RankType.WORLD_RANK)
        """
    )
    failed(
        ended,
        "DeadlockError: deadlock: 4 of 4 ranks wait, and none can go on",
        "rank 0 waits in smp.recv_from(world rank 1) for rank 1",
        "rank 3 waits in smp.recv_from(world rank 0) for rank 0",
        "wait-for cycle: rank 0 -> rank 1 -> rank 2 -> rank 3 -> rank 0",
    )


def test_two_ranks_both_send_first(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        def test_x(smp):
            smp.send("mine", 1 - smp.rank(), smp.RankType.WORLD_RANK)
            smp.recv_from(1 - smp.rank(), smp.RankType.WORLD_RANK)
        """
    )
    failed(
        ended,
        "rank 0 waits in smp.send(world rank 1) for rank 1",
        "wait-for cycle: rank 0 -> rank 1 -> rank 0",
        "hint: smp.send returns after the matching smp.recv_from",
    )


def test_broadcast_on_the_receivers_too(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            smp.broadcast("weights" if smp.rank() == 0 else None, smp.WORLD)
        """
    )
    failed(
        ended,
        "DeadlockError: deadlock: 4 of 4 ranks wait",
        "smp.broadcast(group WORLD)",
        "hint: smp.broadcast is called by the root alone; the receivers call smp.recv_from",
    )


def test_ranks_call_collectives_in_different_order(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() == 3:
                smp.barrier()
                smp.allgather(1, smp.WORLD)
            else:
                smp.allgather(1, smp.WORLD)
                smp.barrier()
        """
    )
    failed(
        ended,
        "CollectiveMismatchError: mismatch: call 1 on group WORLD differs in operation",
        "ranks 0-2: smp.allgather()",
        "in test_x:  smp.allgather(1, smp.WORLD)",
        "rank 3: smp.barrier()",
        "in test_x:  smp.barrier()",
        "verdict: mismatch (4 ranks, sim)",
    )


def test_ranks_disagree_on_the_shape_of_a_tensor(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x():
            dist.all_reduce(torch.ones(3 + dist.get_rank() // 3))
        """
    )
    failed(
        ended,
        "CollectiveMismatchError: mismatch: call 1 on group WORLD differs in",
        "ranks 0-2: all_reduce(",
        "[3]",
        "rank 3: all_reduce(",
        "[4]",
    )


_LEAKS = {
    "was never matched": """
        if dist.get_rank() == 1:
            dist.isend(torch.ones(2), 0)
    """,
    "was never joined by rank": """
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(2), async_op=True)
    """,
    "was never waited for": """
        dist.all_reduce(torch.ones(2), async_op=dist.get_rank() == 1)
    """,
}


@pytest.mark.parametrize("leak", _LEAKS)
def test_a_leak_names_rank_call_and_line(session: Session, leak: str) -> None:
    ended = session(f"@pytest.mark.smp(ranks=2)\ndef test_x():\n{_LEAKS[leak]}")
    failed(ended, "LeakError: leak: the run left something behind", "rank 1: ", leak)
    call = "dist.isend" if "isend" in _LEAKS[leak] else "dist.all_reduce"
    ended.shows("rank 1: ", f"{session.line_of(call)} in test_x:  {call}(torch.ones(2)")
    assert "verdict: leak (2 ranks, sim)" in ended.end


def test_a_value_that_a_rank_returns_warns_as_in_a_plain_test(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            return smp.rank() == 2 or None
        """
    )
    assert ended.counts == {"passed": 1, "warnings": 1}
    ended.shows("PytestReturnNotNoneWarning: ", "test_it.py::test_x returned bool on a rank")


def test_sys_exit_on_a_rank_fails_the_test_and_nothing_more(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() == 1:
                sys.exit(3)
            smp.barrier()

        @pytest.mark.smp
        def test_next(smp):
            smp.barrier()
        """
    )
    failed(ended, "SystemExit: 3", "raised by rank 1 of 4 ranks (sim)")
    assert ended.counts["passed"] == 1


def test_pytest_exit_on_a_rank_ends_the_session(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp):
            smp.barrier()
            if smp.rank() == 1:
                pytest.exit("enough", returncode=7)

        def test_never(): pass
        """
    )
    assert ended.code == 7
    ended.shows("_pytest.outcomes.Exit: enough")
    ended.hides_ours("passed")


def test_many_failures_end_with_a_list_that_is_cut(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        @pytest.mark.parametrize("number", range(13))
        def test_x(smp, number):
            assert number < 0
        """
    )
    assert ended.counts == {"failed": 13}
    assert ended.end.count("raised by rank 0 of 2 ranks (sim); rank 1: the same") == 10
    assert "and 3 more" in ended.end


def test_a_failure_stands_below_all_captured_output(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=3)
        def test_x(smp):
            print("\\n".join(f"line {number}" for number in range(200)))
            assert smp.rank() != 1
        """
    )
    failed(ended, "Captured stdout (rank 0) call", "line 199", "Captured stdout (rank 2) call")
    assert "line 199" not in ended.end
    assert "assert 1 != 1" in ended.end
    assert "raised by rank 1 of 3 ranks (sim)" in ended.end
