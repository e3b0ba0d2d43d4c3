"""Properties of buffers: tensors with an offset, chunks of one tensor, in-place calls, unchanged inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from conformance.cases.draws import share
from conformance.cases.tensor_draws import (
    alternated,
    every,
    worlds,
)
from conformance.cases.tensors import COLLECTIVES, play
from conformance.requirements.catalogue import requirement
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
@share(0.1)
def test_buffers(
    smp_world: SmpWorld, data: st.DataObject, among: Sequence[str], how: dict[str, Any]
) -> None:
    """Each example calls every claimed collective of ``among``."""
    ranks = data.draw(worlds(smp_world), "ranks")
    played = data.draw(every(ranks, smp_world, among, most=2, **how), "cases")
    first = data.draw(st.booleans(), "the first is asynchronous")
    smp_world.run(play, *alternated(played, first), ranks=ranks)
