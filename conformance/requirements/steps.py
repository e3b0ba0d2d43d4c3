"""The requirements of smp.step without a pipeline: what a microbatch gets, and what a step returns."""

from __future__ import annotations

from conformance.registry import Capability, EngineCapability, Level, Need, Requirement

# Replicas tell each other how their step ended.
_NEEDS: frozenset[Need] = frozenset({Capability.OBJECTS, EngineCapability.SMP_API})

_INF_ERROR = (
    "INF, SMP_API.md 9.1: the exception is not documented; trained in silence it would be wrong"
)


def _promise(id: str, sentence: str, source: str) -> Requirement:
    return Requirement(id, sentence, source, Level.L3, _NEEDS)


SPLITTING = (
    _promise(
        "STEP-FORMS",
        "step decorates a function bare, called without arguments, and called with them.",
        "SMP_API.md 1.3 (all three forms are used); seed 000 (smp.step)",
    ),
    _promise(
        "STEP-ONCE",
        "The body runs exactly once for each microbatch of a step.",
        "seed 000 (smp.step, Important), SMP_API.md 1.3.1",
    ),
    _promise(
        "STEP-SPLIT",
        "Microbatch i of n gets the i-th of n equal parts of every tensor along its batch axis, which is "
        "0 if nothing is said; tensors of one step may differ in batch size.",
        "seed 000 (smp.step), SMP_API.md 1.3.2, 1.3.4; INF: the order, and that only "
        "divisibility is asked",
    ),
    _promise(
        "STEP-AXES",
        "input_split_axes gives the batch axis of an argument by its name in the signature, whether it "
        "is passed by position or by keyword.",
        "seed 000 (input_split_axes), SMP_API.md 1.3; INF: an axis from the end counts as in torch",
    ),
    _promise(
        "STEP-WHOLE",
        "Arguments named in non_split_inputs are handed whole to every microbatch.",
        "seed 000 (non_split_inputs), SMP_API.md 1.3",
    ),
    _promise(
        "STEP-UNCHANGED",
        "What cannot be split is passed as it is, the same object to every microbatch.",
        "SMP_API.md 1.3.2",
    ),
    _promise(
        "STEP-NESTS",
        "Tensors are split in lists, tuples, dicts and sets at any depth, and these keep their types, "
        "keys and order.",
        "seed 000 (smp.step: list, tuple, dict or set), SMP_API.md 1.3.2; sets, SMP_API.md 9.6",
    ),
    _promise(
        "STEP-SLICE",
        "An object that defines smp_slice is replaced by what that returns, of any type, wherever it "
        "stands among the arguments.",
        "seed 000 (smp_slice), SMP_API.md 1.3.2, 1.3.3",
    ),
    _promise(
        "STEP-SLICE-CALLS",
        "smp_slice is called once for each microbatch, with the number of microbatches, the microbatch "
        "counted from 0, and the batch axis of the argument.",
        "seed 000 (smp_slice), SMP_API.md 1.3.3; INF, 9.6: axis 0 if none is named",
    ),
    _promise(
        "STEP-IDENTITY",
        "What is split and returned is, concatenated, what was passed, to the last bit.",
        "seed 000 (smp.step, StepOutput.concat)",
    ),
    _promise(
        "STEP-INPUT-GRADIENT",
        "The gradient of an argument that is a leaf is that of all of its microbatches.",
        "INF: microbatches are views of the batch, as by torch.split",
    ),
    _promise(
        "STEP-SELF",
        "A step in the body of a class gets exactly the arguments that it is called with, no self.",
        "SMP_API.md 1.3.10 (INF there: one public trainer)",
    ),
)

RESULTS = (
    _promise(
        "STEP-OUTPUT-ORDER",
        "A returned tensor becomes a StepOutput, whose outputs are a list in the order of microbatches.",
        "seed 000 (StepOutput.outputs), SMP_API.md 1.3.5, 1.4",
    ),
    _promise(
        "STEP-OUTPUT-STRUCTURE",
        "The returned value keeps its structure: lists, tuples and dicts at any depth, and their "
        "subclasses, an OrderedDict that is a dataclass among them.",
        "seed 000 (smp.step, returns), SMP_API.md 1.3.5 (REL 1.2.0)",
    ),
    _promise(
        "STEP-OUTPUT-LISTS",
        "What is returned and is no tensor, None included, becomes a list by microbatch.",
        "SMP_API.md 1.3.6, 8.14",
    ),
    _promise(
        "STEP-REDUCE-MEAN",
        "reduce_mean is the mean over microbatches, element by element.",
        "seed 000 (StepOutput.reduce_mean), SMP_API.md 1.4",
    ),
    _promise(
        "STEP-REDUCE-SUM",
        "reduce_sum is the sum over microbatches, element by element.",
        "seed 000 (StepOutput.reduce_sum), SMP_API.md 1.4",
    ),
    _promise(
        "STEP-CONCAT",
        "concat is torch.cat of the outputs along axis 0, which may differ in size there.",
        "seed 000 (StepOutput.concat), SMP_API.md 1.4",
    ),
    _promise(
        "STEP-STACK",
        "stack is torch.stack of the outputs: a new first axis.",
        "seed 000 (StepOutput.stack), SMP_API.md 1.4",
    ),
    _promise(
        "STEP-DETACH",
        "Returned tensors are detached, unless detach_outputs is False: then gradients flow back.",
        "seed 000 (detach_outputs), SMP_API.md 1.3",
    ),
)

REFUSALS = (
    _promise(
        "STEP-INDIVISIBLE",
        "A batch that the number of microbatches does not divide is refused, at any depth, before the "
        "body runs; the next step works.",
        f"SMP_API.md 1.3.4; {_INF_ERROR}",
    ),
    _promise(
        "STEP-NO-AXIS",
        "A tensor that does not have the batch axis is refused before the body runs.",
        f"seed 000 (non_split_inputs should be used for those); {_INF_ERROR}",
    ),
    _promise(
        "STEP-UNKNOWN-NAME",
        "non_split_inputs and input_split_axes that name no parameter are refused.",
        f"seed 000 (as they appear in the signature); {_INF_ERROR}",
    ),
    _promise(
        "STEP-NESTED",
        "A step called inside a step is refused, and the next step works.",
        f"SMP_API.md 1.3.1: the body is one forward and backward; {_INF_ERROR}",
    ),
    _promise(
        "STEP-OUTPUT-DIFFERS",
        "Results that differ in structure between microbatches are refused on every rank.",
        f"SMP_API.md 1.3.5: the structure is kept, so there is one; {_INF_ERROR}",
    ),
)

STEPS = SPLITTING + RESULTS + REFUSALS
