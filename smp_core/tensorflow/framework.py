"""The operations on TensorFlow's tensors that splitting and joining need, and the joined value, StepOutput."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from smp_core.errors import ArgumentError
from smp_core.tensorflow.tensorflow_parts import tf

_METHODS = ("variable", "add_n", "accumulate_n")


class StepSum:
    """The sum of one tensor over the microbatches, which a step in a ``tf.function`` adds up while it runs.

    The step returns what the rest of the function asks for, which is known when that is traced: before the step runs.

    Attributes:
        tensor: the sum in the graph of the function.
        wanted: whether it is asked for.
        parts_wanted: whether the tensors of the microbatches are.
    """

    __slots__ = ("parts_wanted", "tensor", "wanted")

    def __init__(self) -> None:
        self.tensor: Any = None
        self.wanted = self.parts_wanted = False


def sum_dtype(dtype: Any) -> Any:
    """The dtype in which tensors of a dtype are added."""
    if dtype.is_bool:
        return tf.int64
    return tf.float32 if dtype.is_floating and dtype.size < 4 else dtype


class StepOutput:
    """The tensors that the microbatches of a step returned at one place (API 1.4, 2).

    Sums add in the order of the microbatches: 16-bit floats in float32, rounded once. Of a gradient they are also
    averaged over the replicas where the configuration asks for data parallelism (``horovod`` or ``ddp``).
    """

    __slots__ = ("_averaged", "_outputs", "_summed")

    def __init__(
        self,
        outputs: Sequence[Any],
        averaged: Callable[[Any], Any] | None = None,
        summed: StepSum | None = None,
    ) -> None:
        self._outputs, self._averaged, self._summed = tuple(outputs), averaged, summed

    def __repr__(self) -> str:
        return f"StepOutput({list(self._outputs)!r})"

    @property
    def outputs(self) -> list[Any]:
        """The tensors, in the order of the microbatches; a new list at each call."""
        if self._summed is not None:
            self._summed.parts_wanted = True
        return list(self._outputs)

    def reduce_mean(self) -> Any:
        """The mean over the microbatches: the sum, divided once by their number. Of integers it is float32."""
        return self._mean("reduce_mean")

    def reduce_sum(self) -> Any:
        """The sum over the microbatches."""
        return self._all(self._sum("reduce_sum"))

    def concat(self) -> Any:
        """``tf.concat`` along axis 0, the batch; the tensors may differ in size there."""
        if any(each.shape.rank == 0 for each in self._outputs):
            raise ArgumentError(
                "StepOutput.concat: tensors without dimensions have no batch to concatenate along; use stack(), "
                "reduce_mean() or outputs"
            )
        return tf.concat(self.outputs, axis=0)

    merge = concat

    def stack(self) -> Any:
        """``tf.stack``: a new first axis, the microbatches'."""
        self._check_shapes("stack")
        return tf.stack(self.outputs)

    def accumulate(self, method: str = "variable", var: Any = None) -> Any:
        """The mean over the microbatches, with less memory in the original library.

        Args:
            method: ``"variable"``, ``"add_n"`` or ``"accumulate_n"``; all give the same value.
            var: with ``"variable"``: the variable to which the mean is assigned, and which is returned.
        """
        if method not in _METHODS:
            raise ArgumentError(
                f"StepOutput.accumulate: method must be one of {', '.join(_METHODS)}, not {method!r}"
            )
        if var is not None and method != "variable":
            raise ArgumentError(
                f"StepOutput.accumulate: var is for method='variable', not for {method!r}"
            )
        mean = self._mean("accumulate")
        if var is None:
            return mean
        var.assign(mean)
        return var

    def _mean(self, method: str) -> Any:
        total = self._sum(method)
        if not total.dtype.is_floating and not total.dtype.is_complex:
            total = tf.cast(total, tf.float32)
        return self._all(total / tf.cast(len(self._outputs), total.dtype))

    def _all(self, total: Any) -> Any:
        dtype = self._outputs[0].dtype
        total = total if self._averaged is None else self._averaged(total)
        return tf.cast(total, dtype) if dtype.is_floating else total

    def _sum(self, method: str) -> Any:
        self._check_shapes(method)
        if self._summed is not None:
            self._summed.wanted = True
            return self._summed.tensor
        wide = sum_dtype(self._outputs[0].dtype)
        return functools.reduce(tf.add, (tf.cast(each, wide) for each in self._outputs))

    def _check_shapes(self, method: str) -> None:
        shapes = [each.shape for each in self._outputs]
        if any(not shapes[0].is_compatible_with(each) for each in shapes):
            self._refuse(method, shapes)

    def _refuse(self, method: str, shapes: Sequence[Any]) -> NoReturn:
        raise ArgumentError(
            f"StepOutput.{method}: the microbatches returned tensors of shapes "
            f"{', '.join(str(tuple(each)) for each in shapes)}, which do not fit together; use outputs"
        )


class _TensorFlow:
    """Tensors are those of TensorFlow, variables among them, and arrays of numpy."""

    join: Callable[[list[Any]], object] = StepOutput

    def is_tensor(self, value: object) -> bool:
        """Return whether a value is a tensor."""
        return bool(tf.is_tensor(value)) or isinstance(value, np.ndarray)

    def shape(self, tensor: Any) -> list[int]:
        """The sizes of a tensor's dimensions."""
        if isinstance(tensor, np.ndarray):
            return list(tensor.shape)
        sizes: list[int] = tensor.shape.as_list()
        if None in sizes:
            raise ArgumentError(
                f"smp.step: an argument is a tensor of unknown shape {tuple(sizes)}: a batch is split by its size. "
                "Give the outer tf.function an input_signature with that size, or drop the last batch"
            )
        return sizes

    def part(self, tensor: Any, axis: int, start: int, length: int) -> Any:
        """``length`` elements along ``axis`` from ``start``."""
        index = (slice(None),) * axis + (slice(start, start + length),)
        return tf.convert_to_tensor(tensor)[index]


class StepTensor:
    """One microbatch's tensor in the result of a step, until the microbatches are joined.

    ``averaged`` averages over the replicas; None where nothing is to be averaged. ``summed`` is the sum over the
    microbatches; None where the step does not add it up.
    """

    __slots__ = ("averaged", "summed", "tensor")

    def __init__(
        self,
        tensor: Any,
        averaged: Callable[[Any], Any] | None = None,
        summed: StepSum | None = None,
    ) -> None:
        self.tensor, self.averaged, self.summed = tensor, averaged, summed


class _Joining(_TensorFlow):
    """Tensors are those of a step's results."""

    def is_tensor(self, value: object) -> bool:
        """Return whether a value is the tensor of a microbatch."""
        return isinstance(value, StepTensor)

    def join(self, outputs: list[StepTensor]) -> StepOutput:
        """The output of all microbatches."""
        first = outputs[0]
        return StepOutput([each.tensor for each in outputs], first.averaged, first.summed)


FRAMEWORK = _TensorFlow()
JOINING = _Joining()
