"""Whole communication programs, each with what every rank must hold, by an independent model."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from conformance.draws import MOST_RANKS, on_ranks
from conformance.requirements import requirement
from pytest_smp import strategies
from pytest_smp.proxies import SmpWorld


@requirement("PROG-VALUES")
@given(data=st.data())
@settings(on_ranks, max_examples=round(0.6 * on_ranks.max_examples) or 1)
def test_every_rank_holds_what_the_model_says(smp_world: SmpWorld, data: st.DataObject) -> None:
    program = data.draw(
        strategies.programs(
            max_ranks=min(MOST_RANKS, smp_world.ranks), capabilities=smp_world.capabilities
        ),
        "program",
    )
    smp_world.run(program.run, ranks=program.ranks)
