"""How many examples properties get: the simplest one and five draws at least, on every backend."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from conformance import suite
from conformance.session.amounts import LEAST_DRAWS, on_processes, share


def properties() -> Iterator[tuple[str, Any]]:
    """All properties of the suite, by name."""
    for module in pkgutil.iter_modules(suite.__path__):
        if module.name.startswith("test_"):
            found = vars(importlib.import_module(f"{suite.__name__}.{module.name}"))
            for name, each in found.items():
                if name.startswith("test_") and hasattr(each, "hypothesis"):
                    yield f"{module.name}::{name}", each


def test_every_property_draws() -> None:
    profile = hypothesis_settings.get_profile("default").max_examples
    few = {}
    found = dict(properties())
    for name, each in found.items():
        own = getattr(each, "_hypothesis_internal_use_settings", None)
        planned = (own or hypothesis_settings()).max_examples
        for where, examples in (("threads", planned), ("processes", on_processes(planned))):
            if examples < 1 + LEAST_DRAWS:
                few[f"{name}, on ranks that are {where}"] = examples
    assert profile >= 100
    assert len(found) > 200
    assert not few


def test_the_simplest_example_always_comes_first() -> None:
    seen = []

    @hypothesis_settings(max_examples=1, database=None)
    @given(st.integers(3, 10**9))
    def one(number: int) -> None:
        seen.append(number)

    one()
    assert seen == [3]


@pytest.mark.parametrize(
    ("part", "most", "examples"),
    [
        (0.5, 100, 50),
        (0.01, 100, 6),
        (0, 100, 6),
        (0.3, 1000, 300),
        (0.01, 4, 4),
        (1, 1, 1),
        (0, 400, 20),
    ],
)
def test_a_share_of_a_profile(part: float, most: int, examples: int) -> None:
    assert share(part, most) == examples
    assert on_processes(examples) <= examples


@pytest.mark.parametrize(
    ("examples", "most", "there"),
    [(100, 100, 25), (6, 100, 6), (4, 100, 4), (20, 400, 20), (400, 400, 100), (20, 20, 6)],
)
def test_where_ranks_are_processes_a_profile_has_the_same_least_number(
    examples: int, most: int, there: int
) -> None:
    assert on_processes(examples, most) == there
