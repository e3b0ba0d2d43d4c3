"""Splitting and joining, on numpy's arrays: no framework of ours is needed."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from smp_core.errors import ArgumentError, ArgumentTypeError, BatchSizeError, StructureError
from smp_core.microbatch import CallArguments, join, rules, split


class Joined(list):
    """One value for the arrays of all microbatches."""


class Numpy:
    """A framework."""

    join = Joined

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, np.ndarray)

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tensor.shape

    def part(self, tensor: Any, axis: int, start: int, length: int) -> Any:
        return np.moveaxis(np.moveaxis(tensor, axis, 0)[start : start + length], 0, axis)


class Sliceable:
    def __init__(self, gives: Any = None) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.gives = gives or (lambda num_mb, mb: (num_mb, mb))

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
        self.calls.append((num_mb, mb, axis))
        return self.gives(num_mb, mb)


def step(a: Any, /, b: Any = None, *rest: Any, c: Any = None, **more: Any) -> Any:
    return None


def parts(count: int, *args: Any, non_split: Any = (), axes: Any = None, **kwargs: Any) -> Any:
    rule = rules(step, non_split, axes)
    return split(Numpy(), rule, CallArguments(args, kwargs), count)


def rows(count: int, *sides: int) -> Any:
    return np.arange(count * int(np.prod(sides))).reshape(count, *sides)


def test_nothing_here_needs_a_framework():
    code = "import sys, smp_core.microbatch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_microbatches_are_equal_parts_in_order():
    x = rows(6, 2)
    calls = parts(3, x, c=x)
    assert [call.args[0].tolist() for call in calls] == [
        x[0:2].tolist(),
        x[2:4].tolist(),
        x[4:6].tolist(),
    ]
    assert [call.kwargs["c"].tolist() for call in calls] == [
        call.args[0].tolist() for call in calls
    ]
    assert all(np.shares_memory(call.args[0], x) for call in calls)


@pytest.mark.parametrize("axis", [1, -2])
def test_an_axis_counts_from_either_end(axis):
    x = rows(3, 4, 5)
    first, second = parts(2, x, axes={"a": axis})
    assert np.array_equal(first.args[0], x[:, :2])
    assert np.array_equal(second.args[0], x[:, 2:])


def test_arguments_keep_their_form():
    x = rows(2)
    (call,) = parts(1, x, x, x, x, c=x, more=x)
    assert len(call.args) == 4
    assert list(call.kwargs) == ["c", "more"]


def test_names_of_variadic_arguments():
    x = rows(2, 2)
    whole = parts(2, x, x, x, non_split=["rest"], axes={"more": 1, "d": 0}, d=x, e=x)[0]
    assert [each.shape for each in whole.args] == [(1, 2), (1, 2), (2, 2)]
    assert whole.kwargs["d"].shape == (1, 2)  # its own name goes first
    assert whole.kwargs["e"].shape == (2, 1)


def test_what_is_handed_on_whole():
    sent = [SimpleNamespace(x=rows(3)), "text", 7, None, object, [1, 2], {"k": (1,)}, Sliceable]
    for call in parts(2, *sent):
        assert all(got is given for got, given in zip(call.args, sent, strict=True))


def test_nests_are_split_and_the_given_ones_stay():
    x, y = rows(4), rows(2)
    container = {"x": [x, (y, "s")], 3: {"y": y}}
    first, second = parts(2, container)
    assert first.args[0]["x"][0].tolist() == [0, 1]
    assert second.args[0]["x"][1][0].tolist() == [1]
    assert second.args[0]["x"][1][1] == "s"
    assert second.args[0][3]["y"].tolist() == [1]
    assert container["x"][0] is x


def test_one_object_stays_one():
    x, custom = rows(4), Sliceable()
    for call in parts(2, x, [x, custom], custom, c=x):
        assert call.args[0] is call.args[1][0] is call.kwargs["c"]
        assert call.args[1][1] is call.args[2]
    assert custom.calls == [(2, 0, 0), (2, 1, 0)]


def test_one_array_on_two_axes_is_two():
    x = rows(2, 2)
    call = parts(2, x, axes={"c": 1}, c=x)[1]
    assert call.args[0].tolist() == [[2, 3]]
    assert call.kwargs["c"].tolist() == [[1], [3]]


def test_smp_slice_is_asked_once_for_each_microbatch():
    custom, deep = Sliceable(), Sliceable(lambda num_mb, mb: ["list", mb])
    calls = parts(3, custom, {"deep": (deep,)}, axes={"b": -1})
    assert custom.calls == [(3, 0, 0), (3, 1, 0), (3, 2, 0)]
    assert deep.calls == [(3, 0, -1), (3, 1, -1), (3, 2, -1)]
    assert [call.args[0] for call in calls] == [(3, 0), (3, 1), (3, 2)]
    assert calls[2].args[1] == {"deep": (["list", 2],)}


def test_smp_slice_of_a_nest_wins():
    class Batch(dict):
        def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
            return ("own", mb)

    assert [call.args[0] for call in parts(2, Batch(x=rows(3)))] == [("own", 0), ("own", 1)]


def test_smp_slice_is_not_asked_of_what_is_handed_on_whole():
    custom = Sliceable()
    assert all(call.args[0] is custom for call in parts(2, custom, non_split=["a"]))
    assert custom.calls == []


def test_a_slice_that_no_set_can_hold():
    with pytest.raises(
        ArgumentTypeError, match=r"argument a of step: its parts do not fit in a set"
    ):
        parts(2, {Sliceable(lambda num_mb, mb: [])})


def test_zero_size_batches():
    assert [call.args[0].shape for call in parts(3, rows(0, 2))] == [(0, 2)] * 3
    assert [call.args[0].shape for call in parts(3, rows(3, 0))] == [(1, 0)] * 3


def test_tensors_of_one_step_may_differ_in_batch_size():
    call = parts(2, rows(4), rows(2), c=rows(0))[1]
    assert [len(each) for each in (*call.args, call.kwargs["c"])] == [2, 1, 0]


@pytest.mark.parametrize(
    ("args", "axes", "message"),
    [
        ([rows(5)], {}, r"argument a of step has a batch of 5 \(axis 0 of shape \(5,\)\), which microbatches=2"),
        ([rows(1)], {}, "batch of 1 "),
        ([0, {"x": [rows(2), rows(3)]}], {}, r"argument b\['x'\]\[1\] of step has a batch of 3"),
        ([0, 0, rows(2), rows(3)], {}, r"argument rest\[1\] of step has a batch of 3"),
        ([np.zeros(())], {}, r"tensor of shape \(\), which has no axis 0 to split.*non_split_inputs"),
        ([rows(2)], {"a": 1}, r"tensor of shape \(2,\), which has no axis 1"),
        ([rows(2)], {"a": -2}, r"tensor of shape \(2,\), which has no axis -2"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_split(args, axes, message):
    with pytest.raises(BatchSizeError, match=message):
        parts(2, *args, axes=axes)
    assert issubclass(BatchSizeError, ValueError)


def test_a_keyword_is_named_by_its_place():
    with pytest.raises(BatchSizeError, match=r"argument more\['x'\] of step"):
        parts(2, 0, x=rows(3))


def test_a_call_that_does_not_fit_the_signature():
    with pytest.raises(ArgumentTypeError, match=r"step\(.*: missing a required argument: 'a'"):
        parts(2)


@pytest.mark.parametrize(
    ("non_split", "axes", "error", "message"),
    [
        ("a", None, ArgumentTypeError, "non_split_inputs='a'.*no list of names"),
        ([1], None, ArgumentTypeError, "no list of names"),
        (None, ["a"], ArgumentTypeError, "input_split_axes=.*no dict of argument name to axis"),
        (None, {"a": True}, ArgumentTypeError, "no dict"),
        (None, {"a": 1.0}, ArgumentTypeError, "no dict"),
        (None, {0: 1}, ArgumentTypeError, "no dict"),
        (["x", "y"], None, ArgumentError, "non_split_inputs of .*strict names 'y'.*there is x"),
        (None, {"y": 1}, ArgumentError, "input_split_axes of .* names 'y'"),
        (
            ["x"],
            {"x": 1},
            ArgumentError,
            "x of .* stands in non_split_inputs and in input_split_axes",
        ),
    ],
)
def test_bad_rules_are_refused_when_they_are_made(non_split, axes, error, message):
    def strict(x: Any) -> None: ...

    with pytest.raises(error, match=message):
        rules(strict, non_split, axes)


def generator() -> Any:
    yield


async def coroutine() -> None: ...


class AsyncCall:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (None, "decorates a function, not None"),
        (int, "decorates a function, not <class 'int'>"),
        (generator, "generator is a generator function"),
        (coroutine, "coroutine is a coroutine function"),
        (AsyncCall(), "is a coroutine function"),
    ],
)
def test_what_is_no_function_of_one_microbatch(function, message):
    with pytest.raises(ArgumentTypeError, match=message):
        rules(function, None, None)


def test_functions_of_other_kinds():
    assert list(rules(functools.partial(step, 1), None, {"c": 1}).signature.parameters) == list(
        inspect.signature(functools.partial(step, 1)).parameters
    )


# ---- Joining


def joined(*results: Any) -> Any:
    return join(Numpy(), "step", results)


def test_arrays_are_joined_and_all_else_is_listed():
    a, b = rows(2), rows(3)
    got = joined({"loss": a, "more": [1, (None, a)]}, {"loss": b, "more": [2, (None, b)]})
    assert type(got["loss"]) is Joined
    assert got["loss"][0] is a
    assert got["loss"][1] is b
    assert got["more"][0] == [1, 2]
    assert type(got["more"][0]) is list
    assert got["more"][1][0] == [None, None]
    assert type(got["more"][1]) is tuple
    assert type(got["more"][1][1]) is Joined


def test_leaves_that_are_no_arrays_may_differ_in_type():
    assert joined(1, None, "s") == [1, None, "s"]


def test_one_microbatch_is_joined_too():
    assert joined((1, [])) == ([1], [])
    assert type(joined(rows(1))) is Joined


def test_keys_are_paired_by_name():
    assert joined({"a": 1, "b": 2}, {"b": 3, "a": 4}) == {"a": [1, 4], "b": [2, 3]}


def test_sets():
    assert joined({1, 2}, {3}) == [{1, 2}, {3}]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (
            ({"a": 1}, {"b": 1}),
            r"dict of 'a' for microbatch 0 and dict of 'b' for microbatch 1",
        ),
        (({"a": {}}, {"a": {"b": 1}}), r"dict of no keys at \['a'\] for microbatch 0"),
        (([1], [1], [1, 2]), "list of 1 for microbatch 0 and list of 2 for microbatch 2"),
        (([1], (1,)), "list for microbatch 0 and tuple for microbatch 1"),
        ((rows(1), None), "ndarray for microbatch 0 and None for microbatch 1"),
        ((None, rows(1)), "None for microbatch 0 and ndarray for microbatch 1"),
        ((1, [1]), "int for microbatch 0 and list for microbatch 1"),
    ],
)
def test_results_that_differ_in_structure(results, message):
    with pytest.raises(StructureError, match=message):
        joined(*results)
