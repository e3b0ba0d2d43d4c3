"""Delayed initialisation: inside, tensors are made without memory, and what was done to them is
written on a tape; later any one of them is made real by replaying its part of the tape.

Every tensor that an operator makes inside is on ``meta``. An operator on such tensors runs on meta and
is recorded, with the tensors named by storage and geometry, so views need no record. A random
operator also runs once on scratch memory of the same shape, which moves the generator as if nothing
were delayed, and its record holds the state that the generator had: so replay gives the very values
of the code without the context, and what follows the context draws what it would have drawn. The most
memory in use at a time is that of one operator. (ENGINES 1.11; no seed per name is needed, and
values set by a parent, as by ``self.apply(self._init_weights)``, are kept.)

An operator that needs values (``.item()``, ``nonzero``) gets them by a replay. What leaves torch
(``.numpy()``) is refused by torch itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from smp_core.torch import session as sessions
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.session import Session

_META = torch.device("meta")
_NEEDS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclasses.dataclass(frozen=True, slots=True)
class _Ref:
    """A recorded tensor: its storage's number on the tape, and how it lies in it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    """One operator that made or changed storages."""

    func: Any
    args: Any
    kwargs: Any
    random: torch.Tensor | None  # the generator's state before, if it drew
    made: tuple[tuple[int, int], ...]  # (position among the results, storage)
    touches: frozenset[int]  # storages that it reads
    writes: frozenset[int]


class Tape:
    """What happened to the delayed tensors of one rank, in order."""

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept, so that no number is used again

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether this is a tensor that was made on this tape, or a view of one."""
        strided = tensor.layout is torch.strided
        return strided and tensor.untyped_storage()._cdata in self._numbers

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real values of a known tensor, in its geometry; new memory."""
        return self._replayed([self._refer(tensor)])(self._refer(tensor))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out one operator of the code inside the context."""
        inputs = [each for each in _leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        delayed = [each for each in inputs if self.knows(each)]
        if any(tag in func.tags for tag in _NEEDS_VALUES) and delayed:
            real = self._replayed([self._refer(each) for each in delayed])
            return func(*self._swap(args, real), **self._swap(kwargs, real))
        if inputs and not delayed:
            return func(*args, **kwargs)  # on values that are there
        random = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator")
            random = torch.get_rng_state() if generator is None else generator.get_state()
            scratch: Callable[[_Ref], torch.Tensor] = lambda ref: torch.empty_strided(  # noqa: E731
                ref.size, ref.stride, dtype=ref.dtype
            ).fill_(0)
            func(*self._swap(args, scratch), **self._swap(kwargs, scratch))
        if kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": torch.device("cpu")}  # where replay is to make it
        results = func(*_to_meta(args), **self._meta_kwargs(func, kwargs))
        self._record(func, args, kwargs, random, results)
        return results

    def _meta_kwargs(self, func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        meta: dict[str, Any] = _to_meta(kwargs)
        if "generator" in meta:
            meta["generator"] = None  # one of the CPU does not serve meta
        if any(argument.name == "device" for argument in func._schema.arguments):
            meta["device"] = _META
        meta.pop("pin_memory", None)
        return meta

    def _record(self, func: Any, args: Any, kwargs: Any, random: Any, results: Any) -> None:
        writes: set[int] = set()
        for argument, value in _bound(func, args, kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes.update(
                    self._refer(each).storage for each in _leaves(value) if self.knows(each)
                )
        made: list[tuple[int, int]] = []
        for position, result in enumerate(_leaves(results)):
            if isinstance(result, torch.Tensor) and not self.knows(result):
                storage = result.untyped_storage()
                self._numbers[storage._cdata] = len(self._storages)
                made.append((position, len(self._storages)))
                self._storages.append(storage)
        writes.update(number for _, number in made)
        if not writes:
            return  # a view, or nothing at all
        args, kwargs = named = self._name((args, kwargs))
        touches = frozenset(each.storage for each in _leaves(named) if isinstance(each, _Ref))
        self._records.append(
            _Record(func, args, kwargs, random, tuple(made), touches, frozenset(writes))
        )

    def _refer(self, tensor: torch.Tensor) -> _Ref:
        number = self._numbers[tensor.untyped_storage()._cdata]
        return _Ref(
            number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def _name(self, tree: Any) -> Any:
        """Delayed tensors by reference, others by value: they may change later."""
        return tree_map(
            lambda leaf: (
                leaf
                if not isinstance(leaf, torch.Tensor)
                else self._refer(leaf)
                if self.knows(leaf)
                else leaf.detach().clone()
            ),
            tree,
        )

    def _swap(self, tree: Any, real: Callable[[_Ref], torch.Tensor]) -> Any:
        return tree_map(
            lambda leaf: (
                real(self._refer(leaf))
                if isinstance(leaf, torch.Tensor) and self.knows(leaf)
                else leaf
            ),
            tree,
        )

    def _replayed(self, wanted: list[_Ref]) -> Callable[[_Ref], torch.Tensor]:
        """Make real what the wanted tensors depend on; returns the look-up of real tensors."""
        needed = {ref.storage for ref in wanted}
        part: list[_Record] = []
        for record in reversed(self._records):
            if record.writes & needed:
                needed |= record.touches
                part.append(record)
        storages: dict[int, torch.UntypedStorage] = {}

        def real(ref: _Ref) -> torch.Tensor:
            tensor = torch.empty(0, dtype=ref.dtype)
            return tensor.set_(storages[ref.storage], ref.offset, ref.size, ref.stride)

        def found(leaf: Any) -> Any:
            return real(leaf) if isinstance(leaf, _Ref) else leaf

        with torch.no_grad():
            for record in reversed(part):
                kwargs = tree_map(found, record.kwargs)
                with _drawing_from(record.random, kwargs):
                    results = _leaves(record.func(*tree_map(found, record.args), **kwargs))
                for position, number in record.made:
                    storages[number] = results[position].untyped_storage()
        return real


@contextlib.contextmanager
def _drawing_from(state: torch.Tensor | None, kwargs: dict[str, Any]) -> Iterator[None]:
    """While entered, random operators draw as from a generator in this state."""
    if state is None:
        yield
    elif kwargs.get("generator") is not None:
        kwargs["generator"] = torch.Generator().set_state(state)
        yield
    else:
        before = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            yield
        finally:
            torch.set_rng_state(before)


def _to_meta(tree: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.to(_META) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf,
        tree,
    )


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in _leaves(part)]
    return [tree]


def _bound(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The schema's arguments with what was given for them."""
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


