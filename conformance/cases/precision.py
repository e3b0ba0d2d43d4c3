"""What the properties of 16-bit training share: runs whose gradients are known, and what they give in plain
PyTorch. On ranks: :mod:`conformance.cases.precision_runs`.

The model is a sum of products, so a gradient is what was drawn for it, times the loss scale: it may be
infinite, NaN or absent on one rank and in one element, and no other one knows of it.
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

#: The columns of the inputs that each stage multiplies with its weights: the first, and how many.
#: Neither number is divided by a degree.
STAGES = ((0, 5), (5, 3))
_COLUMNS = 9  # the last one is the sum

#: In place of factors: there is no product, so that the weights have no gradient.
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
    """Two of them, and a parameter that is always used."""

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
    """One run.

    Attributes:
        history: of the gradients of each rank, that is of each stage of each replica; of a whole model
            where there is no pipeline, whose stage is drawn.
        pp, dp, sharding: degrees.
        threshold: ``sdp_param_persistence_threshold``.
        split_state: ``shard_optimizer_state``.
        dtype: of the module.
        microbatches, passes: of each step, each one row; ``backward_passes_per_step``.
        optimizer: by the oracle's name.
        scaling: the arguments of ``DistributedOptimizer``.
        scales: what ``loss_scale`` is set to before each step, in turn; None: it is left.
        max_norm, norm_type: what ``clip_master_grads`` is called with; None: it is not called.
        clip: ``sdp_gradient_clipping``.
        after_skip: whether the script sets gradients to zero after a skipped step, too, as before any other.
        span: gradients are whole numbers from ``-span`` to ``span``.
        seed: of values.
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
        """Whether there are 16 bits."""
        return self.dtype != "float32"

    @property
    def dynamic(self) -> bool:
        """Whether overflows are looked for."""
        return self.dtype == "float16" and dict(self.scaling).get("dynamic_loss_scale", False)

    def own(self, whole: Tensor, rank: int) -> Tensor:
        """What a rank has of a parameter, or of its master: its part of the elements where it is split."""
        if self.sharding == 1 or whole.numel() < self.threshold:
            return whole
        part = -(-whole.numel() // self.sharding)  # rounded up
        first = rank % self.sharding * part
        return whole.reshape(-1)[first : first + part]


def batch(run: PrecisionRun, step: int, turn: int, replica: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one pass of one replica: a row for each microbatch."""
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
    """Inputs and targets of each microbatch."""
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
        """One step is over."""
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
    """What there is to see after a step.

    ``norm``: what clipping returned. ``parameters`` are whole; ``masters`` what the rank has of them.
    ``state``: the optimizer's, whole, by the index of the parameter.
    """

    overflow: bool
    scale: float
    norm: float | None
    parameters: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    masters: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    state: dict[int, dict[str, Tensor]] = dataclasses.field(default_factory=dict)


class Plain:
    """The run in one process, with float32 masters; see :meth:`steps`."""

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
        """The gradients of a step: float32 sums of 16-bit gradients, divided once."""
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
        """What a step leaves behind, step by step."""
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
        """One step of the optimizer; gradients are multiplied once."""
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
    """What an optimizer keeps, as tensors, by the index of the parameter."""
    return {
        index: {
            name: torch.as_tensor(each).clone() for name, each in values.items() if each is not None
        }
        for index, values in state_dict["state"].items()
    }
