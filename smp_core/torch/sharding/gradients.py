"""From the sums of a step to the gradients of shards: ReduceScatter each step, AllReduce once a window.

Published order (ENGINES 2.2 tier R). A step's sums, whole on each rank and folded over microbatches
(execution/accumulation.py), are folded over the ranks of the sharding group, and each rank keeps its part:
the ReduceScatter. Parts are summed with those of the steps before, until ``backward_passes_per_step`` steps
are together. Only then they are folded over the replication group: the AllReduce. One division follows,
by the number of replicas of the data and, if gradients are averaged over them, of microbatches; the result is
added to ``p.grad``. All of it in float32, or in what is wider. Gradients of persistent parameters go the same
way, and are made whole by an AllGather in the end. In contiguous blocks of a power of two ranks the two folds
are one, so that without accumulation the degree makes no difference.

Buckets. The parameters that are trained, in reverse order, are reduced in buckets of
``sdp_reduce_bucket_size`` elements: the first sets out as soon as all that it waits for has come, and takes
the whole gradients along. What comes for a parameter after that, as where a function runs backward twice, is
reduced by itself at the end of the step, and added: what was late is the second summand, so that bits depend
on what had set out. After a step in which something was late nothing sets out early any more, and nothing does
with ``overlapping_allreduce=False``: then all is reduced at the end, in one order whatever the function does.
Gradients that nobody has count as zeros, and parameters that no rank has a gradient for keep their
``p.grad``, also None. A step that brings no gradient to any rank, as in evaluation, reduces nothing.

How the engine calls it is said in reduction/gradients.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import ShardingError, UnsupportedTrainingError
from smp_core.torch.execution import agreement, counted
from smp_core.torch.execution.agreement import DENSE, NONE, Agreement, Report
from smp_core.torch.precision.masters import Masters
from smp_core.torch.reduction import drift
from smp_core.torch.reduction.gradients import Gradients, Options
from smp_core.torch.sharding.collectives import Collectives, Pending
from smp_core.torch.sharding.layout import Layout, bins
from smp_core.torch.sharding.sharded_model import ShardedModel

Totals = Mapping[nn.Parameter, torch.Tensor]
#: What sums are taken in, where that is not the parameter's own dtype.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Bucket:
    """Parameters of one dtype whose gradients are reduced together."""

    def __init__(self, parameters: Sequence[nn.Parameter], layouts: Sequence[Layout]) -> None:
        self.parameters, self.layouts = parameters, layouts
        self.dtype = _WIDE.get(parameters[0].dtype, parameters[0].dtype)
        self.ranks = layouts[0].ranks

    def rows(self, totals: Totals) -> torch.Tensor:
        """The parts of each rank as a row; zeros for a parameter without a gradient."""
        width = sum(layout.shard_numel for layout in self.layouts)
        rows = torch.empty((self.ranks, width), dtype=self.dtype)
        start = 0
        for parameter, layout in zip(self.parameters, self.layouts, strict=True):
            columns = rows[:, start : start + layout.shard_numel]
            total = totals.get(parameter)
            if total is None:
                columns.zero_()
            else:
                total = total.to_dense() if total.is_sparse else total
                whole = layout.padded_numel == layout.numel
                flat = total.reshape(-1)
                columns.copy_(flat.view(self.ranks, -1) if whole else layout.shards(flat))
            start += layout.shard_numel
        return rows

    def parts(self, row: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter's part of a row."""
        widths = [layout.shard_numel for layout in self.layouts]
        yield from zip(self.parameters, torch.split(row, widths), strict=True)

    def wholes(self, gathered: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter's gradient, whole, from the rows of all ranks."""
        rows = gathered.view(self.ranks, -1)
        start = 0
        for parameter, layout in zip(self.parameters, self.layouts, strict=True):
            flat = layout.full(rows[:, start : start + layout.shard_numel])
            whole = torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False)
            yield parameter, whole.copy_(flat.view(parameter.shape))
            start += layout.shard_numel


