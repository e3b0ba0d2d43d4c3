"""A TensorFlow that was not tried is told of, and one that lacks a part is refused; private names are in one file."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import tensorflow as tf

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
        (tf.train.CheckpointManager, "_sweep"),
        (tf.train.CheckpointManager, "_record_state"),
    ],
)
def test_a_missing_part_is_named(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        BackendError, match=rf"TensorFlow 2\.22\.0 has no \w+\.{name}\. Install one of 2\.21"
    ):
        parts.check_version("2.22.0")


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
