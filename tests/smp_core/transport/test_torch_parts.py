"""The used parts of torch are data; a torch that nobody tried is judged by them."""

from __future__ import annotations

import ast
import importlib.metadata
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import smp_core
from pytest_smp.ranks.backends import open_backend
from smp_core.errors import BackendError, UnknownTorchWarning
from smp_core.transport import torch_parts
from smp_core.transport.torch_parts import PARTS, TRIED, TorchPart

PACKAGES = Path(smp_core.__file__).parents[1]
LISTED = {str(part) for parts in PARTS.values() for part in parts}


def private_names(path: Path) -> Iterator[str]:
    """The names of torch in a file that are private, or of a module that documents none."""
    tree = ast.parse(path.read_text())
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(target=ast.Name(id=alias), value=ast.Name(id=known)):
                if known in names:
                    names[alias] = names[known]
    for node in ast.walk(tree):
        parts = []
        inner: ast.expr = node if isinstance(node, ast.Attribute) else ast.Constant(None)
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in names:
            yield ".".join([names[inner.id], *reversed(parts)])
    yield from names.values()


def is_private(name: str) -> bool:
    parts = name.split(".")
    return "distributed_c10d" in parts or any(
        part.startswith("_") and not part.startswith("__") for part in parts
    )


def is_listed(name: str) -> bool:
    """A part itself, what leads to one, or an attribute of one."""
    return any(
        name == part or part.startswith(f"{name}.") or name.startswith(f"{part}.")
        for part in LISTED
    )


def test_every_private_part_of_torch_is_listed() -> None:
    unlisted = {
        f"{path.relative_to(PACKAGES)}: {name}"
        for package in ("smp_core", "pytest_smp")
        for path in (PACKAGES / package).rglob("*.py")
        for name in private_names(path)
        if is_private(name) and not is_listed(name)
    }
    assert not unlisted


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    code = (
        "import torch\nfrom torch.distributed import distributed_c10d as c10d\n"
        "other: Any = c10d\ntorch._secret.x\nc10d._hidden(1)\nother._more\ntorch.public\n"
    )
    (tmp_path / "module.py").write_text(code)
    found = {name for name in private_names(tmp_path / "module.py") if is_private(name)}
    c10d = "torch.distributed.distributed_c10d"
    assert found >= {"torch._secret.x", f"{c10d}._hidden", f"{c10d}._more"}
    assert "torch.public" not in found


@pytest.mark.parametrize("user", PARTS)
def test_this_torch_has_them(user: str) -> None:
    assert torch_parts.missing([user]) == {}


def test_a_release_that_was_tried_is_taken_as_it_is() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for release in TRIED:
            for version in (f"{release}.0", f"{release}.1+cu130", f"{release}.0+cpu"):
                torch_parts.warn(version)
                torch_parts.require(*PARTS, version=version, self_check=lambda: pytest.fail("run"))


@pytest.mark.parametrize("version", ["2.99.0", "3.0.0", "2.130.0", "2.1.0"])
def test_another_release_goes_on_with_one_warning(version: str) -> None:
    with pytest.warns(UnknownTorchWarning, match=f"torch {version}") as caught:
        torch_parts.warn(version)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_parts.warn(version)
    ran = []
    torch_parts.require(*PARTS, version=version, self_check=lambda: ran.append(version))
    assert ran == [version]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (TorchPart("torch.nowhere", "x"), r"does not have: torch\.nowhere\.x\. Install"),
        (TorchPart("torch.distributed", "_nothing"), r"torch\.distributed\._nothing"),
        (
            TorchPart("torch.distributed", "new_group", takes=("colour",)),
            "the parameter 'colour' of",
        ),
        (TorchPart("torch.distributed", "new_group", calls=20), "too many positional arguments"),
        (
            TorchPart("torch.distributed", "get_rank", calls=0, takes=("group", "x")),
            "the parameter 'x'",
        ),
    ],
)
def test_what_is_missing_is_named(
    part: TorchPart, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_parts, "PARTS", {"the sim backend": (part,)})
    with pytest.raises(BackendError, match=text) as caught:
        torch_parts.require("the sim backend", version="2.99.0")
    assert str(caught.value).startswith(
        "the sim backend needs a part of torch that this torch, 2.99.0"
    )
    assert "\n" not in str(caught.value)


def test_parts_that_are_there_and_do_not_work_are_refused() -> None:
    def fails() -> None:
        raise RuntimeError("a work has no future\nC++ frames")

    with pytest.raises(BackendError) as caught:
        torch_parts.require("the sim backend", version="2.99.0", self_check=fails)
    assert "does not work with this torch, 2.99.0: RuntimeError: a work has no future." in str(
        caught.value
    )


def test_sim_opens_on_an_unknown_torch_after_its_self_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pytest_smp.ranks.sim import self_check

    monkeypatch.setattr(torch_parts, "installed", lambda: "2.98.0")
    with pytest.warns(UnknownTorchWarning):
        open_backend("sim").close()

    def wrong() -> None:
        raise AssertionError("all_reduce")

    monkeypatch.setattr(self_check, "body", wrong)
    with pytest.raises(BackendError, match="AssertionError: all_reduce"):
        open_backend("sim")


def test_a_torch_without_a_part_is_refused_before_the_part_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_parts, "installed", lambda: "2.97.0")
    monkeypatch.setitem(
        torch_parts.PARTS,
        "the sim backend",
        (TorchPart("torch._C._distributed_c10d", "_set_isolation"),),
    )
    with (
        pytest.warns(UnknownTorchWarning),
        pytest.raises(
            BackendError, match=r"the sim backend needs .*_distributed_c10d\._set_isolation"
        ),
    ):
        open_backend("sim")


def test_nothing_keeps_a_newer_torch_out() -> None:
    """Pip would enforce an upper end against a user's own torch."""
    found = importlib.metadata.requires("pytest-smp") or ()
    (torch,) = (each for each in map(Requirement, found) if each.name == "torch")
    assert {each.operator for each in torch.specifier} == {">="}
    assert Version(f"{TRIED[0]}.0") in torch.specifier


def test_a_function_that_takes_any_keyword_has_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    def helper(group: object, **options: object) -> None:
        pass

    monkeypatch.setattr(torch, "_smp_test", SimpleNamespace(helper=helper), raising=False)
    assert TorchPart("torch", "_smp_test.helper", takes=("anything",), calls=1).missing() is None
