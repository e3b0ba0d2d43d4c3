"""The description of this backend for pytest-smp: its claims, and its expected failures."""

from __future__ import annotations

from pytest_smp.ranks.capabilities import (
    FLOAT8,
    REDUCTIONS,
    WIDE_UNSIGNED,
    Capabilities,
    Capability,
)
from pytest_smp.ranks.torch_backends import torch_backend

BACKEND = torch_backend(
    "inorder",
    summary="sums in the order of the ranks, over Gloo",
    registers="inorder",
    capabilities=Capabilities(
        claims=frozenset(
            {
                Capability.RANKS,
                Capability.OBJECTS,
                Capability.PROCESS_GROUPS,
                Capability.GROUPS,
                Capability.GROUP_ORDER,
                Capability.LOCAL_GROUPS,
                Capability.POINT_TO_POINT,
                Capability.TAGS,
                Capability.ASYNC_PROGRESS,
                Capability.BARRIER,
                Capability.BROADCAST,
                Capability.ALL_REDUCE,
                Capability.ALL_GATHER,
                Capability.LAYOUTS,
            }
        ),
        reductions={op: dtypes - FLOAT8 - WIDE_UNSIGNED for op, dtypes in REDUCTIONS.items()},
    ),
    expectations="inorder:expected.toml",
)
