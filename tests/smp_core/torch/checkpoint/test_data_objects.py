"""Objects that hold data alone come back from files as they were, and no code of theirs or of the file runs."""

from __future__ import annotations

import argparse
import concurrent.futures
import enum
import pathlib
import sys
import types
from typing import ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from smp_core.torch.checkpoint import files, plain
from smp_core.torch.exceptions import CheckpointError


class _Interval(str, enum.Enum):  # noqa: UP042  as Transformers has them
    STEPS = "steps"
    EPOCH = "epoch"

    @classmethod
    def _missing_(cls, value):
        raise AssertionError("called")


class _Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class _Mode(enum.Enum):
    OFF = None
    ON = "steps"


class _Compared(enum.Enum):
    A = 1

    def __eq__(self, other):
        raise AssertionError("called")

    def __hash__(self):
        return 1


MEMBERS = st.sampled_from([*_Interval, *_Level, *_Mode])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
ATTRIBUTES = st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), VALUES, max_size=3)
OBJECTS = st.recursive(
    st.builds(
        lambda made, found: made(**found),
        st.sampled_from([argparse.Namespace, types.SimpleNamespace]),
        ATTRIBUTES,
    )
    | st.builds(pathlib.Path, st.from_regex(r"[a-z/.]{1,9}", fullmatch=True))
    | MEMBERS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.builds(lambda value: argparse.Namespace(inner=value), inner)
        | st.dictionaries(st.text(max_size=3) | MEMBERS, inner)
    ),
    max_leaves=4,
)


class _Noting(argparse.Namespace):
    """Notes its calls."""

    calls: ClassVar[list[object]] = []

    def __init__(self, *args):
        self.calls.append(args)


class _Reduced:
    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


class _WithState(argparse.Namespace):
    def __setstate__(self, state):
        raise AssertionError("called")


class _WithSetter(argparse.Namespace):
    calls: ClassVar[list[object]] = []

    def _set(self, value):
        self.calls.append(value)

    folder = property(fset=_set)

    def __getattr__(self, name):
        self.calls.append(name)
        raise AttributeError(name)

    def __setattr__(self, name, value):
        self.calls.append(name)
        super().__setattr__(name, value)


class _Hashable(argparse.Namespace):
    def __hash__(self):
        return 1


class _Simple(types.SimpleNamespace):
    pass


class _WithEnd(argparse.Namespace):
    def __del__(self):
        pass


@given(obj=OBJECTS)
def test_data_objects_come_back_as_they_were(tmp_path_factory, obj):
    path = tmp_path_factory.mktemp("data") / "x.pt"
    assert plain.plain(obj, "smp.save", "obj") is obj
    files.save(path, obj)
    loaded = files.load(path, "x")
    assert loaded == obj
    assert repr(loaded) == repr(obj)  # a string enum equals its string
    assert type(loaded) is type(obj)


@pytest.mark.parametrize("name", ["GPT2Config", "BertConfig", "GPTNeoXConfig", "T5Config"])
def test_a_configuration_of_hugging_face_comes_back_as_it_was(tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="the configurations are its own")
    saved = getattr(transformers, name)(vocab_size=77)
    content = {"model_config": saved, "cli_args": argparse.Namespace(lr=0.5), "step": 3}
    files.save(tmp_path / "x.pt", plain.plain(content, "smp.save", "obj"))
    loaded = files.load(tmp_path / "x.pt", "x")
    assert type(loaded["model_config"]) is type(saved)
    assert loaded["model_config"].to_dict() == saved.to_dict()
    assert (loaded["cli_args"], loaded["step"]) == (content["cli_args"], 3)
    # A script that reads the file with torch alone finds the same class.
    assert type(torch.load(tmp_path / "x.pt", weights_only=False)["model_config"]) is type(saved)


def test_arguments_of_hugging_face_as_a_dict_come_back_as_they_were(tmp_path):
    utilities = pytest.importorskip("transformers.trainer_utils", reason="the enums are its own")
    saved = {"save_strategy": utilities.IntervalStrategy.STEPS, "steps": 5}
    files.save(tmp_path / "x.pt", plain.plain(saved, "smp.save", "obj"))
    assert files.load(tmp_path / "x.pt", "x")["save_strategy"] is saved["save_strategy"]


