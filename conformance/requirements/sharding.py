"""The requirements of sharded data parallelism: values, memory, exchanges, limits, kinds of parameters.

:mod:`conformance.requirements.api` has the requirements of refused configurations (CONF-SHARDED-*).
"""

from __future__ import annotations

from conformance.requirements.registry import Capability, EngineCapability, Level, Need, Requirement

_ANY: frozenset[Need] = frozenset({Capability.PROCESS_GROUPS, EngineCapability.TRAINING})
_SHARDING = _ANY | {EngineCapability.SHARDING}
_API = _SHARDING | {EngineCapability.SMP_API}


def _needing(
    needs: frozenset[Need], *promises: tuple[str, str, str], level: Level = Level.L5
) -> tuple[Requirement, ...]:
    return tuple(Requirement(*promise, level, needs) for promise in promises)


SHARDING = (
    *_needing(
        _ANY,
        (
            "SHARD-EQUALS-PLAIN",
            (
                "Losses, outputs, gradients, and the parameters after steps of an elementwise optimizer, are "
                "those of one process, for any model and every sharding degree of the engine, also 1."
            ),
            "AWS Sharded Data Parallelism; API 4.3; ENGINES 5.3, 5.5",
        ),
    ),
    *_needing(
        _SHARDING,
        (
            "SHARD-ACCUMULATION",
            "In every window the gradients of backward_passes_per_step steps are summed.",
            "AWS Sharded Data Parallelism (Tips and considerations); API 1.7; INF: that they are summed, ENGINES 1.6",
        ),
        (
            "SHARD-STEPS",
            (
                "Each of several steps gathers the parameters of the optimizer's last step, and the optimizer "
                "goes on from the state after that step."
            ),
            "AWS Sharded Data Parallelism (Introduction: the life of a parameter); API 1.8; torch's docs (torch.optim)",
        ),
        (
            "SHARD-REPLICAS",
            (
                "After any number of steps ranks that hold the same part of the state hold the same bits, and "
                "parameters that are not sharded have the same bits on all ranks."
            ),
            "AWS Sharded Data Parallelism (Introduction: replicas); ENGINES 1.5, 5.15",
        ),
        (
            "SHARD-MEMORY",
            (
                "On each rank parameters, gradients and the optimizer's state take the bytes of the whole divided "
                "by the sharding degree, up to padding, and a shard group together holds the whole."
            ),
            "AWS Sharded Data Parallelism (Introduction: training state, divided by the degree); ENGINES 1.4, 3.2",
        ),
        (
            "SHARD-FREED",
            (
                "Parameters that are gathered for a layer are freed after its forward and after its backward "
                "pass; after a step only parameters that are not sharded are whole."
            ),
            "AWS Sharded Data Parallelism; ENGINES 1.2",
        ),
        (
            "SHARD-FROZEN",
            "Parameters with requires_grad=False get no gradient, have no optimizer state, and do not change.",
            "API 1.7; torch's docs (requires_grad)",
        ),
        (
            "SHARD-SHARED",
            (
                "Parameters that modules share, and modules that are called several times, get the sum of "
                "the gradients of all uses."
            ),
            "API 1.7 (module re-use, shared parameters); ENGINES 1.11",
        ),
        (
            "SHARD-INIT",
            "Training starts from the weights and buffers of rank 0, also if other ranks made different ones.",
            "API 1.3.8, 1.7",
        ),
    ),
    *_needing(
        _SHARDING | {EngineCapability.BLOCKS},
        (
            "SHARD-DEGREE",
            "Every degree that divides the number of replicas gives the same gradients and parameters.",
            "AWS Sharded Data Parallelism (Selecting the degree of sharded data parallelism); API 4.3",
        ),
    ),
    *_needing(
        _SHARDING | {EngineCapability.BLOCKS, EngineCapability.TRAFFIC},
        (
            "SHARD-ALLREDUCE-BOUNDARY",
            (
                "Only the last of the accumulated passes sends gradients beyond the shard group; the other passes "
                "send them within the group."
            ),
            "AWS Sharded Data Parallelism (Tips and considerations: all-reduce at the boundary); ENGINES 1.2",
        ),
    ),
    *_needing(
        _SHARDING | {EngineCapability.CLIPPING},
        (
            "SHARD-CLIP-EQUAL",
            "After clipped steps ranks that hold the same part of the state hold the same bits.",
            "API 3.3 (sdp_gradient_clipping); ENGINES 1.7, 5.12",
        ),
        (
            "SHARD-CLIP-ONE-PROCESS",
            (
                "A step scales gradients down to the configured L2 norm, over the whole model and each parameter "
                "once, as one process does; gradients of a smaller norm do not change."
            ),
            "AWS Sharded Data Parallelism (sdp_gradient_clipping); ENGINES 1.7, 5.11",
        ),
    ),
    *_needing(
        _SHARDING | {EngineCapability.UNUSED},
        (
            "SHARD-UNUSED",
            (
                "A parameter that is not sharded has a zero gradient on a rank that did not use it; a parameter "
                "that no rank used has no gradient."
            ),
            "API 1.7 (find_unused_parameters, REL 1.2.0); INF: all ranks gather alike, ENGINES 5.19",
        ),
    ),
    *_needing(
        _SHARDING | {EngineCapability.ANY_PARAMETER},
        (
            "SHARD-ANY-PARAMETER",
            "Parameters may have no dimension, no element, fewer elements than ranks, and any strides.",
            "AWS Sharded Data Parallelism (sdp_param_persistence_threshold: each parameter tensor); ENGINES 1.4",
        ),
    ),
    *_needing(
        _SHARDING | {EngineCapability.REPLAYED},
        (
            "SHARD-REPLAYED",
            (
                "On real values, with dropout, gradients and parameters have the bits of the published "
                "order of reduction."
            ),
            "INF: the order of reductions is published, ENGINES 2.2 tier R",
        ),
    ),
    *_needing(
        _API,
        (
            "SHARD-THRESHOLD",
            "A parameter is sharded if it has at least sdp_param_persistence_threshold elements.",
            "AWS Sharded Data Parallelism (sdp_param_persistence_threshold); ENGINES 1.5",
        ),
        (
            "SHARD-LIVE-BOUND",
            (
                "With small layers no more elements than sdp_max_live_parameters are unsharded at any time."
            ),
            "AWS Sharded Data Parallelism (sdp_max_live_parameters); ENGINES 1.5",
        ),
        (
            "SHARD-OUTSIDE",
            (
                "A module may use a parameter of another module that smp.register_parameter registers; the "
                "gradient of the parameter includes all uses."
            ),
            "AWS Sharded Data Parallelism (Register external model parameters)",
        ),
        (
            "SHARD-SAME-MODEL",
            "Wrapping different models on different ranks is refused on every rank.",
            "AWS Sharded Data Parallelism; INF: which exception is the engine's own",
        ),
        (
            "SHARD-DELAYED",
            "Delayed initialization gives parameters the same values as immediate initialization.",
            "AWS Sharded Data Parallelism (Tips and considerations: delayed_parameter_initialization); ENGINES 1.11",
        ),
    ),
    *_needing(
        _API | {EngineCapability.SMDDP},
        (
            "SHARD-GATHER-BACKEND",
            (
                "Parameters are gathered by SMDDP if ddp_dist_backend is auto, the ranks have SMDDP, and both of its "
                "buffers hold the gather; otherwise by the other backend. Each gather is listed with its backend and, "
                "where that is another one, the reason."
            ),
            "AWS Sharded Data Parallelism (Supported configurations: both buffers); INF: on CPU ranks",
        ),
        (
            "SHARD-GATHER-OTHERS",
            (
                "SMDDP carries the gathers of sharded parameters alone: reductions, gathers of other values, and the "
                "exchanges of other groups go by the other backend, and a gather that does is listed with the reason."
            ),
            "AWS Sharded Data Parallelism (Train with SMDDP Collectives: other collectives); INF: on CPU ranks",
        ),
        (
            "SHARD-GATHER-SIZES",
            (
                "Bytes decide, in any dtype, whether SMDDP's buffers hold a gather; a size of a buffer that is no "
                "positive multiple of 8192, or differs between the ranks of a shard group, is refused on each of them."
            ),
            "AWS Sharded Data Parallelism (Performance and memory tuning: values); INF: that others are refused",
        ),
    ),
    *_needing(
        _API | {EngineCapability.REPLAYED},
        (
            "SHARD-BUCKET",
            "sdp_reduce_bucket_size changes no bit.",
            "AWS Sharded Data Parallelism (sdp_reduce_bucket_size); ENGINES 2.1",
        ),
        (
            "SHARD-LIVE",
            "sdp_max_live_parameters, which limits the parameters gathered ahead, changes no bit.",
            "AWS Sharded Data Parallelism (sdp_max_live_parameters); ENGINES 1.5",
        ),
        (
            "SHARD-HIERARCHICAL",
            "sdp_hierarchical_allgather changes no bit, for any assignment of ranks to nodes.",
            "AWS Sharded Data Parallelism (sdp_hierarchical_allgather); ENGINES 1.3",
        ),
        (
            "SHARD-CHECKPOINTING",
            "Activation checkpointing changes no bit.",
            "AWS Sharded Data Parallelism (Tips and considerations: activation checkpointing); ENGINES 1.11",
        ),
    ),
    *_needing(
        _SHARDING | {EngineCapability.BF16},
        (
            "SHARD-BF16",
            (
                "With bf16 the model computes in bfloat16, gradients are summed in float32, and parameters "
                "are float32 masters rounded once."
            ),
            "AWS Sharded Data Parallelism (BF16 training); ENGINES 1.8",
        ),
        level=Level.L6,
    ),
    *_needing(
        _SHARDING | {EngineCapability.FP16},
        (
            "SHARD-FP16",
            (
                "With fp16 the model computes in float16, gradients are summed in float32, and parameters "
                "are float32 masters rounded once."
            ),
            "AWS Sharded Data Parallelism (FP16 training); API 1.8",
        ),
        level=Level.L6,
    ),
)
