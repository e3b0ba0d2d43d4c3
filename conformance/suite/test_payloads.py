"""Properties of sent objects: large, nested, with shared parts, with arrays and tensors in them."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import smp_core.torch as smp
from conformance.cases import traffic
from conformance.cases.draws import needs, on_ranks, sizes
from conformance.cases.traffic import few
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import Pair, Record, TensorSpec, same, tensors
from pytest_smp.strategies.numbers import PICKLABLE

WORLD_RANK = smp.RankType.WORLD_RANK

#: The calls that send an object from one rank to another.
CALLS = ("send", "broadcast", "allgather")


def pass_object(call: str, obj: Any, src: int) -> Any:
    """Send an object by a call from ``src`` to the other ranks; ``send`` reaches only the next rank.

    Returns the received object, or None on ``src`` and on ranks that receive nothing.
    """
    me, dest = smp.rank(), (src + 1) % smp.size()
    if call == "allgather":
        got = smp.allgather(obj if me == src else None, smp.WORLD)
        return got[src] if me != src else None
    if me == src:
        smp.broadcast(obj, smp.WORLD) if call == "broadcast" else smp.send(obj, dest, WORLD_RANK)
    elif call == "broadcast" or me == dest:
        return smp.recv_from(src, WORLD_RANK)
    return None


def receivers(call: str, src: int, ranks: int) -> list[int]:
    """The ranks that receive the object of ``pass_object``."""
    return [(src + 1) % ranks] if call == "send" else [r for r in range(ranks) if r != src]


# ---- Sizes ---------------------------------------------------------------------------------------


class Size(enum.Enum):
    """Kinds of objects that are large in different ways."""

    BYTES = enum.auto()
    TEXT = enum.auto()
    LIST = enum.auto()
    DICT = enum.auto()
    TENSOR = enum.auto()
    ARRAY = enum.auto()


def of_size(kind: Size, size: int) -> Any:
    """Make an object of a kind with so many parts, in which no two neighbours are equal."""
    match kind:
        case Size.BYTES:
            # 251 is a prime, so a transport that repeats or loses a block of 2**n bytes changes the value.
            return (bytes(range(251)) * (size // 251 + 1))[:size]
        case Size.TEXT:
            return ("".join(map(chr, range(0x100, 0x100 + 251))) * (size // 251 + 1))[:size]
        case Size.LIST:
            return list(range(size))
        case Size.DICT:
            return {str(number): number for number in range(size)}
        case Size.TENSOR:
            return torch.arange(size, dtype=torch.int64)
        case Size.ARRAY:
            return np.arange(size, dtype=np.int32)


def pass_sizes(call: str, objects: list[tuple[Size, int]], src: int) -> list[bool]:
    """Send objects to the other ranks one after the other; return which of them arrived whole."""
    whole = []
    for kind, size in objects:
        made = of_size(kind, size)
        got = pass_object(call, made, src)
        if smp.rank() in receivers(call, src, smp.size()):
            # `same` is slow on containers of many parts; here == suffices, all parts having one type.
            slow = isinstance(made, torch.Tensor | np.ndarray)
            whole.append(same(got, made) if slow else type(got) is type(made) and got == made)
    return whole


def check_sizes(
    smp_world: SmpWorld, data: st.DataObject, call: str, objects: list[tuple[Size, int]]
) -> None:
    """Check that all objects arrive whole and in their order."""
    needs(smp_world, 2)
    ranks = data.draw(st.integers(2, min(3, smp_world.ranks)), "ranks")
    src = data.draw(st.integers(0, ranks - 1), "src")
    for rank, whole in enumerate(smp_world.run(pass_sizes, call, objects, src, ranks=ranks)):
        assert whole == [True] * (len(objects) if rank in receivers(call, src, ranks) else 0)


#: A size for each kind, above a million bytes or a hundred thousand parts.
LARGE = {
    Size.BYTES: 2**20 + 1,
    Size.TEXT: 10**6,
    Size.LIST: 10**5,
    Size.DICT: 10**5,
    Size.TENSOR: 2**17 + 1,
    Size.ARRAY: 2**18 + 1,
}


@requirement("COMM-PAYLOAD-LARGE")
@pytest.mark.parametrize("kind", LARGE, ids=lambda kind: kind.name.lower())
@given(data=st.data(), call=st.sampled_from(CALLS))
@traffic.once
def test_large_objects(smp_world: SmpWorld, data: st.DataObject, kind: Size, call: str) -> None:
    check_sizes(smp_world, data, call, [(kind, LARGE[kind])])


#: Bytes at which a header or a buffer may end: 8 and 16 bits, a page, a packet, common buffers.
EDGES = (2**8, 2**10, 1500, 2**12, 2**13, 2**15, 2**16, 2**17)


@requirement("COMM-PAYLOAD-EDGE")
@given(
    data=st.data(),
    call=st.sampled_from(CALLS),
    edges=st.lists(st.sampled_from(EDGES), min_size=1, max_size=2),
    kind=st.sampled_from([Size.BYTES, Size.TEXT]),
)
@few
def test_sizes_around_powers_of_two(
    smp_world: SmpWorld, data: st.DataObject, call: str, edges: list[int], kind: Size
) -> None:
    # A pickle has a few bytes more than its object, and an edge may apply to either, so sizes vary.
    near = st.integers(-40, 1)
    objects = [(kind, edge + data.draw(near, "near")) for edge in edges]
    check_sizes(smp_world, data, call, objects)


@requirement("COMM-PAYLOAD-SIZES")
@given(
    data=st.data(),
    call=st.sampled_from(CALLS),
    objects=st.lists(
        st.tuples(st.sampled_from(Size), st.sampled_from([0, 1, 2, 7, 100, 3000])),
        min_size=2,
        max_size=6,
    ),
)
@few
def test_sizes_that_change(
    smp_world: SmpWorld, data: st.DataObject, call: str, objects: list[tuple[Size, int]]
) -> None:
    check_sizes(smp_world, data, call, objects)


@requirement("COMM-PAYLOAD-MANY")
@given(data=st.data(), call=st.sampled_from(CALLS), kind=st.sampled_from([Size.LIST, Size.TEXT]))
@traffic.once
def test_many_small_objects(
    smp_world: SmpWorld, data: st.DataObject, call: str, kind: Size
) -> None:
    check_sizes(smp_world, data, call, [(kind, number % 20) for number in range(300)])


def nest(levels: int, kind: str) -> Any:
    """Make a container of so many nested levels, each of which holds its number."""
    made: Any = "the bottom"
    for level in range(levels):
        match kind:
            case "list":
                made = [level, made]
            case "tuple":
                made = (made, level)
            case "dict":
                made = {level: made}
            case "record":
                made = Record(str(level), made)
            case "pair":
                made = Pair(made, level)
    return made


def pass_nest(call: str, levels: int, kind: str, src: int) -> bool:
    """Send a nested container; return whether it arrived whole, or True on a rank that receives none."""
    got = pass_object(call, nest(levels, kind), src)
    return smp.rank() not in receivers(call, src, smp.size()) or same(got, nest(levels, kind))


@requirement("COMM-PAYLOAD-NESTED")
@given(
    data=st.data(),
    call=st.sampled_from(CALLS),
    levels=st.integers(1, 100) | st.just(100),
    kind=st.sampled_from(["list", "tuple", "dict", "record", "pair"]),
)
@few
def test_deep_nests(
    smp_world: SmpWorld, data: st.DataObject, call: str, levels: int, kind: str
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src = data.draw(st.integers(0, ranks - 1), "src")
    assert all(smp_world.run(pass_nest, call, levels, kind, src, ranks=ranks))


# ---- Identity ------------------------------------------------------------------------------------


def pass_shared(call: str, src: int, padding: int) -> None:
    """Send an object with shared parts, equal parts and cycles, and check that the copy has the same."""
    part: dict[str, Any] = {"list": [1]}
    cycle: list[Any] = ["cycle"]
    cycle.append(cycle)
    node = Record("node", None)
    node.value = [node, part]
    tensor = torch.arange(3)
    obj = [part, part, {"list": [1]}, cycle, node, tensor, tensor, tensor.clone(), bytes(padding)]
    got = pass_object(call, obj, src)
    if smp.rank() not in receivers(call, src, smp.size()):
        return
    one, again, equal, around, met, first, second, other, _ = got
    assert one is again
    assert equal == one
    assert equal is not one
    assert equal["list"] is not one["list"]
    assert around[1] is around
    assert met.value[0] is met
    assert met.value[1] is one
    assert first is second
    assert other is not first
    first[0] = 9
    assert second.tolist() == [9, 1, 2]
    assert other.tolist() == [0, 1, 2]


@requirement("COMM-PAYLOAD-SHARED")
@given(data=st.data(), call=st.sampled_from(CALLS), padding=traffic.paddings)
@few
def test_parts_that_are_one(
    smp_world: SmpWorld, data: st.DataObject, call: str, padding: int
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src = data.draw(st.integers(0, ranks - 1), "src")
    smp_world.run(pass_shared, call, src, padding, ranks=ranks)


def pass_equal(call: str, src: int, again: bool, content: list[Any], padding: int) -> None:
    """Send two equal objects, or one object twice if ``again``, and check that the copies are two."""
    first = [*content, bytes(padding)]
    second = first if again else [*content, bytes(padding)]
    got = [pass_object(call, first, src), pass_object(call, second, src)]
    if smp.rank() in receivers(call, src, smp.size()):
        assert same(got, [[*content, bytes(padding)]] * 2)
        assert got[0] is not got[1]
        got[0].append("more")
        assert same(got[1], [*content, bytes(padding)])


@requirement("COMM-PAYLOAD-DISTINCT")
@given(
    data=st.data(),
    call=st.sampled_from(CALLS),
    again=st.booleans(),
    content=st.sampled_from([0, 1, True, 1.0, "", b"", (), None]),
    padding=traffic.paddings,
)
@few
def test_equal_objects_are_two(
    smp_world: SmpWorld, data: st.DataObject, call: str, again: bool, content: Any, padding: int
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src = data.draw(st.integers(0, ranks - 1), "src")
    smp_world.run(pass_equal, call, src, again, [content], padding, ranks=ranks)


# ---- Types ---------------------------------------------------------------------------------------


class Colour(enum.Enum):
    """An enum to send."""

    RED = "red"
    BLUE = "blue"


class Slotted:
    """A class to send, without an instance dict and with its own ``__getstate__``."""

    __slots__ = ("_number", "built")

    def __init__(self, number: int) -> None:
        self._number = number
        self.built = "by init"

    def __getstate__(self) -> int:
        return self._number

    def __setstate__(self, number: int) -> None:
        self._number = number
        self.built = "from state"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and self._number == other._number

    def __hash__(self) -> int:
        return hash(self._number)


class Oops(Exception):
    """An exception to send, with arguments and an attribute."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Oops) and (self.args, vars(self)) == (other.args, vars(other))

    def __hash__(self) -> int:
        return hash(self.args)


