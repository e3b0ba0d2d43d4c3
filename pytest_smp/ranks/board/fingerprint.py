"""The description of each call of a process group, taken from its arguments.

A call is recorded as a key, which is cheap to make and to look up; the description in words is made
from each key once. The fields that members must agree on are those that `sim` compares.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pytest_smp.ranks.board.recorder import BoardRecorder, Description, Fields
from smp_core.transport.ddp_calls import ddp_tensor
from smp_core.transport.messages import Size, elements
from smp_core.transport.peers import Source

#: Of a tensor: its dtype and shape.
Spec = tuple[torch.dtype, torch.Size]


class Key(NamedTuple):
    """A call, with the tensors that the rank brings and gets.

    ``cuts`` are the two lists of rows of an all_to_all_single, ``tensor`` is what DDP brings.
    """

    operation: str
    op: str | None
    root: int | None
    brings: tuple[Spec, ...]
    gets: tuple[Spec, ...] = ()
    cuts: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    tensor: str = ""

    def with_tensor(self, frame: types.FrameType) -> Key:
        """The key, with the tensor's name if DDP makes the call on its own account.

        ``frame``: see ddp_tensor.
        """
        if not self.brings:
            return self
        tensor = ddp_tensor(frame, self.operation, self.brings[0][0])
        return self._replace(tensor=tensor) if tensor else self


def specs(tensors: Any) -> tuple[Spec, ...]:
    """The dtypes and shapes of a tensor, a list of them, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return ((tensors.dtype, tensors.shape),)
    if len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
        tensor = tensors[0]
        return ((tensor.dtype, tensor.shape),)
    return tuple(spec for each in tensors for spec in specs(each))


_OPS: dict[Any, str] = {}


def _op_name(op: Any) -> str:
    plain = getattr(op, "op", op)  # a ReduceOp, or its kind
    name = _OPS.get(plain)
    if name is None:
        name = _OPS[plain] = str(plain.name)
    return name


def _op(opts: Any) -> str:
    if opts is None:
        return "SUM"
    return _op_name(getattr(opts, "reduceOp", opts))


def _root(opts: Any) -> int:
    root = getattr(opts, "rootRank", opts)
    return int(root)


# ---- Keys: the arguments are those of torch's ProcessGroup, in both of its spellings --------------


def _barrier(opts: Any = None, **_: Any) -> Key:
    return Key("barrier", None, None, ())


def _monitored(*_: Any, **__: Any) -> Key:
    return Key("monitored_barrier", None, None, ())


def _broadcast(
    tensors: Any = None, opts: Any = None, *_: Any, tensor: Any = None, root: Any = 0
) -> Key:
    brings = specs(tensors if tensor is None else tensor)
    return Key("broadcast", None, _root(root if opts is None else opts), brings)


def _all_reduce(name: str) -> Callable[..., Key]:
    def key(
        tensors: Any = None, opts: Any = None, *_: Any, tensor: Any = None, op: Any = None
    ) -> Key:
        brings = specs(tensors if tensor is None else tensor)
        return Key(name, _op(op if opts is None else opts), None, brings)

    return key


def _reduce(
    tensors: Any = None,
    opts: Any = None,
    *rest: Any,
    tensor: Any = None,
    root: Any = 0,
    op: Any = None,
) -> Key:
    brings = specs(tensors if tensor is None else tensor)
    if opts is not None and hasattr(opts, "rootRank"):
        return Key("reduce", _op(opts), _root(opts), brings)
    op = rest[0] if rest else op
    return Key("reduce", _op(op), _root(root if opts is None else opts), brings)


