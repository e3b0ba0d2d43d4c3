"""The rooms of the suite's package: each imports only from itself and from those before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import conformance

FOLDER = Path(conformance.__file__).parent
ROOMS = ("engines", "requirements", "session", "cases", "suite", "mutants")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """The modules that a file imports anywhere in it, each with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{each.name}") for each in node.names)


def test_the_package_has_these_rooms_and_says_so() -> None:
    found = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert found == set(ROOMS)
    lines = [line.split()[0] for line in (conformance.__doc__ or "").splitlines() if line.strip()]
    assert [each for each in lines if each in ROOMS] == list(ROOMS)


def test_rooms_import_from_those_before_them() -> None:
    wrong = []
    for path in sorted(FOLDER.rglob("*.py")):
        room = path.relative_to(FOLDER).parts[0]
        if room not in ROOMS:
            continue
        for line, module in imported(path):
            package, _, rest = module.partition(".")
            other = rest.partition(".")[0]
            if package == "conformance" and ROOMS.index(other) > ROOMS.index(room):
                wrong.append(f"{path.relative_to(FOLDER)}:{line} imports {module}")
    assert not wrong