def _oops() -> Oops:
    error = Oops("what", 3)
    error.where = "here"  # type: ignore[attr-defined]
    return error


#: Values of many types, whose copies are equal only if the content arrived.
VALUES: tuple[Any, ...] = (
    *(Colour.BLUE, smp.CommGroup.DP_GROUP, Slotted(3), Record("name", [1]), Pair(1, "two")),
    *(_oops(), Colour, Record, len, torch.float16, torch.Size([2, 3])),
    *(datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC), datetime.timedelta(days=1)),
    *(decimal.Decimal("0.10"), fractions.Fraction(1, 3), uuid.UUID(int=7)),
    *(pathlib.PurePosixPath("a/b"), types.SimpleNamespace(a=1), bytearray(b"ab"), slice(1, 2)),
    *(OrderedDict(a=1, b=2), Counter("aab"), deque([1, 2], maxlen=3), range(3, 9, 2)),
    *(defaultdict(list, a=[1]), 2**200, complex(1, -0.0), float("inf")),
)


def type_and_text(value: Any) -> tuple[type, str]:
    """The type and the repr of one of VALUES: they show a deque's maxlen, and 0.10 beside 0.1, unlike ==."""
    return type(value), "" if isinstance(value, Slotted) else repr(value)


def pass_values(call: str, at: list[int], src: int) -> None:
    """Send some of VALUES, the first alone and then all within containers, and check the copies."""
    sent = [VALUES[index] for index in at]
    for obj in (sent[0], {"nest": sent}):
        got = pass_object(call, obj, src)
        if smp.rank() not in receivers(call, src, smp.size()):
            continue
        values = got["nest"] if obj is not sent[0] else [got]
        for value, expected in zip(values, sent, strict=False):
            assert value == expected
            assert type_and_text(value) == type_and_text(expected)
            if isinstance(value, Slotted):
                assert value.built == "from state"
            if isinstance(value, enum.Enum | type | types.BuiltinFunctionType):
                assert value is expected


