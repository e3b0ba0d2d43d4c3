"""The distributed modules, ``smp.nn``: their parameters are split over the ranks of the TP group (API 1.10)."""

from smp_core.torch.nn import huggingface
from smp_core.torch.nn.attention import DistributedAttentionLayer
from smp_core.torch.nn.embedding import DistributedEmbedding
from smp_core.torch.nn.layer_norm import FusedLayerNorm
from smp_core.torch.nn.linear import DistributedLinear
from smp_core.torch.nn.lm_head import DistributedTransformerLMHead
from smp_core.torch.nn.module import DistributedModule
from smp_core.torch.nn.output_layer import DistributedTransformerOutputLayer
from smp_core.torch.nn.transformer import DistributedTransformer, DistributedTransformerLayer

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FusedLayerNorm",
    "huggingface",
]
