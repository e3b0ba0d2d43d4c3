"""How many examples a property gets. Nothing here imports torch or Hypothesis: every session does this.

Hypothesis tries the simplest example first, whatever the number of examples: all ranks of one shape,
the first dtype, root 0. A property with one example would draw nothing, ever.
"""

from __future__ import annotations

#: What every property draws beside the simplest example, at least, on every backend.
LEAST_DRAWS = 5

#: The part of a property's examples that it gets where ranks are processes: there an example takes
#: about ten times as long as on `sim`.
_ON_PROCESSES = 0.25


def share(part: float, most: int) -> int:
    """This part of the ``most`` examples of a profile.

    At least the simplest one and LEAST_DRAWS others, unless the profile has fewer.
    """
    return max(round(part * most), min(1 + LEAST_DRAWS, most))


def on_processes(examples: int) -> int:
    """What is left of a property's examples where ranks are processes; the least number is the same."""
    return share(_ON_PROCESSES, examples)
