"""The third party of examples/: installed beside the suite, found by its entry point, and judged by its
own file of expected failures. The page that leads there says what happens.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "thirdparty"
PAGE = (ROOT / "docs" / "third_party.md").read_text(encoding="utf-8")
EXPECTED = tomllib.loads((EXAMPLE / "inorder" / "expected.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and its metadata, as pip puts them there."""
    target = tmp_path_factory.mktemp("installed")
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options]
    done = subprocess.run(
        [*command, "--target", str(target), str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


Judge = Callable[..., tuple[dict[str, str], str, int]]


@pytest.fixture
def judge(installed: Path, tmp_path: Path, apart_pytest: Callable[..., pytest.RunResult]) -> Judge:
    """Runs the suite on it with two ranks: verdicts by requirement, the output, the exit status."""

    def run(*arguments: str) -> tuple[dict[str, str], str, int]:
        report = tmp_path / "report.json"
        options = ("-p", "no:cacheprovider", "--smp-ranks=2", "-q", f"--smp-report={report}")
        done = apart_pytest(
            *options, "--pyargs", *arguments, folder=tmp_path, PYTHONPATH=str(installed)
        )
        output = f"{done.stdout}\n{done.stderr}"
        assert report.exists(), output
        requirements = json.loads(report.read_text())["requirements"]
        return {each["id"]: each["verdict"] for each in requirements}, output, int(done.ret)

    return run


def test_the_entry_point_is_found_and_its_defect_is_expected(judge):
    verdicts, output, status = judge(
        "conformance",
        "--smp-backend=inorder",
        "--smp-certify",
        "-k",
        "averages_do_not_overflow or BROADCAST-VALUE or REDUCE-VALUE",
    )
    assert verdicts["COLL-ALL-REDUCE-AVG-HALF"] == "WAIVED", output
    assert verdicts["COLL-BROADCAST-VALUE"] == "PASS", output
    assert verdicts["COLL-REDUCE-VALUE"] == "NOT SUPPORTED", output
    assert status == 1  # what was left out certifies nothing
    assert "not certified" in output
    assert "inorder" in output


def test_without_its_file_the_defect_is_a_failure(judge, tmp_path):
    nothing = tmp_path / "nothing.toml"
    nothing.write_text("version = 1\n", encoding="utf-8")
    verdicts, output, status = judge(
        "conformance",
        "--smp-backend=inorder",
        f"--smp-expectations={nothing}",
        "-k",
        "averages_do_not_overflow",
    )
    assert verdicts["COLL-ALL-REDUCE-AVG-HALF"] == "FAIL", output
    assert status == 1


def test_the_package_shows_on_the_page():
    (entry,) = EXPECTED["expected"]
    blocks = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert [tomllib.loads(block) for block in blocks if "expected" in block] == [
        {"expected": [entry]}
    ]
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (shown,) = (tomllib.loads(block) for block in blocks if "entry-points" in block)
    assert shown["project"]["entry-points"] == project["entry-points"]


def test_the_page_and_the_package_give_one_command_for_ci():
    command = "pytest --pyargs conformance --smp-backend=inorder --smp-ranks=8 --smp-certify"
    assert command in PAGE
    assert command in (EXAMPLE / "README.md").read_text(encoding="utf-8")


def test_the_page_shows_the_file_for_ci_and_it_runs(installed, tmp_path):
    file = EXAMPLE / "ci" / "certify"
    assert re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) == [file.read_text()]
    (tmp_path / "bin").mkdir()
    pip = tmp_path / "bin" / "pip"  # `installed` has done that, beside this environment
    pip.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/pip.txt\n')
    pip.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    rest = ["-p", "no:cacheprovider", f"--smp-report={tmp_path / 'report.json'}", "--smp-smoke"]
    done = subprocess.run(
        [file, *rest, "--smp-level=L0", "--smp-ranks=2"],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    output = done.stdout + done.stderr
    assert (tmp_path / "pip.txt").read_text() == "install ../.. .\n"
    assert "   a rehearsal, with few examples (--smp-smoke)\n" in output
    assert done.returncode == 1, output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["backend"]["name"] == "inorder"
    assert report["verdicts"]["FAIL"] == 0


def test_the_commands_of_the_page_install_what_is_there():
    """There is no distribution of this project's name to be had: pages install the clone."""
    assert (EXAMPLE / "../.." / "pyproject.toml").resolve() == ROOT / "pyproject.toml"
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", EXAMPLE / "README.md"]
    for page in pages:
        for line in re.findall(
            r"^ +pip install (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert "pytest-smp" not in line, f"{page.name}: pip install {line}"
            assert ".[test]" not in line, f"{page.name}: pip install {line}"
