"""A call of all ranks that fails on one of them: each learns which rank failed and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.errors import StepAbortedError
from smp_core.tensorflow import session as sessions
from tests.smp_core.tensorflow.keras_training import CASE, Training, stopped
from tests.smp_core.tensorflow.small_models import MANUAL, Net, X


def failing(folder: str, what: str) -> str:
    """The error of this rank when rank 1 fails in a call that all ranks make."""
    if what in ("load", "early"):
        training = Training(folder)
        if smp.rank() and what == "load":
            training.manager._load = lambda *_: (_ for _ in ()).throw(OSError("torn"))
        elif smp.rank():
            for each in Path(training.manager.directory).glob("*.data*"):
                each.write_bytes(b"")
        action = [training.manager.restore, lambda: training.step(0)]
    else:
        training = Training(folder)
        training.step(0)
        if what == "save" and smp.rank():
            Path(training.manager.directory).write_text("no folder")
        if what == "save_model":
            Path(folder, "model").parent.mkdir(exist_ok=True)
            Path(folder, "model").write_text("no folder")
        action = [
            training.manager.save
            if what == "save"
            else lambda: training.model.save_model(f"{folder}/model")
        ]
    try:
        for each in action:
            each()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "failed", "kind", "call"),
    [
        ("load", 1, "StepAbortedError", "CheckpointManager.restore"),
        ("early", 1, "CheckpointError", "CheckpointManager.restore"),
        ("save", 1, "CheckpointError", "CheckpointManager.save"),
        ("save_model", 0, "CheckpointError", "DistributedModel.save_model"),
    ],
)
def test_all_ranks_learn_which_rank_failed_and_why(
    smp_world: Any, tmp_path: Path, what: str, failed: int, kind: str, call: str
) -> None:
    config = CASE.config()
    if what in ("load", "early"):
        smp_world.run(stopped, str(tmp_path), ranks=2, config=config)
    found = smp_world.run(failing, str(tmp_path), what, ranks=2, config=config)
    own = found[failed]
    assert not own.startswith((kind, "nothing"))
    assert found[1 - failed] == f"{kind}: smp.{call}: failed on rank {failed}: {own}"


class Untold(Exception):
    """An error that cannot tell its text."""

    def __str__(self) -> str:
        raise ZeroDivisionError


def without_text(error: Exception, where: str) -> str:
    """The class of this rank's error, or the text of the remote one, when rank 1 raises ``error``."""
    model = Net()
    step = smp.step(lambda x: tf.reduce_sum(model(x)))

    def raises(*_: Any) -> None:
        raise error

    if where == "hook" and smp.rank() == 1:
        smp.register_post_partition_hook(raises)
    if where == "segment":
        transport = sessions.current("test").transport
        receive = transport.receive

        def receiving(*args: Any) -> Any:
            arrays = receive(*args)
            return raises() if smp.rank() == 1 else arrays

        transport.receive = receiving
    try:
        step(tf.constant(X))
    except StepAbortedError as remote:
        return str(remote)
    except Exception as own:
        return type(own).__name__
    return "nothing"


@pytest.mark.parametrize("where", ["hook", "segment"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Untold(), "Untold: (its text cannot be had: str() raised ZeroDivisionError)"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
    ],
    ids=["no text", "a lone surrogate"],
)
def test_an_error_without_a_proper_text_is_told(
    smp_world: Any, error: Exception, text: str, where: str
) -> None:
    remote, own = smp_world.run(without_text, error, where, ranks=2, config=MANUAL)
    assert own == type(error).__name__
    assert remote.encode(errors="backslashreplace").decode().endswith(text)
