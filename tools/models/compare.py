"""One cell of the table: an architecture trains in a layout, and is compared with plain PyTorch on the same batches.

Two references train in one process. The truth is a loop over the microbatches of all replicas in float64, without
anything of this project; the same loop in float32 gives the error that an implementation may have (ENGINES 2.2, the
ratio rule). The other reference adds gradients in the published order (:mod:`pytest_smp.replay`): layouts without
distributed modules have its bits.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp_core.torch as smp
from pytest_smp import replay
from pytest_smp.ranks.protocols import Executor, Job, VerdictKind
from smp_core.errors import ConfigError
from smp_core.torch.exceptions import (
    PartitionError,
    ShardingError,
    TensorParallelError,
    UnsupportedTrainingError,
)
from tools.models import architectures, layouts
from tools.models.architectures import ROWS, Architecture, Batch
from tools.models.layouts import MICROBATCHES, RANKS, Layout

STEPS = 2
#: The errors by which the library says that it does not train a model, and the verdicts on ranks whose calls differ. A
#: cell is refused if its architecture lists the layout; elsewhere the same error is a failure.
REFUSALS = (
    ConfigError,
    PartitionError,
    ShardingError,
    TensorParallelError,
    UnsupportedTrainingError,
)
VERDICTS = (VerdictKind.DEADLOCK, VerdictKind.MISMATCH)

State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Cell:
    """The result of one cell.

    ``result`` is "bits", "bound", "refused" or "FAILED". ``detail`` has the error or the first difference,
    ``distributed`` the number of parameters that tp ranks have slices of.
    """

    architecture: str
    layout: str
    result: str
    detail: str = ""
    distributed: int = 0
    seconds: float = 0.0


@dataclasses.dataclass
class Trained:
    """The results of a training: of each step the losses by microbatch, and the gradients of all parameters.

    ``missing`` are the parameters without a gradient, ``buffers`` the buffers after the last step.
    """

    replica: int = 0
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    gradients: list[State] = dataclasses.field(default_factory=list)
    missing: list[set[str]] = dataclasses.field(default_factory=list)
    buffers: State = dataclasses.field(default_factory=dict)
    distributed: int = 0


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def _batch(architecture: Architecture, replica: int, step: int) -> Batch:
    return architecture.batch(ROWS * MICROBATCHES, 100 * step + replica)


# ---- On ranks -------------------------------------------------------------------------------------


@smp.step
def train_step(model: Any, architecture: Architecture, batch: Batch) -> Tensor:
    """One microbatch."""
    loss = architecture.loss(model, batch)
    model.backward(loss)
    return loss


def train(name: str, layout_name: str) -> Trained:
    """One rank's training, as a script does it."""
    architecture, layout = architectures.BY_NAME[name], layouts.BY_NAME[layout_name]
    smp.init(dict(layout.config))
    if layout.tensor:
        with smp.tensor_parallelism():
            model = smp.DistributedModel(architecture.build().train())
        model.load_state_dict(
            architecture.model().state_dict()
        )  # distributed modules have new weights
    else:
        model = smp.DistributedModel(architecture.model())
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))
    prescaled = layout.config.get("prescaled_batch", False)
    found = Trained(smp.rdp_rank() if prescaled else smp.dp_rank())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = train_step(model, architecture, _batch(architecture, found.replica, step))
        found.losses.append(torch.stack(list(loss.outputs)))
        gradients, missing = _gathered(model)
        found.gradients.append(gradients)
        found.missing.append(missing)
        optimizer.step()
    found.buffers = _buffers(_state(model), architecture.model())
    found.distributed = sum(map(model.is_distributed_parameter, model.parameters()))
    return found


def _gathered(model: Any) -> tuple[State, set[str]]:
    """The gradients as a state of the whole model: they take the places of the parameters, which come back."""
    kept = [(each, each.detach().clone()) for each in model.local_parameters()]
    local = {name for name, each in model.local_named_parameters() if each.grad is None}
    missing = set().union(*smp.allgather(local, smp.PP_GROUP))
    with torch.no_grad():
        for parameter, _ in kept:
            parameter.zero_() if parameter.grad is None else parameter.copy_(parameter.grad)
        state = _state(model)
        for parameter, value in kept:
            parameter.copy_(value)
    return state, missing


