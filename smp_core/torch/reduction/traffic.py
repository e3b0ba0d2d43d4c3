"""Counters of the bytes that the collectives of sharded data parallelism sent, and on request a list of the calls.

The bytes are those that leave this rank, counted from the exchanges themselves: each other rank is sent one part;
around a ring, all parts but one go on to the next rank; of rows, each other rank is sent its own. On `smddp` the sums
are the backend's: their entries have the bytes that the exchanges of another backend would send, not those of the hops
that `smddp` takes. Counting changes nothing, and takes memory only for as many counters as there are kinds of call.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from smp_core.topology import GroupKind


class Sent(NamedTuple):
    """One exchange, as one rank sees it."""

    operation: str  #: all_gather, reduce_scatter or all_reduce, and the hop where there are two
    group: GroupKind
    elements: int  #: of the whole tensor, all parts of it
    dtype: torch.dtype
    bytes: int  #: that left this rank
    between_nodes: int  #: those of them that left its node
    backend: str = ""  #: of a gather of shards: the backend that it went through
    reason: str = ""  #: the reason why that is not smddp (docs/sharding.md)


class TrafficKind(NamedTuple):
    """The kind of traffic that one counter counts."""

    operation: str
    group: GroupKind
    dtype: torch.dtype


class Sum(NamedTuple):
    """The exchanges of one kind together."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0
    between_nodes: int = 0


Mark = Mapping[TrafficKind, Sum]


class Traffic:
    """Counts exchanges, on one rank.

    >>> traffic = Traffic()
    >>> mark = traffic.mark()
    >>> traffic.add(Sent("all_gather", GroupKind.SHARDING, 8, torch.float32, 24, 0))
    >>> traffic.bytes(mark), traffic.calls(mark, "all_gather")
    (24, 1)
    """

    def __init__(self) -> None:
        self._calls: Counter[TrafficKind] = Counter()
        self._elements: Counter[TrafficKind] = Counter()
        self._bytes: Counter[TrafficKind] = Counter()
        self._between_nodes: Counter[TrafficKind] = Counter()
        self._logs: list[list[Sent]] = []

    def add(self, sent: Sent) -> None:
        """Count one exchange."""
        kind = TrafficKind(sent.operation, sent.group, sent.dtype)
        self._calls[kind] += 1
        self._elements[kind] += sent.elements
        self._bytes[kind] += sent.bytes
        self._between_nodes[kind] += sent.between_nodes
        for log in self._logs:
            log.append(sent)

    def mark(self) -> Mark:
        """The counters as they are now."""
        return {
            kind: Sum(calls, self._elements[kind], self._bytes[kind], self._between_nodes[kind])
            for kind, calls in self._calls.items()
        }

    def since(self, mark: Mark | None = None) -> dict[TrafficKind, Sum]:
        """The traffic since ``mark``, or since the beginning, of the kinds with at least one call."""
        found: dict[TrafficKind, Sum] = {}
        for kind, now in self.mark().items():
            before = (mark or {}).get(kind, Sum())
            if now.calls > before.calls:
                found[kind] = Sum(*(one - other for one, other in zip(now, before, strict=True)))
        return found

    def calls(self, mark: Mark | None, operation: str) -> int:
        """The number of calls of ``operation`` since ``mark``, in all groups and dtypes."""
        return sum(
            each.calls for kind, each in self.since(mark).items() if kind.operation == operation
        )

    def bytes(self, mark: Mark | None = None) -> int:
        """The bytes that this rank sent since ``mark``, of everything."""
        return sum(each.bytes for each in self.since(mark).values())

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Sent]]:
        """Every exchange of the block, in the order in which they begin, in a list."""
        log: list[Sent] = []
        self._logs.append(log)
        try:
            yield log
        finally:
            # By identity: two empty logs are equal.
            self._logs = [each for each in self._logs if each is not log]
