"""The capabilities that an engine may claim, as data. Nothing here imports torch."""

from __future__ import annotations

import enum

from pytest_smp.ranks.capabilities import Capability


class EngineCapability(enum.StrEnum):
    """A capability that an engine may claim; a requirement that needs it applies to no other engine."""

    TRAINING = "training"  #: trains a model over replicas; every engine for PyTorch does
    PIPELINE = "pipeline"  #: pipeline degrees above 1
    SMP_API = "the SMP API"  #: the engine's ``api`` names a module that a script imports as ``smp``
    UNUSED = "unused parameters"  #: parameters that some calls, or ranks, do not use
    ANY_PARAMETER = "any parameter"  #: also parameters without dimensions, or not contiguous
    TENSOR = "tensor parallelism"  #: degrees above 1; the ranks of a TP group train on one batch
    OWN_BATCHES = "own batches"  #: the ranks of a TP group may bring samples of their own
    SHARDING = "sharding"  #: degrees of sharded data parallelism above 1
    BLOCKS = "sharding blocks"  #: several shard groups, which are replicas of each other
    CLIPPING = "clipping"  #: a step clips the norm of all gradients if they are sharded
    BF16 = "bf16"  #: sharded training with bfloat16 parameters and float32 masters
    FP16 = "fp16"  #: training with float16 parameters and float32 masters
    TRAFFIC = "counted exchanges"  #: a session lists its exchanges
    SMDDP = (
        "SMDDP gathers"  #: chooses between SMDDP's gather and another one, and lists each choice
    )
    TENSORFLOW = "TensorFlow"  #: the engine's ``api`` names the SMP API for Keras models
    REPLAYED = "replayed order"  #: the published order of reductions: no choice changes a bit


#: The front ends beside that for PyTorch. A session leaves out the requirements of one that its engine does not claim.
FRONT_ENDS = frozenset({EngineCapability.TENSORFLOW})


#: A capability that a requirement may need, of the backend or of the engine.
Need = Capability | EngineCapability
NEEDS: tuple[Need, ...] = (*Capability, *EngineCapability)
