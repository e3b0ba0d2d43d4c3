"""What a training case must give: a plain PyTorch loop over microbatches, steps and replicas.

The loop replays the same local shapes (rows of one microbatch of one replica), adds all gradients up
and divides once. It uses nothing of ``smp_core``.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_smp.strategies.training import Training
from pytest_smp.strategies.training_models import build

LEARNING_RATE = 0.125

#: Whole numbers up to here, and no other values, add up without rounding in float32.
LARGEST = 2**24


@dataclasses.dataclass
class Results:
    """What a run gives.

    Attributes:
        losses: by replica and step, one for each microbatch, in order.
        outputs: the same of what the model returned.
        gradients: by window, each parameter's, by name; None if it was never used.
        parameters: at the end, after one optimizer step or, with real values, one for each window.
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


def plain(case: Training, divisor: int | None = None) -> Results:
    """Train in one process, without any library but torch.

    ``divisor`` is what sums of gradients are divided by, if not by what SMP says.
    """
    module = make(case)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    found = Results(
        losses=[[] for _ in range(case.dp)],
        outputs=[[] for _ in range(case.dp)],
    )
    for window in range(case.windows):
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for replica in range(case.dp):
            for step in range(window * case.passes, (window + 1) * case.passes):
                losses, outputs = [], []
                for x, y in microbatches(case, replica, step):
                    out = module(x)
                    loss = loss_of(case, out, y)
                    loss.backward()  # type: ignore[no-untyped-call]
                    losses.append(loss.detach())
                    outputs.append(out.detach())
                found.losses[replica].append(losses)
                found.outputs[replica].append(outputs)
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad /= divisor or case.divisor
        found.gradients.append(
            {
                name: None if each.grad is None else each.grad.clone()
                for name, each in parameters(module).items()
            }
        )
        if case.real or window == case.windows - 1:
            optimizer.step()
    found.parameters = {name: each.detach().clone() for name, each in parameters(module).items()}
    return found


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
    """Whether no sum in this run can round, in whatever order it is taken.

    All values are whole numbers. One microbatch is run in float64 with the largest magnitude in
    place of every value, and with each operation replaced by a bound of its magnitude: all terms are
    positive, so results bound every partial sum. Gradients are then added up over all microbatches,
    steps and replicas. If nothing exceeds 2**24, float32 holds everything exactly; dividing by powers
    of two keeps it so.
    """
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
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        out = module(x)
        y = torch.full_like(out, case.span)
        terms = (out + y) ** 2 if case.loss == "square" else out * y
        terms.sum().backward()
    runs = case.microbatches * case.steps * case.dp
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    most = max(float(grad.max()) for grad in grads) * runs
    return bool(max(largest.found, most) <= LARGEST)
