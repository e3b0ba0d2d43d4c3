"""Calls of steps: what is drawn can be split, holds the hard cases, and prints as code."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.errors import InvalidArgument

from pytest_smp.strategies import (
    Batch,
    MicrobatchSplit,
    Pair,
    Sliceable,
    StepCall,
    TensorSpec,
    batches,
    microbatch_splits,
    same,
    sliceables,
    step_calls,
)

Drawn = Callable[..., list[Any]]
Minimal = Callable[..., Any]
Printed = Callable[..., tuple[Any, str]]
Paste = Callable[[str], Any]

quick = settings(deadline=None, database=None, max_examples=100)


def parts(value: Any) -> Iterator[Any]:
    """The value and everything in it; sliceables are not opened."""
    yield value
    inside: Any = ()
    if isinstance(value, Batch):
        inside = [value.value]
    elif isinstance(value, StepCall):
        inside = value.arguments.values()
    elif isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inside = value
    for each in inside:
        yield from parts(each)


def holds(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(map(test, parts(value)))


# ---- Splits


@given(split=microbatch_splits())
@quick
def test_splits_can_be_divided(split: MicrobatchSplit) -> None:
    assert split.batch % split.microbatches == 0
    assert split.divisible
    assert 1 <= split.microbatches <= 5


@given(split=microbatch_splits(divisible=False))
@quick
def test_splits_that_cannot(split: MicrobatchSplit) -> None:
    assert split.batch % split.microbatches != 0
    assert not split.divisible


def test_hard_splits_are_drawn(drawn: Drawn, minimal: Minimal) -> None:
    splits = drawn(microbatch_splits())
    assert {0, 1, 2, 3} <= {split.batch // split.microbatches for split in splits}
    assert {1, 2, 3, 4, 5} == {split.microbatches for split in splits}
    uneven = drawn(microbatch_splits(divisible=False))
    assert any(split.batch < split.microbatches for split in uneven)
    assert any(split.batch % split.microbatches == split.microbatches - 1 > 1 for split in uneven)
    assert minimal(microbatch_splits(divisible=False)) == MicrobatchSplit(1, 2)


# ---- Batches


def test_the_parts_of_a_batch() -> None:
    spec = TensorSpec((4, 2), torch.int64)
    x, other = spec.make(), Sliceable("first", "second")
    batch = Batch([spec, {"k": (other, 7)}, Pair(None, {spec})])
    whole, first, second = batch.make(), batch.part(0, 2), batch.part(1, 2)
    assert same(whole[0], x)
    assert same(first[0], x[:2])
    assert same(second[0], x[2:])
    assert [first[1], second[1]] == [{"k": ("first", 7)}, {"k": ("second", 7)}]
    assert same(second[2], Pair(None, {x[2:]}))
    assert whole[1]["k"][0] is not other
    assert same(Batch(spec, 1).part(0, 2), x[:, :1])
    assert same(Batch(spec, -1).part(1, 2), x[:, 1:])
    assert same(Batch([spec, other], None).part(1, 2), [x, other])


@given(call=step_calls())
@quick
def test_every_tensor_can_be_split(call: StepCall) -> None:
    for batch in call.arguments.values():
        for spec in parts(batch):
            if isinstance(spec, TensorSpec) and batch.axis is not None:
                assert spec.shape[batch.axis] % call.microbatches == 0
            if isinstance(spec, Sliceable) and batch.axis is not None:
                assert len(spec.parts) == call.microbatches


@given(call=step_calls(dtype=torch.int64))
@quick
def test_a_tensor_s_parts_are_the_whole(call: StepCall) -> None:
    for batch in call.arguments.values():
        if isinstance(batch.value, TensorSpec) and batch.axis is not None:
            pieces = [batch.part(index, call.microbatches) for index in range(call.microbatches)]
            assert same(torch.cat(pieces, batch.axis), batch.make())


@pytest.mark.parametrize(
    "condition",
    [
        *(lambda v, kind=kind: type(v) is kind for kind in (list, tuple, dict, OrderedDict, Pair)),
        lambda v: type(v) in (set, frozenset) and any(isinstance(e, TensorSpec) for e in v),
        lambda v: type(v) is list and any(isinstance(e, Sliceable) for e in v),
        lambda v: isinstance(v, TensorSpec) and v.numel == 0 and len(v.shape) > 1,
        lambda v: isinstance(v, TensorSpec) and v.layout == "transposed",
        lambda v: isinstance(v, Batch) and v.axis is None,
        lambda v: isinstance(v, Batch) and v.axis == -2,
        lambda v: isinstance(v, Batch) and v.axis == 1,
        lambda v: isinstance(v, StepCall) and v.microbatches == 1,
        lambda v: isinstance(v, StepCall) and v.microbatches == 4,
        lambda v: isinstance(v, StepCall) and 0 < v.keywords < len(v.arguments) == 3,
        lambda v: v is None,
    ],
    ids=[
        *("list", "tuple", "dict", "ordered", "pair", "set", "deep sliceable", "empty", "strides"),
        *("whole", "axis -2", "axis 1", "one", "four", "keywords", "none"),
    ],
)
def test_hard_cases_are_drawn(condition: Callable[[Any], bool], minimal: Minimal) -> None:
    assert minimal(step_calls(), holds(condition), False) is not None


def test_tensors_of_one_batch_differ_in_size(minimal: Minimal) -> None:
    def uneven(value: Any) -> bool:
        sizes = {each.shape[0] for each in parts(value) if isinstance(each, TensorSpec)}
        return isinstance(value, list) and len(sizes) > 1

    assert minimal(batches(2), holds(uneven), False) is not None


def test_they_shrink_to_one_small_tensor(minimal: Minimal) -> None:
    call = minimal(step_calls())
    assert call == StepCall(2, {"a": Batch(TensorSpec((2,), torch.float32))})


def test_rules_and_arguments_of_a_call() -> None:
    spec = TensorSpec((2, 2), torch.int64)
    arguments = {"a": Batch(1), "b": Batch(spec, None), "c": Batch(spec, -1)}
    call = StepCall(2, arguments, keywords=1)
    assert call.rules == {"non_split_inputs": ["b"], "input_split_axes": {"c": -1}}
    assert StepCall(2, {"a": Batch(1)}).rules == {}
    assert StepCall(2, {"a": Batch(1)}, explicit=True).rules == {"input_split_axes": {"a": 0}}
    args, kwargs = call.make()
    assert same(args, (1, spec.make()))
    assert same(kwargs, {"c": spec.make()})
    assert same(call.part(1), (1, spec.make(), spec.make()[:, 1:]))
    assert call.config == {"microbatches": 2}


def test_they_can_be_pasted(printed: Printed, paste: Paste) -> None:
    for after in range(0, 60, 6):
        value, code = printed(step_calls(), after)
        assert same(paste(code), value), code


def test_splits_can_be_pasted(printed: Printed, paste: Paste) -> None:
    value, code = printed(microbatch_splits(), 5)
    assert paste(code) == value


@given(call=step_calls())
@settings(quick, max_examples=50)
def test_they_survive_pickle(call: StepCall) -> None:
    assert same(pickle.loads(pickle.dumps(call)), call)


# ---- Sliceables


def test_a_sliceable_records_its_calls() -> None:
    one = Sliceable("a", None)
    assert one.smp_slice(2, 1, -1) is None
    assert one.smp_slice(num_mb=2, mb=0, axis=0) == "a"
    assert one.calls == [(2, 1, -1), (2, 0, 0)]
    assert one.again() == one
    assert one.again().calls == []
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != Sliceable("a", 0)
    assert one != ("a", None)


@pytest.mark.parametrize("asked", [(2, 2, 0), (2, -1, 0), (3, 0, 0)])
def test_a_part_that_is_not_there_is_told_apart(asked: tuple[int, int, int]) -> None:
    assert not same(Sliceable("a", "b").smp_slice(*asked), "b")
    assert tuple(Sliceable("a", "b").smp_slice(*asked)) == asked


@pytest.mark.parametrize("kind", [type(None), list, dict, torch.Tensor, Sliceable])
def test_parts_of_every_type_are_drawn(kind: type, minimal: Minimal) -> None:
    found = minimal(sliceables(3), lambda one: kind in map(type, one.parts), False)
    assert len(found.parts) == 3
    assert minimal(sliceables(2)) == Sliceable(None, None)


# ---- Bad arguments


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: microbatch_splits(max_microbatches=0),
        lambda: microbatch_splits(divisible=False, max_microbatches=1),
        lambda: microbatch_splits(divisible=1),
        lambda: batches(0),
        lambda: batches(2, axis=1.0),
        lambda: batches(2, axis=True),
        lambda: batches(2, slicing=1),
        lambda: batches(2, depth=-1),
        lambda: step_calls(max_microbatches=0),
        lambda: step_calls(slicing=None),
        lambda: step_calls(depth=-1),
        lambda: step_calls(axes=[]),
        lambda: step_calls(axes=[0, True]),
        lambda: sliceables(0),
        lambda: sliceables(2, tensors=1),
        lambda: sliceables(2, max_leaves=0),
    ],
    ids=range(16),
)
def test_bad_arguments_are_refused_at_once(strategy: Callable[[], Any]) -> None:
    with pytest.raises(InvalidArgument):
        strategy()
