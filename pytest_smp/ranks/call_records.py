"""The communications of a rank as data, recorded for the fixture ``smp_calls``."""

from __future__ import annotations

import math
import os
import sys
import types
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from smp_core.transport import stack_frames

#: The record of a rank's calls (protocols.RecordingRank).
CALLS = "calls"

FORWARD, BACKWARD, STEP, OUTSIDE = "forward", "backward", "step", "outside"

#: The code that reduces gradients at the end of a step of ours: part of the backward pass, and no longer in autograd.
_REDUCERS = tuple(
    os.path.join("smp_core", "torch", "reduction", name)
    for name in ("reducer.py", "bucket_reducer.py")
)


class CommunicationCall(NamedTuple):
    """One call of one rank.

    Attributes:
        rank: the rank that made it, in the world.
        operation: its name, such as ``all_reduce``, ``send`` or ``smp.allgather``.
        group: the ranks of its group, in the group's order; of an object that is sent, its two ranks.
        dtype: of the tensors that the rank gives, or gets if it gives none; empty for objects and barriers.
        shapes: of the same tensors.
        bytes: the size of the same tensors; 0 for objects.
        line: the user's line, such as ``train.py:12``, or an empty string.
        phase: ``forward`` in a call of a module, ``backward`` in a backward pass or a reduction of gradients,
            ``step`` in an optimizer's step, else ``outside``.
    """

    rank: int
    operation: str
    group: tuple[int, ...]
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    line: str
    phase: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first tensor; of none, ()."""
        return self.shapes[0] if self.shapes else ()


def call_record(
    rank: int,
    operation: str,
    group: Sequence[int],
    specs: Iterable[tuple[torch.dtype, Sequence[int]]],
) -> CommunicationCall:
    """The call that the caller's stack makes now; ``specs`` are dtypes and shapes of its tensors."""
    specs = list(specs)
    frame: types.FrameType | None = sys._getframe(1)
    return CommunicationCall(
        rank,
        operation,
        tuple(group),
        " ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype, _ in specs)),
        tuple(tuple(shape) for _, shape in specs),
        sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs),
        _line(),
        _phase(frame),
    )


def _line() -> str:
    line = stack_frames.user_line(2)
    return "" if line is None else f"{stack_frames.relative(line[0])}:{line[1]}"


def _phase(frame: types.FrameType | None) -> str:
    if torch._C._current_graph_task_id() != -1:
        return BACKWARD
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            return FORWARD
        if code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
            return STEP
        if code.co_filename.endswith(_REDUCERS):
            return BACKWARD
        frame = frame.f_back
    return OUTSIDE


_CALL = nn.Module._call_impl.__code__
