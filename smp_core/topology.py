"""The groups that ranks form: computed from the degrees and the placement alone, with no communication.

Words. A rank has three *coordinates*, one per dimension of the world: ``rdp_rank`` (letter D, of
``reduced_data`` values), ``pp_rank`` (P, of ``pipeline``) and ``tp_rank`` (T, of ``tensor``). The
*placement* says how world ranks run through the coordinates. A *kind* of group is defined by what
its members share; the groups of one kind partition the world, and every group lists its world ranks
in ascending order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

from smp_core.errors import ConfigError, RankError


class GroupKind(StrEnum):
    """The eight kinds of group. Sources: API 4.1 (the first six), 4.3 (the last two)."""

    WORLD = "world"
    MP = "mp"  #: one model replica: pipeline and tensor parallelism together
    DP = "dp"  #: one model partition: reduced data and tensor parallelism together
    PP = "pp"  #: the pipeline
    TP = "tp"  #: the ranks that split single tensors
    RDP = "rdp"  #: the ranks that hold the very same parameters
    SHARDING = "sharding"  #: a block of an RDP group: one copy of the training state
    REPLICATION = "replication"  #: the ranks that hold the same shard, one of each block


class Coordinates(NamedTuple):
    """The position of a rank in each dimension; every value counts from 0."""

    rdp_rank: int
    pp_rank: int
    tp_rank: int


#: The names of each placement, with its letters: the rightmost varies fastest with the world rank
#: (API 4.2). Permutations count as names too (API 8.6).
PLACEMENTS: Mapping[str, str] = {
    "cluster": "DPT",
    "spread": "TPD",
    **{letters: letters for letters in map("".join, itertools.permutations("DPT"))},
}

#: The coordinates that the members of one group share, given a member's coordinates and the sharding
#: degree. Along an RDP group ranks ascend with ``rdp_rank``, so cutting the group into blocks is dividing
#: that coordinate.
_SHARED: Mapping[GroupKind, Callable[[Coordinates, int], tuple[int, ...]]] = {
    GroupKind.WORLD: lambda at, sharding: (),
    GroupKind.MP: lambda at, sharding: (at.rdp_rank,),
    GroupKind.DP: lambda at, sharding: (at.pp_rank,),
    GroupKind.PP: lambda at, sharding: (at.tp_rank, at.rdp_rank),
    GroupKind.TP: lambda at, sharding: (at.pp_rank, at.rdp_rank),
    GroupKind.RDP: lambda at, sharding: (at.pp_rank, at.tp_rank),
    GroupKind.SHARDING: lambda at, sharding: (at.pp_rank, at.tp_rank, at.rdp_rank // sharding),
    GroupKind.REPLICATION: lambda at, sharding: (at.pp_rank, at.tp_rank, at.rdp_rank % sharding),
}


class _Partition(NamedTuple):
    """The groups of one kind, and for every world rank its group and its place there."""

    groups: tuple[tuple[int, ...], ...]
    group_of: tuple[tuple[int, ...], ...]
    position_of: tuple[int, ...]


class _Layout(NamedTuple):
    coordinates: tuple[Coordinates, ...]
    partitions: dict[GroupKind, _Partition]


@dataclass(frozen=True)
class Topology:
    """A world of ``size`` ranks, cut by the parallel degrees. A value: compared by its five fields.

    Args:
        size: number of ranks in the world.
        pipeline: ``pipeline_parallel_degree``.
        tensor: ``tensor_parallel_degree``.
        sharding: ``sharded_data_parallel_degree``; divides ``reduced_data`` and may equal it
            (API 8.1, 8.3).
        placement: ``placement_strategy``: a key of :data:`PLACEMENTS`.

    Raises:
        ConfigError: a degree is no positive int, the degrees do not fit the world, or the placement
            is unknown.

    Where the sources are silent: a rank's position in a group, which is its ``mp_rank``,
    ``dp_rank`` and so on, is its place among the group's ascending world ranks, as after an MPI
    communicator split (API 4.2, 9.2). Rules between sharding and other keys of a
    configuration (no pipeline, and so on: API 3.5) are the configuration's; the groups are
    well defined without them.

    Source: API 4, AWS Sharded Data Parallelism (Sharded data parallelism with tensor parallelism).
    """

    size: int
    pipeline: int = 1
    tensor: int = 1
    sharding: int = 1
    placement: str = "cluster"

    def __post_init__(self) -> None:
        for name, value in (
            ("world size", self.size),
            ("pipeline_parallel_degree", self.pipeline),
            ("tensor_parallel_degree", self.tensor),
            ("sharded_data_parallel_degree", self.sharding),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} = {value!r}: must be an int of at least 1")
        if not isinstance(self.placement, str) or self.placement not in PLACEMENTS:
            raise ConfigError(
                f"placement_strategy = {self.placement!r}: must be one of {', '.join(PLACEMENTS)}"
            )
        replica = self.pipeline * self.tensor
        if self.size % replica:
            raise ConfigError(
                f"world size = {self.size}: must be a multiple of pipeline_parallel_degree * "
                f"tensor_parallel_degree = {self.pipeline} * {self.tensor} = {replica}"
            )
        if self.reduced_data % self.sharding:
            raise ConfigError(
                f"sharded_data_parallel_degree = {self.sharding}: must divide the reduced data "
                f"parallel size, {self.reduced_data} (= world size {self.size} / "
                f"(pipeline_parallel_degree {self.pipeline} * "
                f"tensor_parallel_degree {self.tensor}))"
            )

    @property
    def reduced_data(self) -> int:
        """The reduced data parallel size, ``rdp_size``: how many ranks hold the same parameters."""
        return self.size // (self.pipeline * self.tensor)

    def coordinates(self, rank: int) -> Coordinates:
        """The position of ``rank`` in each dimension.

        Raises:
            RankError: ``rank`` is not in the world.
        """
        self._check(rank)
        return self._layout.coordinates[rank]

    def rank_of(self, rdp_rank: int, pp_rank: int, tp_rank: int) -> int:
        """The world rank at these coordinates: the inverse of :meth:`coordinates`.

        Raises:
            RankError: a coordinate is not below the degree of its dimension.
        """
        at = Coordinates(rdp_rank, pp_rank, tp_rank)
        for name, value, degree in zip(Coordinates._fields, at, self._degrees, strict=True):
            if not 0 <= value < degree:
                raise RankError(
                    f"{name} {value} is out of range: with {self!r} it runs from 0 to {degree - 1}"
                )
        rank = 0
        for letter in PLACEMENTS[self.placement]:
            dimension = "DPT".index(letter)
            rank = rank * self._degrees[dimension] + at[dimension]
        return rank

    def group(self, kind: GroupKind, rank: int) -> tuple[int, ...]:
        """The group of this kind that holds ``rank``: world ranks, ascending. Its members share it.

        Raises:
            RankError: ``rank`` is not in the world.
        """
        self._check(rank)
        return self._layout.partitions[kind].group_of[rank]

    def groups(self, kind: GroupKind) -> tuple[tuple[int, ...], ...]:
        """All groups of this kind, each once, ordered by first member."""
        return self._layout.partitions[kind].groups

    def position(self, kind: GroupKind, rank: int) -> int:
        """The index of ``rank`` in ``group(kind, rank)``.

        Raises:
            RankError: ``rank`` is not in the world.
        """
        self._check(rank)
        return self._layout.partitions[kind].position_of[rank]

    def group_size(self, kind: GroupKind) -> int:
        """The number of ranks in a group of this kind; all groups of a kind have the same size."""
        return len(self._layout.partitions[kind].groups[0])

    def global_batch(self, batch: int, prescaled: bool) -> int:
        """Samples that all ranks together take in one step.

        Args:
            batch: samples in one step's batch. Without ``prescaled`` every PP group reads a batch
                of its own; with it, every MP group does, and its TP ranks share that batch.
            prescaled: ``prescaled_batch``.

        Source: API 4.4, AWS Sharded Data Parallelism (Example 1).
        """
        return batch * self.group_size(GroupKind.RDP if prescaled else GroupKind.DP)

    @property
    def _degrees(self) -> tuple[int, int, int]:
        """The degrees, in the order of :class:`Coordinates`."""
        return self.reduced_data, self.pipeline, self.tensor

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise RankError(
                f"rank {rank} is out of range: this world has size {self.size}, "
                f"so its ranks run from 0 to {self.size - 1}"
            )

    @cached_property
    def _layout(self) -> _Layout:
        # On the instance, because every communication call of every rank looks here, and hashing a
        # topology costs more than the look-up; behind a shared cache, because every rank may make
        # its own equal topology.
        return _lay_out(self)

    def __reduce__(self) -> tuple[type[Topology], tuple[int, int, int, int, str]]:
        # A pickle carries the five values, not the tables.
        return Topology, (self.size, self.pipeline, self.tensor, self.sharding, self.placement)


@lru_cache(maxsize=16)  # bounded: a test session draws topologies without end
def _lay_out(topology: Topology) -> _Layout:
    degrees = dict(zip("DPT", topology._degrees, strict=True))
    letters = PLACEMENTS[topology.placement]
    # `product` varies its last factor fastest, which is what a placement means.
    steps = itertools.product(*(range(degrees[letter]) for letter in letters))
    d, p, t = (letters.index(letter) for letter in "DPT")
    coordinates = tuple(Coordinates(step[d], step[p], step[t]) for step in steps)
    return _Layout(
        coordinates,
        {
            kind: _partition([shared(at, topology.sharding) for at in coordinates])
            for kind, shared in _SHARED.items()
        },
    )


def _partition(shared: list[tuple[int, ...]]) -> _Partition:
    """Put together the ranks whose entries in ``shared`` are equal."""
    members: dict[tuple[int, ...], list[int]] = {}
    position_of = []
    # Ranks come in ascending order, and a dict keeps the order of insertion: hence the order within
    # groups and the order of groups.
    for rank, key in enumerate(shared):
        group = members.setdefault(key, [])
        position_of.append(len(group))
        group.append(rank)
    groups = {key: tuple(group) for key, group in members.items()}
    return _Partition(
        tuple(groups.values()), tuple(groups[key] for key in shared), tuple(position_of)
    )
