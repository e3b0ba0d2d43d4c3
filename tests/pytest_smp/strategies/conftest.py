"""The common parts of the tests of strategies: looking for values, and pasting what Hypothesis prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import pytest_smp.strategies

Paste = Callable[[str], Any]

#: The imports that the docstring of pytest_smp.strategies tells users to paste.
_IMPORTS = "\n".join(
    line.strip()
    for line in (pytest_smp.strategies.__doc__ or "").splitlines()
    if line.startswith("    ") and "import" in line
)

#: Drawn beside a value, because Hypothesis shows no example twice and stops when there are no more.
_NONCE = st.integers(0, 2**64)

#: So many that a rare value is found too; a search ends when it is.
_MANY = settings(
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=20_000,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="session")
def paste() -> Paste:
    """Run printed code after the documented imports; gives its value."""

    def run(code: str) -> Any:
        namespace: dict[str, Any] = {}
        exec(_IMPORTS, namespace)
        return eval(code, namespace)

    return run


@pytest.fixture(scope="session")
def drawn() -> Callable[..., list[Any]]:
    """Values of a strategy, the same ones at every run."""

    def draw(strategy: SearchStrategy[Any], count: int = 300) -> list[Any]:
        seen: list[Any] = []

        @settings(_MANY, max_examples=count)
        @given(value=strategy, nonce=_NONCE)
        def run(value: Any, nonce: int) -> None:
            seen.append(value)

        run()
        return seen

    return draw


@pytest.fixture(scope="session")
def minimal() -> Callable[..., Any]:
    """The value that a strategy's values shrink to, among those that meet a condition; or the first of them."""

    def search(
        strategy: SearchStrategy[Any],
        condition: Callable[[Any], Any] = lambda _: True,
        shrink: bool = True,
    ) -> Any:
        quiet = settings(_MANY, phases=[Phase.generate, Phase.shrink] if shrink else _MANY.phases)
        return find(strategy, lambda value: bool(condition(value)), settings=quiet)

    return search


class Failure(Exception):
    """Raised by a property that fails on purpose."""


@pytest.fixture(scope="session")
def printed() -> Callable[..., tuple[Any, str]]:
    """A value that a property failed on, and the code by which Hypothesis shows it."""

    def fail(
        strategy: SearchStrategy[Any],
        after: int = 0,
        condition: Callable[[Any], Any] = lambda _: True,
    ) -> tuple[Any, str]:
        seen: list[Any] = []

        @settings(_MANY, print_blob=False)
        @given(value=strategy, nonce=_NONCE)
        def run(value: Any, nonce: int) -> None:
            if condition(value):
                seen.append(value)
                if len(seen) > after:
                    raise Failure

        with pytest.raises(Failure) as failed:
            run()
        shown = next(note for note in failed.value.__notes__ if "run(" in note)
        code = shown[shown.index("run(") :].replace("run(", "(lambda value, nonce: value)(", 1)
        return seen[-1], code

    return fail
