"""Modules import each other in one direction: no loop anywhere, and inside smp_core and smp_core/torch in the order of
layers.

An arrow is any import: at the top, under ``if TYPE_CHECKING``, and inside of functions.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("smp_core", "pytest_smp", "conformance")
TORCH = "smp_core.torch"
#: Folders that a clone has and a wheel has not.
CLONE = {"benchmarks", "examples", "tests", "tools"}


class Layering(NamedTuple):
    """The layers of one package.

    Attributes:
        package: its name.
        order: the layers from the lowest to the highest. A module imports its own layer and those of the rows above,
            none beside it.
        layers: the layer of modules and folders: the longest name counts, "" is all the rest.
    """

    package: str
    order: tuple[tuple[str, ...], ...]
    layers: Mapping[str, str]

    def holds(self, module: str) -> bool:
        """Return whether a module is the package or part of it."""
        return f"{module}.".startswith(f"{self.package}.")

    def entry(self, module: str) -> str:
        """The entry of ``layers`` that a module of the package belongs to."""
        below = module.removeprefix(self.package).removeprefix(".")
        fits = [each for each in self.layers if not each or f"{below}.".startswith(f"{each}.")]
        return max(fits, key=len)

    def upwards(self, found: list[Arrow]) -> Iterator[str]:
        """The arrows inside the package that lead to a higher layer, or to one beside."""
        height = {layer: number for number, row in enumerate(self.order) for layer in row}
        for arrow in found:
            if all(map(self.holds, arrow[:2])):
                source, target = (self.layers[self.entry(each)] for each in arrow[:2])
                if source != target and height[source] <= height[target]:
                    yield f"{arrow} ({source} imports {target})"


IN_CORE = Layering(
    "smp_core",
    (("ground",), ("transport",), ("runtime",), ("torch", "tensorflow"), ("launch",)),
    {
        "": "ground",
        "transport": "transport",
        "runtime": "runtime",
        "comm": "runtime",
        "horovod": "runtime",
        "collective_try": "runtime",
        "torch": "torch",
        "tensorflow": "tensorflow",
        "launch": "launch",
    },
)
IN_TORCH = Layering(
    TORCH,
    (
        ("ground",),
        ("execution",),
        ("memory",),
        ("precision",),
        ("reduction",),
        ("sharding", "pipeline", "tensor"),
        ("nn",),
        ("optimizer",),
        ("api",),
    ),
    {
        "exceptions": "ground",
        "tensor_tree": "ground",
        "session": "ground",
        "state_keys": "ground",
        "fused": "ground",
        "optimizers": "ground",
        "parameters": "ground",
        "execution": "execution",
        "memory": "memory",
        "patches": "memory",
        "precision": "precision",
        "reduction": "reduction",
        "sharding": "sharding",
        "pipeline": "pipeline",
        "tensor_parallel": "tensor",
        "nn": "nn",
        "optimizer": "optimizer",
        "": "api",
    },
)
LAYERINGS = [pytest.param(each, id=each.package) for each in (IN_CORE, IN_TORCH)]


class Arrow(NamedTuple):
    """One import; ``target`` is a module of ours, or any name that is imported."""

    source: str
    target: str
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.source} imports {self.target}"


def modules(root: Path) -> dict[str, Path]:
    """The modules of the packages, by name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def arrows(root: Path) -> list[Arrow]:
    """All imports of all modules; ``from package import module`` leads to the module."""
    known = modules(root)
    found = []
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                    base = f"{above}.{base}" if base else above
                below = [f"{base}.{alias.name}" for alias in node.names]
                targets = [each if each in known else base for each in below]
            else:
                continue
            place = f"{path.relative_to(root)}:{node.lineno}"
            found += [Arrow(name, target, place) for target in targets if target != name]
    return found


def loop(found: list[Arrow]) -> list[Arrow]:
    """The arrows of one loop among modules of ours, none if there is no loop."""
    ours = {arrow.source for arrow in found}
    graph: defaultdict[str, dict[str, Arrow]] = defaultdict(dict)
    for arrow in found:
        if arrow.target in ours:
            graph[arrow.source].setdefault(arrow.target, arrow)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle: list[str] = error.args[1]
        return [graph[source][target] for target, source in itertools.pairwise(cycle)]
    return []


@functools.cache
def all_arrows() -> list[Arrow]:
    return arrows(ROOT)


def test_there_is_no_import_loop() -> None:
    found = loop(all_arrows())
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("layering", LAYERINGS)
def test_layers_import_downwards(layering: Layering) -> None:
    found = list(layering.upwards(all_arrows()))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("layering", LAYERINGS)
def test_the_table_of_layers_names_what_there_is(layering: Layering) -> None:
    present = {layering.entry(each) for each in modules(ROOT) if layering.holds(each)}
    assert set(layering.layers) == present
    assert set(layering.layers.values()) == {layer for row in layering.order for layer in row}


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("smp_core", {"pytest_smp", "conformance", "pytest", "hypothesis", *CLONE}),
        ("pytest_smp", {"conformance", *CLONE}),
        ("conformance", CLONE),
    ],
)
def test_imports_point_one_way(package: str, never: set[str]) -> None:
    own = [arrow for arrow in all_arrows() if arrow.source.partition(".")[0] == package]
    assert own
    assert not [str(arrow) for arrow in own if arrow.target.partition(".")[0] in never]