def _state(model: Any) -> State:
    """The state of the whole model, with the names of the plain one."""
    state = model.state_dict()
    for to_plain, _ in smp.state.module_manager.translate_functions:
        state = to_plain(state)
    return {
        name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)
    }


def _buffers(state: Mapping[str, Tensor], module: nn.Module) -> State:
    names = {name for name, _ in module.named_buffers()}
    return {name: value for name, value in state.items() if name in names}


# ---- In plain PyTorch -----------------------------------------------------------------------------


def _microbatches(batch: Batch, dtype: torch.dtype) -> Iterator[Batch]:
    parts = {name: value.chunk(MICROBATCHES) for name, value in batch.items()}
    for number in range(MICROBATCHES):
        yield {
            name: part[number].to(dtype) if part[number].is_floating_point() else part[number]
            for name, part in parts.items()
        }


Gradients = Callable[[nn.Module, Sequence[Batch]], tuple[list[Tensor], dict[str, Tensor | None]]]


def _references(
    architecture: Architecture, replicas: int, dtype: torch.dtype, step_of: Gradients
) -> list[Trained]:
    """Train a model for each replica, with the mean gradients of all; their results.

    ``step_of`` gives the losses and the undivided gradients of one replica.
    """
    models = [architecture.model().to(dtype) for _ in range(replicas)]
    optimizers = [_optimizer(each.parameters()) for each in models]
    found = [Trained(replica) for replica in range(replicas)]
    for step in range(STEPS):
        made = []
        for model in models[
            1:
        ]:  # replicas take over the buffers of the first before each step, as in DDP
            for buffer, first in zip(model.buffers(), models[0].buffers(), strict=True):
                buffer.copy_(first)
        for replica, model in enumerate(models):
            batch = _batch(architecture, replica, step)
            losses, gradients = step_of(model, list(_microbatches(batch, dtype)))
            found[replica].losses.append(torch.stack(losses))
            made.append(gradients)
        mean = replay.reduce(made, replicas * MICROBATCHES)
        whole = copy.deepcopy(models[0])
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                value = mean[name]
                parameter.zero_() if value is None else parameter.copy_(value)
        named = whole.named_parameters(remove_duplicate=False)
        state = {name: each.detach() for name, each in named}
        for each in found:
            each.gradients.append(state)
            each.missing.append({name for name, value in mean.items() if value is None})
        for model, optimizer in zip(models, optimizers, strict=True):
            for name, parameter in model.named_parameters():
                parameter.grad = mean[name]
            optimizer.step()
    for each, model in zip(found, models, strict=True):
        each.buffers = _buffers(model.state_dict(), model)
    return found


@functools.lru_cache(maxsize=8)
def in_order(name: str, replicas: int) -> list[Trained]:
    """The bits of the published order, in float32."""
    architecture = architectures.BY_NAME[name]

    def step_of(model: nn.Module, parts: Sequence[Batch]) -> Any:
        def body(batch: Batch) -> Tensor:
            loss = architecture.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        done = replay.gradients(model, body, [(part,) for part in parts])
        return done.results, done.gradients

    return _references(architecture, replicas, torch.float32, step_of)


@functools.lru_cache(maxsize=16)
def plain(name: str, replicas: int, dtype: torch.dtype) -> list[Trained]:
    """A plain loop over the microbatches, whose gradients autograd adds up."""
    architecture = architectures.BY_NAME[name]

    def step_of(model: nn.Module, parts: Sequence[Batch]) -> Any:
        model.zero_grad()
        losses = []
        for part in parts:
            losses.append(architecture.loss(model, part))
            losses[-1].backward()  # type: ignore[no-untyped-call]
        gradients = {name: each.grad for name, each in model.named_parameters()}
        return [loss.detach() for loss in losses], gradients

    return _references(architecture, replicas, dtype, step_of)


# ---- Comparison -----------------------------------------------------------------------------------


