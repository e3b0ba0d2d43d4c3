"""The operations on PyTorch's tensors that splitting and joining need, and the joined value, StepOutput."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from smp_core.errors import ArgumentError
from smp_core.torch.exceptions import UnsupportedTrainingError


class StepOutput:
    """The tensors that the microbatches of a step returned at one place (API 1.4).

    Sums add in the order of the microbatches, as gradients do: 16-bit floats in float32, rounded once;
    integers and bools in int64, as ``torch.sum`` does. The results carry gradients if the
    outputs do (``detach_outputs=False``).
    """

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self._outputs = tuple(outputs)

    def __repr__(self) -> str:
        return f"StepOutput({list(self._outputs)!r})"

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The tensors, in the order of the microbatches; a new list at each call."""
        return list(self._outputs)

    def reduce_mean(self) -> torch.Tensor:
        """The mean over the microbatches: the sum, divided once by their number.

        Of integers it is of torch's default float dtype, as by ``/``. Raises ArgumentError if the
        tensors differ in shape.
        """
        total = self._sum("reduce_mean") / len(self._outputs)
        return total if _is_whole(self._dtype) else total.to(self._dtype)

    def reduce_sum(self) -> torch.Tensor:
        """The sum over the microbatches; int64 of integers and bools.

        Raises ArgumentError if the tensors differ in shape.
        """
        total = self._sum("reduce_sum")
        return total if _is_whole(self._dtype) else total.to(self._dtype)

    def concat(self) -> torch.Tensor:
        """``torch.cat`` along axis 0, the batch: the tensors may differ in size there.

        Raises ArgumentError for tensors without dimensions, and those that differ elsewhere.
        """
        if any(each.dim() == 0 for each in self._outputs):
            raise ArgumentError(
                "StepOutput.concat: tensors without dimensions have no batch to concatenate along; "
                "use stack(), reduce_mean() or outputs"
            )
        if len({(each.dim(), each.shape[1:]) for each in self._outputs}) > 1:
            self._refuse("concat")
        return torch.cat(self._outputs)

    def stack(self) -> torch.Tensor:
        """``torch.stack``: a new first axis, the microbatches'.

        Raises ArgumentError if the tensors differ in shape.
        """
        self._check_shapes("stack")
        return torch.stack(self._outputs)

    def merge(self) -> NoReturn:
        """Raise UnsupportedTrainingError, since only TensorFlow's API has this method."""
        raise UnsupportedTrainingError(
            "StepOutput.merge is only in the TensorFlow API (docs/spec/api.md#1.4); use concat()"
        )

    def accumulate(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise UnsupportedTrainingError, since only TensorFlow's API has this method."""
        raise UnsupportedTrainingError(
            "StepOutput.accumulate is only in the TensorFlow API (docs/spec/api.md#1.4); use reduce_mean()"
        )

    @property
    def _dtype(self) -> torch.dtype:
        return functools.reduce(torch.promote_types, (each.dtype for each in self._outputs))

    def _sum(self, method: str) -> torch.Tensor:
        self._check_shapes(method)
        wide = _wide(self._dtype)
        return functools.reduce(torch.add, (each.to(wide) for each in self._outputs))

    def _check_shapes(self, method: str) -> None:
        if len({each.shape for each in self._outputs}) > 1:
            self._refuse(method)

    def _refuse(self, method: str) -> NoReturn:
        shapes = ", ".join(str(tuple(each.shape)) for each in self._outputs)
        raise ArgumentError(
            f"StepOutput.{method}: the microbatches returned tensors of shapes {shapes}, which do not "
            "fit together; use outputs"
        )


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add in."""
    if _is_whole(dtype):
        return torch.int64
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    return dtype


class TorchFramework:
    """Tensors are ``torch.Tensor``, parameters and other subclasses included."""

    join: Callable[[list[torch.Tensor]], object] = StepOutput

    def is_tensor(self, value: object) -> bool:
        """Return whether a value is a tensor."""
        return isinstance(value, torch.Tensor)

    def shape(self, tensor: torch.Tensor) -> Sequence[int]:
        """The sizes of a tensor's dimensions."""
        return tensor.shape

    def part(self, tensor: torch.Tensor, axis: int, start: int, length: int) -> torch.Tensor:
        """A view: nothing is copied, and gradients of a leaf flow into its ``grad``.

        Sparse tensors have no views: their part is a copy.
        """
        if tensor.layout is not torch.strided:
            return torch.narrow_copy(tensor, axis, start, length)
        return tensor.narrow(axis, start, length)


FRAMEWORK = TorchFramework()
