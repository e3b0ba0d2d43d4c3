"""Collectives that move tensors: every claimed dtype, any group, odd sizes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from conformance.requirements import requirement
from conformance.tensor_draws import cases, dtypes, share, spread, worlds
from conformance.tensors import play
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
@share(0.1)
def test_values_arrive(
    smp_world: SmpWorld, data: st.DataObject, operation: str, how: dict[str, Any]
) -> None:
    """Each example is carried out in every dtype that the backend claims."""
    claims = smp_world.capabilities
    ranks = data.draw(worlds(smp_world), "ranks")
    case = data.draw(cases(ranks, claims, operation, **how), "case")
    smp_world.run(play, *spread(case, dtypes(claims)), ranks=ranks)
