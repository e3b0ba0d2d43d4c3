"""The process group: bytes travel through Gloo, and numbers are added up here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


class InOrderGroup(dist.ProcessGroup):
    """A process group with the methods that ``torch.distributed`` calls, by their names there."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._size, self._name = size, ""
        self._gloo: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(store, rank, size, timeout)

    # Collectives.

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        data = _bytes(tensor)
        work = self._link.broadcast([data], opts)
        return _after(work, lambda: _write(tensor, data), tensors)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        (outputs_here,), (tensor,) = outputs, inputs
        if len(outputs_here) != self._size:
            raise ValueError(f"all_gather: {len(outputs_here)} outputs for {self._size} ranks")

        def spread(parts: Sequence[Tensor]) -> None:
            for output, part in zip(outputs_here, parts, strict=True):
                _write(output, part)

        return self._exchange(tensor, spread, outputs_here)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        op = opts.reduceOp.op
        fold = _FOLDS[op]

        def add_up(parts: Sequence[Tensor]) -> None:
            total, *rest = (_numbers(part, tensor) for part in parts)
            for part in rest:
                total = fold(total, part)
            if op == dist.ReduceOp.AVG:
                total = total / self._size
            tensor.detach().copy_(total)

        return self._exchange(tensor, add_up, tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._link.barrier()

    def _exchange(
        self, tensor: Tensor, use: Callable[[Sequence[Tensor]], None], result: list[Tensor]
    ) -> dist.Work:
        """Gather every rank's bytes on every rank, and call ``use`` with them."""
        mine = _bytes(tensor)
        parts = [torch.empty_like(mine) for _ in range(self._size)]
        return _after(self._link.allgather([parts], [mine]), lambda: use(parts), result)

    # Messages.

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        return self._link.send(tensors, self._peer(dst), tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        return self._link.recv(tensors, self._peer(src), tag)

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise ValueError(f"rank {rank} is not in a group of {self._size}")
        return rank

    # The life and the names of a group.

    @property
    def _link(self) -> dist.ProcessGroupGloo:
        if self._gloo is None:
            raise RuntimeError(f"process group {self._name} has been destroyed")
        return self._gloo

    def shutdown(self) -> None:
        self._gloo = None

    def getBackendName(self) -> str:
        return "inorder"

    def name(self) -> str:
        return "inorder"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name


def _bytes(tensor: Tensor) -> Tensor:
    """A dense copy, as bytes: Gloo knows few dtypes and no strides. One byte more, as it may be
    empty.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    dense = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
    return torch.cat([dense.view(torch.uint8), torch.zeros(1, dtype=torch.uint8)])


def _numbers(data: Tensor, like: Tensor) -> Tensor:
    return data[:-1].clone().view(like.dtype).reshape(like.shape)


def _write(tensor: Tensor, data: Tensor) -> None:
    tensor.detach().copy_(_numbers(data, tensor))


def _after(work: dist.Work, do: Callable[[], None], result: list[Tensor]) -> dist.Work:
    """``work``, and then ``do``: on Gloo's thread, whether or not anybody waits."""

    def done(future: torch.futures.Future[Any]) -> list[Tensor]:
        future.value()  # raises what went wrong
        do()
        return result

    return torch._C._distributed_c10d._create_work_from_future(work.get_future().then(done))