class Round:
    """The ReduceScatters of one step: every rank of the sharding group begins them in the same order."""

    def __init__(self, collectives: Collectives, buckets: Sequence[Bucket]) -> None:
        self._collectives, self._buckets = collectives, buckets
        self._of = {each: n for n, bucket in enumerate(buckets) for each in bucket.parameters}
        self._lacking = [len(bucket.parameters) for bucket in buckets]
        self._ready: dict[nn.Parameter, torch.Tensor] = {}
        self._complete: set[nn.Parameter] = set()
        self._sent: list[Pending] = []
        self.taken: set[nn.Parameter] = set()  # that have set out with a gradient
        self.was_late = False  # something came for a sum that seemed to be complete

    @property
    def planned(self) -> set[nn.Parameter]:
        """The parameters of the buckets: what was trained when the step began."""
        return set(self._of)

    @property
    def launched(self) -> int:
        """How many buckets have set out."""
        return len(self._sent)

    def ready(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        """This is all of the parameter's gradient, it seems, or all of what came late."""
        self._add(parameter, total)
        if parameter in self._of and parameter not in self._complete:
            self._complete.add(parameter)
            self._lacking[self._of[parameter]] -= 1

    def late(self, parameter: nn.Parameter) -> None:
        """It was not."""
        self.was_late = True
        if parameter in self._complete:
            self._complete.remove(parameter)
            self._lacking[self._of[parameter]] += 1

    @property
    def due(self) -> bool:
        """Whether :meth:`advance` would send anything."""
        return self.launched < len(self._buckets) and not self._lacking[self.launched]

    def advance(self) -> None:
        """Send the next buckets that lack nothing."""
        while self.due:
            self._send()

    def catch_up(self, launched: int) -> None:
        """Send what other ranks have sent."""
        while self.launched < launched:
            self._send()

    def _send(self) -> None:
        # What has come is folded, and its memory given back. Nobody waits: another rank may begin a
        # bucket at the end of the step only.
        for pending in self._sent:
            pending.poll()
        bucket = self._buckets[self.launched]
        rows = bucket.rows(self._ready)
        for parameter in bucket.parameters:
            if self._ready.pop(parameter, None) is not None:
                self.taken.add(parameter)
        self._sent.append(self._collectives.reduce_scatter(rows))
        counted.happened("sent")

    def rest(self, totals: Totals) -> None:
        """The step is over, and these are the sums that nobody was told of."""
        for parameter, total in totals.items():
            self._add(parameter, total)

    def _add(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        total = total.to_dense() if total.is_sparse else total
        known = self._ready.get(parameter)
        self._ready[parameter] = total if known is None else known + total

    def scale(self, factor: float) -> None:
        """Multiply what has not set out, which is all where steps of different sizes are accumulated."""
        self._ready = {each: total * factor for each, total in self._ready.items()}

    @property
    def late_buckets(self) -> tuple[int, ...]:
        """The buckets that something came for after they had set out."""
        late = {self._of[each] for each in self._ready if each in self._of}
        return tuple(sorted(number for number in late if number < self.launched))

    @property
    def present(self) -> set[nn.Parameter]:
        """The parameters that have a gradient of this step."""
        return self.taken | set(self._ready)

    def results(
        self, late: Iterable[int], more: Sequence[Bucket]
    ) -> dict[nn.Parameter, torch.Tensor]:
        """This rank's parts, once all buckets have been sent; those that a rank has something late
        for are sent again, with that. ``more`` are buckets of what was frozen when the step began.
        """
        self._buckets = [*self._buckets, *more]
        # What is late first becomes complete when all buckets are on their way.
        again = {
            number: self._collectives.reduce_scatter(self._buckets[number].rows(self._ready))
            for number in late
        }
        self.catch_up(len(self._buckets))
        parts: dict[nn.Parameter, torch.Tensor] = {}
        for number, bucket in enumerate(self._buckets):
            row = self._sent[number].result()
            if number in again:
                row = row + again[number].result()
            parts.update(bucket.parts(row))
        return parts

    def discard(self) -> None:
        """The step has failed: wait for what is on its way."""
        for pending in self._sent:
            pending.result()


class ShardedGradients(Gradients):
    """As reduction.gradients.Gradients; what it keeps and gives to ``p.grad`` are shards."""

    def __init__(
        self,
        runtime: Runtime,
        parameters: Mapping[str, nn.Parameter],
        options: Options,
        sharding: ShardedModel,
        masters: Masters | None = None,
    ) -> None:
        super().__init__(runtime, parameters, options, masters)
        self._collectives, self._unsharded = sharding.collectives, sharding.unsharded
        self._round: Round | None = None
        self._has: set[nn.Parameter] = set()  # of a gradient in this window
        self._early = self._was_late = False

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Refused: a hook would reduce whole gradients, which there are none of."""
        raise UnsupportedTrainingError(
            "model.register_comm_hook: not with sharded data parallelism, whose gradients are reduced in shards. "
            "Leave the hook out, or set sharded_data_parallel_degree to 1"
        )

    def begin_step(
        self, buffers: Sequence[torch.Tensor] = (), source: int = 0, *, overlaps: bool = True
    ) -> None:
        if self._options.broadcast_buffers:
            self.replicas.broadcast(buffers, source)
        self._agree_first()
        self._round = Round(self._collectives, self._buckets_of(self._planned()))
        self._early = (
            overlaps
            and self._options.overlapping_allreduce
            and self._unit in (0, self._runtime.config.microbatches)
            and not self._was_late
        )

    @property
    def listens(self) -> bool:
        """Only what may set out early: the ledger then gives the sums away."""
        return self._early

    def ready(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        assert self._round is not None
        self._round.ready(parameter, total)

    def late(self, parameter: nn.Parameter) -> None:
        assert self._round is not None
        self._round.late(parameter)

    @property
    def due(self) -> bool:
        return self._round is not None and self._early and self._round.due

    def advance(self) -> None:
        if self.due:
            assert self._round is not None
            self._round.advance()

    def end_step(
        self,
        totals: Totals,
        failure: Any,
        *,
        joined: bool = False,
        microbatches: int | None = None,
    ) -> Any:
        """As the base class's. ``totals`` are what :meth:`ready` was not given."""
        assert not joined  # joining.py refuses it
        round_, self._round = self._round, None
        assert round_ is not None
        count = microbatches or self._runtime.config.microbatches
        round_.rest(totals)
        if self._options.average_grads_across_microbatches and self._passes and count != self._unit:
            round_.scale(self._unit / count)
        has = self._has | round_.present
        held, parts = ({}, {}) if failure is not None else self._digests()
        agreed = agreement.agree(
            self._runtime,
            Report(
                failure=failure,
                present=bytes(DENSE if each in has else NONE for each in self._parameters),
                launched=round_.launched,
                late=round_.late_buckets,
                microbatches=count,
                fresh=bool(round_.present),
                again=round_.was_late,
                gather_digest=self._unsharded.gather_digest,
                held=drift.checksum(held.values()),
                parts=drift.checksum(parts.values()),
                trained=self._trained(),
            ),
        )
        round_.catch_up(agreed.launched)
        if agreed.failure is not None:
            round_.discard()
            return agreed.failure
        self._check_gathers(agreed, round_)
        frozen = self._frozen(agreed)
        if frozen is not None:
            round_.discard()
            raise frozen
        self._agreed_on = self._trained_by(agreed.reports)
        self._check_drift(agreed, round_, held, parts)
        if not self._passes:
            self._unit = agreed.microbatches
        self._was_late = self._was_late or any(report.again for report in agreed.reports)
        kinds = zip(self._parameters, agreed.present, strict=True)
        self._has = {parameter for parameter, kind in kinds if kind != NONE}
        if any(report.fresh for report in agreed.reports):
            unfrozen = self._has - round_.planned
            for parameter, part in round_.results(agreed.late, self._buckets_of(unfrozen)).items():
                known = self._pending.get(parameter)
                self._pending[parameter] = part if known is None else known + part
        self._passes += 1
        if self._passes == self._options.backward_passes_per_step:
            reduced = self._reduced(self._divisor(self._unit))
            has, self._pending, self._passes, self._unit = self._has, {}, 0, 0
            self._has = set()
            self.reductions += 1
            for parameter, gradient in reduced.items():
                if parameter in has:
                    target = parameter if self._masters is None else self._masters.of(parameter)
                    self._deposit(parameter, gradient.to(target.dtype))
        counted.happened("accumulated" if self._passes else "reduced")
        return None

    def _check_gathers(self, agreed: Agreement, round_: Round) -> None:
        """Raise ShardingError, on every rank, if those of a sharding group gathered different units: what one
        sent was not what the other took it for.
        """
        topology = self._runtime.topology
        reports = dict(zip(self._runtime.group(GroupKind.DP).ranks, agreed.reports, strict=True))
        for group in topology.groups(GroupKind.SHARDING):
            told = {rank: reports[rank].gather_digest for rank in group if rank in reports}
            other = next((rank for rank in told if told[rank] != told[group[0]]), None)
            if other is not None:
                round_.discard()
                raise ShardingError(
                    f"sharded data parallelism: in this step rank {other} used other parameters than rank {group[0]}, "
                    "or in another order: each took the other's parts of one for those of another, and what they "
                    "computed is worth nothing. No gradient was changed. Call the same modules in the same order on "
                    "all ranks of a sharding group"
                )

    def _digests(self) -> tuple[dict[nn.Parameter, int], dict[nn.Parameter, int]]:
        """Of the trained parameters that every rank holds, and of this rank's parts of the others."""
        held: dict[nn.Parameter, int] = {}
        parts: dict[nn.Parameter, int] = {}
        alone = self._collectives.replicas == 1
        for parameter in self._trainable():
            shard = self._unsharded.shard(parameter)
            if shard is None:
                held[parameter] = drift.digest(parameter)
            elif not alone:
                parts[parameter] = drift.digest(shard.padded[: shard.owned_numel])
        return held, parts

    def _check_drift(
        self,
        agreed: Agreement,
        round_: Round,
        held: Mapping[nn.Parameter, int],
        parts: Mapping[nn.Parameter, int],
    ) -> None:
        """Raise ReplicaDriftError, on every rank, if ranks differ in what they should hold alike."""
        topology = self._runtime.topology
        reports = dict(zip(self._runtime.group(GroupKind.DP).ranks, agreed.reports, strict=True))
        for own, what, kind, told in (
            (held, "parameter", GroupKind.RDP, {n: each.held for n, each in reports.items()}),
            (
                parts,
                "the part of parameter",
                GroupKind.REPLICATION,
                {n: each.parts for n, each in reports.items()},
            ),
        ):
            groups = [group for group in topology.groups(kind) if group[0] in reports]
            if drift.differ(told, groups):
                names = self._by_name(own)
                drifted = drift.found(self._runtime, GroupKind.DP, what, names, groups)
                if drifted is not None:
                    round_.discard()
                    raise drifted

    def _reduced(self, divisor: int) -> dict[nn.Parameter, torch.Tensor]:
        """The end of a window: this rank's gradients, of each parameter what this rank keeps of it."""
        buckets = self._buckets_of(self._pending)
        rows = [joined([self._pending[each] for each in bucket.parameters]) for bucket in buckets]
        sums = [self._collectives.all_reduce(row) for row in rows]
        reduced: dict[nn.Parameter, torch.Tensor] = {}
        whole: list[tuple[Bucket, Pending]] = []
        for bucket, pending in zip(buckets, sums, strict=True):
            parts = dict(bucket.parts(divided(pending.result(), divisor)))
            persistent = []
            for parameter, part in parts.items():
                shard = self._unsharded.shard(parameter)
                if shard is None:
                    persistent.append(parameter)
                else:
                    reduced[parameter] = part[: shard.owned_numel]
            if persistent:
                row = torch.cat([parts[each] for each in persistent])
                made = Bucket(persistent, [self._layout(each) for each in persistent])
                whole.append((made, self._collectives.all_gather(row)))
        for bucket, pending in whole:
            reduced.update(bucket.wholes(pending.result()))
        return reduced

    def _divisor(self, microbatches: int) -> int:
        average = self._options.average_grads_across_microbatches
        replicas = self._collectives.size * self._collectives.replicas
        return replicas * (microbatches if average else 1)

    def _buckets_of(self, parameters: Iterable[nn.Parameter]) -> list[Bucket]:
        """These of the rank's, in reverse order, of one dtype each."""
        known = set(parameters)
        trained = [each for each in reversed(self._parameters) if each in known]
        most = self._runtime.config.sdp_reduce_bucket_size
        made: list[Bucket] = []
        for dtype in dict.fromkeys(each.dtype for each in trained):
            of_one = [each for each in trained if each.dtype is dtype]
            layouts = [self._layout(each) for each in of_one]
            for bin_ in bins([layout.numel for layout in layouts], most):
                made.append(Bucket([of_one[n] for n in bin_], [layouts[n] for n in bin_]))
        return made

    def _layout(self, parameter: nn.Parameter) -> Layout:
        shard = self._unsharded.shard(parameter)
        return Layout(parameter.numel(), self._collectives.size) if shard is None else shard.layout


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts, 1-D, one after the other: a view of what they are parts of, if that is how they lie there."""
    first, end = parts[0], parts[0].storage_offset()
    storage = first.untyped_storage()._cdata
    for part in parts:
        if part.untyped_storage()._cdata != storage or part.storage_offset() != end:
            return torch.cat(list(parts))
        end += part.numel()
    start = first.storage_offset()
    return first.as_strided((end - start,), (1,), start)


def divided(total: torch.Tensor, divisor: int) -> torch.Tensor:
    """The total, divided once; complex values part by part, as smp_core.reduction does."""
    if total.is_complex():
        return torch.view_as_complex(torch.view_as_real(total) / divisor)
    return total / divisor
