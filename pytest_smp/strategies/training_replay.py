"""The expected results of a training case with real values: the plain loop in the published order of
reduction.

Calls have the engine's own order within a microbatch (:mod:`pytest_smp.replay`), so the bits of real
values are equal, too (the tier "replayed").
"""

from __future__ import annotations

from torch import Tensor

from pytest_smp import replay
from pytest_smp.compute_threads import one_compute_thread
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies import training_tensor_replay
from pytest_smp.strategies.training import Training
from pytest_smp.strategies.training_oracle import Grads, Results
from pytest_smp.strategies.training_sharding import ShardedTraining
from pytest_smp.strategies.training_tensor import TensorTraining
from pytest_smp.strategies.training_tensor_replay import register
from smp_core.torch.execution import streams


@one_compute_thread()
def replayed(case: Training) -> Results:
    """Train in one process; gradients in the published order."""
    if isinstance(case, TensorTraining) and case.tensor > 1:
        return training_tensor_replay.replayed(case)
    sharded = case if isinstance(case, ShardedTraining) else None
    sharding = 1 if sharded is None else sharded.sharding
    reference = oracle.Reference(case)
    module, found = reference.module, reference.found
    if sharded is not None and sharded.registered:
        register(module)
    seeds = []
    for replica in range(case.dp):
        oracle.seed(case, replica)
        seeds.append([streams.draw_seed() for _ in range(case.steps)])

    def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, out = reference.forward(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), out.detach()

    def norm(gradients: Grads) -> float:
        return replay.norm(gradients, sharding)

    for window in range(case.windows):
        ranks = []
        for replica in range(case.dp):
            steps = []
            for step in range(window * case.passes, (window + 1) * case.passes):
                batches = list(oracle.microbatches(case, replica, step))
                done = replay.gradients(module, body, batches, seed=seeds[replica][step], wide=True)
                steps.append(done.gradients)
                found.losses[replica].append([loss for loss, _ in done.results])
                found.outputs[replica].append([out for _, out in done.results])
            ranks.append(steps)
        reference.end_window(window, replay.reduce_sharded(ranks, sharding, case.divisor), norm)
    return reference.end()
