"""The distributed modules, ``smp.nn``: their parameters are split over the ranks of the TP group (API 1.10)."""

from smp_core.torch.nn.embedding import DistributedEmbedding
from smp_core.torch.nn.linear import DistributedLinear
from smp_core.torch.nn.module import DistributedModule

__all__ = ["DistributedEmbedding", "DistributedLinear", "DistributedModule"]
