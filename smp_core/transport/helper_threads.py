"""Threads of this project's own, which are no threads of a body's: whoever counts those leaves them out."""

from __future__ import annotations

import _thread
import threading


class HelperThread(threading.Thread):
    """A thread that issues no communication call of its own accord.

    Attributes:
        stands_for: the identifier of the thread that sleeps while this one runs, where the two take turns:
            what this one does counts as done by that one. None for a thread that runs beside the others.
    """

    def __init__(self, *, stands_for: int | None = None, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.stands_for = stands_for

    def start(self) -> None:
        """See threading.Thread."""
        # Before the thread runs: it counts as a helper from its first line on.
        _helpers.add(self)
        for thread in tuple(_helpers):
            if thread.ident is not None and not thread.is_alive():
                _helpers.discard(thread)
        super().start()


#: Changed by one thread while another looks: only by operations that Python does at once.
_helpers: set[HelperThread] = set()


def count_other_threads() -> int:
    """The number of Python threads of this process that were started, without helper threads."""
    return _thread._count() - sum(map(threading.Thread.is_alive, tuple(_helpers)))


def acting_thread() -> int:
    """The identifier of the calling thread, or of the one that it stands for."""
    thread = threading.current_thread()
    stands_for = getattr(thread, "stands_for", None)
    return _thread.get_ident() if stands_for is None else int(stands_for)
