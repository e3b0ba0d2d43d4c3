"""What a training case with real values must give: the plain loop in the published order of reduction.

The order is an object that the engine shares (:mod:`smp_core.torch.pipeline.replay`), so bits are equal
there too (the tier "replayed").
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import Training
from pytest_smp.strategies.training_oracle import Results
from smp_core.torch.pipeline import replay, streams


def replayed(case: Training) -> Results:
    """Train in one process; gradients in the published order."""
    module = oracle.make(case)
    optimizer = torch.optim.SGD(module.parameters(), lr=oracle.LEARNING_RATE)
    found = Results([[] for _ in range(case.dp)], [[] for _ in range(case.dp)])
    seeds = []
    for replica in range(case.dp):
        oracle.seed(case, replica)
        seeds.append([streams.draw_seed() for _ in range(case.steps)])

    def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = module(x)
        loss = oracle.loss_of(case, out, y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), out.detach()

    for window in range(case.windows):
        sums = []
        for replica in range(case.dp):
            steps = []
            for step in range(window * case.passes, (window + 1) * case.passes):
                batches = list(oracle.microbatches(case, replica, step))
                done = replay.gradients(module, body, batches, seed=seeds[replica][step])
                steps.append(done.gradients)
                found.losses[replica].append([loss for loss, _ in done.results])
                found.outputs[replica].append([out for _, out in done.results])
            sums.append(replay.accumulate(steps))
        reduced = replay.reduce(sums, case.divisor)
        found.gradients.append(reduced)
        for name, parameter in oracle.parameters(module).items():
            gradient = reduced[name]
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
    found.parameters = {n: p.detach().clone() for n, p in oracle.parameters(module).items()}
    return found
