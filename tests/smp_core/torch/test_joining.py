"""``model.join()``: replicas with different numbers of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smp_core.torch.exceptions import UnsupportedTrainingError


class Counting(nn.Module):
    """A weight, and a buffer that is added to by each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum().detach()
        return x * self.weight


def train(smp: Any, batches: list[float], **options: Any) -> tuple[Any, list[list[float]]]:
    """Train on a plain loop; the model, and the gradients of each step."""
    torch.manual_seed(0)
    model = smp.DistributedModel(Counting(), **options)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    gradients = []
    with model.join():
        for value in batches:
            optimizer.zero_grad()
            step(model, torch.full((1, 2), value))
            weight = next(iter(model.local_parameters()), None)
            if weight is not None:
                gradients.append(weight.grad.tolist() if weight.grad is not None else [])
                optimizer.step()
    return model, gradients


@pytest.mark.smp(ranks=3, ddp=True)
def test_a_replica_without_input_counts_as_zeros_and_ends_with_the_others_values(smp: Any) -> None:
    batches = [[3.0], [3.0, 6.0, 9.0], [3.0, 6.0]][smp.dp_rank()]
    model, gradients = train(smp, batches)
    all_steps = [[3.0, 3.0], [4.0, 4.0], [3.0, 3.0]]  # 9/3, 12/3, 9/3: of all three, joined or not
    assert gradients == all_steps[: len(batches)]
    (weight,) = model.local_parameters()
    assert weight.tolist() == [1.0 - 10.0] * 2
    assert weight.grad.tolist() == gradients[-1]
    # Buffers: of dp rank 0 before the second step, of rank 1, which is the first with input, then.
    (seen,) = model.local_buffers()
    assert seen.item() == 2 * (3.0 + 6.0 + 9.0)


@pytest.mark.smp(ranks=2, ddp=True)
def test_equal_inputs_give_what_they_give_without_join(smp: Any) -> None:
    _, gradients = train(smp, [2.0, 4.0])
    assert gradients == [[2.0, 2.0], [4.0, 4.0]]


@pytest.mark.smp(ranks=2, ddp=True)
def test_sums_that_a_replica_had_accumulated_count_at_the_next_boundary(smp: Any) -> None:
    _, gradients = train(smp, [[2.0], [4.0, 6.0]][smp.dp_rank()], backward_passes_per_step=2)
    assert gradients == ([[]] if smp.dp_rank() == 0 else [[], [6.0, 6.0]])


@pytest.mark.smp(ranks=2, ddp=True)
def test_a_replica_may_have_no_batch_at_all(smp: Any) -> None:
    model, gradients = train(smp, [[], [2.0]][smp.dp_rank()])
    assert gradients == ([] if smp.dp_rank() == 0 else [[1.0, 1.0]])
    assert next(iter(model.local_parameters())).tolist() == [0.0, 0.0]


@pytest.mark.smp(ranks=4, pipeline_parallel_degree=2, ddp=True)
def test_all_ranks_of_a_pipeline_join_together(smp: Any) -> None:
    model, gradients = train(smp, [[2.0, 6.0], [4.0]][smp.dp_rank()])
    if list(model.local_parameters()):
        assert gradients == ([[3.0, 3.0], [3.0, 3.0]] if smp.dp_rank() == 0 else [[3.0, 3.0]])
        assert next(iter(model.local_parameters())).tolist() == [-5.0, -5.0]


@pytest.mark.smp(ranks=4, pipeline_parallel_degree=2, ddp=True)
def test_without_a_first_batch_there_is_no_partition_and_nobody_hangs(smp: Any) -> None:
    with pytest.raises(UnsupportedTrainingError, match="1 replicas have no batch for the first"):
        train(smp, [[], [2.0]][smp.dp_rank()])


@pytest.mark.smp(ranks=2, ddp=True)
def test_the_failure_of_a_step_is_raised_by_who_has_joined(smp: Any) -> None:
    model = smp.DistributedModel(Counting())

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        raise KeyError("broken")

    def run() -> None:
        with model.join():
            if smp.dp_rank() == 1:
                step(model, torch.ones(1, 2))

    with pytest.raises(KeyError if smp.dp_rank() == 1 else RuntimeError, match="broken"):
        run()
    assert "_join" not in vars(model)


@pytest.mark.smp(ranks=1)
def test_join_needs_ddp(smp: Any) -> None:
    with pytest.raises(UnsupportedTrainingError, match="ddp=True"):
        smp.DistributedModel(Counting()).join().__enter__()


@pytest.mark.smp(ranks=1, ddp=True)
def test_joins_do_not_nest(smp: Any) -> None:
    model = smp.DistributedModel(Counting())
    with model.join(), pytest.raises(UnsupportedTrainingError, match=r"inside of model\.join"):
        model.join().__enter__()


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
}


def _epochs(smp: Any, kind: str, batches: int) -> tuple[list[Any], list[Any]]:
    """Two epochs in each of which this replica has this many batches: its parameters, and its optimizer's state."""
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Linear(4, 3))
    optimizer = smp.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).square().sum())

    generator = torch.Generator().manual_seed(smp.dp_rank())
    for _ in range(2):
        with model.join():
            for _ in range(batches):
                optimizer.zero_grad()
                step(model, torch.randn(2, 4, generator=generator))
                optimizer.step()
    state = optimizer.local_state_dict()["state"]
    return [p.detach().clone() for p in model.local_parameters()], [state[n] for n in sorted(state)]


@pytest.mark.parametrize("longer", [0, 1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_second_epoch_begins_with_one_state_of_the_optimizer(
    smp_world: Any, kind: str, longer: int, precision: str
) -> None:
    config = {"ddp": True, **({"fp16": True} if precision == "fp16" else {})}
    results = smp_world.run(_longer, kind, longer, ranks=2, config=config)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    if kind in ("adam", "amsgrad"):  # four steps an epoch, which the longer one took
        assert [each["step"].item() for each in results[0][1]] == [8.0, 8.0]


def _longer(kind: str, longer: int) -> Any:
    import smp_core.torch as smp

    return _epochs(smp, kind, 4 if smp.dp_rank() == longer else 3)
