"""The expected results of a training case with tensor parallelism and real values: the published order, in one process.

The ranks of a TP group are threads that run one at a time, each with its slices of the distributed layers. They change
places where a layer exchanges activations, and each change of layout is one line of plain torch (the table in
smp_core/torch/tensor_parallel/exchange.py). Sums over tp ranks are folded along the tree, 16-bit values in float32.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_smp import replay
from pytest_smp.compute_threads import one_compute_thread
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training_oracle import Grads, Results
from pytest_smp.strategies.training_script import borrowers
from pytest_smp.strategies.training_tensor import TensorTraining, splits
from smp_core import reduction
from smp_core.torch.execution import streams
from smp_core.torch.parameters.registration import REGISTERED

# ---- The ranks of a TP group -------------------------------------------------------------------------------------


class _Lockstep:
    """Threads that run one at a time, in turns: each runs until it exchanges a value with all others, or ends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn, self._failed = 0, False
        self._changed = threading.Condition()
        self._rounds: list[list[Any]] = []
        self._done = [0] * size  # rounds, by thread

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """The values of ``body(number)`` in each thread. Raises what the first failing one raises."""
        values: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def run(number: int) -> None:
            try:
                self._wait(number)
                values[number] = body(number)
            except BaseException as error:  # of any type: raised below
                errors.append(error)
                self._failed = True
            self._hand_on(number)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(self.size)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]
        return values

    def all_gather(self, number: int, value: Tensor) -> list[Tensor]:
        """The values of all threads, in their order; all call."""
        at = self._done[number]
        self._done[number] += 1
        if at == len(self._rounds):
            self._rounds.append([None] * self.size)
        self._rounds[at][number] = value.detach()
        random = torch.get_rng_state()  # torch has one generator for all threads
        self._hand_on(number)
        self._wait(number)
        torch.set_rng_state(random)
        return list(self._rounds[at])

    def _hand_on(self, number: int) -> None:
        with self._changed:
            self._turn = (number + 1) % self.size
            self._changed.notify_all()

    def _wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == number or self._failed)
        if self._failed:
            raise RuntimeError("another rank of the TP group failed")


class _Rank:
    """One rank of a TP group."""

    def __init__(self, case: TensorTraining, group: _Lockstep, number: int) -> None:
        self.number, self.size, self.prescaled = number, case.tensor, case.prescaled
        self._group = group

    def slice_channels(self, x: Tensor) -> Tensor:
        """Local to sliced."""
        given = [x] if self.prescaled else self._gather(x)
        return torch.cat([each.chunk(self.size, -1)[self.number] for each in given])

    def merge_channels(self, x: Tensor) -> Tensor:
        """Sliced to local."""
        return torch.cat([self._own(each) for each in self._gather(x)], -1)

    def sum_batch(self, x: Tensor) -> Tensor:
        """Partial to local."""
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = [self._own(each).to(wide) for each in self._gather(x)]
        return reduction.fold(parts, torch.add).to(x.dtype)

    def gather_batch(self, x: Tensor) -> Tensor:
        """Local to full."""
        return x if self.prescaled else torch.cat(self._gather(x))

    def _gather(self, x: Tensor) -> list[Tensor]:
        return self._group.all_gather(self.number, x.contiguous())

    def _own(self, x: Tensor) -> Tensor:
        """This rank's samples."""
        return x if self.prescaled else x.chunk(self.size)[self.number]


#: One change of layout.
_Change = Callable[[Tensor], Tensor]


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Change, back: _Change) -> Tensor:
        ctx.back = back
        made = there(x)
        return made.clone() if made is x else made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient), None, None


def _changed(x: Tensor, there: _Change, back: _Change) -> Tensor:
    made: Tensor = _Changed.apply(x, there, back)  # type: ignore[no-untyped-call]
    return made


class _Linear(nn.Module):
    """A linear layer with the input channels of one rank."""

    def __init__(self, plain: nn.Linear, rank: _Rank) -> None:
        super().__init__()
        self.weight = _slice(plain.weight, 1, rank)
        self.bias = plain.bias
        self._rank = rank

    def forward(self, x: Tensor) -> Tensor:
        rank = self._rank
        sliced = _changed(x, rank.slice_channels, rank.merge_channels)
        partial = functional.linear(sliced, self.weight)
        out = _changed(partial, rank.sum_batch, rank.gather_batch)
        return out if self.bias is None else out + self.bias


class _Embedding(nn.Module):
    """An embedding with the dimensions of one rank."""

    def __init__(self, plain: nn.Embedding, rank: _Rank) -> None:
        super().__init__()
        self.weight = _slice(plain.weight, 1, rank)
        self._rank = rank

    def forward(self, ids: Tensor) -> Tensor:
        rank = self._rank
        found = functional.embedding(rank.gather_batch(ids), self.weight)
        return _changed(found, rank.merge_channels, rank.slice_channels)