@requirement("COMM-PAYLOAD-CLASSES")
@given(
    data=st.data(),
    call=st.sampled_from(CALLS),
    at=st.lists(st.integers(0, len(VALUES) - 1), min_size=1, max_size=4),
)
@few
def test_values_of_many_types(
    smp_world: SmpWorld, data: st.DataObject, call: str, at: list[int]
) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src = data.draw(st.integers(0, ranks - 1), "src")
    smp_world.run(pass_values, call, at, src, ranks=ranks)


def arrays() -> dict[str, Any]:
    """Arrays and scalars of numpy, by the feature that each one has."""
    base = np.arange(24, dtype=np.float64).reshape(4, 6)
    structured = np.array([(1, 2.5), (3, -0.0)], dtype=[("a", "i4"), ("b", "f8")])
    return {
        "fortran": np.asfortranarray(base),
        "strided": base[::2, 1::2],
        "reversed": base[::-1, ::-1],
        "transposed": base.T,
        "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
        "0-d": np.array(1.5),
        "empty": np.zeros((2, 0, 3), dtype=np.int8),
        "structured": structured,
        "big-endian": np.array([1, 2], dtype=">i2"),
        "text": np.array(["a", "\u00fc\u00fc"]),
        "objects": np.array([1, "two", None], dtype=object),
        "dates": np.array(["2024-02-29"], dtype="datetime64[D]"),
        "bool": np.array([True, False]),
        "half": np.array([1.5, -0.0], dtype=np.float16),
        "unsigned": np.array([2**64 - 1], dtype=np.uint64),
        "complex": np.array([1 - 2j], dtype=np.complex64),
        "scalar": np.float32(1.5),
        "nan": np.array([np.nan, -np.inf]),
    }


