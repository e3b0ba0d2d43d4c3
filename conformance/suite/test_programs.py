"""Properties of whole communication programs, whose results an independent model predicts."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
from hypothesis import given

from conformance.cases.draws import MOST_RANKS, share
from conformance.requirements.catalogue import requirement
from pytest_smp import strategies
from pytest_smp.proxies import SmpWorld
from pytest_smp.ranks.capabilities import BOOL, Capabilities, Capability

LAYOUTS = {Capability.LAYOUTS, Capability.MESSAGE_LAYOUTS}


def check(smp_world: SmpWorld, data: st.DataObject, capabilities: Capabilities) -> None:
    """Draw a program within these capabilities and run it; the program checks its own results."""
    most = min(MOST_RANKS, smp_world.ranks)
    drawn = strategies.programs(max_ranks=most, capabilities=capabilities)
    program = data.draw(drawn, "program")
    smp_world.run(program.run, ranks=program.ranks)


@requirement("PROG-VALUES")
@given(data=st.data())
@share(0.6)
def test_every_rank_holds_what_the_model_says(smp_world: SmpWorld, data: st.DataObject) -> None:
    claims = smp_world.capabilities
    reductions = {**claims.reductions, "SUM": claims.reductions.get("SUM", frozenset()) - BOOL}
    plain = dataclasses.replace(claims, claims=claims.claims - LAYOUTS, reductions=reductions)
    check(smp_world, data, plain)


@requirement("PROG-LAYOUTS")
@given(data=st.data())
@share(0.3)
def test_tensors_may_lie_anyhow(smp_world: SmpWorld, data: st.DataObject) -> None:
    check(smp_world, data, smp_world.capabilities)
