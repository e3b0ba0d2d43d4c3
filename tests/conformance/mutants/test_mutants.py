"""The mutants: every requirement has one, and a list of mutants that cannot be used is refused."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from conformance import mutants
from conformance.mutants.catalogue import MUTANTS, checked, load
from conformance.mutants.protocol import ASSERTION, Bugs, Mutant, MutantError
from conformance.requirements.catalogue import REQUIREMENTS


def made(name: str = "a-bug", **fields: Any) -> Mutant:
    given = {"kind": "order", "sentence": "it is wrong", "requirement": "COMM-SEND-ORDER", **fields}
    return Mutant(name, plant=contextlib.nullcontext, **given)


def test_every_requirement_has_a_mutant() -> None:
    assert {mutant.requirement for mutant in MUTANTS} == set(REQUIREMENTS)


def test_every_area_is_in_the_catalogue() -> None:
    for module in pkgutil.iter_modules(mutants.__path__):
        bugs = getattr(importlib.import_module(f"{mutants.__name__}.{module.name}"), "BUGS", ())
        assert set(map(id, bugs)) <= set(map(id, MUTANTS)), module.name


def test_there_are_mutants_enough() -> None:
    assert len(MUTANTS) >= 92  # as many as there were when the list became data
    assert all(re.fullmatch(r"(https://\S+|B\d{3}|G\d+)?", mutant.origin) for mutant in MUTANTS)


def test_a_bug_becomes_a_mutant() -> None:
    bugs, victim = Bugs("order"), SimpleNamespace(order="oldest")

    @bugs.enter("COMM-SEND-ORDER", origin="https://example.org/1")
    def newest_first(patch: pytest.MonkeyPatch) -> None:
        """the newest comes first

        More is for the reader of the source.
        """
        patch.setattr(victim, "order", "newest")

    (mutant,) = bugs
    assert (mutant.name, mutant.kind, mutant.by) == ("newest-first", "order", ASSERTION)
    assert (mutant.sentence, mutant.origin) == ("the newest comes first", "https://example.org/1")
    with mutant.plant():
        assert victim.order == "newest"
    assert victim.order == "oldest"


def test_a_bug_of_two_requirements_is_two_mutants() -> None:
    bugs = Bugs("order")

    @bugs.enter("COMM-SEND-ORDER")
    @bugs.enter("COMM-SEND-VALUE", ValueError, kind="value")
    def wrong(patch: pytest.MonkeyPatch) -> None:
        """it is wrong"""

    assert [(each.name, each.kind, each.requirement, each.by) for each in bugs] == [
        ("wrong", "value", "COMM-SEND-VALUE", (ValueError,)),
        ("wrong-comm-send-order", "order", "COMM-SEND-ORDER", ASSERTION),
    ]
    assert len(checked(bugs)) == 2


@pytest.mark.parametrize("field", ["kind", "sentence", "requirement"])
def test_an_empty_field_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"mutant 'a-bug': its {field} is empty"):
        made(**{field: " "})


@pytest.mark.parametrize("name", ["", "A-bug", "a bug", "-a", "a--b"])
def test_a_badly_formed_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a name is lower-case words joined by '-'"):
        made(name)


def test_a_name_is_given_once_over_all_areas() -> None:
    with pytest.raises(MutantError, match="two mutants are called 'a-bug'"):
        checked([made()], [made(sentence="another")])


def test_a_mutant_names_a_requirement_that_there_is() -> None:
    with pytest.raises(MutantError, match="mutant 'a-bug': unknown requirement 'COMM-SEND-ODER'"):
        checked([made(requirement="COMM-SEND-ODER")])


def test_what_is_no_mutant_is_refused() -> None:
    with pytest.raises(MutantError, match=r"'a-bug' is no conformance\.mutants\.protocol\.Mutant"):
        checked(["a-bug"])


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("theirs", "must be module:attribute"),
        (":MUTANTS", "must be module:attribute"),
        ("theirs:", "must be module:attribute"),
        ("no_such_module:MUTANTS", "cannot import no_such_module: ModuleNotFoundError"),
        ("theirs:BUGS", "module theirs has no attribute 'BUGS'"),
        ("theirs:NUMBER", "1 is no iterable of mutants"),
        ("theirs:TEXT", "'text' is no iterable of mutants"),
    ],
)
def test_mutants_from_elsewhere_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, where: str, error: str
) -> None:
    theirs = SimpleNamespace(MUTANTS=[made()], NUMBER=1, TEXT="text")
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    assert load("theirs:MUTANTS") == theirs.MUTANTS
    with pytest.raises(MutantError, match=error):
        load(where)
