"""Tensors: unique values, layouts between guards, hard cases, and what recipes shrink to."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from pytest_smp.strategies import TensorSpec, dtypes, lengths, same, shapes, tensors
from pytest_smp.strategies.numbers import ALL, KINDS, PICKLABLE
from pytest_smp.strategies.recipes import GUARD_BYTE, LAYOUTS

Drawn = Callable[..., list[Any]]
Minimal = Callable[..., Any]

quick = settings(deadline=None, database=None, max_examples=200)
worlds = st.integers(1, 8)


def items(tensor: torch.Tensor) -> list[bytes]:
    """The bytes of each element, read one by one through Python."""
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)  # a copy of a bool would turn every byte into 0 or 1
    elements = (tensor[at] for at in itertools.product(*map(range, tensor.shape)))
    return [bytes(each.clone().reshape(1).view(torch.uint8).tolist()) for each in elements]


def all_items(spec: TensorSpec, world: int) -> list[bytes]:
    """Of the tensors of all ranks."""
    return [item for rank in range(world) for item in items(spec.make(rank, world))]


def unique(found: list[bytes]) -> bool:
    return len(set(found)) == len(found)


# ---- Values --------------------------------------------------------------------------------------


@quick
@given(tensors(as_output=True), worlds)
def test_values_are_unique_per_rank_and_element(spec: TensorSpec, world: int) -> None:
    found = all_items(spec, world)
    assert unique(found) or len(found) > spec.distinct
    assert len(set(found)) <= spec.distinct


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_distinct_counts_the_values_that_there_are(dtype: torch.dtype) -> None:
    spec = TensorSpec((5000,), dtype)
    found = {item for rank in (0, 1) for item in items(spec.make(rank, 2))}
    assert len(found) == min(spec.distinct, 10_000)
    if dtype is not torch.bool:
        most = min(spec.distinct, 4000)
        assert unique(all_items(TensorSpec((most // 4,), dtype), 4))


@pytest.mark.parametrize("dtype", [each for each in ALL if each != torch.bool], ids=str)
def test_an_element_differs_between_any_two_ranks_though_values_ran_out(dtype: torch.dtype) -> None:
    made = [TensorSpec((300,), dtype).make(rank, 8) for rank in range(8)]
    for each in zip(*map(items, made), strict=True):
        assert unique(list(each))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_values_have_no_period(dtype: torch.dtype) -> None:
    # Else a tensor whose elements were moved by one would look right.
    for world in (1, 2, 8):
        made = items(TensorSpec((700,), dtype).make(1 % world, world))
        assert not [step for step in range(1, 20) if made[step:] == made[:-step]], world


def test_values_are_unique_though_the_shapes_of_ranks_differ() -> None:
    found = [item for r in range(8) for item in items(TensorSpec((r + 1,), torch.int64).make(r, 8))]
    assert unique(found)


@given(worlds, st.integers(3, 20))
@quick
def test_bool_tensors_differ_between_any_two_ranks(world: int, numel: int) -> None:
    made = [TensorSpec((numel,), torch.bool).make(rank, world) for rank in range(world)]
    assert unique([bytes(each.tolist()) for each in made])
    assert all(len(set(each.tolist())) == 2 for each in made if numel >= 6)


def test_a_planted_duplicate_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec((2, 3), torch.float32)
    assert unique(all_items(spec, 8))
    original = TensorSpec._values
    monkeypatch.setattr(TensorSpec, "_values", lambda s, n, rank, w: original(s, n, rank % 7, w))
    assert not unique(all_items(spec, 8))


@pytest.mark.parametrize(
    ("dtype", "rank", "world", "expected"),
    [
        (torch.float16, 0, 1, [1.0, 2.0, 3.0]),
        (torch.bfloat16, 1, 4, [2.0, 6.0, 10.0]),
        (torch.uint8, 0, 1, [255, 254, 253]),
        (torch.uint16, 1, 2, [65534, 65532, 65530]),
        (torch.int8, 0, 60, [1, 61, 121]),
        (torch.int8, 7, 60, [8, 68, -1]),
        (torch.uint64, 0, 1, [2**64 - k * (2**55 + 1) for k in (1, 2, 3)]),
        (torch.int64, 0, 1, [k * (2**53 + 1) for k in (1, 2, 3)]),
        (torch.int32, 0, 1, [k * (2**16 + 1) for k in (1, 2, 3)]),
        (torch.float64, 0, 1, [k * (1 + 2**-30) for k in (1, 2, 3)]),
        (torch.complex64, 0, 1, [k * (1 + 2**-12) * (1 - 1j) for k in (1, 2, 3)]),
        (torch.float8_e5m2, 0, 7, [1.0, 8.0, -7.0]),
        (torch.bool, 0, 8, [False, False, False]),
        (torch.bool, 6, 8, [False, True, True]),
        (torch.bool, 1, 2, [True, False, False]),
    ],
    ids=str,
)
def test_the_values_are_the_documented_ones(
    dtype: torch.dtype, rank: int, world: int, expected: list[Any]
) -> None:
    assert TensorSpec((3,), dtype).make(rank, world).tolist() == expected


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        (torch.float64, torch.float32),
        (torch.float32, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.complex128, torch.complex64),
        (torch.int64, torch.int32),
        (torch.int64, torch.float64),
        (torch.int32, torch.int16),
        (torch.uint64, torch.int32),
        (torch.uint64, torch.float64),
        (torch.uint32, torch.int32),
        (torch.uint16, torch.int16),
        (torch.uint8, torch.int8),
    ],
    ids=str,
)
def test_a_detour_through_a_narrower_dtype_shows(wide: torch.dtype, narrow: torch.dtype) -> None:
    tensor = TensorSpec((9,), wide).make()
    detour = tensor.clone().to(narrow).to(torch.float64 if wide.is_floating_point else wide)
    changed = [a != b for a, b in zip(tensor.tolist(), detour.tolist(), strict=True)]
    if narrow in (torch.int32, torch.int16, torch.int8) and not wide.is_signed:
        # Casting back wraps around, so what shows is the value in between.
        changed = [a != b for a, b in zip(tensor.tolist(), tensor.to(narrow).tolist(), strict=True)]
    assert all(changed)


#: Sums up to here are exact in any order; documented with TensorSpec.
EXACT_SUMS = {
    torch.bfloat16: 2**8,
    torch.float16: 2**11,
    torch.float32: 2**24,
    torch.float8_e4m3fn: 2**4,
    torch.float8_e5m2: 2**3,
    torch.complex64: 2**24,
    torch.int8: 127,
    torch.int16: 32000,
}


@pytest.mark.parametrize("dtype", EXACT_SUMS, ids=str)
@pytest.mark.parametrize("world", [1, 3, 8])
def test_bounded_values_sum_exactly_in_any_order(dtype: torch.dtype, world: int) -> None:
    bound = EXACT_SUMS[dtype] // world
    spec = TensorSpec((40,), dtype, bound=bound)
    made = [spec.make(rank, world) for rank in range(world)]
    expected = [sum(each) for each in zip(*(tensor.tolist() for tensor in made), strict=True)]
    assert all(abs(number.real) <= bound for tensor in made for number in tensor.tolist())
    for seed in range(5):
        random.Random(seed).shuffle(made)
        total = torch.zeros(40).to(dtype)
        for tensor in made:  # rounded to the dtype after every step
            wide = torch.complex128 if dtype.is_complex else torch.float64
            total = (total.to(wide) + tensor.to(wide)).to(dtype)
        assert total.tolist() == expected


@pytest.mark.parametrize("kind", ["integer", "floating"])
def test_bounded_values_use_both_signs_up_to_the_bound(kind: str) -> None:
    for dtype in KINDS[kind]:
        made = TensorSpec((10,), dtype, bound=3).make().tolist()
        assert made[:6] == [1, 2, 3, -1, -2, -3]
        assert set(made) == {1, 2, 3, -1, -2, -3}
    assert TensorSpec((4,), torch.uint8, bound=3).make().tolist()[:3] == [1, 2, 3]


def test_no_value_is_zero_or_looks_like_a_guard() -> None:
    for dtype in set(ALL) - {torch.bool}:
        for item in set(items(TensorSpec((9000,), dtype).make())):
            assert item != bytes([GUARD_BYTE]) * dtype.itemsize
            assert any(item)
    assert all(item != b"\x80" for item in items(TensorSpec((2,), torch.bool).make()))


# ---- Layouts and guards --------------------------------------------------------------------------


@quick
@given(tensors(), worlds, st.data())
def test_a_recipe_makes_what_it_says(spec: TensorSpec, world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    tensor = spec.make(rank, world)
    assert tuple(tensor.shape) == spec.shape
    assert tensor.dtype == spec.dtype
    assert tensor.storage_offset() == spec.offset
    assert tensor.numel() == spec.numel
    assert spec.guards_intact(tensor)
    assert same(tensor, spec.make(rank, world))
    assert tensor.data_ptr() != spec.make(rank, world).data_ptr() or not spec.numel
    # The values depend on nothing but shape, dtype and bound.
    if spec.layout != "expanded":
        plain = TensorSpec(spec.shape, spec.dtype, bound=spec.bound).make(rank, world)
        assert same(tensor, plain)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)


@pytest.mark.parametrize(
    ("layout", "strides", "contiguous"),
    [
        ("contiguous", (12, 4, 1), True),
        ("strided", (24, 8, 2), False),
        ("sliced", (15, 5, 1), False),
        ("transposed", (12, 1, 3), False),
        ("reversed", (1, 2, 6), False),
        ("expanded", (0, 4, 1), False),
    ],
)
def test_layouts_lie_as_documented(layout: str, strides: tuple[int, ...], contiguous: bool) -> None:
    tensor = TensorSpec((2, 3, 4), torch.int32, layout).make()
    assert tensor.stride() == strides
    assert tensor.is_contiguous() == contiguous
    assert len(LAYOUTS) == 6


def test_an_expanded_tensor_repeats_what_is_there_once() -> None:
    tensor = TensorSpec((3, 2), torch.int64, "expanded", bound=9).make()
    assert tensor.tolist() == [[1, 2]] * 3
    assert TensorSpec((0, 2), torch.int64, "expanded").make().tolist() == []


def storage(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of its storage, those outside the view too."""
    size = len(tensor.untyped_storage()) // tensor.dtype.itemsize
    return tensor.as_strided((size,), (1,), 0)


