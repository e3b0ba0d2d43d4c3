"""The split of one tensor over the ranks of a group: flat, padded, in equal shards.

A tensor of ``numel`` elements is laid out flat and cut into one shard of ``ceil(numel / ranks)`` elements
for each rank, in rank order; the last shards are filled up with zeros, and may be nothing else
(ENGINES 1.4). Shapes play no role, and no rank has more than another. Pure functions of sizes; no
communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """``numel`` elements over ``ranks`` ranks.

    >>> layout = Layout(numel=5, ranks=4)
    >>> layout.shard_numel, [layout.owned_range(rank) for rank in range(4)]
    (2, [(0, 2), (2, 4), (4, 5), (5, 5)])
    """

    numel: int
    ranks: int

    @property
    def shard_numel(self) -> int:
        """The elements of each rank's shard, padding included."""
        return -(-self.numel // self.ranks)

    @property
    def padded_numel(self) -> int:
        """The elements of all shards together, padding included."""
        return self.shard_numel * self.ranks

    def owned_range(self, rank: int) -> tuple[int, int]:
        """The first and the last element (exclusive) of a rank in the flat tensor, without padding."""
        size = self.shard_numel
        return min(rank * size, self.numel), min((rank + 1) * size, self.numel)

    def shards(self, flat: torch.Tensor) -> torch.Tensor:
        """The shards of all ranks, of shape ``(ranks, shard_numel)``: a copy, padded with zeros.

        ``flat`` has ``numel`` elements, in any shape and layout; they count in row-major order.
        """
        shards = flat.new_zeros(self.padded_numel)
        shards[: self.numel] = flat.detach().reshape(-1)
        return shards.view(self.ranks, self.shard_numel)

    def full(self, shards: torch.Tensor) -> torch.Tensor:
        """The flat tensor of ``numel`` elements that these shards, ``(ranks, shard_numel)``, are of."""
        return shards.reshape(-1)[: self.numel]


def bins(sizes: Sequence[int], most: float) -> Iterator[list[int]]:
    """The indices of ``sizes`` in order, in bins of at most ``most`` together.

    Greedy: a size that does not fit into a bin beside others begins the next one; a size above
    ``most`` is alone (ENGINES 1.5).
    """
    filled, bin_ = 0, list[int]()
    for index, size in enumerate(sizes):
        if bin_ and filled + size > most:
            yield bin_
            filled, bin_ = 0, []
        bin_.append(index)
        filled += size
    if bin_:
        yield bin_
