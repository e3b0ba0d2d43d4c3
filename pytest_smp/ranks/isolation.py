"""State that a process has once and every rank must have for itself: random generators, torch's
default dtype, and the list in rank_state.py.

Rank threads share a process. At each hand-over the outgoing rank's state is put away and the
incoming rank's is loaded. Reading a generator's whole state costs as much as several hand-overs
(numpy 34 us, Python 9 us), so it is read only when the generator's memory shows a draw, and loaded
only when another state is in the generator.

docs/sim.md lists the state that stays shared.
"""

from __future__ import annotations

import ctypes
import functools
import random
from typing import Any, Protocol

from pytest_smp.ranks.rank_state import RankStates, Variables, clear_thread


class IsolatedState(Protocol):
    """One piece of process-wide state.

    A state that ``get`` returned is never changed afterwards.
    """

    def __hash__(self) -> int: ...

    def unchanged(self, state: Any) -> bool:
        """Return whether the process still has ``state``, which ``get`` returned or ``set`` loaded.

        False is allowed for an unchanged state, True for a changed one is not.
        """

    def get(self) -> Any: ...

    def set(self, state: Any, loaded: Any) -> None:
        """Load ``state``, where ``loaded`` is what the process has now."""

    def fresh(self, seed: int) -> Any:
        """The state that every rank of a run starts with."""


#: Bytes of a Mersenne twister that are compared: its position and 15 of its 624 words. Each draw moves the
#: position, and a whole round of draws, or another seed, leaves no word as it was.
_SEEN = 64
_Seen: Any = ctypes.c_char * _SEEN


class _PythonRandom:
    """The generator behind ``random.random()`` and its siblings.

    A state is (getstate(), the bytes that are compared).
    """

    def __init__(self) -> None:
        self._shared: Any = vars(random)["_inst"]
        # The C part of the object begins with the position among the words, and the words follow.
        # Loading and storing go through getstate and setstate.
        self._memory = _Seen.from_address(id(self._shared) + object.__basicsize__)

    def unchanged(self, state: Any) -> bool:
        (_, _, gauss_next), memory = state
        return bool(self._shared.gauss_next == gauss_next and self._memory.raw == memory)

    def get(self) -> Any:
        return self._shared.getstate(), self._memory.raw

    def set(self, state: Any, loaded: Any) -> None:
        self._shared.setstate(state[0])

    def fresh(self, seed: int) -> Any:
        before = self.get()
        self._shared.seed(seed)
        fresh = self.get()
        self.set(before, fresh)
        return fresh


class _NumpyRandom:
    """The generator behind ``numpy.random.rand()`` and its siblings. A state is (get_state(),
    generator, memory).

    ``has_gauss`` says that one normal number lies ready; drawing it leaves the generator's memory
    as it is.
    """

    _LENGTH = 624 * 4 + 4  # of MT19937: 624 words and the position

    def __init__(self, numpy_random: Any) -> None:
        self._random = numpy_random
        self._own = numpy_random.MT19937()
        self._seen: tuple[Any, Any] = None, None  # a generator, and the end of its memory

    def _memory(self, generator: Any) -> bytes | None:
        if (
            type(generator).__name__ != "MT19937"
        ):  # replaced by the user: no cheap way to see a draw
            return None
        return ctypes.string_at(generator.ctypes.state_address, self._LENGTH)

    def unchanged(self, state: Any) -> bool:
        full, generator, memory = state
        if memory is None or full["has_gauss"]:
            return False
        current = self._random.get_bit_generator()
        if current is not generator:
            return False
        if current is not self._seen[0]:
            # The position comes last in the memory, which only a Mersenne twister has.
            end = current.ctypes.state_address + self._LENGTH - _SEEN
            self._seen = current, _Seen.from_address(end)
        return bool(memory.endswith(self._seen[1].raw))

    def get(self) -> Any:
        generator = self._random.get_bit_generator()
        return self._random.get_state(legacy=False), generator, self._memory(generator)

    def set(self, state: Any, loaded: Any) -> None:
        full, generator, memory = state
        number_ready = loaded[0]["has_gauss"]
        if self._random.get_bit_generator() is not generator:
            self._random.set_bit_generator(generator)
            number_ready = 0  # exchanging the generator forgets it
        if memory is not None and not full["has_gauss"] and not number_ready:
            ctypes.memmove(generator.ctypes.state_address, memory, len(memory))  # 0.3 us, not 37
        else:
            self._random.set_state(full)

    def fresh(self, seed: int) -> Any:
        # On a generator of the ranks' own, even if the process has replaced the default one.
        full = self._random.RandomState(seed).get_state(legacy=False)
        self._own.state = full
        return full, self._own, self._memory(self._own)


