"""The calls that each future belongs to: a wait for a future of a work is a wait for the work's calls."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from pytest_smp.ranks.board.backward_passes import BackwardPasses
from pytest_smp.ranks.board.recorder import BoardRecorder

Method = Callable[..., Any]


class Futures:
    """The futures of works, and those that are made of them by ``then`` and ``collect_all``."""

    def __init__(self, recorder: BoardRecorder, passes: BackwardPasses) -> None:
        self._recorder, self._passes = recorder, passes
        self._numbers: dict[int, tuple[weakref.ref[Any], list[int], int]] = {}

    def add(self, future: Any, numbers: list[int]) -> None:
        """``future`` is done once these calls are over."""
        identity = id(future)
        forget = functools.partial(forget_entry, self._numbers, identity)
        self._numbers[identity] = weakref.ref(future, forget), numbers, self._recorder.run

    def numbers(self, future: Any) -> list[int]:
        """The calls of a future, none if it is of no work of this run."""
        entry = self._numbers.get(id(future))
        return [] if entry is None or entry[2] != self._recorder.run else entry[1]

    def method(self, name: str, original: Method) -> Method | None:
        """A wrapper for this method of a class of futures, if it needs one."""
        make = {
            "wait": self._waiting,
            "done": self._testing,
            "then": self._hooking,
            "add_done_callback": self._hooking,
        }.get(name)
        return None if make is None else make(original)

    def wrappers(self) -> Sequence[tuple[Any, str, Method]]:
        """The owner and the name of each function to replace, and the wrapper of it."""
        return [
            (torch._C, "_collect_all", self._collecting(vars(torch._C)["_collect_all"])),
            (dist, "_register_comm_hook", self._registering(vars(dist)["_register_comm_hook"])),
        ]

    def _waiting(self, original: Method) -> Method:
        @functools.wraps(original)
        def wait(future: Any, *args: Any, **kwargs: Any) -> Any:
            numbers = self.numbers(future)
            if not numbers or not self._recorder.active:
                return original(future, *args, **kwargs)
            with self._recorder.waiting(numbers):
                return original(future, *args, **kwargs)

        return wait

    def _testing(self, original: Method) -> Method:
        @functools.wraps(original)
        def test(future: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(future, *args, **kwargs)
            numbers = self.numbers(future)
            if result and numbers and self._recorder.active:
                self._recorder.done(numbers)
            return result

        return test

    def _hooking(self, original: Method) -> Method:
        recorder = self._recorder

        @functools.wraps(original)
        def hook(future: Any, callback: Method, *args: Any, **kwargs: Any) -> Any:
            numbers = self.numbers(future)
            if not numbers or not recorder.active:
                return original(future, callback, *args, **kwargs)

            number = recorder.callback(numbers)

            def call(result: Any) -> Any:
                try:
                    return callback(result)
                finally:
                    recorder.called(number)

            try:
                made = original(future, call, *args, **kwargs)
            except BaseException:  # torch has refused the callback
                recorder.called(number)
                raise
            if made is not None:
                self.add(made, numbers)
            return made

        return hook

    def _collecting(self, original: Method) -> Method:
        @functools.wraps(original)
        def collect(futures: Any, *args: Any, **kwargs: Any) -> Any:
            futures = [*futures]
            made = original(futures, *args, **kwargs)
            numbers = [number for future in futures for number in self.numbers(future)]
            if numbers:
                self.add(made, numbers)
            return made

        return collect

    def _registering(self, original: Method) -> Method:
        @functools.wraps(original)
        def register(reducer: Any, state: Any, hook: Method, *args: Any, **kwargs: Any) -> Any:
            @functools.wraps(hook)
            def awaited(*of_bucket: Any) -> Any:
                future = hook(*of_bucket)
                self._passes.awaits(self.numbers(future))
                return future

            return original(reducer, state, awaited, *args, **kwargs)

        return register


def forget_entry(numbers: dict[int, Any], identity: int, reference: weakref.ref[Any]) -> None:
    """Remove the entry of an object that is no more, unless another object has its place."""
    entry = numbers.get(identity)
    if entry is not None and entry[0] is reference:
        del numbers[identity]