def _gathering(name: str) -> Callable[..., Key]:
    def key(outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Key:
        return Key(name, None, None, specs(inputs), specs(outputs))

    return key


def _all_gather_coalesced(outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Key:
    by_input = [list(each) for each in zip(*outputs, strict=True)]  # a list per rank comes in
    return Key("all_gather_coalesced", None, None, specs(inputs), specs(by_input))


def _scattering(name: str) -> Callable[..., Key]:
    def key(
        outputs: Any, inputs: Any, opts: Any = None, *rest: Any, op: Any = None, **_: Any
    ) -> Key:
        return Key(name, _op(op if opts is None else opts), None, specs(inputs), specs(outputs))

    return key


def _gather(outputs: Any, inputs: Any, opts: Any = None, *_: Any, root: Any = 0, **__: Any) -> Key:
    return Key("gather", None, _root(root if opts is None else opts), specs(inputs))


def _scatter(outputs: Any, inputs: Any, opts: Any = None, *_: Any, root: Any = 0, **__: Any) -> Key:
    return Key("scatter", None, _root(root if opts is None else opts), specs(outputs))


def _all_to_all_single(
    output: Any, input: Any, outputs: Any = None, inputs: Any = None, opts: Any = None, **_: Any
) -> Key:
    cuts = tuple(inputs or ()), tuple(outputs or ())
    return Key("all_to_all_single", None, None, specs(input), specs(output), cuts)


#: By name of the method of a process group.
COLLECTIVES: dict[str, Callable[..., Key]] = {
    "barrier": _barrier,
    "monitored_barrier": _monitored,
    "broadcast": _broadcast,
    "allreduce": _all_reduce("all_reduce"),
    "allreduce_coalesced": _all_reduce("all_reduce_coalesced"),
    "reduce": _reduce,
    "allgather": _gathering("all_gather"),
    "allgather_coalesced": _all_gather_coalesced,
    "all_gather_single": _gathering("all_gather_single"),
    "_allgather_base": _gathering("all_gather_single"),
    "all_gather_single_coalesced": _gathering("all_gather_single_coalesced"),
    "allgather_into_tensor_coalesced": _gathering("all_gather_single_coalesced"),
    "reduce_scatter": _scattering("reduce_scatter"),
    "reduce_scatter_single": _scattering("reduce_scatter_single"),
    "_reduce_scatter_base": _scattering("reduce_scatter_single"),
    "reduce_scatter_single_coalesced": _scattering("reduce_scatter_single_coalesced"),
    "reduce_scatter_tensor_coalesced": _scattering("reduce_scatter_single_coalesced"),
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _gathering("all_to_all"),
    "all_to_all_single": _all_to_all_single,
    "alltoall_base": _all_to_all_single,
}

#: Operations whose sizes may differ between members: elements are compared by pairs of members.
_BY_PAIRS = ("all_gather", "all_gather_coalesced", "all_to_all", "all_to_all_single")


def unknown(operation: str) -> Description:
    """The description of a call with unknown arguments: the call counts, and is compared with none."""
    return Description(operation, None, elements=0)


def describe(key: Key, size: int) -> Description:
    """A collective in words, for a group of so many."""
    brings = key.brings
    fields: list[tuple[str, str | int]] = []
    if key.op is not None:
        fields.append(("reduce op", key.op))
    if key.root is not None:
        fields.append(("root", key.root))
    told: Fields = ()
    if brings:
        fields.append(("dtype", _dtypes(brings)))
        shape = "shape", _shapes(brings)
        if key.operation not in _BY_PAIRS:
            fields.append(shape)
        elif key.operation.startswith("all_gather"):
            told = (shape,)
    if key.tensor:
        told = (*told, ("tensor", key.tensor))
    sent: tuple[Size, ...] = ()
    expected: tuple[Size, ...] = ()
    if key.operation == "all_to_all_single":
        # Rows that do not add up are an error of this rank alone, and no size that others could meet.
        if _rows_add_up(key, size):
            sent, expected = (
                _parts(*each, size) for each in zip(brings + key.gets, key.cuts, strict=True)
            )
    elif key.operation in _BY_PAIRS:
        sent, expected = (tuple(tuple(shape) for _, shape in of) for of in (brings, key.gets))
    return Description(key.operation, tuple(fields), told, sent, expected, _elements(key, size))


def _elements(key: Key, size: int) -> int:
    """The number of elements that the call surely moves."""
    counts = _counts(key.brings)
    if key.operation == "all_to_all_single":
        # Rows that do not add up: to be refused, so that nothing is sure to move.
        return sum(counts) if _rows_add_up(key, size) else 0
    if key.operation == "all_to_all":
        return sum(counts)
    return (sum(counts) if all(counts) else 0) if counts else 1


def _describe_post(operation: str, of: Sequence[Spec]) -> Description:
    """The tensor of a send or a receive in words."""
    counts = _counts(of)
    fields: Fields = (("dtype", _dtypes(of)), ("shape", _shapes(of)))
    return Description(operation, fields, sent=counts, elements=sum(counts))


def record_post(
    recorder: BoardRecorder, group: int, sends: bool, tensors: Any, peer: Source, tag: int
) -> int:
    """Record a send or a receive; return its number."""
    verb, tensor = "send" if sends else "recv", specs(tensors)
    key = verb, tensor
    return recorder.post(sends, group, peer, tag, key, lambda: _describe_post(verb, tensor))


def _counts(of: Sequence[Spec]) -> tuple[int, ...]:
    return tuple(math.prod(shape) for _, shape in of)


def _parts(spec: Spec, cuts: Sequence[int], size: int) -> tuple[Size, ...]:
    """The shapes into which a tensor is cut along its rows."""
    rows, *row = spec[1] or (1,)
    if not cuts and rows % size:  # what Gloo takes all the same, if the elements can be divided
        return (math.prod(spec[1]) // size,) * size
    return tuple((cut, *row) for cut in cuts or (rows // size,) * size)


def _rows_add_up(key: Key, size: int) -> bool:
    sides = zip(key.brings + key.gets, key.cuts, strict=True)
    return all(_adds_up(spec, cuts, size) for spec, cuts in sides)


def _adds_up(spec: Spec, cuts: Sequence[int], size: int) -> bool:
    counts = [*map(elements, _parts(spec, cuts, size))]
    return sum(counts) == math.prod(spec[1]) and min(counts) >= 0 and len(counts) == size


def _dtypes(of: Sequence[Spec]) -> str:
    return " ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype, _ in of))


def _shapes(of: Sequence[Spec]) -> str:
    return " ".join(str(list(shape)) for _, shape in of)


def making(members: tuple[int, ...]) -> Description:
    """A call of new_group in words; those that wait for each other stand in ``expected``."""
    return Description("new_group", (("ranks", str([*members])),), expected=members, elements=0)
