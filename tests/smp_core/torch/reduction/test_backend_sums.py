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


PARTS = """
import pytest, torch
from smp_core import runtime
from smp_core.torch.reduction.collectives import Collectives

@pytest.mark.smp(ranks=4, ddp=True, sharded_data_parallel_degree=4)
def test_parts(smp):
    gathers = Collectives(runtime.current("test"))
    shard = torch.arange(5.0) + 10 * smp.rank()
    parts = gathers.all_gather_parts(shard, [2, 3]).result()
    assert parts[1].tolist() == [[10 * rank + 2, 10 * rank + 3, 10 * rank + 4] for rank in range(4)]
    assert [part.untyped_storage().nbytes() for part in parts] == [32, 48]
"""


def test_parts_are_gathered_without_a_buffer_of_the_whole(
    apart_pytest: Run, tmp_path: Path
) -> None:
    """Each has memory of its own, of its size."""
    (tmp_path / "test_parts.py").write_text(PARTS)
    result = apart_pytest("--smp-backend=smddp", "-p", "no:cacheprovider", str(tmp_path))
    assert result.parseoutcomes() == {"passed": 1}, result.stdout.str()


COLUMNS = """
import pytest, torch
from torch import nn
from smp_core.torch.reduction.collectives import Collectives

@pytest.mark.smp(ranks=2, ddp=True, sharded_data_parallel_degree=2, sdp_param_persistence_threshold=0)
def test_columns(smp):
    sent, scatter = [], Collectives.reduce_scatter

    def noted(self, columns):
        sent.append([tuple(each.shape) for each in columns])
        return scatter(self, columns)

    model = smp.DistributedModel(nn.Linear(4, 6))

    @smp.step
    def step(x):
        model.backward(model(x).sum())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "reduce_scatter", noted)
        step(torch.ones(2, 4))
    assert sent == [[(2, 3), (2, 12)]]
    assert [parameter.grad.tolist() for parameter in model.parameters()] == [[2.0] * 12, [2.0] * 3]
"""


def test_gradients_are_sent_from_where_they_are(apart_pytest: Run, tmp_path: Path) -> None:
    """A bucket's gradients are parts of one call, and no tensor of all of them is made."""
    (tmp_path / "test_columns.py").write_text(COLUMNS)
    result = apart_pytest("--smp-backend=smddp", "-p", "no:cacheprovider", str(tmp_path))
    assert result.parseoutcomes() == {"passed": 1}, result.stdout.str()


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
