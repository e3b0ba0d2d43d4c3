"""The glossary defines each term once, and the words that its terms have replaced are gone from the pages."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    *(DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md")),
    *(page for page in sorted(DOCS.rglob("*.md")) if page.name != "changelog.md"),
]

#: Words that were replaced and are no ordinary English of these pages, and the term to use.
REPLACED = {
    r"nurser(y|ies)": "fork server",
    r"wardens?": "supervisor",
    r"crews?": "worker pool",
    r"berths?": "membership",
    r"lobby": "pending connections",
    r"errands?": "task",
    r"parcels?": "serialization",
    r"surroundings": "process state",
    r"airspace": "overlap table",
    r"departures?": "launch",
    r"(sets?|setting) out": "launch",
    r"nests": "tensor tree, containers or payloads",
    r"sharding groups?": "shard group",
    r"replication groups?": "replicate group",
    r"hosts?(?!\s+(?:name|memory))": "executor; node; machine",
}


def read_terms() -> list[str]:
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    return re.findall(r"^\*\*([^*]+)\*\*: .+\.$", page, re.MULTILINE)


def read_prose(page: Path) -> str:
    """The text of a page without code, which names what users type, and without links."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ {4,}.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", "", text)


def find_replaced(text: str) -> list[str]:
    """The replaced words that a text has."""
    return [
        found[0] for word in REPLACED for found in re.finditer(rf"\b{word}\b", text, re.IGNORECASE)
    ]


def test_terms_are_sorted_and_defined_once() -> None:
    terms = read_terms()
    assert len(terms) > 100
    assert terms == sorted(terms, key=str.casefold)
    assert [term for term, count in Counter(terms).items() if count > 1] == []


def test_every_entry_is_one_term_with_its_definition() -> None:
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    entries = [line for line in page.splitlines() if line.startswith("**")]
    assert len(entries) == len(read_terms())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS.parent).as_posix())
def test_a_page_uses_the_terms_and_not_the_words_that_they_replaced(page: Path) -> None:
    assert find_replaced(read_prose(page)) == []


def test_a_replaced_word_is_found() -> None:
    assert find_replaced("The nursery forks; the sharding group sets out.") == [
        "nursery",
        "sets out",
        "sharding group",
    ]
    assert find_replaced("A host name, host memory and a ghost are none.") == []
