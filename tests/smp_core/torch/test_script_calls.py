"""Every attribute that docs/spec/api.md counts in public scripts, called by SMP's import name as scripts call it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smp_core.torch as api
from smp_core import install_import_names, remove_import_names
from tests.smp_core.torch.script_calls import BEGINNING, CALLS, TENSORFLOW, WORLDS

PAGE = Path(__file__).parents[3] / "docs/spec/api.md"


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    install_import_names()
    yield
    remove_import_names()


def counted() -> set[str]:
    """The names in section 7 of the page: the table, imports, members, and what no script uses."""
    section = re.search(
        r'<a id="7"></a>(.*?)<a id="8"></a>', PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert section is not None
    return set(re.findall(r"`([\w.]+)`", section[1]))


def test_every_attribute_of_the_page_has_its_program() -> None:
    names = counted()
    assert len(names) > 90
    more = {
        *(f"get_{kind}_process_group" for kind in ("tp", "pp", "rdp")),  # in words
        "num_microbatches",  # API 1.9
    }
    assert set(CALLS) == names - TENSORFLOW | more


@pytest.mark.parametrize("name", CALLS)
def test_a_program_uses_its_attribute(name: str) -> None:
    assert re.search(rf"\b{name.rpartition('.')[2]}\b", BEGINNING + CALLS[name].program)


def run(name: str, folder: str) -> None:
    """A program on this rank, as a script that a launcher starts."""
    world, program, _ = CALLS[name]
    api.shutdown()
    space: dict[str, Any] = {"__name__": "script", "config": WORLDS[world][1], "folder": folder}
    exec(compile(BEGINNING, "<beginning>", "exec"), space)
    exec(compile(program, f"<{name}>", "exec"), space)


@pytest.mark.filterwarnings("ignore::smp_core.torch.fused.PlainEquivalentWarning")
@pytest.mark.parametrize("name", CALLS)
def test_an_attribute_is_called_as_scripts_call_it(smp_world, tmp_path: Path, name: str) -> None:
    if CALLS[name].needs:
        pytest.importorskip(CALLS[name].needs)
    smp_world.run(run, name, str(tmp_path), ranks=WORLDS[CALLS[name].world][0])
