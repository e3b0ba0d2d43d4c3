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
                "At pipeline degree 1 losses, outputs, gradients and the parameters after a step are those of "
                "a plain loop over microbatches, steps and replicas, for any model."
            ),
            "API 1.3, 1.7, 5; ENGINES 1.6",
        ),
        (
            "GRAD-ACCUMULATION",
            (
                "In every window the gradients of backward_passes_per_step steps are summed, and reduced over "
                "replicas once."
            ),
            "API 1.7 (backward_passes_per_step); INF: that they are summed, ENGINES 1.6",
        ),
        (
            "GRAD-REPLICAS",
            (
                "Gradients are averaged over data-parallel replicas with different data, and are the same on "
                "all replicas."
            ),
            "API 1.7; ENGINES 1.6",
        ),
        (
            "GRAD-STEPS",
            (
                "Each of several steps computes with the parameters of the optimizer's last step, and the "
                "optimizer goes on from the state after that step."
            ),
            "API 1.7, 1.8; torch's docs (torch.optim)",
        ),
        (
            "GRAD-FROZEN",
            "Parameters with requires_grad=False get no gradient and do not change.",
            "API 1.7; torch's docs (requires_grad)",
        ),
        (
            "GRAD-BUCKETS",
            "Neither the size of buckets, nor the overlap of reduction with backward, changes a bit.",
            "API 1.7 (bucket_cap_mb, overlapping_allreduce); ENGINES 5.9",
        ),
        (
            "GRAD-BOUNDED",
            (
                "On real values the gradients are the mean of the replicas' gradients, up to the rounding of "
                "their sum."
            ),
            "API 1.7 (averaged); INF: the bound, ENGINES 2.2 tier B",
        ),
        (
            "MODEL-BROADCAST",
            "Training starts from the weights and buffers of rank 0, also if other ranks made different ones.",
            "API 1.3.8, 1.7",
        ),
    ),
    *_needing(
        _ANY | {EngineCapability.UNUSED},
        (
            "GRAD-UNUSED",
            (
                "A parameter that a replica did not use has a zero gradient there; a parameter that no replica "
                "used has none."
            ),
            "API 1.7 (find_unused_parameters, REL 1.2.0); ENGINES 5.19",
        ),
    ),
    *_needing(
        _PIPELINE,
        (
            "PIPE-EQUALS-PLAIN",
            (
                "A pipeline gives the losses, outputs, gradients and parameters of a plain loop, for any "
                "model, partition, degrees, number of microbatches, schedule and batch axes."
            ),
            "API 5; ENGINES 1.10",
        ),
        (
            "PIPE-AUTOMATIC",
            "A pipeline with an automatic partition gives the results of a plain loop.",
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
                "Gradients are averaged over microbatches with average_grads_across_microbatches, and summed "
                "without."
            ),
            "API 1.7 (average_grads_across_microbatches)",
        ),
        (
            "PIPE-EVERYWHERE",
            "Every rank of the pipeline gets a step's results, in the order of microbatches.",
            "API 1.3.7, 1.4",
        ),
        (
            "PIPE-FIRST-RANK",
            "Only the data of pp_rank 0 counts; other ranks may pass tensors without elements.",
            "API 1.3.11; INF: that they are not looked at",
        ),
        (
            "PIPE-LOCAL",
            (
                "After partitioning each rank holds the parameters of its own partition and no others, and the "
                "ranks of a pipeline together hold all parameters."
            ),
            "API 1.7 (local_parameters), 1.3.8",
        ),
    ),
    *_needing(
        _API_PIPELINE,
        (
            "PIPE-SIMPLE",
            (
                "Under the schedule simple no backward pass begins before the last forward pass of the step has "
                "ended."
            ),
            "API 5",
        ),
        (
            "PIPE-ACTIVE",
            "Under the schedule interleaved at most active_microbatches microbatches are in progress.",
            "API 5; INF: that simple must have them all in progress",
        ),
        (
            "PIPE-INTERLEAVED",
            (
                "Under the schedule interleaved a backward pass does not wait for all forward passes, and with "
                "active_microbatches=1 each microbatch is done before the next begins."
            ),
            "API 5",
        ),
    ),
    *_needing(
        _REPLAYED,
        (
            "PIPE-REPLAYED",
            (
                "On real values, with dropout, no choice of partition, pipeline degree, schedule, "
                "active_microbatches or buckets changes a bit."
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
            "Two equal runs give the same bits.",
            "INF: the order of reductions is published, ENGINES 2.2 tier R",
        ),
    ),
    *_needing(
        _API,
        (
            "MODEL-BAD-BATCH",
            "A batch that the number of microbatches does not divide is refused on every rank.",
            "API 1.3.4; INF: which exception is the engine's own",
        ),
        (
            "MODEL-SECOND",
            "A second DistributedModel is refused.",
            "API 1.7, 6",
        ),
        (
            "MODEL-RAISING-BODY",
            "An exception of a step's body or of a module ends the step on every rank, and the next step works.",
            "API 1.3.1 (a step is called by all ranks); INF: that all of them end it",
        ),
        (
            "MODEL-DETACHED",
            "model.backward of a tensor that does not depend on the model is refused on every rank.",
            "API 1.7; INF: which exception is the engine's own",
        ),
        (
            "MODEL-ATTRIBUTES",
            (
                "partitioned is true after partitioning, module is the wrapped module, maybe inside of wrappers "
                "that have it as module in turn, and state_dict has all names and values of the wrapped module."
            ),
            "API 1.7",
        ),
        (
            "HOOK-POST-PARTITION",
            (
                "Hooks of register_post_partition_hook are called once, with model and optimizer, after "
                "partitioning and before the next forward pass; removed hooks are not called."
            ),
            "API 1.3.8, 1.7",
        ),
        (
            "HOOK-POST-STEP",
            (
                "Hooks of register_post_step_hook are called once, with model and optimizer, after the first "
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
                "Under join, replicas without more batches do not stop the others, and their gradients count "
                "as zeros."
            ),
            "API 1.7 (join); torch's docs (join)",
        ),
        (
            "CKPT-PARTIAL",
            (
                "Training resumed from a partial checkpoint with the same partition goes on bit for bit, with "
                "the optimizer's state, and returns the user's content."
            ),
            "API 1.11",
        ),
        (
            "CKPT-FULL",
            "Training resumed from a full checkpoint goes on bit for bit, at any other partition and degree.",
            "API 1.11",
        ),
        (
            "CKPT-MISSING",
            "A missing or torn checkpoint is refused on every rank.",
            "API 1.11; INF: which exception is the engine's own",
        ),
        (
            "CKPT-STATE",
            (
                "state_dict has all parameters on every rank that calls it, and loads into a model with "
                "another partition."
            ),
            "API 1.7 (state_dict, load_state_dict)",
        ),
    ),
    *_needing(
        _API_PIPELINE,
        (
            "MODEL-OUTSIDE-STEP",
            "A call of the model, or of its backward, outside a step is refused on every rank.",
            "API 1.3.9",
        ),
        (
            "MODEL-BAD-PARTITION",
            "A partition that does not exist is refused on every rank.",
            "API 1.9 (partition)",
        ),
        (
            "MODEL-SHARED-ACROSS",
            "A parameter that two manual partitions share is refused on every rank.",
            "API 1.7 (the user's duty); INF: that it is refused",
        ),
        (
            "MODEL-UNUSED-INPUT",
            (
                "A tensor argument that does not influence its module's output gets no gradient, as in "
                "autograd, or is refused on every rank; no rank waits for its gradient."
            ),
            "API 1.7 (raises since 1.3.0, instead of hanging); INF: that it may be as in autograd",
        ),
    ),
)
