"""The requirements of the SMP API for TensorFlow: partitions of Keras models, steps, checkpoints."""

from __future__ import annotations

from conformance.requirements.registry import Capability, EngineCapability, Level, Need, Requirement

_NEEDS: frozenset[Need] = frozenset({Capability.OBJECTS, EngineCapability.TENSORFLOW})


def _promise(id: str, sentence: str, source: str, level: Level = Level.L3) -> Requirement:
    return Requirement(id, sentence, source, level, _NEEDS)


PLACEMENT = (
    _promise(
        "TF-OPS-ONE-RANK",
        "Every operation made in call, those of layers included, runs on exactly one rank, once for each microbatch; "
        "and its gradient on the same rank.",
        "AWS TensorFlow API (smp.DistributedModel), API 2; INF: gradients where their values are kept",
    ),
    _promise(
        "TF-OPS-OUTSIDE-ALL",
        "Operations of a step outside of call run on every rank, once for each microbatch.",
        "AWS TensorFlow API (smp.DistributedModel), API 2",
    ),
    _promise(
        "TF-PART-INNERMOST",
        "An operation runs in the partition of the innermost context that it is made in.",
        "AWS TensorFlow API (smp.partition), API 2",
    ),
    _promise(
        "TF-PART-DEFAULT",
        "An operation of call that no context holds runs in default_partition.",
        "API 2, 3.1",
    ),
    _promise(
        "TF-PART-AUTO-IGNORED",
        "Under auto_partition the contexts of partitions change nothing, whatever their index.",
        "API 2, 3.1",
    ),
    _promise(
        "TF-PART-INDEX",
        "A partition that does not exist is refused on every rank before any operation of the model runs.",
        "API 2, 3.1; INF: accepted in silence an operation would run nowhere",
    ),
)

VALUES = (
    _promise(
        "TF-PART-VALUE",
        "Losses, outputs and variables are those of the unpartitioned model to the bit, whatever the partition.",
        "API 2 (partition: operations in call; save_model: the whole model); INF: to the bit, because a partition "
        "changes no operation",
    ),
    _promise(
        "TF-OUT-ALL-RANKS",
        "All outputs of the model are on every rank, whichever rank computed them.",
        "AWS TensorFlow API (smp.DistributedModel), API 2",
    ),
    _promise(
        "TF-GRAD-LOCAL",
        "After the first step each variable is one rank's, and the gradients that a step returns are those of the "
        "rank's trainable variables, in their order.",
        "INF: API 2 names no owner; an optimizer then keeps the slots of its rank's variables alone",
    ),
    _promise(
        "TF-SCHED-EQUAL",
        "Losses, outputs and variables are the same under simple and interleaved, for any active_microbatches.",
        "API 3.1 (pipeline, active_microbatches)",
    ),
    _promise(
        "TF-SCHED-ACTIVE",
        "Under interleaved no more than active_microbatches are in progress on a rank; under simple all forward "
        "passes come before backward passes.",
        "API 3.1 (pipeline, active_microbatches)",
    ),
)

STEPS = (
    _promise(
        "TF-STEP-TF-FUNCTION",
        "step takes the arguments of tf.function: one trace serves all shapes that input_signature allows.",
        "API 2 (smp.step extends tf.function)",
    ),
    _promise(
        "TF-STEP-RETRACE",
        "A step is traced anew for another shape, dtype or Python value, and for nothing else.",
        "API 2 (smp.step extends tf.function)",
    ),
    _promise(
        "TF-STEP-OUTER",
        "A step called inside of an outer tf.function trains as one that is called eagerly.",
        "API 2 (smp.step extends tf.function), API 8.10",
    ),
    _promise(
        "TF-STEP-ORDER",
        "Steps and assignments to variables in one tf.function take effect in the order of the program.",
        "INF: API 2 has steps extend tf.function, which keeps that order",
    ),
    _promise(
        "TF-STEP-OUTSIDE",
        "A call of the model outside of a step is refused, and the next step works.",
        "AWS TensorFlow API (smp.DistributedModel), API 2; INF: that the refusal is an error",
    ),
    _promise(
        "TF-MB-MERGE",
        "merge joins the microbatches' outputs along the batch, in their order.",
        "API 2 (StepOutput)",
    ),
    _promise(
        "TF-MB-ACCUMULATE",
        "accumulate is the mean over the microbatches by each of its three methods, and assigns it to var.",
        "API 2 (StepOutput)",
    ),
    _promise(
        "TF-HOOK-ONCE",
        "The hook after the partition is called once, eagerly, without arguments, when the model is partitioned and "
        "before its first operation runs.",
        "API 2 (register_post_partition_hook)",
    ),
)

ERRORS = (
    _promise(
        "TF-DIVERGENT-TRACE",
        "Ranks that trace different graphs get an error each, and none waits for ever.",
        "INF: no source says what happens; segments of different graphs would exchange wrong tensors",
        Level.L2,
    ),
    _promise(
        "TF-STEP-RAISES",
        "An operation that fails on one rank while a step runs ends the step with an error on every rank, whose "
        "gradients are not applied; none waits for ever, and the next step works.",
        "INF: no source says what happens; a rank that waits for the one that failed would wait for ever",
        Level.L2,
    ),
    _promise(
        "TF-NO-TP",
        "tensor_parallel_degree above 1 is refused on every rank.",
        "API 2 (there is no tensor parallelism); INF: that the refusal is an error",
    ),
    _promise(
        "TF-PLACEMENT",
        "placement_strategy is cluster or spread; a permutation is refused on every rank.",
        "API 2; INF: that the refusal is an error",
    ),
)

FILES = (
    _promise(
        "TF-CKPT-RANK-DIRS",
        "CheckpointManager writes a folder mp_rank_N for each rank, with its own file checkpoint.",
        "AWS TensorFlow API (smp.CheckpointManager), API 2",
        Level.L7,
    ),
    _promise(
        "TF-CKPT-PREFIX",
        "restore gives the checkpoint of restore_prefix, and the latest without one.",
        "AWS TensorFlow API (smp.CheckpointManager), API 2",
        Level.L7,
    ),
    _promise(
        "TF-CKPT-MAX",
        "The latest max_to_keep checkpoints are kept, and all without that argument.",
        "AWS TensorFlow API (smp.CheckpointManager), API 2",
        Level.L7,
    ),
    _promise(
        "TF-CKPT-STOP-AND-GO",
        "Training that is restored, before the first step or after it, goes on as one that was not stopped, slots of "
        "the optimizer and the script's own variables included.",
        "AWS TensorFlow API (smp.CheckpointManager), API 2, 8.10",
        Level.L7,
    ),
    _promise(
        "TF-SAVE-WHOLE",
        "save_model writes the whole model with its current weights as a SavedModel, which plain TensorFlow loads.",
        "AWS TensorFlow API (smp.DistributedModel), API 2",
        Level.L7,
    ),
)

TENSORFLOW = (*PLACEMENT, *VALUES, *STEPS, *ERRORS, *FILES)
