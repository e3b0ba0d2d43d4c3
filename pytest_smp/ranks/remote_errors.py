"""Exceptions that travel from a rank process to the controller, whatever a body has raised.

An exception that can travel arrives as it is. One that is too deep or too long loses its middle, and a
chain that leads back to an exception, as a cause raised again `from None` makes it, loses that link. One
that cannot be pickled is replaced by a RemoteError with its text, in a chain too. Every exception arrives in one of
these forms, since a rank without an error to tell would look like one that crashed.
"""

from __future__ import annotations

import contextlib
import pickle
import types
from collections.abc import Callable

from tblib import pickling_support

_FIRST, _LAST = 30, 70  # frames of a traceback that are kept; a recursion has a thousand
_LINKS = 20  # exceptions in a chain of causes
_LONGEST = 1 << 16  # characters of a text
_LARGEST = 1 << 24  # bytes of a pickle
_LINK_NAMES = "__cause__", "__context__"


class RemoteError(Exception):
    """Stands in for an exception that a rank raised and that cannot be pickled; has its text."""


def dump_error(error: BaseException, dumps: Callable[[object], bytes]) -> bytes:
    """Pickle an exception with its traceback, its notes, its cause and its context.

    One that cannot be pickled, or is larger than 16 MiB, becomes a RemoteError with its type and
    text. Long tracebacks and chains are cut, and chains that lead back to an exception, in place.
    Does not raise.
    """
    try:
        _shorten(error, [], set())
        return _dump(error, dumps)
    except BaseException as reason:  # a body's __reduce__ may raise anything
        problem = _text(reason)
    candidates: tuple[Callable[[], BaseException | None], ...] = (
        lambda: _travelling(error, dumps, {}),
        lambda: _stand_in(error, problem),
        lambda: _stand_in(error, problem).with_traceback(None),
    )
    for candidate in candidates:
        with contextlib.suppress(BaseException):
            return _dump(candidate(), dumps)
    return pickle.dumps(RemoteError("a rank raised an error of which nothing can be told"))


def _dump(error: BaseException | None, dumps: Callable[[object], bytes]) -> bytes:
    """Pickle an exception, and read it back: one that cannot be read is as good as none, and so is one that is
    read as an exception of another type, which pytest may take for a skip.
    """
    pickling_support.install(error)
    data = dumps(error)
    if len(data) > _LARGEST:
        raise ValueError(f"its pickle has {len(data)} bytes, more than {_LARGEST}")
    loaded = pickle.loads(data)
    if _type_name(loaded) != _type_name(error):
        raise ValueError(f"its pickle is read as {_type_name(loaded)}")
    return data


def _type_name(obj: object) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def _shorten(error: BaseException, path: list[BaseException], done: set[int]) -> None:
    """Leave out what cannot be told of the tracebacks and of the chain.

    Args:
        path: the exceptions from the first one to this. A link back to one of them is cut, as Python shows none: a
            pickle of tblib holds the cause and the context inside of the exception, and would have no end.
        done: the identities of the exceptions that were visited.
    """
    done.add(id(error))
    left_out = _cut(error)
    if left_out:
        _note(error, f"{left_out} frames in the middle of the traceback are left out")
    path = [*path, error]
    for name in _LINK_NAMES:
        link = getattr(error, name)
        if link is None:
            continue
        if _leads_to(link, path):
            _set_link(error, name, None)
        elif len(path) == _LINKS:
            error.__cause__ = error.__context__ = None
            _note(error, "the exceptions before this one are left out")
        elif id(link) not in done:
            _shorten(link, path, done)
    for member in _members(error):
        if id(member) not in done:
            _shorten(member, path, done)


def _members(error: BaseException) -> tuple[BaseException, ...]:
    return error.exceptions if isinstance(error, BaseExceptionGroup) else ()


def _leads_to(link: BaseException, path: list[BaseException]) -> bool:
    """Return whether an exception is one of the path, or a group with one: members cannot be cut."""
    return any(link is known for known in path) or any(
        _leads_to(member, path) for member in _members(link)
    )


def _set_link(error: BaseException, name: str, link: BaseException | None) -> None:
    suppressed = error.__suppress_context__  # which an assignment to __cause__ changes
    setattr(error, name, link)
    error.__suppress_context__ = suppressed


def _travelling(
    error: BaseException,
    dumps: Callable[[object], bytes],
    done: dict[int, BaseException | None],
) -> BaseException | None:
    """The exception, or its stand-in, with stand-ins for those in its chain that cannot be pickled.

    ``done`` has the results by identity; None while it is made.
    """
    if id(error) in done:
        return done[id(error)]
    done[id(error)] = None
    for name in _LINK_NAMES:
        link = getattr(error, name)
        if link is not None:
            _set_link(error, name, _travelling(link, dumps, done))
    result = error
    try:
        _dump(error, dumps)
    except BaseException as reason:
        result = _stand_in(error, _text(reason))
        result.__cause__, result.__context__ = error.__cause__, error.__context__
        result.__suppress_context__ = error.__suppress_context__
    done[id(error)] = result
    return result


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


def _stand_in(error: BaseException, problem: str) -> RemoteError:
    stand_in = RemoteError(f"{type(error).__qualname__}: {_text(error, named=False)}")
    notes = getattr(error, "__notes__", ())
    for note in notes if isinstance(notes, list | tuple) else ():
        stand_in.add_note(_cut_text(note) if isinstance(note, str) else repr(type(note)))
    stand_in.add_note(f"the exception itself could not be pickled: {problem}")
    return stand_in.with_traceback(error.__traceback__)


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
