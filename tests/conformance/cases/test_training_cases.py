"""Cases of training fit the engine: no property asks it for what it does not claim."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import conformance.suite
from conformance.cases.training import KINDS, results
from conformance.engines.capabilities import EngineCapability
from conformance.engines.ddp import DdpEngine
from pytest_smp.strategies.training import Training
from pytest_smp.strategies.training_models import Block, Model

SUITE = Path(conformance.suite.__file__).parent

BARE = DdpEngine("bare", capabilities=frozenset({EngineCapability.TRAINING}))

#: They draw for any engine; the functions of conformance/cases draw for the one that is tested.
FOR_ANY = {"trainings", "sharded_trainings", "tensor_trainings"}


@pytest.mark.parametrize("kind", [kind for kinds in KINDS.values() for kind in kinds])
def test_an_engine_gets_no_block_that_it_does_not_claim(kind: str) -> None:
    children = (Block("linear"), Block("linear")) if kind == "route" else ()
    case = Training(Model(Block("chain", (Block(kind, children),))))
    no_world: Any = None  # nothing starts
    with pytest.raises(
        ValueError, match=rf"kinds {kind}, which the engine '.*BARE' does not claim"
    ):
        results(no_world, f"{__name__}:BARE", case)


@pytest.mark.parametrize("path", sorted(SUITE.glob("test_*.py")), ids=lambda path: path.stem)
def test_properties_draw_cases_for_the_engine_that_is_tested(path: Path) -> None:
    imported = {
        name.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert not imported & FOR_ANY
