"""Runs of 16-bit training with known gradients, and an oracle that trains them in plain PyTorch.

:mod:`conformance.cases.precision_runs` trains the same runs on ranks. The model is a sum of products, so
each gradient is the drawn factor times the loss scale. A gradient may be infinite, NaN or absent in one
element on one rank, without a trace in any other gradient.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pytest_smp.strategies import Overflows
from pytest_smp.strategies import training_oracle as oracle

#: The first column and the number of columns of the inputs that each stage multiplies with its weights.
#: No sharding degree of a run divides these numbers of columns, so shards have padding.
STAGES = ((0, 5), (5, 3))
_COLUMNS = 9  # the last one is the sum

#: A mark in place of factors: the stage multiplies nothing, so its weights get no gradient.
_ABSENT = 2.0**14
_FACTORS = {"large": 40000.0, "inf": math.inf, "nan": math.nan}


class Product(nn.Module):
    """Adds the products of some columns and the weights to the last column."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self.columns = slice(first, first + count)
        self.weight = nn.Parameter(torch.arange(first + 1.0, first + count + 1))

    def forward(self, h: Tensor) -> Tensor:
        factors = h[:, self.columns]
        if bool((factors == _ABSENT).any()):
            return h
        sum_ = h[:, -1:] + (factors * self.weight).sum(1, keepdim=True)
        return torch.cat([h[:, :-1], sum_], 1)


class PrecisionStages(nn.Module):
    """The model of a run: two :class:`Product` modules, and a parameter that every call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.tensor([1.0]))
        self.parts = nn.ModuleList(Product(*columns) for columns in STAGES)

    def forward(self, h: Tensor) -> Tensor:
        h = torch.cat([h[:, :-1], h[:, -1:] + self.base], 1)
        for part in self.parts:
            h = part(h)
        return h


@dataclasses.dataclass(frozen=True)
class PrecisionRun:
    """One training run as data: its gradients, degrees, optimizer and loss scaling.

    Attributes:
        history: the kind of gradient for each step and rank. With a pipeline a rank is one stage of one
            replica; without one, the seed chooses the stage that gets this kind.
        pp: the pipeline degree.
        dp: the number of replicas.
        sharding: the sharding degree.
        threshold: the value of ``sdp_param_persistence_threshold``.
        split_state: the value of ``shard_optimizer_state``.
        dtype: the dtype of the module, as a name of torch.
        microbatches: the microbatches of a step, one row each.
        passes: the value of ``backward_passes_per_step``.
        optimizer: a name in the oracle's OPTIMIZERS.
        scaling: the keyword arguments of ``DistributedOptimizer``.
        scales: the values of ``loss_scale`` that the script sets before each step, in turn; None sets none.
        max_norm: the first argument of ``clip_master_grads``; None leaves the call out.
        norm_type: the ``norm_type`` of ``clip_master_grads``.
        clip: the value of ``sdp_gradient_clipping``.
        after_skip: whether the script calls ``zero_grad`` also after a skipped step.
        span: the largest magnitude of a finite gradient, which is a whole number.
        seed: the seed of the drawn values.
    """

    history: Overflows
    pp: int = 1
    dp: int = 1
    sharding: int = 1
    threshold: int = 0
    split_state: bool = False
    dtype: str = "float16"
    microbatches: int = 1
    passes: int = 1
    optimizer: str = "momentum"
    scaling: tuple[tuple[str, Any], ...] = ()
    scales: tuple[float | None, ...] = (None,)
    max_norm: float | None = None
    norm_type: float = 2.0
    clip: float = 1e30
    after_skip: bool = True
    span: int = 4
    seed: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """The parameters of ``smp.init``."""
        given: dict[str, Any] = {"microbatches": self.microbatches, "ddp": self.dp > 1}
        given |= {"pipeline_parallel_degree": self.pp, "auto_partition": False}
        given["default_partition"] = 0
        if self.narrow:
            given[{"float16": "fp16", "bfloat16": "bf16"}[self.dtype]] = True
        if self.sharding > 1:
            given["sharded_data_parallel_degree"] = self.sharding
            given["sdp_param_persistence_threshold"] = self.threshold
            given["sdp_gradient_clipping"] = self.clip
        if self.split_state:
            given["shard_optimizer_state"] = True
        return given

    @property
    def narrow(self) -> bool:
        """True if the module has a 16-bit dtype."""
        return self.dtype != "float32"

    @property
    def dynamic(self) -> bool:
        """True if the loss scale is dynamic, so that each step checks for overflow."""
        return self.dtype == "float16" and dict(self.scaling).get("dynamic_loss_scale", False)

    def own(self, whole: Tensor, rank: int) -> Tensor:
        """The elements of a parameter, or of its master, that a rank holds.

        A persistent parameter is held whole. Otherwise the rank holds its owned range, flat.
        """
        if self.sharding == 1 or whole.numel() < self.threshold:
            return whole
        part = -(-whole.numel() // self.sharding)  # rounded up
        first = rank % self.sharding * part
        return whole.reshape(-1)[first : first + part]


def batch(run: PrecisionRun, step: int, turn: int, replica: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of one pass of one replica, with one row for each microbatch."""
    rng = random.Random(f"{run.seed} {step} {turn} {replica}")
    rows, span = range(run.microbatches), run.span
    x = torch.tensor([[float(rng.randint(-span, span)) for _ in range(_COLUMNS)] for _ in rows])
    x[:, -1] = 0
    y = torch.tensor([rng.choice((-1.0, 1.0)) for _ in rows])
    place = random.Random(f"{run.seed} {step} {replica}")  # the same in all passes
    for number in range(run.pp):
        stage = number if run.pp > 1 else place.randrange(2)
        first, count = STAGES[stage]
        at = place.randrange(run.microbatches), first + place.randrange(count)
        there = turn == place.randrange(run.passes)
        kind = run.history.steps[step][replica * run.pp + number]
        if kind == "absent":
            x[:, first : first + count] = _ABSENT
        elif kind != "finite" and there:
            x[at] = _FACTORS[kind]
    return x, y


