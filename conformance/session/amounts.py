"""The number of examples of a property.

Every session imports this module, so nothing here imports torch or Hypothesis. Hypothesis always tries the
simplest example first: all ranks of one shape, the first dtype, root 0. A property with one example would
never draw another one.
"""

from __future__ import annotations

#: The most ranks that a property needs, at every level: the suite's worked tables have eight.
MOST_RANKS = 8

#: The least number of examples of a property beside the simplest one, on every backend.
LEAST_DRAWS = 5

#: The least part of a profile's examples that a property gets: a profile with more examples has more of each.
_LEAST_PART = 0.05

#: The part of a property's examples that run where ranks are processes. An example takes about ten times
#: as long there as on `sim`.
_ON_PROCESSES = 0.25


def share(part: float, most: int) -> int:
    """A part of the ``most`` examples of a profile.

    The result covers at least the simplest example and LEAST_DRAWS others, unless the profile has fewer.
    """
    return max(round(max(part, _LEAST_PART) * most), min(1 + LEAST_DRAWS, most))


def on_processes(examples: int, most: int = 100) -> int:
    """The number of a property's examples where ranks are processes.

    Args:
        examples: the property's examples elsewhere.
        most: the examples of the profile, whose least number of each property holds here as well.
    """
    return min(examples, max(share(_ON_PROCESSES, examples), round(_LEAST_PART * most)))
