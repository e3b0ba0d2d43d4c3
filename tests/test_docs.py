"""The examples of README and docs do what the pages show."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from smp_core.launch import command
from smp_core.launch.toolkit import TrainingEnvironment

from .fork_server import Ended, ForkServer

ROOT = Path(__file__).parent.parent


def blocks(name: str, language: str = "") -> list[str]:
    """The fenced blocks of one language in a page."""
    text = (ROOT / name).read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in fenced if name == language]


def anchors(page: Path) -> set[str]:
    """The places that a link can name: headings, as GitHub spells them, and anchors that are written."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", each)) for each in headings)
    spelled = {each.strip().lower().replace(" ", "-") for each in words}
    return spelled | set(re.findall(r'<a id="([^"]+)"', text))


RunPytest = Callable[..., Ended]


@pytest.fixture(scope="module")
def run_pytest(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> RunPytest:
    """Runs pytest with these arguments in a folder, in a process that has torch and ours imported."""
    # Neither the variables of this session, nor the failures that Hypothesis keeps of earlier ones in the clone.
    outside = {name: each for name, each in os.environ.items() if "PYTEST" not in name}
    outside["HYPOTHESIS_STORAGE_DIRECTORY"] = str(tmp_path_factory.mktemp("hypothesis"))

    def run(*arguments: str, folder: Path = ROOT) -> Ended:
        options = ("-m", "pytest", "-p", "no:cacheprovider")
        return fork_server.python(*options, *arguments, folder=folder, environment=outside)

    return run


def without_guests() -> list[str]:
    """Options that block every plugin of pytest that installing the clone does not bring."""
    wanted = {"pytest-smp", "hypothesis"}
    points = metadata.entry_points(group="pytest11")
    guests = [each.name for each in points if each.dist and each.dist.name not in wanted]
    return [word for name in guests for word in ("-p", f"no:{name}")]


@pytest.fixture(scope="module")
def failures(run_pytest: RunPytest) -> str:
    """The last section of what the broken example prints, after `pip install path/to/the/clone` alone."""
    done = run_pytest("examples/test_broken.py", "--smp-ranks=8", *without_guests())
    assert done.code == 1, done.stdout + done.stderr
    section = re.search(r"= failures on ranks =+\n(.*?)^=+ short test", done.stdout, re.M | re.S)
    assert section is not None, done.stdout
    return section.group(1)


def test_the_page_of_failures_shows_the_broken_example(failures):
    assert blocks("docs/failures.md") == [failures]


def test_the_failure_of_the_readme_is_one_of_them(failures):
    (shown,) = (block for block in blocks("README.md") if "DeadlockError" in block)
    assert shown in failures


def test_the_tests_of_readme_and_pages_pass(tmp_path, run_pytest):
    pages = {"README.md": 2}
    with_one = ("steps", "pipelines", "precision", "sharding", "checkpoints", "scripts")
    pages |= {f"docs/{page}.md": 1 for page in with_one} | {
        "docs/tensor.md": 2,
        "docs/testing.md": 5,
    }
    for page, count in pages.items():
        examples = blocks(page, "python")
        assert len(examples) == count
        for number, example in enumerate(examples):
            name = f"test_{Path(page).stem.lower()}_{number}.py"
            (tmp_path / name).write_text(example, encoding="utf-8")
    done = run_pytest("--smp-ranks=8", "-q", folder=tmp_path)
    assert f"{sum(pages.values())} passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_the_examples_of_faults_pass(tmp_path, backend, run_pytest):
    examples = blocks("docs/faults.md", "python")
    for number, example in enumerate(examples):
        (tmp_path / f"test_faults_{number}.py").write_text(example, encoding="utf-8")
    done = run_pytest(f"--smp-backend={backend}", "--smp-ranks=4", "-q", folder=tmp_path)
    count = sum(len(re.findall(r"^def test_", example, re.MULTILINE)) for example in examples)
    assert f"{count} passed" in done.stdout, done.stdout + done.stderr


def test_the_page_of_faults_names_every_method():
    from pytest_smp.faults import SmpFaults

    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    methods = {name for name in vars(SmpFaults) if not name.startswith("_")}
    assert methods
    shown = {name for name in methods if f"smp_faults.{name}(" in page or f"| `{name}(" in page}
    assert methods - shown == set()


def test_the_number_of_requirements_is_the_one_that_pages_show():
    """A line that a session ends with tells the verdicts on all requirements."""
    from conformance.engines.capabilities import FRONT_ENDS
    from conformance.requirements.catalogue import REQUIREMENTS

    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {
        (page.name, line): sum(map(int, re.findall(r"(\d+) [A-Z]", line)))
        for page in pages
        for line in re.findall(r"= requirements: (.*?) \(", page.read_text(encoding="utf-8"))
    }
    assert {"README.md", "third_party.md"} <= {page for page, _ in shown}
    asked = sum(not FRONT_ENDS & set(each.needs) for each in REQUIREMENTS.values())
    other = {place: count for place, count in shown.items() if count != asked}
    assert not other, f"sessions ask for {asked} requirements: correct {other}"


def rows(name: str, heading: str) -> list[str]:
    """The first cells of the first table behind a heading or a header of a page, without backticks."""
    text = (ROOT / name).read_text(encoding="utf-8")
    table = re.search(rf"^[#|]* ?{heading}\b.*?(?:^\|[-|]+\|\n)(.*?)\n\n", text, re.M | re.S)
    assert table is not None
    return [line.split("|")[1].strip().replace("`", "") for line in table[1].splitlines()]


def test_the_levels_of_the_page_are_those_of_the_requirements():
    from conformance.requirements.catalogue import REQUIREMENTS

    levels = sorted({each.level for each in REQUIREMENTS.values()})
    assert rows("docs/conformance.md", "level") == [each.name for each in levels]


def test_the_engines_of_the_page_are_those_that_have_names():
    from conformance.engines.names import BUILT_IN

    assert rows("docs/conformance.md", "Engines") == [*BUILT_IN, "module:attribute"]


def test_the_modules_that_ask_an_engine_are_those_whose_requirements_need_one():
    from conformance.engines.capabilities import EngineCapability
    from conformance.requirements.catalogue import REQUIREMENTS

    asking = set()
    for path in (ROOT / "conformance/suite").glob("test_*.py"):
        ids = re.findall(r'@requirement\("([^"]+)"\)', path.read_text(encoding="utf-8"))
        needs = {need for each in ids for need in REQUIREMENTS[each].needs}
        asking |= {path.stem} if needs & set(EngineCapability) else set()
    page = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"An engine is asked by the modules (.*?);", page, re.DOTALL)
    assert re.findall(r"`(\w+)`", listed) == sorted(asking)


