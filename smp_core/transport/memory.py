"""The memory of an operation in flight: from its issue until it was waited for, its tensors belong
to the operation.

- The other ranks get the values that the inputs held at issue.
- Outputs hold poison until the wait: NaN in floating and complex dtypes, bytes ``0xA5`` in integers,
  the opposite in bool.
- A tensor that was written to in between, by the user's code or by another operation, is a
  RaceError.

A synchronous call blocks its rank until it is done, so nothing of this can be seen, and such a call
is left out.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

Tensor = torch.Tensor


def copy(tensor: Tensor) -> Tensor:
    """The present values of a tensor, dense, apart from autograd."""
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


# Signalling NaNs where there are such: arithmetic on one makes it a quiet one, so that `gradient /= 2`
# shows; copying keeps it.
_POISON: dict[torch.dtype, str] = {
    torch.float64: "7ff4a5a5a5a5a5a5",
    torch.float32: "7fa5a5a5",
    torch.float16: "7da5",
    torch.bfloat16: "7fa5",
    torch.complex128: "7ff4a5a5a5a5a5a5" * 2,
    torch.complex64: "7fa5a5a5" * 2,
    torch.float8_e4m3fn: "7f",
    torch.float8_e5m2: "7d",
    torch.float8_e4m3fnuz: "80",
    torch.float8_e5m2fnuz: "80",
}


@functools.cache
def _poison_of(dtype: torch.dtype) -> Tensor:
    digits = _POISON.get(dtype, "a5" * dtype.itemsize)
    little_endian = bytearray(reversed(bytes.fromhex(digits)))
    return torch.frombuffer(little_endian, dtype=torch.uint8).view(dtype)[0]


def poison(tensor: Tensor) -> None:
    """Overwrite memory that nobody may read yet. Neither autograd nor the version counter sees it."""
    target = tensor.data
    if tensor.dtype is torch.bool:
        target.logical_not_()
    else:
        target.copy_(_poison_of(tensor.dtype))


def _bits(tensor: Tensor) -> Tensor:
    return copy(tensor).view(-1).view(torch.uint8)


class _Span(NamedTuple):
    """The memory of one tensor: addresses in bytes, the same whichever storage the tensor is of."""

    start: int
    stop: int
    tensor: Tensor
    written: bool

    @classmethod
    def of(cls, tensor: Tensor, written: bool) -> _Span | None:
        if not tensor.numel():
            return None
        start = tensor.data_ptr()
        return cls(start, start + _extent(tensor), tensor, written)

    def meets(self, other: _Span) -> bool:
        """Return whether an element of one span lies on an element of the other."""
        if self.start >= other.stop or other.start >= self.stop:
            return False
        mine, theirs = self.tensor, other.tensor
        if mine.is_contiguous() and theirs.is_contiguous():
            return True
        if (
            mine.stride() == theirs.stride()
            and mine.dtype is theirs.dtype
            and _between(mine, theirs)
        ):
            return False
        return bool(torch.isin(_addresses(mine), _addresses(theirs)).any())


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor with elements to behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((side - 1) * stride for side, stride in steps)) * tensor.dtype.itemsize


def _between(one: Tensor, other: Tensor) -> bool:
    """Return whether, of two tensors with equal strides, one lies in the gaps of the other, as columns do."""
    size = one.dtype.itemsize
    step = math.gcd(*one.stride()) * size
    return size <= (one.data_ptr() - other.data_ptr()) % step <= step - size if step else False


def _addresses(tensor: Tensor) -> Tensor:
    """The address of each element; elements of a dimension of stride 0 once."""
    places = torch.zeros((), dtype=torch.int64)
    for side, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(side if stride else 1) * stride
    return tensor.data_ptr() + places.reshape(-1) * tensor.dtype.itemsize


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of the tensor are one place in memory."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    sides = sorted(
        (stride, side)
        for side, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if side > 1
    )
    reach = 0  # of the dimensions with smaller strides
    for stride, side in sides:
        if stride <= reach:
            return stride == 0 or bool(torch.unique(_addresses(tensor)).numel() < tensor.numel())
        reach += (side - 1) * stride
    return False


def is_freed(tensor: Tensor) -> bool:
    """Return whether the tensor's memory is gone: FSDP resizes storages to 0."""
    end = tensor.storage_offset() * tensor.dtype.itemsize + _extent(tensor) if tensor.numel() else 0
    return end > tensor.untyped_storage().nbytes()


