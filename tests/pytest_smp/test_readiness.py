"""The preparation of a session's runs: what is imported before the first."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from pytest_smp.readiness import modules_for

#: Modules by name, and whether a test in them uses optimizers: an optimizer imports torch's compiler for seconds, which
#: would count against the time limit of a run.
_SOURCES = {
    "uses_one": ("from torch import optim\n\ndef train(model):\n    optim.Adam(model)\n", True),
    "imports_it": ("import uses_one\n", True),
    "imports_a_name": ("from uses_one import train\n", True),
    "plain_test": (
        "import torch\nimport smp_core.torch as smp\noptimal = 'optimistic'\n",
        False,
    ),
}


def test_modules_that_use_optimizers_have_torchs_compiler_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (source, _) in _SOURCES.items():
        tmp_path.joinpath(f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        prepared = {name: modules_for([importlib.import_module(name)]) for name in _SOURCES}
    finally:
        for name in _SOURCES:
            sys.modules.pop(name, None)
    assert prepared == {
        name: ("torch._dynamo",) if uses else () for name, (_, uses) in _SOURCES.items()
    }
