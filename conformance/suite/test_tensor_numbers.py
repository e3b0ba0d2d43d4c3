"""Reductions of infinities, NaNs and subnormals, as far as the order of the members does not matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from hypothesis import given

from conformance.cases.draws import share
from conformance.cases.tensor_draws import claimed, dtypes_or_none, worlds
from conformance.cases.tensor_oracle import MANTISSAS, exact_bound, specials
from conformance.cases.tensors import COLLECTIVES, Case, keywords, place
from conformance.requirements.catalogue import requirement
from conformance.session.verdicts import not_supported
from pytest_smp.proxies import SmpWorld

#: What a member may bring, in the column of one element. Sums of small whole numbers are exact in any
#: order, and so are those of the least subnormals; sums of both would not be.
PLAIN = ("0", "1", "-1", "inf", "-inf", "nan")
SMALL = ("0", "least", "-least", "inf", "-inf", "nan")

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")

Columns = Sequence[Sequence[str]]  # for each element, what each member brings


def number(name: str, dtype: torch.dtype, factor: int) -> float:
    """The number of a name; a whole one times ``factor``."""
    if name.endswith("least"):
        least = specials(dtype)[3].double().item()
        return -least if name.startswith("-") else least
    return float(name) * (1 if name in ("inf", "-inf", "nan") else factor)


def expected(op: str, column: Sequence[float]) -> float | None:
    """What IEEE 754 says of these numbers, reduced in any order; None where torch leaves it open.

    torch does not say whether the least of a number and a NaN is the number or the NaN.
    """
    if op in ("MIN", "MAX"):
        nans = sum(map(math.isnan, column))
        if nans:
            return math.nan if nans == len(column) else None
        return (min if op == "MIN" else max)(column)
    if op == "PRODUCT":
        return math.prod(column)
    return sum(column) / (len(column) if op == "AVG" else 1)


class Reduction(NamedTuple):
    """One call, and what everybody brings to it."""

    case: Case
    columns: Columns


def reduce_all(reductions: Sequence[Reduction]) -> None:
    """Carry reductions out, and compare what this rank got."""
    for each in reductions:
        reduce_one(each.case, each.columns)


def reduce_one(case: Case, columns: Columns) -> None:
    """Everybody brings the same for each member."""
    me, collective, dtype = dist.get_rank(), case.collective, case.dtype
    numbers = [[number(name, dtype, case.factor) for name in column] for column in columns]
    mine = torch.tensor([column[me] for column in numbers], dtype=torch.float64).to(dtype)
    given = [mine]
    if collective.given != "one":
        given = [mine.clone() for _ in range(case.size)]
    if collective.given == "joined":
        given = [torch.cat(given)]
    taken = given if collective.taken == "same" else [torch.zeros_like(mine)]
    collective.call(given, taken, keywords(case, me, None))
    if not case.gets(me):
        return
    for at, (got, column) in enumerate(zip(taken[0].double().tolist(), numbers, strict=True)):
        want = expected(case.op, column)
        right = want is None or got == want or (math.isnan(got) and math.isnan(want))
        assert right, f"{place(case, me)}: element {at}, reduced of {column}, is {got}, not {want}"


@requirement("COLL-SPECIAL-REDUCED")
@given(data=st.data())
@share(0.1)
def test_special_numbers_are_reduced(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example goes through every collective that reduces, by every op of numbers."""
    claims = smp_world.capabilities
    ranks = data.draw(worlds(smp_world), "ranks")
    played, found = [], False
    for name in claimed(smp_world, [name for name, each in COLLECTIVES.items() if each.reduces]):
        for op in OPS:
            among = dtypes_or_none(claims, op, name)
            chosen = [each for each in among if each in MANTISSAS and not each.is_complex]
            found = found or bool(chosen)
            if op == "AVG":  # 0: not exact in any order
                chosen = [each for each in chosen if exact_bound(op, each, ranks, 1) != 0]
                chosen = [each for each in chosen if each is not torch.float8_e5m2]
            if not chosen:
                continue
            dtype = data.draw(st.sampled_from(chosen), f"dtype of {op}")
            palette = PLAIN
            if op in ("SUM", "MIN", "MAX"):
                palette = data.draw(st.sampled_from([PLAIN, SMALL]), "numbers")
            column = st.lists(st.sampled_from(palette), min_size=ranks, max_size=ranks)
            columns = data.draw(st.lists(column, min_size=1, max_size=6), "columns")
            root = data.draw(st.integers(0, ranks - 1), "root") if name == "reduce" else 0
            case = Case(name, tuple(range(ranks)), dtype, (len(columns),), op=op, root=root)
            played.append(Reduction(case, columns))
    if not found:
        not_supported("the backend reduces no floating-point dtype with every special number")
    smp_world.run(reduce_all, played, ranks=ranks)
