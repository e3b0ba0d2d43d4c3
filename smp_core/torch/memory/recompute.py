"""A function whose activations are not kept: backward runs it again where it needs them.

torch's own `checkpoint(use_reentrant=False)` works in the same way, and imports torch's compiler for that,
which takes seconds and memory on each rank. Torch's also stops a repetition by an exception as soon as it
has the tensors that it needs, in the middle of module calls that count on coming back. Here a repetition runs to
its end.

How. The tensors that autograd would keep of the function are replaced by empty holders, numbered in the order of
saving. The first holder that backward opens has the function run again, and each tensor that is saved then goes
into the holder of its number. The graph of the repetition is thrown away: nothing runs backwards through it, so
nothing is counted twice. The inputs are kept as autograd keeps tensors, so that a region in a region
keeps its inputs as the outer one says, and an input that is modified in place is noticed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from smp_core.torch import tensor_tree
from smp_core.torch.execution import saving

Tensor = torch.Tensor


def run(
    name: str,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    again: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    preserve_rng_state: bool = True,
) -> object:
    """``function(*args, **kwargs)``, keeping its inputs and none of its activations for backward.

    The repetition runs under ``again()``, with the autocast of the first time, and, if
    ``preserve_rng_state``, with torch's default generator where it was. Raises RuntimeError in
    backward, naming ``name``, if an input was modified in place, or the repetition saves other
    tensors than the first time. Where no gradient is recorded, it is the plain call.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    tensors, rest = tensor_tree.flatten(_copied((args, kwargs)))
    region = _Region(name, function, _Inputs(tensors), rest, again, preserve_rng_state)
    with torch.autograd.graph.saved_tensors_hooks(region.pack, _open):
        outputs = function(*args, **kwargs)
    region.complete = True
    return outputs


def _copied(tree: Any) -> Any:
    """The tree with containers of its own, so that the repetition does not find objects that the call put into one."""
    kind = type(tree)
    if kind is dict:
        return {key: _copied(value) for key, value in tree.items()}
    if kind in (list, tuple):
        return kind(_copied(value) for value in tree)
    return set(tree) if kind is set else tree


class _Holder:
    """The place of a tensor that autograd saved."""

    __slots__ = ("__weakref__", "number", "region", "value")

    def __init__(self, region: _Region, number: int) -> None:
        self.region, self.number = region, number
        self.value: saving.Kept | None = None


class _Region:
    """One call whose activations are not kept. Lives as long as one of its holders."""

    def __init__(
        self,
        name: str,
        function: Callable[..., object],
        inputs: _Inputs,
        rest: object,
        again: Callable[[], AbstractContextManager[None]],
        preserve_rng_state: bool,
    ) -> None:
        self._name, self._function, self._inputs, self._rest = name, function, inputs, rest
        self._again = again
        self._generator = torch.default_generator.get_state() if preserve_rng_state else None
        self._autocast = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )
        # A holder that nobody holds any more needs no value.
        self._holders: list[tuple[weakref.ref[_Holder], tuple[object, ...]]] = []
        self.complete = False

    def pack(self, tensor: Tensor) -> _Holder:
        holder = _Holder(self, len(self._holders))
        self._holders.append((weakref.ref(holder), _kind(tensor)))
        return holder

    def repeat(self) -> None:
        """Run the function again, and fill the holders."""
        args, kwargs = tensor_tree.unflatten(self._inputs.open(self._name), _copied(self._rest))
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            number, count = count, count + 1
            tensor = tensor.detach()  # of an output its own node would hold itself for ever
            if number < len(self._holders):
                reference, kind = self._holders[number]
                if kind != _kind(tensor):
                    raise RuntimeError(self._other(number, f"{kind}, then {_kind(tensor)}"))
                holder = reference()
                if holder is not None:
                    holder.value = saving.keep(tensor)
            return tensor

        enabled, dtype, cache = self._autocast
        with (
            torch.enable_grad(),
            _generator_at(self._generator),
            torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache),
            self._again(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            self._function(*args, **kwargs)
        if self.complete and count != len(self._holders):
            raise RuntimeError(self._other(min(count, len(self._holders)), f"{count} in all"))

    def _other(self, number: int, what: str) -> str:
        return (
            f"activation checkpointing: {self._name} is not repeatable: of {len(self._holders)} tensors that "
            f"its forward pass saved, number {number} was another one when it was repeated ({what}). Its forward must "
            "depend on its inputs, parameters, buffers and torch's random numbers only"
        )


def _open(holder: _Holder) -> Tensor:
    if holder.value is None:
        holder.region.repeat()
    if holder.value is None:
        raise RuntimeError(holder.region._other(holder.number, "none"))
    return saving.opened(holder.value)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype


class _Inputs:
    """Tensors, kept as autograd keeps a node's saved tensors."""

    __slots__ = ("_node",)

    def __init__(self, tensors: list[Tensor]) -> None:
        anchor = torch.empty(0, requires_grad=True)
        self._node: Any = _Keep.apply(anchor, *tensors).grad_fn  # type: ignore[no-untyped-call]

    def open(self, name: str) -> tuple[Tensor, ...]:
        try:
            tensors: tuple[Tensor, ...] = self._node.saved_tensors
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise RuntimeError(
                f"activation checkpointing: an input of {name} was modified in place after the call began, so "
                "that the call cannot be repeated. Modify a copy, or do not checkpoint this module"
            ) from error
        return tensors


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> object:
        raise AssertionError("nothing runs backwards through what only keeps tensors")


@contextlib.contextmanager
def _generator_at(state: Tensor | None) -> Iterator[None]:
    before = torch.default_generator.get_state()
    if state is not None:
        torch.default_generator.set_state(state)
    try:
        yield
    finally:
        # Without a state, too: the numbers that a repetition draws must not change those of the code after it.
        torch.default_generator.set_state(before)


class Buffers:
    """The buffers of a module tree as a call found them, for its repetition; and which modules were in
    training mode: a step that evaluates before its backward pass may have changed that.

    A call may change them (batch normalisation its statistics), and other microbatches' calls do so
    before it is repeated. The repetition works on copies of the values that it found the first time; the buffers
    themselves are not touched, nor changed twice. Calls that find the same values share one copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modes = [(child, child.training) for child in module.modules()]
        self._found = [
            (child, name, _copy(child, name, buffer))
            for child in module.modules()
            for name, buffer in child._buffers.items()
            if buffer is not None
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """While entered, the modules have copies of their former buffers, and their former modes."""
        modes = [(child, child.training) for child, _ in self._modes]
        _set_modes(self._modes)
        now = [(child, name, child._buffers.get(name)) for child, name, _ in self._found]
        for child, name, value in self._found:
            child._buffers[name] = value.clone()
        try:
            yield
        finally:
            _set_modes(modes)
            for child, name, buffer in now:
                child._buffers[name] = buffer


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for child, training in modes:
        if child.training != training:
            child.training = training


#: By module and name the last copy of a buffer, for as long as a region needs it.
_copies: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.ref[Tensor]]] = (
    weakref.WeakKeyDictionary()
)


def _copy(module: nn.Module, name: str, buffer: Tensor) -> Tensor:
    copies = _copies.setdefault(module, {})
    last: Tensor | None = copies[name]() if name in copies else None
    if (
        last is None
        or last.shape != buffer.shape
        or last.dtype != buffer.dtype
        or not torch.equal(last, buffer)
    ):
        last = buffer.detach().clone()
        copies[name] = weakref.ref(last)
    return last
