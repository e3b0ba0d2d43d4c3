"""Every finding of docs/findings.md still shows, by a script that needs the third party alone."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.requirements.catalogue import REQUIREMENTS

from .fork_server import Ended, ForkServer

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "findings.md").read_text(encoding="utf-8")
SCRIPTS = sorted((DOCS / "findings").glob("*.py"))
#: By the first word of a script's name: the wheels that it is about, and their version where another
#: one no longer has the defect. A missing wheel is not installed; its scripts are skipped.
_WHEELS: dict[str, dict[str, str]] = {
    "mpich": {"mpi4py": "", "mpich": ""},
    "deepspeed": {"deepspeed": "0.16.4"},
}
_TIMEOUT = 90  # seconds for one script; its own limit is SECONDS, and importing torch comes before


Run = Callable[[Path], Ended]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a script in a process that has torch imported, and nothing of ours."""
    server, folder = ForkServer("torch.multiprocessing", "torch.distributed"), tmp_path_factory
    yield lambda script: server.python(
        str(script), folder=folder.mktemp("script"), timeout=_TIMEOUT
    )
    server.close()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_finding_shows(run: Run, script: Path) -> None:
    for wheel, version in _WHEELS.get(script.stem.partition("_")[0], {}).items():
        try:
            installed = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"a finding on {wheel}, which is not installed")
        if version and installed != version:
            pytest.skip(f"a finding on {wheel} {version}, and {installed} is installed")
    done = run(script)
    assert done.code == 0, (
        f"{script.name}: exit status {done.code}; 1: what is promised happens, so take the "
        f"finding out; 2: something else\n{done.stdout}{done.stderr}"
    )
    assert "rank 1 happened: " in done.stdout


@pytest.mark.parametrize(("kept", "status"), [("PROMISED", 1), ("neither", 2)])
def test_a_script_tells_when_it_shows_no_more(
    run: Run, tmp_path: Path, kept: str, status: int
) -> None:
    """As if torch did what is promised, or something else."""
    text = (DOCS / "findings" / "strided_broadcast.py").read_text(encoding="utf-8")
    observed = re.search(r"^OBSERVED = (.*)$", text, re.MULTILINE)
    assert observed is not None
    if kept == "PROMISED":
        text = re.sub(r"^PROMISED = .*$", f"PROMISED = {observed[1]}", text, flags=re.MULTILINE)
    text = re.sub(r"^OBSERVED = .*$", "OBSERVED = [1, 1]", text, flags=re.MULTILINE)
    script = tmp_path / "script.py"
    script.write_text(text, encoding="utf-8")
    assert run(script).code == status


def test_the_page_lists_every_script_and_no_other() -> None:
    assert SCRIPTS
    assert sorted(set(re.findall(r"\]\(findings/(\w+)\.py\)", PAGE))) == [
        script.stem for script in SCRIPTS
    ]


def test_every_finding_names_the_requirements_that_find_it() -> None:
    sections = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
    assert len(sections) == len(SCRIPTS)
    for section in sections:
        title, _, text = section.partition("\n")
        found = re.search(r"^Found by (.+?)\.\n", text, re.MULTILINE | re.DOTALL)
        assert found is not None, title
        ids = re.findall(r"`([A-Z0-9-]+)`", found[1])
        assert set(ids) <= set(REQUIREMENTS), title
        assert len(re.findall(r"findings/\w+\.py", text)) == 1, title
        for words in ("**Promised.**", "**Happens.**", "Upstream:"):
            assert words in text, f"{title}: {words}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_needs_the_third_party_alone(script: Path) -> None:
    found = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    libraries = {"mpich": {"mpi4py"}, "deepspeed": {"torch", "deepspeed"}}
    allowed = libraries.get(script.stem.partition("_")[0], {"torch"})
    assert found <= {*allowed, *sys.stdlib_module_names}
