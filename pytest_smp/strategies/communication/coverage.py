"""The cells of the coverage table that a program hits: operation x dtype x kind of group x mode x layout."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from pytest_smp.ranks.capabilities import EVERYTHING, Capabilities, Capability
from pytest_smp.strategies.communication.operations import OPERATIONS
from pytest_smp.strategies.communication.program import Program
from pytest_smp.strategies.communication.steps import Step
from pytest_smp.strategies.numbers import ALL
from pytest_smp.strategies.recipes import LAYOUTS

NONE = "-"  #: of an axis that an operation does not have, such as a barrier's dtype

#: ``default``: all ranks, not made by the program. The others exclude each other: ``sorted``: ascending
#: with rank 0; ``without 0``: ascending without rank 0; ``unsorted``: any other order.
KINDS = ("default", "sorted", "without 0", "unsorted", "of one")
_API_KINDS = ("default", "sorted", "without 0", "of one")  # groups of the API are ascending


class Cell(NamedTuple):
    """One cell. ``send`` and ``recv`` are two operations, each with its own mode and layout."""

    operation: str
    dtype: str
    group: str
    mode: str
    layout: str


def kind_of(step: Step) -> str:
    """The kind of a step's group."""
    members = step.members
    if step.group in ("", "WORLD"):
        return "default"
    if len(members) == 1:
        return "of one"
    if [*members] != sorted(members):
        return "unsorted"
    return "sorted" if members[0] == 0 else "without 0"


def cells(program: Program) -> set[Cell]:
    """The cells that a program hits."""
    return {cell for step in program.steps for cell in cells_of(step)}


def cells_of(step: Step) -> Iterator[Cell]:
    """The cells that a step hits."""
    operation, kind = OPERATIONS[step.operation], kind_of(step)
    modes = ["sync" if lag is None else "async" for lag in step.lags]
    if step.operation == "send":
        yield Cell("send", step.dtype, kind, modes[0], step.input.layout)
        yield Cell("recv", step.dtype, kind, modes[1], step.output.layout)
        return
    for mode in dict.fromkeys(modes):
        if not operation.has_tensors:
            yield Cell(step.operation, NONE, kind, mode, NONE)
            continue
        yield Cell(step.operation, step.dtype, kind, mode, step.output.layout)
        if not operation.in_place:
            yield Cell(step.operation, step.dtype, kind, mode, step.input.layout)


def all_cells(capabilities: Capabilities = EVERYTHING) -> tuple[Cell, ...]:
    """The cells that a backend claims, in a fixed order."""
    return tuple(
        Cell(name, dtype, kind, mode, layout)
        for operation in claimed(capabilities)
        for name in (("send", "recv") if operation == "send" else (operation,))
        for dtype in claimed_dtypes(operation, capabilities)
        for kind in claimed_kinds(operation, capabilities)
        for mode in OPERATIONS[operation].modes
        for layout in _layouts(name, capabilities)
    )


def _layouts(name: str, capabilities: Capabilities) -> tuple[str, ...]:
    operation = OPERATIONS["send" if name == "recv" else name]
    if not operation.has_tensors:
        return (NONE,)
    inputs, outputs = claimed_layouts("send" if name == "recv" else name, capabilities)
    return outputs if operation.in_place or name == "recv" else inputs


def claimed_layouts(
    name: str, capabilities: Capabilities
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layouts of inputs and of outputs that a backend claims for an operation, simplest first."""
    needed = Capability.MESSAGE_LAYOUTS if _is_message(name) else Capability.LAYOUTS
    if needed not in capabilities:
        return ("contiguous",), ("contiguous",)
    return tuple(LAYOUTS), OUTPUT_LAYOUTS


def _is_message(name: str) -> bool:
    return OPERATIONS[name].capability in (Capability.POINT_TO_POINT, Capability.COALESCING)


#: The layouts of outputs: an expanded tensor cannot be written to.
OUTPUT_LAYOUTS = tuple(name for name in LAYOUTS if name != "expanded")


@functools.lru_cache(maxsize=64)
def claimed(capabilities: Capabilities) -> tuple[str, ...]:
    """The operations that a backend claims."""
    return tuple(
        name
        for name, operation in OPERATIONS.items()
        if operation.capability in capabilities
        and (
            operation.capability is Capability.OBJECTS or Capability.PROCESS_GROUPS in capabilities
        )
        and claimed_dtypes(name, capabilities)
    )


@functools.lru_cache(maxsize=4096)
def claimed_dtypes(name: str, capabilities: Capabilities, size: int = 1) -> tuple[str, ...]:
    """The dtypes on which a backend claims an operation over ``size`` ranks, simplest first."""
    operation = OPERATIONS[name]
    if not operation.has_tensors:
        return (NONE,)
    moved = Capability.POINT_TO_POINT if _is_message(name) else operation.capability
    names = (str(dtype).removeprefix("torch.") for dtype in ALL)
    return tuple(
        dtype
        for dtype in names
        if dtype in capabilities.moves(moved)
        and (not operation.reduces or reduce_ops(name, dtype, capabilities, size))
    )


_REDUCE_OPS = ("SUM", "PRODUCT", "AVG", "MIN", "MAX", "BAND", "BOR", "BXOR")


@functools.lru_cache(maxsize=4096)
def reduce_ops(name: str, dtype: str, capabilities: Capabilities, size: int = 1) -> tuple[str, ...]:
    """The reduce ops that a backend claims on a dtype, and that have one right result over ``size``
    ranks; simplest first.
    """
    refused = set()
    if dtype.startswith("complex"):
        if name == "all_reduce":  # by torch itself: "all_reduce does not support ..."
            refused.add("PRODUCT")
        # torch 2.13 divides complex64 (21-21j) by 7 into (3.0000002-3.0000002j): nobody promises
        # how a complex quotient is rounded. By a power of two every way is exact.
        if size & (size - 1):
            refused.add("AVG")
    return tuple(
        op
        for op in _REDUCE_OPS
        if op not in refused and dtype in capabilities.reductions.get(op, ())
    )


def claimed_kinds(name: str, capabilities: Capabilities) -> tuple[str, ...]:
    """The kinds of group on which a backend claims an operation."""
    operation = OPERATIONS[name]
    kinds: tuple[str, ...] = _API_KINDS if operation.capability is Capability.OBJECTS else KINDS
    if operation.capability is not Capability.OBJECTS and Capability.GROUPS not in capabilities:
        kinds = ("default",)
    if Capability.GROUP_ORDER not in capabilities:
        kinds = tuple(kind for kind in kinds if kind != "unsorted")
    return tuple(kind for kind in kinds if operation.alone or kind != "of one")
