"""The package of strategies: its names, what it imports, bad arguments, and that values print."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from pytest_smp import strategies
from pytest_smp.strategies import same


def test_every_public_name_exists_and_is_documented() -> None:
    for name in strategies.__all__:
        assert getattr(strategies, name).__doc__, name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = strategies.no_such_name


def test_worlds_and_configurations_draw_without_torch() -> None:
    code = (
        "import sys; from hypothesis import find; from pytest_smp import strategies as s\n"
        "for each in (s.world_sizes(), s.placements(), s.degrees(8), s.topologies(), s.groups(8),\n"
        "             s.split_matrices(8), s.routings(5, 3), s.sequence_shards(5, 2),\n"
        "             s.configs(8), s.invalid_configs(8)):\n"
        "    find(each, lambda value: True)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "s.tensors\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("world_sizes", {"min_size": 0}, "min_size=0"),
        ("world_sizes", {"max_size": 0}, "max_size=0"),
        ("world_sizes", {"min_size": 5, "max_size": 4}, "min_size"),
        ("world_sizes", {"max_size": 2.0}, "max_size=2.0"),
        ("world_sizes", {"max_size": True}, "max_size=True"),
        ("degrees", {"size": 0}, "size=0"),
        ("topologies", {"max_size": "8"}, "max_size='8'"),
        ("topologies", {"sharding": 1}, "sharding=1"),
        ("groups", {"size": 0}, "size=0"),
        ("groups", {"size": 4, "min_size": 5}, "min_size=5"),
        ("groups", {"size": 4, "min_size": 0}, "min_size=0"),
        ("groups", {"size": 4, "max_size": 5}, "max_size=5"),
        ("groups", {"size": 4, "min_size": 3, "max_size": 2}, "max_size=2"),
        ("split_matrices", {"size": 0}, "size=0"),
        ("split_matrices", {"size": 2, "max_rows": 0}, "max_rows=0"),
        ("routings", {"tokens": -1, "experts": 2}, "tokens=-1"),
        ("routings", {"tokens": 4, "experts": 2, "top_k": 3}, "top_k=3"),
        ("sequence_shards", {"length": 4, "ranks": 0}, "ranks=0"),
        ("configs", {"size": None}, "size=None"),
        ("configs", {"size": 4, "ignored": "no"}, "ignored='no'"),
        ("invalid_configs", {"size": -1}, "size=-1"),
        ("objects", {"tensors": None}, "tensors=None"),
        ("objects", {"max_leaves": 0}, "max_leaves=0"),
        ("lengths", {"world": 0}, "world=0"),
        ("shapes", {"min_dims": -1}, "min_dims=-1"),
        ("shapes", {"min_dims": 2, "max_dims": 1}, "max_dims=1"),
        ("shapes", {"max_side": -1}, "max_side=-1"),
        ("shapes", {"world": 0}, "world=0"),
        ("tensors", {"dtype": "float32"}, "dtype='float32'"),
        ("tensors", {"dtype": torch.complex32}, "dtype=torch.complex32"),
        ("tensors", {"shape": [3]}, r"shape=\[3\]"),
        ("tensors", {"shape": (-1,)}, r"shape=\(-1,\)"),
        ("tensors", {"layout": "dense"}, "layout='dense'"),
        ("tensors", {"layout": []}, r"layout=\[\]"),
        ("tensors", {"layout": "expanded", "as_output": True}, "expanded.*as_output"),
        ("tensors", {"layout": "transposed", "shape": (3,)}, r"shape=\(3,\).*transposed"),
        ("tensors", {"as_output": 1}, "as_output=1"),
        ("tensors", {"bound": 0}, "bound=0"),
        ("TensorSpec", {"shape": 3, "dtype": torch.int8}, "shape=3"),
        ("TensorSpec", {"shape": (True,), "dtype": torch.int8}, "True"),
        ("TensorSpec", {"shape": (), "dtype": torch.qint8}, "dtype=torch.qint8"),
        ("TensorSpec", {"shape": (), "dtype": torch.int8, "layout": "strided"}, "layout='strided'"),
        ("TensorSpec", {"shape": (2, 2), "dtype": torch.int8, "layout": "reversed"}, "at least 3"),
        ("TensorSpec", {"shape": (), "dtype": torch.int8, "offset": -1}, "offset=-1"),
        ("TensorSpec", {"shape": (), "dtype": torch.bfloat16, "bound": 257}, "256.*bfloat16"),
    ],
)
def test_bad_arguments_are_refused_at_once(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        getattr(strategies, name)(**arguments)


def test_an_unknown_kind_of_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"kind='float'.*floating, half"):
        strategies.dtypes("floating", "float")


_ALL: dict[str, SearchStrategy[Any]] = {
    "world_sizes": strategies.world_sizes(),
    "placements": strategies.placements(),
    "degrees": strategies.degrees(8),
    "topologies": strategies.topologies(sharding=True),
    "split_matrices": strategies.split_matrices(3),
    "routings": strategies.routings(4, 3, top_k=2),
    "sequence_shards": strategies.sequence_shards(7, 3),
    "groups": strategies.groups(8),
    "configs": strategies.configs(8, ignored=True),
    "invalid_configs": strategies.invalid_configs(8),
    "dtypes": strategies.dtypes(),
    "lengths": strategies.lengths(8),
    "shapes": strategies.shapes(),
    "tensors": strategies.tensors(),
    "blocks": strategies.blocks(),
    "faults": strategies.faults(ranks=3, kinds=("kill", "exit", "stall", "delay", "raise_")),
    "microbatch_splits": strategies.microbatch_splits(),
    "models": strategies.models(),
    "overflows": strategies.overflows(3),
    "schedules": strategies.schedules(),
    "sharded_trainings": strategies.sharded_trainings(4),
    "tensor_trainings": strategies.tensor_trainings(4),
    "sharding_configurations": strategies.sharding_configurations(4),
    "trainings": strategies.trainings(4),
}
#: Of nests, where a tensor's repr is no code; Hypothesis prints one that is.
_NESTS: dict[str, SearchStrategy[Any]] = {
    "batches": strategies.batches(3),
    "objects": strategies.objects(),
    "sliceables": strategies.sliceables(2),
    "step_calls": strategies.step_calls(),
}

#: These print as whole test files: tests/pytest_smp/strategies/communication.
_FILES = {"programs", "invalid_programs"}


def test_every_strategy_is_asked_whether_its_values_print_as_code() -> None:
    functions = {name for name in strategies.__all__ if name.islower()} - {"same"}
    assert functions == {*_ALL, *_NESTS, *_FILES}


def test_dir_shows_every_public_name() -> None:
    code = (
        "from pytest_smp import strategies as s\n"
        "assert set(s.__all__) <= set(dir(s)), set(s.__all__) - set(dir(s))\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_documented_imports_are_names_of_the_package() -> None:
    """The code that a user pastes below the imports needs no other module of the project."""
    lines = [line.strip() for line in (strategies.__doc__ or "").splitlines()]
    ours = [line for line in lines if line.startswith("from ") and "smp" in line]
    assert ours
    for line in ours:
        module, _, names = line.removeprefix("from ").partition(" import ")
        assert module == "pytest_smp.strategies"
        assert set(names.split(", ")) <= set(strategies.__all__)


@pytest.mark.parametrize("name", _ALL)
def test_repr_is_code_for_an_equal_value(
    name: str, drawn: Callable[..., list[Any]], paste: Callable[[str], Any]
) -> None:
    for value in drawn(_ALL[name], 200):
        pasted = paste(repr(value))
        assert pasted == value
        assert type(pasted) is type(value)


@pytest.mark.parametrize("name", [*_ALL, *_NESTS])
@pytest.mark.parametrize("after", [0, 7, 19, 38])
def test_a_failing_example_is_code_for_the_same_value(
    name: str,
    after: int,
    printed: Callable[[SearchStrategy[Any], int], tuple[Any, str]],
    paste: Callable[[str], Any],
) -> None:
    value, code = printed({**_ALL, **_NESTS}[name], after)
    pasted = paste(code)
    assert same(pasted, value), code
