"""The buckets of one step: launched in their order, each as soon as all its gradients are ready.

*Ready* is a guess: every use of the parameter has brought its gradient, and all microbatches before are folded
(execution/accumulation.py), but a function may still call the model again. A gradient that comes after the launch of
its bucket is never lost: ``LateGradients`` has the two treatments.

Ranks that got less far learn at the end of the step how many buckets the others have launched
(execution/agreement.py), and catch up. So every rank launches the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from smp_core.torch.execution import counted
from smp_core.torch.reduction.buckets import Bucket, Totals
from smp_core.torch.reduction.collectives import Pending
from smp_core.torch.reduction.policy import LateGradients

#: The gradients of a bucket, as its collective takes them.
Pack = Callable[[Bucket, Totals], list[torch.Tensor]]
#: Begins the collective of a bucket, on its packed gradients.
Launch = Callable[[Bucket, list[torch.Tensor]], Pending[torch.Tensor]]


class BucketReducer:
    """The reduction of one step on one rank, until its results are asked for.

    ``was_late``: a gradient came for a parameter that had seemed to be ready. ``late`` is the policy.
    """

    def __init__(
        self, buckets: Sequence[Bucket], pack: Pack, launch: Launch, late: LateGradients
    ) -> None:
        self._buckets, self._pack, self._launch_bucket = list(buckets), pack, launch
        self._policy = late
        self._bucket_of = {
            each: n for n, bucket in enumerate(buckets) for each in bucket.parameters
        }
        self._lacking = [len(bucket.parameters) for bucket in buckets]  # how many are not ready
        self._sums: dict[nn.Parameter, torch.Tensor] = {}  # that have not been launched
        self._ready: set[nn.Parameter] = set()
        self._operations: list[Pending[torch.Tensor]] = []
        self._taken: set[nn.Parameter] = set()  # that were launched with a gradient
        self._outdated: set[nn.Parameter] = set()  # that a gradient came for after the launch
        self.was_late = False

    # In backward.

    def on_ready(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        """Take the parameter's gradient, complete as it seems; or all of a late one, where late ones are added."""
        if self._policy is LateGradients.ADD:
            self._add(parameter, total)
        elif parameter in self._bucket_of and not total.is_sparse:
            self._sums[parameter] = total
        else:
            return  # reduced at the end of the step: it was unfrozen since the step began, or may stay sparse
        if parameter in self._bucket_of and parameter not in self._ready:
            self._ready.add(parameter)
            self._lacking[self._bucket_of[parameter]] -= 1

    def on_late_grad(self, parameter: nn.Parameter) -> None:
        """Take back that the parameter is ready: another gradient is to come."""
        self.was_late = True
        number = self._bucket_of.get(parameter)
        if number is not None and number < self.launched:
            self._outdated.add(parameter)
        if parameter in self._ready:
            self._ready.remove(parameter)
            self._lacking[self._bucket_of[parameter]] += 1

    @property
    def due(self) -> bool:
        """True if :meth:`advance` would launch anything."""
        return self.launched < len(self._buckets) and not self._lacking[self.launched]

    def advance(self) -> None:
        """Launch the next buckets whose gradients are all ready."""
        while self.due:
            self._launch()

    # At the end of the step.

    def add_remaining(self, sums: Totals) -> None:
        """Take the sums that :meth:`on_ready` was not given; where buckets are reduced again, the complete sums."""
        if self._policy is LateGradients.ADD:
            for parameter, total in sums.items():
                self._add(parameter, total)
        else:
            self._sums = dict(sums)

    def _add(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        total = total.to_dense() if total.is_sparse else total
        known = self._sums.get(parameter)
        self._sums[parameter] = total if known is None else known + total

    @property
    def launched(self) -> int:
        """The number of buckets that have been launched."""
        return len(self._operations)

    @property
    def planned(self) -> set[nn.Parameter]:
        """The parameters of the buckets: those that were trained when the step began."""
        return set(self._bucket_of)

    @property
    def present(self) -> set[nn.Parameter]:
        """The parameters that have a gradient."""
        return self._taken | set(self._sums)

    def is_sparse(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter's gradient is sparse."""
        return parameter in self._sums and self._sums[parameter].is_sparse

    @property
    def late_buckets(self) -> tuple[int, ...]:
        """The numbers of launched buckets that a gradient came for, or may have come for, afterwards."""
        adds = self._policy is LateGradients.ADD
        late = self._sums.keys() if adds else self._outdated
        numbers = {self._bucket_of[each] for each in late if each in self._bucket_of}
        return tuple(sorted(number for number in numbers if number < self.launched))

    def catch_up(self, launched: int) -> None:
        """Launch the buckets that other ranks have launched: each of their messages finds its partners."""
        while self.launched < launched:
            self._launch()

    def _launch(self) -> None:
        # Buffers of completed operations are freed here. Nobody waits: another rank may launch a bucket at the end of
        # the step only.
        for operation in self._operations:
            operation.poll()
        bucket = self._buckets[self.launched]
        packed = self._pack(bucket, self._sums)
        # Before the exchange, so that its buffer takes the place of sums that were copied.
        for parameter in bucket.parameters:
            if self._sums.pop(parameter, None) is not None:
                self._taken.add(parameter)
        self._operations.append(self._launch_bucket(bucket, packed))
        counted.happened("sent")

    def scattered(
        self, late: Iterable[int], more: Sequence[Bucket]
    ) -> dict[nn.Parameter, torch.Tensor]:
        """This rank's shards of all buckets, and of ``more``, which were not planned; of ``late`` buckets, the late
        gradients are reduced by themselves and added second.
        """
        self._buckets += more
        # Late gradients are complete before the buckets that have not been launched, so they go first.
        second = {
            n: self._launch_bucket(self._buckets[n], self._pack(self._buckets[n], self._sums))
            for n in late
        }
        self.catch_up(len(self._buckets))
        shards: dict[nn.Parameter, torch.Tensor] = {}
        for number, bucket in enumerate(self._buckets):
            row = self._operations[number].result()
            if number in second:
                row = row + second[number].result()
            shards.update(bucket.shards(row))
        return shards

    def without_late(self, late: Sequence[int]) -> list[tuple[Bucket, torch.Tensor]]:
        """The results of the launched buckets, but for those that are ``late`` on any rank."""
        # All are waited for, so that no message outlives the step.
        results = [operation.result() for operation in self._operations]
        return [
            (self._buckets[number], result)
            for number, result in enumerate(results)
            if number not in late
        ]

    def discard(self) -> None:
        """After a step that failed: wait for the operations in flight."""
        for operation in self._operations:
            operation.result()
