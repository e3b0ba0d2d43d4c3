"""The names of Horovod: a stand-in that knows the replicas, and never hides a Horovod that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from smp_core import install_import_names, remove_import_names
from smp_core.errors import RankError


def _imported() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "horovod"]


class _Variable:
    """A variable as TensorFlow has them, of one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def numpy(self) -> float:
        return self.value

    def assign(self, value: float) -> None:
        self.value = value


def test_the_names_last_until_they_are_removed() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("horovod.tensorflow")
    install_import_names()
    try:
        module = importlib.import_module("horovod.tensorflow")
        assert module.__name__ == "smp_core.horovod"
        assert importlib.util.find_spec("horovod.torch") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("horovod.torch")
        with pytest.raises(AttributeError, match=r"'DistributedOptimizer' .* averages over repl"):
            _ = module.DistributedOptimizer
    finally:
        remove_import_names()
    assert not _imported()


def test_code_that_asks_finds_no_horovod() -> None:
    install_import_names()
    try:
        assert importlib.util.find_spec("horovod") is None
        assert not _imported()
    finally:
        remove_import_names()


def test_an_installed_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horovod" / "tensorflow").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "tensorflow" / "__init__.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    install_import_names()
    try:
        assert importlib.import_module("horovod.tensorflow").REAL
    finally:
        remove_import_names()
    assert _imported() == ["horovod", "horovod.tensorflow"]
    for name in _imported():
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.smp(ranks=4, pipeline_parallel_degree=2)
def test_ranks_are_replicas(smp: Any) -> None:
    import smp_core.horovod as hvd

    hvd.init()
    assert (hvd.rank(), hvd.size()) == (smp.rank() // 2, 2)
    assert (hvd.local_rank(), hvd.local_size()) == (smp.rank(), 4)
    variables = [_Variable(10 * smp.rank()), _Variable(10 * smp.rank() + 1)]
    hvd.broadcast_variables(iter(variables), root_rank=1)
    root = 2 + smp.rank() % 2
    assert [variable.value for variable in variables] == [10 * root, 10 * root + 1]
    with pytest.raises(RankError, match="root_rank=2: there are 2 replicas"):
        hvd.broadcast_variables(variables, root_rank=2)
