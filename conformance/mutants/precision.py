"""Bugs of loss scales and overflows; :mod:`~conformance.mutants.rounding` has the others of 16-bit training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.mutants.defences import unseen_drift
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from smp_core.errors import VerdictError
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch import amp
from smp_core.torch import session as sessions
from smp_core.torch.model import DistributedModel
from smp_core.torch.optimizer import DistributedOptimizer
from smp_core.torch.precision import update
from smp_core.torch.precision.masters import Masters
from smp_core.torch.precision.scaler import DynamicLossScaler, LossScaler
from smp_core.torch.precision.update import Found, Update
from smp_core.torch.reduction.bucket_reducer import BucketReducer
from smp_core.torch.reduction.layout import Layout

BUGS = Bugs("loss scales and overflow checks")

Targets = Iterable[nn.Parameter]


# ---- Loss scales ---------------------------------------------------------------------------------


def rules(
    patch: Patch, change: Callable[[DynamicLossScaler, bool, DynamicLossScaler], None]
) -> None:
    """Call ``change`` after each update of the scaler, with the scaler, the overflow and its old state."""
    right = DynamicLossScaler.update_scale

    def wrong(self: DynamicLossScaler, overflow: bool) -> None:
        before = DynamicLossScaler()
        vars(before).update(vars(self))
        right(self, overflow)
        change(self, overflow, before)

    patch.setattr(DynamicLossScaler, "update_scale", wrong)


@BUGS.enter("PREC-LOSS-SCALE", origin="B101")
def backs_off_although_hysteresis_remains(patch: Patch) -> None:
    """the scale is lowered at each overflow, whatever delayed_shift says"""

    def change(self: DynamicLossScaler, overflow: bool, before: DynamicLossScaler) -> None:
        if overflow:
            self.cur_scale = max(before.cur_scale / self.scale_factor, self.min_scale)

    rules(patch, change)


@BUGS.enter("PREC-LOSS-SCALE")
def grows_a_step_late_at_first(patch: Patch) -> None:
    """the first window begins at the second step"""
    init = DynamicLossScaler.__init__

    def late(self: DynamicLossScaler, *args: Any, **how: Any) -> None:
        init(self, *args, **how)
        self.last_overflow_iter = 0

    patch.setattr(DynamicLossScaler, "__init__", late)


@BUGS.enter("PREC-LOSS-SCALE")
def windows_ignore_overflows(patch: Patch) -> None:
    """the scale grows every scale_window steps, also soon after an overflow"""

    def change(self: DynamicLossScaler, overflow: bool, before: DynamicLossScaler) -> None:
        self.last_overflow_iter = -1

    rules(patch, change)


@BUGS.enter("PREC-LOSS-SCALE")
def hysteresis_is_never_refilled(patch: Patch) -> None:
    """the rest of delayed_shift only ever falls"""

    def change(self: DynamicLossScaler, overflow: bool, before: DynamicLossScaler) -> None:
        self.cur_hysteresis = min(self.cur_hysteresis, before.cur_hysteresis)

    rules(patch, change)


@BUGS.enter("PREC-LOSS-SCALE")
def hysteresis_is_always_refilled(patch: Patch) -> None:
    """each good step refills delayed_shift, without consecutive_hysteresis, too"""

    def change(self: DynamicLossScaler, overflow: bool, before: DynamicLossScaler) -> None:
        if not overflow:
            self.cur_hysteresis = self.delayed_shift

    rules(patch, change)


@BUGS.enter("PREC-LOSS-SCALE")
def there_is_no_floor(patch: Patch) -> None:
    """the scale falls below min_scale"""

    def change(self: DynamicLossScaler, overflow: bool, before: DynamicLossScaler) -> None:
        if overflow and self.cur_scale == self.min_scale:
            self.cur_scale = before.cur_scale / self.scale_factor

    rules(patch, change)


@BUGS.enter("PREC-LOSS-SCALE", origin="B100")
def scale_follows_the_own_flag(patch: Patch) -> None:
    """each rank lowers the scale for an overflow of its own only, read before the others' came"""
    unseen_drift(patch)
    look = update.look_everywhere
    own: dict[int, bool] = {}

    def reading(runtime: Runtime, targets: Targets) -> Found:
        listed = list(targets)
        own[runtime.rank] = update.look(listed) is Found.OVERFLOW
        return look(runtime, listed)

    right = DynamicLossScaler.update_scale

    def early(self: DynamicLossScaler, overflow: bool) -> None:
        rank = sessions.current("the mutant").runtime.rank
        right(self, overflow and own.get(rank, overflow))

    patch.setattr(update, "look_everywhere", reading)
    patch.setattr(DynamicLossScaler, "update_scale", early)


