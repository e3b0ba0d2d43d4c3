"""Faults as values: what they say, and what they refuse."""

from __future__ import annotations

import signal

import pytest

from pytest_smp.ranks import faults
from pytest_smp.ranks.faults import (
    Claim,
    Corrupt,
    Drop,
    Exit,
    FullDisk,
    Garbled,
    Kill,
    Raise,
    Stall,
    Unpicklable,
)
from smp_core.errors import ArgumentError, ArgumentTypeError, RankError, UnsupportedError

ALL = frozenset(Claim)


class _Two(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one}-{other}")


class _Code(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("allgather", "smp.allgather"),
        ("recv_from", "smp.recv_from"),
        ("smp.allgather", "smp.allgather"),
        ("all_reduce", "dist.all_reduce"),
        ("dist.all_reduce", "dist.all_reduce"),
        ("torch.distributed.all_reduce", "dist.all_reduce"),
        ("isend", "dist.send"),
        ("dist.isend", "dist.send"),
        ("all_gather_into_tensor", "dist.all_gather_single"),
        ("dp_barrier", "smp.barrier"),
        ("smp.mp_barrier", "smp.barrier"),
        ("send", "send"),  # of either API
        ("smp.send", "smp.send"),
        ("dist.send", "dist.send"),
        ("start", "start"),
    ],
)
def test_operations_have_one_name(given, canonical):
    assert Kill(rank=0, at=given).at == canonical


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("allgater", "allgather"),
        ("all_redcue", "all_reduce"),
        ("smp.all_gather", "allgather"),
        ("dist.allgather", "all_gather"),
        ("strat", "start"),
    ],
)
def test_an_unknown_operation_is_refused_with_the_nearest(given, nearest):
    with pytest.raises(ArgumentError, match=rf"kill: at='{given}' .*did you mean '{nearest}'"):
        Kill(rank=0, at=given)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Kill(rank=-1), ArgumentError, "kill: rank=-1: must be at least 0"),
        (lambda: Kill(rank=True), ArgumentTypeError, "kill: rank must be an int, not True"),
        (lambda: Kill(rank="1"), ArgumentTypeError, "rank must be an int"),
        (lambda: Kill(rank=0, at=3), ArgumentTypeError, "at must be the name of an operation"),
        (lambda: Kill(rank=0, at="barrier", nth=0), ArgumentError, "nth=0: must be at least 1"),
        (lambda: Kill(rank=0, at="barrier", nth=1.0), ArgumentTypeError, "nth must be an int"),
        (lambda: Kill(rank=0, at="barrier", when="during"), ArgumentError, "'before' or 'after'"),
        (lambda: Kill(rank=0, at="start", nth=2), ArgumentError, "comes once in a run"),
        (lambda: Kill(rank=0, at="end", when="after"), ArgumentError, "at='end' comes once"),
        (lambda: Kill(rank=0, signal=signal.SIGWINCH), ArgumentError, "must be one of SIGKILL"),
        (lambda: Kill(rank=0, required=1), ArgumentTypeError, "required must be a bool"),
        (lambda: Exit(rank=0, code=256), ArgumentError, "code=256: must be from 0 to 255"),
        (lambda: Stall(rank=0, seconds=-1), ArgumentError, "stall: seconds=-1"),
        (lambda: Stall(rank=0, seconds=float("nan")), ArgumentError, "stall: seconds=nan"),
        (lambda: Stall(rank=0, seconds="1"), ArgumentTypeError, "seconds must be a number"),
        (lambda: Raise(rank=0, error="boom"), ArgumentTypeError, "error must be an exception"),
        (lambda: Raise(rank=0, error=int), ArgumentTypeError, "not <class 'int'>"),
        (lambda: Raise(rank=0, at="sent"), ArgumentError, "no body to raise in"),
        (lambda: Raise(rank=0, error=_Two(1, 2)), ArgumentError, "_Two('1-2') cannot be copied"),
        (lambda: Raise(rank=0, error=_Code(5)), ArgumentError, "becomes _Code('code code 5')"),
        (lambda: Raise(rank=0, error=_Two), ArgumentError, "_Two cannot be made"),
        (lambda: Drop(rank=0, at="all_reduce"), ArgumentError, "no call that sends a message"),
        (lambda: Drop(rank=0, at="send", when="after"), ArgumentError, "on its way"),
        (lambda: Corrupt(rank=0, how=3), ArgumentTypeError, "how must be callable"),
        (lambda: FullDisk(rank=0, below=3), ArgumentTypeError, "below must be a path"),
        (lambda: FullDisk(rank=0, below="/x", after=-1), ArgumentError, "after=-1"),
    ],
)
def test_bad_values_are_refused_where_they_are_written(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


def test_a_bare_send_of_a_message_is_the_apis():
    assert Drop(rank=0).at == Drop(rank=0, at="send").at == "smp.send"
    assert Corrupt(rank=0, at="broadcast").at == "smp.broadcast"
    assert Drop(rank=0, at="isend").at == "dist.send"


def test_a_rank_that_the_run_does_not_have_is_refused():
    faults.check([Kill(rank=2)], 3, ALL, "sim")
    with pytest.raises(RankError, match="kill: rank=3 is out of range: the run has ranks 0 to 2"):
        faults.check([Kill(rank=3)], 3, ALL, "sim")


@pytest.mark.parametrize(
    ("fault", "claims", "text"),
    [
        (Kill(rank=0), frozenset(), "injects no faults"),
        (Kill(rank=0, at="sent"), {Claim.STRIKES}, "are no processes"),
        (Unpicklable(rank=0), {Claim.STRIKES, Claim.TENSORS}, "are no processes"),
        (Drop(rank=0, at="dist.send"), {Claim.STRIKES, Claim.PROCESSES}, "belong to torch"),
        (Corrupt(rank=0, at="isend"), {Claim.STRIKES, Claim.PROCESSES}, "belong to torch"),
    ],
)
def test_what_a_host_cannot_do_is_refused(fault, claims, text):
    with pytest.raises(UnsupportedError, match=text):
        faults.check([fault], 1, claims, "theirs")
    faults.check([fault], 1, ALL, "ours")


def test_a_message_of_an_object_can_be_lost_on_every_backend():
    faults.check([Drop(rank=0)], 1, {Claim.STRIKES}, "gloo")


def test_only_required_faults_are_missed():
    declared = [Kill(rank=1, at="allgather", nth=4), Exit(rank=0, required=False), Stall(rank=0)]
    (text,) = faults.unreached(declared, {2})
    assert "rank 1 did not come to it (before call 4 of smp.allgather)" in text


def test_a_garbled_message_equals_nothing():
    garbled = Garbled("x")
    assert garbled != garbled
    assert "garbled" in repr(garbled)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Kill(rank=1, at="allgather", nth=2), "Kill(rank=1, at='smp.allgather', nth=2)"),
        (Kill(rank=0, signal=signal.SIGSEGV), "Kill(rank=0, signal=signal.SIGSEGV)"),
        (Stall(rank=0, required=False), "Stall(rank=0, required=False)"),
        (Raise(rank=0, error=OSError), "Raise(rank=0, error=OSError)"),
        (Drop(rank=0, at="isend"), "Drop(rank=0, at='dist.send')"),
    ],
    ids=repr,
)
def test_a_fault_prints_as_code(fault, code):
    assert repr(fault) == code
    assert eval(code) == fault
