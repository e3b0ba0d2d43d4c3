"""One rank's training with torch's ``fully_shard``: one unit for each layer, and one for the rest."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from conformance.engines.collectives import CollectiveRecorder
from conformance.engines.protocol import Exchange
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import Training
from pytest_smp.strategies.training_script import Batch
from pytest_smp.strategies.training_sharding import ShardedTraining


class Fsdp2Session:
    """The session of one rank: the sharded model, and an optimizer of its shards.

    A case without a sharding degree is sharded over all ranks.
    """

    def __init__(self, case: Training, salt: str) -> None:
        # Outputs of layers may be views. The warning is for outputs changed in place, which no case does.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        self.case = case
        self.module = oracle.make(case, salt=salt)
        with torch.no_grad():  # fully_shard expects the same weights on all ranks, and sends none
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                dist.broadcast(tensor.data, 0)
        degree = case.sharding if isinstance(case, ShardedTraining) else case.dp
        self._dtype: torch.dtype = getattr(torch, case.dtype)
        policy = MixedPrecisionPolicy(output_dtype=torch.float32)
        inner = MixedPrecisionPolicy()
        if self._dtype is not torch.float32:
            given: dict[str, Any] = {"param_dtype": self._dtype, "reduce_dtype": torch.float32}
            policy, inner = (
                MixedPrecisionPolicy(**given, output_dtype=torch.float32),
                MixedPrecisionPolicy(**given),
            )
            for buffer in self.module.buffers():  # fully_shard casts parameters and no buffers
                buffer.data = buffer.data.to(self._dtype)
        shape = (case.dp,) if degree == case.dp else (case.dp // degree, degree)
        self._mesh = mesh = init_device_mesh(
            "cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
        )
        for unit in _units(self.module):
            fully_shard(unit, mesh=mesh, mp_policy=inner)
        root = fully_shard(self.module, mesh=mesh, mp_policy=policy)
        assert isinstance(root, FSDPModule)
        self.root = root
        self.optimizer = oracle.optimizer_of(case, self.module.parameters())
        self._recorder = CollectiveRecorder()

    def backward(self, batch: Batch, *, boundary: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Run all microbatches, and return losses and outputs by microbatch.

        The last microbatch reduces gradients within the shard group. The last pass also reduces them over
        the replicate group.
        """
        losses, outputs = [], []
        for number in range(self.case.microbatches):
            x, y = (
                each.narrow(axis, number * self.case.rows, self.case.rows)
                for each, axis in zip(batch, self.case.axes, strict=True)
            )
            last = number == self.case.microbatches - 1
            # set_requires_gradient_sync sets both hops, so the all-reduce is set after it.
            self.root.set_requires_gradient_sync(last)
            self.root.set_requires_all_reduce(last and boundary)
            self.root.set_is_last_backward(last and boundary)
            with self._recorder:
                out = self.module(x)
                loss = oracle.loss_of(self.case, out, y)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            outputs.append(out.detach())
        return losses, outputs

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of all gradients, unsharded, by the unwrapped model's names."""
        return {
            name: None if each.grad is None else _whole(each.grad).clone()
            for name, each in oracle.parameters(self.module).items()
        }

    def parameters(self) -> dict[str, Tensor]:
        """Copies of all parameters, unsharded, in the dtype that the model computes in."""
        held = oracle.parameters(self.module).items()
        return {name: _whole(each.detach()).to(self._dtype, copy=True) for name, each in held}

    def zero_grad(self) -> None:
        """Set gradients to zero, or to None, as ``case.set_to_none`` says."""
        self.optimizer.zero_grad(set_to_none=self.case.set_to_none)

    def step(self) -> None:
        """Step the optimizer, after torch's own clipping if the case clips."""
        if self.case.most is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.case.most)
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
            if isinstance(each, Tensor) and name != "step"  # a counter, which is not sharded
        ]
        return {
            "parameters": [_part(each) for each in held],
            "gradients": [_part(each.grad) for each in held if each.grad is not None],
            "optimizer": [_part(each) for each in kept],
        }

    def traffic(self) -> list[Exchange]:
        """Return the exchanges since the last call, and forget them."""
        return self._recorder.take()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _units(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that become units: the stem, the layers and the head.

    A module that stands there twice, or shares a parameter with another one, is left to the root's unit,
    because fully_shard refuses it elsewhere.
    """
    body: Any = root.body
    layers = list(body) if isinstance(body, nn.Sequential) else [body]
    found = [root.stem, *layers, root.head]
    for at, unit in enumerate(found):
        others = {id(p) for each in found[:at] + found[at + 1 :] for p in each.parameters()}  # type: ignore[union-attr]
        own = [id(p) for p in unit.parameters()]  # type: ignore[union-attr]
        if own and not others & set(own):
            yield unit  # type: ignore[misc]
