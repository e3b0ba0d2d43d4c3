"""Messages between the ranks of one pipeline: the tensors of a segment as bytes, over a process group.

A tensor of unknown size is preceded by its size. The last byte of a message says that it is complete; if its sender has
aborted the step, all of its bytes are ``_ABORTED``. Sends are awaited at the end of the step, when each
receiver has taken them. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup, Work

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.transport.protocols import Group

Array = np.ndarray[Any, np.dtype[Any]]
MOST_DIMENSIONS = 8
_COMPLETE, _ABORTED = 0, 255


class Spec(NamedTuple):
    """The dtype and the shape of a tensor; None for a size that is known only when it is there."""

    dtype: Any
    shape: tuple[int | None, ...] | None


class Members:
    """Ranks that agree on numbers and on texts, each in the order of ``ranks``, their world ranks."""

    def __init__(self, runtime: Runtime, name: str, ranks: tuple[int, ...]) -> None:
        self.ranks, self.size = ranks, len(ranks)
        self._runtime, self._name = runtime, name
        self._group: ProcessGroup | None = None

    @property
    def group(self) -> ProcessGroup:
        """The process group, made when it is first used, by all members together."""
        if self._group is None:
            self._group = self._runtime.fabric.process_group(Group(self._name, self.ranks))
        return self._group

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """A row for each member: its tensor of one dimension, of the same size everywhere."""
        if self.size == 1:
            return local[None]
        rows = torch.empty(self.size * len(local), dtype=local.dtype)
        self.group._allgather_base(rows, local).wait()
        return rows.reshape(self.size, -1)

    def agree(self, *numbers: int) -> list[list[int]]:
        """The numbers of every member."""
        found: list[list[int]] = self.gathered(torch.tensor(numbers, dtype=torch.int64)).tolist()
        return found

    def texts(self, text: str) -> list[str]:
        """The texts of every member, with escapes for what UTF-8 does not have."""
        data = text.encode(errors="backslashreplace")
        sizes = [size for (size,) in self.agree(len(data))]
        local = torch.frombuffer(bytearray(data.ljust(max(1, *sizes), b" ")), dtype=torch.uint8)
        return [
            bytes(row[:size].tolist()).decode()
            for row, size in zip(self.gathered(local), sizes, strict=True)
        ]


class SegmentTransport:
    """One rank's end of the messages, to ranks that are positions in the pipeline.

    Attributes:
        rank: this rank, in the world.
        position: this rank, in the pipeline.
        pipeline: the ranks of this pipeline.
        replicas: the ranks over which gradients are averaged: this rank alone if they are not.
        world: all ranks.
        failure_domain: the ranks whose steps fail together: all if gradients are averaged, else those of the pipeline.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.rank, self.position = runtime.rank, runtime.position(GroupKind.PP)
        config, replicas = runtime.config, runtime.group(GroupKind.DP).ranks
        averages = config.horovod or config.ddp
        self.pipeline = Members(runtime, "smp tensorflow", runtime.group(GroupKind.PP).ranks)
        self.replicas = Members(
            runtime, "smp tensorflow replicas", replicas if averages else (runtime.rank,)
        )
        self.world = self.pipeline
        if len(replicas) > 1:
            everyone = runtime.group(GroupKind.WORLD).ranks
            self.world = Members(runtime, "smp tensorflow world", everyone)
        self.failure_domain = self.world if self.replicas.size > 1 else self.pipeline
        self._sent: list[tuple[Work, torch.Tensor]] = []
        self._posted: dict[int, tuple[Work, torch.Tensor]] = {}

    def open(self) -> None:
        """Make the process groups. Every rank calls it before it uses one, so that all make them in the same order."""
        for each in (self.pipeline, self.replicas, self.world):
            if each.size > 1:
                _ = each.group

    def send(self, to: int, number: int, specs: Sequence[Spec], arrays: Sequence[Array]) -> None:
        """Send tensors to one rank; returns at once. ``number`` is that of the message in this step.

        An error in the making of a message leaves nothing of it sent.
        """
        whole = torch.empty(sum(each.nbytes for each in arrays) + 1, dtype=torch.uint8)
        buffer, start = whole.numpy(), 0
        for array in arrays:
            end = start + array.nbytes
            buffer[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            start = end
        buffer[start] = _COMPLETE
        if not _is_static(specs):
            sizes = np.zeros((len(arrays), 1 + MOST_DIMENSIONS), np.int64)
            for row, array in zip(sizes, arrays, strict=True):
                row[0] = array.ndim
                row[1 : 1 + array.ndim] = array.shape
            self._post(to, 2 * number, torch.from_numpy(sizes.reshape(-1).view(np.uint8)))
        self._post(to, 2 * number + 1, whole)

    def abort(self, to: int, number: int, specs: Sequence[Spec]) -> None:
        """Send the message of this number without its tensors: this rank has aborted the step."""
        static = _is_static(specs)
        size = 1 + sum(_sizes(specs, _shapes(specs))) if static else _size_of_sizes(specs)
        buffer = torch.full((size,), _ABORTED, dtype=torch.uint8)
        self._post(to, 2 * number + static, buffer)

    def _post(self, to: int, tag: int, buffer: torch.Tensor) -> None:
        self._sent.append((self.pipeline.group.send([buffer], to, tag), buffer))

    def post_receive(self, source: int, number: int, specs: Sequence[Spec]) -> None:
        """Post the receive of the message of this number before ``receive`` waits for it, if its size is known.

        Gloo sends the data of a message only when its receiver has asked for it.
        """
        if _is_static(specs):
            size = sum(_sizes(specs, _shapes(specs))) + 1
            self._posted[number] = self._start_receive(source, 2 * number + 1, size)

    def receive(self, source: int, number: int, specs: Sequence[Spec]) -> list[Array] | None:
        """Wait for the message of this number; None if its sender has aborted the step."""
        if _is_static(specs):
            shapes = _shapes(specs)
        else:
            buffer = self._finish_receive(source, 2 * number, _size_of_sizes(specs))
            if buffer[-1] == _ABORTED:
                return None
            rows = buffer.view(np.int64).reshape(len(specs), -1)
            shapes = [tuple(int(size) for size in row[1 : 1 + row[0]]) for row in rows]
        sizes = _sizes(specs, shapes)
        data = self._finish_receive(
            source, 2 * number + 1, sum(sizes) + 1, self._posted.pop(number, None)
        )
        if data[-1] == _ABORTED:
            return None
        found, start = [], 0
        for spec, shape, size in zip(specs, shapes, sizes, strict=True):
            # A copy where a tensor would begin at an address that its dtype does not allow.
            dtype = np.dtype(spec.dtype)
            part = data[start : start + size]
            part = part if start % dtype.itemsize == 0 else part.copy()
            found.append(part.view(dtype).reshape(shape))
            start += size
        return found

    def _start_receive(self, source: int, tag: int, size: int) -> tuple[Work, torch.Tensor]:
        buffer = torch.empty(size, dtype=torch.uint8)
        return self.pipeline.group.recv([buffer], source, tag), buffer

    def _finish_receive(
        self, source: int, tag: int, size: int, posted: tuple[Work, torch.Tensor] | None = None
    ) -> Array:
        work, buffer = posted or self._start_receive(source, tag, size)
        work.wait()
        return buffer.numpy()

    def wait_for_sends(self) -> None:
        """Complete all sends of a step."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()


def is_too_deep(spec: Spec) -> bool:
    """Return whether a tensor has more dimensions than a message of its sizes can hold."""
    return not _is_static([spec]) and len(spec.shape or ()) > MOST_DIMENSIONS


def _is_static(specs: Sequence[Spec]) -> bool:
    """Return whether every size of every tensor is known."""
    return all(each.shape is not None and None not in each.shape for each in specs)


def _shapes(specs: Sequence[Spec]) -> list[tuple[int, ...]]:
    return [tuple(size or 0 for size in each.shape or ()) for each in specs]


def _sizes(specs: Sequence[Spec], shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """The bytes of each tensor."""
    return [
        math.prod(shape) * np.dtype(each.dtype).itemsize
        for each, shape in zip(specs, shapes, strict=True)
    ]


def _size_of_sizes(specs: Sequence[Spec]) -> int:
    """The bytes of the message of sizes. The last of a size is no ``_ABORTED``: no tensor is that large."""
    return len(specs) * (1 + MOST_DIMENSIONS) * 8
