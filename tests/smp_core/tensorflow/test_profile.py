"""The profile of drawn Keras models, on few of them: it counts, and a wrong model shows."""

from __future__ import annotations

import pytest

from conformance.cases.keras import KerasCase, features, route
from smp_core.tensorflow import runner
from tools.profiles import keras


def test_a_small_profile_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    keras.main(["--cases", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["all", "2", "2", "0"]
    assert "2 cases" in lines[-1]
    assert "0 failed; the others equal the unpartitioned model" in lines[-1]


def test_a_wrong_model_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner.run

    def changed(session: object, plans: list[object], *args: object) -> object:
        return [run(session, plans, *args)[0]] * len(plans)

    monkeypatch.setattr(runner, "run", changed)
    assert keras.main(["--cases", "4"]) == 1
    assert "FAILED KerasCase(" in capsys.readouterr().out


def test_features_are_those_of_the_route() -> None:
    # Embedding in 0, dense in 1, skip in 0 (from its own partition), then the default 1 and the head in 0.
    again = KerasCase((("dense", 1), ("skip", 0)), 0, 0, True, 1, 3)
    assert route(again) == [0, 1, 0, 1, 0]
    assert features(again) == {
        "dense",
        "skip",
        "3 partitions",
        "Adam",
        "an embedding tied to the head",
        "revisits as 0-1-0-1",
        "empty partitions",
    }
    over = KerasCase((("dense", 1), ("skip", 2)), 0, 2, False, 2, 3, optimizer="SGD", tape=True)
    assert route(over) == [0, 1, 2]
    assert features(over) == {
        "dense",
        "skip",
        "3 partitions",
        "SGD",
        "an edge that skips a partition",
        "a tape",
    }
