"""``smp.nn.DistributedEmbedding``: an embedding whose dimension is split over the TP group (API 1.10)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from smp_core.errors import ArgumentError
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.nn.module import DistributedModule
from smp_core.torch.tensor_parallel import exchange
from smp_core.torch.tensor_parallel.registry import Arguments, Registration, register


class DistributedEmbedding(DistributedModule):
    """``torch.nn.Embedding`` with ``embedding_dim`` split over the TP group.

    Args:
        num_embeddings, embedding_dim: global sizes; the degree divides ``embedding_dim``.
        padding_idx: as torch's.
        scale_grad_by_freq: as torch's; frequencies are those in the samples of the whole TP group.
        max_norm, norm_type: as torch's; refused at a degree above 1, where no rank has a whole row.
        sparse: as torch's; refused at a degree above 1.
        _weight: the whole initial weight, ``(num_embeddings, embedding_dim)``.
        initializer_range: the standard deviation of the initial weight.
        _skip_allgather: the ids are those of the whole group already.
        _skip_scatter_and_merge: return the sliced embeddings, ``(G, ..., embedding_dim / tp_size)``.

    ``weight`` is ``(num_embeddings, embedding_dim / tp_size)``. The ids are ``(B, ...)``, the output
    ``(B, ..., embedding_dim)``.

    Raises IndivisibleError, UnsupportedTrainingError; a call raises ArgumentError for an input without a batch.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.slice_size("embedding_dim", embedding_dim)
        if max_norm is not None and self.tp_size > 1:
            raise UnsupportedTrainingError(
                "smp.nn.DistributedEmbedding: max_norm is the norm of a whole row, and each tp rank has a slice of it. "
                "Leave max_norm out"
            )
        if sparse and self.tp_size > 1:
            raise UnsupportedTrainingError(
                "smp.nn.DistributedEmbedding: sparse gradients of slices are not supported. Leave sparse out"
            )
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self._skip_allgather = _skip_allgather
        self._skip_scatter_and_merge = _skip_scatter_and_merge
        if _weight is None:
            _weight = torch.empty(num_embeddings, embedding_dim).normal_(std=initializer_range)
            if padding_idx is not None:
                _weight[padding_idx].zero_()
        plain = nn.Embedding(num_embeddings, embedding_dim, padding_idx, _weight=_weight)
        self.padding_idx = plain.padding_idx
        self.weight: nn.Parameter
        self.register_split("weight", plain.weight, axis=1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The embeddings of this rank's ids; all ranks of the TP group call it."""
        group = self.group_or_none()
        if group is not None and input.dim() == 0:
            raise ArgumentError(
                "smp.nn.DistributedEmbedding: the input is a single id, and ranks exchange batches: it must be (B, ...)"
            )
        if group is not None and not self._skip_allgather:
            input = exchange.gather_ids(input, group)
        found = functional.embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
        if group is None or self._skip_scatter_and_merge:
            return found
        return exchange.merge_channels(found, group)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tp_size={self.tp_size}"


def _arguments(module: nn.Module) -> Arguments:
    assert isinstance(module, nn.Embedding)
    return (module.num_embeddings, module.embedding_dim), {
        "padding_idx": module.padding_idx,
        "max_norm": module.max_norm,
        "norm_type": module.norm_type,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "sparse": module.sparse,
    }


register(Registration(nn.Embedding, DistributedEmbedding, arguments=_arguments))
