"""The one message that replicas exchange at the end of each step: how the step ended, and which gradients
there are. So no replica waits in a reduction for one that will not come.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.transport.payload import allgather_alike

#: The state of a replica's gradient for a parameter, one byte each: the highest of all replicas counts.
NONE, SPARSE, DENSE = 0, 1, 2


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica's account of a step.

    Attributes:
        failure: what went wrong, in the caller's terms (picklable); None if nothing did.
        present: for each parameter of the rank, in the order of registration, NONE, SPARSE or DENSE;
            empty if nothing is reduced now.
        launched: how many buckets this replica has begun to exchange during the step.
        late: the buckets among them that a gradient came for afterwards.
        joined: the replica has no more input (joining.py).
        microbatches: how many its gradients are sums of; 0 if it has no input.
        fresh: whether the step has brought a gradient.
        again: whether a gradient came late, for a parameter whose sum had seemed to be complete.
        gather_digest: a checksum of the units that it has gathered, in order (sharding/unsharding.py).
        exchange_digest: a checksum of the distributed modules that it has called, in order
            (tensor_parallel/exchange.py).
        checksums: by kind of group, as a plain str, which is unpickled faster than a GroupKind, a checksum of what
            its members hold alike (reduction/drift.py): parameters, or shards of them; without the kinds for which
            nobody compares.
        trained: for each parameter of the rank, in the order of registration, whether it is trained; empty where
            nobody compares.
    """

    failure: Any = None
    present: bytes = b""
    launched: int = 0
    late: tuple[int, ...] = ()
    joined: bool = False
    microbatches: int = 0
    fresh: bool = True
    again: bool = False
    gather_digest: int = 0
    exchange_digest: int = 0
    checksums: Mapping[str, int] = dataclasses.field(default_factory=dict)
    trained: bytes = b""

    def __reduce__(self) -> tuple[type[ReplicaReport], tuple[object, ...]]:
        # The way of dataclasses with slots looks at all fields again for each object that is unpickled.
        return ReplicaReport, tuple(getattr(self, name) for name in self.__slots__)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The reports of all replicas after the exchange, equal on each rank.

    Most replicas report the same, and then share one report object. So a rank's work is that of looking at the
    different reports: in a large world that of looking at all of them, on every rank, was most of a step.
    """

    reports: tuple[ReplicaReport, ...]  # in the order of dp ranks

    @functools.cached_property
    def different(self) -> tuple[ReplicaReport, ...]:
        """Each report object once, in the order of dp ranks."""
        return tuple({id(one): one for one in self.reports}.values())

    @property
    def failure(self) -> Any:
        """The failure of the lowest dp rank that reports one, or None."""
        return next((one.failure for one in self.different if one.failure is not None), None)

    @functools.cached_property
    def present(self) -> bytes:
        """For each parameter the highest state that a replica reports. An empty report counts as nothing."""
        told = {one.present for one in self.different} - {b""}
        return bytes(max(states) for states in zip(*told, strict=True))

    @property
    def launched(self) -> int:
        """The largest number of buckets that a replica has begun to exchange: the others must exchange them, too."""
        return max(one.launched for one in self.different)

    @property
    def late(self) -> tuple[int, ...]:
        """The buckets to be exchanged again, in order."""
        return tuple(sorted({bucket for one in self.different for bucket in one.late}))

    @property
    def microbatches(self) -> int:
        """The number of microbatches of the replicas that have input: the same on each."""
        return max(one.microbatches for one in self.different)

    @property
    def active(self) -> list[int]:
        """The dp ranks that have not joined."""
        return [position for position, one in enumerate(self.reports) if not one.joined]


def agree(runtime: Runtime, report: ReplicaReport) -> Agreement:
    """Exchange reports over the DP group of this rank; all of its members call.

    One message from each member; none where there is one replica.
    """
    group = runtime.group(GroupKind.DP)
    if len(group.ranks) == 1:
        return Agreement((report,))
    return Agreement(tuple(allgather_alike(runtime.fabric.objects, report, group)))
