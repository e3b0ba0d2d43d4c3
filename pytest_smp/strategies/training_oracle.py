"""The expected results of a training case: a plain PyTorch loop over microbatches, steps and replicas.

The loop replays the same local shapes (rows of one microbatch of one replica), adds all gradients up
and divides once. Nothing of ``smp_core`` is used.
"""

from __future__ import annotations

import dataclasses
import math
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_smp.compute_threads import one_compute_thread
from pytest_smp.strategies.training import Training
from pytest_smp.strategies.training_models import build

LEARNING_RATE = 0.125

#: Whole numbers up to here, and no other values, add up without rounding in a dtype.
LARGEST = {"float32": 2**24, "float16": 2**11, "bfloat16": 2**8}


@dataclasses.dataclass
class Results:
    """The results of a run.

    Attributes:
        losses: by replica and step, one for each microbatch, in order.
        outputs: the values that the model returned, in the same order.
        gradients: by window, the gradient of each parameter by name; None if the parameter was never used.
        parameters: the parameters at the end, after one optimizer step or, if the case says so, one for
            each window.
    """

    losses: list[list[list[Tensor]]] = dataclasses.field(default_factory=list)
    outputs: list[list[list[Tensor]]] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = dataclasses.field(default_factory=list)
    parameters: dict[str, Tensor] = dataclasses.field(default_factory=dict)


# ---- Values --------------------------------------------------------------------------------------


def _values(name: str, shape: tuple[int, ...], case: Training) -> Tensor:
    key = f"{case.seed} {name}"
    if case.real:
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        return torch.randn(shape, generator=generator, dtype=torch.float32)
    rng = random.Random(key)
    numel = torch.Size(shape).numel()
    drawn = [rng.randint(-case.span, case.span) for _ in range(numel)]
    return torch.tensor(drawn, dtype=torch.float32).reshape(shape)


def state(case: Training, *, salt: str = "") -> dict[str, Tensor]:
    """The weights of the model, and its buffers, by name; other values for another ``salt``."""
    module = build(case.model)
    names = {name: tensor.shape for name, tensor in module.state_dict().items()}
    made = {name: _values(salt + name, tuple(shape), case) for name, shape in names.items()}
    if case.model.tied:
        made["head.weight"] = made["stem.weight"]
    for first, other in _tied(module):
        made[other] = made[first]
    return made


def _tied(module: nn.Module) -> list[tuple[str, str]]:
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            pairs.append((first[id(parameter)], name))
    # Modules with several parents have their buffers under several names, too.
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if first.setdefault(id(buffer), name) != name:
            pairs.append((first[id(buffer)], name))
    return pairs


def make(case: Training, *, salt: str = "") -> nn.Module:
    """The model with its weights."""
    module = build(case.model)
    module.load_state_dict(state(case, salt=salt))
    return module


def seed(case: Training, replica: int) -> None:
    """Set the default generator of a replica, before its first step and after its model is made."""
    torch.manual_seed(1000 * case.seed + replica)


def batch(case: Training, replica: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step of one replica, each with its batch axis."""
    rows = case.rows * case.microbatches
    name = f"{replica} {step}"
    shape = (rows, case.length, case.model.inputs or 1)
    if case.model.inputs:
        x = _values(f"{name} x", shape, case)
    else:
        rng = random.Random(f"{case.seed} {name} tokens")
        tokens = [rng.randrange(case.model.outputs) for _ in range(rows * case.length)]
        x = torch.tensor(tokens).reshape(rows, case.length)
    y = _values(f"{name} y", (rows, case.length, case.model.outputs), case)
    return x.movedim(0, case.axes[0]).contiguous(), y.movedim(0, case.axes[1]).contiguous()


def loss_of(case: Training, out: Tensor, y: Tensor) -> Tensor:
    """The loss of one microbatch."""
    out, y = out.movedim(case.axes[0], 0), y.movedim(case.axes[1], 0)
    terms = (out - y) ** 2 if case.loss == "square" else out * y
    return terms.mean() if case.real else terms.sum()


# ---- The loop ------------------------------------------------------------------------------------


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter by its first name."""
    return dict(module.named_parameters())


#: An optimizer of these parameters, by name; all work on each element by itself.
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=LEARNING_RATE),
    "momentum": lambda given: torch.optim.SGD(given, lr=LEARNING_RATE, momentum=0.5),
    "decayed": lambda given: torch.optim.SGD(
        given, lr=LEARNING_RATE, momentum=0.5, weight_decay=0.25
    ),
    "adam": lambda given: torch.optim.Adam(given, lr=LEARNING_RATE),
    "adamw": lambda given: torch.optim.AdamW(given, lr=LEARNING_RATE, weight_decay=0.25),
}


