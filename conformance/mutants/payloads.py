"""Bugs of what objects are sent: sizes, containers, identity, types, arrays, tensors."""

from __future__ import annotations

import copy
import enum
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import smp_core.torch as smp
from conformance.mutants.blocks import PerRun, wrap
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from pytest_smp.ranks.sim import objects
from smp_core.errors import PayloadError
from smp_core.transport.payload import Payload

BUGS = Bugs("errors, hangs, pickling and resources")

Change = Callable[[Any], Any]


def payload(
    patch: Patch, sent: Change = lambda obj: obj, received: Change = lambda obj: obj
) -> None:
    """Change objects before they are frozen, and after they are thawed."""

    class Changed(Payload):
        def __init__(self, obj: object, call: str) -> None:
            super().__init__(sent(obj), call)

        def thaw(self) -> Any:
            return received(super().thaw())

    patch.setattr(objects, "Payload", Changed)


def in_parts(change: Change) -> Change:
    """Change an object and, below lists, tuples and dicts, every part of it."""

    def deep(obj: Any) -> Any:
        if type(obj) in (list, tuple):
            return type(obj)(map(deep, obj))
        if type(obj) is dict:
            return {key: deep(value) for key, value in obj.items()}
        return change(obj)

    return deep


def cut(length: Callable[[int], int]) -> Change:
    """Cut bytes and texts to the length that their own gives."""
    return lambda obj: obj[: length(len(obj))] if type(obj) in (bytes, str) else obj


@BUGS.enter("COMM-PAYLOAD-LARGE", origin="B148")
def a_million_bytes_at_most(patch: Patch) -> None:
    """bytes and texts are cut off after 2**19 parts"""
    payload(patch, sent=cut(lambda length: min(length, 2**19)))


@BUGS.enter("COMM-PAYLOAD-LARGE", *ASSERTION, PayloadError)
def pickles_are_cut(patch: Patch) -> None:
    """a pickle is cut off at 512 KiB"""
    load = pickle.loads

    class Cut(Payload):
        def thaw(self) -> Any:
            try:
                return super().thaw() if self._data is None else load(self._data[: 2**19])
            except Exception as error:
                raise PayloadError(f"cannot be unpickled: {error}") from error

    patch.setattr(objects, "Payload", Cut)


@BUGS.enter("COMM-PAYLOAD-EDGE", origin="B149")
def length_of_16_bits(patch: Patch) -> None:
    """the header of a message has 16 bits for its length"""
    payload(patch, sent=cut(lambda length: length % 2**16))


@BUGS.enter("COMM-PAYLOAD-EDGE", origin="B148")
def buffer_of_64_kib(patch: Patch) -> None:
    """objects are cut off at 64 KiB, their header of 16 bytes included"""
    payload(patch, sent=cut(lambda length: min(length, 2**16 - 16)))


@BUGS.enter("COMM-PAYLOAD-SIZES", origin="B055", kind="point-to-point")
def size_of_the_first_object(patch: Patch) -> None:
    """no object that a rank receives is longer than its first"""
    lengths = PerRun(dict)

    def first(got: Any) -> Any:
        if type(got) not in (list, str, bytes):
            return got
        return got[: lengths().setdefault((smp.rank(), type(got)), len(got))]

    payload(patch, received=first)


@BUGS.enter("COMM-PAYLOAD-MANY", kind="point-to-point")
def sequence_of_8_bits(patch: Patch) -> None:
    """messages are numbered by 8 bits: the 256th is taken for one that was seen"""
    counts = PerRun(lambda: defaultdict(int))
    last = PerRun(dict)

    def number(got: Any) -> Any:
        counts()[smp.rank()] += 1
        if counts()[smp.rank()] % 256 and smp.rank() in last():
            last()[smp.rank()] = got
        return last().setdefault(smp.rank(), got)

    payload(patch, received=number)


@BUGS.enter("COMM-PAYLOAD-NESTED")
def nests_of_64_levels(patch: Patch) -> None:
    """a part that lies 64 levels deep arrives as None"""

    def shallow(obj: Any, levels: int = 64) -> Any:
        if not levels:
            return None
        if type(obj) in (list, tuple):
            return type(obj)(shallow(each, levels - 1) for each in obj)
        if type(obj) is dict:
            return {key: shallow(value, levels - 1) for key, value in obj.items()}
        return obj

    payload(patch, received=shallow)


@BUGS.enter("COMM-PAYLOAD-SHARED", kind="collectives and layout")
def part_by_part(patch: Patch) -> None:
    """the parts of a list are pickled one by one"""
    payload(
        patch, sent=lambda obj: [copy.deepcopy(each) for each in obj] if type(obj) is list else obj
    )


@BUGS.enter("COMM-PAYLOAD-SHARED", kind="collectives and layout")
def equal_parts_are_one(patch: Patch) -> None:
    """equal parts of a list become one"""

    def merge(obj: Any) -> Any:
        if type(obj) is not list:
            return obj
        seen: dict[str, Any] = {}
        return [seen.setdefault(repr(each), each) if type(each) is dict else each for each in obj]

    payload(patch, received=merge)


