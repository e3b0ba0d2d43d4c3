"""The objects that may be saved: numpy's numbers are made plain, other objects need trust."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from smp_core.torch.checkpoint import files, plain
from smp_core.torch.checkpoint.trust import trust_checkpoints, trusted
from smp_core.torch.exceptions import CheckpointError


@dataclasses.dataclass
class _Configuration:
    width: int


NUMBERS = hnp.boolean_dtypes() | hnp.integer_dtypes() | hnp.floating_dtypes(sizes=(16, 32, 64))
ARRAYS = hnp.arrays(
    NUMBERS | hnp.complex_number_dtypes(sizes=(64, 128)), hnp.array_shapes(min_dims=0, min_side=0)
)
#: Numbers, and views that no tensor can have: turned round, transposed.
LEAVES = (
    ARRAYS
    | ARRAYS.map(lambda array: array[::-1] if array.ndim else array)
    | ARRAYS.map(lambda array: array.T)
    | ARRAYS.filter(lambda array: array.size).map(lambda array: array.reshape(-1)[0])
    | st.integers()
)
NESTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(-9, 9).map(np.int64), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


def _same(saved, loaded):
    if isinstance(saved, dict):
        assert list(map(int_of, saved)) == list(loaded)
        return all(_same(saved[key], loaded[int_of(key)]) for key in saved)
    if isinstance(saved, list | tuple):
        assert type(loaded) is type(saved)
        return all(_same(one, other) for one, other in zip(saved, loaded, strict=True))
    if isinstance(saved, np.ndarray):
        assert type(loaded) is torch.Tensor
        found = loaded.numpy()
        assert found.dtype == saved.dtype.newbyteorder("=")
        return np.array_equal(found, saved, equal_nan=True) and found.shape == saved.shape
    if isinstance(saved, np.generic):
        assert type(loaded) in (bool, int, float, complex)
        return np.array_equal(np.asarray(loaded, saved.dtype), saved, equal_nan=True)
    return saved == loaded


def int_of(key):
    return key.item() if isinstance(key, np.generic) else key


@given(obj=NESTS)
def test_what_numpy_has_comes_back_as_numbers_and_tensors(tmp_path_factory, obj):
    path = tmp_path_factory.mktemp("numpy") / "x.pt"
    files.save(path, plain.plain(obj, "smp.save", "obj"))
    assert _same(obj, files.load(path, "x"))


def test_what_numpy_has_is_changed_in_a_copy():
    array = np.arange(3)
    shared = [array]
    obj = {"a": shared, "b": shared, "state": np.random.default_rng(1).bit_generator.state}
    written = plain.plain(obj, "smp.save", "obj")
    assert obj["a"][0] is array
    assert written["a"] is written["b"]
    array += 1
    assert written["a"][0].tolist() == [0, 1, 2]


def test_the_state_of_numpy_s_generator_is_restored_from_what_comes_back(tmp_path):
    generator = np.random.RandomState(3)
    files.save(tmp_path / "x.pt", plain.plain(generator.get_state(), "smp.save", "obj"))
    expected = generator.random_sample(5).tolist()
    generator.set_state(files.load(tmp_path / "x.pt", "x"))
    assert generator.random_sample(5).tolist() == expected


TRUSTED = [collections.deque([1]), _Configuration(3), {"c": [_Configuration(4)]}]


@pytest.mark.parametrize("obj", TRUSTED)
@pytest.mark.parametrize("how", ["context", "environment"])
def test_a_script_that_trusts_its_files_saves_any_object(tmp_path, monkeypatch, obj, how):
    if how == "environment":
        monkeypatch.setenv("SMP_TRUST_CHECKPOINTS", "1")
    with trust_checkpoints() if how == "context" else contextlib.nullcontext():
        files.save(tmp_path / "x.pt", plain.plain(obj, "smp.save", "obj"))
        assert files.load(tmp_path / "x.pt", "x") == obj
    with trust_checkpoints(enabled=False), pytest.raises(CheckpointError, match="trust_checkp"):
        files.load(tmp_path / "x.pt", "x")


def test_trust_ends_with_its_context_and_belongs_to_its_thread(tmp_path):
    seen = []
    with trust_checkpoints():
        thread = threading.Thread(target=lambda: seen.append(trusted()))
        thread.start()
        thread.join()
    assert (seen, trusted()) == ([False], False)


def test_what_cannot_be_pickled_is_refused_where_files_are_trusted(tmp_path):
    with trust_checkpoints(), pytest.raises(CheckpointError, match=r"x\.pt: cannot be written"):
        files.save(tmp_path / "x.pt", plain.plain({"f": lambda: 1}, "smp.save", "obj"))
    assert not (tmp_path / "x.pt").exists()
