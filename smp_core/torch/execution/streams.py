"""Random streams: each module call of a microbatch has its own, wherever and whenever it runs.

The numbers that a call draws from torch's default CPU generator depend on the seed of the step, the
microbatch, and the chain of calls that led to it (each a module path, and the how-manieth call of it
its caller made); not on the partition, the schedule, or what ran before. A call that is repeated, as
an activation checkpoint does in backward, finds the same chain and draws the same numbers again.

Seeds are 64 bits, of which torch's CPU generator takes 32: of 10,000 calls in a step, two share a
stream with a chance of about 1 in 100. Only torch's default CPU generator has streams; those of
``random`` and numpy are as the caller left them.
"""

from __future__ import annotations

import hashlib
from types import TracebackType

import torch

_MASK = 2**64 - 1


def draw_seed() -> int:
    """A seed for one step, drawn from torch's default generator: 63 bits, so that it fits a tensor.

    Every rank of a pipeline draws once per step. The driver's seed is the one of the step, which it tells the others.
    """
    return int(torch.randint(2**63 - 1, (), device="cpu").item())


def root(seed: int, microbatch: int) -> int:
    """The stream of the body of a microbatch, from which those of its calls derive."""
    return _digest(seed, microbatch, "body")


def derive(caller: int, path: str, nth: int) -> int:
    """The stream of the ``nth`` call (from 0) of the module at ``path`` by the call with the stream
    ``caller``.
    """
    return _digest(caller, nth, path)


def _digest(parent: int, number: int, text: str) -> int:
    packed = (parent & _MASK).to_bytes(8, "little") + number.to_bytes(8, "little") + text.encode()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class entered:
    """While entered, torch's default CPU generator is at the start of the stream; afterwards, also
    after an exception, at the point where the caller left it. Takes 5 microseconds.
    """

    __slots__ = ("_caller", "_stream")

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        generator = torch.default_generator
        self._caller = generator.get_state()
        # The upper half would be lost, and streams differ in either.
        generator.manual_seed((self._stream ^ self._stream >> 32) & 0xFFFFFFFF)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        torch.default_generator.set_state(self._caller)


class suspended:
    """While entered, the generator may be used by others; afterwards it is where it was.

    To be entered wherever a worker gives its turn away: the generator belongs to the whole rank.
    Takes 2 microseconds.
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
