"""The requirements of the 16-bit paths: loss scales, overflows, masters, rounding, clipping, split state.

Which configurations are refused is among those of :mod:`conformance.requirements.api` (CONF-FP16-BF16,
CONF-BF16-SHARDED); sharded training in 16 bits also in :mod:`conformance.requirements.sharding`.
"""

from __future__ import annotations

from conformance.requirements.registry import Capability, EngineCapability, Level, Need, Requirement

_API: frozenset[Need] = frozenset(
    {
        Capability.PROCESS_GROUPS,
        EngineCapability.TRAINING,
        EngineCapability.SMP_API,
        EngineCapability.PIPELINE,  # most are asked of pipelines, too
    }
)
_FP16 = _API | {EngineCapability.FP16}
_PREDECESSOR = "API 1.8 (FP16 behaviour)"


def _needing(needs: frozenset[Need], *promises: tuple[str, str, str]) -> tuple[Requirement, ...]:
    return tuple(Requirement(*promise, Level.L6, needs) for promise in promises)


PRECISION = (
    *_needing(
        _FP16,
        (
            "PREC-LOSS-SCALE",
            (
                "After every step the loss scale is what the rules of dynamic_loss_args make of the overflows "
                "so far, on every rank; keys that are not given have the documented defaults."
            ),
            f"{_PREDECESSOR}, dynamic_loss_args; ENGINES 1.8",
        ),
        (
            "PREC-OVERFLOW",
            (
                "An infinity or NaN in the gradients of any rank makes overflow true on all ranks of the "
                "world; without one it is false on all, whatever padding holds."
            ),
            f"{_PREDECESSOR}; ENGINES 1.8 (the flag over the world), 1.4 (padding)",
        ),
        (
            "PREC-SKIP",
            (
                "A step with an overflow leaves the parameters, the masters and the optimizer's state as they "
                "were on all ranks, and drops the gradients; one without changes them on all."
            ),
            f"{_PREDECESSOR}; ENGINES 1.8",
        ),
        (
            "PREC-STATIC",
            (
                "A static loss scale is divided out of the gradients again, and never reports an overflow."
            ),
            _PREDECESSOR,
        ),
        (
            "PREC-SET-SCALE",
            "loss_scale may be set between steps, and is what losses are multiplied by from then on.",
            "API 1.8 (loss_scale, settable)",
        ),
        (
            "PREC-MASTERS",
            (
                "The optimizer works on float32 masters, also in its state; after each step parameters "
                "are these, rounded once, to the nearest and ties to even."
            ),
            f"{_PREDECESSOR}; ENGINES 1.8 (invariants)",
        ),
        (
            "PREC-SUMS",
            (
                "16-bit gradients are summed over microbatches, passes and ranks, divided, and given to the "
                "masters in float32."
            ),
            "INF: ENGINES 1.6, 1.8 (reduce_dtype is float32, micro-steps in float32)",
        ),
        (
            "PREC-CLIP-NORM",
            (
                "clip_master_grads returns the norm of the whole model's gradients without the loss scale, "
                "the same on all ranks; -1 after an overflow; a norm up to max_norm changes nothing."
            ),
            "API 1.8 (clip_master_grads); ENGINES 1.7",
        ),
        (
            "PREC-NESTS",
            (
                "Float32 tensors in the model's arguments become 16-bit, rounded once, through tuples, lists "
                "and dicts; 16-bit tensors in what it returns become float32; all else stays."
            ),
            _PREDECESSOR,
        ),
        (
            "PREC-EXACT",
            (
                "On whole numbers that 16 bits hold, pipelines and replicas have the losses, outputs, "
                "gradients and parameters of one process."
            ),
            "API 1.8; ENGINES 2.2 tier E",
        ),
        (
            "PREC-DTYPES",
            "Parameters that are neither float32 nor of the run's 16-bit dtype are a TypeError.",
            _PREDECESSOR,
        ),
    ),
    *_needing(
        _FP16 | {EngineCapability.REPLAYED},
        (
            "PREC-CLIP",
            (
                "clip_master_grads multiplies each gradient once, by max_norm / (norm + 1e-6) and the inverse "
                "of the loss scale together."
            ),
            "API 1.8; ENGINES 1.7 (one combined multiply); INF: its bits",
        ),
        (
            "PREC-REPLAYED",
            (
                "On real values, in pipelines and in shards, gradients and parameters have the bits of the "
                "published order of reduction with float32 sums and masters."
            ),
            "INF: the order of reductions is published, ENGINES 2.2 tier R",
        ),
    ),
    *_needing(
        _FP16 | {EngineCapability.REPLAYED, EngineCapability.SHARDING},
        (
            "PREC-SHARDED-CLIP",
            (
                "With sharded data parallelism a step clips by the norm of the gradients without the loss "
                "scale, each element once, on all ranks alike."
            ),
            "AWS Sharded Data Parallelism (sdp_gradient_clipping); ENGINES 1.7",
        ),
    ),
    *_needing(
        _API,
        (
            "PREC-IGNORED",
            "Without fp16 the arguments of loss scaling are ignored without a word.",
            "API 1.8",
        ),
        (
            "PREC-GRAD-SCALER",
            (
                "smp.amp.GradScaler does on all ranks what torch's does in one process that has the gradients "
                "of all: an infinity or NaN on one skips the step, and lowers the scale, everywhere."
            ),
            "API 1.9 (amp.GradScaler); torch's docs (torch.amp.GradScaler)",
        ),
        (
            "PREC-STATE-BYTES",
            (
                "With shard_optimizer_state each replica's rank keeps the state of its own part of the "
                "parameters: the whole divided by their number, up to padding, and all of it together."
            ),
            "API 3.3 (shard_optimizer_state); ENGINES 1.4",
        ),
    ),
    *_needing(
        _API | {EngineCapability.REPLAYED},
        (
            "PREC-STATE-EQUAL",
            "shard_optimizer_state changes no bit of what an elementwise optimizer does.",
            "API 3.3 (shard_optimizer_state); ENGINES 2.1 (elementwise on flat shards)",
        ),
    ),
)
