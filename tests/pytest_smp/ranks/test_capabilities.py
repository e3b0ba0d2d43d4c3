"""The claims of backends, and the ways in which other people's backends are found."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_smp.ranks.backends import BACKENDS, ENTRY_POINTS, find_backend, open_backend
from pytest_smp.ranks.capabilities import DTYPES, EVERYTHING, REDUCTIONS, Capabilities, Capability
from pytest_smp.strategies.numbers import ALL
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
        ({"dtypes": frozenset()}, "dtypes is empty"),
        ({"narrower": {"flying": frozenset()}}, "narrower holds flying"),
        (
            {"dtypes": frozenset({"int8"}), "narrower": {Capability.GATHER: frozenset({"bool"})}},
            r"narrower\['gather'\] holds bool",
        ),
        ({"reductions": {"MEAN": frozenset()}}, "reductions holds MEAN"),
        ({"reductions": {"AVG": frozenset({"int8"})}}, r"reductions\['AVG'\] holds int8"),
    ],
)
def test_a_claim_of_what_there_is_not_is_refused(claims: Any, text: str) -> None:
    with pytest.raises(BackendError, match=text):
        Capabilities(**claims)


def test_an_operation_moves_what_is_claimed_for_it() -> None:
    some = Capabilities(narrower={Capability.GATHER: frozenset({"int8", "bool"})})
    assert some.moves(Capability.GATHER) == {"int8", "bool"}
    assert some.moves(Capability.SCATTER) == DTYPES
    assert "narrower={'gather': ['bool', 'int8']}" in repr(some)


THEIRS = """
from pytest_smp.ranks.backends import BACKENDS
from pytest_smp.ranks.protocols import Backend

class Holder:
    mine = Backend("mine", "a copy of sim", BACKENDS["sim"].open_executor)

def broken():
    raise OSError("no such device")

no_backend = 3
unopenable = Backend("unopenable", "does not open", broken)
empty = Backend("empty", "opens nothing", lambda: None)

class Leaving(BaseException):  # as pytest's own, no Exception
    def __str__(self):
        raise ValueError

def leaving():
    raise Leaving

leaves = Backend("leaves", "leaves", leaving)

def __getattr__(name):
    if name == "lazy":
        raise SystemExit("no licence")
    raise AttributeError(name)

class Executor:
    closed = []

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def close(self):
        self.closed.append(self)
        raise OSError("it does not close")

def hosting(**attributes):
    return Backend("mine", "mine", lambda: Executor(**attributes))

old = hosting(protocol=0, open=print)
last = hosting(protocol=1, open=print)
shut = hosting(protocol=2)
unclosable = hosting(protocol=2, open=print, close=3)
bare = hosting(protocol=2, open=print)
poor = hosting(protocol=2, open=print, configure=print, injects=())

class Protocol:
    @property
    def protocol(self):
        raise OSError("not yet")

moody = Backend("moody", "", Protocol)
nameless = Backend(3, "", lambda: None)
untold = Backend("untold", None, lambda: None)
closed = Backend("closed", "", None)
claiming = Backend("claiming", "", lambda: None, {"ranks"})
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "a_backend_of_theirs"
    (tmp_path / f"{name}.py").write_text(THEIRS)
    (tmp_path / "a_broken_one.py").write_text("1 / 0")
    (tmp_path / "an_exit.py").write_text("raise SystemExit(3)")
    (tmp_path / "a_skip.py").write_text(
        "import pytest\npytest.skip('not here', allow_module_level=True)"
    )
    (tmp_path / "an_interrupt.py").write_text("raise KeyboardInterrupt")
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
        ("an_exit:x", "'an_exit' cannot be imported: SystemExit: 3"),
        ("a_skip:x", "'a_skip' cannot be imported: Skipped: not here"),
        ("{}:lazy", "a_backend_of_theirs:lazy cannot be looked up: SystemExit: no licence"),
        (
            "{}:nameless",
            "the name of a_backend_of_theirs:nameless is not a text, but of the type int",
        ),
        (
            "{}:untold",
            "the summary of a_backend_of_theirs:untold is not a text, but of the type None",
        ),
        (
            "{}:closed",
            "the open_executor of a_backend_of_theirs:closed is not callable, but of the type",
        ),
        (
            "{}:claiming",
            "the capabilities of a_backend_of_theirs:claiming is not a Capabilities, but",
        ),
        ("{}:no_backend", "is int, not a pytest_smp.ranks.protocols.Backend"),
    ],
)
def test_what_names_no_backend(theirs: str, reference: str, text: str) -> None:
    with pytest.raises(BackendError, match=text):
        find_backend(reference.format(theirs))


def test_a_backend_that_raises_while_opening(theirs: str) -> None:
    with pytest.raises(BackendError, match="cannot be opened: OSError: no such device"):
        open_backend(f"{theirs}:unopenable")


def test_what_a_backend_opens_must_be_a_host(theirs: str) -> None:
    with pytest.raises(BackendError, match="what it opens is no executor: it names no protocol"):
        open_backend(f"{theirs}:empty")


def test_what_is_no_error_of_a_backend_passes(theirs: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        find_backend("an_interrupt:x")


@pytest.mark.parametrize(
    ("attribute", "text"),
    [
        ("leaves", "cannot be opened: Leaving$"),
        ("moody", "what it opens is no executor: OSError: not yet"),
        (
            "old",
            "what it opens was written for version 0 of the protocol; this one has 2: see docs/changelog",
        ),
        (
            "last",
            "what it opens was written for version 1 of the protocol; this one has 2: see docs/changelog",
        ),
        (
            "bare",
            "what it opens is no executor: it has no method configure; inherit from pytest_smp.ranks.protocols.Exec",
        ),
        ("poor", "what it opens is no executor: it has no steady; inherit from"),
        ("shut", "what it opens is no executor: it has no method open"),
        ("unclosable", "what it opens is no executor: it has no method close"),
    ],
)
def test_a_host_that_is_refused_is_closed(theirs: str, attribute: str, text: str) -> None:
    with pytest.raises(BackendError, match=f"^backend '{theirs}:{attribute}'.*{text}"):
        open_backend(f"{theirs}:{attribute}")
    module = sys.modules[theirs]
    assert len(module.Executor.closed) == (attribute in ("old", "last", "shut", "bare", "poor"))
    module.Executor.closed.clear()


def test_an_entry_point_names_a_backend(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("mine", f"{theirs}:Holder.mine", ENTRY_POINTS)
    found = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr(
        "pytest_smp.ranks.backends.entry_points", lambda group: found.select(group=group)
    )
    assert find_backend("mine").name == "mine"
    with pytest.raises(BackendError, match=r"there is 'sim', .*'mine'.*did you mean 'mine'"):
        find_backend("mime")
