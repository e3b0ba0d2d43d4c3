"""Per-call uses of parameters, by which gradient sums are grouped the same way on every partition.

A module call on another rank is a backward pass of its own. The gradients of its inputs, and of the parameters that it
uses, come out as one sum per call. Floating-point addition is not associative, so every call sums in this way, also a
call that stays on its rank:

* Tensor inputs of the call pass an identity node: a view, so that in-place modification works as in plain PyTorch. A
  tensor that is given twice stays one tensor, because modules compare inputs by ``is``.
* A parameter that is read during a call is a *use* there: a fresh leaf on the parameter's memory, one per call and
  parameter. The gradient of a use goes to the ledger of the microbatch and not to ``p.grad``.

The modules' dicts of parameters make uses on reading, for the innermost call of the reading thread. Every reader
therefore gets uses: ``self.weight``, a ``ParameterList``, a parametrization, another module (``self.embedding.weight``;
``nn.MultiheadAttention`` reads its child's weight), a module that calls itself. A use is a ``Parameter`` to
``isinstance``, shares memory and version counter with its parameter (in-place changes under ``no_grad`` arrive), and
has the parameter's attributes. RNNs keep their weights in a list, which is replaced during their calls.

A read past the dicts, such as of a parameter in a closure or in the body of the step, is caught by a hook on the
parameter itself. Its gradient counts once per backward pass, after the uses, and hooks of the user's on the parameter
see it by itself. Without recording of gradients, none of this happens.

The engine calls this module in the thread that runs the body or serves a request::

    watch = uses.Watch(module)                         # after placement
    with uses.body(ledger, microbatch, seed):          # the body of a microbatch
    with uses.activity(ledger, microbatch, seed):      # a served call, or its backward pass
        key = uses.next_key("layers.0")                # on the caller; travels with a request
        output = uses.run(key, module, forward, args, kwargs)   # on the owner

``uses.run`` enters the random stream of the call (streams.py), makes the identity nodes and calls
``forward(*args, **kwargs)``, which includes the module's hooks. A call that is repeated in backward runs with the same
key again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from smp_core.torch import tensor_tree
from smp_core.torch.exceptions import OutsideStepError, ShardingError
from smp_core.torch.execution import streams
from smp_core.torch.execution.source import WHOLE, ParameterSource
from smp_core.torch.parameters import registration
from smp_core.torch.parameters.slice_reads import HoldsSlices, SliceRead
from smp_core.torch.parameters.split import split_of
from smp_core.torch.tensor_tree import Tree


class GradientSink(Protocol):
    """The protocol of the ledger that takes the gradients of microbatches (accumulation.py)."""

    def expect(self, microbatch: int, parameter: nn.Parameter) -> None:
        """Announce one contribution: a call has begun to use the parameter."""

    def add(self, microbatch: int, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Take one contribution, and take over its tensor."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallKey:
    """The identity of a module call in a step.

    Attributes:
        microbatch: its index.
        path: of the module, as in ``named_modules``.
        nth: the zero-based index of the call among its caller's calls of the module.
        stream: the random stream of the call, a digest of the chain of calls that led to it.
    """

    microbatch: int
    path: str
    nth: int
    stream: int


class _Frame:
    """One call in progress, or the body of a microbatch.

    Attributes:
        stream: the random stream.
        parent: the calling frame.
        module: the called module; None for the body.
        counts: the number of calls that the frame has made, by path.
        uses: pairs (parameter, use), by the parameter's id and whether gradients were recorded.
        units: the numbers of the units that the frame has used (sharding/unsharding.py).
    """

    __slots__ = ("counts", "module", "parent", "stream", "units", "uses")

    def __init__(
        self, stream: int, parent: _Frame | None = None, module: nn.Module | None = None
    ) -> None:
        self.stream, self.parent, self.module = stream, parent, module
        self.counts: dict[str, int] = {}
        self.uses: dict[tuple[int, bool], tuple[nn.Parameter, nn.Parameter]] = {}
        self.units: set[int] | None = None


class _Activity:
    """The work of one thread: a microbatch, its ledger and the source of parameters."""

    __slots__ = ("frame", "ledger", "microbatch", "source")

    def __init__(
        self, ledger: GradientSink, microbatch: int, frame: _Frame, source: ParameterSource
    ) -> None:
        self.ledger, self.microbatch, self.frame = ledger, microbatch, frame
        self.source = source


class _Local(threading.local):
    activity: _Activity | None = None
    call: _Frame | None = None  # the innermost module call; None in a body
    repeats = False


_local = _Local()


@contextlib.contextmanager
def activity(
    ledger: GradientSink, microbatch: int, seed: int, source: ParameterSource = WHOLE
) -> Iterator[None]:
    """While entered, this thread works for the microbatch, and gradients go to the ledger.

    ``seed`` is that of the step, and ``source`` gives the parameters. Activities may be nested. A backward pass is an
    activity, too.
    """
    before = _local.activity, _local.call
    frame = _Frame(streams.root(seed, microbatch))
    _local.activity = _Activity(ledger, microbatch, frame, source)
    _local.call = None
    try:
        with source.saved_tensor_hooks(microbatch):
            yield
    finally:
        try:
            if frame.uses:
                _write_back(frame, source)
        finally:
            _leave(frame, source)
            _local.activity, _local.call = before


@contextlib.contextmanager
def body(
    ledger: GradientSink, microbatch: int, seed: int, source: ParameterSource = WHOLE
) -> Iterator[None]:
    """Enter :func:`activity` for the body of a microbatch, and the body's random stream."""
    with (
        activity(ledger, microbatch, seed, source),
        streams.entered(streams.root(seed, microbatch)),
    ):
        yield


