"""A project may have a package called `conformance`, as the suite's is: each gets its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODES = ("prepend", "append", "importlib")

#: The project's own test uses its package, in its process and on a rank process.
TEST = """
import conformance
import conformance.whose
import pytest

@pytest.mark.smp(ranks=2)
def test_theirs(smp):
    import conformance.whose
    assert conformance.whose.WHOSE == "theirs"
    assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]

def test_in_the_controller():
    assert conformance.whose.WHOSE == "theirs"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    package = tmp_path / "conformance"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "whose.py").write_text("WHOSE = 'theirs'\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_theirs.py").write_text(TEST)
    return tmp_path


def run(folder: Path, *command: str, path: str = "") -> tuple[str, int]:
    outside = {name: each for name, each in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, *command, "-p", "no:cacheprovider"],
        cwd=folder,
        env={**outside, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.stdout + done.stderr, done.returncode


#: How Python comes to see the project's package: by `python -m`, or by pytest's own settings. The folder
#: that `python -c` puts first is the current one, too, so the other one takes it away.
PYTEST = (
    "-c",
    "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main(sys.argv[1:]))",
)


@pytest.mark.parametrize("mode", MODES)
def test_a_project_runs_its_tests(project: Path, mode: str) -> None:
    output, code = run(project, "-m", "pytest", f"--import-mode={mode}")
    assert "2 passed" in output
    assert code == 0


def test_a_path_in_the_settings_serves_as_well(project: Path) -> None:
    (project / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    output, code = run(project, *PYTEST)
    assert "2 passed" in output
    assert code == 0


def test_workers_and_rank_processes_see_the_package_of_the_project(project: Path) -> None:
    output, code = run(project, "-m", "pytest", "-n1", "--smp-backend=gloo")
    assert "2 passed" in output
    assert code == 0


def test_a_plugin_of_the_same_name_is_loaded(project: Path) -> None:
    (project / "conformance" / "__init__.py").write_text(
        "def pytest_report_header():\n    return 'their plugin'\n"
    )
    output, code = run(project, "-m", "pytest", "-p", "conformance")
    assert "their plugin" in output
    assert "2 passed" in output
    assert code == 0


def test_their_package_stays_theirs_where_the_suite_is_asked_for_by_its_name(project: Path) -> None:
    (project / "conformance" / "test_it.py").write_text("def test_it():\n    pass\n")
    output, code = run(project, "-m", "pytest", "--pyargs", "conformance")
    place = project / "conformance" / "__init__.py"
    line = (
        f"conformance: Python finds {place} under that name; the suite of pytest-smp stands back\n"
    )
    assert line in output
    assert "1 passed" in output
    assert code == 0


@pytest.mark.parametrize(
    "options", [["--smp-certify"], ["--smp-selftest"], ["--smp-certify", "-n1"]], ids=" ".join
)
def test_an_option_of_the_suite_is_refused_in_one_line(project: Path, options: list[str]) -> None:
    output, code = run(project, "-m", "pytest", "--pyargs", "conformance", *options)
    (line,) = (each for each in output.splitlines() if each.startswith("ERROR: "))
    assert line.startswith(
        f"ERROR: {options[0]}: pytest-smp's suite is the package 'conformance', "
    )
    assert str(project / "conformance" / "__init__.py") in line
    assert "run the suite from another folder" in line
    assert "Traceback" not in output
    assert code == 4


def test_the_suite_runs_beside_a_package_of_its_name(project: Path) -> None:
    """Where their folder is not first on the path."""
    output, code = run(
        project, *PYTEST, "--pyargs", "conformance.suite.test_barriers", "--collect-only", "-q"
    )
    assert "::test_nobody_leaves_before_all_have_come" in output
    assert code == 0


def test_a_file_of_the_suite_cannot_be_run_where_its_package_is_another(project: Path) -> None:
    from pytest_smp import suite

    output, code = run(project, "-m", "pytest", str(suite.HERE / "suite" / "test_barriers.py"))
    assert (
        "ERROR: conformance: pytest-smp's suite is the package 'conformance', and Python" in output
    )
    assert "Traceback" not in output
    assert code == 4
