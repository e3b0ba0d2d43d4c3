"""One rank's training with the SMP API, with the calls of a user's script, and its memory and traffic."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from conformance.engines.protocol import Exchange
from pytest_smp.strategies.training_script import Batch, Script
from pytest_smp.strategies.training_tensor import TensorTraining
from smp_core.torch import observe


class SmpSession(Script):
    """A script with the methods that ShardedSession adds."""

    _found: tuple[Exchange, ...] = ()

    def backward(self, batch: Batch, *, boundary: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """Run the script's ``backward``, and keep the exchanges that the engine's ledgers record.

        Without sharding and distributed layers nothing is recorded.
        """
        with contextlib.ExitStack() as stack:
            logs = [stack.enter_context(each.recorded()) for each in self._ledgers()]
            made = super().backward(batch, boundary=boundary)
        self._found += tuple(
            Exchange(each.operation, self._ranks(each.group), each.elements, each.bytes)
            for log in logs
            for each in log
        )
        return made

    def _ledgers(self) -> list[Any]:
        """The traffic of sharding, of activations in TP groups, and of the gradients that these reduce."""
        found = [] if self._sharding is None else [self._sharding.collectives.traffic]
        if isinstance(self.case, TensorTraining) and self.case.tensor > 1:
            found.append(observe.tensor_traffic(self.model))
            if self.model.gradients is not None:  # before the partition there are none
                reducers = map(self.model.gradients._shards.all_reducer, (True, False))
                found += [each.traffic for each in reducers]
        return list({id(each): each for each in found}.values())

    def live(self) -> int | None:
        """The engine's own count of the peak of unsharded elements; None at sharding degree 1."""
        return None if self._sharding is None else self._sharding.unsharded.peak

    @property
    def _sharding(self) -> Any:
        """The sharding of the model; None at sharding degree 1, where nothing is counted."""
        sharding: Any = self.model.sharding
        return sharding if sharding.degree > 1 else None

    def _ranks(self, kind: Any) -> tuple[int, ...]:
        """The ranks of this rank's group of a kind (API 4.3)."""
        case: Any = self.case
        groups = {"TP": self.api.get_tp_group, "RDP": self.api.get_rdp_group}
        if kind.name in groups:
            return tuple(groups[kind.name]())
        alike, at, degree = self.api.get_rdp_group(), self.api.rdp_rank(), case.sharding
        blocks = {
            "SHARDING": alike[at // degree * degree : (at // degree + 1) * degree],
            "REPLICATION": alike[at % degree :: degree],
        }
        return tuple(blocks.get(kind.name, self.api.get_dp_group()))

    def state(self) -> dict[str, list[Tensor]]:
        """This rank's part of the training state, without the optimizer's counters of steps."""
        trained = list(self.trained().values())
        kept = [
            each
            for values in self.optimizer.state.values()
            for name, each in values.items()
            if isinstance(each, Tensor) and name != "step"  # a counter, which is not sharded
        ]
        return {
            "parameters": [each.detach() for each in self.module.parameters()],
            "gradients": [each.grad for each in trained if each.grad is not None],
            "optimizer": kept,
        }

    def traffic(self) -> list[Exchange]:
        """Return the exchanges since the last call, and forget them."""
        found, self._found = list(self._found), ()
        return found