@BUGS.enter("PREC-STATIC")
def static_scale_stays_in(patch: Patch) -> None:
    """gradients are not divided by a static loss scale"""
    patch.setattr(
        Masters,
        "take_scale",
        lambda self, targets, scale: scale if self.scaler is None or self.scaler.dynamic else 1.0,
    )


@BUGS.enter("PREC-STATIC")
def static_scale_reports_overflows(patch: Patch) -> None:
    """with a static scale steps are skipped, too"""
    patch.setattr(LossScaler, "dynamic", True)


@BUGS.enter("PREC-SET-SCALE")
def first_scale_counts(patch: Patch) -> None:
    """losses are multiplied by the first scale, gradients divided by the present one"""
    scaled, first = DistributedModel._scaled, dict[int, float]()

    def stale(self: DistributedModel, *args: Any) -> Any:
        scaler = None if self.masters is None else self.masters.scaler
        if scaler is None:
            return scaled(self, *args)
        now = scaler.cur_scale
        scaler.cur_scale = first.setdefault(id(self), now)
        given = scaled(self, *args)
        scaler.cur_scale = now
        return given

    patch.setattr(DistributedModel, "_scaled", stale)


@BUGS.enter("PREC-IGNORED")
def scaled_without_fp16(patch: Patch) -> None:
    """losses are scaled in float32, too, and gradients are not divided"""
    init, backward = DistributedOptimizer.__init__, DistributedModel.backward

    def remembering(
        self: Any, optimizer: Any, static_loss_scale: float = 1.0, *args: Any, **how: Any
    ) -> None:
        init(self, optimizer, static_loss_scale, *args, **how)
        self.said = static_loss_scale

    def scaling(self: DistributedModel, tensors: Any, *args: Any) -> None:
        said = getattr(self._session.optimizer, "said", 1.0)
        backward(self, tensors * said if self.masters is None else tensors, *args)

    patch.setattr(DistributedOptimizer, "__init__", remembering)
    patch.setattr(DistributedModel, "backward", scaling)


# ---- Overflows -----------------------------------------------------------------------------------


def flag_over(patch: Patch, kind: GroupKind) -> None:
    """Combine the flag of overflow over the group of this kind only."""

    def narrower(runtime: Runtime, targets: Targets) -> Found:
        told = runtime.fabric.objects.allgather(int(update.look(targets)), runtime.group(kind))
        return Found(max(told))

    patch.setattr(update, "look_everywhere", narrower)


@BUGS.enter("PREC-OVERFLOW", *ASSERTION, VerdictError, origin="B106")
def own_overflow_only(patch: Patch) -> None:
    """each rank looks at its own gradients only"""
    patch.setattr(update, "look_everywhere", lambda runtime, targets: update.look(targets))


@BUGS.enter("PREC-OVERFLOW", *ASSERTION, VerdictError)
def flag_over_the_replicas(patch: Patch) -> None:
    """the overflow flag is combined over replicas, and not over the pipeline"""
    flag_over(patch, GroupKind.RDP)


@BUGS.enter("PREC-OVERFLOW", *ASSERTION, VerdictError)
def flag_over_the_pipeline(patch: Patch) -> None:
    """the overflow flag is combined over the pipeline, and not over the ranks that have other shards"""
    flag_over(patch, GroupKind.MP)


def looks(patch: Patch, is_bad: Callable[[Tensor], Tensor]) -> None:
    """Make the search for overflows test gradients by ``is_bad``."""

    def look(targets: Targets) -> Found:
        given = [each.grad for each in targets if each.grad is not None]
        if any(bool(is_bad(each).any()) for each in given):
            return Found.OVERFLOW
        return Found.FINITE if given else Found.NOTHING

    patch.setattr(update, "look", look)


@BUGS.enter("PREC-OVERFLOW")
def nan_is_no_overflow(patch: Patch) -> None:
    """only infinities are an overflow"""
    looks(patch, torch.isinf)


@BUGS.enter("PREC-OVERFLOW")
def infinity_is_no_overflow(patch: Patch) -> None:
    """only NaN is an overflow"""
    looks(patch, torch.isnan)


@BUGS.enter("PREC-OVERFLOW")
def first_element_is_looked_at(patch: Patch) -> None:
    """only the first element of each gradient is looked at"""
    looks(patch, lambda grad: ~grad.reshape(-1)[:1].isfinite())