def current_microbatch() -> int | None:
    """The microbatch that this thread works for; None outside of activities."""
    return None if _local.activity is None else _local.activity.microbatch


def next_key(path: str) -> CallKey:
    """The key of the next call of the module at ``path`` by the innermost call of this thread.

    Raises RuntimeError outside of activities.
    """
    work = _local.activity
    if work is None:
        raise RuntimeError(f"module {path!r} is called outside of an activity of a step")
    frame = _local.call or work.frame
    nth = frame.counts.get(path, 0)
    frame.counts[path] = nth + 1
    return CallKey(work.microbatch, path, nth, streams.derive(frame.stream, path, nth))


def run(
    key: CallKey,
    module: nn.Module,
    forward: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Run ``forward(*args, **kwargs)`` as the call ``key`` of ``module``. Exceptions pass through."""
    before, work = _local.call, _local.activity
    source = WHOLE if work is None else work.source
    frame = _Frame(key.stream, before or (None if work is None else work.frame), module)
    _local.call = frame
    try:
        with streams.entered(key.stream), registration.entered(module, _read):
            if torch.is_grad_enabled():
                if not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor:
                    args = (_identity(args[0]),)  # most calls; tensor trees take 10 times as long
                else:
                    args, kwargs = identities((args, kwargs))
            if isinstance(module, nn.RNNBase):
                output = _run_recurrent(module, forward, args, kwargs)
            else:
                output = forward(*args, **kwargs)
            return _released(output) if frame.units else output
    finally:
        _local.call = before
        try:
            if frame.uses:
                _write_back(frame, source)
        finally:
            _leave(frame, source)


def hold(
    module: nn.Module,
    forward: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """A call of a module outside of steps, whose sharded parameters are whole while it lasts: nothing
    else that :func:`run` does. In an activity.
    """
    before, work = _local.call, _local.activity
    assert work is not None
    frame = _local.call = _Frame(0, before or work.frame, module)
    try:
        with registration.entered(module, _read):
            if isinstance(module, nn.RNNBase):
                return _run_recurrent(module, forward, args, kwargs)
            return _released(forward(*args, **kwargs))
    finally:
        _local.call = before
        try:
            _write_back(frame, work.source)
        finally:
            _leave(frame, work.source)


@contextlib.contextmanager
def repeating() -> Iterator[None]:
    """While entered, calls are repeated for their activations, and their uses expect no gradient."""
    before, _local.repeats = _local.repeats, True
    try:
        yield
    finally:
        _local.repeats = before


def same_keys(function: Callable[..., object]) -> Callable[..., object]:
    """Wrap a function so that each of its runs in the present call makes module calls with the same keys.

    In a body, or outside of steps, the function is returned as it is.
    """
    first = _local.call
    if first is None:
        return function
    stream, counts, module = first.stream, dict(first.counts), first.module
    begun = False

    def run(*args: object, **kwargs: object) -> object:
        nonlocal begun
        if not begun:
            begun = True
            return function(*args, **kwargs)
        before, frame = _local.call, _Frame(stream, _local.call, module)
        frame.counts.update(counts)
        _local.call = frame
        work = _local.activity
        try:
            return function(*args, **kwargs)
        finally:
            _local.call = before
            if work is not None:
                _leave(frame, work.source)

    return run


def identities(tree: Tree) -> Tree:
    """The tensor tree with a view in place of each tensor that requires a gradient.

    A tensor that occurs twice becomes one view, which occurs twice.
    """
    if not any(tensor.requires_grad for tensor in tensor_tree.tensors(tree)):
        return tree
    given, rest = tensor_tree.flatten(tree)
    # Autograd runs nodes that were made later first. Made from the last to the first, the nodes pass gradients to a
    # common source in the order of the inputs, as one node for all of them does.
    for number in reversed(range(len(given))):
        given[number] = _identity(given[number])
    changed: Tree = tensor_tree.unflatten(given, rest)
    return changed


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad or isinstance(tensor, SliceRead):  # nobody computes with a slice
        return tensor
    return tensor.view_as(tensor) if tensor.layout is torch.strided else _alias(tensor)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return _Alias.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


class _Alias(torch.autograd.Function):
    """The identity without torch's record of views."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Delivery:
    """Hook of a use: the gradient that backward has accumulated in the use goes to the ledger."""

    __slots__ = ("ledger", "microbatch", "parameter")

    def __init__(self, work: _Activity, parameter: nn.Parameter) -> None:
        self.ledger, self.microbatch, self.parameter = work.ledger, work.microbatch, parameter

    def __call__(self, use: torch.Tensor) -> None:
        gradient, use.grad = use.grad, None
        if gradient is not None:
            self.ledger.add(self.microbatch, self.parameter, gradient)


class _ShardedDelivery(_Delivery):
    """A delivery for a use of a sharded parameter; it also tells the parameter's unit, which waits for gradients."""

    __slots__ = ("source",)

    def __init__(self, work: _Activity, parameter: nn.Parameter) -> None:
        super().__init__(work, parameter)
        self.source = work.source

    def __call__(self, use: torch.Tensor) -> None:
        if _local.activity is None:
            use.grad = None
            raise OutsideStepError(
                "backward was called outside of a step, and not as model.backward(loss): the gradients of "
                "sharded parameters would be lost. Call model.backward(loss) instead of loss.backward()"
            )
        super().__call__(use)
        self.source.on_grad(self.microbatch, self.parameter)


def _read(parameter: nn.Parameter) -> nn.Parameter:
    """The value of a read of a parameter of the model: its use in the innermost call."""
    frame, work = _local.call, _local.activity
    if frame is None:
        # The read of a body is caught by a hook on the parameter, unless the parameter is sharded.
        if work is None or work.source.shard(parameter) is None:
            return parameter
        frame = work.frame
    return _use(parameter, frame)


def _use(parameter: nn.Parameter, frame: _Frame) -> nn.Parameter:
    work = _local.activity
    if work is None or is_lazy(parameter) or not parameter.is_leaf:
        return parameter
    recorded = parameter.requires_grad and torch.is_grad_enabled()
    known = frame.uses.get((id(parameter), recorded))
    if known is not None:
        return known[1]
    sharded = work.source.shard(parameter) is not None
    if not recorded and not sharded:
        return parameter
    value = work.source.read(parameter, frame) if sharded else parameter.detach()
    outside = recorded and split_of(parameter) is not None and not _inside(frame, parameter)
    kind = SliceRead if outside and type(parameter) is nn.Parameter else type(parameter)
    use = torch.Tensor._make_subclass(kind, value, recorded)
    use.__dict__.update(parameter.__dict__)
    use._smp_parameter = parameter  # type: ignore[attr-defined]
    if recorded:
        use.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            _ShardedDelivery(work, parameter) if sharded else _Delivery(work, parameter)
        )
        if not _local.repeats:
            work.ledger.expect(work.microbatch, parameter)
            if sharded:
                work.source.expect(work.microbatch, parameter)
    frame.uses[id(parameter), recorded] = (parameter, use)
    return use


