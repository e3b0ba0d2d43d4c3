"""Every file and every function that the pages name exists."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = "smp_core|pytest_smp|conformance|tests|benchmarks|examples|tools|docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "changelog.md"),
]
#: A path, and the names behind it in parentheses, if any.
_NAMED = re.compile(rf"`((?:{FOLDERS})/[\w./]*)`(?:\s\(((?:`[\w.]+`(?:,\s)?)+)\))?")


def read_named(page: Path) -> list[tuple[str, list[str]]]:
    """The paths of a page, each with the names that stand behind it; not those of files to be made."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"New file `[^`]+`", "", text)
    return [(path, re.findall(r"[\w.]+", names)) for path, names in _NAMED.findall(text)]


def defined(path: Path) -> set[str]:
    """Functions, classes and methods of a file, the latter with and without their class."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{each.name}" for each in functions}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_functions_of_a_page_exist(page: Path) -> None:
    for name, functions in read_named(page):
        path = ROOT / name
        assert path.exists(), name
        if functions:
            assert set(functions) <= defined(path), f"{name}: {set(functions) - defined(path)}"


def test_the_architecture_names_functions() -> None:
    named = read_named(ROOT / "docs/architecture.md")
    assert sum(len(functions) for _, functions in named) > 40


def test_every_folder_of_the_packages_is_on_the_map() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = set(re.findall(r"^ *([\w/]+)/ ", shown, re.MULTILINE))
    packages = [ROOT / name for name in ("smp_core", "pytest_smp", "conformance")]
    inner = (ROOT / "smp_core/torch", ROOT / "pytest_smp/ranks")
    folders = {
        folder.name
        for parent in (*packages, *inner)
        for folder in parent.iterdir()
        if (folder / "__init__.py").exists()
    }
    assert folders <= names, folders - names


def test_a_sharded_parameter_crosses_four_walls() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.split("## The life of a sharded parameter\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. .*(?:\n +.*)*", section, re.MULTILINE)
    assert len(steps) == 10
    walls = set()
    for step in steps:
        folders = [path.split("/")[2] for path, _ in _NAMED.findall(step)]
        walls |= {frozenset(pair) for pair in itertools.pairwise(folders)}
    named = {frozenset(pair) for pair in re.findall(r"`(\w+)`\s+and\s+`(\w+)`", section)}
    assert {wall for wall in walls if len(wall) == 2} == named
    assert len(named) == 4
