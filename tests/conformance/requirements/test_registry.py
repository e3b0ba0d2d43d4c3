"""The registry of requirements, and the declarations in it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from conformance.requirements.catalogue import REQUIREMENTS, requirement
from conformance.requirements.registry import (
    Capability,
    EngineCapability,
    Level,
    Registry,
    Requirement,
    RequirementError,
)

GOOD = Requirement("AREA-WHAT", "It holds.", "API 1.6", Level.L1, frozenset({Capability.OBJECTS}))


@pytest.mark.parametrize("field", ["id", "sentence", "source"])
@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_field_is_refused(field: str, empty: str) -> None:
    with pytest.raises(RequirementError, match=f"its {field} is empty"):
        dataclasses.replace(GOOD, **{field: empty})


def test_a_requirement_without_needs_is_refused() -> None:
    with pytest.raises(RequirementError, match="its needs are empty"):
        dataclasses.replace(GOOD, needs=frozenset())


def test_what_a_requirement_lacks_is_all_that_is_not_claimed() -> None:
    many = {Capability.TAGS, Capability.PROCESS_GROUPS, Capability.POINT_TO_POINT}
    each = dataclasses.replace(GOOD, needs=frozenset(many))
    assert each.lacks(many | {Capability.BARRIER}) == []
    # In the order of Capability, whatever the order of a set.
    assert each.lacks({Capability.PROCESS_GROUPS}) == [Capability.POINT_TO_POINT, Capability.TAGS]


@pytest.mark.parametrize("id", ["ALLGATHER", "comm-order", "COMM_ORDER", "COMM-", "-COMM", "A-B C"])
def test_a_badly_formed_id_is_refused(id: str) -> None:
    with pytest.raises(RequirementError, match=f"requirement {id!r}: an id is capital words"):
        dataclasses.replace(GOOD, id=id)


def test_a_requirement_is_a_value() -> None:
    assert dataclasses.replace(GOOD) == GOOD
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOOD.source = "elsewhere"  # type: ignore[misc]


def test_an_id_is_declared_once() -> None:
    other = dataclasses.replace(GOOD, sentence="It holds, too.")
    with pytest.raises(RequirementError, match="requirement AREA-WHAT is declared twice"):
        Registry(GOOD, other)


def test_the_registry_keeps_the_order_of_declaration() -> None:
    ids = ["B-B", "A-A", "C-C"]
    registry = Registry(*(dataclasses.replace(GOOD, id=id) for id in ids))
    assert list(registry) == ids
    assert registry["A-A"].id == "A-A"


@pytest.mark.parametrize(
    ("id", "hint"),
    [
        ("AREA-WHAY", "did you mean AREA-WHAT?"),
        ("X-Y", "declare it in conformance/requirements/"),
    ],
)
def test_an_unknown_id_is_refused_with_the_nearest(id: str, hint: str) -> None:
    with pytest.raises(RequirementError, match=re.escape(f"unknown requirement {id!r}: {hint}")):
        Registry(GOOD).named(id)


def test_a_property_points_to_a_declared_requirement() -> None:
    assert requirement("COMM-ALLGATHER-ORDER").args == ("COMM-ALLGATHER-ORDER",)
    with pytest.raises(RequirementError, match="did you mean COMM-ALLGATHER-ORDER"):
        requirement("COMM-ALLGATHER-ODER")


def test_levels_are_ordered_and_have_a_sentence() -> None:
    assert [level.name for level in Level] == [f"L{number}" for number in range(8)]
    assert list(Level) == list(range(8))
    assert all(level.sentence.endswith(".") for level in Level)


@pytest.mark.parametrize("each", REQUIREMENTS.values(), ids=list(REQUIREMENTS))
def test_a_declaration_is_a_sentence_with_a_source(each: Requirement) -> None:
    assert each.sentence.endswith(".")
    assert not each.sentence.endswith("..")
    # The API's facts, torch's documentation of torch.distributed, or a decision of ours.
    assert re.search(r"\bAPI \d|\bAWS [A-Z]|\bdocs\b|^INF: \w", each.source)
    # "INF" alone says nothing: the reason is what a third party can argue with (docs/spec/index.md).
    assert "INF" not in each.source or len(each.source.split("INF", 1)[1]) > len(": x")


def test_every_capability_is_needed_and_none_alone_is_nothing() -> None:
    needed = [each.needs for each in REQUIREMENTS.values()]
    assert frozenset().union(*needed) == {*Capability, *EngineCapability}
    transports = {Capability.RANKS, Capability.OBJECTS, Capability.PROCESS_GROUPS}
    assert all(needs & transports for needs in needed)


def test_the_levels_that_have_requirements() -> None:
    assert {each.level for each in REQUIREMENTS.values()} == {*Level}
