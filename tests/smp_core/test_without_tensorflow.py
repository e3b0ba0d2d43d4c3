"""The front end for TensorFlow where TensorFlow is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

from smp_core.errors import MissingTensorFlowError


def test_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("smp_core.tensorflow")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.meta_path", [_Without(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    with pytest.raises(MissingTensorFlowError) as found:
        importlib.import_module("smp_core.tensorflow")
    assert str(found.value) == (
        "smp_core.tensorflow needs TensorFlow, which is not installed: "
        "python -m pip install 'pytest-smp[tensorflow]'"
    )
    assert isinstance(found.value, ImportError)


class _Without:
    """Finds everything but TensorFlow."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'", name=name)