def rows(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the input and the target of each microbatch."""
    return ((x[at : at + 1], y[at : at + 1]) for at in range(len(x)))


# ---- In plain PyTorch ----------------------------------------------------------------------------


class LossScaleRules:
    """The dynamic loss scale, by the rules of API 1.8 alone."""

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None:
        self.scale, self.factor, self.least = init_scale, scale_factor, min_scale
        self.window, self.consecutive = scale_window, consecutive_hysteresis
        self.full = self.left = delayed_shift
        self.good = 0  # steps since the last overflow

    def step(self, overflow: bool) -> None:
        """Count one finished step and change the scale by its ``overflow``."""
        if overflow:
            self.good = 0
            if self.left == 1:
                self.scale = max(self.scale / self.factor, self.least)
            else:
                self.left -= 1
        else:
            self.good += 1
            grows = self.good % self.window == 0
            self.left = self.full if grows or self.consecutive else self.left
            self.scale *= self.factor if grows else 1


@dataclasses.dataclass
class Told:
    """The visible results of a step.

    Attributes:
        overflow: the optimizer's ``overflow``.
        scale: the loss scale after the step.
        norm: the result of clipping, or None if the script did not clip.
        parameters: the parameters of the rank's stage, unsharded, by name.
        masters: the elements of the masters that the rank holds, by name.
        state: the optimizer's state, unsharded, by the index of the parameter.
    """

    overflow: bool
    scale: float
    norm: float | None
    parameters: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    masters: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    state: dict[int, dict[str, Tensor]] = dataclasses.field(default_factory=dict)


class Plain:
    """The oracle: trains a run in one process, with float32 masters; see :meth:`steps`."""

    def __init__(self, run: PrecisionRun) -> None:
        self.run = run
        self.dtype: torch.dtype = getattr(torch, run.dtype)
        self.module = PrecisionStages().to(self.dtype)
        self.held = oracle.parameters(self.module)
        self.masters = self.held
        if self.dtype is not torch.float32:
            self.masters = {n: nn.Parameter(p.detach().float()) for n, p in self.held.items()}
        self.optimizer = oracle.OPTIMIZERS[run.optimizer](self.masters.values())

    def sums(self, step: int, scale: float) -> dict[str, Tensor | None]:
        """The gradients of a step: float32 sums of the module's gradients, divided once at the end."""
        run, sums = self.run, dict[str, Tensor | None].fromkeys(self.held)
        for replica in range(run.dp):
            for turn in range(run.passes):
                for x, y in rows(*batch(run, step, turn, replica)):
                    loss = (self.module(x.to(self.dtype)).float()[:, -1] * y).sum()
                    loss_scale = torch.full_like(loss, scale)
                    given = list(self.held.values())
                    grads = torch.autograd.grad(loss, given, loss_scale, allow_unused=True)
                    for name, grad in zip(self.held, grads, strict=True):
                        if grad is not None:
                            known = sums[name]
                            sums[name] = grad.float() if known is None else known + grad.float()
        divisor = run.dp * run.microbatches
        return {name: None if each is None else each / divisor for name, each in sums.items()}

    def steps(self) -> Iterator[Told]:
        """Train, and yield the results of each step."""
        run, said = self.run, dict(self.run.scaling)
        rules = LossScaleRules(**said.get("dynamic_loss_args", {}))
        if not run.dynamic:
            rules.scale = said.get("static_loss_scale", 1.0) if run.dtype == "float16" else 1.0
        for step in range(len(run.history)):
            rules.scale = run.scales[step % len(run.scales)] or rules.scale
            scale, sums = rules.scale, self.sums(step, rules.scale)
            given = [each for each in sums.values() if each is not None]
            overflow = run.dynamic and not all(bool(each.isfinite().all()) for each in given)
            skipped = None if run.max_norm is None else -1.0
            norm = skipped if overflow else self._update(sums, scale)
            if run.dynamic:
                rules.step(overflow)
            held, masters = (
                {name: each.detach().clone() for name, each in own.items()}
                for own in (self.held, self.masters)
            )
            state = state_of(self.optimizer.state_dict())
            yield Told(overflow, rules.scale, norm, held, masters, state)

    def _update(self, sums: dict[str, Tensor | None], scale: float) -> float | None:
        """Step the optimizer and return the clipped norm, or None if the run has no ``max_norm``.

        Each gradient is multiplied once, by the clipping coefficient over the loss scale.
        """
        run = self.run
        given = [each.double().reshape(-1) / scale for each in sums.values() if each is not None]
        norm = float(torch.cat(given).norm(run.norm_type))
        most = (
            run.max_norm if run.max_norm is not None else run.clip if run.sharding > 1 else math.inf
        )
        coefficient = min(1.0, most / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        for name, master in self.masters.items():
            sum_ = sums[name]
            master.grad = None if sum_ is None else sum_ * (coefficient / scale)
        self.optimizer.step()
        with torch.no_grad():
            for name, held in self.held.items():
                held.copy_(self.masters[name])  # rounded to the nearest, ties to even
        return None if run.max_norm is None else norm


def state_of(state_dict: Any) -> dict[int, dict[str, Tensor]]:
    """Copy the optimizer's state from a state dict: tensors by name, by the index of the parameter."""
    return {
        index: {
            name: torch.as_tensor(each).clone() for name, each in values.items() if each is not None
        }
        for index, values in state_dict["state"].items()
    }
