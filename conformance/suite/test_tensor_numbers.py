"""Properties of reductions of infinities, NaNs and subnormals whose results depend on no order."""

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

#: Names of the numbers that members may have for one element. Sums of small whole numbers are exact in any
#: order, and so are sums of the least subnormals; sums of both would round.
PLAIN = ("0", "1", "-1", "inf", "-inf", "nan")
SMALL = ("0", "least", "-least", "inf", "-inf", "nan")

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")

Columns = Sequence[Sequence[str]]  # the name of each member's number, for each element


def number(name: str, dtype: torch.dtype, factor: int) -> float:
    """The number that a name stands for; a finite whole number is multiplied by ``factor``."""
    if name.endswith("least"):
        least = specials(dtype)[3].double().item()
        return -least if name.startswith("-") else least
    return float(name) * (1 if name in ("inf", "-inf", "nan") else factor)


def expected(op: str, column: Sequence[float]) -> float | None:
    """The reduction of these numbers by IEEE 754, in any order; None if torch leaves the result open.

    torch's documentation does not say whether the MIN of a number and a NaN is the number or the NaN.
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
    """One call of a collective, with the numbers of all members."""

    case: Case
    columns: Columns


def reduce_all(reductions: Sequence[Reduction]) -> None:
    """Run reductions one after the other, and compare this rank's outputs."""
    for each in reductions:
        reduce_one(each.case, each.columns)


def reduce_one(case: Case, columns: Columns) -> None:
    """Run one reduction, in which a member has the same tensor for every member, and compare the output."""
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
    """Each example calls every claimed collective that reduces, with every op of numbers."""
    claims = smp_world.capabilities
    ranks = data.draw(worlds(smp_world), "ranks")
    played, found = [], False
    for name in claimed(smp_world, [name for name, each in COLLECTIVES.items() if each.reduces]):
        for op in OPS:
            among = dtypes_or_none(claims, op, name)
            chosen = [each for each in among if each in MANTISSAS and not each.is_complex]
            found = found or bool(chosen)
            if op == "AVG":  # a bound of 0 means that no average is exact in every order
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
