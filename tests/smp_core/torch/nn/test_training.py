"""Training with distributed modules, in every combination of degrees, is that of one process."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import smp_core.torch as api
from tests.smp_core.torch.nn.test_linear import values

RANKS, STEPS, VOCABULARY, WIDTH = 8, 3, 8, 16


class Model(nn.Module):
    """An embedding and three linear layers: two are distributed, one shares the ranks' own samples."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, 3)
        for child in (self.embedding, self.first, self.last) if cut else ():
            api.set_tensor_parallelism(child)
        for child in (self.own, self.last) if cut else ():
            api.set_partition(child, api.pp_size() - 1)

    def forward(self, ids):
        x = self.first(self.embedding(ids)).relu()
        return self.last(self.own(x).relu())


def lattice(module: nn.Module, step: int) -> nn.Module:
    """Small multiples of 1/4: with them a step, update and momentum included, is exact in float64."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(values(*parameter.shape, start=number + step) / 4)
    return module


def combinations():
    for pp, tp, sdp, prescaled in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (False, True)
    ):
        rdp = RANKS // (pp * tp)
        fits = pp * tp * rdp == RANKS and rdp % sdp == 0 and (pp == 1 or sdp == 1)
        # Sharding with tensor parallelism needs prescaled_batch (API 3.5).
        if fits and (prescaled or sdp == 1 or tp == 1):
            yield pp, tp, sdp, prescaled


def loss_of(output):
    return (output * output).sum() / 4


@api.step
def train_step(model, ids):
    loss = loss_of(model(ids))
    model.backward(loss)
    return loss


def body(microbatches: int) -> None:
    torch.set_default_dtype(torch.float64)
    config = api.state.cfg
    reference = Model()
    model = api.DistributedModel(Model(cut=True))
    sgd = {"lr": 2.0**-4, "momentum": 0.5}
    optimizer = api.DistributedOptimizer(torch.optim.SGD(model.parameters(), **sgd))
    plain = torch.optim.SGD(reference.parameters(), **sgd)
    share = api.rdp_rank() if config.prescaled_batch else api.dp_rank()
    shares = api.rdp_size() if config.prescaled_batch else api.dp_size()
    for step in range(STEPS):
        model.load_state_dict(lattice(reference, step).state_dict())
        batches = [
            (torch.arange(2 * microbatches * 3) * 3 + number + step).view(-1, 3) % VOCABULARY
            for number in range(shares)
        ]
        train_step(model, batches[share])
        optimizer.step()
        optimizer.zero_grad()
        for batch in batches:
            for part in batch.chunk(microbatches):
                (loss_of(reference(part)) / (shares * microbatches)).backward()
        plain.step()
        plain.zero_grad()
        state = model.state_dict()
        for name, parameter in reference.state_dict().items():
            assert torch.equal(state[name], parameter), (step, name)


@pytest.mark.parametrize(("pp", "tp", "sdp", "prescaled"), list(combinations()))
def test_every_combination_of_degrees_trains_as_one_process(smp_world, pp, tp, sdp, prescaled):
    microbatches = 2
    config = {
        "pipeline_parallel_degree": pp,
        "tensor_parallel_degree": tp,
        "sharded_data_parallel_degree": sdp,
        "sdp_param_persistence_threshold": 20,
        "sdp_gradient_clipping": 1e30,
        "prescaled_batch": prescaled,
        "microbatches": microbatches,
        "auto_partition": False,
        "default_partition": 0,
        "ddp": True,
    }
    smp_world.run(body, microbatches, ranks=RANKS, config=config)
