"""Delayed initialisation: in its context tensors are made without memory, and a tape records the operators on them.
Later any tensor gets its values by a replay of its part of the tape.

Every tensor that an operator makes in the context is on ``meta``. An operator on such tensors runs on meta and is
recorded. The record names tensors by storage and geometry, so views need no record of their own. A random operator also
runs once on scratch memory of the same shape, which advances the generator as if nothing were delayed, and its record
holds the generator's state before. A replay therefore gives exactly the values of the code without the context, and
code after the context draws the same numbers as without it. The peak of memory is that of one operator. (ENGINES 1.11;
seeds per name are not needed, and values that a parent sets, as by ``self.apply(self._init_weights)``, are kept.)

An operator that needs values (``.item()``, ``nonzero``) gets them by a replay. Torch itself refuses conversions to
other libraries (``.numpy()``).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from smp_core.torch import session as sessions
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.session import TrainingSession
from smp_core.torch.tensor_tree import Tree

_META = torch.device("meta")
_NEEDS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclasses.dataclass(frozen=True, slots=True)
class _Ref:
    """A recorded tensor: the number of its storage on the tape, and its geometry there."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    """One operator that made or changed storages.

    Attributes:
        func, args, kwargs: the call, with delayed tensors as references.
        random: the generator's state before the call; None if the operator draws nothing.
        made: pairs (position among the results, storage).
        touches: the storages of the arguments.
        writes: the storages that the operator makes or changes.
    """

    func: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    random: torch.Tensor | None
    made: tuple[tuple[int, int], ...]
    touches: frozenset[int]
    writes: frozenset[int]


class Tape:
    """The operators on the delayed tensors of one rank, in order."""

    def __init__(self) -> None:
        self._records: list[_Record] = []
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # alive, so torch gives no address twice

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was made on this tape, or is a view of one."""
        strided = tensor.layout is torch.strided
        return strided and tensor.untyped_storage()._cdata in self._numbers

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a delayed tensor, in its geometry and in new memory."""
        return self._replayed([self._refer(tensor)])(self._refer(tensor))

    def run(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run and record one operator of the code in the context."""
        inputs = [each for each in _leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        delayed = [each for each in inputs if self.knows(each)]
        if any(tag in func.tags for tag in _NEEDS_VALUES) and delayed:
            real = self._replayed([self._refer(each) for each in delayed])
            return func(*self._swap(args, real), **self._swap(kwargs, real))
        if inputs and not delayed:
            return func(*args, **kwargs)  # all arguments have values
        random = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator")
            own = generator.get_state if isinstance(generator, torch.Generator) else None
            random = (own or torch.get_rng_state)()
            scratch: Callable[[_Ref], torch.Tensor] = lambda ref: torch.empty_strided(  # noqa: E731
                ref.size, ref.stride, dtype=ref.dtype
            ).fill_(0)
            func(*self._swap(args, scratch), **self._swap(kwargs, scratch))
        if kwargs.get("device") == _META:
            kwargs = {**kwargs, "device": torch.device("cpu")}  # the device of the replay
        results = func(*_to_meta(args), **self._meta_kwargs(func, kwargs))
        self._record(func, args, kwargs, random, results)
        return results

    def _meta_kwargs(self, func: OpOverload, kwargs: dict[str, object]) -> dict[str, object]:
        meta: dict[str, object] = _to_meta(kwargs)
        if "generator" in meta:
            meta["generator"] = None  # meta takes no generator of the CPU
        if any(argument.name == "device" for argument in func._schema.arguments):
            meta["device"] = _META
        meta.pop("pin_memory", None)
        return meta

    def _record(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        random: torch.Tensor | None,
        results: object,
    ) -> None:
        writes: set[int] = set()
        for argument, value in _bound(func, args, kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes.update(
                    self._refer(each).storage
                    for each in _leaves(value)
                    if isinstance(each, torch.Tensor) and self.knows(each)
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
            return  # a view, or an operator without tensors
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

    def _name(self, tree: Tree) -> Tree:
        """Replace delayed tensors by references and copy the others, which may change before the replay."""
        changed: Tree = tree_map(
            lambda leaf: (
                leaf
                if not isinstance(leaf, torch.Tensor)
                else self._refer(leaf)
                if self.knows(leaf)
                else leaf.detach().clone()
            ),
            tree,
        )
        return changed

    def _swap(self, tree: Tree, real: Callable[[_Ref], torch.Tensor]) -> Tree:
        changed: Tree = tree_map(
            lambda leaf: (
                real(self._refer(leaf))
                if isinstance(leaf, torch.Tensor) and self.knows(leaf)
                else leaf
            ),
            tree,
        )
        return changed

    def _replayed(self, wanted: list[_Ref]) -> Callable[[_Ref], torch.Tensor]:
        """Replay the records that the wanted tensors depend on. Returns the look-up from reference to tensor."""
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

        def found(leaf: object) -> object:
            return real(leaf) if isinstance(leaf, _Ref) else leaf

        with torch.no_grad():
            for record in reversed(part):
                kwargs = tree_map(found, record.kwargs)
                with _drawing_from(record.random, kwargs):
                    results = _leaves(record.func(*tree_map(found, record.args), **kwargs))
                for position, number in record.made:
                    made = results[position]
                    assert isinstance(made, torch.Tensor)
                    storages[number] = made.untyped_storage()
        return real


@contextlib.contextmanager
def _drawing_from(state: torch.Tensor | None, kwargs: dict[str, object]) -> Iterator[None]:
    """While entered, random operators draw from a generator in this state."""
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


def _to_meta(tree: Tree) -> Tree:
    moved: Tree = tree_map(
        lambda leaf: leaf.to(_META) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf,
        tree,
    )
    return moved


def _leaves(tree: object) -> list[object]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in _leaves(part)]
    return [tree]


def _bound(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> Iterator[tuple[torch.Argument, object]]:
    """The schema's arguments with the values given for them."""
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


class _Delaying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sends every operator of this thread through the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return self.tape.run(func, args, kwargs or {})


class _Pretending(TorchFunctionMode):
    """A mode in which delayed tensors claim to be on the CPU.

    Functions of ``torch.nn.init`` skip tensors on meta, which would then stay without values.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        pretended = _PRETENDED.get(func)
        if pretended is not None and isinstance(args[0], torch.Tensor) and self.tape.knows(args[0]):
            return pretended
        return func(*args, **(kwargs or {}))


_PRETENDED: dict[object, object] = {
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: torch.device("cpu"),
}


@contextlib.contextmanager
def delayed() -> Iterator[None]:
    """While entered, new tensors of this rank are delayed. A nested context does nothing."""
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
    """While entered, ``tape`` records the operators of this thread."""
    with _Pretending(tape), _Delaying(tape):
        yield


def is_on_tape(tensor: torch.Tensor) -> bool:
    """Return whether a context of delayed initialisation on this rank has made the tensor."""
    tape: Tape | None = sessions.current("smp.delay_param_initialization").tape
    return tape is not None and tensor.is_meta and tape.knows(tensor)


def is_delayed(module: nn.Module) -> bool:
    """Return whether a parameter of the module has no values yet, so that the model cannot be traced."""
    return any(parameter.is_meta for parameter in module.parameters())


def value(session: TrainingSession, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The values of a parameter or buffer: its own memory, or new memory if the tensor is delayed.

    Raises UnsupportedTrainingError for a tensor on meta that no context of delayed initialisation has made.
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
