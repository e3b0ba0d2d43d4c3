"""The root cause among drawn candidates: the same in whichever order they come, a cause before its consequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption

from pytest_smp.ranks.causes import Cause, origin_of, root_cause, verdict_of
from pytest_smp.ranks.protocols import VerdictKind
from smp_core.errors import (
    CollectiveMismatchError,
    CrashError,
    DeadlockError,
    RankError,
    StepAbortedError,
)


def _told(rank: int) -> StepAbortedError:
    error = StepAbortedError(f"because rank {rank} raised")
    error.raised_by = rank
    return error


#: One of each kind, what can be the cause of another before that one.
CHAIN = [
    Cause(VerdictKind.MISMATCH, 5, CollectiveMismatchError("calls differ"), by_records=True),
    Cause(VerdictKind.CRASHED, 4, CrashError("killed")),
    Cause(VerdictKind.FAILED, 3, ValueError("its own")),
    Cause(VerdictKind.FAILED, 2, _told(3)),
    Cause(VerdictKind.FAILED, 1, UnsatisfiedAssumption()),
    Cause(VerdictKind.FAILED, 0, RuntimeError("connection closed by peer"), in_call=True),
    Cause(VerdictKind.DEADLOCK, 0, DeadlockError("ranks wait"), by_records=True),
]


@given(st.lists(st.sampled_from(CHAIN), min_size=1, unique_by=id))
def test_a_cause_comes_before_what_can_follow_from_it(causes):
    assert root_cause(causes) is CHAIN[min(map(CHAIN.index, causes))]


@given(st.permutations([Cause(VerdictKind.FAILED, rank, ValueError(rank)) for rank in range(3)]))
def test_of_equal_causes_the_first_counts(causes):
    assert root_cause(causes) is causes[0]


def test_no_candidate_is_no_cause():
    assert root_cause([]) is None


def test_a_rank_that_is_not_there_explains_no_error():
    """The records of a message to nobody prove less than what a rank has raised."""
    stray = Cause(VerdictKind.FAILED, 0, RankError("no rank 9"), by_records=True)
    assert root_cause([stray, CHAIN[2]]) is CHAIN[2]


def test_an_error_tells_of_another_rank_only_where_it_was_told():
    assert (origin_of(_told(3), 0), origin_of(_told(3), 3)) == (3, None)
    assert origin_of(ValueError(), 0) is None
    assert verdict_of(_told(3)) is VerdictKind.FAILED
