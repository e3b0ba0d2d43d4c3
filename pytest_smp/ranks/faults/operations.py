"""The names by which a fault says where it strikes."""

from __future__ import annotations

import difflib

from smp_core.errors import ArgumentError, ArgumentTypeError

#: Moments of a run that are no calls; each comes once.
MOMENTS = {
    "start": "before the body",
    "end": "after the body, before the result was sent",
    "sent": "after the result was sent",
}

_OBJECTS = ("send", "broadcast", "recv_from", "allgather", "barrier")
#: As the board and `sim` name them.
_TENSORS = (
    "send",
    "recv",
    "broadcast",
    "barrier",
    "monitored_barrier",
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "new_group",
)
#: Other names of the same.
_ALIASES = {
    "isend": "dist.send",
    "irecv": "dist.recv",
    "all_gather_into_tensor": "dist.all_gather_single",
    "reduce_scatter_tensor": "dist.reduce_scatter_single",
    "mp_barrier": "smp.barrier",
    "dp_barrier": "smp.barrier",
}
_PREFIXES = {"smp.": ("smp.",), "dist.": ("dist.",), "torch.distributed.": ("dist.",)}

OPERATIONS = frozenset(
    [*(f"smp.{name}" for name in _OBJECTS), *(f"dist.{name}" for name in _TENSORS)]
)
#: Both APIs have them; the bare name means a call of either.
AMBIGUOUS = frozenset(_OBJECTS) & frozenset(_TENSORS)
#: Calls that send a message from one rank.
SENDS = frozenset({"smp.send", "smp.broadcast", "dist.send"})


def canonical(verb: str, at: object) -> str:
    """The name with its API in front, where that is not open.

    Raises ArgumentError for an unknown one, and names the nearest.
    """
    if not isinstance(at, str):
        raise ArgumentTypeError(f"{verb}: at must be the name of an operation, not {at!r}")
    if at in MOMENTS or at in OPERATIONS or at in AMBIGUOUS:
        return at
    apis: tuple[str, ...] = ("smp.", "dist.")
    bare = at
    for prefix, named in _PREFIXES.items():
        if at.startswith(prefix):
            apis, bare = named, at.removeprefix(prefix)
    for known in (_ALIASES.get(bare, ""), *(api + bare for api in apis)):
        if known in OPERATIONS and known.startswith(apis):
            return known
    ours = sorted({each.partition(".")[2] for each in OPERATIONS if each.startswith(apis)})
    names = [*ours, *(each for each in _ALIASES if _ALIASES[each].startswith(apis)), *MOMENTS]
    near = difflib.get_close_matches(bare, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ArgumentError(
        f"{verb}: at={at!r} is no operation: {hint}There is start, end, sent; of smp "
        f"{', '.join(_OBJECTS)}; of torch.distributed {', '.join(_TENSORS)}"
    )


def matches(at: str, operation: str) -> bool:
    """Return whether a fault at ``at`` strikes at ``operation``, whose name begins with that of its API."""
    return at == operation or (at in AMBIGUOUS and operation.partition(".")[2] == at)
