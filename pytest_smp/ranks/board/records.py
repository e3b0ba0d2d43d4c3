"""The records on the wire: JSON arrays, one a line, and what each kind holds.

JSON, because the reader may not trust a process that its own test can corrupt: at worst a line does
not parse.
"""

from __future__ import annotations

import json
from typing import Any

from smp_core.errors import BackendError

#: More than any record needs; a rank that sends more without an end of line sends no records.
MOST_BYTES = 1 << 24

BEGIN = "b"  # run
END = "e"  # thread: the body is over
GROUP = "g"  # id, kind, name, name for messages, generation, world ranks in group order
PLACE = "p"  # id, file, line, function, direct, entry
DESCRIPTION = "d"  # id, operation, fields or null, told, sent, expected, elements
COLLECTIVE = "c"  # number, group, description, place, thread
SEND = "s"  # number, group, description, place, thread, peer's group rank, tag
RECEIVE = "r"  # the same
RECEIVE_ANY = "a"  # number, group, description, place, thread, tag: from any source
OBJECT = "o"  # number, group, call, place, thread, receivers, source or -1: issued and waited for
RETURNED = "k"  # number: the backend has taken the call
TOOK = "t"  # number, group rank: the sender of a receive from any source
WITHDRAWN = "x"  # number: the backend has refused the call
WAITS = "w"  # numbers, place, thread
DONE = "f"  # numbers: the rank has learnt that they are over
INSIDE = "n"  # place, count, ranks: a block of smp.raises, or an empty place outside of any
FAILED = "!"  # numbers: waiting for them has raised
HANDLES = "h"  # exception: the main thread handles it from now on, or none
CHILDREN = "q"  # the rank has had child processes in this run
SETS_KEYS = "z"  # keys: the rank is about to set these keys of a store
WAITS_FOR_KEYS = "y"  # number, keys, place, thread: until they are set in the world's store
FUTURE = "u"  # numbers: the body has their future
CALLBACK = "j"  # callback, numbers: a function of the body's runs once these calls are over
CALLED = "v"  # callback: that function has returned

#: The thread that makes a call or waits: the rank's main thread, alone; the main thread, while the body
#: has other Python threads that may communicate as well; another thread.
MAIN, ACCOMPANIED, OTHER = 0, 1, 2

#: The types of each record's items behind its kind. ``object``: looked at where it is used.
SHAPES: dict[str, tuple[type, ...]] = {
    BEGIN: (int,),
    END: (int,),
    GROUP: (int, str, str, str, int, list),
    PLACE: (int, str, int, str, bool, str),
    DESCRIPTION: (int, str, object, list, list, list, int),
    COLLECTIVE: (int, int, int, int, int),
    SEND: (int, int, int, int, int, int, int),
    RECEIVE: (int, int, int, int, int, int, int),
    RECEIVE_ANY: (int, int, int, int, int, int),
    OBJECT: (int, int, str, int, int, list, int),
    RETURNED: (int,),
    TOOK: (int, int),
    WITHDRAWN: (int,),
    WAITS: (list, int, int),
    DONE: (list,),
    INSIDE: (str, int, list),
    FAILED: (list,),
    HANDLES: (str,),
    CHILDREN: (),
    SETS_KEYS: (list,),
    WAITS_FOR_KEYS: (int, list, int, int),
    FUTURE: (list,),
    CALLBACK: (int, list),
    CALLED: (int,),
}

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


#: Records of integers alone, as they are written for every call: the encoder takes ten times as long.
FRAMES = {
    kind: f'["{kind}",{",".join(["%d"] * len(shape))}]\n'.encode()
    for kind, shape in SHAPES.items()
    if set(shape) == {int}
}


def encode(*record: Any) -> bytes:
    """One record, with its end of line."""
    return _encode(record).encode() + b"\n"


class Reader:
    """The records of one rank, out of bytes that come in any pieces."""

    def __init__(self, rank: int) -> None:
        self._rank, self._rest = rank, b""

    def feed(self, data: bytes) -> list[list[Any]]:
        """The records that ``data`` completes.

        Raises BackendError for what is no record; what came before it is lost with it.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_BYTES:
            start, self._rest = self._rest[:40], b""
            raise self._refusal(start, f"more than {MOST_BYTES} bytes without an end of line")
        try:  # all at once: a parser's start costs as much as a record
            found: list[Any] = json.loads(b"[%b]" % b",".join(lines))
        except (ValueError, RecursionError):
            found = []
        if len(found) != len(lines):  # something is no record, or is two
            found = [self._parsed(line) for line in lines]
        for line, record in zip(lines, found, strict=True):
            self._verify(line, record)
        return found

    def _parsed(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._refusal(line, str(error)) from None

    def _verify(self, line: bytes, record: Any) -> None:
        if not isinstance(record, list) or not record or not isinstance(record[0], str):
            raise self._refusal(line, "not an array that begins with a kind")
        shape = SHAPES.get(record[0])
        if shape is None or len(shape) != len(record) - 1:
            raise self._refusal(line, "no such kind of this length")
        for item, expected in zip(record[1:], shape, strict=True):
            if not isinstance(item, expected) or (expected is int and isinstance(item, bool)):
                raise self._refusal(line, f"{item!r} is no {expected.__name__}")

    def _refusal(self, line: bytes, why: str) -> BackendError:
        return BackendError(
            f"rank {self._rank}: its line to the board carries what is no record ({why}): "
            f"{line[:80]!r}. Something in the rank writes to a descriptor that is not its own, or "
            "its memory is damaged; run it with --smp-check=false to go on without the board"
        )