@quick
@given(tensors(), st.data())
def test_every_guard_is_guarded_and_no_element_is(spec: TensorSpec, data: st.DataObject) -> None:
    tensor = spec.make()
    everything = storage(tensor)
    # The elements of the storage that are in the view, told apart by their addresses.
    at = {
        (tensor[index].data_ptr() - everything.data_ptr()) // spec.dtype.itemsize
        for index in itertools.product(*map(range, spec.shape))
    }
    assert at.isdisjoint(range(spec.offset))
    assert len(everything) - 1 not in at
    victim = data.draw(st.integers(0, len(everything) - 1))
    everything[victim] = 1
    assert spec.damaged_guards(tensor) == (() if victim in at else (victim,))
    assert spec.guards_intact(tensor) == (victim in at)


@pytest.mark.parametrize("layout", ["strided", "sliced", "transposed", "reversed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool], ids=str)
def test_a_writer_that_takes_a_view_for_dense_is_caught(layout: str, dtype: torch.dtype) -> None:
    # Gloo writes a strided output like this, live on torch 2.13 (pytorch#192920).
    spec = TensorSpec((2, 3, 5), dtype, layout, offset=1)
    output, expected = spec.blank(), spec.make(1, 2)
    output.as_strided((spec.numel,), (1,), spec.offset).copy_(expected.reshape(-1))
    assert not same(output, expected) or spec.damaged_guards(output)
    if layout in ("strided", "sliced"):
        assert spec.damaged_guards(output)
    output = spec.blank()
    output.copy_(expected)
    assert same(output, expected)
    assert spec.guards_intact(output)


@pytest.mark.parametrize("beside", [-1, 1])
def test_a_writer_that_gets_the_offset_or_the_length_wrong_is_caught(beside: int) -> None:
    spec = TensorSpec((3,), torch.float32, offset=2)
    output = spec.blank()
    output.as_strided((3,), (1,), 2 + beside).copy_(spec.make())
    assert spec.damaged_guards(output) == ((1,) if beside < 0 else (5,))


def test_a_writer_of_zeros_and_one_into_an_empty_view_are_caught() -> None:
    spec = TensorSpec((0, 3), torch.uint8, offset=1)
    output = spec.blank()
    storage(output)[0] = 0
    assert spec.damaged_guards(output) == (0,)


def test_an_element_never_written_differs_from_every_value() -> None:
    for dtype in ALL:
        spec = TensorSpec((50,), dtype, "strided")
        assert set(items(spec.blank())).isdisjoint(all_items(spec, 4))


def test_a_copy_has_no_guards_to_look_at() -> None:
    spec = TensorSpec((2, 3), torch.float32, "strided", offset=1)
    with pytest.raises(InvalidArgument, match=r"strides \(3, 1\).*layout='strided'"):
        spec.guards_intact(spec.make().clone(memory_format=torch.contiguous_format))


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0), (True, 2)])
def test_a_rank_outside_the_world_is_refused(rank: int, world: int) -> None:
    with pytest.raises(InvalidArgument, match=r"rank=|world="):
        TensorSpec((), torch.float32).make(rank, world)


