"""The claims of torch's own backends. The table of backends reads this module, so it imports no torch.

A capability is left unclaimed only if the backend refuses such calls with an error on the calling rank,
before anything is sent; docs/findings.md says how. A capability whose calls the backend takes and gets
wrong is claimed, and stands among the expected failures. The exception is ASYNC_PROGRESS, which no call
asks for.
"""

from __future__ import annotations

from types import MappingProxyType

from pytest_smp.ranks.capabilities import (
    COMPLEX,
    DTYPES,
    FLOAT8,
    REDUCTIONS,
    WIDE_UNSIGNED,
    Capabilities,
    Capability,
)

_COLLECTIVES = (
    Capability.BROADCAST,
    Capability.ALL_REDUCE,
    Capability.REDUCE,
    Capability.ALL_GATHER,
    Capability.ALL_GATHER_SINGLE,
    Capability.GATHER,
    Capability.SCATTER,
    Capability.REDUCE_SCATTER,
    Capability.REDUCE_SCATTER_SINGLE,
    Capability.ALL_TO_ALL,
    Capability.ALL_TO_ALL_SINGLE,
)
#: Gloo's collectives go by torch's dtypes one by one ("Invalid scalar type"), its messages by bytes.
_GLOO_COLLECTIVES = DTYPES - FLOAT8 - WIDE_UNSIGNED - {"int16"}

GLOO = Capabilities(
    claims=frozenset(Capability)
    - {Capability.UNEVEN, Capability.MESSAGE_LAYOUTS, Capability.MESSAGES_TO_ONESELF},
    narrower=MappingProxyType(
        {
            **dict.fromkeys(_COLLECTIVES, _GLOO_COLLECTIVES),
            Capability.GATHER: _GLOO_COLLECTIVES - COMPLEX,
        }
    ),
    reductions=MappingProxyType(
        {
            **{op: dtypes & _GLOO_COLLECTIVES for op, dtypes in REDUCTIONS.items()},
            "PRODUCT": _GLOO_COLLECTIVES - COMPLEX,
        }
    ),
)
