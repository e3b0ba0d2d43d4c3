"""The expected result of a step, in plain PyTorch on one rank: a loop over microbatches that sums
gradients in the published order.

The module is a plain ``nn.Module`` that holds all parameters; no engine, schedule or other rank takes
part. Its calls have the identity nodes, uses and random streams of the engine (uses.py, streams.py in
smp_core/torch/execution), because those are the published order within a microbatch. The folds are
written out again here, so that the engine's are checked, and not used::

    expected = replay.gradients(module, body, [(x[:4],), (x[4:],)], seed=7)
    expected.gradients["fc.weight"]       # None where there is no gradient

``body(*args)`` calls the module, and ``backward()`` of what it computes, as a step function does.
On the lattice, and wherever no call uses a parameter or an input twice, plain PyTorch without any of
this gives the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pytest_smp.compute_threads import one_compute_thread
from smp_core import reduction
from smp_core.torch.execution import uses


@dataclasses.dataclass(slots=True)
class Replayed:
    """The results and gradients of a replayed step.

    Attributes:
        results: the values that the body returned, by microbatch.
        gradients: the gradient of each parameter by its name in ``named_parameters``; a shared parameter
            has its first name, and a parameter without a gradient has None.
    """

    results: list[Any]
    gradients: dict[str, torch.Tensor | None]


@one_compute_thread()
def gradients(
    module: nn.Module,
    body: Callable[..., Any],
    microbatches: Sequence[Sequence[Any]],
    *,
    seed: int = 0,
    divisor: int = 1,
    wide: bool = False,
) -> Replayed:
    """Run ``body(*arguments)`` for each microbatch, in order; ``p.grad`` is left alone.

    ``seed`` is that of the step (``streams.draw_seed``), ``divisor`` what the sums are divided by in
    the end: the number of microbatches, if gradients are averaged over them (API 1.7). ``wide``:
    16-bit gradients are summed in float32, as they are where there are masters.
    """
    sums: list[dict[nn.Parameter, torch.Tensor]] = []
    results = []
    with patched(module):
        for number, arguments in enumerate(microbatches):
            sums.append({})
            with uses.body(_Sums(sums, wide), number, seed):
                results.append(body(*arguments))
    named = dict(module.named_parameters())
    return Replayed(
        results, {name: _divide(_left_fold(sums, p), divisor) for name, p in named.items()}
    )


def reduce(
    replicas: Sequence[Mapping[str, torch.Tensor | None]], divisor: int
) -> dict[str, torch.Tensor | None]:
    """The gradients after the reduction over replicas, each given undivided, in the order of dp ranks.

    A replica without a gradient counts as zeros, unless none has one. 16-bit gradients are folded and
    divided in float32. With steps of accumulation, give each replica's sum (:func:`accumulate`).
    """
    reduced: dict[str, torch.Tensor | None] = {}
    for name in replicas[0]:
        given = [replica[name] for replica in replicas]
        like = next((gradient for gradient in given if gradient is not None), None)
        if like is None:
            reduced[name] = None
            continue
        wide = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
        filled = [torch.zeros_like(like) if one is None else one for one in given]
        total = reduction.fold([one.to(wide) for one in filled], torch.add)
        if total.is_complex():  # part by part: torch's complex division rounds from shape to shape
            reduced[name] = torch.view_as_complex(torch.view_as_real(total) / divisor)
        else:
            reduced[name] = (total / divisor).to(like.dtype)
    return reduced


def accumulate(
    steps: Sequence[Mapping[str, torch.Tensor | None]],
) -> dict[str, torch.Tensor | None]:
    """The sum over steps of accumulation (``backward_passes_per_step``), in order, undivided."""
    total = dict(steps[0])
    for step in steps[1:]:
        for name, gradient in step.items():
            known = total[name]
            if gradient is not None:
                total[name] = gradient if known is None else known + gradient
    return total


def reduce_sharded(
    ranks: Sequence[Sequence[Mapping[str, torch.Tensor | None]]], sharding: int, divisor: int
) -> dict[str, torch.Tensor | None]:
    """The gradients of a window under sharded data parallelism: ``ranks[rank][step]`` are undivided.

    Each step is folded over the ranks of each shard group, the folds are summed over the steps, in
    order, these sums are folded over the groups, and the result is divided once; all of it in float32 at
    least. Groups are consecutive blocks of ``sharding`` ranks (API 4.3). A missing gradient counts as
    zeros; the result is None if every rank misses it in every step. With ``sharding=1`` the result is
    that of :func:`accumulate`, then :func:`reduce`.
    """
    reduced: dict[str, torch.Tensor | None] = {}
    for name in ranks[0][0]:
        given = [[step[name] for step in steps] for steps in ranks]
        like = next((one for steps in given for one in steps if one is not None), None)
        if like is None:
            reduced[name] = None
            continue
        wide = torch.promote_types(like.dtype, torch.float32)
        zeros = torch.zeros_like(like, dtype=wide)
        filled = [[zeros if one is None else one.to(wide) for one in steps] for steps in given]
        blocks = []
        for start in range(0, len(filled), sharding):
            block = filled[start : start + sharding]
            total, *more = (reduction.fold(step, torch.add) for step in zip(*block, strict=True))
            for step in more:
                total = total + step
            blocks.append(total)
        reduced[name] = reduction.fold(blocks, torch.add) / divisor
    return reduced


def norm(gradients: Mapping[str, torch.Tensor | None], sharding: int) -> float:
    """The L2 norm that clipping under sharded data parallelism goes by (ENGINES 1.7)."""
    return math.sqrt(squares(gradients, sharding))


def squares(gradients: Mapping[str, torch.Tensor | None], sharding: int) -> float:
    """The sum of the squares of all elements, as sharded data parallelism takes it.

    Each rank of a shard group squares the elements of its own part of each gradient, in float64, and
    adds these sums up in the order of registration; they are folded over the ranks of the group.
    """
    ranks = []
    for rank in range(sharding):
        total = torch.zeros((), dtype=torch.float64)
        for gradient in gradients.values():
            if gradient is not None:
                part = -(-gradient.numel() // sharding)
                own = gradient.reshape(-1)[rank * part : (rank + 1) * part]
                total = total + own.double().square().sum()
        ranks.append(total)
    return float(reduction.fold(ranks, torch.add))


class _Sums:
    """Takes gradients as backward gives them: the sum within each microbatch."""

    def __init__(self, sums: list[dict[nn.Parameter, torch.Tensor]], wide: bool) -> None:
        self._sums, self._wide = sums, wide

    def expect(self, microbatch: int, parameter: nn.Parameter) -> None:
        """Do nothing: gradients are summed when they come."""

    def add(self, microbatch: int, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if self._wide and gradient.dtype in (torch.float16, torch.bfloat16):
            gradient = gradient.float()
        known = self._sums[microbatch].get(parameter)
        self._sums[microbatch][parameter] = gradient if known is None else known + gradient


def _left_fold(
    sums: Sequence[Mapping[nn.Parameter, torch.Tensor]], parameter: nn.Parameter
) -> torch.Tensor | None:
    total = None
    for microbatch in sums:
        gradient = microbatch.get(parameter)
        if gradient is None:
            continue
        for hook in (parameter._backward_hooks or {}).values():
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        total = gradient if total is None else total + gradient
    return total


def _divide(gradient: torch.Tensor | None, divisor: int) -> torch.Tensor | None:
    return gradient if gradient is None or divisor == 1 else gradient / divisor


@contextlib.contextmanager
def patched(module: nn.Module) -> Iterator[None]:
    """While entered, the calls of all modules of the tree, also of ``module.forward`` directly, are
    calls of the microbatch that the thread works for (``uses.body``); outside of one they are plain.

    Raises RuntimeError if the tree is patched already, or compiled.
    """
    watch = uses.Watch(module)
    entering: list[nn.Module] = []  # modules whose call is about to reach their forward
    try:
        for path, child in module.named_modules():
            if getattr(child, "_compiled_call_impl", None) is not None or "forward" in vars(child):
                raise RuntimeError(f"module {path!r} is patched or compiled already")
        for path, child in module.named_modules():
            # The attribute in which torch keeps a compiled module's call, and which __call__ looks up.
            child.__dict__["_compiled_call_impl"] = _call(path, child, entering)
            child.__dict__["forward"] = _forward(path, child, entering)
        yield
    finally:
        for child in module.modules():
            vars(child).pop("_compiled_call_impl", None)
            vars(child).pop("forward", None)
        watch.remove()


def _call(path: str, module: nn.Module, entering: list[nn.Module]) -> Callable[..., Any]:
    def with_hooks(*args: Any, **kwargs: Any) -> Any:
        depth = len(entering)
        entering.append(module)
        try:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            del entering[depth:]

    def call(*args: Any, **kwargs: Any) -> Any:
        if uses.current_microbatch() is None:
            return with_hooks(*args, **kwargs)
        return uses.run(uses.next_key(path), module, with_hooks, args, kwargs)

    return call


def _forward(path: str, module: nn.Module, entering: list[nn.Module]) -> Callable[..., Any]:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if entering and entering[-1] is module:
            entering[-1] = _NOTHING
            return original(*args, **kwargs)
        if uses.current_microbatch() is None:
            return original(*args, **kwargs)
        return uses.run(uses.next_key(path), module, original, args, kwargs)

    return forward


_NOTHING = nn.Module()