# ---- What is drawn -------------------------------------------------------------------------------


def test_hard_tensors_are_drawn_often(drawn: Drawn) -> None:
    found = drawn(tensors(), 2000)
    often = len(found) / 40
    layouts = Counter(spec.layout for spec in found)
    assert set(layouts) == set(LAYOUTS)
    assert {spec.dtype for spec in found} == set(ALL)
    assert sum(spec.numel == 0 for spec in found) > often
    assert sum(spec.shape == () for spec in found) > often
    assert sum(spec.numel == 1 for spec in found) > often
    assert sum(spec.numel % 2 and spec.numel > 1 for spec in found) > often
    assert sum(spec.offset > 0 for spec in found) > often
    assert sum(not spec.make().is_contiguous() for spec in found) > 5 * often
    for layout in set(LAYOUTS) - {"contiguous"}:
        of_layout = [spec.make() for spec in found if spec.layout == layout]
        assert sum(not each.is_contiguous() for each in of_layout) > 5, layout


def test_an_output_is_never_expanded_and_can_be_written(drawn: Drawn) -> None:
    found = drawn(tensors(as_output=True), 300)
    assert {spec.layout for spec in found} == set(LAYOUTS) - {"expanded"}
    for spec in found:
        assert spec.make().copy_(spec.make(1, 2)) is not None


