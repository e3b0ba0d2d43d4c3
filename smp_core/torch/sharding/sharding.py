"""The sharding of a model: of one that is sharded, or of one whose parameters are whole on every rank."""

from __future__ import annotations

from smp_core.torch.sharding.sharded_model import ShardedModel
from smp_core.torch.sharding.whole_model import WholeModel

Sharding = ShardedModel | WholeModel