@BUGS.enter("COMM-PAYLOAD-DISTINCT", kind="collectives and layout")
def copies_are_kept(patch: Patch) -> None:
    """a rank that receives equal bytes again gives the copy that it gave before"""
    copies = PerRun(dict)

    class Kept(Payload):
        def thaw(self) -> Any:
            if self._data is None:
                return self._atom
            key = smp.rank(), self._data
            if key not in copies():
                copies()[key] = super().thaw()
            return copies()[key]

    patch.setattr(objects, "Payload", Kept)


@BUGS.enter("COMM-PAYLOAD-DISTINCT", kind="collectives and layout")
def large_copies_are_kept(patch: Patch) -> None:
    """a rank that receives an equal pickle of more than 4,096 bytes again gives the copy from before"""
    copies = PerRun(dict)

    class Kept(Payload):
        def thaw(self) -> Any:
            if self._data is None or len(self._data) <= 4096:
                return super().thaw()
            key = smp.rank(), self._data
            if key not in copies():
                copies()[key] = super().thaw()
            return copies()[key]

    patch.setattr(objects, "Payload", Kept)


@BUGS.enter("COMM-PAYLOAD-SHARED", kind="collectives and layout")
def large_lists_in_parts(patch: Patch) -> None:
    """the parts of a list with a large part are pickled one by one"""

    def split(obj: Any) -> Any:
        large = type(obj) is list and any(type(e) is bytes and len(e) > 4096 for e in obj)
        return [copy.deepcopy(each) for each in obj] if large else obj

    payload(patch, sent=split)


@BUGS.enter("COMM-PAYLOAD-CLASSES")
def enums_as_values(patch: Patch) -> None:
    """enum members arrive as their values"""
    payload(
        patch,
        received=in_parts(lambda obj: obj.value if isinstance(obj, enum.Enum) else obj),
    )


@BUGS.enter("COMM-PAYLOAD-CLASSES")
def dicts_are_plain(patch: Patch) -> None:
    """instances of subclasses of dict arrive as plain dicts"""
    payload(patch, received=in_parts(lambda obj: dict(obj) if isinstance(obj, dict) else obj))


@BUGS.enter("COMM-PAYLOAD-ARRAYS", origin="B004", kind="collectives and layout")
def arrays_as_they_lie(patch: Patch) -> None:
    """the elements of an array are sent in the order in which they lie in memory"""

    def flat(obj: Any) -> Any:
        if not isinstance(obj, np.ndarray) or obj.dtype.hasobject:
            return obj
        return obj.ravel(order="K").reshape(obj.shape)

    payload(patch, sent=in_parts(flat))


@BUGS.enter("COMM-PAYLOAD-TENSORS")
def gradients_not_wanted(patch: Patch) -> None:
    """tensors arrive without requires_grad"""

    def detach(obj: Any) -> Any:
        return obj.detach() if isinstance(obj, torch.Tensor) else obj

    payload(patch, received=in_parts(detach))


@BUGS.enter("COMM-PAYLOAD-TENSORS", origin="B001", kind="collectives and layout")
def tensors_as_they_lie(patch: Patch) -> None:
    """a tensor is sent as if its elements lay densely from the first on"""

    def dense(obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.requires_grad or not obj.numel():
            return obj
        strides, offset = torch.empty(obj.shape).stride(), obj.storage_offset()
        enough = obj.untyped_storage().nbytes() // obj.itemsize >= offset + obj.numel()
        return torch.as_strided(obj, obj.shape, strides, offset) if enough else obj

    payload(patch, sent=in_parts(dense))


@BUGS.enter("COMM-PAYLOAD-DTYPES", PayloadError)
def by_plain_pickle(patch: Patch) -> None:
    """tensors are pickled as torch does it"""

    class Plain(Payload):
        def __init__(self, obj: object, call: str) -> None:
            super().__init__(obj, call, pickle.dumps)

    patch.setattr(objects, "Payload", Plain)


@BUGS.enter("COMM-PAYLOAD-DTYPES")
def carried_without_gradient(patch: Patch) -> None:
    """tensors of float8 arrive without requires_grad"""

    def detach(obj: Any) -> Any:
        carried = isinstance(obj, torch.Tensor) and "float8" in str(obj.dtype)
        return obj.detach() if carried else obj

    payload(patch, received=in_parts(detach))


@BUGS.enter("COMM-PAYLOAD-MODULES")
def tied_weights_untied(patch: Patch) -> None:
    """each layer of a module gets parameters of its own"""

    def untie(obj: Any) -> Any:
        if isinstance(obj, torch.nn.Module):
            for module in obj.modules():
                for name, weight in list(module.named_parameters(recurse=False)):
                    own = torch.nn.Parameter(weight.detach().clone(), weight.requires_grad)
                    setattr(module, name, own)
        return obj

    payload(patch, received=in_parts(untie))


@BUGS.enter("COMM-PAYLOAD-MANY", kind="point-to-point")
def every_tenth_overtakes(patch: Patch) -> None:
    """every tenth object that a rank receives is the one before, once more"""
    counts = PerRun(lambda: defaultdict(int))
    last = PerRun(dict)

    def receive(original: Any, *args: Any) -> Any:
        got = original(*args)
        counts()[smp.rank()] += 1
        before = last().get(smp.rank(), got)
        last()[smp.rank()] = got
        return before if counts()[smp.rank()] % 10 == 0 else got

    wrap(patch, "recv_from", receive)
