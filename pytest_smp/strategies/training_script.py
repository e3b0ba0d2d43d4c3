"""A training case as a script of the SMP API, on one rank; and what its ranks saw, against the oracle.

``api`` is a namespace that a script would import as ``smp``: ours, or anybody's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import Training, owners
from pytest_smp.strategies.training_models import Borrower
from pytest_smp.strategies.training_oracle import Results
from pytest_smp.strategies.training_sharding import ShardedTraining
from pytest_smp.strategies.training_tensor import TensorTraining, splits

Batch = tuple[Tensor, Tensor]


class Trained(Protocol):
    """The object that trains a case on one rank (``conformance.engines.protocol.Session``)."""

    def backward(self, batch: Batch, *, boundary: bool) -> tuple[list[Tensor], list[Tensor]]: ...
    def gradients(self) -> dict[str, Tensor | None]: ...
    def parameters(self) -> dict[str, Tensor]: ...
    def zero_grad(self) -> None: ...
    def step(self) -> None: ...
    def close(self) -> None: ...


@dataclasses.dataclass
class Seen:
    """The results that one rank saw of a run: those of its own replica, in the form of :class:`Results`.

    ``gradients`` and ``parameters`` are those that the rank holds.
    """

    replica: int
    losses: list[list[Tensor]] = dataclasses.field(default_factory=list)
    outputs: list[list[Tensor]] = dataclasses.field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = dataclasses.field(default_factory=list)
    parameters: dict[str, Tensor] = dataclasses.field(default_factory=dict)


class Script:
    """A session of the SMP API: ``smp.DistributedModel``, ``smp.DistributedOptimizer``, ``smp.step``.

    Args:
        api: the namespace.
        case: what to train.
        salt: other weights than the case's, on this rank.
        optimizer: makes the optimizer of the model's parameters; the case's if not given.
    """

    def __init__(
        self, api: Any, case: Training, *, salt: str = "", optimizer: Any = None, model: Any = None
    ) -> None:
        self.api, self.case = api, case
        self.module = oracle.make(case, salt=salt) if model is None else model
        self._shapes = {n: each.shape for n, each in oracle.parameters(self.module).items()}
        #: The axis of each parameter that is split over the TP group.
        self._splits = splits(case) if isinstance(case, TensorTraining) else {}
        for path in case.distributed if isinstance(case, TensorTraining) else ():
            api.set_tensor_parallelism(self.module.get_submodule(path))
        self.model = api.DistributedModel(
            self.module,
            overlapping_allreduce=case.overlapping,
            backward_passes_per_step=case.passes,
            average_grads_across_microbatches=case.average,
            bucket_cap_mb=case.bucket,
        )
        if self._splits:  # distributed layers have new weights
            weights = (
                self.module.state_dict() if model is not None else oracle.state(case, salt=salt)
            )
            self.model.load_state_dict(weights)
        if case.pp > 1 and case.partition is not None:
            places = owners(case)
            modules = [(self.module.get_submodule(path), places[path]) for path in places]
            # The last call counts. A module in two places is below two others: its own call comes after theirs.
            for each, owner in sorted(modules, key=lambda pair: -len(list(pair[0].modules()))):
                api.set_partition(each, owner)
        if isinstance(case, ShardedTraining):
            for borrower in borrowers(self.module) if case.registered else ():
                api.register_parameter(borrower, borrower.borrowed)
        for layer in _layers(self.module) if case.checkpointing else ():
            api.set_activation_checkpointing(layer)
        make = optimizer or (lambda given: oracle.optimizer_of(case, given))
        self.optimizer = api.DistributedOptimizer(make(self.model.parameters()))
        axes = dict(zip(("x", "y"), case.axes, strict=True))
        how = {"input_split_axes": axes} if any(case.axes) else {}

        def body(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = model(x)
            loss = oracle.loss_of(case, out, y)
            model.backward(loss)
            return loss, out

        self._step = api.step(**how)(body)

    def backward(self, batch: Batch, *, boundary: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """Run one step; return losses and outputs by microbatch. The library counts the passes by itself."""
        if self.case.dummies and self.api.pp_rank() > 0:
            batch = (torch.zeros(batch[0].shape[0], 0), torch.zeros(batch[1].shape[0], 0))
        loss, out = self._step(self.model, *batch)
        return list(loss.outputs), list(out.outputs)

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients of the parameters that this rank holds, unsharded where it has a shard."""
        own = {
            name: None if each.grad is None else each.grad.detach().clone()
            for name, each in self.trained().items()
        }
        case = self.case
        if not isinstance(case, ShardedTraining) or case.sharding == 1:
            return self._merged(own)
        everyone = self.api.allgather(own, self.api.CommGroup.RDP_GROUP)
        first = self.api.rdp_rank() // case.sharding * case.sharding
        block = everyone[first : first + case.sharding]
        return self._merged(
            {
                name: whole([each[name] for each in block], self._shape(name))
                if case.splits(self._shape(name).numel())
                else gradient
                for name, gradient in own.items()
            }
        )

    def parameters(self) -> dict[str, Tensor]:
        """The parameters that this rank holds, unsharded, and whole where tp ranks have slices."""
        if isinstance(self.case, ShardedTraining) and self.case.sharding > 1:
            held = self.model.state_dict()
            return {name: held[name].detach().clone() for name, _ in self._local()}
        own: dict[str, Tensor | None] = {n: p.detach().clone() for n, p in self._local()}
        return {name: each for name, each in self._merged(own).items() if each is not None}

    def _shape(self, name: str) -> torch.Size:
        """The shape of a parameter on this rank, unsharded."""
        size = list(self._shapes[name])
        if name in self._splits:
            size[self._splits[name]] //= self.api.tp_size()
        return torch.Size(size)

    def _merged(self, own: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The tensors by name, with whole ones in place of slices; all ranks of the TP group call this."""
        if not self._splits:
            return own
        slices = {name: own[name] for name in own if name in self._splits}
        everyone = self.api.allgather(slices, self.api.CommGroup.TP_GROUP)
        for name in slices:
            parts = [each[name] for each in everyone]
            given = [each for each in parts if each is not None]
            _expect(len(given) in (0, len(parts)), f"{name}: a gradient on {len(given)} tp ranks")
            own[name] = torch.cat(given, dim=self._splits[name]) if given else None
        return own

    def trained(self) -> dict[str, Tensor]:
        """The parameters that the optimizer works on, by name: float32 masters, where there are some."""
        if self.case.dtype == "float32":
            return dict(self._local())
        held, masters = (
            [each for group in groups for each in group]
            for groups in (self.optimizer.fp16_groups, self.optimizer.fp32_from_fp16_groups)
        )
        of = dict(zip(map(id, held), masters, strict=True))
        return {name: of.get(id(each), each) for name, each in self._local()}

    def _local(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (name.removeprefix("module."), each)
            for name, each in self.model.local_named_parameters()
        ]

    def zero_grad(self) -> None:
        """Reset the gradients; called before each window."""
        self.optimizer.zero_grad(set_to_none=self.case.set_to_none)

    def step(self) -> None:
        """The optimizer's, as scripts guard it (API 1.7)."""
        if list(self.model.local_parameters()):
            self.optimizer.step()

    def close(self) -> None:
        """A model lives as long as the world."""


def whole(parts: Sequence[Tensor | None], shape: torch.Size) -> Tensor | None:
    """The tensor of this shape whose elements the ranks of a shard group have in parts, flat."""
    given = [each for each in parts if each is not None]
    if len(given) != len(parts):
        _expect(not given, f"{len(given)} of {len(parts)} ranks of a shard group have a gradient")
        return None
    return torch.cat([each.reshape(-1) for each in given])[: shape.numel()].reshape(shape)


def borrowers(module: nn.Module) -> list[Any]:
    return [each for each in module.modules() if isinstance(each, Borrower)]


def _layers(module: Any) -> list[nn.Module]:
    """The parts of the body, each once."""
    body = module.body
    return list(dict.fromkeys(body)) if isinstance(body, nn.Sequential) else [body]


def train(session: Trained, case: Training, replica: int) -> Seen:
    """Run the whole case on one rank."""
    seen = Seen(replica)
    for window in range(case.windows):
        session.zero_grad()
        for number in range(case.passes):
            step = window * case.passes + number
            losses, outputs = session.backward(
                oracle.batch(case, replica, step), boundary=number == case.passes - 1
            )
            seen.losses.append(losses)
            seen.outputs.append(outputs)
        seen.gradients.append(session.gradients())
        if case.steps_after(window):
            session.step()
    seen.parameters = session.parameters()
    session.close()
    return seen


def run_script(case: Training, api: str = "smp_core.torch") -> Seen:
    """The case on one rank of a world of ``case.ranks``, initialised with ``case.config``."""
    import importlib

    smp = importlib.import_module(api)
    replica = replica_of(smp, case)
    script = Script(smp, case)
    oracle.seed(case, replica)
    return train(script, case, replica)


def replica_of(api: Any, case: Training) -> int:
    """The number of this rank's replica, by which data are divided (API 4.4)."""
    return int(api.rdp_rank() if case.copies > 1 else api.dp_rank())


# ---- Comparing -----------------------------------------------------------------------------------


def compare(
    expected: Results, ranks: Sequence[Seen], *, none: bool = False, what: str = "plain PyTorch"
) -> None:
    """Raise AssertionError unless all ranks saw what is expected, to the last bit.

    Every replica must hold every parameter, on one of its ranks at least. ``none``: a parameter that
    was never used must have no gradient; else zeros are as good.
    """
    for rank, seen in enumerate(ranks):
        at = f"rank {rank}, replica {seen.replica}"
        for name in ("losses", "outputs"):
            wants, gots = getattr(expected, name)[seen.replica], getattr(seen, name)
            _expect(len(gots) == len(wants), f"{at}: {len(gots)} steps, not {len(wants)}")
            for step, (want, got) in enumerate(zip(wants, gots, strict=True)):
                place = f"{at}: {name} of step {step}"
                _expect(len(got) == len(want), f"{place}: {len(got)} microbatches, not {len(want)}")
                for microbatch, (w, g) in enumerate(zip(want, got, strict=True)):
                    _same(w, g, f"{place}, microbatch {microbatch}", what)
        for window, (want_of, got_of) in enumerate(
            zip(expected.gradients, seen.gradients, strict=True)
        ):
            for name, grad in got_of.items():
                place = f"{at}: gradient of {name} after window {window}"
                _expect(name in want_of, f"{place}: there is no such parameter")
                _same_gradient(want_of[name], grad, place, what, none)
        for name, value in seen.parameters.items():
            _same(expected.parameters[name], value, f"{at}: parameter {name} at the end", what)
    for replica in range(len(expected.losses)):
        held = {name for seen in ranks if seen.replica == replica for name in seen.parameters}
        lost = sorted(set(expected.parameters) - held)
        _expect(not lost, f"replica {replica}: no rank holds {', '.join(lost)}")


def _same_gradient(
    want: Tensor | None, got: Tensor | None, place: str, what: str, none: bool
) -> None:
    if want is not None and got is not None:
        _same(want, got, place, what)
    elif want is not got:
        given = want if got is None else got
        assert given is not None
        if none or bool(given.any()):
            raise AssertionError(f"{place}: is {got}, {what} has {want}")


def _same(want: Tensor, got: Any, place: str, what: str) -> None:
    same = isinstance(got, Tensor) and (got.dtype, got.shape) == (want.dtype, want.shape)
    if same:  # values that overflow must do so on both sides
        same = bool(((got == want) | (got.isnan() & want.isnan())).all())
    if not same:  # the texts of the tensors take longer to make than all comparisons
        raise AssertionError(f"{place}: is {got}, {what} has {want}{_difference(want, got)}")


#: Units in the last place within which another order of operations is the likely cause.
_ORDER = 4


def _difference(want: Tensor, got: Any) -> str:
    """The difference of two tensors that may print alike: in units in the last place, and one element in full."""
    alike = isinstance(got, Tensor) and (got.dtype, got.shape) == (want.dtype, want.shape)
    if not alike or want.dtype not in _BITS or not bool((got.isfinite() & want.isfinite()).all()):
        return ""
    steps = (_position(got) - _position(want)).abs()
    most, other = int(steps.max()), int((steps > 0).sum())
    at = tuple(int(index) for index in (steps == most).nonzero()[0])
    units = "1 unit" if most == 1 else f"{most} units"
    text = (
        f"\n{other} of {steps.numel()} elements differ, by at most {units} in the last place"
        f"{f' at {list(at)}' if at else ''}: {got[at].item()!r}, not {want[at].item()!r}"
    )
    if most <= _ORDER:
        text += "\ndoes the engine divide before it adds? It is to add first, and to divide once"
    return text


_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def _position(values: Tensor) -> Tensor:
    """The position of each value among the numbers of its dtype, which ascends with the value."""
    bits = values.detach().contiguous().view(_BITS[values.dtype]).long()
    lowest = -(2 ** (8 * values.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def merged(ranks: Sequence[Seen], replicas: int) -> Results:
    """The results of all ranks as one, to compare one run with another."""
    first = {replica: next(s for s in ranks if s.replica == replica) for replica in range(replicas)}
    windows = len(ranks[0].gradients)
    return Results(
        losses=[first[replica].losses for replica in range(replicas)],
        outputs=[first[replica].outputs for replica in range(replicas)],
        gradients=[_joined([s.gradients[window] for s in ranks]) for window in range(windows)],
        parameters=_joined([s.parameters for s in ranks]),
    )


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in reversed(parts) for name, value in part.items()}
