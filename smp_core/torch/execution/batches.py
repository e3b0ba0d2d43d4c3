"""The batches of a TP group: compared before a step, because its ranks compute together with the samples of all
(API 4.4).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch

from smp_core.microbatch import CallArguments
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import TensorParallelError
from smp_core.torch.tensor_tree import leaves

#: A tensor of a batch: shape, dtype, and with ``prescaled_batch`` a checksum of its values.
_Described = tuple[tuple[int, ...], str, str]


def compared(runtime: Runtime, split: Callable[[], list[CallArguments]]) -> list[CallArguments]:
    """The arguments of each microbatch on this rank, once the ranks of its TP group have compared theirs.

    Tensors have the same shapes and dtypes on all of them, and with ``prescaled_batch`` the same values. Collective
    over the TP group, also where ``split`` raises. Raises what ``split`` raises, TensorParallelError on every rank of
    the group for batches that do not go together or a rank that has none.
    """
    group = runtime.group(GroupKind.TP)
    if len(group.ranks) == 1:
        return split()
    calls: list[CallArguments] = []
    failure: Exception | None = None
    own: str | list[_Described]
    try:
        calls = split()
        own = _described(calls, runtime.config.prescaled_batch)
    except Exception as error:
        failure, own = error, f"{type(error).__name__}: {error}"
    gathered = runtime.fabric.objects.allgather(own, group)
    if failure is not None:
        raise failure
    step = f"step {runtime.training.steps}: "
    for rank, theirs in zip(group.ranks, gathered, strict=True):
        if isinstance(theirs, str):
            raise TensorParallelError(
                f"{step}rank {rank}, of the same TP group, has no batch: {theirs}"
            )
    for rank, theirs in zip(group.ranks, gathered, strict=True):
        if theirs != gathered[0]:
            raise TensorParallelError(step + _difference(group.ranks[0], gathered[0], rank, theirs))
    return calls


def _described(calls: Sequence[CallArguments], prescaled: bool) -> list[_Described]:
    return [
        (tuple(each.shape), str(each.dtype), _checksum(each) if prescaled else "")
        for call in calls
        for each in _tensors(call)
    ]


def _tensors(call: CallArguments) -> Iterator[torch.Tensor]:
    """The tensors among the arguments, also of a call that is one of them (step.py)."""
    for leaf in leaves((call.args, call.kwargs)):
        if isinstance(leaf, CallArguments):
            yield from _tensors(leaf)
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def _checksum(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return ""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    values = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return hashlib.blake2b(values, digest_size=8).hexdigest()


def _difference(
    first: int, ours: Sequence[_Described], other: int, theirs: Sequence[_Described]
) -> str:
    """The difference between the batches of two ranks, and the remedy."""
    ranks = f"rank {other}'s batch is not that of rank {first}, of the same TP group: "
    if len(ours) != len(theirs):
        return f"{ranks}it has {len(theirs)} tensors, and not {len(ours)}. {_SHAPES}"
    number, mine, yours = next(
        (number, mine, yours)
        for number, (mine, yours) in enumerate(zip(ours, theirs, strict=True))
        if mine != yours
    )
    if mine[:2] != yours[:2]:
        return (
            f"{ranks}tensor {number} is {list(yours[0])} of {yours[1]}, and not {list(mine[0])} of {mine[1]}. "
            f"{_SHAPES}"
        )
    return (
        f"{ranks}the values of tensor {number} differ. With prescaled_batch all ranks of a TP group train on one "
        "batch: divide the data by smp.rdp_rank() and smp.rdp_size()"
    )


_SHAPES = "Give all ranks of a TP group batches of one shape"