#: The layer of one rank, by the plain layer's class; a further one is an entry here.
_LAYERS: dict[type[nn.Module], Callable[[Any, _Rank], nn.Module]] = {
    nn.Linear: _Linear,
    nn.Embedding: _Embedding,
}


def _slice(weight: Tensor, axis: int, rank: _Rank) -> nn.Parameter:
    own = weight.detach().chunk(rank.size, axis)[rank.number].clone()
    return nn.Parameter(own, weight.requires_grad)


def register(module: nn.Module) -> None:
    """Note for each module that uses another one's weight that it does (``smp.register_parameter``)."""
    for borrower in borrowers(module):
        vars(borrower)[REGISTERED] = [borrower.borrowed]


# ---- Training ----------------------------------------------------------------------------------------------------


@one_compute_thread()
def replayed(case: TensorTraining) -> Results:
    """Train in one process; activations and gradients in the published order."""
    reference = oracle.Reference(case)
    found, axes = reference.found, splits(case)
    seeds = []
    for replica in range(case.dp):
        oracle.seed(case, replica)
        seeds.append([streams.draw_seed() for _ in range(case.steps)])

    def train(rank: _Rank, replica: int, steps: range) -> tuple[list[Grads], list[list[Any]]]:
        """The gradients of each step on one rank, with losses and outputs."""
        module = _module(case, reference.module, rank, axes)

        def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            loss, out = reference.forward(x, y, module)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach(), out.detach()

        done = [
            replay.gradients(
                module,
                body,
                list(oracle.microbatches(case, replica, step)),
                seed=seeds[replica][step],
                wide=True,
            )
            for step in steps
        ]
        return [each.gradients for each in done], [each.results for each in done]

    for window in range(case.windows):
        steps = range(window * case.passes, (window + 1) * case.passes)
        ranks: dict[tuple[int, int], list[Grads]] = {}
        for at in range(case.rdp):
            group = _Lockstep(case.tensor)

            def run(
                number: int, at: int = at, group: _Lockstep = group, steps: range = steps
            ) -> Any:
                return train(_Rank(case, group, number), _replica(case, at, number), steps)

            for number, (gradients, results) in enumerate(group.run(run)):
                ranks[at, number] = gradients
                replica = _replica(case, at, number)
                if number == 0 or not case.prescaled:
                    found.losses[replica] += [[loss for loss, _ in step] for step in results]
                    found.outputs[replica] += [[out for _, out in step] for step in results]
        reduced = _reduced(case, ranks, axes)
        reference.end_window(window, reduced, lambda gradients: _norm(case, gradients, axes))
    return reference.end()


def _module(
    case: TensorTraining, whole: nn.Module, rank: _Rank, axes: Mapping[str, int]
) -> nn.Module:
    """The module of one rank of a TP group, with the weights of the whole one."""
    module = oracle.make(case).to(next(whole.parameters()).dtype)
    module.load_state_dict(whole.state_dict())
    for path in {name.rpartition(".")[0] for name in axes}:
        plain = module.get_submodule(path)
        module.set_submodule(path, _LAYERS[type(plain)](plain, rank))
    if case.registered:
        register(module)
    return module


def _replica(case: TensorTraining, at: int, number: int) -> int:
    """The replica whose data tp rank ``number`` of TP group ``at`` gets: the TP group, or its dp rank (API 4.2)."""
    if case.prescaled:
        return at
    return number * case.rdp + at if case.placement == "spread" else at * case.tensor + number


def _reduced(
    case: TensorTraining, ranks: Mapping[tuple[int, int], Sequence[Grads]], axes: Mapping[str, int]
) -> dict[str, Tensor | None]:
    """The gradients of the whole model: those of slices over RDP groups, the others over the DP group.

    With sharding the others are also reduced over RDP groups, because all tp ranks have the same.
    """
    of_slices = [
        replay.reduce_sharded(
            [ranks[at, number] for at in range(case.rdp)], case.sharding, case.divisor
        )
        for number in range(case.tensor)
    ]
    everyone = sorted(ranks, key=lambda each: each[::-1] if case.placement == "spread" else each)
    reduced = dict(of_slices[0])
    if case.sharding == 1:
        reduced = replay.reduce_sharded(
            [ranks[each] for each in everyone], 1, case.divisor * case.copies
        )
    for name, axis in axes.items():
        given = [each for slices in of_slices if (each := slices[name]) is not None]
        reduced[name] = torch.cat(given, axis) if given else None
    return reduced


def _norm(case: TensorTraining, gradients: Grads, axes: Mapping[str, int]) -> float:
    """The norm that clipping goes by: squares of slices are added up over the TP group, and then to the others."""
    whole = {name: each for name, each in gradients.items() if name not in axes}
    slices = []
    for number in range(case.tensor):
        own = {
            name: None if each is None else each.chunk(case.tensor, axes[name])[number]
            for name, each in gradients.items()
            if name in axes
        }
        slices.append(replay.squares(own, case.sharding))
    return math.sqrt(
        replay.squares(whole, case.sharding) + reduction.fold(slices, lambda a, b: a + b)
    )
