"""Bugs of gradients: wrong sums, divisors and reductions, and gradients left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conformance.mutants.protocol import Bugs, Patch
from smp_core.torch import session as sessions
from smp_core.torch.execution.accumulation import Ledger
from smp_core.torch.execution.agreement import DENSE
from smp_core.torch.optimizer import DistributedOptimizer
from smp_core.torch.reduction import collectives, reducer
from smp_core.torch.reduction.bucket_reducer import BucketReducer
from smp_core.torch.reduction.buckets import Bucket
from smp_core.torch.reduction.collectives import Collectives
from smp_core.torch.reduction.reducer import GradientReducer

BUGS = Bugs("gradient averaging, accumulation")

Sums = Mapping[nn.Parameter, Tensor]


class _Done:
    """An operation that has completed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def result(self) -> Tensor:
        return self._tensor

    def poll(self) -> None:
        """Do nothing: the operation has completed."""


def alone(patch: Patch, when: Callable[[Collectives], bool]) -> None:
    """Make all_reduce add nothing from other ranks if ``when(collectives)`` is true."""
    all_reduce = Collectives.all_reduce

    def own(self: Collectives, flat: Tensor, divisor: int = 1) -> Any:
        if not when(self):
            return all_reduce(self, flat, divisor)
        return _Done(collectives.divided(flat.clone(), divisor // self.replicas))

    patch.setattr(Collectives, "all_reduce", own)


def divided_by(patch: Patch, number: Any) -> None:
    """Make the reducer divide gradients by ``number(gradients)``."""
    patch.setattr(GradientReducer, "_divisor", lambda self, microbatches, split=False: number(self))


def _reducer() -> Any:
    """The gradient reducer of this rank."""
    model: Any = sessions.current("the mutant").model
    return model.gradients


def _microbatches(self: GradientReducer) -> int:
    averaged = self._options.average_grads_across_microbatches
    return self._runtime.config.microbatches if averaged else 1


# ---- Microbatches --------------------------------------------------------------------------------


@BUGS.enter("PIPE-EQUALS-PLAIN", origin="B056")
def last_microbatch_only(patch: Patch) -> None:
    """the gradients of a microbatch replace those of the ones before"""
    close = Ledger.close

    def replacing(self: Ledger, microbatch: int) -> None:
        self._totals.clear()
        close(self, microbatch)

    patch.setattr(Ledger, "close", replacing)


@BUGS.enter("GRAD-PLAIN", origin="B062")
def reduced_before_the_last(patch: Patch) -> None:
    """gradients are reduced before those of the last of several microbatches are added"""
    close = Ledger.close

    def early(self: Ledger, microbatch: int) -> None:
        if 0 < microbatch == self._microbatches - 1:
            self._sums.pop(microbatch, None)
        close(self, microbatch)

    patch.setattr(Ledger, "close", early)


@BUGS.enter("PIPE-AVERAGE")
def never_averaged(patch: Patch) -> None:
    """gradients are summed over microbatches though they are to be averaged"""
    divided_by(patch, lambda self: self.replicas.size)


@BUGS.enter("PIPE-AVERAGE")
def always_averaged(patch: Patch) -> None:
    """gradients are averaged over microbatches though they are to be summed"""
    divided_by(patch, lambda self: self.replicas.size * self._runtime.config.microbatches)


@BUGS.enter("PIPE-AVERAGE", origin="B070")
def averaged_twice(patch: Patch) -> None:
    """gradients are divided by the number of microbatches twice"""
    divided_by(patch, lambda self: self.replicas.size * _microbatches(self) ** 2)


@BUGS.enter("PIPE-AVERAGE", origin="B061")
def fixed_number(patch: Patch) -> None:
    """gradients are divided by 4, whatever the number of microbatches"""
    divided_by(patch, lambda self: self.replicas.size * (4 if _microbatches(self) > 1 else 1))


@BUGS.enter("PIPE-SHARED", origin="B098")
def last_use_wins(patch: Patch) -> None:
    """the last use of a parameter in a microbatch replaces the gradients of the other uses"""
    add = Ledger.add

    def overwriting(self: Ledger, microbatch: int, parameter: nn.Parameter, grad: Tensor) -> None:
        self._sums.get(microbatch, {}).pop(parameter, None)
        add(self, microbatch, parameter, grad)

    patch.setattr(Ledger, "add", overwriting)


@BUGS.enter("PIPE-SHARED", origin="B095")
def first_use_wins(patch: Patch) -> None:
    """only the first gradient of a parameter that is used several times in a microbatch counts"""
    add = Ledger.add

    def ignoring(self: Ledger, microbatch: int, parameter: nn.Parameter, grad: Tensor) -> None:
        if parameter in self._sums.get(microbatch, {}):
            grad = torch.zeros_like(grad)
        add(self, microbatch, parameter, grad)

    patch.setattr(Ledger, "add", ignoring)


# ---- Accumulation --------------------------------------------------------------------------------


@BUGS.enter("GRAD-ACCUMULATION", origin="B064")
def every_pass_is_the_first(patch: Patch) -> None:
    """only the last of the accumulated passes survives"""
    patch.setattr(reducer, "_sum", lambda pending, totals: dict(totals))


@BUGS.enter("GRAD-ACCUMULATION", origin="B068")
def passes_are_averaged(patch: Patch) -> None:
    """accumulated gradients are divided by the number of passes"""
    divided_by(
        patch,
        lambda self: (
            self.replicas.size * _microbatches(self) * self._options.backward_passes_per_step
        ),
    )


@BUGS.enter("GRAD-ACCUMULATION", origin="B073")
def first_window_is_short(patch: Patch) -> None:
    """the first window of accumulation ends one pass early"""
    init = GradientReducer.__init__

    def short(self: GradientReducer, *args: Any) -> None:
        init(self, *args)
        self._passes = min(1, self._options.backward_passes_per_step - 1)

    patch.setattr(GradientReducer, "__init__", short)


@BUGS.enter("GRAD-ACCUMULATION", origin="B071")
def sums_are_kept(patch: Patch) -> None:
    """gradients that were reduced in one window are reduced again in the next"""
    end_step = GradientReducer.end_step

    def keeping(self: GradientReducer, totals: Sums, failure: Any, **how: Any) -> Any:
        boundary = self.boundary
        kept = reducer._sum(self._pending, totals)
        agreed = end_step(self, totals, failure, **how)
        if boundary and agreed is None:
            self._pending = kept
        return agreed

    patch.setattr(GradientReducer, "end_step", keeping)


@BUGS.enter("GRAD-ACCUMULATION", origin="B083")
def second_window_is_not_reduced(patch: Patch) -> None:
    """from the second window on, replicas keep their own gradients"""
    alone(patch, lambda self: bool(_reducer().reductions))


@BUGS.enter("GRAD-UNUSED", origin="B065")
def absent_now_is_dropped(patch: Patch) -> None:
    """gradients of earlier passes are dropped for a parameter that the last pass does not use"""
    add = reducer._sum

    def dropping(pending: Sums, totals: Sums) -> dict[nn.Parameter, Tensor]:
        summed = add(pending, totals)
        return {p: total for p, total in summed.items() if p in totals}

    patch.setattr(reducer, "_sum", dropping)


# ---- Replicas ------------------------------------------------------------------------------------


@BUGS.enter("GRAD-REPLICAS", origin="B088")
def no_reduction(patch: Patch) -> None:
    """gradients are reduced over a group of one rank"""
    alone(patch, lambda self: True)


@BUGS.enter("GRAD-REPLICAS", origin="B091")
def replicas_are_summed(patch: Patch) -> None:
    """gradients are summed over replicas, not averaged"""
    divided_by(patch, _microbatches)


@BUGS.enter("GRAD-REPLICAS")
def first_replica_counts(patch: Patch) -> None:
    """every replica gets the gradients of the first"""
    patch.setattr(collectives, "_fold", lambda rows: rows[0] * len(rows))


@BUGS.enter("GRAD-BOUNDED", origin="B029")
def reduced_in_bfloat16(patch: Patch) -> None:
    """gradients are reduced in bfloat16"""
    fold = collectives._fold

    def rounded(rows: Tensor) -> Tensor:
        return fold(rows.bfloat16().float()).bfloat16().to(rows.dtype)

    patch.setattr(collectives, "_fold", rounded)


@BUGS.enter("GRAD-BUCKETS", origin="B020")
def single_tensor_is_not_divided(patch: Patch) -> None:
    """a bucket of one parameter is summed and not divided"""
    rows = Bucket.rows

    def special(self: Bucket, totals: Sums) -> Tensor:
        made, ours = rows(self, totals), _reducer()
        divisor = ours._divisor(ours._runtime.config.microbatches)
        return made * divisor if len(self.parameters) == 1 else made

    patch.setattr(Bucket, "rows", special)


@BUGS.enter("GRAD-BUCKETS")
def full_bucket_loses_its_last(patch: Patch) -> None:
    """the last parameter of a bucket of several is left out"""
    rows = Bucket.rows

    def lossy(self: Bucket, totals: Sums) -> Tensor:
        last = self.parameters[-1] if len(self.parameters) > 1 else None
        return rows(self, {p: total for p, total in totals.items() if p is not last})

    patch.setattr(Bucket, "rows", lossy)


@BUGS.enter("GRAD-UNUSED", origin="B085")
def unused_gets_zeros(patch: Patch) -> None:
    """a parameter that nobody used gets a gradient of zeros"""
    patch.setattr(
        GradientReducer,
        "_present",
        lambda self, step: bytes(DENSE for _ in self._parameters),
    )


@BUGS.enter("GRAD-UNUSED", origin="B025")
def used_on_one_replica_is_lost(patch: Patch) -> None:
    """a parameter that one replica did not use is not reduced"""
    from smp_core.torch.execution.agreement import Agreement

    def everywhere(self: Agreement) -> bytes:
        given = [each.present for each in self.reports if each.present]
        return bytes(map(min, zip(*given, strict=True))) if given else b""

    patch.setattr(Agreement, "present", property(everywhere))


@BUGS.enter("GRAD-FROZEN", origin="B122")
def frozen_gets_zeros(patch: Patch) -> None:
    """a parameter that needs no gradient gets one of zeros"""
    present = GradientReducer._present

    def all_of(self: GradientReducer, step: BucketReducer) -> bytes:
        kinds = present(self, step)
        return bytes(
            kind if parameter.requires_grad else DENSE
            for kind, parameter in zip(kinds, self._parameters, strict=False)
        )

    patch.setattr(GradientReducer, "_present", all_of)


@BUGS.enter("PIPE-REPEATABLE")
def order_of_arrival(patch: Patch) -> None:
    """gradients depend on how often this process has reduced before"""
    divided, runs = collectives.divided, [0]

    def drifting(total: Tensor, divisor: int) -> Tensor:
        runs[0] += 1
        return divided(total, divisor) * (1 + runs[0] * 2**-20)

    patch.setattr(collectives, "divided", drifting)


@BUGS.enter("PIPE-REPLAYED")
def microbatches_from_the_right(patch: Patch) -> None:
    """the sums of microbatches are added up from the last to the first"""
    close = Ledger.close

    def reversed_(self: Ledger, microbatch: int) -> None:
        self._closed.add(microbatch)
        if len(self._closed) < self._microbatches:
            return
        self._closed.clear()
        backwards = [self._sums.pop(n, {}) for n in reversed(range(self._microbatches))]
        self._sums.update(enumerate(backwards))
        for number in range(self._microbatches):
            close(self, number)

    patch.setattr(Ledger, "close", reversed_)


# ---- From step to step ---------------------------------------------------------------------------


@BUGS.enter("GRAD-STEPS")
def the_optimizer_forgets(patch: Patch) -> None:
    """the optimizer's state is made anew in every step"""
    step = DistributedOptimizer.step

    def forgetting(self: DistributedOptimizer, closure: Any = None) -> Any:
        self.state.clear()
        return step(self, closure)

    patch.setattr(DistributedOptimizer, "step", forgetting)


@BUGS.enter("GRAD-STEPS")
def decay_comes_with_the_first_step_only(patch: Patch) -> None:
    """weight decay is left out of every step but the first"""
    step = DistributedOptimizer.step

    def once(self: DistributedOptimizer, closure: Any = None) -> Any:
        result = step(self, closure)
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        return result

    patch.setattr(DistributedOptimizer, "step", once)
