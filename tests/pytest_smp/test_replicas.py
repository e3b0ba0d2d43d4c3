"""``smp_replicas`` and ``--smp-replicas``: ranks that must be equal are, after each optimizer's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

# Both stay imported: a session in this process would import them twice.
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session

TESTS = """
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def train(model, steps, spoil=lambda step: None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(1, steps + 1):
            model(torch.ones(2, 4)).sum().backward()
            spoil(step)
            optimizer.step()
            optimizer.zero_grad()

    def layers():
        return nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))

    def two_by_two():
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    @pytest.mark.smp(ranks=4)
    def test_equal(smp):
        torch.manual_seed(dist.get_rank())
        train(DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), layers(), nn.Dropout())), 2)

    @pytest.mark.smp(ranks=4)
    def test_sharded(smp):
        train(fully_shard(layers()), 2)
        train(fully_shard(layers(), mesh=two_by_two()), 2)
        train(layers(), 1 + dist.get_rank())  # of nobody's replicas

    @pytest.mark.smp(ranks=4, ddp=True, pipeline_parallel_degree=2)
    def test_reference_engine(smp):
        model = smp.DistributedModel(layers())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        @smp.step
        def train_step(model, x):
            model.backward(model(x).sum())
        train_step(model, torch.full((2, 4), 1.0 + smp.dp_rank()))
        optimizer.step()

    @pytest.mark.smp(ranks=2)
    def test_held_up_by_a_rank_that_raises_as_expected(smp, smp_replicas):
        model = layers()
        smp_replicas.watch(model)
        with smp.raises(ValueError, ranks=[0]):
            if dist.get_rank() == 0:
                raise ValueError
            dist.barrier()
        train(model, 1)

    @pytest.mark.smp(ranks=2)
    def test_an_optimizer_of_one_rank_alone(smp):
        if dist.get_rank() == 0:
            train(layers(), 1)
        train(DistributedDataParallel(layers()), 1)

    # What follows fails.

    @pytest.mark.smp(ranks=2)
    def test_fails_beside_an_optimizer_of_one_rank_alone(smp):
        if dist.get_rank() == 0:
            train(layers(), 1)
        model = DistributedDataParallel(layers())
        def spoil(step):
            if dist.get_rank() == 1:
                model.module[1].weight.grad[1, 0] = 7.0
        train(model, 1, spoil)

    @pytest.mark.smp(ranks=2, ddp=True)
    def test_fails_reference_engine(smp):
        model = smp.DistributedModel(nn.Linear(4, 1))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        @smp.step
        def train_step(model, x):
            model.backward(model(x).sum())
        train_step(model, torch.ones(2, 4))
        optimizer.step()
        if smp.rank():
            next(model.parameters()).data[0, 2] = 7.0

    @pytest.mark.smp(ranks=3)
    def test_fails_gradient(smp):
        model = DistributedDataParallel(layers())
        def spoil(step):
            if step == 2 and dist.get_rank() == 1:
                model.module[1].weight.grad[1, 0] = 7.0
        train(model, 3, spoil)

    @pytest.mark.smp(ranks=4)
    def test_fails_replicated_shard(smp):
        model = fully_shard(layers(), mesh=two_by_two())
        def spoil(step):
            if dist.get_rank() == 3:
                model[0].weight.grad.to_local()[0, 0] = 7.0
        train(model, 1, spoil)

    @pytest.mark.smp(ranks=2)
    def test_fails_watched_module(smp, smp_replicas):
        model = layers()
        torch.manual_seed(dist.get_rank())
        smp_replicas.watch(model, generators=True)
        train(model, 1)

    @pytest.mark.smp(ranks=3)
    def test_fails_by_the_number_of_steps(smp, smp_replicas):
        model = layers()
        smp_replicas.watch(model)
        train(model, 2 + (dist.get_rank() == 2))

    @pytest.mark.smp(ranks=2)
    def test_fails_later(smp):
        model = DistributedDataParallel(layers())
        def spoil(step):
            if dist.get_rank() == 1:
                model.module[0].bias.data[0] = 7.0
        train(nn.Sequential(model), 1, spoil)
        assert False, "what the user sees"
"""


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_replicas_are_compared_after_each_step(session: Session, backend: str) -> None:
    ended = session(TESTS, f"--smp-backend={backend}", "--smp-replicas", "-rp", ranks=4)
    ended.counts.pop("warnings", None)  # torch's own, of FSDP
    assert ended.counts == {"passed": 5, "failed": 7}, ended.text
    for name in (
        *("equal", "sharded", "reference_engine"),
        *("held_up_by_a_rank_that_raises_as_expected", "an_optimizer_of_one_rank_alone"),
    ):
        ended.shows(f"PASSED test_it.py::test_{name}")
    for name, texts in {
        "test_fails_beside_an_optimizer_of_one_rank_alone": (
            "replicas differ: gradient of 1.weight at step 1 of SGD",
        ),
        "test_fails_reference_engine": ("weight at step 1 of SGD", "element [0, 2] is "),
        "test_fails_gradient": (
            "ReplicaError: replicas differ: gradient of 1.weight at step 2 of SGD",
            "element [1, 0] is ",
            " on ranks 0, 2 and 7.0 on rank 1",
            "odd one out: rank 1",
            "verdict: replicas differ (3 ranks",
        ),
        "test_fails_replicated_shard": (
            "replicas differ: gradient of 0.weight at step 1 of SGD",
            "on rank 1 and 7.0 on rank 3",
        ),
        "test_fails_watched_module": (
            "replicas differ: the generator of torch at step 1 of SGD",
            "rank 1 differs from rank 0",
        ),
        "test_fails_by_the_number_of_steps": (
            "replicas differ: SGD has made 2 steps on ranks 0-1 and 3 steps on rank 2",
        ),
        "test_fails_later": (
            "AssertionError: what the user sees",
            "replicas differ: parameter 0.bias at step 1 of SGD",
        ),
    }.items():
        part = ended.end.partition(f"test_it.py::{name}\n")[2].partition("\ntest_it.py::")[0]
        for text in texts:
            assert " ".join(text.split()) in " ".join(part.split()), (name, text, part)


def test_without_the_option_nothing_is_compared(session: Session) -> None:
    ended = session(TESTS, "-k", "fails_gradient", ranks=4)
    assert ended.counts == {"passed": 1, "deselected": 11}
