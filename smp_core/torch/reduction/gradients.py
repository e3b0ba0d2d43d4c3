"""From the sums of a step to ``p.grad``: accumulation over steps, reduction, one division.

Published order: a step's totals (execution/accumulation.py) are summed with those of the steps before it, in
order, until ``backward_passes_per_step`` steps are together (API 1.7; they are summed, not
averaged). Then replicas are folded (replicas.py), and the result is divided once, by the number of
replicas and, if gradients are averaged over them, of microbatches. It is added to ``p.grad``. A
parameter that no replica has a gradient for keeps its ``p.grad``, also None. A 16-bit parameter with a
master (precision/masters.py) has all of this in float32, and in the end in ``master.grad``.

With several replicas gradients are reduced whether ``ddp`` is on or not: nobody wants replicas that
drift apart in silence.

How the engine calls it, on every rank and in its own thread::

    gradients = Gradients(runtime, dict(model.local_named_parameters()), options)  # after placement
    gradients.begin_step(buffers)                   # before the first microbatch
    failure = gradients.end_step(ledger.totals(), None)     # all ranks: returns the agreed failure
    failure = gradients.end_step({}, failure)               # where this rank's pipeline failed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.execution import agreement, counted
from smp_core.torch.execution.agreement import DENSE, NONE, SPARSE, Agreement, Report
from smp_core.torch.precision.masters import Masters
from smp_core.torch.reduction import drift
from smp_core.torch.reduction.overlap import Overlap
from smp_core.torch.reduction.replicas import (
    CommHook,
    GradBucket,
    Replicas,
    fill_buckets,
    flatten,
    unflatten,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of DistributedModel that are about gradients (API 1.7)."""

    overlapping_allreduce: bool = True
    backward_passes_per_step: int = 1
    average_grads_across_microbatches: bool = True
    bucket_cap_mb: float = 25
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = False