def optimizer_of(case: Training, given: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The case's optimizer of these parameters."""
    return OPTIMIZERS[case.optimizer](given)


class Reference:
    """A case in one process: the module, and the masters that its optimizer works on.

    With 16 bits, the module is of that dtype and its parameters have float32 masters: inputs are rounded to
    the dtype, outputs are float32 again, gradients are float32 sums of 16-bit ones. Otherwise the masters
    are the parameters.
    """

    def __init__(self, case: Training) -> None:
        self.case = case
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.module = make(case)
        self.masters = parameters(self.module)
        if self.dtype is not torch.float32:
            self.module.to(self.dtype)
            self.masters = {  # of the rounded parameters: API 1.8
                name: nn.Parameter(each.detach().float(), each.requires_grad)
                for name, each in parameters(self.module).items()
            }
        self.optimizer = optimizer_of(case, self.masters.values())
        self.found = Results([[] for _ in range(case.dp)], [[] for _ in range(case.dp)])

    def forward(
        self, x: Tensor, y: Tensor, module: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss and the output of one microbatch, by the case's module or another one in its place."""
        made = (module or self.module)(x.to(self.dtype) if x.is_floating_point() else x)
        out: Tensor = made.float()
        return loss_of(self.case, out, y), out

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
        """Loss, output and gradients of one microbatch; None where it does not use a parameter."""
        loss, out = self.forward(x, y)
        given = {n: p for n, p in parameters(self.module).items() if p.requires_grad}
        got = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
        wide = {n: None if g is None else g.float() for n, g in zip(given, got, strict=True)}
        return loss.detach(), out.detach(), {name: wide.get(name) for name in self.masters}

    def end_window(
        self, window: int, reduced: Mapping[str, Tensor | None], norm: Callable[[Grads], float]
    ) -> None:
        """Take the gradients of a window, and make a step if the case makes one after it."""
        case = self.case
        for name, each in self.masters.items():
            gradient = reduced[name]
            if gradient is not None:  # without a gradient, a grad that was set to zero stays zero
                each.grad = gradient.clone() if each.grad is None else each.grad + gradient
        now = {n: None if p.grad is None else p.grad.clone() for n, p in self.masters.items()}
        self.found.gradients.append(now)
        if case.steps_after(window):
            if case.most is not None:
                total = norm(now)
                # An infinite norm clips nothing: 0 times infinity would be no number.
                coefficient = min(1.0, case.most / (total + 1e-6)) if math.isfinite(total) else 1.0
                for each in self.masters.values():
                    if each.grad is not None:
                        each.grad.mul_(coefficient)
            self.optimizer.step()
            with torch.no_grad():
                for name, held in parameters(self.module).items():
                    held.copy_(self.masters[name])  # rounded to the nearest, ties to even
        self.optimizer.zero_grad(set_to_none=case.set_to_none)

    def end(self) -> Results:
        """The results of the whole run, with the parameters as the module has them."""
        self.found.parameters = {n: p.detach().clone() for n, p in parameters(self.module).items()}
        return self.found


Grads = Mapping[str, Tensor | None]


def norm(gradients: Grads) -> float:
    """The L2 norm of all gradients together, in float64."""
    squares = [float(g.double().square().sum()) for g in gradients.values() if g is not None]
    return math.sqrt(sum(squares))


@one_compute_thread()
def plain(case: Training, divisor: int | None = None) -> Results:
    """Train in one process, without any library but torch.

    ``divisor`` is what sums of gradients are divided by, if not by what SMP says.
    """
    reference = Reference(case)
    for window in range(case.windows):
        sums: dict[str, Tensor | None] = dict.fromkeys(reference.masters)
        for replica in range(case.dp):
            for step in range(window * case.passes, (window + 1) * case.passes):
                losses, outputs = [], []
                for x, y in microbatches(case, replica, step):
                    loss, out, gradients = reference.gradients(x, y)
                    losses.append(loss)
                    outputs.append(out)
                    for name, gradient in gradients.items():
                        if gradient is not None:
                            known = sums[name]
                            sums[name] = gradient if known is None else known + gradient
                reference.found.losses[replica].append(losses)
                reference.found.outputs[replica].append(outputs)
        by = divisor or case.divisor
        reduced = {name: None if each is None else each / by for name, each in sums.items()}
        reference.end_window(window, reduced, norm)
    return reference.end()


def parts(case: Training) -> list[dict[str, Tensor | None]]:
    """The gradients of each microbatch of the first window, undivided, on its own."""
    module = make(case)
    found = []
    for replica in range(case.dp):
        for step in range(case.passes):
            for x, y in microbatches(case, replica, step):
                module.zero_grad(set_to_none=True)
                loss_of(case, module(x), y).backward()  # type: ignore[no-untyped-call]
                found.append({n: p.grad for n, p in parameters(module).items()})
    return found


def microbatches(case: Training, replica: int, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of the microbatches of one step, in order."""
    x, y = batch(case, replica, step)
    for microbatch in range(case.microbatches):
        at = microbatch * case.rows
        yield x.narrow(case.axes[0], at, case.rows), y.narrow(case.axes[1], at, case.rows)


# ---- The certificate -----------------------------------------------------------------------------


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its base is not typed
    """Remembers the largest value that any operation gave."""

    found = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and each.is_floating_point() and each.numel():
                with torch.no_grad():
                    self.found = max(self.found, float(each.max()))
        return made


def certified(case: Training) -> bool:
    """Return whether no sum in this run can round, in whatever order it is taken.

    All values are whole numbers. One microbatch is run in float64 with the largest magnitude in
    place of every value, and with each operation replaced by a bound of its magnitude: all terms are
    positive, so results bound every partial sum. Gradients are then added up over all microbatches,
    steps and replicas. If nothing exceeds 2**24, float32 holds everything exactly, and so does a 16-bit
    dtype inside of the module (:data:`LARGEST`); dividing by powers of two keeps it so. For cases that
    step after each window see :mod:`training_lattice`.
    """
    if case.every:
        raise ValueError("a case that steps after each window is certified by training_lattice")
    if case.divisor & (case.divisor - 1):
        return False
    module = build(case.model, magnitudes=True).double()
    with torch.no_grad():
        for tensor in module.state_dict(keep_vars=True).values():
            tensor.fill_(case.span)
    rows, length = case.rows, case.length
    if case.model.inputs:
        x = torch.full((rows, length, case.model.inputs), float(case.span), dtype=torch.float64)
    else:
        x = torch.zeros((rows, length), dtype=torch.int64)
    # The loss and all sums over microbatches are float32; values inside of the module have its dtype.
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        out = module(x)
    y = torch.full_like(out, case.span).detach()
    terms = (out + y) ** 2 if case.loss == "square" else out * y
    loss = terms.sum()
    (upstream,) = torch.autograd.grad(loss, out)
    with largest:
        out.backward(upstream)
    runs = case.microbatches * case.steps * case.dp * case.copies
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    most = max(float(grad.max()) for grad in grads if grad.numel()) * runs
    inside = max(largest.found, case.span, float(upstream.max()))
    outside = max(float(loss.detach()), most)
    return inside <= LARGEST[case.dtype] and outside <= LARGEST["float32"]