def test_arguments_of_tensors_are_kept(drawn: Drawn) -> None:
    for spec in drawn(tensors(dtype=torch.bool, shape=(0, 3), layout=["sliced"], bound=9), 20):
        assert (spec.dtype, spec.shape, spec.layout, spec.bound) == (
            torch.bool,
            (0, 3),
            "sliced",
            1,
        )
    found = drawn(tensors(dtype=dtypes("half"), shape=st.just((4,)), bound=9), 60)
    assert {spec.dtype for spec in found} == {torch.bfloat16, torch.float16}
    assert {spec.bound for spec in found} == {9}
    assert {len(s.shape) for s in drawn(tensors(layout="reversed"), 20)} == {3}


def test_a_shape_that_fits_no_layout_is_refused_when_drawn(drawn: Drawn) -> None:
    with pytest.raises(InvalidArgument, match=r"shape=\(\).*strided"):
        drawn(tensors(shape=st.just(()), layout="strided"), 1)


def test_lengths_do_and_do_not_divide(drawn: Drawn, minimal: Minimal) -> None:
    found = Counter(drawn(lengths(4), 300))
    assert set(found) == set(range(10))
    assert minimal(lengths(4)) == 1
    assert minimal(lengths(4), lambda length: length % 4 == 0) in (0, 4)
    assert minimal(lengths(4), lambda length: length > 4 and length % 4) == 5
    first = {shape[0] for shape in drawn(shapes(min_dims=1, world=8), 400)}
    assert first == set(range(18))