def _inside(frame: _Frame, parameter: nn.Parameter) -> bool:
    """Return whether a call belongs to a distributed module, or to the module that has the parameter itself."""
    own = frame.module is not None and any(
        each is parameter for each in dict.values(frame.module._parameters)
    )
    at: _Frame | None = frame
    while not own and at is not None:
        own, at = isinstance(at.module, HoldsSlices), at.parent
    return own


def _write_back(frame: _Frame, source: ParameterSource) -> None:
    """Carry over changes of a use object that its memory does not show: new data, or freezing."""
    replaced: list[str] = []
    for (_, recorded), (parameter, use) in frame.uses.items():
        shard = source.shard(parameter)
        if shard is not None:
            if source.place(use) is None:
                replaced.append(shard.name)
            if use.requires_grad and not recorded:
                raise ShardingError(
                    f"parameter {shard.name!r} was set to require a gradient in a step, where what a module gives is a "
                    "whole copy of it. Set it between steps, or keep the parameter from before the step"
                )
            # The graph keeps the use alive, so its unsharded memory is dropped here. A use with another holder, such
            # as an autograd function that keeps it for its own backward pass, keeps its memory.
            if sys.getrefcount(use) <= (_ALONE_IN_GRAPH if use._use_count() > 1 else _ALONE):  # type: ignore[attr-defined]
                use.data = torch.zeros((), dtype=use.dtype, device=use.device).expand(use.shape)
        elif use.data_ptr() != parameter.data_ptr() or use.shape != parameter.shape:
            parameter.data = use.data
        if recorded and not use.requires_grad and use.is_leaf:
            parameter.requires_grad_(False)
    if replaced:
        raise ShardingError(
            f"parameter {replaced[0]!r} was given other data in a module call, and each rank keeps its own part "
            "only, so the change would be lost on the others. Change parameters between steps"
        )


