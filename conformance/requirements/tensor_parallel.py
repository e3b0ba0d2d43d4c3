"""The requirements of tensor parallelism: values, layout, exchanges, modules, batches, states."""

from __future__ import annotations

from conformance.requirements.registry import Capability, EngineCapability, Level, Need, Requirement

_ANY: frozenset[Need] = frozenset(
    {Capability.PROCESS_GROUPS, EngineCapability.TRAINING, EngineCapability.TENSOR}
)
_API = _ANY | {EngineCapability.SMP_API, EngineCapability.OWN_BATCHES}
_OWN = _ANY | {EngineCapability.OWN_BATCHES}


def _needing(
    needs: frozenset[Need], *promises: tuple[str, str, str], level: Level = Level.L4
) -> tuple[Requirement, ...]:
    return tuple(Requirement(*promise, level, needs) for promise in promises)


TENSOR_PARALLEL = (
    *_needing(
        _ANY,
        (
            "TP-EQUALS-PLAIN",
            (
                "With distributed layers, losses, outputs, gradients, and the parameters after steps of an elementwise "
                "optimizer, are those of one process, where all ranks of a TP group get the same batch."
            ),
            "API 1.9, 1.10, 4.4 (prescaled_batch=True)",
        ),
        (
            "TP-STEPS",
            (
                "Each of several steps computes with the parameters of the optimizer's last step, and the optimizer "
                "goes on from its state after that step."
            ),
            "API 1.8, 1.10; torch's docs (torch.optim)",
        ),
        (
            "TP-LAYOUT",
            (
                "Each rank has an equal slice, in the order of tp ranks, of a linear layer's input channels and of an "
                "embedding's dimensions; biases are whole on each rank."
            ),
            "API 1.10 (DistributedLinear: weight split on input channels; DistributedEmbedding: only embedding_dim)",
        ),
        (
            "TP-REPLICAS",
            (
                "After ten steps on real values, parameters that are not split have the same bits on all ranks, and "
                "slices have the same bits on all ranks with the same tp rank."
            ),
            "API 1.10; INF: replicas of parameters are to stay equal",
        ),
    ),
    *_needing(
        _OWN,
        (
            "TP-OWN-BATCHES",
            (
                "With distributed layers, losses, outputs, gradients and parameters are those of one process, where "
                "each rank of a TP group brings samples of its own."
            ),
            "API 1.10, 4.4 (prescaled_batch=False)",
        ),
    ),
    *_needing(
        _OWN | {EngineCapability.PIPELINE},
        (
            "TP-PIPELINE",
            (
                "In a pipeline of any partition, losses, outputs, gradients and parameters of a model with distributed "
                "layers are those of one process."
            ),
            "API 1.7, 4.1, 4.2",
        ),
    ),
    *_needing(
        _ANY | {EngineCapability.SHARDING, EngineCapability.BLOCKS},
        (
            "TP-SHARDED",
            (
                "With sharded data parallelism of any degree, losses, outputs, gradients and parameters of a model "
                "with distributed layers are those of one process."
            ),
            "AWS Sharded Data Parallelism (Sharded data parallelism with tensor parallelism); API 3.5, 4.3",
        ),
    ),
    *_needing(
        _ANY | {EngineCapability.SHARDING, EngineCapability.BLOCKS, EngineCapability.CLIPPING},
        (
            "TP-CLIP",
            (
                "The norm by which sharded data parallelism clips counts each element of the model once: slices of all "
                "tp ranks, and parameters that are not split once for the TP group."
            ),
            "AWS Sharded Data Parallelism (sdp_gradient_clipping); ENGINES 1.7; INF: the norm is that of one process",
        ),
    ),
    *_needing(
        _OWN | {EngineCapability.PIPELINE, EngineCapability.SHARDING, EngineCapability.BLOCKS},
        (
            "TP-COMBINATIONS",
            (
                "All degrees whose product is the number of ranks train as one process: pipeline, tensor, reduced "
                "data, and sharding inside of it."
            ),
            "API 3.5, 4.1 (pp_size x tp_size x rdp_size = size)",
        ),
    ),
    *_needing(
        _OWN | {EngineCapability.REPLAYED},
        (
            "TP-REPLAYED",
            (
                "On real values, with dropout, losses, outputs, gradients and parameters have the bits of the "
                "published order of sums, over tp ranks, too."
            ),
            "INF: the order of reductions is published, ENGINES 2.2 tier R",
        ),
    ),
    *_needing(
        _API | {EngineCapability.REPLAYED},
        (
            "TP-RANDOM",
            (
                "Where all ranks of a TP group get the same batch, they draw the same random numbers for activations "
                "that all of them hold, whatever seeds a script gave them."
            ),
            "API 1.9 (random seeds: no API); INF: replicas of an activation are to stay equal",
        ),
    ),
    *_needing(
        _OWN | {EngineCapability.SMP_API, EngineCapability.TRAFFIC},
        (
            "TP-TRAFFIC",
            (
                "A distributed layer exchanges its activations and nothing else: the number, kind and bytes of "
                "exchanges are those of the formula, forward and backward."
            ),
            "API 1.10 (how a distributed module runs); INF: the formula, from the layouts of the activations",
        ),
        (
            "TP-REDUCTION",
            (
                "Gradients of slices are reduced over RDP groups, and those of all other parameters over DP groups, "
                "each element once."
            ),
            "API 1.10 (gradient reduction), 1.7 (default_reducer_ and scaled_batch_reducer_named_parameters)",
        ),
    ),
    *_needing(
        _API,
        (
            "TP-CONTEXT",
            (
                "A module is distributed if the innermost context in which it was created says so, and after "
                "set_tensor_parallelism if its last call for the module, or for one above it, says so."
            ),
            "API 1.9 (tensor_parallelism, model_creation, set_tensor_parallelism)",
        ),
        (
            "TP-DEGREE-ONE",
            "At tensor_parallel_degree 1 a wished module keeps its weights, and computes as it did.",
            "API 1.9; INF: a degree of 1 splits nothing",
        ),
        (
            "TP-OUTERMOST",
            (
                "Of nested modules whose classes are registered the outermost alone is distributed; a subclass of a "
                "registered class is none."
            ),
            "API 1.9 (only the outermost supported module of a nest); INF: that subclasses are not registered",
        ),
        (
            "TP-KEPT",
            (
                "Modules that share a weight, stand in several places, or have a size that the degree does not divide "
                "stay as they are, and the log names them."
            ),
            "API 1.9 (not applied to weight-sharing modules or indivisible sizes); INF: that the log names them",
        ),
        (
            "TP-PLACE",
            (
                "A distributed module has the mode, the dtype and the requires_grad of the module whose place it "
                "takes, and parameters of the same names."
            ),
            "API 1.7 (replacement, in place); INF: which attributes are kept",
        ),
        (
            "TP-HOOKS",
            (
                "init_hook and forward_hook translate arguments, return_hook the output; the options of a context "
                "override what init_hook returned."
            ),
            "API 1.9 (tp_register, tp_register_with_module, tensor_parallelism)",
        ),
        (
            "TP-HOOKS-WRONG",
            "A hook that returns anything but a pair of arguments is refused on every rank, in an error that names it.",
            "API 1.9 (return (args, kwargs)); INF: that the error names it",
        ),
        (
            "TP-QUERIES",
            (
                "A model tells slices from other parameters, those reduced over RDP groups from those reduced over DP "
                "groups, and its distributed modules."
            ),
            "API 1.7 (distributed_modules, is_distributed_parameter, is_scaled_batch_parameter, reducers' iterators)",
        ),
        (
            "TP-STATE",
            (
                "The state_dict of a model with distributed layers is that of the plain one, on every rank; it loads, "
                "and so does each rank's local_state_dict."
            ),
            "API 1.7 (state_dict, load_state_dict, local_state_dict)",
        ),
        (
            "TP-WEIGHTS",
            "New weights of distributed layers are the same at every degree above 1, from one random state.",
            "API 1.7 (new random weights); INF: that the degree does not change them",
        ),
        (
            "TP-BATCH-SHAPES",
            (
                "Batches of different shapes or dtypes within a TP group are refused on all of its ranks, in errors "
                "that name the rank."
            ),
            "API 1.7 (join: ranks within one TP group must have equal batches), 1.10; INF: that the rank is named",
        ),
        (
            "TP-BATCH-VALUES",
            (
                "With prescaled_batch, different values in the batches of a TP group are refused on all of its ranks, "
                "in errors that name the rank."
            ),
            "API 4.4 (prescaled_batch=True: one batch for each MP group); INF: that it is refused, and the rank named",
        ),
        (
            "TP-ORDER",
            (
                "Ranks of a TP group that call different distributed modules in a step, by their own data, are told on "
                "all of its ranks, and no gradient changes."
            ),
            "API 1.10; INF: that activations of different modules are not trained on in silence",
        ),
        (
            "TP-STALE",
            "An optimizer of parameters that distributed modules have replaced is refused on every rank.",
            "API 1.7 (create the optimizer after wrapping); INF: that it is refused",
        ),
        (
            "TP-NORM",
            (
                "torch's clip_grad_norm_ clips by the norm of the whole model: slices of all tp ranks, and other "
                "parameters once."
            ),
            "torch's docs (torch.nn.utils.clip_grad_norm_); INF: the norm is that of one process",
        ),
    ),
    *_needing(
        _API | {EngineCapability.FP16},
        (
            "TP-NORM-MASTERS",
            "clip_master_grads clips by the norm of the whole model, in which each element counts once.",
            "API 1.8 (clip_master_grads); INF: the norm is that of one process",
        ),
        level=Level.L6,
    ),
    *_needing(
        _OWN | {EngineCapability.SMP_API},
        (
            "TP-TRANSFORMER",
            (
                "Outputs and gradients of a distributed transformer layer are those of the layer in one process, "
                "whatever its sizes, masks and options, and whatever it is optimised for."
            ),
            "API 1.10 (DistributedTransformerLayer, DistributedAttentionLayer, DistributedTransformerOutputLayer)",
        ),
        (
            "TP-OPTIMIZE",
            (
                "Optimised for memory, a distributed transformer layer keeps the rank's own channels of hidden states "
                "for backward, and sends more. Optimised for speed, it keeps all channels."
            ),
            "API 3.1 (optimize), 8.9",
        ),
        (
            "TP-DROPOUT",
            (
                "Each tp rank drops its own channels by random numbers of its own, and all get the same output where "
                "they share a batch."
            ),
            "INF: dropout of a distributed module is that of one model",
        ),
    ),
    *_needing(
        _OWN | {EngineCapability.FP16},
        (
            "TP-FP16",
            (
                "With fp16, distributed layers compute in float16, sum over tp ranks in float32 and round once; "
                "masters of slices are float32."
            ),
            "API 1.8, 1.10; INF: that sums are rounded once",
        ),
        level=Level.L6,
    ),
    *_needing(
        _ANY | {EngineCapability.SHARDING, EngineCapability.BLOCKS, EngineCapability.BF16},
        (
            "TP-BF16",
            (
                "With bf16, distributed layers compute in bfloat16, sum over tp ranks in float32 and round once; "
                "masters of slices are float32."
            ),
            "AWS Sharded Data Parallelism (BF16 training); INF: that sums are rounded once",
        ),
        level=Level.L6,
    ),
)
