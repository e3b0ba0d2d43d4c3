"""The calls that each work belongs to: waits for a work are recorded, and the moment when its end is known."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

from pytest_smp.ranks.board.backward_passes import BackwardPasses
from pytest_smp.ranks.board.futures import Futures, forget_entry
from pytest_smp.ranks.board.recorder import BoardRecorder

Method = Callable[..., Any]

#: Methods of a work that end when it is over.
_WAITS = ("wait", "synchronize", "result")
#: Methods that tell whether it is over.
_TESTS = ("is_completed", "is_success")
#: Methods that give its future: by the second name C++ asks a work of Python's.
_FUTURES = ("get_future", "getFuture")


class Works:
    """The works whose end their rank has not learnt of."""

    def __init__(self, recorder: BoardRecorder, futures: Futures, passes: BackwardPasses) -> None:
        self._recorder, self._futures, self._passes = recorder, futures, passes
        self._numbers: dict[int, tuple[weakref.ref[Any], list[int], int]] = {}
        self._anybody: set[int] = set()  # numbers of receives from any source

    def from_anybody(self, number: int) -> None:
        """Note that this call is a receive from any source, whose work names the sender once it is over."""
        self._anybody.add(number)

    def _done(self, work: Any, numbers: list[int]) -> None:
        """The rank has learnt that these calls, of one work, are over."""
        if len(numbers) == 1 and numbers[0] in self._anybody:
            self._anybody.discard(numbers[0])
            with contextlib.suppress(Exception):  # a backend that cannot tell
                self._recorder.took(numbers[0], int(work._source_rank()))
        self._recorder.done(numbers)

    def add(self, work: Any, numbers: list[int]) -> None:
        """``work`` is of these calls."""
        identity = id(work)
        forget = functools.partial(forget_entry, self._numbers, identity)
        self._numbers[identity] = weakref.ref(work, forget), numbers, self._recorder.run

    def method(self, name: str, original: Method) -> Method | None:
        """A wrapper for this method of a class of works, if it needs one."""
        if name in _WAITS:
            return self._waiting(original)
        if name in _TESTS:
            return self._testing(original)
        return self._giving_future(original) if name in _FUTURES else None

    def _waiting(self, original: Method) -> Method:
        recorder, numbers_of, done = self._recorder, self._numbers, self._done
        inside = recorder.inside

        @functools.wraps(original)
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            entry = numbers_of.get(id(self))
            if entry is None or entry[2] != recorder.run or not recorder.active:
                return original(self, *args, **kwargs)
            recorder.waits(entry[1])
            inside.depth += 1
            try:
                result = original(self, *args, **kwargs)
            except BaseException:
                recorder.failed(entry[1])
                raise
            finally:
                inside.depth -= 1
            numbers_of.pop(id(self), None)
            done(self, entry[1])
            return result

        return wait

    def _testing(self, original: Method) -> Method:
        recorder, numbers_of, done = self._recorder, self._numbers, self._done

        @functools.wraps(original)
        def test(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            entry = numbers_of.get(id(self))
            if result and entry is not None and entry[2] == recorder.run and recorder.active:
                numbers_of.pop(id(self), None)
                done(self, entry[1])
            return result

        return test

    def _giving_future(self, original: Method) -> Method:
        recorder, numbers_of = self._recorder, self._numbers

        @functools.wraps(original)
        def get_future(self: Any, *args: Any, **kwargs: Any) -> Any:
            by_reducer = passes.calls(1)
            future = original(self, *args, **kwargs)  # where it waits, it does so by ``wait``
            entry = numbers_of.get(id(self))
            if entry is not None and entry[2] == recorder.run and recorder.active:
                recorder.future(entry[1])
                futures.add(future, entry[1])
                if by_reducer:
                    passes.awaits(entry[1])
            return future

        futures, passes = self._futures, self._passes
        return get_future
