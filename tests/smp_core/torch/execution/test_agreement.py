"""The reports that replicas get of each other at the end of a step."""

from __future__ import annotations

from typing import Any

import pytest

from smp_core import runtime
from smp_core.torch.execution.agreement import DENSE, NONE, SPARSE, Agreement, ReplicaReport, agree


@pytest.mark.smp(ranks=4, pipeline_parallel_degree=2)
def test_replicas_of_one_partition_hear_each_other_and_nobody_else(smp: Any) -> None:
    here = runtime.current("test")
    agreed = agree(here, ReplicaReport(failure=here.rank if smp.pp_rank() == 1 else None))
    ranks = smp.get_dp_group()
    assert [one.failure for one in agreed.reports] == (ranks if smp.pp_rank() == 1 else [None] * 2)
    assert agreed.failure == (ranks[0] if smp.pp_rank() == 1 else None)


@pytest.mark.smp(ranks=1)
def test_one_replica_agrees_with_itself(smp: Any) -> None:
    report = ReplicaReport(failure="mine", present=b"\1", launched=2, late=(1,))
    assert agree(runtime.current("test"), report) == Agreement((report,))


def test_the_most_that_anybody_has_counts() -> None:
    agreed = Agreement(
        (
            ReplicaReport(present=bytes([NONE, SPARSE, SPARSE, NONE]), launched=1, late=(0,)),
            ReplicaReport(present=bytes([NONE, NONE, DENSE, DENSE]), launched=3, late=(2, 0)),
            ReplicaReport(joined=True),
        )
    )
    assert agreed.present == bytes([NONE, SPARSE, DENSE, DENSE])
    assert (agreed.launched, agreed.late, agreed.active) == (3, (0, 2), [0, 1])
    assert agreed.failure is None
    assert Agreement((ReplicaReport(), ReplicaReport(joined=True))).present == b""


def test_the_failure_of_the_lowest_rank_is_that_of_all() -> None:
    assert (
        Agreement((ReplicaReport(), ReplicaReport(failure="b"), ReplicaReport(failure="c"))).failure
        == "b"
    )
