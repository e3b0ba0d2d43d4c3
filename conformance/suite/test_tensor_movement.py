"""Properties of collectives that move tensors: every claimed dtype, any group, any sizes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from conformance.cases.draws import share
from conformance.cases.tensor_draws import (
    alternated,
    cases,
    claimed,
    dtypes,
    spread,
    worlds,
)
from conformance.cases.tensor_oracle import MANTISSAS
from conformance.cases.tensors import COLLECTIVES, play
from conformance.requirements.catalogue import requirement
from conformance.session.verdicts import not_supported
from pytest_smp.proxies import SmpWorld


@pytest.mark.parametrize(
    ("operation", "how"),
    [
        pytest.param(operation, how, id=id, marks=requirement(f"COLL-{id}"))
        for id, operation, how in (
            ("BROADCAST-VALUE", "broadcast", {}),
            ("ALL-GATHER-VALUE", "all_gather", {}),
            ("ALL-GATHER-UNEVEN", "all_gather", {"uneven": True}),
            ("ALL-GATHER-SINGLE-CAT", "all_gather_single", {"stacked": False}),
            ("ALL-GATHER-SINGLE-STACK", "all_gather_single", {"stacked": True}),
            ("GATHER-VALUE", "gather", {}),
            ("SCATTER-VALUE", "scatter", {}),
            ("ALL-TO-ALL-VALUE", "all_to_all", {}),
            ("ALL-TO-ALL-UNEVEN", "all_to_all", {"uneven": True}),
            ("ALL-TO-ALL-SINGLE-VALUE", "all_to_all_single", {}),
            ("ALL-TO-ALL-SINGLE-UNEVEN", "all_to_all_single", {"uneven": True}),
        )
    ],
)
@given(data=st.data())
@share(0.08)
def test_values_arrive(
    smp_world: SmpWorld, data: st.DataObject, operation: str, how: dict[str, Any]
) -> None:
    """Each example runs in every claimed dtype."""
    claims = smp_world.capabilities
    # Sizes of pieces differ where there are two at least.
    least = 2 if how.get("uneven") and smp_world.ranks > 1 else 1
    ranks = data.draw(worlds(smp_world, least), "ranks")
    case = data.draw(cases(ranks, claims, operation, **how), "case")
    smp_world.run(play, *spread(case, dtypes(claims, operation=operation)), ranks=ranks)


@requirement("COLL-SPECIAL-BITS")
@given(data=st.data())
@share(0.02)
def test_special_numbers_keep_their_bits(smp_world: SmpWorld, data: st.DataObject) -> None:
    """Each example calls every claimed collective that moves tensors."""
    claims = smp_world.capabilities
    chosen = [dtype for dtype in dtypes(claims) if dtype in MANTISSAS]
    if not chosen:
        not_supported("the backend claims no floating-point dtype with every special number")
    ranks = data.draw(worlds(smp_world), "ranks")
    first = data.draw(st.booleans(), "the first is asynchronous")
    shape = st.sampled_from([(6,), (2, 3), (7, 2)])  # at least one of each number
    moving = [name for name, each in COLLECTIVES.items() if not each.reduces]
    for name in claimed(smp_world, moving):
        case = data.draw(cases(ranks, claims, name, shape=shape, special=True), "case")
        moved = [dtype for dtype in chosen if dtype in dtypes(claims, operation=name)]
        smp_world.run(play, *alternated(spread(case, moved), first), ranks=ranks)


#: Collectives that accept a lazy conjugate. The others call torch.view_as_real, which refuses a conjugate
#: before any backend is asked (torch 2.13).
TAKES_CONJUGATES = ("gather", "reduce_scatter", "reduce_scatter_single")


@requirement("COLL-CONJUGATED")
@given(data=st.data())
@share(0.05)
def test_conjugates_arrive(smp_world: SmpWorld, data: st.DataObject) -> None:
    claims = smp_world.capabilities
    ranks = data.draw(worlds(smp_world), "ranks")
    first = data.draw(st.booleans(), "the first is asynchronous")
    ops = {name: "SUM" if COLLECTIVES[name].reduces else "" for name in TAKES_CONJUGATES}
    complexes = {
        name: [dtype for dtype in dtypes(claims, ops[name], name) if dtype.is_complex]
        for name in claimed(smp_world, TAKES_CONJUGATES)
    }
    if not any(complexes.values()):
        not_supported(f"the backend claims no complex dtype for {', '.join(complexes)}")
    for name, chosen in complexes.items():
        if not chosen:
            continue
        op = ops[name]
        case = data.draw(cases(ranks, claims, name, op=op, conjugated=True), "case")
        smp_world.run(play, *alternated(spread(case, chosen), first), ranks=ranks)
