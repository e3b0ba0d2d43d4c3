"""The collectives on `smddp`, whose own sums they take: values are those on `sim`, and parts cross to a node once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from smp_core.transport import smddp
from smp_core.transport.protocols import SMDDP

COLLECTIVES = Path(__file__).with_name("test_collectives.py")
Run = Callable[..., pytest.RunResult]


def test_the_backend_of_these_sums_is_the_one_over_shared_memory() -> None:
    assert smddp.BACKEND == SMDDP


def test_the_sums_of_smddp_are_those_of_the_published_order(apart_pytest: Run) -> None:
    # Without the tests of exchanges that begin late, and of a ring: a sum of the backend is one exchange, and a gather
    # is a mesh.
    result = apart_pytest(
        "--smp-backend=smddp",
        *("-p", "no:cacheprovider", str(COLLECTIVES)),
        *("-k", "not go_on_together and not leave"),
    )
    outcomes = result.parseoutcomes()
    assert outcomes.keys() == {"passed", "deselected"}, result.stdout.str()
    assert outcomes["passed"] > 85


MESH = """
import pytest, torch
from smp_core import runtime
from smp_core.torch.reduction.collectives import Collectives

CONFIG = {"ddp": True, "sharded_data_parallel_degree": 4, "ranks_per_node": 2}

@pytest.mark.smp(ranks=4, **CONFIG, sdp_hierarchical_allgather=False)
def test_mesh(smp):
    gathers = Collectives(runtime.current("test"))
    with gathers.traffic.recorded() as log:
        gathers.all_gather(torch.ones(3)).result()
    assert [(each.bytes, each.between_nodes, each.backend) for each in log] == [(36, 12, "smddp")]
"""


def test_a_part_crosses_to_each_other_node_once(apart_pytest: Run, tmp_path: Path) -> None:
    """Twelve bytes go to three others, of whom two share a node."""
    (tmp_path / "test_mesh.py").write_text(MESH)
    result = apart_pytest("--smp-backend=smddp", "-p", "no:cacheprovider", str(tmp_path))
    assert result.parseoutcomes() == {"passed": 1}, result.stdout.str()
