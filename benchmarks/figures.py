"""The result of a benchmark: one row of the table."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity. ``budget`` is the required value, in words; ``ratio`` compares within the run."""

    name: str
    value: float
    unit: str
    spread: tuple[float, float] | None = None
    ratio: str = ""
    budget: str = ""


def seconds(body: Callable[[], object]) -> float:
    """The time that one call takes."""
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def median(values: list[float]) -> float:
    """The middle value: one disturbed repetition does not move it."""
    return statistics.median(values)
