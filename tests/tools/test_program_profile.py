"""The long profiles, on few programs: they count, and what is wrong shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.capabilities import Capabilities, Capability
from tools.profiles import programs as profile

GROUPS = {Capability.GROUPS, Capability.GROUP_ORDER}
FEW = Capabilities(frozenset({Capability.PROCESS_GROUPS, Capability.BARRIER, *GROUPS}))


def test_small_profiles_print_their_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile.main(["--invalid", "40", "--seed", "7"]) == 0
    said = capsys.readouterr().out
    assert "right: verdict 100.00%, rank 100.00%, lines 100.00%" in said
    assert "40 invalid programs" in said
    assert profile.main(["--valid", "5"]) == 1  # too few for the cells
    assert "5 valid programs, 0 false alarms, " in capsys.readouterr().out


def test_every_cell_is_hit_when_there_are_as_many_programs() -> None:
    executor = open_backend("sim")
    coverage = profile.run_valid(executor, FEW, range(10))
    executor.close()
    assert len(coverage.claimed) == 10
    assert not coverage.missed
    assert not coverage.alarms


@pytest.mark.parametrize("known", [True, False])
def test_a_wrong_backend_gives_alarms_and_wrong_scores(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr(dist, "barrier", wrong)
    executor = open_backend("sim")
    if known:
        coverage = profile.run_valid(executor, FEW, range(5))
        assert [seed for seed, message in coverage.alarms if "planted" in message] == [*range(5)]
        assert not coverage.hits
    else:
        scores = profile.run_invalid(executor, FEW, range(5), kinds=("missing wait",))
        assert len(scores.wrong) == 5
        assert scores.share("verdict") == 0.0
    executor.close()
