"""Where tensors lie: behind an offset, in one tensor with others, in place; and what stays as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from conformance.requirements import requirement
from conformance.tensor_draws import (
    alternated,
    cases,
    claimed,
    dtypes,
    share,
    some,
    spread,
    worlds,
)
from conformance.tensors import COLLECTIVES, play
from pytest_smp.proxies import SmpWorld


@pytest.mark.parametrize(
    ("among", "how"),
    [
        pytest.param(among, how, id=id, marks=requirement(f"COLL-{id}"))
        for id, among, how in (
            ("OFFSET", tuple(COLLECTIVES), {"offset": 3}),
            ("INPUTS", tuple(COLLECTIVES), {"unchanged": True}),
            ("CHUNKS-OUT", ("all_gather", "gather", "all_to_all"), {"chunks": True}),
            ("CHUNKS-IN", ("scatter", "reduce_scatter", "all_to_all"), {"chunks": True}),
            (
                "IN-PLACE",
                ("all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single"),
                {"in_place": True},
            ),
        )
    ],
)
@given(data=st.data())
@share(0.25)
def test_buffers(
    smp_world: SmpWorld, data: st.DataObject, among: Sequence[str], how: dict[str, Any]
) -> None:
    claims = smp_world.capabilities
    operation = data.draw(st.sampled_from(claimed(smp_world, among)), "operation")
    op = "SUM" if COLLECTIVES[operation].reduces else ""
    ranks = data.draw(worlds(smp_world), "ranks")
    case = data.draw(cases(ranks, claims, operation, op=op, **how), "case")
    chosen = data.draw(some(dtypes(claims, op, operation)), "dtypes")
    first = data.draw(st.booleans(), "the first is asynchronous")
    smp_world.run(play, *alternated(spread(case, chosen), first), ranks=ranks)
