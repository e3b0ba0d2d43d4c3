"""Properties of smp.init, and of calls before and after it."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import assume, given

import smp_core.torch as smp
from conformance.cases.draws import on_ranks, sizes, worlds
from conformance.cases.layout import coordinates, parameters
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import topologies
from smp_core.errors import AlreadyInitializedError, NotInitializedError

#: Every call of the API but init and is_initialized, with arguments that are valid in a world of two.
CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rank", "size", "local_rank", "local_size"), ()),
    **dict.fromkeys(("mp_rank", "mp_size", "dp_rank", "dp_size", "pp_rank", "pp_size"), ()),
    **dict.fromkeys(("tp_rank", "tp_size", "rdp_rank", "rdp_size"), ()),
    **dict.fromkeys(("get_mp_group", "get_dp_group", "get_tp_group"), ()),
    **dict.fromkeys(("get_world_process_group", "get_mp_process_group"), ()),
    **dict.fromkeys(("get_dp_process_group", "get_pp_process_group"), ()),
    **dict.fromkeys(("get_tp_process_group", "get_rdp_process_group"), ()),
    "broadcast": (None, smp.WORLD),
    "send": (None, 1, smp.RankType.WORLD_RANK),
    "recv_from": (1, smp.RankType.WORLD_RANK),
    "allgather": (None, smp.WORLD),
    "barrier": (),
    "mp_barrier": (),
    "dp_barrier": (),
}


def place() -> dict[str, int]:
    """All ranks and sizes that the API returns on this rank, by name."""
    names = [name for name in CALLS if name.endswith(("rank", "size"))]
    return {name: getattr(smp, name)() for name in names}


def letters(at: dict[str, int]) -> dict[str, int]:
    """The coordinates of a :func:`place`, by letter."""
    return {"D": at["rdp_rank"], "P": at["pp_rank"], "T": at["tp_rank"]}


def initialize(config: dict[str, Any]) -> tuple[bool, bool]:
    """Call init; return whether the rank is initialised before and after."""
    before = smp.is_initialized()
    smp.init(config)
    return before, smp.is_initialized()


@requirement("LIFE-INITIALIZED")
@given(data=st.data())
@on_ranks
def test_init_is_what_initializes(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world), "world")
    seen = smp_world.run(initialize, parameters(world), ranks=world.size, init=False)
    assert seen == [(False, True)] * world.size


def initialize_bare(none: bool) -> dict[str, int]:
    """Call init without parameters, or with None, and return the ranks and sizes."""
    smp.init(None) if none else smp.init()
    return place()


@requirement("LIFE-INIT-BARE")
@given(data=st.data(), none=st.booleans())
@on_ranks
def test_init_needs_no_argument(smp_world: SmpWorld, data: st.DataObject, none: bool) -> None:
    ranks = data.draw(sizes(smp_world), "ranks")
    for rank, at in enumerate(smp_world.run(initialize_bare, none, ranks=ranks, init=False)):
        assert (at["pp_size"], at["tp_size"], at["rdp_size"]) == (1, 1, ranks)
        assert at["rdp_rank"] == rank


def initialize_and_look(config: dict[str, Any]) -> dict[str, int]:
    """Call init and return the ranks and sizes."""
    smp.init(config)
    return place()


@requirement("LIFE-INIT-PARAMETERS")
@given(data=st.data())
@on_ranks
def test_init_takes_a_dict(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world), "world")
    places = smp_world.run(initialize_and_look, parameters(world), ranks=world.size, init=False)
    assert [letters(at) for at in places] == [coordinates(world, r) for r in range(world.size)]


def call_all(calls: dict[str, tuple[Any, ...]]) -> tuple[list[str], bool]:
    """Make all calls; return the names of the refused ones, and whether the rank ends up initialised."""
    refused = []
    for name, arguments in calls.items():
        if (
            smp.is_initialized()
        ):  # the last call has initialised; further calls could wait for others
            break
        try:
            getattr(smp, name)(*arguments)
        except NotInitializedError:
            refused.append(name)
    return refused, smp.is_initialized()


@requirement("LIFE-FIRST-CALL")
def test_calls_before_init_are_refused(smp_world: SmpWorld) -> None:
    ranks = min(2, smp_world.ranks)
    for refused, initialized in smp_world.run(call_all, CALLS, ranks=ranks, init=False):
        assert refused == list(CALLS)
        assert not initialized


def initialize_twice(first: dict[str, Any], then: dict[str, Any] | None) -> tuple[Any, Any]:
    """Call init twice; return the ranks and sizes after the first call and after the second."""
    smp.init(first)
    before = place()
    smp.init(then)
    return before, place()


@requirement("LIFE-INIT-AGAIN")
@given(data=st.data(), how=st.sampled_from(["the same", "the alias", "none"]))
@on_ranks
def test_init_again_changes_nothing(smp_world: SmpWorld, data: st.DataObject, how: str) -> None:
    world = data.draw(worlds(smp_world), "world")
    first = parameters(world)
    then: dict[str, Any] | None = dict(first)
    if how == "the alias":
        then = {"partitions": world.pipeline, **first}
        del then["pipeline_parallel_degree"]
    elif how == "none":
        then = None
    for before, after in smp_world.run(initialize_twice, first, then, ranks=world.size, init=False):
        assert before == after


def change(first: dict[str, Any], then: dict[str, Any]) -> tuple[Any, bool, Any]:
    """Call init twice, the second time with other parameters.

    Returns the ranks and sizes after the first call, whether the second call raised
    AlreadyInitializedError, and the ranks and sizes after it.
    """
    smp.init(first)
    before = place()
    try:
        smp.init(then)
    except AlreadyInitializedError:
        return before, True, place()
    return before, False, place()


@requirement("LIFE-INIT-OTHER")
@given(data=st.data())
@on_ranks
def test_init_with_other_parameters_is_refused(smp_world: SmpWorld, data: st.DataObject) -> None:
    world = data.draw(worlds(smp_world), "world")
    then = {**parameters(world), "microbatches": 2}
    if world.size > 1 and data.draw(st.booleans(), "another layout"):
        other = data.draw(topologies(min_size=world.size, max_size=world.size), "other")
        where = [[coordinates(each, r) for r in range(world.size)] for each in (world, other)]
        assume(where[0] != where[1])  # cluster and DPT are the same placement
        then = parameters(other)
    seen = smp_world.run(change, parameters(world), then, ranks=world.size, init=False)
    for before, refused, after in seen:
        assert refused
        assert before == after
