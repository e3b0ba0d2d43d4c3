"""The reducer: from the sums of a step to ``p.grad``, over microbatches, ranks and steps, in a published order.

The order (ENGINES 2.2 tier R). A step's totals, folded over microbatches (execution/accumulation.py), are folded over
the ranks of the shard group, and each rank keeps its shard: the reduce-scatter. Shards are summed with those of the
steps before, in order, until ``backward_passes_per_step`` steps are together (API 1.7; they are summed, not averaged).
Only then they are folded over the replicate group: the all-reduce. One division follows, by the number of replicas of
the data and, if gradients are averaged over them, of microbatches. Gradients of parameters that are not sharded go the
same way, and are made whole by an all-gather in the end. The result is added to ``p.grad``, or to ``master.grad`` of a
16-bit parameter with a master (precision/masters.py).

Plain data parallelism is the same with a shard group of one rank: nothing is scattered or gathered. The other
differences are a policy (policy.py). In contiguous blocks of a power of two ranks the two folds are one, so that
without accumulation the degree makes no difference.

Gradients that nobody has count as zeros, and a parameter that no rank has a gradient for keeps its ``p.grad``, also
None. With several replicas gradients are reduced whether ``ddp`` is on or not: nobody wants replicas that drift apart
in silence.

How the engine calls it, on every rank and in its own thread::

    shards = model.sharding.gradient_shards(runtime)
    reducer = GradientReducer(runtime, dict(model.local_named_parameters()), options, shards)
    reducer.begin_step(buffers)                     # before the first microbatch
    failure = reducer.end_step(ledger.totals(), None)     # all ranks: returns the agreed failure
    failure = reducer.end_step({}, failure)               # where this rank's pipeline failed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import (
    ShardingError,
    TensorParallelError,
    UnsupportedTrainingError,
)
from smp_core.torch.execution import agreement, counted
from smp_core.torch.execution.agreement import DENSE, NONE, SPARSE, Agreement, ReplicaReport
from smp_core.torch.parameters.split import split_of
from smp_core.torch.precision.masters import Masters
from smp_core.torch.reduction import drift
from smp_core.torch.reduction.bucket_reducer import BucketReducer
from smp_core.torch.reduction.buckets import Bucket, Totals, fill
from smp_core.torch.reduction.collectives import Pending, divided
from smp_core.torch.reduction.layout import Layout
from smp_core.torch.reduction.policy import LateGradients, Options
from smp_core.torch.reduction.replicas import CommHook, GradBucket, Replicas
from smp_core.torch.reduction.shards import GradientShards

#: Waits for a reduced bucket.
_Result = Callable[[], torch.Tensor]
#: Digests of parameters, or of shards, by the kind of group whose members hold them alike.
_Digests = dict[GroupKind, dict[nn.Parameter, int]]
#: The kinds of group whose members hold values alike, in the order in which they are compared, and the words for them.
_HELD = {
    GroupKind.DP: "parameter",
    GroupKind.RDP: "parameter",
    GroupKind.REPLICATION: "the part of parameter",
}


class GradientReducer:
    """The gradients of one rank's parameters, over steps, shards and replicas.

    ``parameters`` are the rank's own by name, the same on all replicas; frozen ones may be among them.
    Made by all members of the DP group at the same point. ``masters`` get
    the gradients of their parameters.
    """

    def __init__(
        self,
        runtime: Runtime,
        parameters: Mapping[str, nn.Parameter],
        options: Options,
        shards: GradientShards,
        masters: Masters | None = None,
    ) -> None:
        self._runtime, self._options, self._masters = runtime, options, masters
        self._parameters = list(dict.fromkeys(parameters.values()))
        wide = masters is not None and masters.dtype is not None
        self._shards, self._policy = shards, shards.policy(options, wide)
        self._collectives = shards.collectives
        self.replicas = Replicas(runtime, wide)
        self.reductions = 0  # how often gradients were reduced: the same on every rank
        self._pending: dict[
            nn.Parameter, torch.Tensor
        ] = {}  # sums of the window, as this rank keeps them
        self._passes = 0  # steps that are in `pending`
        self._unit = 0  # microbatches of the first of them
        self._has: set[nn.Parameter] = set()  # of a gradient in this window, on any rank
        self._step: BucketReducer | None = None
        self._overlaps = self._was_late = False
        self._hook: tuple[object, CommHook] | None = None
        self._agreed_on: bytes | None = None  # which parameters replicas train, as of the last step

    @property
    def boundary(self) -> bool:
        """True if gradients are reduced over replicas at the end of the present step."""
        return self._passes + 1 == self._options.backward_passes_per_step

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Have ``hook(state, bucket)`` reduce each bucket from now on, instead of the reduction described above.
        The hook itself averages over replicas and microbatches (API 1.7).

        Raises UnsupportedTrainingError where gradients are sharded, without ``ddp`` and
        ``overlapping_allreduce``, and for a second hook; TypeError for a value that cannot be called.
        """
        if not self._policy.comm_hooks:
            raise UnsupportedTrainingError(
                "model.register_comm_hook: not with sharded data parallelism, whose gradients are reduced in shards. "
                "Leave the hook out, or set sharded_data_parallel_degree to 1"
            )
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
        """Take these as the rank's parameters: a script may replace or add one between steps,
        on all replicas alike.
        """
        self._parameters = list(dict.fromkeys(parameters))
        here = set(self._parameters)
        self._pending = {each: total for each, total in self._pending.items() if each in here}

    def pending(self) -> list[torch.Tensor]:
        """The sums that wait for the end of the window."""
        return list(self._pending.values())

    # In a step.

    def begin_step(
        self, buffers: Sequence[torch.Tensor] = (), source: int = 0, *, overlaps: bool = True
    ) -> None:
        """Give all replicas the buffers of dp rank ``source``, as DDP does before each forward pass
        (API 8.12), if ``broadcast_buffers``. ``overlaps``: buckets may be launched before the end.
        """
        if self._options.broadcast_buffers:
            self.replicas.broadcast(buffers, source)
        self._agree_first()
        self._overlaps = overlaps and self._may_overlap()
        self._step = self._new_step()

    def _may_overlap(self) -> bool:
        """Return whether buckets may be launched during the backward pass of the step that begins."""
        # Totals of another number of microbatches than the window's first step had are scaled before they are summed.
        same = self._unit in (0, self._runtime.config.microbatches)
        if not self._options.overlapping_allreduce or not same:
            return False
        if self._policy.scatters:
            return not self._was_late
        # Only the all-reduce is launched early: at the window's end alone, and not if a hook takes its place.
        return self.boundary and self._collectives.replicas > 1 and self._hook is None

    def _new_step(self) -> BucketReducer:
        planned = [each for each in self._planned() if not self._stays(each)]
        return BucketReducer(self._buckets(planned), self._pack, self._launch, self._policy.late)

    def _stays(self, parameter: nn.Parameter) -> bool:
        """Return whether no other rank has a summand of the parameter's gradient, so that it is in no bucket."""
        if self._policy.scatters or self._hook is not None:
            return False
        return self._shards.all_reducer(split_of(parameter) is not None).replicas == 1

    def _pack(self, bucket: Bucket, totals: Totals) -> list[torch.Tensor]:
        if self._policy.scatters and self._collectives.takes_columns:
            return bucket.columns(totals)
        return [bucket.rows(totals)]

    def _launch(self, bucket: Bucket, packed: list[torch.Tensor]) -> Pending[torch.Tensor]:
        if self._policy.scatters:
            return self._collectives.reduce_scatter(packed)
        return self._shards.all_reducer(bucket.split).all_reduce(
            packed[0].view(-1),
            self._divisor(self._unit or self._runtime.config.microbatches, bucket.split),
        )

    @property
    def listens(self) -> bool:
        """True if the ledger is to tell which totals are ready: only those are told that may be launched early."""
        return self._overlaps

    @property
    def moves(self) -> bool:
        """True if the ledger is to give away the totals that are ready."""
        return self._policy.late is LateGradients.ADD

    def takes(self, parameter: nn.Parameter) -> bool:
        """Return whether :meth:`on_ready` has a use for the parameter's total."""
        return not self._stays(parameter)

    def on_ready(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        """The step's total of this parameter seems to be complete; callable from any thread."""
        if self._step is not None:
            # An all-reduce is of the whole window, a reduce-scatter of the step alone.
            known = None if self._policy.scatters else self._pending.get(parameter)
            self._step.on_ready(parameter, total if known is None else _added(known, total))

    def on_late_grad(self, parameter: nn.Parameter) -> None:
        """Another gradient of a parameter is to come that seemed to be complete."""
        if self._step is not None:
            self._step.on_late_grad(parameter)

    @property
    def due(self) -> bool:
        """True if ``advance`` has something to launch."""
        return self._step is not None and self._overlaps and self._step.due

    def advance(self) -> None:
        """Launch the buckets that are ready. In the rank's own thread only."""
        if self.due:
            assert self._step is not None
            self._step.advance()

    def end_step(
        self,
        totals: Totals,
        failure: object,
        *,
        joined: bool = False,
        microbatches: int | None = None,
    ) -> object:
        """Agree with the other replicas on how the step ended; if well, accumulate, and reduce if this
        is the boundary. ``totals`` are the totals that :meth:`on_ready` was not given, or, unless the ledger moves
        them, all. ``microbatches`` is the number of microbatches in the totals, the configured number if not
        given; another number needs a step that was begun with ``overlaps=False``. Steps of different
        numbers are accumulated as averages, in units of the first.

        ``failure`` is None or anything picklable; returns the failure of the lowest dp rank that has one.
        After a failure gradients and accumulated sums are as they were before the step.
        """
        step = self._step or self._new_step()
        self._step = None
        count = 0 if joined else microbatches or self._runtime.config.microbatches
        window = self._add_remaining(step, {} if failure is not None else totals, count)
        digests = {} if failure is not None or joined else self._digests()
        agreed = agreement.agree(
            self._runtime,
            ReplicaReport(
                failure=failure,
                present=self._present(step),
                launched=step.launched,
                late=step.late_buckets,
                joined=joined,
                microbatches=count,
                fresh=bool(step.present),
                again=step.was_late,
                gather_digest=self._shards.gather_digest,
                exchange_digest=self._exchange_digest(),
                checksums={
                    kind.value: drift.checksum(own.values()) for kind, own in digests.items()
                },
                trained=b"" if joined else self._trained(),
            ),
        )
        step.catch_up(agreed.launched)
        if agreed.failure is not None:
            step.discard()
            return agreed.failure
        wrong = self._disagreement(agreed, digests)
        if wrong is not None:
            step.discard()
            raise wrong
        self._agreed_on = self._trained_by(agreed.different)
        self._was_late = self._was_late or any(report.again for report in agreed.different)
        before = self._passes, self._unit, self._has, self._pending
        try:
            self._finish(step, agreed, window, joined=joined)
        except BaseException:  # a communication hook's, say: the window is as before the step
            self._passes, self._unit, self._has, self._pending = before
            raise
        return None

    def _finish(
        self,
        step: BucketReducer,
        agreed: Agreement,
        window: dict[nn.Parameter, torch.Tensor],
        *,
        joined: bool,
    ) -> None:
        """Accumulate a step that went well, and reduce the window if it ends here."""
        if not self._passes:
            self._unit = agreed.microbatches
        self._passes += 1
        self._has = {
            parameter
            for parameter, kind in zip(self._parameters, agreed.present, strict=False)
            if kind != NONE
        }
        self._pending = self._accumulated(step, agreed, window)
        ends = self._passes == self._options.backward_passes_per_step
        if ends:
            reduced = self._all_reduced(step, agreed)
            has, self._has = self._has, set()
            self._pending, self._passes, self._unit = {}, 0, 0
            self.reductions += 1
            if not joined:
                for parameter in self._parameters:  # hooks of parameters run in this order
                    if parameter in has and parameter in reduced:
                        self._deposit(parameter, reduced[parameter])
        counted.happened("reduced" if ends else "accumulated")

    def _add_remaining(
        self, step: BucketReducer, totals: Totals, count: int
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Tell the step of the totals that it has not; gives the sums of the window where nothing is scattered."""
        average = self._options.average_grads_across_microbatches
        if average and self._passes and count not in (0, self._unit):
            totals = {each: total * (self._unit / count) for each, total in totals.items()}
        if self._policy.scatters:
            step.add_remaining(totals)
            return {}
        window = _sum(self._pending, totals)
        step.add_remaining(window)
        return window

    def _present(self, step: BucketReducer) -> bytes:
        """For each parameter the kind of its gradient, or that there is none; empty if nothing is reduced now."""
        if not self._policy.scatters and not self.boundary:
            return b""
        has = self._has | step.present
        return bytes(
            NONE
            if each not in has
            else SPARSE
            if step.is_sparse(each) and split_of(each) is None
            else DENSE
            for each in self._parameters
        )

    def _accumulated(
        self, step: BucketReducer, agreed: Agreement, window: dict[nn.Parameter, torch.Tensor]
    ) -> dict[nn.Parameter, torch.Tensor]:
        """The sums of the window with the step's."""
        if not self._policy.scatters:
            return window
        # A step that brings no gradient to any rank, as in evaluation, reduces nothing.
        if not any(report.fresh for report in agreed.different):
            return self._pending
        unfrozen = self._buckets(self._has - step.planned)
        # In place: the ranks have agreed that the step went well, and no sum is held twice.
        for parameter, shard in step.scattered(agreed.late, unfrozen).items():
            known = self._pending.get(parameter)
            self._pending[parameter] = shard if known is None else known + shard
        return self._pending

    # The end of a window.

    def _all_reduced(
        self, step: BucketReducer, agreed: Agreement
    ) -> dict[nn.Parameter, torch.Tensor]:
        """This rank's gradients: for each parameter the part of the gradient that this rank keeps."""
        kinds = dict(zip(self._parameters, agreed.present, strict=True))
        reduced: dict[nn.Parameter, torch.Tensor] = {}
        if self._policy.scatters:
            # All ranks of the replicate group have the same shards, zeros where nobody had a gradient.
            remaining = set(self._pending)
        else:
            for bucket, row in step.without_late(agreed.late):
                reduced.update(bucket.full_gradients(row, self._policy.bucket_views))
            remaining = {
                each for each, kind in kinds.items() if kind == DENSE and each not in reduced
            }
            for parameter in [each for each in remaining if self._stays(each)]:
                remaining.remove(parameter)
                reduced[parameter] = self._averaged(parameter)
        persistent: list[tuple[Bucket, Pending[torch.Tensor]]] = []
        for bucket, result in self._launch_all_reduces(self._buckets(remaining)):
            row = result()
            if not self._policy.scatters:
                reduced.update(bucket.full_gradients(row, self._policy.bucket_views))
                continue
            # `p.grad` is a view of the row: without a copy it would keep the padding of the all-reduce.
            if row.untyped_storage().nbytes() > row.numel() * row.element_size():
                row = row.clone()
            whole: dict[nn.Parameter, torch.Tensor] = {}
            for parameter, padded in bucket.shards(row):
                shard = self._shards.shard(parameter)
                if shard is None:
                    whole[parameter] = padded
                else:
                    reduced[parameter] = padded[: shard.owned_numel]
            if whole:
                layouts = [self._layout(each) for each in whole]
                gather = self._collectives.all_gather(torch.cat(list(whole.values())))
                persistent.append((Bucket(list(whole), layouts, bucket.dtype), gather))
        for bucket, gather in persistent:
            reduced.update(bucket.full_gradients(gather.result()))
        for parameter, kind in kinds.items():
            if kind == SPARSE and self._policy.keeps_sparse:
                total = self._pending.get(parameter)
                divisor = self._divisor(self._unit)
                reduced[parameter] = self.replicas.reduce_sparse(parameter, total, divisor)
        return reduced

    def _averaged(self, parameter: nn.Parameter) -> torch.Tensor:
        """The gradient of a parameter of which no other rank has a summand: the window's sum, divided once."""
        total = self._pending.get(parameter)
        if total is None:  # another tp rank has a gradient of its slice
            return torch.zeros_like(parameter, requires_grad=False)
        total = total.to_dense() if total.is_sparse else total
        average = divided(total, self._divisor(self._unit, split_of(parameter) is not None))
        # In the parameter's own strides, as autograd leaves gradients.
        if average.stride() == parameter.stride():
            return average
        return torch.empty_like(parameter, dtype=average.dtype, requires_grad=False).copy_(average)

    def _launch_all_reduces(self, buckets: Sequence[Bucket]) -> list[tuple[Bucket, _Result]]:
        """Begin the all-reduces of the window's sums; all are launched before the first is waited for."""
        if self._hook is not None:
            last = len(buckets) - 1
            results: list[tuple[Bucket, _Result]] = []
            for index, bucket in enumerate(buckets):
                row = bucket.rows(self._pending).view(-1)
                given = GradBucket(index, index == last, bucket.parameters, row)
                results.append((bucket, self.replicas.hooked(self._hook, given)))
            return results
        begun: list[tuple[Bucket, _Result]] = []
        for bucket in buckets:
            if self._policy.scatters:
                row = joined([self._pending[each] for each in bucket.parameters])
            else:
                row = bucket.rows(self._pending).view(-1)
                counted.happened("sent")
            divisor = self._divisor(self._unit, bucket.split)
            reducer = self._shards.all_reducer(bucket.split)
            begun.append((bucket, reducer.all_reduce(row, divisor).result))
        return begun

    def _deposit(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if self._masters is None:
            deposit(parameter, gradient.to(parameter.dtype))
        else:
            target = self._masters.of(parameter)
            self._masters.deposit(parameter, gradient.to(target.dtype), deposit)

    # Comparisons between ranks.

    def _agree_first(self) -> None:
        """Before the first step: have the word of the first replica on which parameters are trained."""
        group = self._runtime.group(GroupKind.DP)
        if self._agreed_on is None and len(group.ranks) > 1:
            gathered = self._runtime.fabric.objects.allgather(self._trained(), group)
            self._agreed_on = gathered[0]

    def _trained(self) -> bytes:
        return bytes(parameter.requires_grad for parameter in self._parameters)

    @staticmethod
    def _trained_by(reports: Iterable[ReplicaReport]) -> bytes:
        return next((each.trained for each in reports if each.trained), b"")

    def _planned(self) -> list[nn.Parameter]:
        """The parameters that make up the buckets launched during the step: the same on replicas that have since
        frozen different parameters, which the step's end finds. A parameter that was unfrozen since is reduced at the
        end, too.
        """
        known = self._agreed_on
        if known is None or len(known) != len(self._parameters):
            return self._trainable()
        return [each for each, on in zip(self._parameters, known, strict=True) if on]

    def _digests(self) -> _Digests:
        """The digests of the trained parameters, or of this rank's shards of them, by the kind of group whose members
        hold them alike; none of a group of one rank. Replicas whose gradients a hook reduces have no digests: they may
        differ as the hook wants.
        """
        digests: _Digests = {}
        for parameter in self._trainable() if self._hook is None else ():
            shard = self._shards.shard(parameter)
            value = parameter if shard is None else shard.padded[: shard.owned_numel]
            if shard is not None:
                kind = GroupKind.REPLICATION
            elif split_of(parameter) is not None:
                kind = GroupKind.RDP
            else:
                kind = self._policy.held_by
            if len(self._runtime.group(kind).ranks) > 1:
                digests.setdefault(kind, {})[parameter] = drift.digest(value)
        return digests

    def _disagreement(
        self,
        agreed: Agreement,
        digests: _Digests,
    ) -> Exception | None:
        """The error that every rank raises if ranks have gathered, train or hold different parameters; else None."""
        ranks = self._runtime.group(GroupKind.DP).ranks
        reports = dict(zip(ranks, agreed.reports, strict=True))
        wrong: Exception | None = None
        # The different reports are looked at first, because they are few: nearly always there is no more to do.
        if len({each.gather_digest for each in agreed.different}) > 1:
            wrong = self._other_gathers(reports)
        if wrong is None and len({each.exchange_digest for each in agreed.different}) > 1:
            wrong = self._other_exchanges(reports)
        if wrong is None and len({each.trained for each in agreed.different} - {b""}) > 1:
            wrong = self._other_frozen(reports)
        compared = {kind for each in agreed.different for kind in each.checksums}
        for kind in _HELD:
            if wrong is None and kind.value in compared:
                wrong = self._drifted(kind, digests, reports)
        return wrong

    def _other_gathers(self, reports: Mapping[int, ReplicaReport]) -> ShardingError | None:
        """The error if ranks of a shard group gathered different units, so that each took the other's shards for
        those of another unit; else None.
        """
        for group in self._runtime.topology.groups(GroupKind.SHARDING):
            digests = {rank: reports[rank].gather_digest for rank in group if rank in reports}
            other = next((rank for rank in digests if digests[rank] != digests[group[0]]), None)
            if other is not None:
                return ShardingError(
                    f"sharded data parallelism: in this step rank {other} used other parameters than rank {group[0]}, "
                    "or in another order: each took the other's parts of one for those of another, and what they "
                    "computed is worth nothing. No gradient was changed. Call the same modules in the same order on "
                    "all ranks of a shard group"
                )
        return None

    def _exchange_digest(self) -> int:
        group = None if self._runtime.training is None else self._runtime.training.tensor_group
        return 0 if group is None else int(group.take_digest())

    def _other_exchanges(self, reports: Mapping[int, ReplicaReport]) -> TensorParallelError | None:
        """The error if ranks of a TP group called distributed modules in different orders, so that each computed with
        the other's activations of another module or microbatch; else None.
        """
        for group in self._runtime.topology.groups(GroupKind.TP):
            digests = {rank: reports[rank].exchange_digest for rank in group if rank in reports}
            other = next((rank for rank in digests if digests[rank] != digests[group[0]]), None)
            if other is not None:
                return TensorParallelError(
                    f"tensor parallelism: in this step rank {other} called other distributed modules than rank "
                    f"{group[0]}, of the same TP group, or for other microbatches first: each took the other's "
                    "activations of one for those of another, and what they computed is worth nothing. No gradient was "
                    "changed. Call the same modules in the same order on all ranks of a TP group, whatever their data"
                )
        return None

    def _other_frozen(self, reports: Mapping[int, ReplicaReport]) -> Exception | None:
        """The error if replicas do not train the same parameters: buckets are made of those."""
        trained = {rank: each.trained for rank, each in reports.items()}
        names = list(self._by_name(dict.fromkeys(self._parameters, 0)))
        return drift.frozen(self._runtime, names, trained)

    def _drifted(
        self,
        kind: GroupKind,
        digests: _Digests,
        reports: Mapping[int, ReplicaReport],
    ) -> Exception | None:
        """The error if ranks differ in values that those of a group of this kind should hold alike; else None."""
        name = kind.value
        checksums = {rank: each.checksums.get(name) for rank, each in reports.items()}
        all_groups = self._runtime.topology.groups(kind)
        if not drift.differ(checksums, all_groups):
            return None
        groups = [
            [rank for rank in group if checksums[rank] is not None]
            for group in all_groups
            if group[0] in checksums
        ]
        own = self._by_name(digests.get(kind, {}))
        return drift.found(self._runtime, GroupKind.DP, _HELD[kind], own, groups)

    def _by_name(self, digests: Mapping[nn.Parameter, int]) -> dict[str, int]:
        session = self._runtime.training
        model = None if session is None else session.model
        local = {} if model is None else model.local_named_parameters()
        names = {parameter: name for name, parameter in dict(local).items()}
        return {names.get(each, f"number {n}"): d for n, (each, d) in enumerate(digests.items())}

    # Sizes.

    def _divisor(self, microbatches: int, split: bool = False) -> int:
        average = self._options.average_grads_across_microbatches
        return self._shards.summands(split) * (microbatches if average else 1)

    def _trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> list[Bucket]:
        chosen = set(parameters)
        ordered = [each for each in self._parameters if each in chosen]
        return fill(ordered, self._policy, self._layout)

    def _layout(self, parameter: nn.Parameter) -> Layout:
        shard = self._shards.shard(parameter)
        return Layout(parameter.numel(), self._collectives.size) if shard is None else shard.layout


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


def joined(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Shards, 1-D, one after the other: a view of the memory that they are pieces of, if they lie there in order."""
    first, end = shards[0], shards[0].storage_offset()
    storage = first.untyped_storage()._cdata
    for shard in shards:
        if shard.untyped_storage()._cdata != storage or shard.storage_offset() != end:
            return torch.cat(list(shards))
        end += shard.numel()
    start = first.storage_offset()
    return first.as_strided((end - start,), (1,), start)


def _sum(pending: Totals, totals: Totals) -> dict[nn.Parameter, torch.Tensor]:
    """Into new tensors: if a replica has failed, the old ones stay."""
    after = dict(pending)
    for parameter, total in totals.items():
        known = after.get(parameter)
        after[parameter] = total if known is None else _added(known, total)
    return after


def _added(known: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The sum; torch adds a sparse tensor to a dense one, and not the other way round."""
    return total + known if known.is_sparse and not total.is_sparse else known + total
