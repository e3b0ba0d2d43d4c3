"""What an engine claims that it can do, as data. Nothing here imports torch."""

from __future__ import annotations

import enum

from pytest_smp.ranks.capabilities import Capability


class EngineCapability(enum.StrEnum):
    """What an engine must have for a requirement to apply to it at all."""

    TRAINING = "training"  #: trains a model over replicas; every engine does
    PIPELINE = "pipeline"  #: pipeline degrees above 1
    SMP_API = "the SMP API"  #: it has ``api``: a namespace that a script imports as ``smp``
    UNUSED = "unused parameters"  #: parameters that some calls, or ranks, do not use
    ANY_PARAMETER = "any parameter"  #: also without dimension, or not contiguous
    SHARDING = "sharding"  #: degrees of sharded data parallelism above 1
    BLOCKS = "sharding blocks"  #: several shard groups, which are replicas of each other
    CLIPPING = "clipping"  #: a step clips the norm of all gradients, where they are sharded
    BF16 = "bf16"  #: sharded training with bfloat16 parameters and float32 masters
    FP16 = "fp16"  #: training with float16 parameters and float32 masters
    TRAFFIC = "counted exchanges"  #: a session tells what it exchanged
    REPLAYED = "replayed order"  #: the published order of reductions: no choice changes a bit


#: What a requirement may need: of the backend, or of the engine.
Need = Capability | EngineCapability
NEEDS: tuple[Need, ...] = (*Capability, *EngineCapability)
