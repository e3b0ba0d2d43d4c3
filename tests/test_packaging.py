"""The distribution: its wheel, its pins, what its plugin imports, and who imports whom."""

from __future__ import annotations

import configparser
import email
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("conformance", "pytest_smp", "smp_core")


def read_pins() -> dict[str, Version]:
    """Constraints by canonical name; a line that is no exact pin of a new name fails."""
    pins: dict[str, Version] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.!]*)", text)
        assert match, f"constraints.txt: {text!r} is not NAME==VERSION"
        name = canonicalize_name(match[1])
        assert name not in pins, f"constraints.txt: {name} stands there twice"
        pins[name] = Version(match[2])
    return pins


def declared() -> list[Requirement]:
    """Every requirement of pyproject.toml: run time, extras, groups."""
    project = PYPROJECT["project"]
    tables = [project["optional-dependencies"], PYPROJECT["dependency-groups"]]
    lines = project["dependencies"] + [line for t in tables for v in t.values() for line in v]
    return [r for r in map(Requirement, lines) if r.name != project["name"]]


def needs(name: str) -> list[Requirement]:
    """The requirements of an installed distribution here, by its own metadata, extras left out."""
    lines = importlib.metadata.requires(name) or []
    return [
        r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": ""})
    ]


def installed_closure() -> set[str]:
    """The declared distributions that are installed, and all that they need in turn."""
    found: set[str] = set()
    waiting = [canonicalize_name(r.name) for r in declared()]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the linter lives in an environment of its own
        found.add(name)
        waiting += [canonicalize_name(r.name) for r in needs(name)]
    return found


def test_every_declared_dependency_is_pinned_within_its_own_range() -> None:
    pins = read_pins()
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is declared in pyproject.toml and not pinned"
        assert pins[name] in requirement.specifier, f"{name}=={pins[name]} is not in {requirement}"


def test_every_dependency_of_a_dependency_is_pinned_and_no_pin_serves_nothing() -> None:
    # An unpinned one would change under us; a pin of what nobody needs is tested by nobody.
    groups = PYPROJECT["dependency-groups"]  # installed in environments of their own
    elsewhere = {canonicalize_name(r) for r in (*groups["lint"], *groups["bench"])}
    tensorflow = PYPROJECT["project"]["optional-dependencies"]["tensorflow"]  # of 1 GB, so likewise
    elsewhere |= {canonicalize_name(Requirement(each).name) for each in tensorflow}
    assert set(read_pins()) - elsewhere == installed_closure() - elsewhere


def test_no_pin_contradicts_what_another_distribution_needs() -> None:
    # Such a pin makes pip look for another build of torch: half a gigabyte before it gives up.
    pins = read_pins()
    wrong = [
        f"{name} needs {requirement}, pinned is {pins[canonicalize_name(requirement.name)]}"
        for name in sorted(installed_closure())
        for requirement in needs(name)
        if pins[canonicalize_name(requirement.name)] not in requirement.specifier
    ]
    assert not wrong


def test_what_is_installed_is_what_is_pinned() -> None:
    pins = read_pins()
    for name in sorted(installed_closure()):
        found = Version(importlib.metadata.version(name)).public  # 2.13.0+cpu is a 2.13.0
        assert found == str(pins[name]), f"{name} {found} is installed, {pins[name]} is pinned"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """A wheel built from this tree, with the build backend that is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=600)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def read_metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (member,) = (m for m in wheel.namelist() if m.endswith(f".dist-info/{name}"))
    return wheel.read(member).decode()


def test_the_wheel_holds_every_file_of_the_three_packages_and_nothing_else(
    wheel: zipfile.ZipFile,
) -> None:
    ours = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    ours |= {f"smp_core/_docs/spec/{path.name}" for path in (ROOT / "docs/spec").iterdir()}
    assert {m for m in wheel.namelist() if ".dist-info/" not in m} == ours
    assert {f"{package}/py.typed" for package in PACKAGES} <= ours
    assert {f"{package}/__init__.py" for package in PACKAGES} <= ours


def test_the_wheel_registers_the_plugins_and_carries_its_licence(wheel: zipfile.ZipFile) -> None:
    found = configparser.ConfigParser()
    found.read_string(read_metadata(wheel, "entry_points.txt"))
    assert {name: dict(found[name]) for name in found.sections()} == {
        "console_scripts": {"smp-run": "smp_core.launch.command:main"},
        "pytest11": {"smp": "pytest_smp.plugin", "smp-suite": "pytest_smp.suite"},
        "smp_core.launch": {"sim": "pytest_smp.ranks.sim.scripts:run"},
    }
    metadata = email.message_from_string(read_metadata(wheel, "METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in read_metadata(wheel, "licenses/LICENSE")


def test_messages_of_the_wheel_name_pages_that_it_has(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path)
    code = (
        "from smp_core.config import Config\nfrom smp_core.errors import ConfigError\n"
        "try:\n    Config(microbatches=0)\nexcept ConfigError as error:\n    print(error)\n"
        "    print(ConfigError(str(error)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    message, nested = told.stdout.splitlines()
    assert nested == message
    page, _, anchor = message.rpartition(" See ")[2].partition("#")
    assert Path(page).is_relative_to(tmp_path)
    assert f'<a id="{anchor}">' in Path(page).read_text(encoding="utf-8")


def test_a_session_without_marked_tests_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(
        "import sys\n"
        "def test_plain():\n"
        "    assert {'pytest_smp.plugin', 'pytest_smp.suite'} <= set(sys.modules)\n"
        "    assert not {'conformance', 'smp_core.config'} & set(sys.modules)\n"
        "    assert not {'torch', 'numpy', 'pydantic', 'cloudpickle'} & set(sys.modules)\n"
    )
    # Other plugins may import what they like, so ours are loaded alone.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_ADDOPTS", None)
    ours = ["-p", "pytest_smp.plugin", "-p", "pytest_smp.suite"]
    command = [sys.executable, "-m", "pytest", *ours, "-q", "test_plain.py"]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