def _alone(value: object) -> int:
    """The reference count of an object that only a frame's dict holds, as ``_write_back`` reads it."""
    uses = {0: (None, value)}
    del value
    for _, (_, use) in uses.items():
        return sys.getrefcount(use)
    raise AssertionError


def _alone_in_graph() -> int:
    """The count of ``_alone`` for a parameter that a graph holds, too: some versions of torch add no reference."""
    use = nn.Parameter(torch.zeros(1))
    graph = use * 1
    uses = {0: (None, use)}
    del use
    for _, (_, use) in uses.items():
        count = sys.getrefcount(use)
    del graph
    return count


_ALONE, _ALONE_IN_GRAPH = _alone(object()), _alone_in_graph()


def _leave(frame: _Frame, source: ParameterSource) -> None:
    if frame.units:
        source.leave(frame, _local.repeats)


def _released(output: object) -> object:
    """The output of a call, with a view in place of each use that is part of it."""
    if not any(hasattr(tensor, "_smp_parameter") for tensor in tensor_tree.tensors(output)):
        return output
    tensors, rest = tensor_tree.flatten(output)
    return tensor_tree.unflatten(
        [
            each.view_as(each)
            if hasattr(each, "_smp_parameter") and not isinstance(each, SliceRead)
            else each
            for each in tensors
        ],
        rest,
    )


