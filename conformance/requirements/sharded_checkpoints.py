"""The requirements of checkpoints of sharded data parallelism: states, files, what is refused."""

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
            "state_dict of model and optimizer are whole on every rank, and are plain torch's, whatever is "
            "split; they load at any degree."
        ),
        "API 1.7, 1.8 (state_dict); REL 1.15 (full models under sharded data parallelism)",
    ),
    (
        "SHARD-CKPT-PARTIAL",
        (
            "What was saved partially trains on bit for bit at the same degree, the optimizer's state "
            "included, also with another number of shard groups; the user's content comes back."
        ),
        "API 1.11 (sharded DP partial)",
    ),
    (
        "SHARD-CKPT-FULL",
        (
            "What was saved in full trains on bit for bit at any degree and number of ranks, the "
            "optimizer's state included."
        ),
        "API 1.11; INF: that it includes the optimizer's state, which SMP does not load from full ones",
    ),
    (
        "SHARD-CKPT-FILES",
        (
            "A partial checkpoint has a model file and an optimizer file for each shard, and none of them "
            "holds all of what is split."
        ),
        "API 1.11 (optimizer_{i}.pt per shard); INF: that models are split in the same way",
    ),
    (
        "SHARD-CKPT-DEGREE",
        "A partial checkpoint of another degree is refused on every rank, and nothing has changed.",
        "API 1.11; INF: that it is refused",
    ),
    (
        "SHARD-CKPT-DAMAGED",
        (
            "A partial checkpoint of which a file is missing or torn, or stands under another one's name, "
            "is refused on every rank, and nothing has changed."
        ),
        "API 1.11; INF: which exception is the engine's own",
    ),
)

_IN_16_BITS = (
    (
        "SHARD-CKPT-BF16",
        (
            "With bf16 a checkpoint, partial or full, has the float32 masters: training goes on bit for bit, at any "
            "degree where it is full."
        ),
        "API 1.11 (fp16_states_*.pt); INF: that full ones have them, too",
        EngineCapability.BF16,
    ),
    (
        "SHARD-CKPT-FP16",
        "The same with fp16, and the loss scale comes back.",
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
