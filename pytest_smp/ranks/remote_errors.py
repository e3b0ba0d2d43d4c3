"""Exceptions that travel from a rank process to the controller, whatever a body has raised.

An exception that can travel arrives as it is. One that is too deep or too long loses its middle. One
that cannot be pickled is replaced by a RemoteError with its text. Every exception arrives in one of
these forms, since a rank without an error to tell would look like one that crashed.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable, Iterator

from tblib import pickling_support

_FIRST, _LAST = 30, 70  # frames of a traceback that are kept; a recursion has a thousand
_LINKS = 20  # exceptions in a chain of causes
_LONGEST = 1 << 16  # characters of a text
_LARGEST = 1 << 24  # bytes of a pickle


class RemoteError(Exception):
    """Stands in for an exception that a rank raised and that cannot be pickled; has its text."""


def dump_error(error: BaseException, dumps: Callable[[object], bytes]) -> bytes:
    """Pickle an exception with its traceback, its notes, its cause and its context.

    One that cannot be pickled, or is larger than 16 MiB, becomes a RemoteError with its type and
    text. Long tracebacks and chains are cut, in place. Does not raise.
    """
    for made in (_shortened, _stand_in, _without_traceback):
        try:
            candidate = made(error)
            pickling_support.install(candidate)
            data = dumps(candidate)
            if len(data) > _LARGEST:
                raise ValueError(f"its pickle has {len(data)} bytes, more than {_LARGEST}")
            pickle.loads(data)  # one that pickles and cannot be read back is as good as none
        except BaseException as reason:  # a body's __reduce__ may raise anything
            problem = _text(reason)
        else:
            return data
        if made is _shortened:
            _Why.problem = problem
    return pickle.dumps(RemoteError("a rank raised an error of which nothing can be told"))


class _Why:
    """The reason why the last exception could not be pickled, for the note of its stand-in."""

    problem = ""


def _shortened(error: BaseException) -> BaseException:
    """The exception itself, with no more of its tracebacks and of its chain than can be told."""
    for count, link in enumerate(_chain(error), 1):
        left_out = _cut(link)
        if left_out:
            _note(link, f"{left_out} frames in the middle of the traceback are left out")
        if count == _LINKS and (link.__cause__ or link.__context__):
            link.__cause__ = link.__context__ = None
            _note(link, "the exceptions before this one are left out")
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and what it came from, as Python prints it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _cut(error: BaseException) -> int:
    """Leave the middle of a long traceback out; returns how many frames."""
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    left_out = len(entries) - _FIRST - _LAST
    if left_out <= 0:
        return 0
    tail: types.TracebackType | None = None
    for entry in reversed([*entries[:_FIRST], *entries[-_LAST:]]):
        tail = types.TracebackType(tail, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = tail
    return left_out


def _note(error: BaseException, text: str) -> None:
    if isinstance(getattr(error, "__notes__", []), list):
        error.add_note(text)


def _stand_in(error: BaseException) -> RemoteError:
    stand_in = RemoteError(f"{type(error).__qualname__}: {_text(error, named=False)}")
    notes = getattr(error, "__notes__", ())
    for note in notes if isinstance(notes, list | tuple) else ():
        stand_in.add_note(_cut_text(note) if isinstance(note, str) else repr(type(note)))
    stand_in.add_note(f"the exception itself could not be pickled: {_Why.problem}")
    return stand_in.with_traceback(error.__traceback__)


def _without_traceback(error: BaseException) -> RemoteError:
    return _stand_in(error).with_traceback(None)


def _text(error: BaseException, *, named: bool = True) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as broken:
        text = f"<its text cannot be made: {type(broken).__name__}>"
    return _cut_text(f"{name}: {text}" if named else text)


def _cut_text(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
