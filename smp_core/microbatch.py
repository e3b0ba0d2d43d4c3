"""Microbatches: a call of a step is split into one call for each, and their results are joined again.

The running example: with ``microbatches=2``, ``train_step(model, x, y=y)`` on 6 samples becomes
``train_step(model, x[0:3], y=y[0:3])`` and ``train_step(model, x[3:6], y=y[3:6])``; what these return,
``{"loss": a, "n": 3}`` and ``{"loss": b, "n": 3}``, becomes ``{"loss": join([a, b]), "n": [3, 3]}``.

The rules (API 1.3.2 to 1.3.6; AWS Common API (smp.step)):

1. Tensors are split, at any depth of lists, tuples, dicts and sets. Microbatch ``i`` of ``n`` is the
   ``i``-th of ``n`` equal parts along the batch axis, a view. Nothing is dropped: a batch that ``n``
   does not divide is refused, and so is a tensor without that axis. Two tensors may differ in batch
   size (INF: only divisibility is documented, and pairs of samples, say, are batches of twice the size).
2. An object whose class defines ``smp_slice(num_mb, mb, axis)`` is asked for its part, once for each
   microbatch, and the answer is handed on, whatever it is. This rule wins over rule 1 (INF: a user who
   writes the method for a dict or a tensor wants it used). The axis is the argument's own, 0 if none was
   named (INF).
3. An object that occurs twice in a batch (a tensor in two arguments, say) is one object in each microbatch.
4. Everything else is handed on as it is, defaults of the function included.

A framework tells which values are tensors; nothing here imports one.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from smp_core.containers import Container, closed, is_set, leaves, opened
from smp_core.errors import ArgumentError, ArgumentTypeError, BatchSizeError, StructureError

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_NO_BODIES = {
    "generator": (inspect.isgeneratorfunction, inspect.isasyncgenfunction),
    "coroutine": (inspect.iscoroutinefunction,),
}


class Framework(Protocol):
    """The operations on tensors that splitting and joining need."""

    def is_tensor(self, value: object) -> bool:
        """Return whether a value is a tensor."""
        ...

    def shape(self, tensor: Any) -> Sequence[int]:
        """The sizes of a tensor's dimensions."""
        ...

    def part(self, tensor: Any, axis: int, start: int, length: int) -> Any:
        """A view of ``length`` elements along ``axis`` from ``start``."""
        ...

    def join(self, outputs: list[Any]) -> Any:
        """One value for the tensors that all microbatches, in order, returned at one place."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of one call of a step, or of its body for one microbatch.

    ``sliced`` are the parts that ``smp_slice`` returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sliced: tuple[Any, ...] = dataclasses.field(default=(), compare=False, repr=False)


# ---- What is split how ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """The way in which the arguments of one function are split. Made by :func:`rules`.

    Attributes:
        function: its name, for messages.
        signature: the names that the user's rules are about.
        whole: names of arguments that every microbatch gets whole.
        axes: batch axes by name; 0 where nothing is said.
    """

    function: str
    signature: inspect.Signature
    whole: frozenset[str]
    axes: Mapping[str, int]

    def places(self, call: CallArguments) -> Iterator[tuple[str, int | None]]:
        """For each argument of a call, positional ones first, its name in messages and its batch
        axis: None if the argument is not split.

        Raises ArgumentTypeError if the function cannot be called so.
        """
        try:
            self.signature.bind(*call.args, **call.kwargs)
        except TypeError as error:
            raise ArgumentTypeError(f"smp.step: {self.function}{self.signature}: {error}") from None
        names = [each.name for each in self.signature.parameters.values() if _by_position(each)]
        extra, others = self._variadic()
        for index in range(len(call.args)):
            if index < len(names):
                yield names[index], self._axis(names[index])
            else:
                yield f"{extra}[{index - len(names)}]", self._axis(extra)
        for name in call.kwargs:
            if name in self.signature.parameters:
                yield name, self._axis(name)
            else:
                own = name in self.whole or name in self.axes
                yield f"{others}[{name!r}]", self._axis(name if own else others)

    def _axis(self, name: str) -> int | None:
        return None if name in self.whole else self.axes.get(name, 0)

    def _variadic(self) -> tuple[str, str]:
        by_kind = {each.kind: each.name for each in self.signature.parameters.values()}
        return by_kind.get(_VARIADIC[0], ""), by_kind.get(_VARIADIC[1], "")


def _by_position(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def rules(
    function: Callable[..., Any],
    non_split_inputs: Collection[str] | None,
    input_split_axes: Mapping[str, int] | None,
) -> Rules:
    """The rules of ``smp.step(function, non_split_inputs=..., input_split_axes=...)``, checked.

    A name is a parameter's, as the signature has it. The name of ``*args`` or ``**kwargs`` stands for
    all arguments that land there. Where there is a ``**kwargs``, any other name stands for the
    keyword of that name and goes first (INF).

    Raises:
        ArgumentTypeError: ``function`` is none that can be called once per microbatch (a generator or
            coroutine function would run nothing), or the rules are of a wrong type.
        ArgumentError: there is no such parameter, or two rules for one.
    """
    name = getattr(function, "__qualname__", None) or repr(function)
    if not callable(function) or inspect.isclass(function):
        raise ArgumentTypeError(f"smp.step: decorates a function, not {function!r}")
    for kind, checks in _NO_BODIES.items():
        if any(check(each) for check in checks for each in (function, type(function).__call__)):
            raise ArgumentTypeError(
                f"smp.step: {name} is a {kind} function: a call of it runs nothing. Decorate a plain one"
            )
    signature = inspect.signature(function)
    whole = _names(name, non_split_inputs)
    axes = _axes(name, input_split_axes)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    for rule, given in (("non_split_inputs", whole), ("input_split_axes", axes)):
        for each in given:
            if each not in signature.parameters and not takes_any:
                raise ArgumentError(
                    f"smp.step: {rule} of {name} names {each!r}, which is no parameter; "
                    f"there is {', '.join(signature.parameters) or 'none'}"
                )
    both = sorted(whole & axes.keys())
    if both:
        raise ArgumentError(
            f"smp.step: {', '.join(both)} of {name} stands in non_split_inputs and in "
            "input_split_axes: it is split or it is not"
        )
    return Rules(name, signature, whole, axes)


def _names(function: str, given: Collection[str] | None) -> frozenset[str]:
    if given is None:
        return frozenset()
    if not isinstance(given, list | tuple | set | frozenset) or not all(
        isinstance(each, str) for each in given
    ):
        raise ArgumentTypeError(
            f"smp.step: non_split_inputs={given!r} of {function} is no list of names of arguments"
        )
    return frozenset(given)


def _axes(function: str, given: Mapping[str, int] | None) -> dict[str, int]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and type(axis) is int for name, axis in given.items()
    ):
        raise ArgumentTypeError(
            f"smp.step: input_split_axes={given!r} of {function} is no dict of argument name to axis"
        )
    return dict(given)


# ---- Splitting -----------------------------------------------------------------------------------


def split(
    framework: Framework, rules: Rules, call: CallArguments, microbatches: int
) -> list[CallArguments]:
    """The calls of the microbatches, in their order.

    Raises:
        ArgumentTypeError: the function cannot be called with these arguments.
        BatchSizeError: ``microbatches`` does not divide a batch, or a tensor has no such axis.
    """
    places = list(rules.places(call))
    return [
        _Splitter(framework, rules.function, microbatches, index).call(call, places)
        for index in range(microbatches)
    ]


class _Splitter:
    """Takes one microbatch out of a batch."""

    def __init__(self, framework: Framework, function: str, microbatches: int, index: int) -> None:
        self.framework, self.function = framework, function
        self.microbatches, self.index = microbatches, index
        self._taken: dict[tuple[int, int], Any] = {}  # by identity and axis: rule 3
        self._sliced: list[Any] = []

    def call(self, call: CallArguments, places: Sequence[tuple[str, int | None]]) -> CallArguments:
        given = [*call.args, *call.kwargs.values()]
        parts = [
            value if axis is None else self._part(value, axis, place)
            for value, (place, axis) in zip(given, places, strict=True)
        ]
        count = len(call.args)
        return CallArguments(
            tuple(parts[:count]),
            dict(zip(call.kwargs, parts[count:], strict=True)),
            tuple(self._sliced),
        )

    def _part(self, value: Any, axis: int, place: str) -> Any:
        sliced = callable(getattr(type(value), "smp_slice", None))
        if sliced or self.framework.is_tensor(value):
            key = id(value), axis
            if key not in self._taken:
                self._taken[key] = (
                    value.smp_slice(self.microbatches, self.index, axis)
                    if sliced
                    else self._view(value, axis, place)
                )
                if sliced:
                    self._sliced.append(self._taken[key])
            return self._taken[key]
        container = opened(value)
        if container is None:
            return value
        parts = [
            self._part(part, axis, _inside(value, place, at))
            for at, part in zip(container.places, container.parts, strict=True)
        ]
        try:
            return closed(value, container, parts)
        except TypeError as error:
            raise ArgumentTypeError(
                f"smp.step: argument {place} of {self.function}: its parts do not fit in a "
                f"{type(value).__name__}: {error}"
            ) from error

    def _view(self, tensor: Any, axis: int, place: str) -> Any:
        shape = tuple(self.framework.shape(tensor))
        at = axis + len(shape) if axis < 0 else axis
        if not 0 <= at < len(shape):
            raise BatchSizeError(
                f"smp.step: argument {place} of {self.function} is a tensor of shape {shape}, which has no "
                f"axis {axis} to split. Name the argument in non_split_inputs, to hand it whole to every "
                "microbatch, or its batch axis in input_split_axes"
            )
        length, rest = divmod(shape[at], self.microbatches)
        if rest:
            raise BatchSizeError(
                f"smp.step: argument {place} of {self.function} has a batch of {shape[at]} (axis {axis} of "
                f"shape {shape}), which microbatches={self.microbatches} does not divide. Drop the last "
                "batch (drop_last=True), pad it, or choose other microbatches; an argument without a "
                "batch axis belongs in non_split_inputs"
            )
        return self.framework.part(tensor, at, self.index * length, length)


def _inside(value: object, place: str, at: object) -> str:
    return f"{place} (in a set)" if is_set(value) else f"{place}[{at!r}]"


# ---- Joining -------------------------------------------------------------------------------------


def join(
    framework: Framework,
    function: str,
    results: Sequence[Any],
    microbatches: Sequence[int] | None = None,
) -> Any:
    """Join the results of a step's microbatches leaf by leaf; the value has their structure.

    Tensors at one place become ``framework.join([...])``. Other leaves, None among them, become a list by
    microbatch. A set has no places, so it is a leaf itself unless it holds a tensor. A set with a tensor must
    hold nothing else, because tensors of two sets cannot be paired (INF: sets are documented as inputs).

    Args:
        framework: says what a tensor is.
        function: its name, for messages.
        results: at least one, in the order of the microbatches.
        microbatches: their numbers, for messages, if they do not run from 0.

    Raises:
        StructureError: the results differ in structure; names the place and both microbatches.
    """
    numbers = microbatches or range(len(results))
    return _Joiner(framework, function, numbers).join(list(results), "")


class _Joiner:
    def __init__(self, framework: Framework, function: str, numbers: Sequence[int]) -> None:
        self.framework, self.function, self.numbers = framework, function, numbers

    def join(self, results: list[Any], place: str) -> Any:
        first = results[0]
        containers = [self._opened(each, place) for each in results]
        for index, each in enumerate(results):
            if self._kind(each, containers[index]) != self._kind(first, containers[0]):
                self._differs(place, index, _described(first), _described(each))
        if self.framework.is_tensor(first):
            return self.framework.join(results)
        if containers[0] is None:
            return results
        for index, container in enumerate(containers):
            assert container is not None
            if container.places != containers[0].places and set(container.places) != set(
                containers[0].places
            ):
                self._differs(
                    place, index, _places(first, containers[0]), _places(results[index], container)
                )
        return containers[0].close(
            [self.join(parts, at) for at, parts in self._by_place(containers, place)]
        )

    def _opened(self, value: Any, place: str) -> Container | None:
        container = None if self.framework.is_tensor(value) else opened(value)
        if container is None or not is_set(value):
            return container
        if not any(self.framework.is_tensor(leaf) for leaf in leaves(value)):
            return None
        if len(container.parts) > 1:
            raise StructureError(
                f"smp.step: {self.function} returned a set of {len(container.parts)} with tensors in it"
                f"{place and f' at {place}'}: a set has no order by which to join those of the "
                "microbatches. Return a list or a dict"
            )
        return container

    def _by_place(self, containers: Sequence[Any], place: str) -> Iterator[tuple[str, list[Any]]]:
        found = [
            dict(zip(container.places, container.parts, strict=True)) for container in containers
        ]
        for at in containers[0].places:
            yield f"{place}[{at!r}]", [each[at] for each in found]

    def _kind(self, value: Any, container: Container | None) -> Any:
        """The property that all microbatches must share at one place: a container's type, or being a tensor or not."""
        return type(value) if container is not None else self.framework.is_tensor(value)

    def _differs(self, place: str, index: int, first: str, other: str) -> None:
        raise StructureError(
            f"smp.step: {self.function} returned {first}{place and f' at {place}'} for microbatch "
            f"{self.numbers[0]} and {other} for microbatch {self.numbers[index]}: results must have one "
            "structure, to be joined. Return the same keys, lengths and types for every microbatch"
        )


def _described(value: object) -> str:
    return type(value).__name__ if value is not None else "None"


def _places(value: object, container: Container) -> str:
    if isinstance(value, Mapping):
        return f"{_described(value)} of {', '.join(map(repr, container.places)) or 'no keys'}"
    return f"{_described(value)} of {len(container.parts)}"
