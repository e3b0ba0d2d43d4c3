"""One rank's training with torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import Training
from pytest_smp.strategies.training_script import Batch


class DdpSession:
    """The session of one rank: the wrapped model, and the case's optimizer."""

    def __init__(self, case: Training, salt: str) -> None:
        self.case = case
        self.module = oracle.make(case, salt=salt)
        self.model = DistributedDataParallel(
            self.module, find_unused_parameters=True, bucket_cap_mb=case.bucket
        )
        self.optimizer = oracle.optimizer_of(case, self.module.parameters())

    def backward(self, batch: Batch, *, boundary: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Run all microbatches, and return losses and outputs by microbatch.

        The last backward pass reduces the gradients, if this step is at a boundary.
        """
        losses, outputs = [], []
        for number in range(self.case.microbatches):
            x, y = (
                each.narrow(axis, number * self.case.rows, self.case.rows)
                for each, axis in zip(batch, self.case.axes, strict=True)
            )
            last = boundary and number == self.case.microbatches - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                out = self.model(x)
                loss = oracle.loss_of(self.case, out, y)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            outputs.append(out.detach())
        return losses, outputs

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of all gradients, by the unwrapped model's names."""
        return {
            name: None if each.grad is None else each.grad.clone()
            for name, each in oracle.parameters(self.module).items()
        }

    def parameters(self) -> dict[str, Tensor]:
        """Copies of all parameters, by the unwrapped model's names."""
        return {n: p.detach().clone() for n, p in oracle.parameters(self.module).items()}

    def zero_grad(self) -> None:
        """Set gradients to zero, or to None, as ``case.set_to_none`` says."""
        self.optimizer.zero_grad(set_to_none=self.case.set_to_none)

    def step(self) -> None:
        """Step the case's optimizer."""
        self.optimizer.step()

    def close(self) -> None:
        """Do nothing: the session holds nothing beside the default process group."""
