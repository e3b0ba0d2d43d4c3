"""Properties of 16-bit training: masters, sums, clipping, arguments and results, with one rounding each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor, nn

from conformance.cases.draws import needs
from conformance.cases.precision import PrecisionRun
from conformance.cases.precision_runs import alike, check, layouts, runs
from conformance.cases.training import cases, results, sharded_cases, smp, trials, with_engine
from conformance.cases.training import check as check_case
from conformance.engines.capabilities import EngineCapability
from conformance.engines.names import find_engine
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import Model, Overflows, blocks
from pytest_smp.strategies.training_models import Block
from pytest_smp.strategies.training_replay import replayed
from pytest_smp.strategies.training_script import compare

Data = st.DataObject

#: The magnitude up to which a dtype holds all whole numbers.
SPANS = {"float16": 2**11, "bfloat16": 2**8}


@st.composite
def narrow(draw: st.DrawFn, /, smp_world: SmpWorld, engine: str, **fixed: Any) -> PrecisionRun:
    """Draw a run with finite gradients in a 16-bit dtype that the engine claims."""
    dtypes = ["float16"]
    if EngineCapability.BF16 in find_engine(engine).capabilities and smp_world.ranks > 1:
        dtypes.append("bfloat16")
    dtype = draw(st.sampled_from(dtypes))
    sharded = True if dtype == "bfloat16" else None  # AWS Sharded Data Parallelism (BF16 training)
    drawn = runs(
        layouts(smp_world, engine, sharded=sharded, split=False),
        kinds=("absent",),
        scaling=(),
        dtype=dtype,
        span=SPANS[dtype],
        **fixed,
    )
    return draw(drawn)


@requirement("PREC-MASTERS")
@given(data=st.data())
@trials(5)
def test_parameters_are_rounded_masters(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    run = data.draw(narrow(smp_world, smp_engine, least=4), "run")
    check(smp_world, smp_engine, run, "masters", "state", "parameters")


@requirement("PREC-SUMS")
@given(data=st.data(), passes=st.integers(1, 2))
@trials(4)
def test_sums_are_float32(smp_world: SmpWorld, smp_engine: str, data: Data, passes: int) -> None:
    fixed: dict[str, Any] = {"microbatches": 2, "passes": passes, "optimizer": "sgd"}
    run = data.draw(narrow(smp_world, smp_engine, **fixed), "run")
    check(smp_world, smp_engine, run, "masters", "parameters")


@requirement("PREC-CLIP-NORM")
@given(data=st.data(), norm_type=st.sampled_from([2.0, math.inf]))
@trials(5)
def test_the_norm_is_that_of_the_whole_model(
    smp_world: SmpWorld, smp_engine: str, data: Data, norm_type: float
) -> None:
    layout = layouts(smp_world, smp_engine, sharded=False)
    drawn = runs(layout, max_norm=1e9, norm_type=norm_type, least=3)
    check(smp_world, smp_engine, data.draw(drawn, "run"), "norm", "overflow", "parameters")


@requirement("PREC-CLIP")
@given(data=st.data(), max_norm=st.sampled_from([0.5, 3.0, 12.0]))
@trials(4)
def test_gradients_are_clipped_once(
    smp_world: SmpWorld, smp_engine: str, data: Data, max_norm: float
) -> None:
    layout = layouts(smp_world, smp_engine, sharded=False, split=False)
    drawn = runs(layout, max_norm=max_norm, least=3, optimizer="momentum")
    check(smp_world, smp_engine, data.draw(drawn, "run"), "norm", "masters", "parameters")


@requirement("PREC-SHARDED-CLIP")
@given(data=st.data(), clip=st.sampled_from([0.5, 3.0, 12.0]))
@trials(4)
def test_shards_are_clipped_by_the_norm_of_all(
    smp_world: SmpWorld, smp_engine: str, data: Data, clip: float
) -> None:
    layout = layouts(smp_world, smp_engine, least=2, sharded=True)
    drawn = runs(layout, clip=clip, least=3, optimizer="momentum")
    check(smp_world, smp_engine, data.draw(drawn, "run"), "overflow", "masters", "parameters")


# ---- Any model -----------------------------------------------------------------------------------


@requirement("PREC-EXACT")
@given(data=st.data(), optimizer=st.sampled_from(["sgd", "momentum", "adam"]))
@trials(5)
def test_pipelines_and_replicas_equal_one_process(
    smp_world: SmpWorld, smp_engine: str, data: Data, optimizer: str
) -> None:
    small = st.integers(1, 2)
    drawn = st.builds(
        Model, body=blocks(1), inputs=small, width=small, outputs=small, frozen=st.booleans()
    )
    fixed: dict[str, Any] = {"dtype": "float16", "optimizer": optimizer, "rows": 1, "length": 1}
    model = data.draw(drawn, "model")
    case = data.draw(cases(smp_world, smp_engine, automatic=False, model=model, **fixed), "case")
    check_case(smp_world, smp_engine, case)


@requirement("PREC-REPLAYED")
@given(data=st.data(), optimizer=st.sampled_from(["momentum", "adam"]))
@trials(3)
def test_real_values_in_pipelines_are_those_of_the_published_order(
    smp_world: SmpWorld, smp_engine: str, data: Data, optimizer: str
) -> None:
    drawn = cases(smp_world, smp_engine, real=True, dtype="float16", optimizer=optimizer)
    case = data.draw(drawn, "case")
    compare(replayed(case), results(smp_world, smp_engine, case), what="the published order")


@requirement("PREC-REPLAYED")
@given(data=st.data())
@trials(3)
def test_real_values_in_shards_are_those_of_the_published_order(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    claims = find_engine(smp_engine).capabilities
    dtypes = ("bfloat16", "float16") if EngineCapability.BF16 in claims else ("float16",)
    drawn = sharded_cases(smp_world, smp_engine, least=2, sharding=(2, 4), real=True, dtypes=dtypes)
    case = data.draw(drawn, "case")
    compare(replayed(case), results(smp_world, smp_engine, case), what="the published order")


#: A model whose gradients overflow in float16 where the data have one of these seeds.
LARGE = Model(Block("chain", (Block("linear"),) * 4), inputs=2, width=4)
OVERFLOWING = (43, 67, 82, 84, 177, 183)


@requirement("PREC-REPLAYED")
@given(data=st.data(), seed=st.sampled_from(OVERFLOWING))
@trials(2)
def test_an_infinite_norm_clips_nothing(
    smp_world: SmpWorld, smp_engine: str, data: Data, seed: int
) -> None:
    fixed: dict[str, Any] = {
        "model": LARGE,
        "dtypes": ("float16",),
        "optimizer": "sgd",
        "windows": 1,
    }
    fixed |= {"rows": 1, "length": 1, "microbatches": 1, "passes": 1, "loss": "square"}
    if EngineCapability.CLIPPING in find_engine(smp_engine).capabilities:
        fixed["clip"] = 0.5
    drawn = sharded_cases(smp_world, smp_engine, least=2, most=2, sharding=(2,), real=True, **fixed)
    case = dataclasses.replace(data.draw(drawn, "case"), seed=seed)
    expected = replayed(case)
    found = [each for all_ in expected.gradients for each in all_.values() if each is not None]
    assert any(each.isinf().any() for each in found), "the case has no overflow"
    compare(expected, results(smp_world, smp_engine, case), what="the published order")


# ---- What goes in, and what comes out ------------------------------------------------------------

#: Values between two neighbours in 16 bits: the middle, and just above and below. A second rounding, or a
#: rounding towards zero, gives another result there. At the end extreme values are added.
_BETWEEN = [
    sign * each
    for sign in (1, -1)
    for bits in (10, 7)  # of float16, of bfloat16
    for middle in (1 + 2.0 ** -(bits + 1), 1 + 3 * 2.0 ** -(bits + 1))
    for each in (middle, middle + 2.0**-20, middle - 2.0**-20)
] + [0.0, 2.0**-25, 3 * 2.0**-25, 65519.0, 65520.0, 1e-30, math.inf, -math.inf, math.nan]

_floats = st.lists(st.sampled_from(_BETWEEN), min_size=0, max_size=4)
_LEAVES = st.one_of(
    _floats.map(torch.tensor),
    _floats.map(torch.tensor),
    _floats.map(lambda values: torch.tensor(values, dtype=torch.float64)),
    st.lists(st.integers(-(2**40), 2**40), max_size=3).map(
        lambda values: torch.tensor(values, dtype=torch.int64)
    ),
    st.sampled_from([torch.tensor([True, False]), None, "word", 0.1, 7]),
)
_NESTS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def converted(nest: Any, given: tuple[torch.dtype, ...], to: torch.dtype) -> Any:
    """Copy a tensor tree, with tensors of the given dtypes converted to another."""
    if isinstance(nest, Tensor):
        return nest.to(to) if nest.dtype in given else nest
    if isinstance(nest, dict):
        return {key: converted(value, given, to) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)(converted(value, given, to) for value in nest)
    return nest


def equal(one: Any, other: Any) -> bool:
    """Return whether two tensor trees are equal in types, values, dtypes and the signs of zeros."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and alike(one, other) and bool((one.signbit() == other.signbit()).all())
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