def test_the_backends_of_the_page_are_those_that_have_names():
    from pytest_smp.ranks.backends import BACKENDS

    shown = rows("docs/backends.md", "backend")
    named = {each.removesuffix(" (default)") for each in shown} - {"torch:NAME"}
    assert {each for each in named if re.fullmatch(r"\w+", each)} == set(BACKENDS)


def test_addresses_that_moved_are_in_the_changelog():
    from pytest_smp.moved import MODULES

    moved = rows("docs/changelog.md", "Moved")
    assert set(MODULES) <= set(moved)


def test_the_first_example_of_the_readme_is_the_one_in_examples():
    example = (ROOT / "examples/test_order.py").read_text(encoding="utf-8")
    assert blocks("README.md", "python")[0] in example


def test_the_readme_is_read_in_one_sitting():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_benchmark_has_its_command_beside_its_figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.__main__ import NAMES

    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert re.findall(r"^`python -m benchmarks (\w+)`", page, re.MULTILINE) == list(NAMES)


def test_the_continuous_integration_runs_the_test_command_of_the_readme():
    """Each command once: a second one would run its environments again."""
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^    pip install tox && tox run  +#", readme, re.MULTILINE)
    assert re.findall(r"^(?:pip|tox) .*", script, re.MULTILINE) == ["pip install tox", "tox run"]


def test_every_option_is_documented(run_pytest):
    """The tables of options in docs/ against what pytest itself prints."""
    done = run_pytest("--help")
    options = set(re.findall(r"^\s+(--smp-[a-z-]+)", done.stdout, re.MULTILINE))
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    documented = set(re.findall(r"^\| `(--smp-[a-z-]+)", "\n".join(pages), re.MULTILINE))
    assert options == documented
    assert options


def test_no_sentence_begins_with_a_word_that_names_nothing():
    """A reader finds the subject of a sentence in the sentence."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "examples").rglob("*.md")]
    found = []
    for page in [*pages, *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        text = re.sub(r"^ {4,}.*$", "", text, flags=re.M)
        text = re.sub(r'<a id="[^"]*"></a>', "", text)
        starts = re.findall(r"(?:^|[.!?:] |[|] |- )[*]*((?:What|Who|It|That)\b[^.|]*)", text, re.M)
        found += [f"{page.name}: {each}" for each in starts]
    assert not found, "\n".join(found)


def test_links_lead_somewhere():
    """Files exist, and so do the headings that a link names."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            file, _, anchor = link.partition("#")
            if file.startswith("http"):
                continue
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_the_estimator_of_the_page_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (text,) = blocks("docs/launching.md", "python")
    names: dict[str, object] = {}
    exec(text, names)
    assert Path(names["estimator"].model_data).is_dir()


def test_the_page_of_launching_has_every_option_and_variable() -> None:
    page = (ROOT / "docs/launching.md").read_text(encoding="utf-8")
    for action in command.parser()._actions:
        if action.option_strings and action.dest != "help":
            assert f"`{action.option_strings[0]}" in page
    told = TrainingEnvironment(
        **{each.name: "" for each in dataclasses.fields(TrainingEnvironment)}
        | {"hosts": ("algo-1",), "hyperparameters": {}, "channels": {}, "framework_params": {}}
    )
    assert [name for name in told.variables() if f"`{name}`" not in page] == []
