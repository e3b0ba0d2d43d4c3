"""Bugs of 16-bit training: masters, rounding, clipping, and the split state of the optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conformance.mutants.defences import unseen_drift
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.execution.accumulation import Ledger
from smp_core.torch.optimizer import DistributedOptimizer
from smp_core.torch.optimizer.parts import OwnParts
from smp_core.torch.precision import casting, update
from smp_core.torch.precision.masters import Masters
from smp_core.torch.precision.update import Update
from smp_core.torch.reduction.layout import Layout
from smp_core.torch.sharding.sharded_model import ShardedModel

BUGS = Bugs("16 bits, clipping, split state")


# ---- Masters and rounding ------------------------------------------------------------------------


@BUGS.enter("PREC-MASTERS")
def masters_begin_anew(patch: Patch) -> None:
    """masters are made of the rounded parameters before each update"""

    def anew(self: Masters) -> None:
        for _, parameter, master in self.known():
            with torch.no_grad():
                master.copy_(self._wide(self._own(parameter.detach()), parameter))
        self.agreed()

    patch.setattr(Masters, "sync", anew)


@BUGS.enter("PREC-MASTERS", origin="B130")
def masters_have_16_bits(patch: Patch) -> None:
    """masters, and so the optimizer's state, are rounded to 16 bits after each update"""
    publish = Masters.publish

    def rounding(self: Masters) -> None:
        with torch.no_grad():
            for _, parameter, master in self.known():
                master.copy_(master.to(parameter.dtype))
        publish(self)

    patch.setattr(Masters, "publish", rounding)


@BUGS.enter("PREC-MASTERS")
def parameters_are_cut_off(patch: Patch) -> None:
    """parameters are masters rounded towards zero"""
    publish = Masters.publish

    def truncating(self: Masters) -> None:
        publish(self)
        with torch.no_grad():
            for _, parameter, master in self.known():
                if parameter.shape == master.shape:
                    beyond = parameter.float().abs() > master.abs()
                    toward = torch.nextafter(parameter, torch.zeros_like(parameter))
                    parameter.copy_(torch.where(beyond, toward, parameter))
        self.agreed()

    patch.setattr(Masters, "publish", truncating)


def gradients_to_masters(patch: Patch, change: Callable[[Tensor, torch.dtype], Tensor]) -> None:
    """Apply ``change`` to gradients on their way to the masters."""
    deposit = Masters.deposit

    def changing(self: Masters, parameter: nn.Parameter, gradient: Tensor, add: Any) -> None:
        deposit(self, parameter, change(gradient, parameter.dtype), add)

    patch.setattr(Masters, "deposit", changing)


@BUGS.enter("PREC-SUMS")
def gradients_are_rounded_again(patch: Patch) -> None:
    """reduced gradients are rounded to 16 bits before masters get them"""
    gradients_to_masters(patch, lambda grad, dtype: grad.to(dtype).float())


@BUGS.enter("PREC-SUMS", origin="B029")
def sums_have_16_bits(patch: Patch) -> None:
    """microbatches are summed in 16 bits"""
    close = Ledger.close

    def narrow(self: Ledger, microbatch: int) -> None:
        close(self, microbatch)
        for parameter, total in self._totals.items():
            total.copy_(total.to(parameter.dtype))

    patch.setattr(Ledger, "close", narrow)


@BUGS.enter("PREC-NESTS")
def inputs_are_rounded_twice(patch: Patch) -> None:
    """inputs are rounded to a few bits more before they are rounded to 16 bits"""
    cast = casting._cast

    def twice(nest: Any, given: Any, to: torch.dtype) -> Any:
        if isinstance(nest, Tensor) and nest.dtype in given and to in casting.HALF:
            step = torch.finfo(to).eps * 2**-6  # first round to six bits more than the dtype has
            exponent = torch.frexp(nest).exponent.float()
            unit = step * torch.exp2(exponent)
            rounded = (nest / unit).round() * unit
            nest = torch.where(nest.isfinite() & (nest != 0), rounded, nest)
        return cast(nest, given, to)

    patch.setattr(casting, "_cast", twice)


@BUGS.enter("PREC-NESTS")
def dicts_are_not_converted(patch: Patch) -> None:
    """tensors in dicts stay as they are"""
    right = casting.inputs

    def shallow(nest: Any, dtype: torch.dtype) -> Any:
        if isinstance(nest, list | tuple):
            return type(nest)(shallow(each, dtype) for each in nest)
        return nest if isinstance(nest, dict) else right(nest, dtype)

    def inputs(nest: Any, dtype: torch.dtype) -> Any:
        args, kwargs = nest
        return shallow(args, dtype), {key: shallow(each, dtype) for key, each in kwargs.items()}

    patch.setattr(casting, "inputs", inputs)


