"""Properties of smp.step without a pipeline: arguments of microbatches, results and refusals.

Each rank has a batch of its own and runs the body itself. The body gets the microbatch's number as an
argument, so no property depends on the order in which microbatches run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import example, given

from conformance.cases.draws import share
from conformance.cases.training import smp, with_engine
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import (
    Batch,
    MicrobatchSplit,
    Pair,
    Sliceable,
    StepCall,
    microbatch_splits,
    same,
    sliceables,
    step_calls,
    tensors,
)
from pytest_smp.strategies.recipes import TensorSpec

few = share(0.3)

FORMS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "bare": lambda body, rules: smp.step(body),
    "called": lambda body, rules: smp.step()(body),
    "with rules": lambda body, rules: smp.step(**rules)(body),
    "with all": lambda body, rules: smp.step(
        **{"non_split_inputs": [], "input_split_axes": {}, "detach_outputs": True, **rules}
    )(body),
}

counts = st.integers(1, 4)


def run(
    smp_world: SmpWorld, smp_engine: str, body: Callable[..., Any], *args: Any, microbatches: int
) -> list[Any]:
    """Run ``body(*args)`` with the engine's API on two ranks, or on one; return the results by rank."""
    __tracebackhide__ = True
    ranks = min(2, smp_world.ranks)
    given_: dict[str, Any] = {"ranks": ranks, "config": {"microbatches": microbatches}}
    return smp_world.run(with_engine, smp_engine, body, *args, **given_)


# ---- What a microbatch gets


def inputs(call: StepCall, form: str = "with rules") -> dict[int, list[Any]]:
    """Make the call, and return the arguments of every run of the body, by microbatch."""
    seen: dict[int, list[Any]] = {}

    def body(a: Any, b: Any = None, c: Any = None, *, number: Any) -> None:
        seen.setdefault(int(number), []).append((a, b, c)[: len(call.arguments)])

    args, kwargs = call.make()
    FORMS[form](body, call.rules)(*args, **kwargs, number=torch.arange(call.microbatches))
    return seen


def wrong_inputs(call: StepCall, form: str = "with rules") -> list[str]:
    """Make the call, and describe wrong arguments of microbatches in words."""
    seen = inputs(call, form)
    told = []
    for index in range(max([call.microbatches, *(key + 1 for key in seen)])):
        got = seen.get(index, [])
        expected = [call.part(index)] if index < call.microbatches else []
        if not same(got, expected):
            told.append(f"microbatch {index} got {got!r}, not {expected!r}")
    return told


def check_inputs(
    smp_world: SmpWorld, smp_engine: str, call: StepCall, form: str = "with rules"
) -> None:
    __tracebackhide__ = True
    for told in run(
        smp_world, smp_engine, wrong_inputs, call, form, microbatches=call.microbatches
    ):
        assert not told, "\n".join(told)


@requirement("STEP-FORMS")
@given(data=st.data(), form=st.sampled_from(list(FORMS)))
@few
def test_all_forms_split(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, form: str
) -> None:
    axes = [0, None, 1] if form.startswith("with") else [0]
    call = data.draw(step_calls(axes=axes, depth=0, slicing=False), "call")
    check_inputs(smp_world, smp_engine, call, form)


def spec(*shape: int) -> TensorSpec:
    """The recipe of a tensor whose elements all differ."""
    return TensorSpec(shape, torch.int64)


# Drawn calls are small, so each property also has an example in which all lengths differ.


@requirement("STEP-SPLIT")
@given(call=step_calls(axes=[0], depth=0, slicing=False))
@example(call=StepCall(3, {"a": Batch(spec(6, 2)), "b": Batch(spec(12)), "c": Batch(spec(9, 1))}))
@few
def test_a_microbatch_gets_its_part(smp_world: SmpWorld, smp_engine: str, call: StepCall) -> None:
    check_inputs(smp_world, smp_engine, call)


