"""A TensorFlow that was not tried is told of, and one that lacks a part is refused; private names are in one file."""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import os
import re
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.pyct import loader

from smp_core.errors import BackendError, UnknownTensorFlowWarning
from smp_core.tensorflow import tensorflow_parts as parts


def test_a_version_that_was_not_tried_is_told_of() -> None:
    with pytest.warns(
        UnknownTensorFlowWarning, match=r"TensorFlow 2\.22\.0 was not tried; 2\.21 was"
    ):
        parts.check_version("2.22.0")


def test_a_version_that_was_tried_is_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts.check_version("2.21.7")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (tf.Graph, "_attr_scope"),
        (loader, "load_source"),
        (tf.train.CheckpointManager, "_sweep"),
        (tf.train.CheckpointManager, "_record_state"),
    ],
)
def test_a_missing_part_is_named(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        BackendError, match=rf"TensorFlow 2\.22\.0 has no [\w.]+\.{name}\. Install one of 2\.21"
    ):
        parts.check_version("2.22.0")


@pytest.mark.parametrize("name", ["autograph.pyct.loader", "autograph.core.config"])
def test_a_module_that_was_moved_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    whole, _, last = f"tensorflow.python.{name}".rpartition(".")
    monkeypatch.setitem(sys.modules, f"{whole}.{last}", None)
    monkeypatch.delattr(sys.modules[whole], last)
    with pytest.raises(
        BackendError, match=rf"TensorFlow 2\.22\.0 has no {name}\.\w+\b.*\. Install"
    ):
        parts.check_version("2.22.0")


def test_a_loader_of_another_signature_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_source(source: str, delete_on_exit: bool, name: str) -> None:
        pass

    monkeypatch.setattr(loader, "load_source", load_source)
    parts._keep_generated_source()
    assert loader.load_source is load_source


def test_no_other_file_uses_a_private_name_of_tensorflow() -> None:
    folder = Path(parts.__file__).parent
    private = re.compile(r"\btf(\.\w+)*\._|tensorflow\.python|super\(\)\._[a-z]")
    found = [
        f"{path.name}:{number}"
        for path in sorted(folder.glob("*.py"))
        if path.name != "tensorflow_parts.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line)
    ]
    assert found == []


ENDS_AT_ONCE = """
import os

import smp_core.tensorflow
import tensorflow as tf


@tf.function
def doubled(x):
    if x > 0:
        x = 2 * x
    return x


assert doubled(tf.constant(2)) == 4
os._exit(0)
"""


def test_a_process_that_ends_at_once_leaves_no_file_of_autograph(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "temporary"
    script.write_text(ENDS_AT_ONCE, encoding="utf-8")
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []


def failing(x: Any) -> Any:
    if x > 0:
        raise KeyError("on purpose")
    return x


def test_an_error_in_a_function_of_autograph_has_the_lines_of_its_source() -> None:
    with pytest.raises(KeyError, match="on purpose") as raised:
        tf.function(failing)(1)
    lines, first = inspect.getsourcelines(failing)
    line = first + next(at for at, each in enumerate(lines) if "raise" in each)
    assert f'File "{__file__}", line {line}, in failing' in str(raised.value)


def test_what_autograph_generates_has_its_lines_in_tracebacks_and_can_be_read() -> None:
    generated = tf.autograph.to_graph(failing)
    assert "ag__.if_stmt" in inspect.getsource(generated)
    with pytest.raises(KeyError, match="on purpose") as raised:
        generated(1)
    frame = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert "raise ag__.converted_call(ag__.ld(KeyError)" in (frame.line or "")


def test_no_other_line_is_shown_when_the_cache_of_lines_was_cleared() -> None:
    generated = tf.autograph.to_graph(failing)
    linecache.clearcache()
    with pytest.raises(KeyError, match="on purpose") as raised:
        generated(1)
    frame = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert frame.name == "if_body"
    assert not frame.line


def test_processes_generate_files_of_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(pid: int) -> str:
        monkeypatch.setattr(parts, "_generated", itertools.count())
        monkeypatch.setattr(os, "getpid", lambda: pid)
        return str(parts._load_generated("", delete_on_exit=True)[1])

    assert name(1) != name(2)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 10, 15, 16, 25])
def test_a_sum_is_added_from_the_left(count: int) -> None:
    random = np.random.default_rng(count)
    scales = 10.0 ** random.integers(-4, 5, (count, 1))
    terms = [tf.constant(each, tf.float32) for each in scales * random.standard_normal((count, 99))]
    expected = functools.reduce(tf.add, terms).numpy()
    if count > 2:
        assert not np.array_equal(functools.reduce(tf.add, terms[::-1]).numpy(), expected)
    np.testing.assert_array_equal(parts.added(terms).numpy(), expected)
