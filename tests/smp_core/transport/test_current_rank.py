"""The rank that a thread is, or a process."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from smp_core.errors import BackendError
from smp_core.transport import current_rank


def context(**other: object) -> Any:
    return SimpleNamespace(rank=0, size=1, job=None, fabric=None, runtime=None, **other)


def test_a_thread_is_the_rank_that_was_said_in_it() -> None:
    found: list[object] = []
    rank = context()

    def run() -> None:
        current_rank.set_current(rank)
        found.extend([current_rank.current(), current_rank.ranks_are_threads()])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [rank, True]
    assert current_rank.current() is None
    assert not current_rank.ranks_are_threads()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is a rank of its own."""
    rank = context(retire="")
    monkeypatch.setattr(current_rank._Process, "context", None)  # put back at the end
    current_rank.set_process(rank)
    return rank


def test_all_threads_of_a_rank_process_are_that_rank_and_no_ranks_of_their_own(
    process: Any,
) -> None:
    found: list[object] = []

    def run() -> None:
        found.extend([current_rank.current(), current_rank.ranks_are_threads()])
        current_rank.set_current(process)  # as the threads that work for it say
        found.extend([current_rank.current(), current_rank.ranks_are_threads()])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [process, False] * 2


def test_a_process_retires_with_its_reason(process: Any) -> None:
    current_rank.retire("it has trained")
    assert process.retire == "it has trained"


def test_where_no_process_can_be_replaced_none_retires() -> None:
    for rank, why in ((None, "nobody replaces this one"), (context(), "ranks are threads")):
        current_rank.set_current(rank)
        try:
            with pytest.raises(BackendError, match=rf"a fresh process is needed .*, and {why}"):
                current_rank.retire("it has trained")
        finally:
            current_rank.set_current(None)