class Echo(nn.Module):
    """A module that returns its argument and remembers it."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(2))
        self.seen: list[Any] = []

    def forward(self, nest: Any, *, more: Any) -> Any:
        self.seen.append((nest, more))
        return {"weight": self.weight * self.scale, "nest": (nest, more)}


def echoed(nest: Any, more: Any) -> list[Any]:
    """Run a step with an :class:`Echo`.

    Returns one tuple of the module's arguments, the model's result and the dtype of the result's weight, or
    nothing on ranks that do not run the body.
    """
    module = Echo()
    model, found = smp.DistributedModel(module), []
    smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(model: Any, x: Tensor) -> Tensor:
        out = model(nest, more=more)
        found.append(out)
        loss: Tensor = out["weight"].sum()
        model.backward(loss)
        return loss

    body(model, torch.zeros(1))
    return [(module.seen[-1], found[-1]["nest"], found[-1]["weight"].dtype)] if found else []


@requirement("PREC-NESTS")
@given(data=st.data(), nest=_NESTS)
@trials(8)
def test_tensors_are_converted_at_any_depth_once(
    smp_world: SmpWorld, smp_engine: str, data: Data, nest: Any
) -> None:
    values = torch.tensor(_BETWEEN)
    more = {"list": [values, 1], "tuple": ((values,), "word"), "dict": {1: values}}
    run = data.draw(narrow(smp_world, smp_engine, passes=1, microbatches=1, least=1, most=1))
    half: torch.dtype = getattr(torch, run.dtype)
    run = dataclasses.replace(run, history=Overflows(), microbatches=1)
    told = smp_world.run(
        with_engine, smp_engine, echoed, nest, more, ranks=run.pp * run.dp, config=run.config
    )
    ran = [each for rank in told for each in rank]
    assert len(ran) >= run.dp
    wanted = converted((nest, more), (torch.float32,), half)
    for inside, outside, dtype in ran:
        assert equal(inside, wanted), f"inside is {inside}, not {wanted}"
        back = converted(wanted, (half,), torch.float32)
        assert equal(outside, back), f"outside is {outside}, not {back}"
        assert dtype is torch.float32


# ---- What is refused -----------------------------------------------------------------------------


def wrapped(dtype: torch.dtype, deep: bool) -> bool:
    """Return whether wrapping a model with a parameter of this dtype raises TypeError."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    linear: Any = module[1][0] if deep else module[0]  # type: ignore[index]
    linear.bias = nn.Parameter(linear.bias.detach().to(dtype))
    try:
        model = smp.DistributedModel(module)
        smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    except TypeError:
        return True
    return False


@requirement("PREC-DTYPES")
@given(
    dtype=st.sampled_from([torch.float64, torch.complex64, torch.bfloat16]),
    deep=st.booleans(),
    ranks=st.integers(1, 2),
)
@trials(4)
def test_other_dtypes_are_refused(
    smp_world: SmpWorld, smp_engine: str, dtype: torch.dtype, deep: bool, ranks: int
) -> None:
    needs(smp_world, ranks)
    config = {"fp16": True, "ddp": ranks > 1}
    told = smp_world.run(with_engine, smp_engine, wrapped, dtype, deep, ranks=ranks, config=config)
    assert told == [True] * ranks