def _run_recurrent(
    module: nn.RNNBase,
    forward: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    # No other thread of the rank can run in between: an RNN calls no other module.
    weights = module._flat_weights
    frame = _local.call
    assert frame is not None
    module.__dict__["_flat_weights"] = [
        _use(weight, frame) if isinstance(weight, nn.Parameter) else weight for weight in weights
    ]
    try:
        return forward(*args, **kwargs)
    finally:
        module.__dict__["_flat_weights"] = weights


class _Parameters(dict[str, "nn.Parameter | None"]):
    """A module's parameters by name: within a call, reading one gives its use there.

    Only the model's own parameters, ``members`` by id, have uses. ``torch.func.functional_call`` may put any
    tensor here for a while, which gets its gradient from torch. A use that is put here is its
    parameter: a module may tie its child's weight in ``forward``.
    """

    __slots__ = ("_members",)

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], members: Mapping[int, nn.Parameter]
    ) -> None:
        super().__init__(parameters)
        self._members = members

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = dict.__getitem__(self, name)
        if _local.activity is None or parameter is None or id(parameter) not in self._members:
            return parameter
        return _read(parameter)

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        dict.__setitem__(self, name, getattr(parameter, "_smp_parameter", parameter))

    def get(self, name: str, default: Any = None) -> Any:
        found = dict.get(self, name)
        return default if found is None else self[name]

    def items(self) -> Any:
        return (
            dict.items(self) if _local.activity is None else [(name, self[name]) for name in self]
        )

    def values(self) -> Any:
        return dict.values(self) if _local.activity is None else [self[name] for name in self]

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(dict.items(self)),)  # a copy, or a pickle, is a plain dict


class Watch:
    """Replaces the dicts of parameters in a module tree, and hooks parameters against reads past the dicts.

    The engine calls ``refresh()`` at every step, because parameters may have been added, moved to other memory or
    unfrozen. ``remove()`` makes the tree plain again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._caught: dict[int, tuple[nn.Parameter, Node, list[RemovableHandle]]] = {}
        self._members: dict[int, nn.Parameter] = {}
        self.refresh()

    def refresh(self) -> None:
        """Watch the modules and parameters that have been added or changed."""
        self._members.clear()
        # A parameter of another rank (parameters/foreign.py) refuses whatever looks like a computation.
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            for module in self._module.modules():
                given = module._parameters
                if not isinstance(given, _Parameters) or given._members is not self._members:
                    module.__dict__["_parameters"] = _Parameters(given, self._members)
                for parameter in dict.values(module._parameters):
                    if parameter is not None:
                        self._members[id(parameter)] = parameter
                        if parameter.requires_grad and parameter.is_leaf:
                            self._catch(parameter)

    def _catch(self, parameter: nn.Parameter) -> None:
        lazy: bool = is_lazy(parameter)  # has no memory yet
        if lazy:
            return
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        known = self._caught.get(id(parameter))
        if known is not None:
            if known[1] is node:
                return
            self._release(known)  # torch has made a new node, because the memory is of another kind
        hooks = _DirectReads(parameter)
        handles = [
            node.register_prehook(hooks.before),
            parameter.register_post_accumulate_grad_hook(hooks.after),  # type: ignore[no-untyped-call]
        ]
        # Keep the node alive: torch would make a new one, without the hook.
        self._caught[id(parameter)] = (parameter, node, handles)

    def _release(self, known: tuple[nn.Parameter, Node, list[RemovableHandle]]) -> None:
        for handle in known[2]:
            handle.remove()

    def remove(self) -> None:
        """Undo everything."""
        for known in self._caught.values():
            self._release(known)
        self._caught.clear()
        for module in self._module.modules():
            if isinstance(module._parameters, _Parameters):
                module.__dict__["_parameters"] = dict(dict.items(module._parameters))


class _DirectReads:
    """Hooks of a parameter for reads past its uses.

    The hooks set ``grad`` aside while torch accumulates, and move the accumulated gradient to the ledger.
    """

    __slots__ = ("_aside", "_parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._aside: torch.Tensor | None = None

    def before(self, gradients: tuple[object, ...]) -> None:
        work = _local.activity
        if work is not None:
            shard = work.source.shard(self._parameter)
            if shard is not None:
                raise ShardingError(
                    f"parameter {shard.name!r} was read past the model, where only this rank's part of it is to be "
                    "seen. Read it as an attribute of its module, or declare who uses it with "
                    "smp.register_parameter(module, parameter)"
                )
        if work is not None and gradients[0] is not None:
            self._aside, self._parameter.grad = self._parameter.grad, None

    def after(self, parameter: torch.Tensor) -> None:
        work = _local.activity
        if work is not None:
            gradient, self._parameter.grad, self._aside = parameter.grad, self._aside, None
            if gradient is not None:
                work.ledger.expect(work.microbatch, self._parameter)
                work.ledger.add(work.microbatch, self._parameter, gradient)
