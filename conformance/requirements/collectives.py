"""Requirements of the tensor collectives of a process group: values, layouts, dtypes, roots.

An id is ``COLL-``, the collective and the tested aspect, so a backend that fails for one collective and
one layout can name just this one. Requirements made by ``_all`` have no collective in their id and are tested
with every collective that the backend claims. The source is torch's documentation of the function. A
promise that the documentation leaves open, and that users rely on, says INF and the reason.
"""

from __future__ import annotations

from conformance.requirements.registry import Capability, Level, Requirement


def _docs(function: str) -> str:
    return f"torch.distributed.{function} docs"


#: The capability of each collective, which is also the function's name, by its words in an id.
_NAMES = {
    each.value.upper().replace("_", "-"): each
    for each in (
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
        Capability.BARRIER,
    )
}


def _of(words: str, aspect: str, sentence: str, source: str = "", *more: Capability) -> Requirement:
    """Declare a requirement of one collective; ``source`` comes after the function's documentation.

    The requirement needs the collective and the capabilities in ``more``.
    """
    collective = _NAMES[words]
    made = "; ".join(filter(None, [_docs(collective.value), source]))
    needs = frozenset({Capability.PROCESS_GROUPS, collective, *more})
    return Requirement(f"COLL-{words}-{aspect}", sentence, made, Level.L1, needs)


def operation_of(declared: Requirement) -> str:
    """The function's name of the one collective that a requirement is about."""
    (collective,) = declared.needs.intersection(_NAMES.values())
    return collective.value


MOVEMENT = (
    _of("BROADCAST", "VALUE", "Every member's tensor holds the elements of the root's."),
    _of(
        "ALL-GATHER",
        "VALUE",
        "On every member the i-th tensor of the list holds the i-th member's tensor.",
    ),
    _of(
        "ALL-GATHER",
        "UNEVEN",
        "Members' tensors may differ in size, also 0, if every member's list has tensors of these sizes.",
        "uneven sized tensors are supported",
        Capability.UNEVEN,
    ),
    _of(
        "ALL-GATHER-SINGLE",
        "CAT",
        "On every member the output holds all inputs, concatenated in the order of the group.",
        "form (i)",
    ),
    _of(
        "ALL-GATHER-SINGLE",
        "STACK",
        "On every member the output holds all inputs, stacked in the order of the group.",
        "form (ii)",
    ),
    _of(
        "GATHER", "VALUE", "On the root the i-th tensor of the list holds the i-th member's tensor."
    ),
    _of("SCATTER", "VALUE", "The i-th member's tensor holds the i-th tensor of the root's list."),
    _of(
        "ALL-TO-ALL",
        "VALUE",
        "The i-th member's j-th output holds the j-th member's i-th input.",
    ),
    _of(
        "ALL-TO-ALL",
        "UNEVEN",
        "The i-th member's j-th output holds the j-th member's i-th input, also if all sizes differ and some "
        "are 0.",
        "the examples",
        Capability.UNEVEN,
    ),
    _of(
        "ALL-TO-ALL-SINGLE",
        "VALUE",
        "Without split sizes, the j-th part of member i's output holds the i-th part of member j's input.",
    ),
    _of(
        "ALL-TO-ALL-SINGLE",
        "UNEVEN",
        "input_split_sizes cuts inputs, and output_split_sizes outputs, along the first dimension; sizes may "
        "be 0.",
        "the examples",
    ),
)

_MANAGER = "torch.distributed._coalescing_manager (its docstring), as DDP and FSDP use it"

COALESCED = tuple(
    _of(
        words,
        "COALESCED",
        "Calls of any shapes that the coalescing manager, or an operator for several tensors, issues as one "
        f"have the same results as alone: {does}.",
        f"{_MANAGER}; torch.ops._c10d_functional (the operators that compiled programs call)",
        Capability.COALESCED,
    )
    for words, does in (
        ("ALL-REDUCE", "every member gets the reduction of each tensor"),
        (
            "ALL-GATHER-SINGLE",
            "every output holds the inputs of its own call, in the group's order",
        ),
        (
            "REDUCE-SCATTER-SINGLE",
            "the i-th member gets the reduction of the i-th part of each input",
        ),
    )
)

_OPS = "torch.distributed.ReduceOp docs"

