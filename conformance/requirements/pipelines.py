"""The requirements of training on replicas and pipelines: gradients, schedules, hooks, errors, files."""

from __future__ import annotations

from conformance.requirements.registry import Capability, EngineCapability, Level, Need, Requirement

_ANY: frozenset[Need] = frozenset({Capability.PROCESS_GROUPS, EngineCapability.TRAINING})
_PIPELINE = _ANY | {EngineCapability.PIPELINE}
_API = _ANY | {EngineCapability.SMP_API}
_API_PIPELINE = _API | {EngineCapability.PIPELINE}
_REPLAYED = _PIPELINE | {EngineCapability.REPLAYED}


def _needing(needs: frozenset[Need], *promises: tuple[str, str, str]) -> tuple[Requirement, ...]:
    return tuple(Requirement(*promise, Level.L3, needs) for promise in promises)


PIPELINES = (
    *_needing(
        _ANY,
        (
            "GRAD-PLAIN",
            (
                "Losses, outputs, gradients and the parameters after a step are those of a plain loop over "
                "microbatches, steps and replicas, for any model, at pipeline degree 1."
            ),
            "API 1.3, 1.7, 5; ENGINES 1.6",
        ),
        (
            "GRAD-ACCUMULATION",
            (
                "Gradients of backward_passes_per_step steps are summed, in every window, and reduced over "
                "replicas once."
            ),
            "API 1.7 (backward_passes_per_step); INF: that they are summed, ENGINES 1.6",
        ),
        (
            "GRAD-REPLICAS",
            (
                "Gradients are averaged over data-parallel replicas, each of which has data of its own, and "
                "are the same on all of them."
            ),
            "API 1.7; ENGINES 1.6",
        ),
        (
            "GRAD-STEPS",
            (
                "Each of several steps computes with the parameters that the optimizer's step before it has "
                "made, and the optimizer goes on from the state that it had then."
            ),
            "API 1.7, 1.8; torch's docs (torch.optim)",
        ),
        (
            "GRAD-FROZEN",
            "Parameters that need no gradient get none and do not change.",
            "API 1.7; torch's docs (requires_grad)",
        ),
        (
            "GRAD-BUCKETS",
            "The size of buckets, and whether reduction overlaps with backward, change no bit.",
            "API 1.7 (bucket_cap_mb, overlapping_allreduce); ENGINES 5.9",
        ),
        (
            "GRAD-BOUNDED",
            (
                "On real values the gradients are the mean of the replicas' own, up to the rounding of "
                "their sum."
            ),
            "API 1.7 (averaged); INF: the bound, ENGINES 2.2 tier B",
        ),
        (
            "MODEL-BROADCAST",
            "Training starts from the weights and buffers of rank 0, whatever the other ranks made.",
            "API 1.3.8, 1.7",
        ),
    ),
    *_needing(
        _ANY | {EngineCapability.UNUSED},
        (
            "GRAD-UNUSED",
            (
                "A parameter that a replica did not use counts as zero there; one that none used keeps no "
                "gradient."
            ),
            "API 1.7 (find_unused_parameters, REL 1.2.0); ENGINES 5.19",
        ),
    ),
    *_needing(
        _PIPELINE,
        (
            "PIPE-EQUALS-PLAIN",
            (
                "A pipeline gives the losses, outputs, gradients and parameters of a plain loop: for any "
                "model, partition, degrees, number of microbatches, schedule and batch axes."
            ),
            "API 5; ENGINES 1.10",
        ),
        (
            "PIPE-AUTOMATIC",
            "The same with a partition that the library chooses.",
            "API 3 (auto_partition), 5",
        ),
        (
            "PIPE-SHARED",
            (
                "Parameters that modules share, and modules that are called several times, get the sum of "
                "the gradients of all uses."
            ),
            "API 1.7 (module re-use, shared parameters)",
        ),
        (
            "PIPE-AVERAGE",
            (
                "Gradients are divided by the number of microbatches if average_grads_across_microbatches, "
                "and else summed."
            ),
            "API 1.7 (average_grads_across_microbatches)",
        ),
        (
            "PIPE-EVERYWHERE",
            "What a step returns is there on every rank of the pipeline, in the order of microbatches.",
            "API 1.3.7, 1.4",
        ),
        (
            "PIPE-FIRST-RANK",
            "Only the data of pp_rank 0 counts; others may give tensors without elements.",
            "API 1.3.11; INF: that they are not looked at",
        ),
        (
            "PIPE-LOCAL",
            (
                "Once partitioned, each rank holds its own partition's parameters and no others, and the "
                "ranks of a pipeline hold all of them."
            ),
            "API 1.7 (local_parameters), 1.3.8",
        ),
    ),
    *_needing(
        _API_PIPELINE,
        (
            "PIPE-SIMPLE",
            "Under the schedule simple no backward begins before the last forward of the step ended.",
            "API 5",
        ),
        (
            "PIPE-ACTIVE",
            "Under the schedule interleaved at most active_microbatches microbatches are in progress.",
            "API 5; INF: that simple must have them all in progress",
        ),
        (
            "PIPE-INTERLEAVED",
            "Under the schedule interleaved, with one microbatch at a time, each is done before the next.",
            "API 5",
        ),
    ),
    *_needing(
        _REPLAYED,
        (
            "PIPE-REPLAYED",
            (
                "On real values, with dropout, the bits depend on no choice: partition, pipeline degree, "
                "schedule, active_microbatches, buckets."
            ),
            "INF: the order of reductions is published, ENGINES 1.10, 2.2 tier R",
        ),
        (
            "PIPE-CHECKPOINTING",
            "Activation checkpointing changes no bit.",
            "API 1.9 (set_activation_checkpointing); ENGINES 1.11",
        ),
        (
            "PIPE-REPEATABLE",
            "The same run twice gives the same bits.",
            "INF: the order of reductions is published, ENGINES 2.2 tier R",
        ),
    ),
    *_needing(
        _API,
        (
            "MODEL-BAD-BATCH",
            "A batch that cannot be divided by microbatches is refused on every rank.",
            "API 1.3.4; INF: which exception is the engine's own",
        ),
        (
            "MODEL-SECOND",
            "A second DistributedModel is refused.",
            "API 1.7, 6",
        ),
        (
            "MODEL-RAISING-BODY",
            "What a step's body or a module raises ends the step on every rank, and the next step works.",
            "API 1.3.1 (a step is called by all ranks); INF: that all of them end it",
        ),
        (
            "MODEL-DETACHED",
            "backward of a tensor that does not depend on the model is refused on every rank.",
            "API 1.7; INF: which exception is the engine's own",
        ),
        (
            "MODEL-ATTRIBUTES",
            (
                "partitioned tells whether the model is, module is the wrapped module, and state_dict is "
                "whole and has the names and values of the wrapped module."
            ),
            "API 1.7",
        ),
        (
            "HOOK-POST-PARTITION",
            (
                "Hooks of register_post_partition_hook are called with model and optimizer, once, after the "
                "partition and before the first real forward; removed ones are not called."
            ),
            "API 1.3.8, 1.7",
        ),
        (
            "HOOK-POST-STEP",
            (
                "Hooks of register_post_step_hook are called with model and optimizer, once, after the first "
                "step."
            ),
            "API 1.7; INF: that it is once, API 9.9",
        ),
        (
            "MODEL-ORIG-FORWARD",
            "In a module's forward super()._orig_forward(...) runs the forward of its base class.",
            "API 1.7 (super()._orig_forward)",
        ),
        (
            "HOOK-FORWARD",
            "Forward hooks of a module run once for each of its calls.",
            "torch's docs (register_forward_hook)",
        ),
        (
            "MODEL-JOIN",
            (
                "Under join, replicas that have no more batches do not stop the others, and count as "
                "zeros."
            ),
            "API 1.7 (join); torch's docs (join)",
        ),
        (
            "CKPT-PARTIAL",
            (
                "What was saved partially and is resumed with the same partition trains on bit for bit, the "
                "optimizer's state included; the user's content comes back."
            ),
            "API 1.11",
        ),
        (
            "CKPT-FULL",
            "A full checkpoint resumes into any other partition and degree, bit for bit.",
            "API 1.11",
        ),
        (
            "CKPT-MISSING",
            "A checkpoint that is not there, or is torn, is refused on every rank.",
            "API 1.11; INF: which exception is the engine's own",
        ),
        (
            "CKPT-STATE",
            (
                "state_dict is whole on every rank that calls it, and loads into a model with another "
                "partition."
            ),
            "API 1.7 (state_dict, load_state_dict)",
        ),
    ),
    *_needing(
        _API_PIPELINE,
        (
            "MODEL-OUTSIDE-STEP",
            "Calling the model, or its backward, outside a step is refused on every rank.",
            "API 1.3.9",
        ),
        (
            "MODEL-BAD-PARTITION",
            "A partition that does not exist is refused on every rank.",
            "API 1.9 (partition)",
        ),
        (
            "MODEL-SHARED-ACROSS",
            "A parameter that manual partitions share is refused on every rank.",
            "API 1.7 (the user's duty); INF: that it is refused",
        ),
        (
            "MODEL-UNUSED-INPUT",
            (
                "A tensor argument of a module that does not influence its output gets no gradient, as in "
                "autograd, or is refused on every rank; nobody waits for one."
            ),
            "API 1.7 (raises since 1.3.0, instead of hanging); INF: that it may be as in autograd",
        ),
    ),
)
