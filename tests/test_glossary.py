"""The words of pages, docstrings and comments: the glossary defines each term once, the words that its terms have
replaced are gone from the pages, and a sentence begins with its subject.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
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
    r"uncut": "unpartitioned model",
    r"hosts?(?!\s+(?:name|memory))": "executor; node; machine",
}

#: The folders whose docstrings and comments are read.
FOLDERS = ("smp_core", "pytest_smp", "conformance", "tests", "benchmarks", "examples", "tools")
#: Words that a sentence begins with instead of its subject. "Return whether ..." says what a predicate returns.
RIDDLES = ("What", "Whatever", "Who", "Whoever", "It", "That", "Whether")
_RIDDLE = re.compile(rf"\b(?:{'|'.join(RIDDLES)})\b")
#: A sentence starts with its text or paragraph, as an item of a list, and behind a mark that ends another one.
_START = re.compile(rf"(?:\A|\n\s*\n|\n\s*[-*]\s|[.:;?!]\s)\s*({_RIDDLE.pattern}[^.]*)")


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


def read_texts(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a module with their lines, those of attributes too, and its comments: consecutive lines of
    them are one text.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, inspect.cleandoc(text)
    begun, at, lines = 0, (-1, -1), list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        alone = token.line.lstrip().startswith("#")
        if not alone or (token.start[0] - 1, token.start[1]) != at:
            yield begun, "\n".join(lines)
            begun, lines = token.start[0], []
        at = token.start
        lines.append(token.string.lstrip("#: "))
    yield begun, "\n".join(lines)


def find_riddles(source: str) -> list[tuple[int, str]]:
    """The sentences of a module's docstrings and comments that begin with a word of `RIDDLES`, with their lines."""
    if _RIDDLE.search(source) is None:
        return []  # most modules: parsing one takes thirty times as long as this search
    return sorted(
        (line + text.count("\n", 0, found.start(1)), found[1].partition("\n")[0])
        for line, text in read_texts(source)
        for found in _START.finditer(text)
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_of_a_folder_begin_with_their_subject(folder: str) -> None:
    found = [
        f"{path.relative_to(DOCS.parent)}:{line}: {sentence}"
        for path in sorted((DOCS.parent / folder).rglob("*.py"))
        for line, sentence in find_riddles(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What it is."""', [(1, "What it is.")]),
        ('def f():\n    """A sum.\n\n    It is 0.\n    """', [(4, "It is 0.")]),
        ('"""A sum. It is 0,\nor 1."""', [(1, "It is 0,")]),
        ('"""A sum.\n\nArgs:\n    a: Whether it\n        is."""', [(4, "Whether it")]),
        ('"""Sums:\n\n- That of a."""', [(3, "That of a.")]),
        ('a = 0\n"""Whatever it is."""', [(2, "Whatever it is.")]),
        ("# A sum.\n#\n# Who asks,\n# gets 0.", [(3, "Who asks,")]),
        ("a = 0  #: A sum. It is 0.\nb = 1  # That of b.", [(1, "It is 0."), (2, "That of b.")]),
    ],
)
def test_a_sentence_that_begins_with_a_riddle_is_found(
    source: str, expected: list[tuple[int, str]]
) -> None:
    found = [(line, sentence.removesuffix(".")) for line, sentence in find_riddles(source)]
    assert found == [(line, sentence.removesuffix(".")) for line, sentence in expected]


@pytest.mark.parametrize(
    "source",
    [
        '"""A sum, of which some say\nThat it is 0: it is what it is."""',
        "# A sum is\n# What it is. Items. Thatch.",
        'a = "What is it? It is # That."',
        'f("What is it?")\n"""Return whether it is 0."""',
    ],
)
def test_other_sentences_are_no_riddles(source: str) -> None:
    assert find_riddles(source) == []
