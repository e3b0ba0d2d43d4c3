"""The agreement of all ranks on a failure: who raises which error, in whose form, and who gets the values."""

from __future__ import annotations

import pytest

from smp_core import runtime
from smp_core.collective_try import collective_try
from smp_core.errors import DeadlockError


def on_rank(smp, failing: tuple[int, ...], same: bool) -> object:
    """The values of all ranks, or this rank's error in words."""

    def action() -> int:
        if smp.rank() in failing:
            raise KeyError(smp.rank())
        return 10 * smp.rank()

    try:
        return collective_try(
            runtime.current("test"),
            action,
            lambda error: f"{error} of {smp.rank()}",
            lambda failure: ValueError(f"told of {failure}"),
            same=same,
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.smp(ranks=3)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ((), [[0, 10, 20]] * 3),
        ((1,), ["ValueError: told of 1 of 1", "KeyError: 1", "ValueError: told of 1 of 1"]),
        ((1, 2), ["ValueError: told of 1 of 1", "KeyError: 1", "KeyError: 2"]),
    ],
)
def test_every_rank_has_all_values_or_an_error(smp, failing, expected, same) -> None:
    wanted = expected[smp.rank()]
    if same and len(failing) > 1 and smp.rank() == failing[1]:
        wanted = expected[0]
    assert on_rank(smp, failing, same) == wanted


@pytest.mark.smp(ranks=1)
def test_after_a_verdict_no_rank_is_asked(smp) -> None:
    def action() -> None:
        raise DeadlockError("the world has ended")

    with pytest.raises(DeadlockError, match="the world has ended"):
        collective_try(runtime.current("test"), action, pytest.fail, ValueError)
