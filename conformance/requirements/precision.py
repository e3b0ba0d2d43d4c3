"""The requirements of the 16-bit paths: loss scales, overflows, masters, rounding, clipping, split state.

:mod:`conformance.requirements.api` has the requirements of refused configurations (CONF-FP16-BF16,
CONF-BF16-SHARDED), and :mod:`conformance.requirements.sharding` those of sharded training in 16 bits
(SHARD-BF16, SHARD-FP16).
"""

from __future__ import annotations

from conformance.requirements.registry import Capability, EngineCapability, Level, Need, Requirement

_API: frozenset[Need] = frozenset(
    {
        Capability.PROCESS_GROUPS,
        EngineCapability.TRAINING,
        EngineCapability.SMP_API,
        EngineCapability.PIPELINE,  # most properties also draw pipelines
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
                "After every step the loss scale follows from the overflows so far by the rules of "
                "dynamic_loss_args, on every rank; missing keys have the documented defaults."
            ),
            f"{_PREDECESSOR}, dynamic_loss_args; ENGINES 1.8",
        ),
        (
            "PREC-OVERFLOW",
            (
                "An infinity or NaN in the gradients of any rank makes overflow true on all ranks of the "
                "world; otherwise overflow is false on all, also if padding holds one."
            ),
            f"{_PREDECESSOR}; ENGINES 1.8 (the flag over the world), 1.4 (padding)",
        ),
        (
            "PREC-SKIP",
            (
                "On all ranks a step with an overflow changes no parameter, master or optimizer state, and drops "
                "the gradients; a step without an overflow updates them."
            ),
            f"{_PREDECESSOR}; ENGINES 1.8",
        ),
        (
            "PREC-STATIC",
            (
                "Gradients are divided by a static loss scale again, and no overflow is ever reported."
            ),
            _PREDECESSOR,
        ),
        (
            "PREC-SET-SCALE",
            "loss_scale may be set between steps, and losses are multiplied by the new value from then on.",
            "API 1.8 (loss_scale, settable)",
        ),
        (
            "PREC-MASTERS",
            (
                "The optimizer works on float32 masters, with float32 state; after each step parameters are "
                "the masters, rounded once, to the nearest and ties to even."
            ),
            f"{_PREDECESSOR}; ENGINES 1.8 (invariants)",
        ),
        (
            "PREC-SUMS",
            (
                "16-bit gradients are summed over microbatches, passes and ranks in float32, divided, and given "
                "to the masters."
            ),
            "INF: ENGINES 1.6, 1.8 (reduce_dtype is float32, micro-steps in float32)",
        ),
        (
            "PREC-CLIP-NORM",
            (
                "clip_master_grads returns the norm of the whole model's gradients without the loss scale, "
                "the same on all ranks, and -1 after an overflow; gradients of a norm up to max_norm stay."
            ),
            "API 1.8 (clip_master_grads); ENGINES 1.7",
        ),
        (
            "PREC-NESTS",
            (
                "Float32 tensors in the model's arguments become 16-bit, rounded once, also within tuples, "
                "lists and dicts; 16-bit tensors in the model's results become float32; other values stay."
            ),
            _PREDECESSOR,
        ),
        (
            "PREC-EXACT",
            (
                "On whole numbers that 16 bits hold, pipelines and replicas give the losses, outputs, "
                "gradients and parameters of one process."
            ),
            "API 1.8; ENGINES 2.2 tier E",
        ),
        (
            "PREC-DTYPES",
            "Parameters that are neither float32 nor of the run's 16-bit dtype raise TypeError.",
            _PREDECESSOR,
        ),
    ),
    *_needing(
        _FP16 | {EngineCapability.REPLAYED},
        (
            "PREC-CLIP",
            (
                "clip_master_grads multiplies each gradient once, by the product of max_norm / (norm + 1e-6) and "
                "the inverse of the loss scale."
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
            "Without fp16 the arguments of loss scaling are ignored, without a warning.",
            "API 1.8",
        ),
        (
            "PREC-GRAD-SCALER",
            (
                "smp.amp.GradScaler works on all ranks as torch's works in one process with all gradients: an "
                "infinity or NaN on one rank skips the step and lowers the scale on all."
            ),
            "API 1.9 (amp.GradScaler); torch's docs (torch.amp.GradScaler)",
        ),
        (
            "PREC-STATE-BYTES",
            (
                "With shard_optimizer_state the ranks of all replicas together keep the whole optimizer state, "
                "and each rank an equal part of it, up to padding."
            ),
            "API 3.3 (shard_optimizer_state); ENGINES 1.4",
        ),
    ),
    *_needing(
        _API | {EngineCapability.REPLAYED},
        (
            "PREC-STATE-EQUAL",
            "shard_optimizer_state changes no bit of an elementwise optimizer's results.",
            "API 3.3 (shard_optimizer_state); ENGINES 2.1 (elementwise on flat shards)",
        ),
    ),
)
