"""The reports that replicas get of each other at the end of a step."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from smp_core import runtime
from smp_core.topology import GroupKind
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


@pytest.mark.smp(ranks=6)
def test_a_rank_looks_at_each_different_report_once(smp: Any) -> None:
    """In a world of n ranks, n reports on each of them are work that grows with the square of n."""
    agreed = agree(runtime.current("test"), ReplicaReport(launched=smp.rank() % 2, late=(1,)))
    assert [one.launched for one in agreed.reports] == [0, 1] * 3
    assert agreed.different == (ReplicaReport(late=(1,)), ReplicaReport(launched=1, late=(1,)))
    assert len({id(one) for one in agreed.reports}) == 2
    assert (agreed.launched, agreed.late) == (1, (1,))


def test_a_report_travels_whole() -> None:
    report = ReplicaReport(
        failure="f",
        present=b"\1\2",
        launched=3,
        late=(1, 2),
        joined=True,
        microbatches=4,
        fresh=False,
        again=True,
        gather_digest=5,
        checksums={GroupKind.RDP.value: 6},
        trained=b"\1",
    )
    travelled = pickle.loads(pickle.dumps(report))
    assert travelled == report
    assert travelled.checksums.get(GroupKind.RDP) == 6
