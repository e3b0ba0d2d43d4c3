"""Reduction of gradients over replicas: the DP group, bucket by bucket, in an order that is ours.

A bucket is exchanged, not summed, by the backend: each replica gets its slice of everybody's values
(all-to-all), folds it along the tree of ``smp_core.reduction`` over dp ranks, divides once, and hands
the result to all (all-gather). The traffic is that of a ring all-reduce, 2 (n - 1) / n of the bucket
per rank; the bits are the same on every backend, for every bucket size. 16-bit values are folded and
divided in float32, and rounded once; not at all where their parameters have float32 masters, whose
gradients are float32 from the first sum on.

Only the rank's own thread may call anything here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d

from smp_core import reduction
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.execution import counted
from smp_core.transport.protocols import Group

_c10d: Any = distributed_c10d  # its stubs lack some options
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

#: A communication hook, as torch's DDP has it: ``hook(state, bucket) -> Future[Tensor]``.
CommHook = Callable[[Any, "GradBucket"], Any]


def dtype_of(parameter: nn.Parameter, wide: bool) -> torch.dtype:
    """The dtype of a parameter's gradients: its own; if ``wide``, float32 for a 16-bit one."""
    return _WIDE.get(parameter.dtype, parameter.dtype) if wide else parameter.dtype


def fill_buckets(
    parameters: Sequence[nn.Parameter], cap: float, wide: bool = False
) -> list[list[nn.Parameter]]:
    """The parameters in reverse order, as backward reaches them, in buckets of one dtype and at most
    ``cap`` bytes of gradients; a parameter larger than that is alone. ``wide`` as in ``dtype_of``.
    """
    buckets: list[list[nn.Parameter]] = []
    open_: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        dtype = dtype_of(parameter, wide)
        size = parameter.numel() * dtype.itemsize
        bucket, filled = open_.get(dtype, ([], 0))
        if not bucket or filled + size > cap:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_[dtype] = bucket, filled + size
    return buckets


class GradBucket:
    """What a communication hook is given, with the methods of ``torch.distributed.GradBucket``."""

    def __init__(
        self, index: int, last: bool, parameters: Sequence[nn.Parameter], buffer: torch.Tensor
    ) -> None:
        self._index, self._last = index, last
        self._parameters, self._buffer = parameters, buffer

    def index(self) -> int:
        """The number of the bucket in this reduction; 0 holds the parameters registered last."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """The gradients of this replica as one flat tensor: sums, divided by nothing."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer by one of the same size."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients as views of the buffer."""
        return list(_split(self._buffer, self._parameters))

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that the bucket is about."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether no other bucket follows in this reduction."""
        return self._last


