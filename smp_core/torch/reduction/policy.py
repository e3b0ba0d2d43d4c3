"""The behaviours of the reducer in which plain and sharded data parallelism differ, as data.

A shard group of one rank is plain data parallelism: the totals of a step are that rank's shards already, so nothing
is scattered, and the all-reduce over the replicate group is all there is.
"""

from __future__ import annotations

import dataclasses
import enum

from smp_core.topology import GroupKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of DistributedModel that are about gradients (API 1.7)."""

    overlapping_allreduce: bool = True
    """True if buckets may be launched during the backward pass, rather than at the end of the step."""

    backward_passes_per_step: int = 1
    """How many steps are summed before gradients are reduced over replicas: a window."""

    average_grads_across_microbatches: bool = True
    """True if the one division is by the number of microbatches, too."""

    bucket_cap_mb: float = 25
    """The most MiB of gradients that one bucket holds in plain data parallelism."""

    broadcast_buffers: bool = True
    """True if a step begins with the buffers of one replica on all of them."""

    gradient_as_bucket_view: bool = False
    """True if ``p.grad`` may be a view of the reduced bucket, which saves a copy."""


class BucketUnit(enum.Enum):
    """The unit in which the size of a bucket is counted."""

    BYTES = "bytes"
    """Bytes of gradients. One bucket of each dtype is open at a time, so a parameter of another dtype closes none."""

    ELEMENTS = "elements"
    """Elements of gradients, padding left out. The buckets of one dtype precede those of the next."""


class LateGradients(enum.Enum):
    """The treatment of a gradient that comes for a bucket after its launch, as where a function runs backward twice."""

    REDUCE_AGAIN = "reduce again"
    """The bucket's result is dropped, and all of its gradients are reduced again at the end of the step: the bits are
    those of a step without overlap. The ledger keeps its sums until then.
    """

    ADD = "add"
    """The late gradients alone are reduced at the end of the step and added second: the first such step depends on
    what had been launched, and from the next step on nothing is launched early. The ledger gives its sums away.
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReductionPolicy:
    """The way in which gradients are reduced. Sums, their order, and the one division are the same in every policy."""

    scatters: bool
    """True if each step ends with a reduce-scatter over the shard group, whose results are accumulated. False: the
    group is one rank, whose totals are accumulated as they are, and the all-reduce is what may be launched early.
    """

    bucket_cap: float
    """The most that one bucket holds; a larger parameter is alone."""

    bucket_unit: BucketUnit
    """The unit of ``bucket_cap``."""

    late: LateGradients
    """The treatment of a gradient that comes for a bucket after its launch."""

    wide: bool
    """True if gradients of 16-bit parameters are float32 from the first sum on. False: they travel in 16 bits, and are
    folded and divided in float32, and rounded once.
    """

    keeps_sparse: bool
    """True if a gradient that is sparse on every replica stays sparse: its rows travel as objects. False: it is made
    dense when it is added to a bucket.
    """

    comm_hooks: bool
    """True if a communication hook of the user's may reduce buckets: it is given whole gradients."""

    bucket_views: bool
    """True if the gradients given to parameters may be views of the reduced bucket."""

    held_by: GroupKind
    """The ranks that hold alike the parameters that are not sharded; at the end of each step they compare them."""


def plain(options: Options, wide: bool) -> ReductionPolicy:
    """Plain data parallelism: each rank holds all parameters of its partition."""
    return ReductionPolicy(
        scatters=False,
        bucket_cap=options.bucket_cap_mb * 2**20,
        bucket_unit=BucketUnit.BYTES,
        late=LateGradients.REDUCE_AGAIN,
        wide=wide,
        keeps_sparse=True,
        comm_hooks=True,
        bucket_views=options.gradient_as_bucket_view,
        held_by=GroupKind.DP,
    )


def sharded(bucket_elements: int) -> ReductionPolicy:
    """Sharded data parallelism: a rank holds its shards, and whole the parameters below the threshold."""
    return ReductionPolicy(
        scatters=True,
        bucket_cap=bucket_elements,
        bucket_unit=BucketUnit.ELEMENTS,
        late=LateGradients.ADD,
        wide=True,
        keeps_sparse=False,
        comm_hooks=False,
        bucket_views=False,
        held_by=GroupKind.RDP,
    )