def test_shapes_are_in_range(drawn: Drawn) -> None:
    found = drawn(shapes(min_dims=1, max_dims=2, max_side=3), 300)
    assert {len(shape) for shape in found} == {1, 2}
    assert {side for shape in found for side in shape} == {0, 1, 2, 3}
    assert set(drawn(shapes(max_side=0, max_dims=1), 20)) == {(), (0,)}
    empty = [shape for shape in drawn(shapes(), 300) if math.prod(shape) == 0]
    assert 15 < len(empty) < 150


def test_dtypes_are_all_that_the_reference_moves(drawn: Drawn, minimal: Minimal) -> None:
    assert set(drawn(dtypes(), 400)) == set(ALL)
    assert set(drawn(dtypes("bool", "half"), 60)) == {torch.bool, torch.bfloat16, torch.float16}
    assert minimal(dtypes()) == torch.float32
    assert minimal(dtypes("unsigned")) == torch.uint8


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_dtype_is_picklable_exactly_if_the_table_says_so(dtype: torch.dtype) -> None:
    data = pickle.dumps(torch.zeros(1).to(dtype))
    if dtype in PICKLABLE:
        assert pickle.loads(data).dtype == dtype
    else:  # if torch mends this, `objects` can draw these too
        with pytest.raises(AttributeError, match="UntypedStorage"):
            pickle.loads(data)


def test_recipes_shrink_to_small_plain_ones(minimal: Minimal) -> None:
    assert minimal(tensors()) == TensorSpec((), torch.float32)
    assert minimal(tensors(), lambda s: s.numel == 0) == TensorSpec((0,), torch.float32)
    assert minimal(tensors(), lambda s: s.shape) == TensorSpec((1,), torch.float32)
    assert minimal(tensors(), lambda s: s.numel > 2) == TensorSpec((3,), torch.float32)
    assert minimal(tensors(), lambda s: s.offset) == TensorSpec((), torch.float32, offset=1)
    assert minimal(tensors(), lambda s: not s.make().is_contiguous()) == TensorSpec(
        (2,), torch.float32, "strided"
    )
    transposed = minimal(
        tensors(), lambda s: s.layout == "transposed" and not s.make().is_contiguous()
    )
    assert transposed == TensorSpec((2, 2), torch.float32, "transposed")
    assert minimal(tensors(), lambda s: s.dtype.is_complex).dtype == torch.complex64


def test_a_repr_says_what_is_not_the_default() -> None:
    assert (
        repr(TensorSpec((3, 5), torch.float32)) == "TensorSpec(shape=(3, 5), dtype=torch.float32)"
    )
    assert repr(TensorSpec((2,), torch.int8, "strided", 1, 9)) == (
        "TensorSpec(shape=(2,), dtype=torch.int8, layout='strided', offset=1, bound=9)"
    )


# ---- On ranks ------------------------------------------------------------------------------------


@pytest.mark.smp(ranks=3)
@given(given=tensors(), into=tensors(as_output=True), root=st.integers(0, 2))
@settings(deadline=None, database=None, max_examples=30)
def test_recipes_travel_to_ranks_and_are_made_there(
    smp: Any, given: TensorSpec, into: TensorSpec, root: int
) -> None:
    rank, size = smp.rank(), smp.size()
    recipes = smp.allgather((given, into), smp.WORLD)
    assert recipes == [(given, into)] * size
    tensor = into.make(rank, size)
    torch.distributed.broadcast(tensor, root)
    assert same(tensor, into.make(root, size))
    assert into.damaged_guards(tensor) == ()
