"""What backends claim, and how other people's backends are found."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_smp.strategies.numbers import ALL
from smp_core.backends import BACKENDS, ENTRY_POINTS, find_backend, open_backend
from smp_core.backends.capabilities import DTYPES, EVERYTHING, REDUCTIONS, Capabilities, Capability
from smp_core.errors import BackendError
from smp_core.reduction import REDUCE_OPS, why_not


def test_the_names_are_those_of_what_sim_moves_and_reduces() -> None:
    assert {str(dtype).removeprefix("torch.") for dtype in ALL} == DTYPES
    assert set(REDUCTIONS) == REDUCE_OPS
    for op, dtypes in REDUCTIONS.items():
        assert {name for name in DTYPES if why_not(op, getattr(torch, name)) is None} == dtypes


def test_a_backend_that_says_nothing_claims_everything() -> None:
    assert BACKENDS["sim"].capabilities == EVERYTHING
    assert all(capability in EVERYTHING for capability in Capability)


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        ({"claims": frozenset({"flying"})}, "claims holds flying"),
        ({"dtypes": frozenset({"float3"})}, "dtypes holds float3"),
        ({"reductions": {"MEAN": frozenset()}}, "reductions holds MEAN"),
        ({"reductions": {"AVG": frozenset({"int8"})}}, r"reductions\['AVG'\] holds int8"),
    ],
)
def test_a_claim_of_what_there_is_not_is_refused(claims: Any, text: str) -> None:
    with pytest.raises(BackendError, match=text):
        Capabilities(**claims)


THEIRS = """
from smp_core.backends import BACKENDS
from smp_core.backends.base import Backend

class Holder:
    mine = Backend("mine", "a copy of sim", BACKENDS["sim"].open_host)

def broken():
    raise OSError("no such device")

no_backend = 3
unopenable = Backend("unopenable", "does not open", broken)
empty = Backend("empty", "opens nothing", lambda: None)
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "a_backend_of_theirs"
    (tmp_path / f"{name}.py").write_text(THEIRS)
    (tmp_path / "a_broken_one.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_module_and_attribute_name_a_backend(theirs: str) -> None:
    assert find_backend(f"{theirs}:Holder.mine").name == "mine"
    open_backend(f"{theirs}:Holder.mine").close()


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("no_such_module:x", "'no_such_module' cannot be imported: ModuleNotFoundError"),
        ("a_broken_one:x", "'a_broken_one' cannot be imported: ZeroDivisionError"),
        ("{}:missing", "has no attribute 'missing'"),
        ("{}:Holder.missing", "has no attribute 'Holder.missing'"),
        ("{}:no_backend", "is int, not a smp_core.backends.base.Backend"),
    ],
)
def test_what_names_no_backend(theirs: str, reference: str, text: str) -> None:
    with pytest.raises(BackendError, match=text):
        find_backend(reference.format(theirs))


def test_a_backend_that_raises_while_opening(theirs: str) -> None:
    with pytest.raises(BackendError, match="cannot be opened: OSError: no such device"):
        open_backend(f"{theirs}:unopenable")


def test_what_a_backend_opens_must_be_a_host(theirs: str) -> None:
    with pytest.raises(BackendError, match="what it opens is no host: it names no protocol"):
        open_backend(f"{theirs}:empty")


def test_an_entry_point_names_a_backend(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("mine", f"{theirs}:Holder.mine", ENTRY_POINTS)
    found = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr("smp_core.backends.entry_points", lambda group: found.select(group=group))
    assert find_backend("mine").name == "mine"
    with pytest.raises(BackendError, match=r"there is 'sim', 'mine'.*did you mean 'mine'"):
        find_backend("mime")
