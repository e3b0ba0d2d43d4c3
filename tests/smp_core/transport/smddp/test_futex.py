"""Sleeps on words of memory, and kernels that refuse them."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from typing import Any

import pytest

from smp_core.errors import BackendError
from smp_core.transport.smddp import futex
from tests.smp_core.transport.smddp.rank_processes import text_of


def test_a_sleep_on_memory_that_is_gone_ends() -> None:
    assert futex.sleep([(4096, 0)], 60)
    assert futex.sleep([(4096, 0), (8192, 0)], 60)


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(
        BackendError, match=r"futexes of Linux on x86_64; this is Linux on aarch64\. Take gloo"
    ):
        futex.require()


def refusing(problem: int) -> Callable[..., int]:
    """A system call that fails."""

    def call(*_: Any) -> int:
        ctypes.set_errno(problem)
        return -1

    return call


@pytest.mark.parametrize("problem", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_that_cannot_wait_for_several_words_is_asked_for_one(
    monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    """EPERM: a filter of system calls that does not know this one."""
    monkeypatch.setattr(futex, "_waitv", refusing(problem))
    monkeypatch.setattr(futex, "_several", True)
    words = (ctypes.c_uint32 * 2)()
    seen = [(ctypes.addressof(words) + 4 * at, 0) for at in range(2)]
    assert not futex.sleep(seen, 0.001)
    assert not futex._several
    words[0] = 1
    assert futex.sleep(seen, 60)


def test_a_futex_call_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (ctypes.c_uint32 * 2)()
    address = ctypes.addressof(words)
    calls: list[Callable[[], Any]] = [
        lambda: futex.add_one(address, address + 4),
        lambda: futex.add_and_wake(address),
        lambda: futex.wake(address),
        lambda: futex.sleep([(address, 0)], 0.001),
    ]
    for call in calls:
        call()
    for name in ("_futex", "_futex_at_once"):
        monkeypatch.setattr(futex, name, refusing(errno.EPERM))
    for call in calls:
        assert "the kernel refuses a futex call: Operation not permitted" in text_of(
            BackendError, call
        )
