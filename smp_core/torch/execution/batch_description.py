"""The description of a batch by shapes, dtypes and checksums, which the ranks of a TP group exchange and compare
(batches.py).
"""

from __future__ import annotations

import dataclasses
import enum
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeGuard

import torch
from torch import nn

from smp_core.containers import is_set, opened
from smp_core.microbatch import CallArguments


class BatchEntry(NamedTuple):
    """The record of one tensor of a batch, of an array, or of the other values of an argument."""

    microbatch: int | None  #: None outside of steps
    part: str  #: a part of the microbatch, such as ``tensor 0``
    form: str  #: shape and dtype
    checksum: str  #: of the values; empty without ``prescaled_batch``

    @property
    def name(self) -> str:
        """The name in errors, such as ``microbatch 1, tensor 0``."""
        return (
            self.part if self.microbatch is None else f"microbatch {self.microbatch}, {self.part}"
        )

    @property
    def is_tensor(self) -> bool:
        """Return whether the entry is a tensor's."""
        return self.part.startswith("tensor ")


def described(
    calls: Iterable[tuple[int | None, CallArguments]], prescaled: bool
) -> list[BatchEntry]:
    """The entries of calls, each with the number of its microbatch; checksums only if ``prescaled``."""
    description = _Description(prescaled)
    for microbatch, call in calls:
        description.begin(microbatch)
        description.add(call)
    return description.entries


class _Description:
    """The description of a batch, entry by entry.

    Tensors are described at any depth of containers, dataclasses, and objects that define ``smp_slice`` or that it
    returned; with ``prescaled_batch`` so are arrays, and numbers and strings in lists, tuples and sets. Anything else
    may be of this rank alone: a logger, a rank's number among settings, the name of a device. Modules differ where they
    are split.
    """

    def __init__(self, prescaled: bool) -> None:
        self.entries: list[BatchEntry] = []
        self._prescaled = prescaled
        self._microbatch: int | None = None
        self._sliced: set[int] = set()
        self._open: set[int] = set()  # objects that hold the present one: they may hold themselves
        self._tensors = self._arrays = 0  # of the present microbatch
        self._plain: list[str] = []  # of the present argument
        self._keys: list[str] = []

    def begin(self, microbatch: int | None) -> None:
        self._microbatch = microbatch
        self._tensors = self._arrays = 0

    def add(self, call: CallArguments) -> None:
        self._sliced.update(id(each) for each in call.sliced)
        for place, value in (*enumerate(call.args), *call.kwargs.items()):
            if isinstance(value, CallArguments):  # of the step's function (step.py)
                self.add(value)
                continue
            self._add(value)
            plain, keys = self._plain, self._keys
            self._plain, self._keys = [], []
            if plain or keys:
                form = plain[0][:60] if len(plain) == 1 else f"{len(plain)} values"
                text = ";".join([*plain, ":", *keys])
                checksum = f"{zlib.crc32(text.encode(errors='replace')):08x}"
                self._enter(f"argument {place!r}", form, checksum)

    def _enter(self, part: str, form: str, checksum: str) -> None:
        self.entries.append(BatchEntry(self._microbatch, part, form, checksum))

    def _add(self, value: object, listed: bool = False) -> None:
        """Add one value; ``listed``: an element of a list, tuple or set."""
        if isinstance(value, torch.Tensor):
            checksum = _checksum(value) if self._prescaled else ""
            self._enter(f"tensor {self._tensors}", _form(value), checksum)
            self._tensors += 1
            return
        container = opened(value)
        if container is not None and is_set(value):
            self._add_set(container.parts)
        elif container is not None:
            listed = isinstance(value, list | tuple)
            for place, part in zip(container.places, container.parts, strict=True):
                if not listed:
                    self._keys.extend(self._told(place))
                self._add(part, listed)
        elif self._is_batch(value):
            if id(value) not in self._open:
                self._open.add(id(value))
                for part in _attributes(value):
                    self._add(part)
                self._open.discard(id(value))
        elif self._prescaled and (listed or _is_array(value)):
            self._add_value(value)

    def _is_batch(self, value: object) -> bool:
        if isinstance(value, nn.Module | type):
            return False
        return (
            (
                id(value) in self._sliced
                and not isinstance(value, tuple(_PLAIN))
                and not _is_array(value)
            )
            or dataclasses.is_dataclass(value)
            or callable(getattr(type(value), "smp_slice", None))
        )

    def _add_set(self, parts: Sequence[object]) -> None:
        """Add the parts of a set, which have another order on each rank."""
        outside, self._plain = self._plain, []
        for part in parts:
            if not isinstance(part, torch.Tensor):
                self._add(part, listed=True)
        self._plain = [*outside, *sorted(self._plain)]

    def _add_value(self, value: object) -> None:
        if not _is_array(value):
            self._plain.extend(self._told(value))
        elif getattr(value.dtype, "hasobject", False):
            self._add(value.tolist())
        else:
            form = f"{list(value.shape)} of {value.dtype}"
            checksum = f"{zlib.crc32(value.tobytes()):08x}"
            self._enter(f"array {self._arrays}", form, checksum)
            self._arrays += 1

    def _told(self, value: object) -> list[str]:
        """The text of a plain value in a list, empty if the value is none."""
        if not self._prescaled:
            return []
        return [tell(value) for kind, tell in _PLAIN.items() if isinstance(value, kind)][:1]


#: The values that are described by themselves, each class with the function that tells them: that of a subclass may
#: tell an address.
_PLAIN: dict[type, Callable[..., str]] = {
    each: each.__repr__
    for each in (
        bool, int, float, complex, str, bytes, bytearray, range, enum.Enum, torch.Size, type(None),
    )
}  # fmt: skip


class _Array(Protocol):
    """An array or a scalar of numpy's, or of a class that behaves like these."""

    dtype: object
    shape: tuple[int, ...]

    def tobytes(self) -> bytes:
        """The values."""

    def tolist(self) -> object:
        """The values as Python's, in lists."""


def _is_array(value: object) -> TypeGuard[_Array]:
    return all(hasattr(value, each) for each in ("dtype", "shape", "tobytes"))


def _attributes(value: object) -> Iterator[object]:
    """The values of an object's attributes: those of its slots, then those of its ``__dict__``."""
    for each in type(value).__mro__:
        names = each.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(value, name, None)
    yield from getattr(value, "__dict__", {}).values()


def _form(tensor: torch.Tensor) -> str:
    """The shape and dtype of a tensor, and its layout if that is no usual one."""
    if tensor.is_nested:
        sizes = ", ".join([str(tensor.size(0)), *["*"] * (tensor.dim() - 1)])
        return f"[{sizes}] of {tensor.dtype}, nested"
    layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    return f"{list(tensor.shape)} of {tensor.dtype}{layout}"


def _checksum(tensor: torch.Tensor) -> str:
    # A batch that another script reads by mistake differs all over: 32 bits find it, several times faster than a
    # cryptographic digest.
    total = 0
    for part in () if tensor.is_meta else _strided(tensor.detach()):
        plain = part.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if plain.numel():
            total = zlib.crc32(plain.view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _strided(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with strides that a tensor consists of: itself, if it has strides."""
    if tensor.is_nested:
        for part in tensor.unbind():
            yield torch.tensor(part.shape)
            yield part
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout is torch.strided:
        yield tensor.int_repr() if tensor.is_quantized else tensor
    else:
        yield tensor.to_dense()