class Gradients:
    """The gradients of one rank's parameters, over steps and replicas.

    ``parameters`` are the rank's own by name, the same on all replicas; frozen ones may be among them.
    Made by all members of the DP group at the same point. ``masters`` get
    the gradients of their parameters.
    """

    def __init__(
        self,
        runtime: Runtime,
        parameters: Mapping[str, nn.Parameter],
        options: Options,
        masters: Masters | None = None,
    ) -> None:
        self._runtime, self._options, self._masters = runtime, options, masters
        self._parameters = list(dict.fromkeys(parameters.values()))
        wide = masters is not None and masters.dtype is not None
        self.replicas = Replicas(runtime, wide)
        self.reductions = 0  # how often gradients were reduced: the same on every rank
        self._pending: dict[nn.Parameter, torch.Tensor] = {}
        self._passes = 0  # steps that are in `pending`
        self._unit = 0  # microbatches of the first of them
        self._hook: tuple[Any, CommHook] | None = None
        self._overlap: Overlap | None = None
        self._agreed_on: bytes | None = None  # which parameters replicas train, as of the last step

    @property
    def boundary(self) -> bool:
        """Whether gradients are reduced at the end of the present step."""
        return self._passes + 1 == self._options.backward_passes_per_step

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """``hook(state, bucket)`` reduces each bucket from now on, instead of what is described above:
        it averages over replicas and microbatches itself (API 1.7).

        Raises UnsupportedTrainingError without ``ddp`` and ``overlapping_allreduce``, and for a second
        hook; TypeError for what cannot be called.
        """
        if not self._runtime.config.ddp or not self._options.overlapping_allreduce:
            raise UnsupportedTrainingError(
                "model.register_comm_hook needs the configuration parameter ddp=True and "
                "smp.DistributedModel(..., overlapping_allreduce=True)"
            )
        if not callable(hook):
            raise TypeError(f"model.register_comm_hook: hook must be callable, not {hook!r}")
        if self._hook is not None:
            raise UnsupportedTrainingError("model.register_comm_hook: there is a hook already")
        self._hook = state, hook

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on these are the rank's parameters: a script may replace or add one between steps,
        on all replicas alike.
        """
        self._parameters = list(dict.fromkeys(parameters))
        here = set(self._parameters)
        self._pending = {each: total for each, total in self._pending.items() if each in here}

    def begin_step(
        self, buffers: Sequence[torch.Tensor] = (), source: int = 0, *, overlaps: bool = True
    ) -> None:
        """Give all replicas the buffers of dp rank ``source``, as DDP does before each forward pass
        (API 8.12), if ``broadcast_buffers``. ``overlaps``: buckets may set out before the end.
        """
        if self._options.broadcast_buffers:
            self.replicas.broadcast(buffers, source)
        self._overlap = None
        self._agree_first()
        count = self._runtime.config.microbatches
        if overlaps and self.boundary and self._overlaps and self._unit in (0, count):
            self._overlap = Overlap(
                self.replicas, self._buckets(self._planned()), self._divisor(count)
            )

    @property
    def listens(self) -> bool:
        """Whether ``ready`` and ``late`` are to be told what the step that has begun brings."""
        return True

    def ready(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        """The step's total of this parameter seems to be complete; callable from any thread."""
        if self._overlap is not None:
            known = self._pending.get(parameter)
            self._overlap.ready(parameter, total if known is None else known + total)

    def late(self, parameter: nn.Parameter) -> None:
        """It was not: another contribution came."""
        if self._overlap is not None:
            self._overlap.late(parameter)

    @property
    def due(self) -> bool:
        """Whether ``advance`` has something to begin."""
        return self._overlap is not None and self._overlap.due

    def advance(self) -> None:
        """Begin to exchange the buckets that are ready. In the rank's own thread only."""
        if self._overlap is not None:
            self._overlap.advance()

    def end_step(
        self,
        totals: Mapping[nn.Parameter, torch.Tensor],
        failure: Any,
        *,
        joined: bool = False,
        microbatches: int | None = None,
    ) -> Any:
        """Agree with the other replicas on how the step ended; if well, accumulate, and reduce if this
        is the boundary. ``microbatches`` is how many the totals are of, the configured number if not
        given; another number takes a step that was begun with ``overlaps=False``. Where steps of different
        numbers are accumulated, their averages are, in units of the first.

        ``failure`` is None or anything picklable; returns the one of the lowest dp rank that has one.
        After a failure gradients and accumulated sums are as they were before the step.
        """
        overlap, self._overlap = self._overlap, None
        count = 0 if joined else microbatches or self._runtime.config.microbatches
        average = self._options.average_grads_across_microbatches
        if average and self._passes and count not in (0, self._unit):
            totals = {each: total * (self._unit / count) for each, total in totals.items()}
        after = self._pending if failure is not None else _sum(self._pending, totals)
        boundary = self.boundary
        held = {} if failure is not None or joined else self._held()
        agreed = agreement.agree(
            self._runtime,
            Report(
                failure=failure,
                present=self._present(after) if boundary else b"",
                launched=0 if overlap is None else overlap.launched,
                late=() if overlap is None else overlap.outdated,
                joined=joined,
                microbatches=count,
                held=drift.checksum(held.values()) if held else None,
                trained=b"" if joined else self._trained(),
            ),
        )
        if overlap is not None:
            overlap.catch_up(agreed.launched, after)
        if agreed.failure is not None:
            if overlap is not None:
                overlap.discard()
            return agreed.failure
        frozen = self._frozen(agreed)
        if frozen is not None:
            if overlap is not None:
                overlap.discard()
            raise frozen
        self._agreed_on = self._trained_by(agreed.reports)
        ranks = self._runtime.group(GroupKind.DP).ranks
        told = {rank: each.held for rank, each in zip(ranks, agreed.reports, strict=True)}
        if drift.differ(told, [ranks]):
            compared = [rank for rank in ranks if told[rank] is not None]
            drifted = drift.found(
                self._runtime, GroupKind.DP, "parameter", self._by_name(held), [compared]
            )
            if drifted is not None:
                if overlap is not None:
                    overlap.discard()
                raise drifted
        if not self._passes:
            self._unit = agreed.microbatches
        self._pending, self._passes = after, self._passes + 1
        if boundary:
            reduced = self._reduce(agreed, overlap, self._divisor(self._unit))
            self._pending, self._passes, self._unit = {}, 0, 0
            self.reductions += 1
            if not joined:
                for parameter, gradient in reduced.items():
                    self._deposit(parameter, gradient)
        counted.happened("reduced" if boundary else "accumulated")
        return None

    def _agree_first(self) -> None:
        """Before the first step: have the word of the first replica on which parameters are trained."""
        group = self._runtime.group(GroupKind.DP)
        if self._agreed_on is None and len(group.ranks) > 1:
            told = self._runtime.fabric.objects.allgather(self._trained(), group)
            self._agreed_on = told[0]

    @staticmethod
    def _trained_by(reports: Iterable[Report]) -> bytes:
        return next((each.trained for each in reports if each.trained), b"")

    def _planned(self) -> list[nn.Parameter]:
        """What buckets that set out during the step are made of: the same on replicas that have since frozen
        different parameters, which is found at the end. What was unfrozen since is reduced at the end, too.
        """
        known = self._agreed_on
        if known is None or len(known) != len(self._parameters):
            return self._trainable()
        return [each for each, on in zip(self._parameters, known, strict=True) if on]

    def _trained(self) -> bytes:
        return bytes(parameter.requires_grad for parameter in self._parameters)

    def _frozen(self, agreed: Agreement) -> Exception | None:
        """What every rank raises if replicas do not train the same parameters: buckets are made of those."""
        ranks = self._runtime.group(GroupKind.DP).ranks
        told = {rank: each.trained for rank, each in zip(ranks, agreed.reports, strict=True)}
        if len(set(told.values()) - {b""}) < 2:
            return None
        names = list(self._by_name(dict.fromkeys(self._parameters, 0)))
        return drift.frozen(self._runtime, names, told)

    def _held(self) -> dict[nn.Parameter, int]:
        """The digest of each trained parameter that other replicas hold, too."""
        if len(self._runtime.group(GroupKind.DP).ranks) == 1 or self._hook is not None:
            return {}
        return {each: drift.digest(each) for each in self._trainable()}

    def _by_name(self, digests: Mapping[nn.Parameter, int]) -> dict[str, int]:
        session = self._runtime.training
        model = None if session is None else session.model
        local = {} if model is None else model.local_named_parameters()
        names = {parameter: name for name, parameter in dict(local).items()}
        return {names.get(each, f"number {n}"): d for n, (each, d) in enumerate(digests.items())}

    def pending(self) -> list[torch.Tensor]:
        """The sums that wait for the end of the window."""
        return list(self._pending.values())

    def _deposit(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if self._masters is None:
            deposit(parameter, gradient)
        else:
            self._masters.deposit(parameter, gradient, deposit)

    @property
    def _overlaps(self) -> bool:
        return self._options.overlapping_allreduce and self.replicas.size > 1 and self._hook is None

    def _divisor(self, microbatches: int) -> int:
        average = self._options.average_grads_across_microbatches
        return self.replicas.size * (microbatches if average else 1)

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def _buckets(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        return fill_buckets(parameters, self._options.bucket_cap_mb * 2**20, self.replicas.wide)

    def _present(self, sums: Mapping[nn.Parameter, torch.Tensor]) -> bytes:
        return bytes(
            NONE if parameter not in sums else SPARSE if sums[parameter].is_sparse else DENSE
            for parameter in self._parameters
        )

    def _reduce(
        self, agreed: Agreement, overlap: Overlap | None, divisor: int
    ) -> dict[nn.Parameter, torch.Tensor]:
        kinds = dict(zip(self._parameters, agreed.present, strict=True))
        reduced: dict[nn.Parameter, torch.Tensor] = {}
        views = self._options.gradient_as_bucket_view
        done: set[nn.Parameter] = set()
        if overlap is not None:
            for parameters, flat in overlap.results(agreed.late):
                done.update(parameters)
                reduced.update(unflatten(flat, parameters, views))
        dense = [p for p, kind in kinds.items() if kind == DENSE and p not in done]
        for parameters, wait in self._begin(self._buckets(dense), divisor):
            reduced.update(unflatten(wait(), parameters, views))
        for parameter, kind in kinds.items():
            if kind == SPARSE:
                reduced[parameter] = self.replicas.reduce_sparse(
                    parameter, self._pending.get(parameter), divisor
                )
        return {parameter: reduced[parameter] for parameter, kind in kinds.items() if kind != NONE}

    def _begin(
        self, buckets: Sequence[Sequence[nn.Parameter]], divisor: int
    ) -> list[tuple[Sequence[nn.Parameter], Callable[[], torch.Tensor]]]:
        if self._hook is not None:
            last = len(buckets) - 1
            return [
                (
                    bucket,
                    self.replicas.hooked(
                        self._hook,
                        GradBucket(
                            index,
                            index == last,
                            bucket,
                            flatten(bucket, self._pending, self.replicas.wide),
                        ),
                    ),
                )
                for index, bucket in enumerate(buckets)
            ]
        exchanges = [self.replicas.exchange(bucket, self._pending, divisor) for bucket in buckets]
        for exchange in exchanges:
            exchange.fold()
        return [(exchange.parameters, exchange.result) for exchange in exchanges]


def deposit(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add a gradient to ``p.grad`` as torch's autograd does, and run the parameter's hooks that come
    after (``register_post_accumulate_grad_hook``).
    """
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = gradient
        elif parameter.grad.is_sparse or gradient.is_sparse:
            parameter.grad = (
                parameter.grad + gradient if gradient.is_sparse else gradient + parameter.grad
            )
        else:
            parameter.grad.add_(gradient)
    for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def _sum(
    pending: Mapping[nn.Parameter, torch.Tensor], totals: Mapping[nn.Parameter, torch.Tensor]
) -> dict[nn.Parameter, torch.Tensor]:
    """Into new tensors: if a replica has failed, the old ones stay."""
    after = dict(pending)
    for parameter, total in totals.items():
        known = after.get(parameter)
        if known is None:
            after[parameter] = total
        elif known.is_sparse and not total.is_sparse:
            after[parameter] = total + known
        else:
            after[parameter] = known + total
    return after
