"""Every source that code, tests and pages cite is a section, a row or a key of docs/spec (docs/spec/index.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.mutants.catalogue import MUTANTS
from conformance.requirements.catalogue import REQUIREMENTS

ROOT = Path(__file__).parent.parent
SPEC = ROOT / "docs/spec"

FOLDERS = (
    "benchmarks",
    "conformance",
    "docs",
    "examples",
    "pytest_smp",
    "smp_core",
    "tests",
    "tools",
)
FILES = [
    path
    for folder in (*FOLDERS, ".")
    for path in sorted((ROOT / folder).glob("*.md" if folder == "." else "**/*"))
    if path.suffix in {".py", ".md", ".toml", ".txt"} and path != Path(__file__)
]

ANCHORS = {
    page.stem: set(re.findall(r'<a id="([^"]+)"', page.read_text(encoding="utf-8")))
    for page in SPEC.glob("*.md")
}
#: The titles of AWS's pages, and the sections in the first column of each one's table.
SECTIONS = {
    title: set(re.findall(r"^\| `([^`]+)` \|", rest, re.MULTILINE))
    for title, rest in re.findall(
        r"^## AWS ([^\n]+)\n(.*?)(?=^## |\Z)",
        (SPEC / "sources.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
}

_NUMBER = r"\d+(?:\.\d+)*\b"
_MORE = rf"(?: \([^()]*\))?(?:, | and | to ){_NUMBER}"  # possibly with a remark on the one before
_PAGE = re.compile(rf"\b(API|ENGINES|TORCH) ({_NUMBER}(?:{_MORE})*)(?: tier ([A-Z]))?")
_AWS = re.compile(r"\bAWS (?=[A-Z])")
_ADDRESS = re.compile(r"\bspec/(\w+)\.md#([\w.-]*\w)")
_BUG = re.compile(r"\b(B\d{3}|G\d{1,2})\b")
#: How documents were cited that are not in the repository.
_OUTSIDE = re.compile(r"\b(?:SMP_API|ENGINES|BUGS|FACTS|DESIGN)\.md\b|\b[Ss]eed 00\d|\bFACTS \d")


def on_one_line(text: str) -> str:
    """The text with each citation on one line: no comment signs, no seams between string literals."""
    text = re.sub(r"#.*\bnoqa\b.*", "", text)  # ruff's rules have such names, too
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\s*\n\s*(?:#:? )?", " ", text)


def citations(text: str) -> Iterator[tuple[str, bool]]:
    """Every citation of a text, and whether it leads somewhere."""
    text = on_one_line(text)
    for found in _PAGE.finditer(text):
        page, tier = found[1].lower(), found[3]
        numbers = re.findall(_NUMBER, re.sub(r"\([^()]*\)", "", found[2]))
        wanted = {*numbers, *([f"{numbers[-1]}-tier-{tier.lower()}"] if tier else [])}
        yield found[0], wanted <= ANCHORS[page]
    for found in _AWS.finditer(text):
        rest = text[found.end() :]
        title = next((title for title in SECTIONS if rest.startswith(title)), None)
        sections = re.match(r" ?\(([^():]*)", rest[len(title) :]) if title else None
        wanted = set(sections[1].strip().split(", ")) if sections else set()
        yield text[found.start() :][:90], title is not None and wanted <= SECTIONS[title]
    for found in _ADDRESS.finditer(text):
        yield found[0], found[2] in ANCHORS.get(found[1], ())
    for found in _BUG.finditer(text):
        yield found[0], found[0] in ANCHORS["bugs"]
    for found in _OUTSIDE.finditer(text):
        yield found[0], False


def test_every_citation_leads_to_a_section() -> None:
    lost = [
        f"{path.relative_to(ROOT)}: {citation}"
        for path in FILES
        for citation, leads in citations(path.read_text(encoding="utf-8"))
        if not leads
    ]
    assert not lost, "\n".join(lost)


def test_citations_of_every_form_are_found() -> None:
    """Or the test above would pass because it looks for nothing."""
    found = [
        citation
        for path in FILES
        if SPEC not in path.parents
        for citation, _ in citations(path.read_text(encoding="utf-8"))
    ]
    forms = {re.split(r"[ .\d]", each)[0] for each in found}
    assert forms == {"API", "ENGINES", "TORCH", "AWS", "spec/api", "spec/engines", "B", "G"}
    assert len(found) > 500


@pytest.mark.parametrize(
    "wrong",
    [
        "API 1.99",
        "API 1.3.13",
        "API 3.1, 3.9",
        "API 3.1 (partitions), 3.9",
        "(API 1.5,\n    # 1.60)",
        '"API 1.7; ENGINES 5.9, "\n    "5.21"',
        "ENGINES 2.2 tier F",
        "TORCH 2",
        "AWS Common Sense",
        "AWS Common API (smp.sned)",
        "AWS Common API (smp.send, smp.sned: twice)",
        "See docs/spec/api.md#3.6",
        "docs/spec/nowhere.md#1",
        "B003",
        "G19",
        "seed 004",
        "SMP_API.md 3.5",
    ],
)
def test_a_citation_that_leads_nowhere_is_found(wrong: str) -> None:
    assert not all(leads for _, leads in citations(wrong))


def test_anchors_are_unique() -> None:
    for page in SPEC.glob("*.md"):
        anchors = re.findall(r'<a id="([^"]+)"', page.read_text(encoding="utf-8"))
        assert len(anchors) == len(set(anchors)), page.name


def test_links_of_the_specification_lead_somewhere() -> None:
    for page in SPEC.glob("*.md"):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.is_file(), f"{page.name}: {link}"
            if anchor:
                assert anchor in ANCHORS[target.stem], f"{page.name}: {link}"


def test_tags_of_requirements_have_a_key() -> None:
    """A tag is the word before a colon or a version at the start of a source's part, as `INF:` and `REL 1.2.0`."""
    for each in REQUIREMENTS.values():
        used = set(re.findall(r"\b([A-Z]{2,3})(?=:| \d+\.\d+\.| for\b|,)", each.source))
        assert used - {"API", "NCCL", "MPI"} <= ANCHORS["index"], each.id


def test_origins_of_mutants_are_links_or_keys_of_the_catalogue() -> None:
    keys = {mutant.origin for mutant in MUTANTS if mutant.origin and "://" not in mutant.origin}
    assert keys - ANCHORS["bugs"] == set()
    assert len(keys) > 50


def messages(path: Path) -> Iterator[ast.Constant]:
    """The string literals of a module that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bare = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for each in ast.walk(tree):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in bare:
            yield each


def test_messages_have_addresses_in_place_of_codes() -> None:
    """Users cannot know the codes. A string that begins with one is data: a source, not a message."""
    shown = [
        f"{path.relative_to(ROOT)}:{each.lineno}: {each.value}"
        for folder in ("smp_core", "pytest_smp")
        for path in (ROOT / folder).rglob("*.py")
        for each in messages(path)
        if not str(each.value).startswith("API ")
        for citation, _ in citations(str(each.value))
        if "spec/" not in citation
    ]
    assert not shown, "\n".join(shown)