class _Delaying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends every operator of this thread through the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # as torch calls it
        return self.tape.run(func, args, kwargs or {})


class _Pretending(TorchFunctionMode):
    """Delayed tensors say that they are on the CPU: functions of ``torch.nn.init`` leave out what is
    on meta, and would leave it without values.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # as torch calls it
        pretended = _PRETENDED.get(func)
        if pretended is not None and self.tape.knows(args[0]):
            return pretended
        return func(*args, **(kwargs or {}))


_PRETENDED: dict[Any, Any] = {
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: torch.device("cpu"),
}


@contextlib.contextmanager
def delayed() -> Iterator[None]:
    """While entered, this rank's new tensors are delayed. Inside another one it does nothing."""
    session = sessions.current("smp.delay_param_initialization")
    if session.tape is None:
        session.tape = Tape()
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    if any(isinstance(mode, _Delaying) for mode in modes):
        yield
        return
    with recording(session.tape):
        yield


@contextlib.contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """While entered, what this thread makes goes to ``tape``."""
    with _Pretending(tape), _Delaying(tape):
        yield


def is_delayed(module: nn.Module) -> bool:
    """Whether a parameter of the module has no values yet; such a model cannot be traced."""
    return any(parameter.is_meta for parameter in module.parameters())


def value(session: Session, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The values of a parameter or buffer: its own memory, or made now if it was delayed.

    Raises UnsupportedTrainingError for a tensor on meta that was not made in one of our contexts.
    """
    if not tensor.is_meta:
        return tensor.detach()
    if session.tape is None or not session.tape.knows(tensor):
        raise UnsupportedTrainingError(
            f"{name!r} is on the meta device and has no values. Create the model on the CPU, or in "
            "smp.delay_param_initialization()"
        )
    made: torch.Tensor = session.tape.value(tensor)
    return made
