"""The files of expected failures of our own table of backends, and the page that explains them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.requirements.catalogue import REQUIREMENTS
from conformance.session.expectations import Expectation, check, file_of, read
from pytest_smp.ranks.backends import BACKENDS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "conformance" / "expected"
PAGE = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
FILES = sorted(FOLDER.glob("*.toml"))
ENTRIES = [entry for file in FILES for entry in read(file)]


def test_every_file_is_that_of_a_backend() -> None:
    named = [file_of(backend.expectations) for backend in BACKENDS.values()]
    assert {path for path in named if path is not None} <= set(FILES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_entry_is_of_what_the_backend_does_not_claim(backend: str) -> None:
    path = file_of(BACKENDS[backend].expectations)
    claims = BACKENDS[backend].capabilities.claims
    expected = {} if path is None else check(read(path), REQUIREMENTS)
    assert [id for id in expected if REQUIREMENTS[id].lacks(claims)] == []


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.place)
def test_an_entry_has_a_reproducer_that_the_page_shows(entry: Expectation) -> None:
    """The reason ends in the script's name, and the script's section names the requirement."""
    script = entry.reason.rpartition(": ")[2]
    assert (ROOT / "docs" / "findings" / f"{script}.py").is_file()
    (section,) = [
        section
        for section in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
        if f"\n[Script](findings/{script}.py)." in section
    ]
    found = re.search(r"^Found by (.+?)\.\n", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert f"`{entry.id}`" in found[1]
