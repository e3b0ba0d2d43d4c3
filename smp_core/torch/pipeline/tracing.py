"""The trace: a plain run of the whole model on one rank that records module calls, their order and their cost (API
1.3.8: the trace comes before the partition).

The run leaves no effects: buffers, random generators, training flags and gradients are restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from smp_core.errors import ArgumentError
from smp_core.torch import tensor_tree
from smp_core.torch.memory import activations
from smp_core.torch.parameters import foreign
from smp_core.torch.session import TrainingSession


@dataclasses.dataclass(frozen=True, slots=True)
class TracedCall:
    """One module call.

    Attributes:
        path: of the module.
        nth: the zero-based index of the call among all calls of the module.
        caller: the path of the calling module; None for the call of the root.
        inputs: shapes of the tensors among the arguments.
        outputs: shapes of the tensors among the results.
    """

    path: str
    nth: int
    caller: str | None
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(slots=True)
class Trace:
    """The record of a run, as plain data.

    Attributes:
        unit: of ``cost``: "operations" or "seconds".
        calls: in the order of their beginnings.
        cost: by path, a module's own cost without that of modules that it calls, summed over its calls. Operations are
            floating-point operations of products plus elements of all results.
        bytes: by path, a module's own bytes: those of its results, or of the tensors that autograd keeps.
        reads: pairs (reader, owner) of paths: the forward of the reader used a parameter of the owner.
    """

    unit: str
    calls: list[TracedCall] = dataclasses.field(default_factory=list)
    cost: dict[str, float] = dataclasses.field(default_factory=dict)
    bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    reads: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def first_calls(self) -> dict[str, int]:
        """The position of the first call of each module that was called."""
        first: dict[str, int] = {}
        for index, call in enumerate(self.calls):
            first.setdefault(call.path, index)
        return first


def check_options(trace_device: object, trace_execution_times: bool) -> None:
    """Refuse an unknown device, and execution times on "cpu" (API 1.7). Raises ArgumentError.

    Both names of devices mean the CPU here.
    """
    if trace_device not in ("cpu", "gpu"):
        raise ArgumentError(
            f"smp.DistributedModel: trace_device must be 'cpu' or 'gpu', not {trace_device!r}"
        )
    if trace_execution_times and trace_device == "cpu":
        raise ArgumentError(
            "smp.DistributedModel: trace_execution_times must be False if trace_device is 'cpu': times "
            "there say nothing of the training device. Leave one of the two out"
        )


@dataclasses.dataclass(slots=True)
class _Frame:
    """A call in progress. ``callees`` are the seconds of the calls that it has made."""

    path: str
    callees: float = 0.0


class Tracer(contextlib.ExitStack):
    """While entered, ``trace`` records calls of ``module`` and of the modules below it.

    ``execution_times`` measures seconds instead of counting operations. ``memory_usage`` measures the memory that
    autograd keeps instead of estimating it from the results. With a session, ``smp.is_tracing`` is true in the context.
    An exception of the run passes through after everything has been restored. The context cannot be entered twice.
    """

    def __init__(
        self,
        module: nn.Module,
        session: TrainingSession | None = None,
        *,
        execution_times: bool = False,
        memory_usage: bool = False,
    ) -> None:
        super().__init__()
        self.trace = Trace("seconds" if execution_times else "operations")
        self._module, self._session = module, session
        self._times, self._measured = execution_times, memory_usage
        self._stack: list[_Frame] = []  # the calls in progress
        self._counts: dict[str, int] = {}
        # Storages that do not count again. Parameters and views of them are no activations.
        self._kept = {each.untyped_storage()._cdata for each in module.parameters()}

    def __enter__(self) -> Tracer:
        super().__enter__()
        with contextlib.ExitStack() as undo:
            undo.enter_context(_unchanged(self._module))
            if self._session is not None:
                self._session.tracing = True
                undo.callback(setattr, self._session, "tracing", False)
            for path, child in self._module.named_modules():
                undo.callback(_patch(child, functools.partial(self._call, path)))
            undo.enter_context(_Reads(self._module, self._stack, self.trace))
            if not self._times:
                undo.enter_context(_Operations(self._stack, self.trace))
            if self._measured:
                undo.enter_context(
                    torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept)
                )
            self.push(undo.pop_all().__exit__)
        return self

    def _call(
        self, path: str, forward: Callable[..., object], /, *args: object, **kwargs: object
    ) -> object:
        activations.refuse_torchs(path, None)
        caller = self._stack[-1].path if self._stack else None
        nth = self._counts[path] = self._counts.get(path, -1) + 1
        place = len(self.trace.calls)
        self.trace.calls.append(TracedCall(path, nth, caller, _shapes((args, kwargs))))
        frame = _Frame(path)
        self._stack.append(frame)
        started = time.perf_counter()
        try:
            outputs = forward(*args, **kwargs)
        finally:
            self._stack.pop()
        took = time.perf_counter() - started
        if self._stack:
            self._stack[-1].callees += took
        if self._times:
            self.trace.cost[path] = self.trace.cost.get(path, 0.0) + max(took - frame.callees, 0.0)
        if not self._measured:
            size = sum(tensor_tree.nbytes(each) for each in _tensors(outputs))
            self.trace.bytes[path] = self.trace.bytes.get(path, 0) + size
        self.trace.calls[place] = dataclasses.replace(
            self.trace.calls[place], outputs=_shapes(outputs)
        )
        return outputs

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor  # a sparse tensor has no storage of its own
        storage = tensor.untyped_storage()
        if self._stack and storage._cdata not in self._kept:
            self._kept.add(storage._cdata)
            path = self._stack[-1].path
            self.trace.bytes[path] = self.trace.bytes.get(path, 0) + tensor.nbytes
        return tensor


def _patch(module: nn.Module, record: Callable[..., object]) -> Callable[[], None]:
    """Route calls of ``module.forward`` through ``record(forward, ...)``. Returns the function that undoes it."""
    before = vars(module).get("forward")
    vars(module)["forward"] = functools.partial(record, module.forward)

    def undo() -> None:
        if before is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = before

    return undo


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore on exit everything that a run may change in the model and in the process."""
    buffers = [(child, dict(child._buffers)) for child in module.modules()]
    values = {
        id(each): (each, each.detach().clone()) for _, own in buffers for each in own.values()
        if each is not None
    }  # fmt: skip
    flags = [(child, child.training) for child in module.modules()]
    gradients = [(each, each.grad) for each in module.parameters()]
    generators, python = torch.get_rng_state(), random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for child, own in buffers:
            child._buffers.clear()
            child._buffers.update(own)
        with torch.no_grad():
            for buffer, value in values.values():
                if buffer.is_meta or buffer.shape != value.shape:
                    buffer.data = value
                else:
                    buffer.copy_(value)
        for child, flag in flags:
            child.training = flag
        for parameter, gradient in gradients:
            parameter.grad = gradient
        torch.set_rng_state(generators)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that adds the cost of each operator to the innermost module in progress."""

    def __init__(self, stack: list[_Frame], trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack, self._trace = stack, trace

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if self._stack:
            count = sum(each.numel() for each in _tensors(result))
            formula = flop_registry.get(func._overloadpacket)
            if formula is not None:
                count += formula(*args, **(kwargs or {}), out_val=result)
            path = self._stack[-1].path
            self._trace.cost[path] = self._trace.cost.get(path, 0.0) + count
        return result


class _Reads(TorchFunctionMode):
    """A mode that records each use of another module's parameter in a module's forward."""

    def __init__(self, module: nn.Module, stack: list[_Frame], trace: Trace) -> None:
        super().__init__()
        self._stack, self._trace = stack, trace
        self._homes: dict[int, list[str]] = {}
        for path, child in module.named_modules():
            for parameter in child._parameters.values():
                if parameter is not None:
                    self._homes.setdefault(id(parameter), []).append(path)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if self._stack and foreign.operation(func) not in ("__get__", "__set__"):
            path = self._stack[-1].path
            for tensor in _tensors((args, kwargs)):
                homes = self._homes.get(id(tensor))
                if homes is not None and path not in homes:
                    pair = (path, homes[0])
                    if pair not in self._trace.reads:
                        self._trace.reads.append(pair)
        return func(*args, **(kwargs or {}))


def _tensors(tree: object) -> Iterable[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from _tensors(part)
    elif isinstance(tree, list | tuple | set | frozenset):
        for part in tree:
            yield from _tensors(part)


def _shapes(tree: object) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each.shape) for each in _tensors(tree))
