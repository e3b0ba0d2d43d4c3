"""The table of what torch.distributed writes in the process, against the installed torch."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_smp.ranks import rank_state
from tools.torch_state import __main__ as command
from tools.torch_state import table
from tools.torch_state.scan import written_state

PAGE = Path(__file__).parents[2] / "docs" / "sim.md"

SOURCE = """
import os
import json as text
from collections import OrderedDict
from .sibling import SWITCHES

COUNT = 0
TABLE = {}
LOCAL = []

class Context:
    depth = 0
    names: set = set()

    def __enter__(self):
        type(self).depth += 1
        self.__class__.active = self
        self.own = 1

    @classmethod
    def enter(cls, name):
        cls.names.add(name)
        def leave():
            cls.names.remove(name)
        return leave

def write(argument, LOCAL):
    global COUNT, LATE
    COUNT, kept = 1, 2
    (LATE) = 3
    TABLE["key"]["deep"] = 1
    del SWITCHES.pairs[0]
    argument.field = 1
    LOCAL.append(1)
    text.dumps = None
    setattr(OrderedDict, "fixed", 1)
    setattr(Context, argument, 1)

def change(TABLE):
    TABLE.update(os.environ)
    os.environ.update(TABLE)
    os.remove("file")

def loop():
    for Context.depth in range(2):
        with open("file") as text.file:
            pass
"""


def test_forms_of_writing_that_are_read_from_the_source(tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "state_package"
    (package / "left").mkdir(parents=True)
    (package / "__init__.py").write_text("from . import written")
    (package / "written.py").write_text(SOURCE)
    (package / "left" / "__init__.py").write_text("def write():\n    global FLAG\n    FLAG = 1")
    monkeypatch.syspath_prepend(tmp_path)
    module = "state_package.written"
    expected = {
        f"{module}.COUNT",
        f"{module}.LATE",
        f"{module}.TABLE",
        f"{module}.Context.depth",
        f"{module}.Context.active",
        f"{module}.Context.names",
        f"{module}.Context.*",
        "state_package.sibling.SWITCHES.pairs",
        "json.dumps",
        "json.file",
        "collections.OrderedDict.fixed",
        "os.environ",
    }
    assert written_state("state_package", ("state_package.left",)) == expected
    assert written_state("state_package") == expected | {"state_package.left.FLAG"}
    with pytest.raises(ValueError, match="no_such_package is no installed package"):
        written_state("no_such_package")


def test_every_state_that_torch_distributed_writes_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that "come" speaks of is new in this torch: tools/torch_state/table.toml says what to do."""
    page = tmp_path / "sim.md"
    page.write_text(PAGE.read_text())
    command.main(["--write", str(page)])
    lines = capsys.readouterr().out.splitlines()
    pinned = torch.__version__.partition("+")[0] == table.read().release
    assert [line for line in lines if pinned or line.startswith("come")] == []
    assert page.read_text() == PAGE.read_text()


def test_rows_that_are_a_ranks_own_are_switched_and_no_name_has_two_rows() -> None:
    rows = table.read().rows
    assert len({row.name for row in rows}) == len(rows)
    for state in rank_state.STATES:
        if not state.module.startswith("tensorflow"):
            importlib.import_module(state.module)
    places = [
        rank_state._attribute(state)
        for state in rank_state.STATES
        if isinstance(state, rank_state.Attribute)
    ]
    switched = {(id(place[0]), place[1]) for place in places if place is not None}
    for row in rows:
        if row.kind == "own":
            owner, name = _place(row.name)
            assert (id(owner), name) in switched, row.name


def _place(name: str) -> tuple[Any, str]:
    """The object that has the attribute of this dotted name, and its name there."""
    first, *way, last = name.split(".")
    owner = importlib.import_module(first)
    for part in way:
        owner = getattr(owner, part)
    return owner, last