@BUGS.enter("PREC-NESTS")
def keywords_are_not_converted(patch: Patch) -> None:
    """arguments given by keyword stay as they are"""
    right = casting.inputs

    def inputs(nest: Any, dtype: torch.dtype) -> Any:
        args, kwargs = nest
        return right((args, {}), dtype)[0], kwargs

    patch.setattr(casting, "inputs", inputs)


@BUGS.enter("PREC-NESTS")
def doubles_are_converted(patch: Patch) -> None:
    """float64 inputs become 16-bit, too"""
    patch.setattr(
        casting,
        "inputs",
        lambda nest, dtype: casting._cast(nest, (torch.float32, torch.float64), dtype),
    )


@BUGS.enter("PREC-NESTS")
def outputs_stay_narrow(patch: Patch) -> None:
    """16-bit outputs in containers stay as they are"""
    right = casting.outputs
    patch.setattr(
        casting, "outputs", lambda nest: right(nest) if isinstance(nest, Tensor) else nest
    )


@BUGS.enter("PREC-DTYPES", *ASSERTION)
def any_dtype_is_converted(patch: Patch) -> None:
    """parameters of any floating-point dtype are converted without a word"""
    right = casting.convert

    def lenient(session: Any, module: nn.Module, dtype: torch.dtype) -> None:
        for parameter in module.parameters():
            if parameter.dtype not in (torch.float32, dtype):
                parameter.data = parameter.data.real.float()
        right(session, module, dtype)

    patch.setattr(casting, "convert", lenient)


# ---- Clipping ------------------------------------------------------------------------------------


def norms(patch: Patch, change: Callable[..., float]) -> None:
    """Replace the function of the norm by ``change``, which gets the original and its arguments."""
    right = update.norm
    patch.setattr(update, "norm", lambda *args: change(right, *args))


@BUGS.enter("PREC-CLIP-NORM", origin="B106")
def norm_of_the_own_part(patch: Patch) -> None:
    """each rank clips by the norm of what it has"""

    def own(right: Any, runtime: Runtime, given: Any, kind: float, scale: float, *_: Any) -> float:
        flat = [grad.double().reshape(-1) for _, grad in given]
        return float(torch.cat(flat).norm(kind)) / scale if flat else 0.0

    norms(patch, own)


@BUGS.enter("PREC-CLIP-NORM", origin="B067")
def norm_has_the_scale_in_it(patch: Patch) -> None:
    """the norm is that of the scaled gradients"""
    norms(
        patch,
        lambda right, runtime, given, kind, scale, *over: right(runtime, given, kind, 1.0, *over),
    )


@BUGS.enter("PREC-CLIP-NORM", origin="B103")
def replicas_count_in_the_norm(patch: Patch) -> None:
    """parameters that all replicas have count once for each replica"""

    def many(
        right: Any, runtime: Runtime, given: Any, kind: float, scale: float, *over: Any
    ) -> float:
        count = len(runtime.group(GroupKind.RDP).ranks)
        total: float = right(runtime, given, kind, scale, *over)
        return total if math.isinf(kind) else total * count ** (1 / kind)

    norms(patch, many)


@BUGS.enter("PREC-CLIP-NORM")
def overflow_has_a_norm(patch: Patch) -> None:
    """after an overflow clip_master_grads returns a norm"""
    clip = Update.clip

    def returning(self: Update, *args: Any) -> float:
        found = clip(self, *args)
        return math.inf if found < 0 else found

    patch.setattr(Update, "clip", returning)


@BUGS.enter("PREC-CLIP-NORM")
def small_gradients_grow(patch: Patch) -> None:
    """gradients of a small norm are scaled up to max_norm"""
    patch.setattr(update, "coefficient", lambda total, max_norm: max_norm / (total + 1e-6))


@BUGS.enter("PREC-CLIP")
def clipping_divides_twice(patch: Patch) -> None:
    """clipped gradients are divided by the loss scale again in the update"""
    patch.setattr(Masters, "take_scale", lambda self, targets, scale: scale)


@BUGS.enter("PREC-CLIP")
def clipped_in_two_roundings(patch: Patch) -> None:
    """each gradient is rounded twice: multiplied by three times the factor, and divided by three"""

    def rounding(targets: Sequence[nn.Parameter], factor: float) -> None:
        for each in targets:
            if each.grad is not None and factor != 1:
                each.grad.mul_(factor * 3).div_(3)

    patch.setattr(update, "multiply", rounding)


