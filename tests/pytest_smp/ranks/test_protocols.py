"""A fabric that was written for another version of its protocol is refused, in words."""

from __future__ import annotations

import types
from typing import Any

import pytest

from pytest_smp.ranks.protocols import Factory
from smp_core.errors import BackendError


def give(environment: Any, **parts: Any) -> Any:
    return types.SimpleNamespace(**parts)


def give_another(environment: Any) -> Any:
    return give(environment, protocol=1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("give", "names no version of its protocol; this one has 2"),
        ("give_another", "was written for version 1 of its protocol; this one has 2"),
    ],
)
def test_a_fabric_of_another_version_is_refused(name: str, text: str) -> None:
    environment: Any = None
    with pytest.raises(BackendError, match=text):
        Factory(f"{__name__}:{name}")(environment)