REDUCTIONS = (
    _of("ALL-REDUCE", "SUM", "SUM gives every member the sum over the members, by element.", _OPS),
    _of("ALL-REDUCE", "PRODUCT", "PRODUCT gives every member the product over the members.", _OPS),
    _of(
        "ALL-REDUCE",
        "MIN-MAX",
        "MIN and MAX give every member the least and the largest number of the members, by element.",
        _OPS,
    ),
    _of("ALL-REDUCE", "BITS", "BAND, BOR and BXOR combine the members' integers bit by bit.", _OPS),
    _of(
        "ALL-REDUCE",
        "AVG",
        "AVG gives every member the sum divided by the size of the group.",
        _OPS,
    ),
    _of(
        "ALL-REDUCE",
        "AVG-HALF",
        "AVG divides before it sums, so an average of large float16 numbers does not overflow, and lies "
        "between the least and the largest number up to rounding.",
        f"{_OPS}: AVG divides values by the world size before summing",
    ),
    _of(
        "ALL-REDUCE",
        "WRAP",
        "Sums and products of integers wrap around: they are exact modulo 2 to the power of the dtype's bits.",
        "INF: as torch.add and torch.mul do",
    ),
    _of(
        "ALL-REDUCE",
        "BOOL",
        'SUM of bools is "or" and PRODUCT of bools is "and", and every byte of the result is 0 or 1.',
        "INF: as torch.add and torch.mul do",
    ),
    _of(
        "ALL-REDUCE",
        "IDENTICAL",
        "All members hold the same bits of the result, also for numbers whose sum depends on the order.",
        "bitwise identical in all processes",
    ),
    _of("REDUCE", "VALUE", "The root gets the result of an all_reduce, for every op.", _OPS),
    _of(
        "REDUCE-SCATTER",
        "VALUE",
        "The i-th member gets the reduction of all members' i-th inputs, for every op.",
        _OPS,
    ),
    _of(
        "REDUCE-SCATTER-SINGLE",
        "CAT",
        "The i-th member gets the reduction of the i-th parts of all members' inputs, which concatenate the "
        "parts, for every op.",
        f"form (i); {_OPS}",
    ),
    _of(
        "REDUCE-SCATTER-SINGLE",
        "STACK",
        "The i-th member gets the reduction of the i-th parts of all members' inputs, which stack the parts, "
        "for every op.",
        f"form (ii); {_OPS}",
    ),
)

ROOTS = tuple(
    _of(
        words, "ROOT", f"{root} is a rank of the world, and group_{root} one of the group{default}."
    )
    for words, root, default in (
        ("BROADCAST", "src", ""),
        ("REDUCE", "dst", ""),
        ("GATHER", "dst", "; without either the root is rank 0 of the world"),
        ("SCATTER", "src", "; without either the root is rank 0 of the world"),
    )
)

_ANY_VIEW = "INF: it takes tensors, and a view is one; pytorch#192920 treats the opposite as a bug"

LAYOUTS = (
    *(
        _of(
            words,
            "LAYOUT",
            "Tensors that are not contiguous are read and written by their strides, and no byte beside them.",
            _ANY_VIEW,
            Capability.LAYOUTS,
        )
        for words in ("BROADCAST", "ALL-REDUCE", "REDUCE")
    ),
    *(
        _of(words, f"LAYOUT-{side}", sentence, _ANY_VIEW, Capability.LAYOUTS)
        for words in (
            "ALL-GATHER",
            "ALL-GATHER-SINGLE",
            "GATHER",
            "SCATTER",
            "REDUCE-SCATTER",
            "REDUCE-SCATTER-SINGLE",
            "ALL-TO-ALL",
            "ALL-TO-ALL-SINGLE",
        )
        for side, sentence in (
            (
                "IN",
                "Inputs that are not contiguous, also expanded ones, are read by their strides.",
            ),
            (
                "OUT",
                "Outputs that are not contiguous are written by their strides, and no byte beside them.",
            ),
        )
    ),
)

EMPTY = tuple(
    _of(
        words,
        "EMPTY",
        "Tensors without elements are accepted, and the next call works.",
        "INF: it takes tensors, and sizes need only be right",
    )
    for words in _NAMES
    if words != "BARRIER"
)


def _all(
    aspect: str,
    sentence: str,
    source: str,
    *more: Capability,
    level: Level = Level.L1,
) -> Requirement:
    """Declare a requirement of every collective that the backend claims; ``more`` are further needs."""
    needs = frozenset({Capability.PROCESS_GROUPS, *more})
    return Requirement(f"COLL-{aspect}", sentence, source, level, needs)


_NEW_GROUP = _docs("new_group")

GROUPS = (
    _all(
        "SIZES",
        "Collectives work in groups of every size: no member is left out or counted twice.",
        "the collectives' docs: no size of a group is excepted",
    ),
    _all(
        "GROUP-ORDER",
        "With sort_ranks=False a member's place in the list of ranks is its place in every collective.",
        f"{_NEW_GROUP} (sort_ranks)",
        Capability.GROUPS,
        Capability.GROUP_ORDER,
    ),
    _all(
        "GROUP-SORTED",
        "By default the ranks of a group ascend, in whatever order new_group got them.",
        f"{_NEW_GROUP} (sort_ranks)",
        Capability.GROUPS,
    ),
    _all(
        "GROUP-WITHOUT-0",
        "Collectives work in a group that rank 0 of the world is not in.",
        f"{_NEW_GROUP} (ranks)",
        Capability.GROUPS,
    ),
    _all(
        "GROUP-ALONE",
        "Collectives work in a group of one rank.",
        f"{_NEW_GROUP} (ranks)",
        Capability.GROUPS,
    ),
    _all(
        "GROUP-OVERLAP",
        "Collectives that alternate between groups with common ranks move each group's own values.",
        f"{_NEW_GROUP} (ranks; overlapping groups)",
        Capability.GROUPS,
    ),
    _all(
        "GROUP-OUTSIDER",
        "On a rank outside the group a collective returns None and leaves the tensors alone.",
        f"{_docs('all_reduce')} and its siblings' (None, if not part of the group)",
        Capability.GROUPS,
    ),
)

