"""Random streams: each module call of a microbatch has a stream of its own, on every rank and at any time.

The numbers that a call draws from torch's default CPU generator depend on the seed of the step, the microbatch, and the
chain of calls that led to it. A link of the chain is a module path and the zero-based index of the call among its
caller's calls of that module. The numbers do not depend on the partition, the schedule, or earlier draws. An activation
checkpoint repeats a call in backward with the same chain, so it draws the same numbers again.

Seeds have 64 bits, of which torch's CPU generator takes 32: among 10,000 calls of a step, two share a stream with a
chance of about 1 in 100. Only torch's default CPU generator has streams. The generators of ``random`` and numpy stay as
the caller left them.
"""

from __future__ import annotations

import hashlib
from types import TracebackType

import torch

_MASK = 2**64 - 1


def draw_seed() -> int:
    """Draw a seed for one step from torch's default generator: 63 bits, so that it fits a tensor.

    Every rank of a pipeline draws once per step. The step uses the driver's seed, which travels with each request.
    """
    return int(torch.randint(2**63 - 1, (), device="cpu").item())


def root(seed: int, microbatch: int) -> int:
    """The stream of the body of a microbatch, from which the streams of its calls derive."""
    return _digest(seed, microbatch, "body")


def derive(caller: int, path: str, nth: int) -> int:
    """The stream of call ``nth``, zero-based, of the module at ``path`` by the call with the stream ``caller``."""
    return _digest(caller, nth, path)


def _digest(parent: int, number: int, text: str) -> int:
    packed = (parent & _MASK).to_bytes(8, "little") + number.to_bytes(8, "little") + text.encode()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class entered:
    """While entered, torch's default CPU generator is at the start of the stream. On exit, also by an exception, it
    returns to its state before. Takes 5 microseconds.
    """

    __slots__ = ("_caller", "_stream")

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        generator = torch.default_generator
        self._caller = generator.get_state()
        # The generator drops the upper 32 bits, and two streams may differ only there.
        generator.manual_seed((self._stream ^ self._stream >> 32) & 0xFFFFFFFF)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        torch.default_generator.set_state(self._caller)


class suspended:
    """While entered, other activities may use the generator. On exit it returns to its state before.

    A thread enters it wherever it gives the baton away, because the generator belongs to the whole rank. Takes 2
    microseconds.
    """

    __slots__ = ("_state",)

    def __enter__(self) -> None:
        self._state = torch.default_generator.get_state()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        torch.default_generator.set_state(self._state)
