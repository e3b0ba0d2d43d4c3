"""Properties of collectives that reduce tensors: every claimed reduce op in its claimed dtypes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import get_args

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, reject

from conformance.cases.draws import share
from conformance.cases.tensor_draws import (
    cases,
    dtypes,
    dtypes_or_none,
    every,
    groups,
    kept,
    sides,
    some,
    spread,
    worlds,
)
from conformance.cases.tensor_oracle import WHOLE, Signs, exact_bound
from conformance.cases.tensors import COLLECTIVES, Case, play
from conformance.requirements.catalogue import requirement
from conformance.requirements.registry import Capability
from conformance.session.verdicts import not_supported
from pytest_smp.proxies import SmpWorld
from pytest_smp.ranks.capabilities import REDUCTIONS
from pytest_smp.strategies import same

SIGNS = get_args(Signs)


def check(
    smp_world: SmpWorld,
    data: st.DataObject,
    operation: str,
    ops: Sequence[str],
    among: Sequence[torch.dtype] | None = None,
    most: int = 3,
    **how: object,
) -> None:
    """Draw a case of each of these ops, and run it in some of the dtypes that are claimed for the op.

    Args:
        smp_world: the backend.
        data: Hypothesis's.
        operation: a name of COLLECTIVES.
        ops: names of reduce ops.
        among: the dtypes to choose from; None allows all.
        most: the largest number of dtypes of each op.
        how: further arguments of :func:`~conformance.cases.tensor_draws.cases`.
    """
    claims, played = smp_world.capabilities, []
    ranks = data.draw(worlds(smp_world), "ranks")
    members = data.draw(groups(ranks, claims, "any"), "group")
    for op in kept(claims, ops):
        fitting = [
            dtype
            for dtype in dtypes_or_none(claims, op, operation)
            # a bound of 0 means that no average is exact in every order
            if (among is None or dtype in among)
            and (op != "AVG" or exact_bound(op, dtype, len(members[0]), 1) != 0)
        ]
        if not fitting:
            continue
        case = data.draw(cases(ranks, claims, operation, members=members, op=op, **how), "case")  # type: ignore[arg-type]
        chosen = data.draw(some(fitting, most), "dtypes")
        first = data.draw(st.integers(0, len(SIGNS) - 1), "signs of the first")
        played += [
            dataclasses.replace(each, signs=SIGNS[(first + at) % len(SIGNS)])
            for at, each in enumerate(spread(case, chosen))
        ]
    if not played:
        reject()
    smp_world.run(play, *played, ranks=ranks)


@pytest.mark.parametrize(
    "ops",
    [
        pytest.param(ops.split(), id=id, marks=requirement(f"COLL-ALL-REDUCE-{id}"))
        for id, ops in (
            ("SUM", "SUM"),
            ("PRODUCT", "PRODUCT"),
            ("MIN-MAX", "MIN MAX"),
            ("BITS", "BAND BOR BXOR"),
            ("AVG", "AVG"),
        )
    ],
)
@given(data=st.data())
@share(0.1)
def test_all_reduce(smp_world: SmpWorld, data: st.DataObject, ops: list[str]) -> None:
    """Each example runs these ops, each in up to eight of its claimed dtypes."""
    check(smp_world, data, "all_reduce", ops, most=8)


@pytest.mark.parametrize(
    ("operation", "stacked"),
    [
        pytest.param(operation, stacked, id=id, marks=requirement(f"COLL-{id}"))
        for id, operation, stacked in (
            ("REDUCE-VALUE", "reduce", False),
            ("REDUCE-SCATTER-VALUE", "reduce_scatter", False),
            ("REDUCE-SCATTER-SINGLE-CAT", "reduce_scatter_single", False),
            ("REDUCE-SCATTER-SINGLE-STACK", "reduce_scatter_single", True),
        )
    ],
)
@given(data=st.data())
@share(0.1)
def test_every_op(smp_world: SmpWorld, data: st.DataObject, operation: str, stacked: bool) -> None:
    """Each example runs every claimed op."""
    check(smp_world, data, operation, list(REDUCTIONS), stacked=stacked)


@requirement("COLL-OP-DEFAULT")
@given(data=st.data())
@share(0.1)
def test_without_an_op_it_is_a_sum(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example calls every claimed collective that reduces."""
    reducing = [name for name, each in COLLECTIVES.items() if each.reduces]
    ranks = data.draw(worlds(smp_world), "ranks")
    played = data.draw(every(ranks, smp_world, reducing, most=3, op=""), "cases")
    smp_world.run(play, *played, ranks=ranks)