@BUGS.enter("PREC-SHARDED-CLIP", origin="B107")
def shards_clip_by_their_own_norm(patch: Patch) -> None:
    """the norm is that of the rank's own shards"""
    unseen_drift(patch)
    clip = ShardedModel.clip

    @dataclasses.dataclass
    class Alone:
        right: Any

        def all_gather_values(self, values: list[float]) -> list[list[float]]:
            self.right.all_gather_values(values)
            return [values]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.right, name)

    def own(self: ShardedModel, *args: Any) -> None:
        right = self.collectives
        self.collectives = Alone(right)  # type: ignore[assignment]
        try:
            clip(self, *args)
        finally:
            self.collectives = right

    patch.setattr(ShardedModel, "clip", own)


@BUGS.enter("PREC-SHARDED-CLIP", origin="B104")
def persistent_count_on_each_rank(patch: Patch) -> None:
    """persistent parameters count whole on each rank of the shard group"""
    patch.setattr(ShardedModel, "_own", lambda self, parameter, gradient: gradient.reshape(-1))


@BUGS.enter("PREC-SHARDED-CLIP")
def shards_clip_with_the_scale_in(patch: Patch) -> None:
    """the norm that is compared with sdp_gradient_clipping has the loss scale in it"""
    clip = ShardedModel.clip

    def scaled(self: ShardedModel, targets: Sequence[nn.Parameter], scale: float = 1.0) -> None:
        clip(self, targets)
        for each in targets:
            assert each.grad is not None
            each.grad.mul_(1 / scale)

    patch.setattr(ShardedModel, "clip", scaled)


# ---- shard_optimizer_state -----------------------------------------------------------------------


@BUGS.enter("PREC-STATE-EQUAL", *ASSERTION, RuntimeError, origin="B113")
def rest_of_a_division_is_left_out(patch: Patch) -> None:
    """elements that the number of ranks leaves over are not updated"""

    def own(self: Layout, rank: int) -> tuple[int, int]:
        part = self.numel // self.ranks
        return rank * part, (rank + 1) * part

    patch.setattr(Layout, "owned_range", own)


@BUGS.enter("PREC-STATE-EQUAL", origin="B116")
def tiny_parts_are_skipped(patch: Patch) -> None:
    """parts of one element are not updated"""
    inner = DistributedOptimizer._step

    def skipping(self: DistributedOptimizer, closure: Any) -> Any:
        for each in self._parameters.targets():
            if each.numel() == 1:
                each.grad = None
        return inner(self, closure)

    patch.setattr(DistributedOptimizer, "_step", skipping)


@BUGS.enter("PREC-STATE-EQUAL")
def parts_are_not_gathered(patch: Patch) -> None:
    """each rank keeps its own part up to date only"""
    unseen_drift(patch)

    def alone(self: OwnParts, parameters: Iterable[nn.Parameter], own: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for parameter, part in zip(parameters, own, strict=True):
                self.own(parameter.detach()).copy_(part)

    patch.setattr(OwnParts, "gather", alone)


@BUGS.enter("PREC-STATE-BYTES")
def state_is_kept_whole(patch: Patch) -> None:
    """every rank keeps the whole state, and the parameters are right all the same"""
    patch.setattr(OwnParts, "own", lambda self, tensor: tensor.reshape(-1))

    def nothing(self: OwnParts, parameters: Iterable[nn.Parameter], own: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for parameter, part in zip(parameters, own, strict=True):
                parameter.copy_(part.view(parameter.shape))

    patch.setattr(OwnParts, "gather", nothing)


# ---- Any model -----------------------------------------------------------------------------------


@BUGS.enter("PREC-EXACT")
def outputs_are_computed_on_narrow(patch: Patch) -> None:
    """the model's results stay 16-bit, and so do losses"""
    patch.setattr(casting, "outputs", lambda nest: nest)


@BUGS.enter("PREC-REPLAYED")
def masters_remember_what_was_rounded(patch: Patch) -> None:
    """masters begin as the float32 values before the parameters were rounded"""
    convert, made = casting.convert, Masters._made
    kept: dict[int, Tensor] = {}

    def keeping(session: Any, module: nn.Module, dtype: torch.dtype) -> None:
        kept.update((id(each), each.detach().clone()) for each in module.parameters())
        convert(session, module, dtype)

    def remembering(self: Masters, parameter: nn.Parameter) -> nn.Parameter:
        master = made(self, parameter)
        before = kept.get(id(parameter))
        if before is not None and before.shape == master.shape:
            master.data = before
        return master

    patch.setattr(casting, "convert", keeping)
    patch.setattr(Masters, "_made", remembering)
