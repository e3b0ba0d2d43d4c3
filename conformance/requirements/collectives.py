"""Requirements of the tensor collectives of a process group: values, layouts, dtypes, roots.

An id is ``COLL-``, the collective, and what of it: so a backend that fails for one collective and
one layout can name just that. ``_ALL`` are those of every collective, each tested with all that the
backend claims. Their source is torch's documentation of the function; what it leaves open and every
user of it relies on is INF, with the reason.
"""

from __future__ import annotations

from conformance.requirements.registry import Capability, Level, Requirement


def _docs(function: str) -> str:
    return f"torch.distributed.{function} docs"


#: Words of an id, and the function's name.
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
    """A requirement of one collective; ``source`` comes after the function's documentation.

    It needs ``more`` beside the collective.
    """
    collective = _NAMES[words]
    made = "; ".join(filter(None, [_docs(collective.value), source]))
    needs = frozenset({Capability.PROCESS_GROUPS, collective, *more})
    return Requirement(f"COLL-{words}-{aspect}", sentence, made, Level.L1, needs)


def operation_of(declared: Requirement) -> str:
    """The name of the collective, for a requirement of one."""
    (collective,) = declared.needs.intersection(_NAMES.values())
    return collective.value


MOVEMENT = (
    _of("BROADCAST", "VALUE", "Every member's tensor holds what the root's does."),
    _of(
        "ALL-GATHER",
        "VALUE",
        "On every member the i-th tensor of the list holds the i-th member's tensor.",
    ),
    _of(
        "ALL-GATHER",
        "UNEVEN",
        "Members' tensors may differ in size, 0 among them, as long as each finds its place in the "
        "others' lists.",
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
    _of("SCATTER", "VALUE", "The i-th member's tensor holds the i-th of the root's list."),
    _of(
        "ALL-TO-ALL",
        "VALUE",
        "The i-th member's j-th output holds the j-th member's i-th input.",
    ),
    _of(
        "ALL-TO-ALL",
        "UNEVEN",
        "The i-th member's j-th output holds the j-th member's i-th input where all sizes differ, "
        "0 among them.",
        "the examples",
        Capability.UNEVEN,
    ),
    _of(
        "ALL-TO-ALL-SINGLE",
        "VALUE",
        "Without split sizes, the i-th part of member j's input is the j-th part of member i's output.",
    ),
    _of(
        "ALL-TO-ALL-SINGLE",
        "UNEVEN",
        "Inputs are cut by input_split_sizes and outputs by output_split_sizes along the first "
        "dimension, 0 among them.",
        "the examples",
    ),
)

_MANAGER = "torch.distributed._coalescing_manager (its docstring), as DDP and FSDP use it"

COALESCED = tuple(
    _of(
        words,
        "COALESCED",
        "Several calls that are issued as one, by the coalescing manager or by the operators for several "
        f"tensors, each do what they do alone, whatever their shapes: {does}.",
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
    _of(
        "ALL-REDUCE", "SUM", "Every member gets the sum over the members, element by element.", _OPS
    ),
    _of("ALL-REDUCE", "PRODUCT", "PRODUCT gives every member the product over the members.", _OPS),
    _of("ALL-REDUCE", "MIN-MAX", "MIN and MAX give every member the least and the largest.", _OPS),
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
        "An average of large float16 numbers does not overflow, and lies among them but for "
        "rounding: AVG divides before it sums.",
        f"{_OPS}: AVG divides values by the world size before summing",
    ),
    _of(
        "ALL-REDUCE",
        "WRAP",
        "Sums and products of integers wrap around, every bit of the dtype kept.",
        "INF: as torch.add and torch.mul do",
    ),
    _of(
        "ALL-REDUCE",
        "BOOL",
        'Of bool tensors SUM is "or" and PRODUCT is "and", and every byte of the result is 0 or 1.',
        "INF: as torch.add and torch.mul do",
    ),
    _of(
        "ALL-REDUCE",
        "IDENTICAL",
        "Of any real numbers, all members hold the same bits.",
        "bitwise identical in all processes",
    ),
    _of("REDUCE", "VALUE", "The root gets what all_reduce gives everybody, for every op.", _OPS),
    _of(
        "REDUCE-SCATTER",
        "VALUE",
        "The i-th member gets the reduction of everybody's i-th input, for every op.",
        _OPS,
    ),
    _of(
        "REDUCE-SCATTER-SINGLE",
        "CAT",
        "The i-th member gets the reduction of the i-th part of everybody's input, a concatenation, "
        "for every op.",
        f"form (i); {_OPS}",
    ),
    _of(
        "REDUCE-SCATTER-SINGLE",
        "STACK",
        "The i-th member gets the reduction of the i-th part of everybody's input, a stack, for every "
        "op.",
        f"form (ii); {_OPS}",
    ),
)

ROOTS = tuple(
    _of(words, "ROOT", f"{root} is a rank of the world, group_{root} is one of the group{default}.")
    for words, root, default in (
        ("BROADCAST", "src", ""),
        ("REDUCE", "dst", ""),
        ("GATHER", "dst", "; without either it is rank 0 of the world"),
        ("SCATTER", "src", "; without either it is rank 0 of the world"),
    )
)

_ANY_VIEW = "INF: it takes tensors, and a view is one; pytorch#192920 treats the opposite as a bug"

LAYOUTS = (
    *(
        _of(
            words,
            "LAYOUT",
            "Tensors that are not contiguous are read and written as they lie, and nothing beside them.",
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
                "Inputs that are not contiguous, expanded ones among them, are read as they lie.",
            ),
            (
                "OUT",
                "Outputs that are not contiguous are written as they lie, and nothing beside them.",
            ),
        )
    ),
)

