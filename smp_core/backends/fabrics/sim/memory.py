"""The memory of an operation in flight: from its issue until it was waited for, its tensors belong
to the operation.

- What the others get is what the inputs held at issue.
- Outputs hold poison until the wait: NaN in floating and complex dtypes, bytes ``0xA5`` in integers,
  the opposite in bool.
- A tensor that was written to in between, by the user's code or by another operation, is a
  RaceError.

A synchronous call blocks its rank until it is done, so nothing of this can be seen, and it is left
out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

Tensor = torch.Tensor


def copy(tensor: Tensor) -> Tensor:
    """Its values now, dense, apart from autograd."""
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
    """Overwrite what nobody may read yet. Neither autograd nor the version counter sees it."""
    target = tensor.data
    if tensor.dtype is torch.bool:
        target.logical_not_()
    else:
        target.copy_(_poison_of(tensor.dtype))


def _bits(tensor: Tensor) -> Tensor:
    return copy(tensor).view(-1).view(torch.uint8)


class _Span(NamedTuple):
    """Where in memory a tensor lies: addresses in bytes."""

    storage: int
    start: int
    stop: int
    tensor: Tensor
    written: bool

    @classmethod
    def of(cls, tensor: Tensor, written: bool) -> _Span | None:
        if not tensor.numel():
            return None
        size = tensor.dtype.itemsize
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        start = tensor.data_ptr()
        stop = start + (1 + sum((side - 1) * stride for side, stride in steps)) * size
        return cls(tensor.untyped_storage().data_ptr(), start, stop, tensor, written)

    def meets(self, other: _Span) -> bool:
        """Whether an element of one lies on an element of the other."""
        if self.storage != other.storage or self.start >= other.stop or other.start >= self.stop:
            return False
        if self.tensor.is_contiguous() and other.tensor.is_contiguous():
            return True
        return bool(torch.isin(self._elements(), other._elements()).any())

    def _elements(self) -> Tensor:
        """The addresses of its elements, each once."""
        places = torch.zeros((), dtype=torch.int64)
        for side, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True):
            places = places.unsqueeze(-1) + torch.arange(side if stride else 1) * stride
        return self.start + places.reshape(-1) * self.tensor.dtype.itemsize


class Flight:
    """The tensors of one rank's part in one operation.

    Args:
        inputs: what it brings.
        outputs: what is written when it lands, in the order of the values. A tensor may be both.
    """

    __slots__ = ("_spans", "_stands", "inputs", "outputs")

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._spans: list[_Span] | None = None
        self._stands: list[tuple[str, Tensor, Tensor]] = []

    def spans(self) -> list[_Span]:
        """Where its tensors lie."""
        if self._spans is None:
            spans = [_Span.of(tensor, written=False) for tensor in self.inputs]
            spans += [_Span.of(tensor, written=True) for tensor in self.outputs]
            self._spans = [span for span in spans if span is not None]
        return self._spans

    def meets(self, other: Flight) -> bool:
        """Whether one of the two writes where the other reads or writes."""
        return any(
            (mine.written or theirs.written) and mine.meets(theirs)
            for mine in self.spans()
            for theirs in other.spans()
        )

    def take_off(self) -> None:
        """From here on the rank's code runs beside the operation.

        ``inputs`` become copies, outputs are poisoned, and how all tensors stand is kept.
        """
        self.spans()
        originals, self.inputs = self.inputs, [copy(tensor) for tensor in self.inputs]
        for tensor in self.outputs:
            poison(tensor)
        written = {id(tensor) for tensor in self.outputs}
        watched = [("an input", each) for each in originals if id(each) not in written]
        watched += [("the output", each) for each in self.outputs]
        self._stands = [(what, tensor, _bits(tensor)) for what, tensor in watched]

    def changed(self) -> str | None:
        """Which kind of tensor was written to since it took off."""
        for what, tensor, bits in self._stands:
            if not torch.equal(_bits(tensor), bits):
                return what
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
