"""The capabilities that a backend claims, as data: a requirement that needs an unclaimed one is not
tested.

A claim is a promise: a claimed capability that fails is a failure. Names of operations are those of
torch.distributed's functions; dtypes are torch's names without ``torch.``. This module does not import
torch.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from smp_core.errors import BackendError


class Capability(enum.StrEnum):
    """A thing that a backend can do; a requirement applies only to backends that have all it needs."""

    RANKS = "ranks"  #: runs a body on a number of ranks; every backend does
    OBJECTS = "objects"  #: the object transport
    PROCESS_GROUPS = "process groups"  #: a default torch process group on every rank
    GROUPS = "groups"  #: new_group of any ranks, which ascend there; destroyed and made again
    GROUP_ORDER = "group order"  #: new_group with sort_ranks=False: its ranks in any order
    LOCAL_GROUPS = "local groups"  #: new_group with use_local_synchronization
    POINT_TO_POINT = "point-to-point"  #: send, recv, isend, irecv
    TAGS = "tags"  #: messages with tags other than 0
    MESSAGES_TO_ONESELF = "messages to oneself"  #: isend and irecv with one's own rank
    MESSAGE_LAYOUTS = "message layouts"  #: messages from and into tensors that are not contiguous
    ANY_SOURCE = "any source"  #: recv without a source
    COALESCING = "coalescing"  #: batch_isend_irecv
    #: an asynchronous operation completes without a call of the ranks that started it
    ASYNC_PROGRESS = "asynchronous progress"
    COALESCED = "coalesced collectives"  #: several all_reduce (..._single) calls issued as one
    BARRIER = "barrier"
    BROADCAST = "broadcast"
    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    ALL_GATHER = "all_gather"
    ALL_GATHER_SINGLE = "all_gather_single"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE_SCATTER_SINGLE = "reduce_scatter_single"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALL_SINGLE = "all_to_all_single"
    LAYOUTS = "layouts"  #: collectives on tensors that are not contiguous
    UNEVEN = "uneven"  #: lists of tensors that differ in size: all_gather, all_to_all


FLOATS = frozenset({"float32", "float64", "bfloat16", "float16"})
FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8"})
WIDE_UNSIGNED = frozenset({"uint16", "uint32", "uint64"})
COMPLEX = frozenset({"complex64", "complex128"})
BOOL = frozenset({"bool"})
DTYPES = FLOATS | FLOAT8 | INTEGERS | WIDE_UNSIGNED | COMPLEX | BOOL

_WHOLE = INTEGERS | WIDE_UNSIGNED | BOOL
#: The dtypes on which a reduction has a meaning.
REDUCTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "SUM": DTYPES,
        "PRODUCT": DTYPES,
        "AVG": FLOATS | FLOAT8 | COMPLEX,
        "MIN": DTYPES - COMPLEX,
        "MAX": DTYPES - COMPLEX,
        "BAND": _WHOLE,
        "BOR": _WHOLE,
        "BXOR": _WHOLE,
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """The claims of one backend.

    Attributes:
        claims: the capabilities that the backend has.
        dtypes: the dtypes that claimed operations move.
        narrower: the dtypes of each operation that moves fewer; the other operations move all ``dtypes``.
        reductions: the dtypes that every claimed reduction takes, by reduce op.

    Raises:
        BackendError: a capability, dtype or reduce op is unknown; the message says what to do.
    """

    claims: frozenset[Capability] = frozenset(Capability)
    dtypes: frozenset[str] = DTYPES
    narrower: Mapping[Capability, frozenset[str]] = dataclasses.field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )
    reductions: Mapping[str, frozenset[str]] = dataclasses.field(
        default_factory=lambda: REDUCTIONS, hash=False
    )

    def __post_init__(self) -> None:
        for what, given, known in (
            ("claims", self.claims, frozenset(Capability)),
            ("dtypes", self.dtypes, DTYPES),
            ("narrower", frozenset(self.narrower), frozenset(Capability)),
            *(
                (f"narrower[{str(each)!r}]", dtypes, self.dtypes)
                for each, dtypes in self.narrower.items()
            ),
            ("reductions", frozenset(self.reductions), frozenset(REDUCTIONS)),
            *(
                (f"reductions[{op!r}]", dtypes, REDUCTIONS.get(op, DTYPES))
                for op, dtypes in self.reductions.items()
            ),
        ):
            unknown = sorted(map(str, frozenset(given) - known))
            if unknown:
                raise BackendError(
                    f"capabilities: {what} holds {', '.join(unknown)}, which it cannot; "
                    f"there is {', '.join(sorted(map(str, known)))}"
                )

        if not self.dtypes:
            raise BackendError(
                "capabilities: dtypes is empty: name at least one, as every backend moves"
            )

    def __repr__(self) -> str:
        # Sets in order: so that it reads, and prints the same in every process.
        said = [
            f"{name}={sorted(map(str, value))}"
            for name, value in (("claims", self.claims), ("dtypes", self.dtypes))
            if value != getattr(EVERYTHING, name)
        ]
        if self.narrower:
            said.append(f"narrower={_sorted(self.narrower.items())}")
        if self.reductions != REDUCTIONS:
            said.append(f"reductions={_sorted(self.reductions.items())}")
        return f"Capabilities({', '.join(said)})"

    def __contains__(self, capability: object) -> bool:
        return capability in self.claims

    def moves(self, operation: Capability) -> frozenset[str]:
        """The dtypes that an operation moves, if it is claimed."""
        return self.narrower.get(operation, self.dtypes)


def _sorted(sets: Iterable[tuple[str, frozenset[str]]]) -> dict[str, list[str]]:
    return {str(name): sorted(each) for name, each in sorted(sets)}


EVERYTHING = Capabilities()

#: The claims of ranks whose calls move their messages: an operation goes on only while its rank is in a call.
MOVED_BY_CALLS = Capabilities(frozenset(Capability) - {Capability.ASYNC_PROGRESS})