def _values(trained: Trained, step: int) -> dict[str, State]:
    """The tensors of a step by kind and name; the buffers are compared after the last step."""
    found = {
        "loss": {"of the microbatches": trained.losses[step]},
        "gradient": trained.gradients[step],
    }
    if step == STEPS - 1:
        found["buffer"] = trained.buffers
    return found


def different(ours: Trained, expected: Trained) -> str:
    """The first difference in bits, or in which gradients are missing; empty if there is none."""
    for step in range(STEPS):
        if ours.missing[step] != expected.missing[step]:
            odd = sorted(ours.missing[step] ^ expected.missing[step])
            return f"step {step}: {odd[0]} has a gradient in one of both alone ({len(odd)} such)"
        for kind, wanted in _values(expected, step).items():
            got = _values(ours, step)[kind]
            if got.keys() & wanted.keys() != wanted.keys():
                return f"step {step}: there is no {kind} {min(wanted.keys() - got.keys())}"
            for name, value in wanted.items():
                if not torch.equal(got[name], value):
                    return f"step {step}: {kind} {name} differs in bits from the published order"
    return ""


def beyond(ours: Trained, coarse: Trained, truth: Trained) -> str:
    """The first value whose error is too great by the ratio rule; empty if there is none."""
    for step in range(STEPS):
        for kind, wanted in _values(truth, step).items():
            got, rough = _values(ours, step)[kind], _values(coarse, step)[kind]
            if got.keys() & wanted.keys() != wanted.keys():
                return f"step {step}: there is no {kind} {min(wanted.keys() - got.keys())}"
            real = {name: each for name, each in wanted.items() if each.is_floating_point()}
            largest = max(
                (float(each.abs().max()) for each in real.values() if each.numel()), default=0.0
            )
            for name, value in wanted.items():
                if name not in real:
                    if not torch.equal(got[name], value):
                        return f"step {step}: {kind} {name} is another"
                    continue
                bound = 4 * max(
                    _error(rough[name], value), torch.finfo(torch.float32).eps * largest
                )
                if not _error(got[name], value) <= bound:  # also if one is NaN
                    error = _error(got[name], value)
                    return f"step {step}: {kind} {name} is off by {error:.3g}, and {bound:.3g} is the bound"
    return ""


def _error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth.double()).abs().max()) if truth.numel() else 0.0


def judged(architecture: Architecture, layout: Layout, ranks: Sequence[Trained]) -> tuple[str, str]:
    """The result of a cell whose ranks have trained, and what is wrong."""
    promised = not ranks[0].distributed
    given = architecture.name, layout.replicas
    bits = ""
    for rank, ours in enumerate(ranks):
        replica = ours.replica
        truth, coarse = (plain(*given, dtype)[replica] for dtype in (torch.float64, torch.float32))
        wrong = beyond(ours, coarse, truth)
        bits = bits or different(ours, in_order(*given)[replica])
        if promised:
            wrong = wrong or bits
        if wrong:
            return "FAILED", f"rank {rank}, {wrong}"
    return ("bound", "") if bits else ("bits", "")


# ---- One cell -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Arguments:
    names: tuple[str, str]

    def __call__(self, rank: int) -> tuple[tuple[str, str], dict[str, Any]]:
        return self.names, {}


def cell(
    executor: Executor,
    architecture: Architecture,
    layout: Layout,
    limit: float,
    body: Callable[[str, str], Trained] = train,
) -> Cell:
    """Train and compare; ``limit`` is the time of the training in seconds."""
    logging.getLogger("smp_core").setLevel(logging.ERROR)
    names = architecture.name, layout.name
    job = Job(body=body, arguments=_Arguments(names), timeout=limit, capture=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = executor.open(RANKS).run(job)
        if report.verdict is not VerdictKind.PASSED:
            expected = layout.name in architecture.refused
            refused = expected and (
                report.verdict in VERDICTS or isinstance(report.error, REFUSALS)
            )
            told = f"{type(report.error).__name__}: {report.error}"
            return Cell(*names, "refused" if refused else "FAILED", told)
        result, detail = judged(architecture, layout, report.values)
    return Cell(*names, result, detail, report.values[0].distributed)