@BUGS.enter("PREC-OVERFLOW")
def padding_is_looked_at(patch: Patch) -> None:
    """padding has any value, and one that is not finite makes an overflow"""
    parts, results, look = Layout.shards, BucketReducer.scattered, update.look
    found: dict[int, bool] = {}

    def garbage(self: Layout, flat: Tensor) -> Tensor:
        made = parts(self, flat)
        made.reshape(-1)[self.numel :] = math.nan
        return made

    def noticing(self: BucketReducer, *given: Any) -> Any:
        got = results(self, *given)
        rank = sessions.current("the mutant").runtime.rank
        found[rank] = not all(bool(each.isfinite().all()) for each in got.values())
        return got

    def looking(targets: Targets) -> Found:
        if found.pop(sessions.current("the mutant").runtime.rank, False):
            return Found.OVERFLOW
        return look(targets)

    patch.setattr(Layout, "shards", garbage)
    patch.setattr(BucketReducer, "scattered", noticing)
    patch.setattr(update, "look", looking)


@BUGS.enter("PREC-OVERFLOW")
def flag_is_never_taken_back(patch: Patch) -> None:
    """after one overflow, overflow stays true although steps are made again"""
    step = DistributedOptimizer.step

    def sticking(self: DistributedOptimizer, *args: Any) -> Any:
        before = self.overflow
        done = step(self, *args)
        self.overflow = self.overflow or before
        return done

    patch.setattr(DistributedOptimizer, "step", sticking)


@BUGS.enter("PREC-SKIP")
def skipped_step_is_one_with_zeros(patch: Patch) -> None:
    """in place of skipping, a step is made with gradients of zero: moments decay, and steps count"""
    right = DistributedOptimizer.step

    def stepping(self: DistributedOptimizer, *args: Any) -> Any:
        done = right(self, *args)
        if self.overflow:
            for group in self.optimizer.param_groups:
                for each in group["params"]:
                    each.grad = torch.zeros_like(each)
            self.optimizer.step()
            for group in self.optimizer.param_groups:
                for each in group["params"]:
                    each.grad = None
        return done

    patch.setattr(DistributedOptimizer, "step", stepping)


@BUGS.enter("PREC-SKIP")
def skipped_gradients_stay(patch: Patch) -> None:
    """the gradients of a skipped step are added to those of the next, if the script does not drop them"""
    right = DistributedOptimizer.step

    def keeping(self: DistributedOptimizer, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(self, "zero_grad", lambda *_: None)
            return right(self, *args)

    patch.setattr(DistributedOptimizer, "step", keeping)


@BUGS.enter("PREC-SKIP")
def decay_goes_on_in_a_skipped_step(patch: Patch) -> None:
    """a skipped step decays the masters all the same"""
    right = DistributedOptimizer.step

    def decaying(self: DistributedOptimizer, *args: Any) -> Any:
        done = right(self, *args)
        if self.overflow:
            for group in self.optimizer.param_groups:
                for each in group["params"]:
                    each.data.mul_(1 - group["lr"] * group.get("weight_decay", 0.0))
        return done

    patch.setattr(DistributedOptimizer, "step", decaying)


@BUGS.enter("PREC-SKIP")
def overflow_is_only_reported(patch: Patch) -> None:
    """the scale is lowered and overflow is true, and the step is made all the same"""
    ready = Update.ready

    def going_on(self: Update, targets: Any) -> Found:
        found = ready(self, targets)
        return Found.FINITE if found is Found.OVERFLOW else found

    patch.setattr(Update, "ready", going_on)


@BUGS.enter("PREC-SKIP")
def good_step_after_a_bad_one_is_skipped(patch: Patch) -> None:
    """the step after an overflow is skipped, too, without a word"""
    inner = DistributedOptimizer._step
    bad: dict[int, bool] = {}
    step = DistributedOptimizer.step

    def skipping(self: DistributedOptimizer, closure: Any) -> Any:
        return None if bad.get(id(self)) else inner(self, closure)

    def noting(self: DistributedOptimizer, *args: Any) -> Any:
        done = step(self, *args)
        bad[id(self)] = self.overflow
        return done

    patch.setattr(DistributedOptimizer, "_step", skipping)
    patch.setattr(DistributedOptimizer, "step", noting)


@BUGS.enter("PREC-GRAD-SCALER", *ASSERTION, origin="B100")
def grad_scaler_looks_at_its_own(patch: Patch) -> None:
    """smp.amp.GradScaler skips on the ranks that found an infinity, and steps on the others"""

    def alone(self: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow: bool) -> Any:
        found = torch.amp.GradScaler._unscale_grads_(self, optimizer, inv_scale, found_inf, allow)
        return found or {torch.device("cpu"): torch.zeros(())}

    patch.setattr(amp.GradScaler, "_unscale_grads_", alone)
