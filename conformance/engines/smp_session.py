"""One rank's training with the SMP API, with the calls of a user's script, and its memory and traffic."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from conformance.engines.protocol import Exchange
from pytest_smp.strategies.training_script import Batch, Script


class SmpSession(Script):
    """A script with the methods that ShardedSession adds."""

    _found: tuple[Exchange, ...] = ()

    def backward(self, batch: Batch, *, boundary: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """Run the script's ``backward``, and keep the exchanges that the engine's ledger records.

        At sharding degree 1 nothing is recorded.
        """
        sharding = self._sharding
        if sharding is None:
            return super().backward(batch, boundary=boundary)
        with sharding.collectives.traffic.recorded() as log:
            made = super().backward(batch, boundary=boundary)
        self._found += tuple(Exchange(s.operation, self._ranks(s.group), s.elements) for s in log)
        return made

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
        at, degree = self.api.dp_rank(), case.sharding
        groups = {
            "sharding": range(at // degree * degree, (at // degree + 1) * degree),
            "replication": range(at % degree, case.dp, degree),
        }
        return tuple(groups.get(kind.value, range(case.dp)))

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