@requirement("STEP-AXES")
@given(call=step_calls(axes=[1, -1, 0, 2, -2], depth=0, slicing=False))
@example(call=StepCall(2, {"a": Batch(spec(2, 4), 1), "b": Batch(spec(6, 4, 2), -2)}, keywords=1))
@few
def test_batch_axes_go_by_name(smp_world: SmpWorld, smp_engine: str, call: StepCall) -> None:
    check_inputs(smp_world, smp_engine, call)


@requirement("STEP-WHOLE")
@given(call=step_calls(axes=[None, None, 0], depth=1))
@example(call=StepCall(2, {"a": Batch(spec(4), None), "b": Batch([spec(4, 3)])}))
@few
def test_arguments_that_are_not_split(smp_world: SmpWorld, smp_engine: str, call: StepCall) -> None:
    check_inputs(smp_world, smp_engine, call)


@requirement("STEP-NESTS")
@given(call=step_calls(axes=[0, 0, 1, -1], slicing=False))
@example(call=StepCall(2, {"a": Batch([spec(4), {"k": (spec(8, 2), None)}]), "b": Batch(spec(6))}))
@few
def test_nests_are_split(smp_world: SmpWorld, smp_engine: str, call: StepCall) -> None:
    check_inputs(smp_world, smp_engine, call)


#: The containers in which an object with smp_slice may stand as an argument.
PLACES: tuple[Callable[[Any], Any], ...] = (
    lambda one: one,
    lambda one: [one, 1],
    lambda one: {"k": (one, None)},
    lambda one: Pair("s", [{"deep": one}]),
    lambda one: (one, [one]),
)


@st.composite
def sliced_calls(draw: st.DrawFn) -> StepCall:
    """Draw a call whose arguments all hold an object with smp_slice."""
    microbatches = draw(st.integers(1, 3))
    none = st.just(Sliceable(*[None] * microbatches))
    arguments = {
        name: Batch(
            draw(st.sampled_from(PLACES))(draw(sliceables(microbatches) | none)),
            draw(st.sampled_from([0, 1, -1])),
        )
        for name in draw(st.sampled_from(["a", "ab", "abc"]))
    }
    return StepCall(microbatches, arguments, draw(st.integers(0, len(arguments))))


@requirement("STEP-SLICE")
@given(call=sliced_calls())
@few
def test_what_smp_slice_returns_is_handed_on(
    smp_world: SmpWorld, smp_engine: str, call: StepCall
) -> None:
    check_inputs(smp_world, smp_engine, call)