def test_no_class_is_called(tmp_path):
    files.save(tmp_path / "x.pt", _Noting(1))
    assert _Noting.calls == [(1,)]
    assert type(files.load(tmp_path / "x.pt", "x")) is _Noting
    assert _Noting.calls == [(1,)]


@pytest.mark.parametrize(
    "obj",
    [
        _Reduced(_Noting, (2,)),
        [argparse.Namespace(), _Reduced(print, ("called",))],
        argparse.Namespace(f=_Reduced(exec, ("raise AssertionError('called')",))),
        _WithState(x=1),
        _WithEnd(),
        _Reduced(_Interval, ("no such member",)),
        _Reduced(_Interval, ("steps",), {"_value_": "epoch"}),
        {_Compared.A: 1},
    ],
    ids=["arguments", "function", "attribute", "state", "end", "member", "in a member", "hash"],
)
def test_a_file_that_would_call_code_is_refused(tmp_path, obj, capsys):
    torch.save(obj, tmp_path / "x.pt", pickle_protocol=2)
    _Noting.calls.clear()
    with pytest.raises(CheckpointError, match="Nothing of it was run"):
        files.load(tmp_path / "x.pt", "x")
    assert _Noting.calls == []
    assert capsys.readouterr().out == ""


def test_a_file_calls_no_setter(tmp_path):
    torch.save(
        _Reduced(_WithSetter, (), (None, {"folder": "of the file"})),
        tmp_path / "x.pt",
        pickle_protocol=2,
    )
    _WithSetter.calls.clear()
    with pytest.raises(CheckpointError, match="Nothing of it was run"):
        files.load(tmp_path / "x.pt", "x")
    assert _WithSetter.calls == []


def test_no_method_of_a_class_sees_the_file(tmp_path):
    torch.save(_Reduced(_WithSetter, (), {"x": 1}), tmp_path / "x.pt", pickle_protocol=2)
    _WithSetter.calls.clear()
    loaded = files.load(tmp_path / "x.pt", "x")
    assert _WithSetter.calls == []
    assert (type(loaded), vars(loaded)) == (_WithSetter, {"x": 1})


@pytest.mark.parametrize(
    "kind", [_Simple, _Noting, types.SimpleNamespace], ids=lambda kind: kind.__name__
)
def test_an_object_without_attributes_and_one_that_holds_itself_keep_their_class(tmp_path, kind):
    ring = kind()
    ring.itself = ring
    files.save(tmp_path / "x.pt", [kind(), ring])
    empty, loaded = files.load(tmp_path / "x.pt", "x")
    assert (type(empty), vars(empty)) == (kind, {})
    assert type(loaded) is kind
    assert loaded.itself is loaded


@pytest.mark.parametrize(
    "obj", [{"a": _Simple}, argparse.Namespace(a=[_Simple])], ids=["item", "attribute"]
)
def test_a_class_itself_is_refused_when_it_is_saved(obj):
    with pytest.raises(CheckpointError, match="does not come back as itself"):
        plain.plain(obj, "smp.save", "obj")


@pytest.mark.parametrize("obj", [{_Hashable(): 1}, {_Hashable()}], ids=["key", "element"])
def test_a_data_object_that_is_hashed_is_refused_when_it_is_saved(obj):
    with pytest.raises(CheckpointError, match=r"its hash.*list of pairs"):
        plain.plain([obj], "smp.save", "obj")


def test_ranks_that_are_threads_read_at_the_same_time(tmp_path):
    """Torch's table of allowed names is the process's: the first reader leaves while the second is inside."""
    path = tmp_path / "x.pt"
    files.save(path, {"a": argparse.Namespace(x=1), "b": pathlib.Path("a")})
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            loaded = list(threads.map(lambda _: files.load(path, "x"), range(200)))
    finally:
        sys.setswitchinterval(before)
    assert all(each["a"] == argparse.Namespace(x=1) for each in loaded)


def test_a_file_imports_no_module(tmp_path, monkeypatch):
    (tmp_path / "of_the_file.py").write_text("import argparse\nclass X(argparse.Namespace): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import of_the_file  # type: ignore[import-not-found]

    torch.save(of_the_file.X(), tmp_path / "x.pt", pickle_protocol=2)
    monkeypatch.delitem(sys.modules, "of_the_file")
    with pytest.raises(CheckpointError, match=r"it names of_the_file\.X"):
        files.load(tmp_path / "x.pt", "x")
    assert "of_the_file" not in sys.modules
