"""One rank's training with torch's ``parallelize_module``.

A linear layer is split along its input channels (``RowwiseParallel``), an embedding along its dimensions
(``ColwiseParallel``), as the SMP API splits them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import Training
from pytest_smp.strategies.training_models import Direct
from pytest_smp.strategies.training_script import Batch
from pytest_smp.strategies.training_tensor import TensorTraining, splits


class TpSession:
    """The session of one rank: the module with its slices, and an optimizer of them."""

    def __init__(self, case: Training, salt: str) -> None:
        self.case = case
        self.module = oracle.make(case, salt=salt)
        with (
            torch.no_grad()
        ):  # replicas start alike; parallelize_module sends weights within a TP group alone
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                dist.broadcast(tensor.data, 0)
        degree = case.tensor if isinstance(case, TensorTraining) else 1
        self._mesh = init_device_mesh(
            "cpu", (case.ranks // degree, degree), mesh_dim_names=("data", "tensor")
        )
        self._data = self._mesh.get_group("data")
        parallelize_module(self.module, self._mesh["tensor"], self._plan())
        self.optimizer = oracle.optimizer_of(case, self.module.parameters())

    def _plan(self) -> dict[str, ParallelStyle]:
        """The style of each layer that is to be split.

        A layer whose ``forward`` is called directly stays whole, because torch exchanges in hooks of the call.
        """
        case = self.case
        named = splits(case) if isinstance(case, TensorTraining) else {}
        direct = {
            f"{path}.parts.0"
            for path, each in self.module.named_modules()
            if isinstance(each, Direct)
        }
        plan: dict[str, ParallelStyle] = {}
        for path in sorted({name.rpartition(".")[0] for name in named} - direct):
            if isinstance(self.module.get_submodule(path), nn.Embedding):
                plan[path] = ColwiseParallel(output_layouts=Replicate())
            else:
                plan[path] = RowwiseParallel(input_layouts=Replicate())
        return plan

    def backward(self, batch: Batch, *, boundary: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Run all microbatches, and return losses and outputs by microbatch.

        The last pass averages the sums of gradients over replicas.
        """
        losses, outputs = [], []
        for number in range(self.case.microbatches):
            x, y = (
                each.narrow(axis, number * self.case.rows, self.case.rows)
                for each, axis in zip(batch, self.case.axes, strict=True)
            )
            out = self.module(x)
            loss = oracle.loss_of(self.case, out, y)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            outputs.append(out.detach())
        replicas = dist.get_world_size(self._data)
        for each in self.module.parameters() if boundary and replicas > 1 else ():
            if each.grad is not None:
                own = _part(each.grad)
                dist.all_reduce(own, group=self._data)
                own /= replicas
        return losses, outputs

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of all gradients, whole, by the unwrapped model's names."""
        return {
            name: None if each.grad is None else _whole(each.grad).clone()
            for name, each in oracle.parameters(self.module).items()
        }

    def parameters(self) -> dict[str, Tensor]:
        """Copies of all parameters, whole, by the unwrapped model's names."""
        held = oracle.parameters(self.module).items()
        return {name: _whole(each.detach()).clone() for name, each in held}

    def zero_grad(self) -> None:
        """Set gradients to zero, or to None, as ``case.set_to_none`` says."""
        self.optimizer.zero_grad(set_to_none=self.case.set_to_none)

    def step(self) -> None:
        """Step the case's optimizer."""
        self.optimizer.step()

    def close(self) -> None:
        """Destroy the process groups of the mesh."""
        for group in self._mesh.get_all_groups():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    # The methods that ShardedSession adds.

    def state(self) -> dict[str, list[Tensor]]:
        """This rank's part of the training state, without the optimizer's counters of steps."""
        held = list(self.module.parameters())
        kept = [
            each
            for values in self.optimizer.state.values()
            for name, each in values.items()
            if isinstance(each, Tensor) and name != "step"
        ]
        return {
            "parameters": [_part(each.detach()) for each in held],
            "gradients": [_part(each.grad) for each in held if each.grad is not None],
            "optimizer": [_part(each) for each in kept],
        }


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