class Replicas:
    """The ranks that hold the same partition, each with data of its own.

    Made by all members of the DP group at the same point: it makes a process group. ``wide``: gradients
    of 16-bit parameters are float32, and stay that.
    """

    def __init__(self, runtime: Runtime, wide: bool = False) -> None:
        self.wide = wide
        group = runtime.group(GroupKind.DP)
        self.runtime = runtime
        self.size = len(group.ranks)
        self.rank = group.ranks.index(runtime.rank)
        self._members = group
        self._group: Any = None
        if self.size > 1:
            self._group = runtime.fabric.process_group(Group("smp replicas", group.ranks))

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Give all replicas the values that dp rank ``source`` has, in place. Shapes agree."""
        given = [tensor.detach() for tensor in tensors if tensor.numel()]
        if self.size == 1 or not given:
            return
        flat = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in given])
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._group.broadcast([flat], options).wait()
        if self.rank == source:
            return
        start = 0
        for tensor in given:
            size = tensor.numel() * tensor.element_size()
            # Copied into memory of its own, which is aligned to the element.
            part = flat[start : start + size].clone().view(tensor.dtype)
            tensor.copy_(part.view(tensor.shape))
            start += size

    def exchange(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Mapping[nn.Parameter, torch.Tensor],
        divisor: int,
    ) -> Exchange:
        """Begin to reduce a bucket; a parameter without a gradient counts as zeros."""
        flat = flatten(parameters, gradients, self.wide)
        return Exchange(self._group, self.size, flat, parameters, divisor)

    def hooked(
        self,
        hook: tuple[Any, CommHook],
        bucket: GradBucket,
    ) -> Callable[[], torch.Tensor]:
        """Have a communication hook reduce a bucket; what is returned waits for its result."""
        state, function = hook
        future = function(state, bucket)
        if not hasattr(future, "wait"):
            raise TypeError(
                f"the communication hook {getattr(function, '__name__', function)!r} returned a "
                f"{type(future).__name__}, not a torch.futures.Future[torch.Tensor]"
            )

        def result() -> torch.Tensor:
            value = future.wait()
            flat: torch.Tensor = value[0] if isinstance(value, (list, tuple)) else value
            return flat

        return result

    def reduce_sparse(
        self, parameter: nn.Parameter, gradient: torch.Tensor | None, divisor: int
    ) -> torch.Tensor:
        """The sum of sparse gradients, coalesced: rows that any replica has, folded in the same order
        as dense ones. Sent as objects.
        """
        mine = None if gradient is None else gradient.coalesce()
        parts = None if mine is None else (mine.indices(), mine.values())
        told = [parts] if self.size == 1 else self._tell(parts)
        wide = _WIDE.get(parameter.dtype, parameter.dtype)
        given = [
            torch.sparse_coo_tensor(
                part[0],
                part[1].to(wide),
                parameter.shape,
                is_coalesced=True,
                check_invariants=False,
            )
            for part in told
            if part is not None
        ]
        total = reduction.fold(given, lambda a, b: (a + b).coalesce())
        return torch.sparse_coo_tensor(
            total.indices(),
            (total.values() / divisor).to(dtype_of(parameter, self.wide)),
            parameter.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def _tell(self, value: Any) -> list[Any]:
        return self.runtime.fabric.objects.allgather(value, self._members)


@dataclasses.dataclass(slots=True, eq=False)
class Exchange:
    """A bucket on its way: first slices come, then :meth:`fold`, then :meth:`result`.

    Every replica makes the same calls in the same order over all exchanges.
    """

    _group: Any
    _size: int
    _flat: torch.Tensor
    parameters: Sequence[nn.Parameter]
    divisor: int
    _works: list[Any] = dataclasses.field(default_factory=list)
    _received: torch.Tensor | None = None
    _folded: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self._size == 1 or not self._flat.numel():
            return
        slice_ = -(-self._flat.numel() // self._size)
        sent = self._flat.new_zeros(slice_ * self._size)
        sent[: self._flat.numel()] = self._flat
        self._received = torch.empty_like(sent)
        for each in (self._flat, sent, self._received):
            counted.holds(counted.EXCHANGED, each)
        counted.happened("sent")
        # As bytes: not every backend moves every dtype.
        to, from_ = self._received.view(torch.uint8), sent.view(torch.uint8)
        work = self._group.alltoall_base(to, from_, [], [], _c10d.AllToAllOptions())
        self._works = [(work, to, from_)]

    def fold(self) -> None:
        """Wait for the slices of all, reduce them, and begin to hand out the result."""
        if self._received is None:
            self._folded = self._divided([self._flat])
            return
        self._wait()
        mine = self._divided(list(self._received.chunk(self._size)))
        self._folded = torch.empty_like(self._received)
        counted.holds(counted.EXCHANGED, self._folded)
        to, from_ = self._folded.view(torch.uint8), mine.contiguous().view(torch.uint8)
        work = self._group._allgather_base(to, from_, _c10d.AllgatherOptions())
        self._works, self._received = [(work, to, from_)], None

    def result(self) -> torch.Tensor:
        """Wait for the reduced bucket: flat, the parameters in their order."""
        if self._folded is None:
            self.fold()
        self._wait()
        assert self._folded is not None
        return self._folded[: self._flat.numel()]

    def _divided(self, slices: list[torch.Tensor]) -> torch.Tensor:
        dtype = slices[0].dtype
        if dtype.is_complex:  # part by part, as smp_core.reduction does
            parts = self._divided([torch.view_as_real(one) for one in slices])
            return torch.view_as_complex(parts)
        wide = _WIDE.get(dtype, dtype)
        total = reduction.fold([one.to(wide) for one in slices], torch.add)
        return (total / self.divisor).to(dtype)

    def _wait(self) -> None:
        for work, _, _ in self._works:
            work.wait()
        self._works = []


def flatten(
    parameters: Sequence[nn.Parameter],
    gradients: Mapping[nn.Parameter, torch.Tensor],
    wide: bool = False,
) -> torch.Tensor:
    """The gradients as one flat tensor of their own memory; zeros where there is none. ``wide`` as in
    ``dtype_of``.
    """
    flat = parameters[0].new_zeros(
        sum(parameter.numel() for parameter in parameters), dtype=dtype_of(parameters[0], wide)
    )
    for part, parameter in zip(_split(flat, parameters), parameters, strict=True):
        gradient = gradients.get(parameter)
        if gradient is not None:
            part.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
    return flat.detach()


def unflatten(
    flat: torch.Tensor, parameters: Sequence[nn.Parameter], views: bool
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """The gradients of a reduced bucket, in the layout of their parameters; or views of it."""
    for parameter, part in zip(parameters, _split(flat, parameters), strict=True):
        yield (
            parameter,
            part
            if views
            else torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False).copy_(part),
        )


def _split(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[torch.Tensor]:
    start = 0
    for parameter in parameters:
        yield flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