EMPTY = tuple(
    _of(
        words,
        "EMPTY",
        "Tensors without elements are taken, and the next call is as if this had not been.",
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
    """A requirement of every collective that the backend claims; it needs ``more`` beside one."""
    needs = frozenset({Capability.PROCESS_GROUPS, *more})
    return Requirement(f"COLL-{aspect}", sentence, source, level, needs)


_NEW_GROUP = _docs("new_group")

GROUPS = (
    _all(
        "SIZES",
        "Collectives work in groups of every size: nobody is left out, and nobody taken twice.",
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
        "Unless told otherwise the ranks of a group ascend, whatever order they were listed in.",
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
        "Collectives in turn on groups that share ranks move each group's own values.",
        f"{_NEW_GROUP} (ranks; overlapping groups)",
        Capability.GROUPS,
    ),
    _all(
        "GROUP-OUTSIDER",
        "To a rank that is not in the group a collective returns None and leaves its tensors alone.",
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
        "Reductions treat infinities, NaNs and subnormals as arithmetic does: an infinity stays one, what "
        "is no number gives none, nothing is lost for being small, and no other element changes. Whether "
        "the MIN or MAX of a number and a NaN is the number or the NaN is left open.",
        "INF: as torch.add, torch.mul, torch.minimum and torch.maximum do; torch.distributed.ReduceOp docs "
        "name no number apart, and say nothing of MIN and MAX of a NaN",
    ),
    _all(
        "CONJUGATED",
        "Of a complex input that is a lazy conjugate, the conjugates are taken (gather, "
        "reduce_scatter, reduce_scatter_single; the other functions of torch refuse it).",
        "torch.Tensor.conj docs (a lazy conjugate is the tensor of the conjugates); INF: that "
        "collectives take it",
    ),
)

BUFFERS = (
    _all(
        "OFFSET",
        "A tensor that begins inside its storage is read and written where it lies.",
        "torch.Tensor.storage_offset docs; INF: collectives take tensors, not storages",
    ),
    _all(
        "INPUTS",
        "Inputs, and a broadcast's tensor on the root, are the same after the call.",
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
        "A member's input may be its own part of the output (all_gather, all_gather_single), and its "
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
        "Of two calls of one shape, one after the other, each moves its own values.",
        "torch.distributed docs (synchronous collective operations)",
    ),
    _all(
        "MANY",
        "Hundreds of calls in a row, of all kinds, each move their own values.",
        "torch.distributed docs (synchronous collective operations)",
    ),
    _all(
        "LARGE",
        "Tensors of up to 2**20 elements and more, also of no round number, are moved and reduced "
        "as small ones are.",
        "torch.distributed docs: no size is excepted",
    ),
)

BARRIER = (
    _of("BARRIER", "ALL", "No member leaves a barrier before every member has come to it."),
    _of(
        "BARRIER",
        "GROUP",
        "A barrier waits for the members of its group and for no other rank.",
        "",
        Capability.GROUPS,
    ),
)

_REFUSED = "is an error in the calling rank; nothing is sent, and it can go on."

ERRORS = (
    _all(
        "ERROR-ROOT",
        f"A root that is named by src (dst) and group_src (group_dst) both, or has to be named and is "
        f"not, {_REFUSED}",
        "torch.distributed.broadcast, reduce, gather and scatter docs (group_src, group_dst); "
        "INF: that it is a ValueError",
        level=Level.L2,
    ),
    _all(
        "ERROR-RANGE",
        f"A root that the group does not have, beyond its last rank or negative, {_REFUSED}",
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
