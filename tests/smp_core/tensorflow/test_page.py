"""The script of docs/tensorflow.md trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

PAGE = Path(__file__).parents[3] / "docs" / "tensorflow.md"


def trained(path: str) -> list[float]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), names)
    random = np.random.default_rng(0)
    x = tf.constant(random.standard_normal((32, 16)), tf.float32)
    y = tf.constant(random.integers(0, 10, 32))
    return [float(names["train"](x, y)) for _ in range(150)]


def test_the_script_of_the_page_learns(smp_world: Any, tmp_path: Path) -> None:
    (script,) = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    path = tmp_path / "script.py"  # AutoGraph reads the source of functions
    path.write_text(script, encoding="utf-8")
    first, second = smp_world.run(trained, str(path), ranks=2, init=False)
    assert first == second
    assert first[-1] < first[0] / 2