def pass_arrays(call: str, names: list[str], src: int) -> None:
    """Send arrays in one object, and check that each keeps type, dtype, shape and elements."""
    sent = arrays()
    got = pass_object(call, {name: sent[name] for name in names}, src)
    if smp.rank() not in receivers(call, src, smp.size()):
        return
    assert list(got) == names
    for name, array in got.items():
        expected = sent[name]
        assert type(array) is type(expected)
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape
        if name == "objects":
            assert same(array.tolist(), expected.tolist())
        else:
            assert array.tobytes() == expected.tobytes()


@requirement("COMM-PAYLOAD-ARRAYS")
@given(
    data=st.data(),
    call=st.sampled_from(CALLS),
    names=st.lists(st.sampled_from(sorted(arrays())), min_size=1, max_size=4, unique=True),
)
@few
def test_arrays(smp_world: SmpWorld, data: st.DataObject, call: str, names: list[str]) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src = data.draw(st.integers(0, ranks - 1), "src")
    smp_world.run(pass_arrays, call, names, src, ranks=ranks)


def made(spec: TensorSpec, kind: str, src: int, world: int) -> torch.Tensor:
    """Make the tensor of a recipe: plain, as a leaf that requires a gradient, or as a parameter."""
    tensor = spec.make(src, world)
    if kind == "leaf":
        return tensor.requires_grad_()
    return torch.nn.Parameter(tensor) if kind == "parameter" else tensor


