"""How one tensor is split over the ranks of a group: flat, padded, in equal parts.

A tensor of ``numel`` elements is laid out flat and cut into one part of ``ceil(numel / ranks)`` elements
for each rank, in rank order; the last parts are filled up with zeros, and may be nothing else
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
    >>> layout.part, [layout.own(rank) for rank in range(4)]
    (2, [(0, 2), (2, 4), (4, 5), (5, 5)])
    """

    numel: int
    ranks: int

    @property
    def part(self) -> int:
        """The elements of each rank's part, padding included."""
        return -(-self.numel // self.ranks)

    @property
    def padded(self) -> int:
        """The elements of all parts together."""
        return self.part * self.ranks

    def own(self, rank: int) -> tuple[int, int]:
        """Where the elements of a rank begin and end in the flat tensor, without padding."""
        return min(rank * self.part, self.numel), min((rank + 1) * self.part, self.numel)

    def parts(self, flat: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, of shape ``(ranks, part)``: a copy, padded with zeros.

        ``flat`` has ``numel`` elements, in any shape and layout; they count in row-major order.
        """
        parts = flat.new_zeros(self.padded)
        parts[: self.numel] = flat.detach().reshape(-1)
        return parts.view(self.ranks, self.part)

    def whole(self, parts: torch.Tensor) -> torch.Tensor:
        """The flat tensor of ``numel`` elements that these parts, ``(ranks, part)``, are of."""
        return parts.reshape(-1)[: self.numel]


def bins(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """The indices of ``sizes`` in order, in bins of at most ``most`` together.

    Greedy: what does not fit into a bin that has something begins the next; what is larger than
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