@requirement("COLL-ALL-REDUCE-WRAP")
@given(data=st.data())
@share(0.2)
def test_integers_wrap_around(smp_world: SmpWorld, data: st.DataObject) -> None:
    claims, ops = smp_world.capabilities, ("SUM", "PRODUCT")
    if not any(WHOLE.intersection(dtypes_or_none(claims, op, "all_reduce")) for op in ops):
        not_supported("the backend claims no integers for SUM or PRODUCT")
    check(smp_world, data, "all_reduce", ops, list(WHOLE), most=8, wide=True)


@requirement("COLL-ALL-REDUCE-BOOL")
@given(data=st.data())
@share(0.2)
def test_sums_and_products_of_bool(smp_world: SmpWorld, data: st.DataObject) -> None:
    claims = smp_world.capabilities
    moved = "bool" in claims.moves(Capability.ALL_REDUCE)
    ops = [op for op in ("SUM", "PRODUCT") if moved and "bool" in claims.reductions.get(op, ())]
    if not ops:
        not_supported("the backend claims neither SUM nor PRODUCT of bool")
    for op in ops:
        # From three elements on, some element is True on all members.
        shape = sides(1, 3).filter(lambda shape: math.prod(shape) > 2)
        check(smp_world, data, "all_reduce", [op], [torch.bool], shape=shape, bits=True)


def average_large(ranks: int) -> None:
    """Average numbers near the largest of float16, and check that the result lies between them."""
    ulp = 32  # of float16 from 2**15 on
    least, most = 60000, 60000 + ulp * (ranks - 1)
    tensor = torch.arange(least, most + 1, ulp, dtype=torch.float16)
    tensor = tensor.roll(dist.get_rank())
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    # In float16 each of ranks - 1 additions errs by half an ulp at most, all divisions together by one ulp,
    # and a rounded reciprocal by another. For two ranks divisions are exact.
    slack = ulp * ranks
    for average in tensor.tolist():
        assert least - slack <= average <= most + slack, (
            f"rank {dist.get_rank()}: an average of numbers from {least} to {most} is {average}"
        )


@requirement("COLL-ALL-REDUCE-AVG-HALF")
@given(data=st.data())
@share(0.1)
def test_averages_do_not_overflow(smp_world: SmpWorld, data: st.DataObject) -> None:
    """The tolerance is float16's rounding, because no document says in which precision numbers are summed."""
    claims = smp_world.capabilities
    reduced = claims.moves(Capability.ALL_REDUCE) & claims.reductions.get("AVG", frozenset())
    if "float16" not in reduced:
        not_supported("the backend claims no AVG of float16")
    ranks = data.draw(worlds(smp_world), "ranks")
    smp_world.run(average_large, ranks, ranks=ranks)


def reduce_any(case: Case, seed: int) -> torch.Tensor:
    """All-reduce numbers that no order sums exactly; return the bytes of this rank's result."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    count = case.spec(("contiguous",), 0, case.shape).numel
    numbers = torch.randn(count, generator=generator, dtype=torch.float64)
    numbers *= 10 ** (4 * torch.rand(count, generator=generator, dtype=torch.float64) - 2)
    tensor = numbers.to(case.dtype).reshape(case.shape)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, case.op))
    # Bytes, because plain pickle can read tensors of uint8 on every backend.
    return tensor.reshape(-1).view(torch.uint8)


@requirement("COLL-ALL-REDUCE-IDENTICAL")
@given(data=st.data(), seed=st.integers(0, 2**32))
@share(0.3)
def test_all_ranks_hold_the_same_bits(smp_world: SmpWorld, data: st.DataObject, seed: int) -> None:
    claims = smp_world.capabilities
    op = data.draw(st.sampled_from(kept(claims, ["SUM", "PRODUCT", "AVG"])), "op")
    floats = [dtype for dtype in dtypes(claims, op, "all_reduce") if dtype.is_floating_point]
    if not floats:
        not_supported(f"the backend claims no floating-point dtype for {op}")
    ranks = data.draw(worlds(smp_world), "ranks")
    case = Case(
        "all_reduce",
        tuple(range(ranks)),
        data.draw(st.sampled_from(floats), "dtype"),
        data.draw(sides(1), "shape"),
        op=op,
    )
    first, *others = smp_world.run(reduce_any, case, seed, ranks=ranks)
    for rank, each in enumerate(others, 1):
        assert same(each, first), f"rank {rank} holds other bits than rank 0"
