"""Bugs that show only after several calls."""

from __future__ import annotations

from typing import Any

import torch

from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from pytest_smp.ranks.sim.matching import Channel, Complete
from pytest_smp.ranks.sim.process_group import SimProcessGroup
from smp_core.errors import VerdictError
from smp_core.transport.checked_group import Collective

BUGS = Bugs("collectives and layout")


@BUGS.enter("PROG-VALUES", *ASSERTION, VerdictError)
def third_call_is_shifted(patch: Patch) -> None:
    """the third call on a group gives each member the values of its neighbour"""
    join = Channel.join

    def shifted(self: Channel, context: Any, call: Any, complete: Complete) -> Any:
        third = self._counts[self.position[context.rank]] == 2

        def other(calls: list[Any]) -> Any:
            values = complete(calls)
            if not call.operation.startswith("smp.") and third:
                shapes = {tuple(each.shape for each in value) for value in values}
                return values[1:] + values[:1] if len(shapes) == 1 else values
            return values

        return join(self, context, call, other)

    patch.setattr(Channel, "join", shifted)


@BUGS.enter("PROG-LAYOUTS", *ASSERTION, VerdictError)
def third_call_writes_beside_its_views(patch: Patch) -> None:
    """the third call of a rank fills the memory that its strided output lies in"""
    collective = SimProcessGroup._collective

    def filled(self: SimProcessGroup, call: Collective, opts: Any) -> Any:
        counts = self._shared.__dict__.setdefault("_planted", {})
        counts[self._position] = counts.get(self._position, 0) + 1
        if counts[self._position] == 3:
            for tensor in call.gets:
                if not tensor.is_contiguous():
                    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    storage.fill_(1)
        return collective(self, call, opts)

    patch.setattr(SimProcessGroup, "_collective", filled)