class _TorchRandom:
    """torch's default CPU generator."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._generator = torch.default_generator

    def unchanged(self, state: Any) -> bool:
        return False  # comparing costs more than reading (0.7 us) and loading (0.2 us)

    def get(self) -> Any:
        return self._generator.get_state()

    def set(self, state: Any, loaded: Any) -> None:
        self._generator.set_state(state)

    def fresh(self, seed: int) -> Any:
        return self._torch.Generator().manual_seed(seed).get_state()


class _TorchDtype:
    """``torch.get_default_dtype()``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def unchanged(self, state: Any) -> bool:
        return self._torch.get_default_dtype() is state

    def get(self) -> Any:
        return self._torch.get_default_dtype()

    def set(self, state: Any, loaded: Any) -> None:
        self._torch.set_default_dtype(state)

    def fresh(self, seed: int) -> Any:
        return self._torch.float32


@functools.cache
def _parts() -> tuple[IsolatedState, ...]:
    # Imported here: numpy loads its random module late, and a rank may be the first to use it.
    import numpy.random
    import torch

    return _PythonRandom(), _NumpyRandom(numpy.random), _TorchRandom(torch), _TorchDtype(torch)


@functools.lru_cache(maxsize=64)
def _fresh(part: IsolatedState, seed: int) -> Any:
    return part.fresh(seed)


def prepare_thread() -> None:
    """Reset the state that torch keeps per thread, which the last run may have left; once per run and rank."""
    import torch

    clear_thread()  # first: a mode that was left would see the calls below
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
    if torch.is_autocast_enabled("cpu"):
        torch.set_autocast_enabled("cpu", False)
    # Of this thread; asked for an attribute that it has not, a threading.local raises, which takes longer.
    if vars(torch._GLOBAL_DEVICE_CONTEXT).get("device_context") is not None:
        torch.set_default_device(None)


def reset(seed: int) -> None:
    """Give this process what every rank of a run starts with: for ranks that are processes."""
    prepare_thread()
    for part in _parts():
        fresh = _fresh(part, seed)
        if not part.unchanged(fresh):  # most bodies draw nothing
            part.set(fresh, part.get())


class Isolation:
    """Switches the process-wide state between the ranks of a run, and the controller outside it."""

    _last_outside: dict[IsolatedState, Any] = {}  # noqa: RUF012  what the last run's controller had: often the same again

    def __init__(self, size: int, seed: int, variables: Variables | None = None) -> None:
        self._parts = _parts()
        self.process = RankStates(size, variables)
        fresh = [_fresh(part, seed) for part in self._parts]
        self._states: list[list[Any]] = [list(fresh) for _ in range(size)]
        self._outside = [self._current(part) for part in self._parts]
        self._loaded = list(self._outside)

    def _current(self, part: IsolatedState) -> Any:
        last = self._last_outside.get(part)
        if last is None or not part.unchanged(last):
            last = self._last_outside[part] = part.get()
        return last

    def switch(self, leaving: int | None, entering: int | None) -> None:
        """Put away what ``leaving`` used and load what ``entering`` left; None is the controller."""
        leaver = self._outside if leaving is None else self._states[leaving]
        enterer = self._outside if entering is None else self._states[entering]
        loaded = self._loaded
        try:
            for index, part in enumerate(self._parts):
                if not part.unchanged(loaded[index]):
                    leaver[index] = loaded[index] = part.get()
                wanted = enterer[index]
                if wanted is not loaded[index]:
                    part.set(wanted, loaded[index])
                    loaded[index] = wanted
        finally:
            self.process.switch(leaving, entering)
