"""Checks of the group members that a call names: the peer of a message, the root of a collective.

Every backend and the board check them here. Members are positions in the group, 0 to its size - 1;
Python's negative indices name nobody. A receive from any source names no peer: ``ANY``, which is no
number, so that no number of a caller can mean it.
"""

from __future__ import annotations

import enum
import operator
from typing import Final, SupportsIndex

from smp_core.errors import RankError


class AnySource(enum.Enum):
    """The type of ``ANY``."""

    ANY = "any rank"


ANY: Final = AnySource.ANY  # of a receive: from whichever member sends first

Source = int | AnySource  # of a receive: a member, or ANY


def is_member(position: int, size: int) -> bool:
    """Return whether a group of ``size`` members has a member at this position."""
    return 0 <= position < size


def absent(role: str, position: object, size: int) -> str:
    """The words for a position that the group does not have. ``role``: ``rank`` or ``root``."""
    return f"{role} {position} is not in the group; group ranks are 0 to {size - 1}"


def refusal(call: str, role: str, position: object, size: int) -> str:
    """The text of the error about a call that names such a position."""
    text = f"{call}: {absent(role, position, size)}"
    if call == "recv":
        text += ". A receive without a source (src=None) takes a message of any rank"
    return text


def member(call: str, role: str, position: SupportsIndex, size: int) -> int:
    """The position as an int.

    Raises RankError if it is no integer, or the group has no such member.
    """
    try:
        number = operator.index(position)
    except TypeError:
        raise RankError(refusal(call, role, repr(position), size)) from None
    if not is_member(number, size):
        raise RankError(refusal(call, role, number, size))
    return number