NUMBERS = (
    _all(
        "SPECIAL-BITS",
        "-0.0, infinities, subnormals and NaNs are moved bit for bit.",
        "INF: what is moved is not computed with; torch.distributed docs name no number apart",
    ),
    _all(
        "SPECIAL-REDUCED",
        "Reductions treat infinities, NaNs and subnormals as arithmetic does: an infinity stays one, a NaN "
        "gives a NaN, no subnormal is lost, and no other element changes. The MIN or MAX of a number and a "
        "NaN may be either.",
        "INF: as torch.add, torch.mul, torch.minimum and torch.maximum do; torch.distributed.ReduceOp docs "
        "name no number apart, and say nothing of MIN and MAX of a NaN",
    ),
    _all(
        "CONJUGATED",
        "A complex input that is a lazy conjugate is read as its conjugates (gather, reduce_scatter, "
        "reduce_scatter_single; the other functions of torch refuse such an input).",
        "torch.Tensor.conj docs (a lazy conjugate is the tensor of the conjugates); INF: that "
        "collectives take it",
    ),
)

BUFFERS = (
    _all(
        "OFFSET",
        "A tensor with an offset in its storage is read and written at this offset.",
        "torch.Tensor.storage_offset docs; INF: collectives take tensors, not storages",
    ),
    _all(
        "INPUTS",
        "A call does not change its inputs, or a broadcast's tensor on the root.",
        "the collectives' docs: they name inputs and outputs, and those that are both",
    ),
    _all(
        "CHUNKS-OUT",
        "The outputs of a list may be views of one tensor (all_gather, gather, all_to_all).",
        "torch.distributed.all_to_all docs (the examples: chunks); INF for the others, which name a "
        "list of tensors; pytorch#20421",
    ),
    _all(
        "CHUNKS-IN",
        "The inputs of a list may be views of one tensor (scatter, reduce_scatter, all_to_all).",
        "torch.distributed.all_to_all docs (the examples: chunks); INF for the others, which name a "
        "list of tensors",
    ),
    _all(
        "IN-PLACE",
        "A member's input may be its own part of the output (all_gather, all_gather_single), and a member's "
        "output its own part of the input (reduce_scatter, reduce_scatter_single).",
        "INF: MPI and NCCL name it in place, and FSDP does it",
    ),
)

AMOUNTS = (
    _all(
        "OP-DEFAULT",
        "A reduction that names no op is a sum.",
        "torch.distributed.all_reduce, reduce and reduce_scatter docs (the signatures)",
    ),
    _all(
        "REPEATED",
        "Two calls of one shape, one after the other, each move their own values.",
        "torch.distributed docs (synchronous collective operations)",
    ),
    _all(
        "MANY",
        "Hundreds of calls in a row, of all kinds, each move their own values.",
        "torch.distributed docs (synchronous collective operations)",
    ),
    _all(
        "LARGE",
        "Tensors of 2**20 elements and more, also of numbers that are no powers of two, are moved and reduced "
        "like small ones.",
        "torch.distributed docs: no size is excepted",
    ),
)

BARRIER = (
    _of("BARRIER", "ALL", "No member leaves a barrier before every member has entered."),
    _of(
        "BARRIER",
        "GROUP",
        "A barrier waits for the members of its group and for no other rank.",
        "",
        Capability.GROUPS,
    ),
)

_REFUSED = "is an error in the calling rank; nothing is sent, and the rank can go on."

ERRORS = (
    _all(
        "ERROR-ROOT",
        f"A root that is named both by src (dst) and by group_src (group_dst), or is missing where one is "
        f"required, {_REFUSED}",
        "torch.distributed.broadcast, reduce, gather and scatter docs (group_src, group_dst); "
        "INF: that it is a ValueError",
        level=Level.L2,
    ),
    _all(
        "ERROR-RANGE",
        f"A root outside the group, beyond the last rank or negative, {_REFUSED}",
        "torch.distributed.broadcast, reduce, gather and scatter docs (src, dst: a rank); INF: torch "
        "names no error; accepted in silence it would be another rank's value, or nobody's",
        level=Level.L2,
    ),
    _all(
        "ERROR-LIST",
        f"A gather (scatter) without the list of tensors on its root {_REFUSED}",
        "torch.distributed.gather and scatter docs (gather_list, scatter_list); INF: that it is a "
        "ValueError",
        level=Level.L2,
    ),
)

COLLECTIVES: tuple[Requirement, ...] = (
    *MOVEMENT,
    *REDUCTIONS,
    *COALESCED,
    *ROOTS,
    *LAYOUTS,
    *EMPTY,
    *GROUPS,
    *NUMBERS,
    *BUFFERS,
    *AMOUNTS,
    *BARRIER,
    *ERRORS,
)
