"""The recipes work: their examples, added to a copy of the repository, pass the commands of the page."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .fork_server import ForkServer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
#: By heading, the recipes; what stands above the first one is no recipe.
RECIPES = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def read_changes(recipe: str) -> Iterator[tuple[str, str, str]]:
    """The changes of a recipe: file, text that is there, text in its place."""
    for body in re.findall(r"^```diff\n(.*?)^```$", recipe, re.MULTILINE | re.DOTALL):
        title, *lines = body.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        yield title.removeprefix("--- ").strip(), before, after


def read_files(recipe: str) -> list[tuple[str, str]]:
    """The new files of a recipe, with their text."""
    pattern = r"^New file `([^`]+)`:\n\n```python\n(.*?)^```$"
    return re.findall(pattern, recipe, re.MULTILINE | re.DOTALL)


def read_commands(recipe: str) -> list[list[str]]:
    """The commands that prove a recipe, each run as a module of this Python."""
    lines = re.findall(r"^    (?:python -m )?(pytest .+)$", recipe, re.MULTILINE)
    return [["-m", *shlex.split(line)] for line in lines]


def needs_mpi(command: list[str]) -> bool:
    """Return whether a command needs an MPI, which not every machine has; the tests of `mpi` look for it themselves."""
    return "--smp-backend=mpi" in command


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with all recipes in it."""
    copy = tmp_path_factory.mktemp("clone")
    # With the compiled files, which know their sources by time and size; the copies have the same.
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.pyc.*")
    shutil.copytree(ROOT, copy, ignore=unwanted, dirs_exist_ok=True)
    for title, recipe in RECIPES.items():
        for name, before, after in read_changes(recipe):
            text = (copy / name).read_text(encoding="utf-8")
            assert text.count(before) == 1, (
                f"{title}: {name} has this {text.count(before)} times: {before}"
            )
            (copy / name).write_text(text.replace(before, after), encoding="utf-8")
        for name, text in read_files(recipe):
            assert not (copy / name).exists(), f"{title}: {name} is there already"
            (copy / name).write_text(text, encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def server(clone: Path) -> Iterator[ForkServer]:
    """Runs commands in processes that have the modules of the copy imported."""
    server = ForkServer(path=clone)
    yield server
    server.close()


def test_every_recipe_ends_with_a_command() -> None:
    assert len(RECIPES) == 7
    assert all(map(read_commands, RECIPES.values()))


@pytest.mark.parametrize("title", RECIPES)
def test_the_commands_of_a_recipe_pass(title: str, clone: Path, server: ForkServer) -> None:
    commands = [each for each in read_commands(RECIPES[title]) if not needs_mpi(each)]
    assert commands
    for command in commands:
        options = ["-p", "no:cacheprovider", "-q"]
        done = server.python(*command, *options, folder=clone)
        assert done.code == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        assert str(clone) in done.stdout or "passed" in done.stdout or "killed" in done.stdout
