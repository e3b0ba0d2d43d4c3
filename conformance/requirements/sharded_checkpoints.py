"""The requirements of checkpoints of sharded data parallelism: states, files and refusals."""

from __future__ import annotations

from conformance.requirements.registry import Capability, EngineCapability, Level, Need, Requirement

_NEEDS: frozenset[Need] = frozenset(
    {
        Capability.PROCESS_GROUPS,
        EngineCapability.TRAINING,
        EngineCapability.SMP_API,
        EngineCapability.SHARDING,
        EngineCapability.BLOCKS,
    }
)

_PROMISES = (
    (
        "SHARD-CKPT-STATE",
        (
            "The state_dict of model and of optimizer is unsharded on every rank, has the form of plain torch's, "
            "and loads at any sharding degree."
        ),
        "API 1.7, 1.8 (state_dict); REL 1.15 (full models under sharded data parallelism)",
    ),
    (
        "SHARD-CKPT-PARTIAL",
        (
            "Training resumed from a partial checkpoint goes on bit for bit at the same degree, with the "
            "optimizer's state, also with another number of shard groups, and returns the user's content."
        ),
        "API 1.11 (sharded DP partial)",
    ),
    (
        "SHARD-CKPT-FULL",
        (
            "Training resumed from a full checkpoint goes on bit for bit, with the optimizer's state, at any "
            "degree and number of ranks."
        ),
        "API 1.11; INF: that it includes the optimizer's state, which SMP does not load from full ones",
    ),
    (
        "SHARD-CKPT-FILES",
        (
            "A partial checkpoint has a model file and an optimizer file for each shard, and no file holds the "
            "whole of a sharded tensor."
        ),
        "API 1.11 (optimizer_{i}.pt per shard); INF: that models are split in the same way",
    ),
    (
        "SHARD-CKPT-DEGREE",
        "A partial checkpoint of another degree is refused on every rank, and changes nothing.",
        "API 1.11; INF: that it is refused",
    ),
    (
        "SHARD-CKPT-DAMAGED",
        (
            "A partial checkpoint with a file that is missing, torn or under another file's name is refused on "
            "every rank, and changes nothing."
        ),
        "API 1.11; INF: which exception is the engine's own",
    ),
)

_IN_16_BITS = (
    (
        "SHARD-CKPT-BF16",
        (
            "With bf16 partial and full checkpoints have the float32 masters: resumed training goes on bit for "
            "bit, from a full one at any degree."
        ),
        "API 1.11 (fp16_states_*.pt); INF: that full ones have them, too",
        EngineCapability.BF16,
    ),
    (
        "SHARD-CKPT-FP16",
        (
            "With fp16 partial and full checkpoints have the float32 masters and the loss scale: resumed training "
            "goes on bit for bit, from a full one at any degree."
        ),
        "API 1.8, 1.11 (fp16_states_*.pt); INF: that full ones have them, too",
        EngineCapability.FP16,
    ),
)

SHARDED_CHECKPOINTS = (
    *(Requirement(*promise, Level.L7, _NEEDS) for promise in _PROMISES),
    *(
        Requirement(id, sentence, source, Level.L7, _NEEDS | {need})
        for id, sentence, source, need in _IN_16_BITS
    ),
)
