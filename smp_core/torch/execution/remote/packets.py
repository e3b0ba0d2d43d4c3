"""One request as one run of bytes: what it says, the nest of its arguments, and the tensors in it.

A nest is pickled with every tensor left out of it (a persistent id), so that any picklable value may
hold tensors anywhere, and a tensor that stands in two places is one tensor on the other side, too.
A module of the model is named by its path.
Tensors keep dtype, shape, strides and, if contiguous, their place within 64 bytes: kernels choose their order of
summation by them.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from smp_core.errors import PayloadError
from smp_core.torch import session as sessions

Tensor = torch.Tensor

_DTYPES: list[torch.dtype] = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}
_LENGTHS = struct.Struct("<QQQQ")  # of all, of the head, of the nest; and who sent it
_ALIGNMENT = 64  # bytes: of torch's memory


class Frozen(NamedTuple):
    """A nest ready to be sent: its pickle, the tensors left out of it, and which of them are part of
    the graph.
    """

    nest: bytes
    tensors: list[Tensor]
    requires: list[bool]


class _Spec(NamedTuple):
    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # None: contiguous
    requires_grad: bool
    start: int


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.tensors: list[Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | str | None:
        if isinstance(obj, nn.Module):
            return _path(obj)
        if not isinstance(obj, Tensor) or obj.layout is not torch.strided or obj.is_quantized:
            return None
        if obj.device.type != "cpu":
            return None
        index = self._index.get(id(obj))
        if index is None:
            index = self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return index


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Any]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int | str) -> Any:
        if isinstance(pid, str):
            model = sessions.current("a module as an argument").model
            assert model is not None  # the sender's path is of it
            return model.sites[pid].module
        return self._tensors[pid]


def _path(module: nn.Module) -> str | None:
    """Where a module stands in the model, None if it does not: then it is a value like others.

    One that does is the receiver's own module there, not a copy: a call of it goes to its owner.
    """
    model = sessions.current("a module as an argument").model
    if model is None:
        return None
    return next((path for path, site in model.sites.items() if site.module is module), None)


def freeze(value: object, what: str, grad: bool) -> Frozen:
    """Take a nest apart. ``grad``: whether tensors that require a gradient are part of the graph.

    Raises PayloadError, beginning with ``what``, if it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception as error:
        raise PayloadError(
            f"{what} cannot be sent to another rank: {type(error).__name__}: {error}. "
            "Pass tensors and picklable values, or keep caller and module in one partition"
        ) from error
    tensors = pickler.tensors
    return Frozen(file.getvalue(), tensors, [grad and each.requires_grad for each in tensors])


NOTHING = Frozen(pickle.dumps(None), [], [])


class Parcel:
    """What has come: the tensors first, so that they can be tied into a graph before the nest is put
    together around them.
    """

    __slots__ = ("_nest", "requires", "tensors")

    def __init__(self, nest: bytes, tensors: list[Tensor], requires: list[bool]) -> None:
        self._nest, self.tensors, self.requires = nest, tensors, requires

    def differentiable(self) -> list[int]:
        """Which tensors are part of the sender's graph."""
        return [index for index, requires in enumerate(self.requires) if requires]

    def thaw(self, tensors: Sequence[Any] | None = None) -> Any:
        """The nest, with these tensors in the places of those that came."""
        given = self.tensors if tensors is None else tensors
        return _Unpickler(io.BytesIO(self._nest), given).load()


def encode(sender: int, message: object, frozen: Frozen, least: int) -> Tensor:
    """One uint8 tensor of at least ``least`` elements. The rest is of no account, and ends in zeros."""
    packed = [_packed(tensor) for tensor in frozen.tensors]
    specs, at = [], 0
    for tensor, (flat, strides), requires in zip(
        frozen.tensors, packed, frozen.requires, strict=True
    ):
        # A tensor lies in the receiver's memory as it does in the sender's, a part of a batch in the midst of a
        # row of 64 bytes: MKL sums in another order where it lies otherwise.
        at += flat.data_ptr() % _ALIGNMENT // flat.itemsize * flat.itemsize if flat.numel() else 0
        specs.append(_Spec(_NUMBER[tensor.dtype], tuple(tensor.shape), strides, requires, at))
        at = -(-(at + flat.numel() * flat.itemsize) // _ALIGNMENT) * _ALIGNMENT
    head = pickle.dumps((message, [tuple(spec) for spec in specs]), 5)
    text = _LENGTHS.size + len(head) + len(frozen.nest)
    first = -(-text // _ALIGNMENT) * _ALIGNMENT
    total = first + at
    buffer = torch.empty(max(total, least), dtype=torch.uint8)
    memory = _memory(buffer)
    buffer[max(total, least - _ALIGNMENT) :] = 0  # not what its memory held before: transport.py
    memory[:text] = (
        _LENGTHS.pack(total, len(head), len(frozen.nest), sender) + head + frozen.nest
    )  # one copy: they are short
    for (flat, _), spec in zip(packed, specs, strict=True):
        if flat.numel():
            place = torch.frombuffer(
                memory, dtype=flat.dtype, count=flat.numel(), offset=first + spec.start
            )
            place.copy_(flat)
    return buffer


def beginning(buffer: Tensor) -> tuple[int, int]:
    """Of the message that begins in ``buffer``: how many bytes it takes, and who sent it."""
    total, _, _, sender = _LENGTHS.unpack_from(_memory(buffer))
    return total, sender


def decode(buffer: Tensor) -> tuple[Any, Parcel]:
    """The message, and what came with it. The tensors lie in the buffer's memory."""
    memory = _memory(buffer)
    _, head, nest, _ = _LENGTHS.unpack_from(memory)
    begin = _LENGTHS.size
    message, specs = pickle.loads(memory[begin : begin + head])
    first = -(-(begin + head + nest) // _ALIGNMENT) * _ALIGNMENT
    tensors = [_unpacked(memory, first, _Spec(*spec)) for spec in specs]
    text = bytes(memory[begin + head : begin + head + nest])
    return message, Parcel(text, tensors, [spec[3] for spec in specs])


def _memory(buffer: Tensor) -> memoryview:
    array: Any = buffer.numpy()
    return memoryview(array)


def _packed(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Its elements, flat, each once; and the strides, if they are not those of a contiguous one."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1), None
    return tensor[_once(tensor.shape, tensor.stride())].reshape(-1), tuple(tensor.stride())


def _once(shape: Sequence[int], strides: Sequence[int]) -> tuple[slice, ...]:
    """An index that takes one element of every dimension of stride 0 (an expanded one)."""
    return tuple(
        slice(0, 1) if not stride and side else slice(None)
        for side, stride in zip(shape, strides, strict=True)
    )


def _unpacked(memory: memoryview, first: int, spec: _Spec) -> Tensor:
    dtype, shape, strides, _, start = spec
    count = 1
    for index, side in enumerate(shape):
        count *= min(side, 1) if strides is not None and not strides[index] else side
    if not count:
        empty = torch.empty(shape, dtype=_DTYPES[dtype])
        return empty if strides is None else empty.as_strided(shape, strides)
    # A tensor of its own, not a view of the buffer: views would share one version counter.
    flat = torch.frombuffer(memory, dtype=_DTYPES[dtype], count=count, offset=first + start)
    if strides is None:
        return flat.resize_(shape)  # no view, which modules could not modify in place
    spread = torch.empty_strided(shape, strides, dtype=_DTYPES[dtype])
    once = spread[_once(shape, strides)]
    once.copy_(flat.view(once.shape))
    return spread
