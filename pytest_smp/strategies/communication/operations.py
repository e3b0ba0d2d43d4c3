"""Every operation of a program, as a table: its tensors, its call, its results by the model.

The model is plain Python on flat lists: what each participant's tensors hold after the call,
computed from what they held before, the members' order and the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_smp.ranks.capabilities import Capability
from pytest_smp.strategies.communication.steps import Shape, Step
from pytest_smp.strategies.communication.values import Values, bound, reduced, stream

Shapes = Callable[[Step, int], Sequence[Shape]]
#: By rank, its tensors' values. None: the operation leaves them undefined.
Held = dict[int, list[Any]]


@dataclass(frozen=True)
class ProgramOperation:
    """The facts by which one operation is drawn, printed and computed.

    Attributes:
        capability: the capability that a backend must claim.
        inputs, outputs: the shapes of a rank's tensors; none where it brings none.
        results: the outputs by rank, from the inputs by rank.
        arguments: the arguments of the call before group and mode; ``{x}`` and ``{y}`` are input and output.
        x_list, y_list: whether the call takes a list of tensors.
        in_place: whether the input is the output.
        rooted, reduces: whether there is a root, a reduce op.
        modes: the existing ones of "sync" and "async".
        alone: whether a group of one rank can call the operation.
    """

    capability: Capability
    inputs: Shapes
    outputs: Shapes
    results: Callable[[Step, Held], Held]
    arguments: tuple[str, ...] = ()
    x_list: bool = False
    y_list: bool = False
    in_place: bool = False
    rooted: bool = False
    reduces: bool = False
    modes: tuple[str, ...] = ("sync", "async")
    alone: bool = True

    @property
    def has_tensors(self) -> bool:
        """True if the operation moves tensors."""
        return self.capability not in (Capability.OBJECTS, Capability.BARRIER)


# ---- Shapes --------------------------------------------------------------------------------------


def _none(step: Step, rank: int) -> Sequence[Shape]:
    return ()


def _one(step: Step, rank: int) -> Sequence[Shape]:
    return (step.shape,)


def _each(step: Step, rank: int) -> Sequence[Shape]:
    return (step.shape,) * len(step.members)


def _joined(step: Step, rank: int) -> Sequence[Shape]:
    return ((len(step.members) * step.shape[0], *step.shape[1:]),)


def _at_root(shapes: Shapes) -> Shapes:
    return lambda step, rank: shapes(step, rank) if rank == step.root else ()


def _at_peer(step: Step, rank: int) -> Sequence[Shape]:
    return (step.shape,) if rank == step.peer else ()


def _sent(step: Step, rank: int) -> Sequence[Shape]:
    return [(rows, *step.shape[1:]) for rows in step.rows[step.position(rank)]]


def _received(step: Step, rank: int) -> Sequence[Shape]:
    return [(rows[step.position(rank)], *step.shape[1:]) for rows in step.rows]


def _total(shapes: Shapes) -> Shapes:
    def total(step: Step, rank: int) -> Sequence[Shape]:
        return ((sum(shape[0] for shape in shapes(step, rank)), *step.shape[1:]),)

    return total


# ---- Results -------------------------------------------------------------------------------------


def _over(step: Step, tensors: Sequence[Values]) -> Values:
    return reduced(step.dtype, step.reduce_op, tensors)


def _cut(values: Values, shapes: Sequence[Shape]) -> list[Values]:
    """A flat list cut into tensors of these shapes."""
    parts, at = [], 0
    for shape in shapes:
        parts.append(values[at : at + math.prod(shape)])
        at += math.prod(shape)
    return parts


def _chained(tensors: Sequence[Values]) -> Values:
    return [value for tensor in tensors for value in tensor]


def _nothing(step: Step, held: Held) -> Held:
    return {}


def _all_reduce(step: Step, held: Held) -> Held:
    total = _over(step, [held[rank][0] for rank in step.members])
    return {rank: [total] for rank in step.members}


def _reduce(step: Step, held: Held) -> Held:
    total = _over(step, [held[rank][0] for rank in step.members])
    return {rank: [total if rank == step.root else None] for rank in step.members}


def _broadcast(step: Step, held: Held) -> Held:
    return dict.fromkeys(step.members, held[step.root])


def _gathered(step: Step, held: Held) -> list[Values]:
    return [held[rank][0] for rank in step.members]


def _all_gather(step: Step, held: Held) -> Held:
    return {rank: _gathered(step, held) for rank in step.members}


def _all_gather_single(step: Step, held: Held) -> Held:
    return {rank: [_chained(_gathered(step, held))] for rank in step.members}


def _gather(step: Step, held: Held) -> Held:
    return {step.root: _gathered(step, held)}


def _scatter(step: Step, held: Held) -> Held:
    return {rank: [held[step.root][at]] for at, rank in enumerate(step.members)}


def _reduce_scatter(step: Step, held: Held) -> Held:
    return {
        rank: [_over(step, [held[each][at] for each in step.members])]
        for at, rank in enumerate(step.members)
    }


def _reduce_scatter_single(step: Step, held: Held) -> Held:
    return _reduce_scatter(
        step, {rank: _cut(held[rank][0], _each(step, rank)) for rank in step.members}
    )


def _all_to_all(step: Step, held: Held) -> Held:
    return {rank: [held[each][at] for each in step.members] for at, rank in enumerate(step.members)}


def _all_to_all_single(step: Step, held: Held) -> Held:
    cut = {rank: _cut(held[rank][0], _sent(step, rank)) for rank in step.members}
    return {rank: [_chained(parts)] for rank, parts in _all_to_all(step, cut).items()}


def _send(step: Step, held: Held) -> Held:
    return {step.peer: held[step.root]}


def neighbour(step: Step, rank: int, shift: int) -> int:
    """The member of a batch that stands ``shift`` places behind ``rank``."""
    return step.members[(step.position(rank) + shift) % len(step.members)]


def _batch(step: Step, held: Held) -> Held:
    return {rank: held[neighbour(step, rank, -step.shift)] for rank in step.members}


# ---- The table -----------------------------------------------------------------------------------

#: In the order in which a failing program shrinks: the first is the simplest.
OPERATIONS: Mapping[str, ProgramOperation] = {
    "barrier": ProgramOperation(Capability.BARRIER, _none, _none, _nothing),
    "all_reduce": ProgramOperation(
        Capability.ALL_REDUCE,
        _one,
        _one,
        _all_reduce,
        ("{x}", "op=dist.ReduceOp.{op}"),
        in_place=True,
        reduces=True,
    ),
    "broadcast": ProgramOperation(
        Capability.BROADCAST,
        _at_root(_one),
        _one,
        _broadcast,
        ("{x}", "src={root}"),
        in_place=True,
        rooted=True,
    ),
    "reduce": ProgramOperation(
        Capability.REDUCE,
        _one,
        _one,
        _reduce,
        ("{x}", "dst={root}", "op=dist.ReduceOp.{op}"),
        in_place=True,
        rooted=True,
        reduces=True,
    ),
    "all_gather": ProgramOperation(
        Capability.ALL_GATHER,
        _one,
        _each,
        _all_gather,
        ("{y}", "{x}"),
        y_list=True,
    ),
    "all_gather_single": ProgramOperation(
        Capability.ALL_GATHER_SINGLE,
        _one,
        _joined,
        _all_gather_single,
        ("{y}", "{x}"),
    ),
    "gather": ProgramOperation(
        Capability.GATHER,
        _one,
        _at_root(_each),
        _gather,
        ("{x}", "{y}", "dst={root}"),
        y_list=True,
        rooted=True,
    ),
    "scatter": ProgramOperation(
        Capability.SCATTER,
        _at_root(_each),
        _one,
        _scatter,
        ("{y}", "{x}", "src={root}"),
        x_list=True,
        rooted=True,
    ),
    "reduce_scatter": ProgramOperation(
        Capability.REDUCE_SCATTER,
        _each,
        _one,
        _reduce_scatter,
        ("{y}", "{x}", "op=dist.ReduceOp.{op}"),
        x_list=True,
        reduces=True,
    ),
    "reduce_scatter_single": ProgramOperation(
        Capability.REDUCE_SCATTER_SINGLE,
        _joined,
        _one,
        _reduce_scatter_single,
        ("{y}", "{x}", "op=dist.ReduceOp.{op}"),
        reduces=True,
    ),
    "all_to_all": ProgramOperation(
        Capability.ALL_TO_ALL,
        _sent,
        _received,
        _all_to_all,
        ("{y}", "{x}"),
        x_list=True,
        y_list=True,
    ),
    "all_to_all_single": ProgramOperation(
        Capability.ALL_TO_ALL_SINGLE,
        _total(_sent),
        _total(_received),
        _all_to_all_single,
        ("{y}", "{x}"),
    ),
    "send": ProgramOperation(
        Capability.POINT_TO_POINT,
        _at_root(_one),
        _at_peer,
        _send,
        alone=False,
    ),
    "batch_isend_irecv": ProgramOperation(
        Capability.COALESCING,
        _one,
        _one,
        _batch,
        modes=("async",),
        alone=False,
    ),
    **{
        name: ProgramOperation(
            Capability.OBJECTS, _none, _none, _nothing, modes=("sync",), alone=alone
        )
        for name, alone in (
            ("smp.barrier", True),
            ("smp.allgather", True),
            ("smp.broadcast", True),
            ("smp.send", False),
        )
    },
}


# ---- Elements of a step's tensors ----------------------------------------------------------------

#: A call's values start so many elements behind those of the call before it.
_STRIDE = 7


def unique(shape: Shape, layout: str) -> Shape:
    """The part of a tensor that has memory of its own: all, unless its first dimension is expanded."""
    return (min(shape[0], 1), *shape[1:]) if layout == "expanded" else shape


def given(step: Step, rank: int, world: int) -> list[Values]:
    """The elements of this rank's inputs before the call, without the repetitions of an expanded layout."""
    operation = OPERATIONS[step.operation]
    layout = (step.output if operation.in_place else step.input).layout
    shapes = [unique(shape, layout) for shape in operation.inputs(step, rank)]
    largest = bound(step.dtype, step.reduce_op, len(step.members))
    count = sum(map(math.prod, shapes))
    return _cut(stream(step.dtype, largest, rank, world, _STRIDE * step.number, count), shapes)


def expected(step: Step, inputs: Mapping[int, list[Values]]) -> Held:
    """The elements of each participant's outputs after the call, from those of :func:`given`."""
    operation = OPERATIONS[step.operation]
    held = dict(inputs)
    if step.input.layout == "expanded" and not operation.in_place:
        held = {
            rank: [
                values * shape[0]
                for values, shape in zip(tensors, operation.inputs(step, rank), strict=True)
            ]
            for rank, tensors in held.items()
        }
    return operation.results(step, held)


def payload(step: Step, rank: int) -> Any:
    """The object that this rank sends: unlike those of other ranks and other steps."""
    own = 10 * step.number + rank
    return [
        own,
        f"step {step.number} of rank {rank}",
        {"rank": rank, "nested": [own, (None, True, 1.5)]},
        bytes([own % 256] * 3),
        [],
    ][step.payload]


#: How many kinds of object there are.
PAYLOADS = 5