class InFlightBuffer:
    """The tensors of one rank's part in one operation.

    Args:
        inputs: the tensors that the rank brings.
        outputs: the tensors that are written when it lands, in the order of the values. A tensor may be both.
    """

    __slots__ = ("_spans", "_stands", "inputs", "outputs")

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._spans: list[_Span] | None = None
        self._stands: list[tuple[str, Tensor, Tensor]] = []

    def spans(self) -> list[_Span]:
        """The memory of the operation's tensors."""
        if self._spans is None:
            spans = [_Span.of(tensor, written=False) for tensor in self.inputs]
            spans += [_Span.of(tensor, written=True) for tensor in self.outputs]
            self._spans = [span for span in spans if span is not None]
        return self._spans

    def outputs_meet(self) -> bool:
        """Return whether two outputs share memory."""
        if len(self.outputs) < 2:
            return False
        spans = sorted((span for span in self.spans() if span.written), key=lambda span: span.start)
        for at, span in enumerate(spans):
            for other in spans[at + 1 :]:
                if other.start >= span.stop:
                    break
                if span.meets(other):
                    return True
        return False

    def take_off(self, name: str) -> None:
        """Begin to watch: the rank's code runs beside the operation of this name from here on.

        ``inputs`` become copies, outputs are poisoned, and the bits of all tensors are kept for ``changed``.
        """
        self.spans()
        originals, self.inputs = self.inputs, [copy(tensor) for tensor in self.inputs]
        for tensor in self.outputs:
            poison(tensor)
        written = {id(tensor) for tensor in self.outputs}
        watched = [(f"an input of {name}", each) for each in originals if id(each) not in written]
        watched += [(f"the output of {name}", each) for each in self.outputs]
        self._stands = [(what, tensor, _bits(tensor)) for what, tensor in watched]

    def unwatch(self) -> None:
        """Stop watching the tensors: changes until the operation lands are no races from here on."""
        self._stands = []

    def changed(self) -> str | None:
        """A forbidden change of a tensor since the launch, in words; None if there is none."""
        for what, tensor, bits in self._stands:
            if is_freed(tensor):
                return f"memory of {what} was freed"
            if not torch.equal(_bits(tensor), bits):
                return f"{what} was written to"
        return None

    def land(self, values: Sequence[Tensor]) -> None:
        """Write the outputs, as other backends do: autograd does not see it, the version counter
        neither.
        """
        self._stands = []
        if not values:
            return
        targets = [target.data for target in self.outputs]
        shaped = [
            value if value.shape == target.shape else value.reshape(target.shape)
            for target, value in zip(targets, values, strict=True)
        ]
        torch._foreach_copy_(targets, shaped)


Owner = TypeVar("Owner")


class OverlapTable(Generic[Owner]):
    """The memory of all operations of one rank that are in flight, by address.

    A rank may have thousands in flight: only spans that begin near an address are looked at.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, _Span, Owner]] = []
        self._longest = 0
        self._count = 0

    def conflict(
        self, in_flight: InFlightBuffer, forgives: Callable[[Owner], bool] | None = None
    ) -> Owner | None:
        """The owner of an operation that writes memory which this buffer reads or writes, or reads memory which it
        writes; None if there is none.

        Owners for which ``forgives`` is true are passed over.
        """
        if not self._spans:
            return None
        for mine in in_flight.spans():
            at = bisect.bisect_left(self._spans, (mine.start - self._longest, -1))
            while at < len(self._spans) and self._spans[at][0] < mine.stop:
                _, _, theirs, owner = self._spans[at]
                met = (mine.written or theirs.written) and mine.meets(theirs)
                if met and not (forgives is not None and forgives(owner)):
                    return owner
                at += 1
        return None

    def enter(self, in_flight: InFlightBuffer, owner: Owner) -> None:
        """An operation has been issued."""
        for span in in_flight.spans():
            self._count += 1
            bisect.insort(self._spans, (span.start, self._count, span, owner))
            self._longest = max(self._longest, span.stop - span.start)

    def leave(self, in_flight: InFlightBuffer) -> None:
        """An operation was waited for."""
        for span in in_flight.spans():
            at = bisect.bisect_left(self._spans, (span.start, -1))
            while self._spans[at][2] is not span:
                at += 1
            del self._spans[at]
        if not self._spans:
            self._longest = 0
