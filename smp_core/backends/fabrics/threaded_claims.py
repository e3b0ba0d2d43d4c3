"""What torch's group on threads claims. Imports no torch: the table of names reads it.

What is not claimed is what it has not, or refuses; docs/findings.md says how. What it takes and gets
wrong is claimed, and stands among the expected failures.
"""

from __future__ import annotations

from types import MappingProxyType

from smp_core.backends.capabilities import (
    FLOAT8,
    REDUCTIONS,
    WIDE_UNSIGNED,
    Capabilities,
    Capability,
)

THREADED = Capabilities(
    claims=frozenset(Capability)
    - {
        # A group of some ranks can be made, and not be destroyed.
        Capability.GROUPS,
        Capability.GROUP_ORDER,
        Capability.LOCAL_GROUPS,
        Capability.POINT_TO_POINT,
        Capability.TAGS,
        Capability.MESSAGES_TO_ONESELF,
        Capability.MESSAGE_LAYOUTS,
        Capability.ANY_SOURCE,
        Capability.COALESCING,
        Capability.COALESCED,
        Capability.REDUCE,
    },
    # all_reduce has all ops, reduce_scatter these two alone.
    reductions=MappingProxyType(
        {op: REDUCTIONS[op] - FLOAT8 - WIDE_UNSIGNED for op in ("SUM", "AVG")}
    ),
)
