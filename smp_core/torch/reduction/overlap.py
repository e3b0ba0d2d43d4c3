"""Reduction during the last microbatch's backward pass: buckets set out as soon as they seem complete.

*Seem*: a parameter counts as complete when every use of it has had its gradient and all microbatches
before are folded (execution/accumulation.py); a function may still call the model again. So setting out is a
bet. A bucket that something comes for afterwards is reduced again at the end of the step, from all
contributions at once: late ones are never lost, and the bits are those of a reduction at the end.

Buckets set out in their order, from the first: replicas that have got less far learn at the end how
many the others began (execution/agreement.py), and follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from smp_core.torch.reduction.replicas import Exchange, Replicas


class Overlap:
    """The buckets of one step at whose end gradients are reduced."""

    def __init__(
        self, replicas: Replicas, buckets: Sequence[Sequence[nn.Parameter]], divisor: int
    ) -> None:
        self._replicas, self._buckets, self._divisor = replicas, buckets, divisor
        self._ready: dict[nn.Parameter, torch.Tensor] = {}
        self._exchanges: list[Exchange] = []
        self._late: set[nn.Parameter] = set()
        self._of = {each: number for number, bucket in enumerate(buckets) for each in bucket}
        self._lacking = [len(bucket) for bucket in buckets]  # how many are not ready

    @property
    def launched(self) -> int:
        """How many buckets have set out."""
        return len(self._exchanges)

    @property
    def outdated(self) -> tuple[int, ...]:
        """The numbers of buckets that set out too early."""
        return tuple(
            number
            for number, bucket in enumerate(self._buckets[: self.launched])
            if not self._late.isdisjoint(bucket)
        )

    def ready(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """This is the parameter's gradient, it seems."""
        known = parameter in self._of  # or unfrozen during the step: reduced at its end
        if known and not value.is_sparse:
            self._lacking[self._of[parameter]] -= parameter not in self._ready
            self._ready[parameter] = value

    def late(self, parameter: nn.Parameter) -> None:
        """Something came for a parameter after it was ready."""
        if self._ready.pop(parameter, None) is None:
            self._late.add(parameter)
        else:
            self._lacking[self._of[parameter]] += 1

    @property
    def due(self) -> bool:
        """Whether ``advance`` would send anything."""
        return self.launched < len(self._buckets) and not self._lacking[self.launched]

    def advance(self) -> None:
        """Send out the next buckets whose parameters are all ready."""
        while self.due:
            bucket = self._buckets[self.launched]
            self._send(self._ready)
            for parameter in bucket:  # now: a call that fails can be made again
                del self._ready[parameter]

    def catch_up(self, launched: int, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Send out what other replicas have: every message of theirs finds its partners."""
        while self.launched < launched:
            self._send(gradients)

    def _send(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        bucket = self._buckets[self.launched]
        self._exchanges.append(self._replicas.exchange(bucket, gradients, self._divisor))

    def results(
        self, outdated: Sequence[int]
    ) -> Iterator[tuple[Sequence[nn.Parameter], torch.Tensor]]:
        """The reduced buckets that set out and are not outdated on any replica."""
        flat = self._finish()
        for number, exchange in enumerate(self._exchanges):
            if number not in outdated:
                yield exchange.parameters, flat[number]

    def discard(self) -> None:
        """The step has failed: wait for what is on its way."""
        self._finish()

    def _finish(self) -> list[torch.Tensor]:
        for exchange in self._exchanges:
            exchange.fold()
        return [exchange.result() for exchange in self._exchanges]