def definitions(root: Path) -> dict[str, list[str]]:
    """Where each public class of the packages is defined, by its name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in modules(root).values():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(root)))
    return found


def defined_twice(root: Path) -> dict[str, list[str]]:
    """The names of classes that are defined more than once."""
    return {name: places for name, places in definitions(root).items() if len(places) > 1}


#: Names of the API, which each of the two frameworks has.
OF_EACH_FRAMEWORK = {"DistributedModel", "StepFunction", "StepOutput"}


def test_a_public_class_name_is_defined_once() -> None:
    found = defined_twice(ROOT)
    of_frameworks = [found.pop(each) for each in sorted(OF_EACH_FRAMEWORK)]
    assert not found
    for places in of_frameworks:
        assert sorted(each.split("/")[1] for each in places) == ["tensorflow", "torch"]


def count_any(source: str) -> int:
    """How often a module's code says Any, imports aside."""
    return sum(
        isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(source))
    )


def test_torch_says_any_where_it_must() -> None:
    """At most as often as today's values of users, and torch's that have no types, ask for."""
    found = {
        str(path.relative_to(ROOT)): count_any(path.read_text(encoding="utf-8"))
        for name, path in modules(ROOT).items()
        if f"{name}.".startswith(f"{TORCH}.")
    }
    most = dict(sorted(found.items(), key=lambda each: -each[1])[:5])
    assert sum(found.values()) <= 150, most


def unmirrored(root: Path) -> list[str]:
    """The test files that lie in a folder without a folder of that path among the packages and tools."""
    tests = root / "tests"
    files = [path.relative_to(tests) for path in sorted(tests.rglob("test_*.py"))]
    return [str(path) for path in files if not (root / path.parent).is_dir()]


def test_tests_lie_as_what_they_test_does() -> None:
    assert not unmirrored(ROOT)


# The checks themselves.


def write(root: Path, **files: str) -> Path:
    for package in PACKAGES:
        (root / package).mkdir()
    for name, source in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


@pytest.mark.parametrize(
    "back",
    [
        "import smp_core.one",
        "from smp_core import one",
        "from . import one",
        "from .one import Name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from smp_core.one import Name",
        "def later():\n    from smp_core.one import Name",
    ],
)
def test_a_loop_is_told_with_its_arrows(tmp_path: Path, back: str) -> None:
    root = write(tmp_path, smp_core__one="from smp_core import two", smp_core__two=back)
    line = len(back.splitlines())
    assert sorted(map(str, loop(arrows(root)))) == [
        "smp_core/one.py:1: smp_core.one imports smp_core.two",
        f"smp_core/two.py:{line}: smp_core.two imports smp_core.one",
    ]


def test_an_arrow_to_a_higher_layer_is_told(tmp_path: Path) -> None:
    source = "def later():\n    from smp_core.torch.sharding.sharded_model import ShardedModel"
    root = write(
        tmp_path, smp_core__torch__execution__engine=source, smp_core__torch__sharding__state=""
    )
    (told,) = IN_TORCH.upwards(arrows(root))
    assert told.startswith("smp_core/torch/execution/engine.py:2: ")
    assert told.endswith("(execution imports sharding)")


def test_an_arrow_from_the_transport_to_the_runtime_is_told(tmp_path: Path) -> None:
    source = "from smp_core.runtime import current"
    root = write(tmp_path, smp_core__transport__solo=source, smp_core__runtime="")
    (told,) = IN_CORE.upwards(arrows(root))
    assert told.endswith("(transport imports runtime)")


def test_a_class_name_that_is_defined_twice_is_told(tmp_path: Path) -> None:
    one = "class Report: ...\n\n\nclass Own: ...\n\n\nclass _Private: ..."
    other = "class Report: ...\n\n\nclass _Private: ...\n\n\nclass Outer:\n    class Own: ..."
    root = write(tmp_path, smp_core__one=one, pytest_smp__ranks__other=other)
    assert defined_twice(root) == {"Report": ["smp_core/one.py", "pytest_smp/ranks/other.py"]}


def test_any_is_counted_where_it_is_said() -> None:
    source = "from typing import Any\n\ndef one(x: Any, *rest: list[Any]) -> object:\n    'Any'"
    assert count_any(source) == 2


def test_a_test_in_a_folder_of_its_own_is_told(tmp_path: Path) -> None:
    root = write(tmp_path, smp_core__torch__model="")
    for folder in ("smp_core/torch", "smp_core/torch/pipeline"):
        (root / "tests" / folder).mkdir(parents=True)
        (root / "tests" / folder / "test_model.py").touch()
    assert unmirrored(root) == ["smp_core/torch/pipeline/test_model.py"]
