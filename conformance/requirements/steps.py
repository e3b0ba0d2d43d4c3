"""The requirements of smp.step without a pipeline: arguments of microbatches, and results of steps."""

from __future__ import annotations

from conformance.requirements.registry import Capability, EngineCapability, Level, Need, Requirement

# Replicas exchange objects to agree on the end of a step.
_NEEDS: frozenset[Need] = frozenset({Capability.OBJECTS, EngineCapability.SMP_API})

_INF_ERROR = "INF, API 9.1: the exception is not documented; trained in silence it would be wrong"


def _promise(id: str, sentence: str, source: str) -> Requirement:
    return Requirement(id, sentence, source, Level.L3, _NEEDS)


SPLITTING = (
    _promise(
        "STEP-FORMS",
        "step decorates a function bare, called without arguments, and called with them.",
        "API 1.3 (all three forms are used); AWS Common API (smp.step)",
    ),
    _promise(
        "STEP-ONCE",
        "The body runs exactly once for each microbatch of a step.",
        "AWS Common API (smp.step: important), API 1.3.1",
    ),
    _promise(
        "STEP-SPLIT",
        "Microbatch i of n gets the i-th of n equal parts of every tensor along its batch axis, by default "
        "0; tensors of one step may differ in batch size.",
        "AWS Common API (smp.step), API 1.3.2, 1.3.4; INF: the order, and that only "
        "divisibility is asked",
    ),
    _promise(
        "STEP-AXES",
        "input_split_axes gives the batch axis of an argument by its name in the signature, for arguments "
        "passed by position and by keyword.",
        "AWS Common API (input_split_axes), API 1.3; INF: an axis from the end counts as in torch",
    ),
    _promise(
        "STEP-WHOLE",
        "Every microbatch gets the whole of an argument that is named in non_split_inputs.",
        "AWS Common API (non_split_inputs), API 1.3",
    ),
    _promise(
        "STEP-UNCHANGED",
        "Every microbatch gets the same object of an argument that cannot be split.",
        "API 1.3.2",
    ),
    _promise(
        "STEP-NESTS",
        "Tensors in lists, tuples, dicts and sets are split at any depth, and the containers keep their "
        "types, keys and order.",
        "AWS Common API (smp.step: list, tuple, dict or set), API 1.3.2; sets, API 9.6",
    ),
    _promise(
        "STEP-SLICE",
        "An object that defines smp_slice is replaced by the value that smp_slice returns, of any type, at "
        "any place in the arguments.",
        "AWS Common API (smp_slice), API 1.3.2, 1.3.3",
    ),
    _promise(
        "STEP-SLICE-CALLS",
        "smp_slice is called once for each microbatch, with the number of microbatches, the zero-based index "
        "of the microbatch, and the batch axis of the argument.",
        "AWS Common API (smp_slice), API 1.3.3; INF: axis 0 if none is named, API 9.6",
    ),
    _promise(
        "STEP-IDENTITY",
        "A tensor that is split, returned by the body and concatenated has the bits of the argument.",
        "AWS Common API (smp.step, StepOutput.concat)",
    ),
    _promise(
        "STEP-INPUT-GRADIENT",
        "A split argument that is a leaf gets the gradients of all its microbatches, each at its place in "
        "the batch.",
        "INF: microbatches are views of the batch, as by torch.split",
    ),
    _promise(
        "STEP-SELF",
        "A step defined in the body of a class gets exactly the arguments of the call, without self.",
        "API 1.3.10 (INF there: one public trainer)",
    ),
)

RESULTS = (
    _promise(
        "STEP-OUTPUT-ORDER",
        "A returned tensor becomes a StepOutput, whose outputs are a list in the order of microbatches.",
        "AWS Common API (StepOutput.outputs), API 1.3.5, 1.4",
    ),
    _promise(
        "STEP-OUTPUT-STRUCTURE",
        "The returned value keeps its structure: lists, tuples and dicts at any depth, and their "
        "subclasses, an OrderedDict that is a dataclass among them.",
        "AWS Common API (smp.step: returns), API 1.3.5 (REL 1.2.0)",
    ),
    _promise(
        "STEP-OUTPUT-LISTS",
        "A returned value that is no tensor, such as None, becomes a list with one value for each microbatch.",
        "API 1.3.6, 8.14",
    ),
    _promise(
        "STEP-REDUCE-MEAN",
        "reduce_mean returns the mean over microbatches, element by element.",
        "AWS Common API (StepOutput.reduce_mean), API 1.4",
    ),
    _promise(
        "STEP-REDUCE-SUM",
        "reduce_sum returns the sum over microbatches, element by element.",
        "AWS Common API (StepOutput.reduce_sum), API 1.4",
    ),
    _promise(
        "STEP-CONCAT",
        "concat returns torch.cat of the outputs along axis 0, along which their sizes may differ.",
        "AWS Common API (StepOutput.concat), API 1.4",
    ),
    _promise(
        "STEP-STACK",
        "stack returns torch.stack of the outputs, with a new first axis.",
        "AWS Common API (StepOutput.stack), API 1.4",
    ),
    _promise(
        "STEP-DETACH",
        "Returned tensors are detached; with detach_outputs=False they are not, and gradients flow back.",
        "AWS Common API (detach_outputs), API 1.3",
    ),
)

REFUSALS = (
    _promise(
        "STEP-INDIVISIBLE",
        "A batch that the number of microbatches does not divide is refused, at any depth, before the "
        "body runs; the next step works.",
        f"API 1.3.4; {_INF_ERROR}",
    ),
    _promise(
        "STEP-NO-AXIS",
        "A tensor without the batch axis is refused before the body runs.",
        f"AWS Common API (non_split_inputs: to be used for those); {_INF_ERROR}",
    ),
    _promise(
        "STEP-UNKNOWN-NAME",
        "Names in non_split_inputs or input_split_axes that are no parameters of the step are refused.",
        f"AWS Common API (non_split_inputs: names as in the signature); {_INF_ERROR}",
    ),
    _promise(
        "STEP-NESTED",
        "A step called inside a step is refused, and the next step works.",
        f"API 1.3.1: the body is one forward and backward; {_INF_ERROR}",
    ),
    _promise(
        "STEP-OUTPUT-DIFFERS",
        "Results that differ in structure between microbatches are refused on every rank.",
        f"API 1.3.5: the structure is kept, so there is one; {_INF_ERROR}",
    ),
)

STEPS = SPLITTING + RESULTS + REFUSALS
