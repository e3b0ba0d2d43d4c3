"""Arguments of strategies, checked when a strategy is defined: one error type for all."""

from __future__ import annotations

from hypothesis.errors import InvalidArgument


def check_int(
    name: str, value: object, *, at_least: int, at_most: int | None = None, why: str = ""
) -> int:
    """``value``, an int in the range.

    Args:
        name: what the user calls the argument.
        why: where the range comes from; ends the message.

    Raises:
        InvalidArgument: it is none (a bool is no int), or out of range.
    """
    if type(value) is int and at_least <= value and (at_most is None or value <= at_most):
        return value
    span = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    raise InvalidArgument(f"{name}={value!r}: must be an int {span}{why and f' ({why})'}")


def check_bool(name: str, value: object) -> bool:
    """``value``, a bool. Raises InvalidArgument if it is none."""
    if type(value) is bool:
        return value
    raise InvalidArgument(f"{name}={value!r}: must be True or False")
