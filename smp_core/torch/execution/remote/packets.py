"""One message as one run of bytes: the message, the pickled payload, and the tensors of the payload.

The payload is pickled with a persistent id in place of every tensor. Any picklable value may therefore hold
tensors anywhere, and a tensor that stands in two places is one tensor on the receiver, too. A module of the model
is pickled as its path. Tensors keep dtype, shape, strides and, if contiguous, their offset within 64 bytes,
because kernels choose their order of summation by them.
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
_LENGTHS = struct.Struct("<QQQQ")  # bytes of all, of the head, of the pickle; the sender's pp rank
_ALIGNMENT = 64  # bytes, that of torch's allocator


class OutgoingPayload(NamedTuple):
    """A value ready to be sent.

    Attributes:
        pickled: the value without its tensors.
        tensors: the tensors of the value, each once.
        requires: for each tensor, whether it is part of the sender's graph.
    """

    pickled: bytes
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
    def __init__(self, file: io.BytesIO, tensors: Sequence[object]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int | str) -> object:
        if isinstance(pid, str):
            model = sessions.current("a module as an argument").model
            assert model is not None  # only a path in the model is pickled as a path
            return model.sites[pid].module
        return self._tensors[pid]


def _path(module: nn.Module) -> str | None:
    """The path of a module in the model; None for any other module, which is pickled by value.

    The receiver finds its own module at the path, not a copy, so a call of the module goes to its owner.
    """
    model = sessions.current("a module as an argument").model
    if model is None:
        return None
    return next((path for path, site in model.sites.items() if site.module is module), None)


def freeze(value: object, what: str, grad: bool) -> OutgoingPayload:
    """Pickle a value and list its tensors.

    With ``grad``, tensors that require a gradient are part of the graph. Raises PayloadError, whose text begins
    with ``what``, if the value cannot be pickled.
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
    return OutgoingPayload(
        file.getvalue(), tensors, [grad and each.requires_grad for each in tensors]
    )


NOTHING = OutgoingPayload(pickle.dumps(None), [], [])


class ReceivedPayload:
    """A payload on its receiver.

    The tensors are there before the value is unpickled, so the receiver can tie them into a graph first.
    """

    __slots__ = ("_pickled", "requires", "tensors")

    def __init__(self, pickled: bytes, tensors: list[Tensor], requires: list[bool]) -> None:
        self._pickled, self.tensors, self.requires = pickled, tensors, requires

    def differentiable(self) -> list[int]:
        """The indices of the tensors that are part of the sender's graph."""
        return [index for index, requires in enumerate(self.requires) if requires]

    def thaw(self, tensors: Sequence[object] | None = None) -> Any:
        """Unpickle the value, with ``tensors`` in place of the received ones if they are given."""
        given = self.tensors if tensors is None else tensors
        return _Unpickler(io.BytesIO(self._pickled), given).load()


def encode(sender: int, message: object, payload: OutgoingPayload, least: int) -> Tensor:
    """Encode a message and its payload as one uint8 tensor of at least ``least`` elements, padded at the end."""
    packed = [_packed(tensor) for tensor in payload.tensors]
    specs, at = [], 0
    for tensor, (flat, strides), requires in zip(
        payload.tensors, packed, payload.requires, strict=True
    ):
        # The receiver gets the sender's offset within 64 bytes, such as that of a slice of a batch: MKL sums in
        # another order at another offset.
        at += flat.data_ptr() % _ALIGNMENT // flat.itemsize * flat.itemsize if flat.numel() else 0
        specs.append(_Spec(_NUMBER[tensor.dtype], tuple(tensor.shape), strides, requires, at))
        at = -(-(at + flat.numel() * flat.itemsize) // _ALIGNMENT) * _ALIGNMENT
    head = pickle.dumps((message, [tuple(spec) for spec in specs]), 5)
    text = _LENGTHS.size + len(head) + len(payload.pickled)
    first = -(-text // _ALIGNMENT) * _ALIGNMENT
    total = first + at
    buffer = torch.empty(max(total, least), dtype=torch.uint8)
    memory = bytes_of(buffer)
    # Old memory could hold the bytes by which transport.py tells that an envelope has not come.
    buffer[max(total, least - _ALIGNMENT) :] = 0
    memory[:text] = (
        _LENGTHS.pack(total, len(head), len(payload.pickled), sender) + head + payload.pickled
    )  # one copy is cheapest: the three are short
    for (flat, _), spec in zip(packed, specs, strict=True):
        if flat.numel():
            place = torch.frombuffer(
                memory, dtype=flat.dtype, count=flat.numel(), offset=first + spec.start
            )
            place.copy_(flat)
    return buffer


def beginning(buffer: Tensor) -> tuple[int, int]:
    """The size in bytes and the sender of the message that begins in ``buffer``."""
    total, _, _, sender = _LENGTHS.unpack_from(bytes_of(buffer))
    return total, sender


def decode(buffer: Tensor) -> tuple[Any, ReceivedPayload]:
    """Decode a message and its payload, whose tensors lie in the buffer's memory."""
    memory = bytes_of(buffer)
    _, head, length, _ = _LENGTHS.unpack_from(memory)
    begin = _LENGTHS.size
    message, specs = pickle.loads(memory[begin : begin + head])
    first = -(-(begin + head + length) // _ALIGNMENT) * _ALIGNMENT
    tensors = [_unpacked(memory, first, _Spec(*spec)) for spec in specs]
    pickled = bytes(memory[begin + head : begin + head + length])
    return message, ReceivedPayload(pickled, tensors, [spec[3] for spec in specs])


def bytes_of(buffer: Tensor) -> memoryview:
    """The bytes of a tensor of the CPU."""
    array: Any = buffer.numpy()
    return memoryview(array)


def _packed(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """The elements of a tensor, flat and each once; its strides, None if it is contiguous."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1), None
    return tensor[_once(tensor.shape, tensor.stride())].reshape(-1), tuple(tensor.stride())


def _once(shape: Sequence[int], strides: Sequence[int]) -> tuple[slice, ...]:
    """The index of one element along every expanded dimension, whose stride is 0."""
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
    # No view of the buffer: views would share one version counter.
    flat = torch.frombuffer(memory, dtype=_DTYPES[dtype], count=count, offset=first + start)
    if strides is None:
        return flat.resize_(shape)  # modules could not modify a view in place
    spread = torch.empty_strided(shape, strides, dtype=_DTYPES[dtype])
    once = spread[_once(shape, strides)]
    once.copy_(flat.view(once.shape))
    return spread