def pass_tensors(call: str, items: list[tuple[TensorSpec, str]], src: int) -> None:
    """Send tensors within containers, and check values, types and that each tensor is a leaf."""
    sent = [made(spec, kind, src, smp.size()) for spec, kind in items]
    got = pass_object(call, {"nest": (sent,)}, src)
    if smp.rank() in receivers(call, src, smp.size()):
        assert same(got, {"nest": (sent,)})
        assert [type(tensor) for tensor in got["nest"][0]] == [type(tensor) for tensor in sent]
        assert all(tensor.is_leaf for tensor in got["nest"][0])


@st.composite
def _items(draw: st.DrawFn, dtypes: list[torch.dtype]) -> tuple[TensorSpec, str]:
    spec = draw(tensors(dtype=st.sampled_from(dtypes)))
    wants = spec.dtype.is_floating_point and spec.layout != "expanded"
    return spec, draw(st.sampled_from(["plain", "leaf", "parameter"] if wants else ["plain"]))


def check_tensors(
    smp_world: SmpWorld, data: st.DataObject, call: str, dtypes: list[torch.dtype]
) -> None:
    """Draw tensors of these dtypes and check that they arrive; without dtypes, check nothing."""
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src = data.draw(st.integers(0, ranks - 1), "src")
    if dtypes:
        items = data.draw(st.lists(_items(dtypes), min_size=1, max_size=3), "items")
        smp_world.run(pass_tensors, call, items, src, ranks=ranks)


@requirement("COMM-PAYLOAD-TENSORS")
@given(data=st.data(), call=st.sampled_from(CALLS))
@on_ranks
def test_tensors(smp_world: SmpWorld, data: st.DataObject, call: str) -> None:
    check_tensors(smp_world, data, call, list(PICKLABLE))


@requirement("COMM-PAYLOAD-DTYPES")
@given(data=st.data(), call=st.sampled_from(CALLS))
@few
def test_tensors_that_pickle_cannot_read(
    smp_world: SmpWorld, data: st.DataObject, call: str
) -> None:
    claimed = traffic.claimed_dtypes(smp_world)
    check_tensors(smp_world, data, call, [dtype for dtype in claimed if dtype not in PICKLABLE])


def pass_module(call: str, src: int) -> None:
    """Send a module with a shared weight, a frozen parameter and a buffer, in evaluation mode; check the copy."""
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    tied["b"].bias.requires_grad_(False)
    tied.register_buffer("count", torch.tensor(3))
    tied.eval()
    sent: dict[str, torch.Tensor] = tied.state_dict()
    numbers = {name: tensor.tolist() for name, tensor in sent.items()}  # each rank draws its own
    obj = {"module": tied, "weight": tied["a"].weight, "state": sent, "numbers": numbers}
    got = pass_object(call, obj, src)
    if smp.rank() not in receivers(call, src, smp.size()):
        return
    module = got["module"]
    assert type(module) is torch.nn.ModuleDict
    assert not module["a"].training
    assert module["b"].weight is module["a"].weight
    assert got["weight"] is module["a"].weight
    assert isinstance(module["a"].weight, torch.nn.Parameter)
    assert [each.requires_grad for each in module.parameters()] == [True, True, False]
    for state in (module.state_dict(), got["state"]):
        assert {name: tensor.tolist() for name, tensor in state.items()} == got["numbers"]


@requirement("COMM-PAYLOAD-MODULES")
@given(data=st.data(), call=st.sampled_from(CALLS))
@few
def test_modules(smp_world: SmpWorld, data: st.DataObject, call: str) -> None:
    ranks = data.draw(sizes(smp_world, least=2), "ranks")
    src = data.draw(st.integers(0, ranks - 1), "src")
    smp_world.run(pass_module, call, src, ranks=ranks)