def count_runs(microbatches: int, size: int, steps: int) -> list[list[int]]:
    """Run steps, and return the sorted numbers of the microbatches that the body ran for, by step."""
    runs: list[list[int]] = []

    def body(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        runs[-1].append(int(number))
        return x

    for _ in range(steps):
        runs.append([])
        smp.step(body)(torch.zeros(microbatches * size), torch.arange(microbatches))
    return [sorted(each) for each in runs]


@requirement("STEP-ONCE")
@given(microbatches=counts, size=st.integers(0, 2), steps=st.integers(1, 3))
@few
def test_the_body_runs_once_for_each_microbatch(
    smp_world: SmpWorld, smp_engine: str, microbatches: int, size: int, steps: int
) -> None:
    seen = run(
        smp_world, smp_engine, count_runs, microbatches, size, steps, microbatches=microbatches
    )
    assert all(runs == [list(range(microbatches))] * steps for runs in seen)


class Opaque:
    """An object of a type unknown to steps, which holds a tensor, has a length and looks like a container."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(5)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter([self.tensor])

    def __getitem__(self, key: Any) -> Any:
        return self.tensor[key]


#: Objects that scripts pass to steps, by name.
THINGS: Mapping[str, Callable[[], Any]] = {
    "object": Opaque,
    "module": lambda: torch.nn.Linear(2, 2),
    "text": lambda: "text",
    "device": lambda: torch.device("cpu"),
    "class": lambda: Sliceable,
    "function": lambda: len,
    "range": lambda: range(3),
}


def pass_things(names: list[str], microbatches: int, deep: bool) -> list[bool]:
    """Pass objects to a step; return for each microbatch whether it got the same objects."""
    things = [THINGS[name]() for name in names]
    seen = []

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(given: Any, x: torch.Tensor) -> None:
        got = given["deep"][0] if deep else given
        seen.append(all(each is thing for each, thing in zip(got, things, strict=True)))

    body({"deep": (things,)} if deep else things, torch.zeros(microbatches))
    return seen


@requirement("STEP-UNCHANGED")
@given(
    names=st.lists(st.sampled_from(list(THINGS)), min_size=1, max_size=4),
    microbatches=counts,
    deep=st.booleans(),
)
@few
def test_what_cannot_be_split_is_the_same_object(
    smp_world: SmpWorld, smp_engine: str, names: list[str], microbatches: int, deep: bool
) -> None:
    seen = run(
        smp_world, smp_engine, pass_things, names, microbatches, deep, microbatches=microbatches
    )
    assert seen == [[True] * microbatches] * len(seen)


def slice_calls(microbatches: int, axes: list[int | None]) -> list[list[tuple[int, int, int]]]:
    """Pass three objects with smp_slice, the second within containers; return the arguments of smp_slice."""
    objects = [Sliceable(*range(microbatches)) for _ in axes]
    names = ["a", "b", "c"]
    said = {name: axis for name, axis in zip(names, axes, strict=True) if axis is not None}

    @smp.step(input_split_axes=said)  # type: ignore[untyped-decorator]  # anybody's
    def body(a: Any, b: Any, c: Any) -> None:
        pass

    body(objects[0], {"k": [(objects[1], "s")]}, c=objects[2])
    return [each.calls for each in objects]


@requirement("STEP-SLICE-CALLS")
@given(
    microbatches=counts,
    axes=st.lists(st.sampled_from([None, 0, 1, -1, 7]), min_size=3, max_size=3),
)
@few
def test_smp_slice_is_called_once_for_each_microbatch(
    smp_world: SmpWorld, smp_engine: str, microbatches: int, axes: list[int | None]
) -> None:
    expected = [[(microbatches, mb, axis or 0) for mb in range(microbatches)] for axis in axes]
    for seen in run(
        smp_world, smp_engine, slice_calls, microbatches, axes, microbatches=microbatches
    ):
        assert [sorted(calls) for calls in seen] == expected


def there_and_back(spec: TensorSpec) -> bool:
    """Return whether a tensor that a step splits and returns, concatenated, is the same tensor."""
    x = spec.make(smp.rank(), smp.size())
    return same(smp.step(lambda x: x)(x).concat(), x)


@requirement("STEP-IDENTITY")
@given(data=st.data(), split=microbatch_splits())
@few
def test_split_and_joined_a_tensor_is_as_before(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, split: MicrobatchSplit
) -> None:
    sides = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2), "sides"))
    spec = data.draw(tensors(shape=(split.batch, *sides)), "tensor")
    assert all(run(smp_world, smp_engine, there_and_back, spec, microbatches=split.microbatches))


def input_gradient(microbatches: int, size: int) -> list[int]:
    """The gradient of a split argument, for the sum of its squares."""
    x = torch.arange(1.0 + smp.rank(), microbatches * size + 1 + smp.rank(), requires_grad=True)

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(x: torch.Tensor) -> torch.Tensor:
        loss = (x * x).sum()
        torch.autograd.backward(loss)
        return loss

    body(x)
    return [] if x.grad is None else [int(each) for each in x.grad]


@requirement("STEP-INPUT-GRADIENT")
@given(microbatches=counts, size=st.integers(1, 3))
@few
def test_gradients_flow_into_an_argument(
    smp_world: SmpWorld, smp_engine: str, microbatches: int, size: int
) -> None:
    seen = run(smp_world, smp_engine, input_gradient, microbatches, size, microbatches=microbatches)
    for rank, gradient in enumerate(seen):
        assert gradient == [2 * (each + 1 + rank) for each in range(microbatches * size)]


def step_of_a_class(microbatches: int, decorated: str) -> list[Any]:
    """Call a step through an instance of its class; return the number of arguments and the keywords."""

    class Trainer:
        train = FORMS[decorated](lambda *given, **more: (len(given), sorted(more)), {})

    return [Trainer().train("model", torch.zeros(microbatches), key=1)]


@requirement("STEP-SELF")
@given(microbatches=counts, form=st.sampled_from(list(FORMS)))
@few
def test_a_step_of_a_class_gets_no_self(
    smp_world: SmpWorld, smp_engine: str, microbatches: int, form: str
) -> None:
    for seen in run(
        smp_world, smp_engine, step_of_a_class, microbatches, form, microbatches=microbatches
    ):
        assert seen == [([2] * microbatches, [["key"] * microbatches])]


# ---- What a step returns


@dataclasses.dataclass
class LibraryOutput(OrderedDict[str, Any]):
    """A result as a library's models return: attributes and items of the same names."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class DictSubclass(dict[str, Any]):
    """A dict of a class of its own."""


#: Functions from a microbatch's number to the leaf of its result, by the leaf's name in a plan.
LEAVES: Mapping[str, Callable[[int], Any]] = {
    "tensor": lambda mb: torch.arange(mb + 1),
    "scalar": lambda mb: torch.tensor(float(mb)),
    "number": lambda mb: mb,
    "float": lambda mb: mb / 2,
    "text": lambda mb: f"text {mb}",
    "none": lambda mb: None,
    "mixed": lambda mb: [mb, None, "mixed"][mb % 3],
}


def plans(leaves: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Draw a plan: the structure of a result, with names of LEAVES as leaves."""

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(
                DictSubclass
            ),
            st.builds(Pair, inner, inner),
            st.builds(LibraryOutput, inner, inner),
        )

    return st.recursive(leaves, containers, max_leaves=6)


def filled(plan: Any, leaf: Callable[[str], Any]) -> Any:
    """Copy a plan, with ``leaf(name)`` in place of each leaf."""
    match plan:
        case str():
            return leaf(plan)
        case Pair():
            return Pair(*(filled(each, leaf) for each in plan))
        case LibraryOutput():
            # A None attribute is no item of such a result, and stays None.
            parts = (plan.loss, plan.logits)
            return LibraryOutput(
                *(None if each == "none" else filled(each, leaf) for each in parts)
            )
        case dict():
            return type(plan)((key, filled(each, leaf)) for key, each in plan.items())
    return type(plan)(filled(each, leaf) for each in plan)


def expected_result(plan: Any, microbatches: int) -> Any:
    """The expected result of a step, with a Pair("StepOutput", outputs) for each StepOutput."""

    def joined(name: str) -> Any:
        values = [LEAVES[name](mb) for mb in range(microbatches)]
        return Pair("StepOutput", values) if isinstance(values[0], torch.Tensor) else values

    return filled(plan, joined)


def told(value: Any) -> Any:
    """Copy a step's result, with a Pair("StepOutput", outputs) for each StepOutput."""
    match value:
        case smp.StepOutput():
            return Pair("StepOutput", value.outputs)
        case Pair():
            return Pair(*map(told, value))
        case LibraryOutput():
            attributes = [told(value.loss), told(value.logits)]
            items = {key: told(each) for key, each in value.items()}
            made = LibraryOutput(*attributes)
            return made if same(dict(made), items) else ("attributes differ", attributes, items)
        case dict():
            return type(value)((key, told(each)) for key, each in value.items())
        case list() | tuple():
            return type(value)(told(each) for each in value)
    return value


def wrong_result(plan: Any, microbatches: int) -> str:
    """Run a step whose microbatches return a plan; describe a wrong result, or return an empty string."""
    got = told(
        smp.step(lambda number: filled(plan, lambda name: LEAVES[name](int(number))))(
            torch.arange(microbatches)
        )
    )
    expected = expected_result(plan, microbatches)
    return "" if same(got, expected) else f"got {got!r}, not {expected!r}"


def check_result(smp_world: SmpWorld, smp_engine: str, plan: Any, microbatches: int) -> None:
    __tracebackhide__ = True
    for wrong in run(
        smp_world, smp_engine, wrong_result, plan, microbatches, microbatches=microbatches
    ):
        assert not wrong, wrong


@requirement("STEP-OUTPUT-ORDER")
@given(leaf=st.sampled_from(["tensor", "scalar"]), microbatches=counts)
@few
def test_outputs_are_in_the_order_of_microbatches(
    smp_world: SmpWorld, smp_engine: str, leaf: str, microbatches: int
) -> None:
    check_result(smp_world, smp_engine, leaf, microbatches)


@requirement("STEP-OUTPUT-STRUCTURE")
@given(plan=plans(st.sampled_from(["tensor", "number", "none"])), microbatches=counts)
@few
def test_results_keep_their_structure(
    smp_world: SmpWorld, smp_engine: str, plan: Any, microbatches: int
) -> None:
    check_result(smp_world, smp_engine, plan, microbatches)


@requirement("STEP-OUTPUT-LISTS")
@given(
    names=st.lists(st.sampled_from(["none", "number", "float", "text", "mixed"]), max_size=4),
    microbatches=counts,
)
@few
def test_what_is_no_tensor_is_listed(
    smp_world: SmpWorld, smp_engine: str, names: list[str], microbatches: int
) -> None:
    check_result(smp_world, smp_engine, names or "none", microbatches)


def joined(method: str, values: list[Any]) -> Any:
    """Run a step, and call a method of its StepOutput; return the result as nested lists, and its dtype.

    ``values[i]`` is the value that microbatch i returns.
    """
    out = smp.step(lambda number: torch.tensor(values[int(number)], dtype=torch.float64))(
        torch.arange(len(values))
    )
    result = getattr(out, method)()
    return result.tolist(), str(result.dtype)


_elements = st.integers(-9, 9)
_rows = st.lists(_elements, min_size=1, max_size=3)


@st.composite
def columns(draw: st.DrawFn) -> list[list[int]]:
    """Draw a row for each microbatch, all of one length."""
    width = draw(st.integers(1, 3))
    row = st.lists(_elements, min_size=width, max_size=width)
    return draw(st.lists(row, min_size=1, max_size=4))


def check_joined(
    smp_world: SmpWorld, smp_engine: str, method: str, values: list[Any], expected: Any
) -> None:
    __tracebackhide__ = True
    for got in run(smp_world, smp_engine, joined, method, values, microbatches=len(values)):
        assert got == (expected, "torch.float64")


@requirement("STEP-REDUCE-MEAN")
@given(values=columns())
@few
def test_reduce_mean(smp_world: SmpWorld, smp_engine: str, values: list[list[int]]) -> None:
    expected = [sum(column) / len(values) for column in zip(*values, strict=True)]
    check_joined(smp_world, smp_engine, "reduce_mean", values, expected)


@requirement("STEP-REDUCE-SUM")
@given(values=columns())
@few
def test_reduce_sum(smp_world: SmpWorld, smp_engine: str, values: list[list[int]]) -> None:
    expected = [sum(column) for column in zip(*values, strict=True)]
    check_joined(smp_world, smp_engine, "reduce_sum", values, expected)


@requirement("STEP-CONCAT")
@given(values=st.lists(st.lists(_elements, max_size=3), min_size=1, max_size=4))
@few
def test_concat(smp_world: SmpWorld, smp_engine: str, values: list[list[int]]) -> None:
    check_joined(smp_world, smp_engine, "concat", values, [each for row in values for each in row])


@requirement("STEP-STACK")
@given(values=columns())
@few
def test_stack(smp_world: SmpWorld, smp_engine: str, values: list[list[int]]) -> None:
    check_joined(smp_world, smp_engine, "stack", values, values)


def graphs(microbatches: int, rules: dict[str, Any]) -> tuple[list[bool], float | None]:
    """Run a step, and backward through its results if they have graphs.

    Returns whether each returned tensor requires a gradient, and the gradient of the weight, or None.
    """
    weight = torch.ones((), requires_grad=True)

    def body(x: torch.Tensor) -> Any:
        return {"loss": (x * weight).sum(), "more": [weight * 2]}

    out = smp.step(**rules)(body)(torch.ones(microbatches))
    returned = [*out["loss"].outputs, *out["more"][0].outputs]
    attached = [each.requires_grad for each in returned]
    if all(attached):
        torch.autograd.backward(out["loss"].reduce_sum())
    return attached, None if weight.grad is None else weight.grad.item()


@requirement("STEP-DETACH")
@given(microbatches=counts, detach=st.sampled_from([None, True, False]))
@few
def test_outputs_are_detached_unless_asked(
    smp_world: SmpWorld, smp_engine: str, microbatches: int, detach: bool | None
) -> None:
    rules = {} if detach is None else {"detach_outputs": detach}
    kept = detach is False
    expected = [kept] * (2 * microbatches), float(microbatches) if kept else None
    for got in run(smp_world, smp_engine, graphs, microbatches, rules, microbatches=microbatches):
        assert got == expected


# ---- What is refused


def attempt(call: Callable[[], Any], microbatches: int) -> tuple[bool, bool]:
    """Make a call and then a step; return whether the call raised, and whether the step worked."""
    refused = works = False
    try:
        call()
    except Exception:
        refused = True
    with contextlib.suppress(Exception):
        after = smp.step(lambda x: x)(torch.arange(microbatches))
        works = [int(each) for each in after.outputs] == list(range(microbatches))
    return refused, works


def split_batch(
    shape: tuple[int, ...], axis: int | None, deep: bool, microbatches: int
) -> tuple[bool, bool, int]:
    """Step with a tensor of a shape; return the results of ``attempt``, and the number of runs of the body."""
    runs = []

    @smp.step(input_split_axes={} if axis is None else {"x": axis})  # type: ignore[untyped-decorator]  # anybody's
    def body(whole: torch.Tensor, x: Any) -> None:
        runs.append(x)

    x = torch.zeros(shape)
    refused = attempt(
        lambda: body(torch.zeros(microbatches), {"k": [x]} if deep else x), microbatches
    )
    return *refused, len(runs)


@requirement("STEP-INDIVISIBLE")
@given(
    split=microbatch_splits(divisible=False), axis=st.sampled_from([None, 0, 1]), deep=st.booleans()
)
@few
def test_a_batch_that_cannot_be_divided_is_refused(
    smp_world: SmpWorld, smp_engine: str, split: MicrobatchSplit, axis: int | None, deep: bool
) -> None:
    shape = (split.microbatches, split.batch) if axis == 1 else (split.batch, 2)
    seen = run(
        smp_world,
        smp_engine,
        split_batch,
        shape,
        axis,
        deep,
        split.microbatches,
        microbatches=split.microbatches,
    )
    assert seen == [(True, True, 0)] * len(seen)


@requirement("STEP-NO-AXIS")
@given(
    shape=st.sampled_from([((), None), ((), 0), ((), -1), ((4,), 1), ((4, 4), 2), ((4, 4), -3)]),
    deep=st.booleans(),
    microbatches=st.sampled_from([2, 1, 4]),
)
@few
def test_a_tensor_without_the_batch_axis_is_refused(
    smp_world: SmpWorld,
    smp_engine: str,
    shape: tuple[tuple[int, ...], int | None],
    deep: bool,
    microbatches: int,
) -> None:
    seen = run(
        smp_world, smp_engine, split_batch, *shape, deep, microbatches, microbatches=microbatches
    )
    assert seen == [(True, True, 0)] * len(seen)


def use_names(rules: dict[str, Any], microbatches: int) -> tuple[bool, bool]:
    """Make and call a step with these rules; return the results of ``attempt``."""
    return attempt(
        lambda: smp.step(**rules)(lambda x, y: None)(
            torch.zeros(microbatches), torch.zeros(microbatches)
        ),
        microbatches,
    )


@requirement("STEP-UNKNOWN-NAME")
@given(
    name=st.sampled_from(["z", "X", "", "args", "0", "x"]),
    rule=st.sampled_from(["non_split_inputs", "input_split_axes"]),
    microbatches=counts,
)
@few
def test_names_of_no_parameter_are_refused(
    smp_world: SmpWorld, smp_engine: str, name: str, rule: str, microbatches: int
) -> None:
    rules = {rule: {"y": 0, name: 0} if rule == "input_split_axes" else ["y", name]}
    seen = run(smp_world, smp_engine, use_names, rules, microbatches, microbatches=microbatches)
    assert seen == [(name != "x", True)] * len(seen)


def step_in_a_step(microbatches: int, depth: int) -> tuple[bool, bool, int]:
    """Call a step inside a step; return the results of ``attempt``, and the number of runs of the inner body."""
    runs = []

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def inner(x: torch.Tensor) -> None:
        runs.append(x)

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def outer(x: torch.Tensor) -> None:
        called: Callable[..., Any] = inner
        for _ in range(depth):
            called = (lambda step: lambda x: step(x))(called)
        called(torch.zeros(microbatches))

    return *attempt(lambda: outer(torch.zeros(microbatches)), microbatches), len(runs)


@requirement("STEP-NESTED")
@given(microbatches=counts, depth=st.integers(0, 2))
@few
def test_a_step_in_a_step_is_refused(
    smp_world: SmpWorld, smp_engine: str, microbatches: int, depth: int
) -> None:
    seen = run(
        smp_world, smp_engine, step_in_a_step, microbatches, depth, microbatches=microbatches
    )
    assert seen == [(True, True, 0)] * len(seen)


#: Pairs of functions from a tensor to results of different structures, by name.
UNLIKE: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tensor and None": (lambda x: x, lambda x: None),
    "keys": (lambda x: {"a": x}, lambda x: {"b": x}),
    "one key more": (lambda x: {"a": x}, lambda x: {"a": x, "b": x}),
    "lengths": (lambda x: [x], lambda x: [x, x]),
    "list and tuple": (lambda x: [x], lambda x: (x,)),
    "depth": (lambda x: [x], lambda x: [[x]]),
    "dict and its subclass": (lambda x: {"a": x}, lambda x: DictSubclass(a=x)),
}


def return_unlike(kind: str, odd: int, microbatches: int) -> tuple[bool, bool]:
    """Step with a result of rank 0 that differs in one microbatch; return the results of ``attempt``."""

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(number: torch.Tensor) -> Any:
        return UNLIKE[kind][int(number) == odd and smp.rank() == 0](number)

    return attempt(lambda: body(torch.arange(microbatches)), microbatches)


@requirement("STEP-OUTPUT-DIFFERS")
@given(data=st.data(), kind=st.sampled_from(list(UNLIKE)), microbatches=st.integers(2, 4))
@few
def test_results_of_another_structure_are_refused(
    smp_world: SmpWorld, smp_engine: str, data: st.DataObject, kind: str, microbatches: int
) -> None:
    odd = data.draw(st.integers(0, microbatches - 1), "odd")
    seen = run(
        smp_world, smp_engine, return_unlike, kind, odd, microbatches, microbatches=microbatches
    )
    assert seen == [(True, True)] * len(seen)
