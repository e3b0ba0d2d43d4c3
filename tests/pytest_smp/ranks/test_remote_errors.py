"""An exception travels from a rank process whatever it is: drawn strange ones, singly and in chains."""

from __future__ import annotations

import pickle
import threading
import unittest.mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_smp.ranks import remote_errors, serialization
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, VerdictKind
from pytest_smp.ranks.remote_errors import RemoteError

SENTENCE = "what went wrong"


def _recurse(depth):
    return _recurse(depth + 1) + 1


class Holds(Exception):
    """Has what cannot be pickled."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lock = threading.Lock()


class Large(Exception):
    """Has what should not travel."""

    def __init__(self, *args):
        super().__init__(*args)
        self.data = bytes(remote_errors._LARGEST + 1)


class Mute(Exception):
    """Has no text."""

    def __str__(self):
        raise SystemExit(1)


class Stubborn(Exception):
    """Ends whoever pickles it."""

    def __reduce__(self):
        raise SystemExit(SENTENCE)


class Endless(Exception):
    """Recurses wherever it is pickled."""

    def __reduce__(self):
        return _recurse(0)


class OneWay(Exception):
    """Takes more than its args: pickle alone could not make it again."""

    def __init__(self, one, two):
        super().__init__(one)


class Disguised(AssertionError):
    """Would arrive as an exception that pytest takes for a skip."""

    def __reduce__(self):
        return pytest.skip.Exception, self.args


class Notes(Exception):
    """Has notes that are none."""

    def __init__(self, *args):
        super().__init__(*args)
        self.__notes__ = 7


def _cyclic():
    error = ValueError(SENTENCE)
    error.args = (*error.args, error)
    return error


def _nested_group():
    error = ValueError(SENTENCE)
    for _ in range(2000):
        error = ExceptionGroup("group", [error])
    return error


#: How it is made; whether it arrives as itself, when alone.
KINDS = {
    "plain": (lambda: ValueError(SENTENCE), True),
    "exit": (lambda: SystemExit(SENTENCE), True),
    "holds": (lambda: Holds(SENTENCE), False),
    "large": (lambda: Large(SENTENCE), False),
    "long": (lambda: ValueError(SENTENCE * (remote_errors._LARGEST // 10)), False),
    "mute": (lambda: Mute(SENTENCE), True),
    "stubborn": (lambda: Stubborn(SENTENCE), False),
    "endless": (lambda: Endless(SENTENCE), False),
    "disguised": (lambda: Disguised(SENTENCE), False),
    "one way": (lambda: OneWay(SENTENCE, 2), True),
    "notes": (lambda: Notes(SENTENCE), True),
    "cyclic": (_cyclic, False),
    "nested group": (_nested_group, False),
}


def _raise(error, depth):
    if depth:
        _raise(error, depth - 1)
    raise error


def _raised(kinds, depth, links=()):
    """The exception of the last kind, raised so deep, in the handler of the one before.

    ``links`` are more links of the chain: the numbers of two exceptions, and the name of the attribute.
    """
    last, errors = None, []
    for kind in kinds:
        error = KINDS[kind][0]()
        if last is not None:
            error.__context__ = last
        try:
            _raise(error, depth)
        except BaseException as caught:
            last = caught
            errors.append(last)
    for source, target, name in links:
        setattr(errors[source % len(errors)], name, errors[target % len(errors)])
    return last


_NUMBERS = st.integers(0, 2)
_LINKS = st.tuples(_NUMBERS, _NUMBERS, st.sampled_from(["__cause__", "__context__"]))


@unittest.mock.patch.object(remote_errors, "_LARGEST", 1 << 18)  # whose pickles take less time
@settings(deadline=None)
@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    st.sampled_from([0, 5, 99, 500]),
    st.lists(_LINKS, max_size=3),
)
def test_any_error_arrives_with_its_type_and_its_lines(kinds, depth, links):
    error = _raised(kinds, depth, links)
    data = serialization.dump_error(error)
    assert len(data) <= remote_errors._LARGEST
    arrived = pickle.loads(data)
    itself = type(arrived) is type(error)
    if kinds[-1] in ("cyclic", "nested group"):
        assert itself or type(arrived) is RemoteError
    else:
        assert itself is KINDS[kinds[-1]][1]
    if not itself:
        assert type(arrived) is RemoteError
        assert str(arrived).startswith(type(error).__name__)
        assert any("could not be pickled" in note for note in arrived.__notes__)
    assert arrived.__traceback__ is not None
    names = _functions(arrived)
    assert names[0] == "_raised"
    assert names[-1] == "_raise"
    assert len(names) <= 100


def _functions(error):
    names, entry = [], error.__traceback__
    while entry is not None:
        names.append(entry.tb_frame.f_code.co_name)
        entry = entry.tb_next
    return names


def test_a_cause_that_is_raised_again_from_none_arrives_as_itself():
    """As a step raises the error of its own rank: its context is the agreed error, of which it is the cause."""
    try:
        cause = KeyError(SENTENCE)
        try:
            raise ValueError("agreed") from cause
        except ValueError:
            raise cause from None
    except KeyError as error:
        arrived = pickle.loads(serialization.dump_error(error))
    assert (type(arrived), arrived.args) == (KeyError, (SENTENCE,))
    assert arrived.__suppress_context__
    assert type(arrived.__context__) is ValueError
    assert arrived.__context__.__cause__ is None


def test_a_member_of_a_group_that_it_was_raised_from_arrives_as_itself():
    error = KeyError(SENTENCE)
    error.__cause__ = ExceptionGroup("group", [ValueError(), ExceptionGroup("inner", [error])])
    arrived = pickle.loads(serialization.dump_error(error))
    assert (type(arrived), arrived.args, arrived.__cause__) == (KeyError, (SENTENCE,), None)


def test_a_long_chain_of_causes_is_cut_and_says_so():
    last = None
    for number in range(5000):
        error = ValueError(number)
        error.__cause__ = last
        last = error
    arrived = pickle.loads(serialization.dump_error(last))
    chain = []
    while arrived is not None:
        chain.append(arrived)
        arrived = arrived.__cause__
    assert [error.args for error in chain] == [(4999 - index,) for index in range(20)]
    assert chain[-1].__notes__ == ["the exceptions before this one are left out"]


def test_infinite_recursion_is_the_ranks_own_error_on_processes(processes):
    def body():
        return _recurse(0)

    job = Job(body=body, arguments=lambda rank: ((), {}), timeout=60.0)
    report = processes.open(2).run(job)
    assert report.verdict is VerdictKind.FAILED, report.error
    assert type(report.error) is RecursionError
    assert _functions(report.error)[0] == "body"
    assert _functions(report.error)[-1] == "_recurse"
    assert len(_functions(report.error)) <= 100
    assert any("are left out" in note for note in report.error.__notes__)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_strange_error_is_no_crash(processes, kind):
    def body():
        raise KINDS[kind][0]()

    job = Job(body=body, arguments=lambda rank: ((), {}), timeout=60.0)
    report = processes.open(2).run(job)
    assert report.verdict is VerdictKind.FAILED, report.error
    assert report.root == 0


@pytest.fixture(scope="module", params=["gloo", "mpi"])
def processes(request):
    if request.param == "mpi":
        pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    executor = open_backend(request.param, ExecutorOptions(ranks=2))
    yield executor
    executor.close()
