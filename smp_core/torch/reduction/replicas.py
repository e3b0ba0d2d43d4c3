"""The exchanges of replicas beside buckets: values of one replica for all, rows of sparse gradients, and buckets that
a communication hook reduces.

Only the rank's own thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d

from smp_core import reduction
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.reduction.buckets import dtype_of, wide_dtype
from smp_core.transport.protocols import Group

_c10d: Any = distributed_c10d  # its stubs lack some options

#: A communication hook, as torch's DDP has it: ``hook(state, bucket) -> Future[Tensor]``.
CommHook = Callable[[object, "GradBucket"], object]


class GradBucket:
    """The bucket that a communication hook receives, with the methods of ``torch.distributed.GradBucket``."""

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
        """Return whether no other bucket follows in this reduction."""
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
            self._group = runtime.fabric.process_group(
                Group(f"smp {GroupKind.DP.value}", group.ranks)
            )

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

    def hooked(
        self,
        hook: tuple[object, CommHook],
        bucket: GradBucket,
    ) -> Callable[[], torch.Tensor]:
        """Have a communication hook reduce a bucket; the returned function waits for its result."""
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
        local = None if gradient is None else gradient.coalesce()
        rows = None if local is None else (local.indices(), local.values())
        gathered = [rows] if self.size == 1 else self._gather(rows)
        wide = wide_dtype(parameter.dtype)
        given = [
            torch.sparse_coo_tensor(
                part[0],
                part[1].to(wide),
                parameter.shape,
                is_coalesced=True,
                check_invariants=False,
            )
            for part in gathered
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

    def _gather(self, value: object) -> list[Any]:
        return self.runtime.fabric.objects.allgather(value, self._members)


def _split(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[torch.Tensor]:
    start = 0
    for parameter in parameters:
        yield flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
