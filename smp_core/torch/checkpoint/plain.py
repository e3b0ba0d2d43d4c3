"""The content that a file may hold: tensors, plain containers and data objects (data_objects.py), which are read again
without running code.

An object is checked when it is saved, while the training that made it is still there, and not when it is
needed back. Scalars and arrays of numpy are made plain: numbers and tensors of the same dtype.
"""

from __future__ import annotations

import collections
import functools
import io
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from smp_core.torch.checkpoint import data_objects
from smp_core.torch.checkpoint.files import why_not
from smp_core.torch.checkpoint.trust import trusted
from smp_core.torch.exceptions import CheckpointError

_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)
_SEQUENCES = (list, tuple, set)

#: Types that users try to save, with the value to save in place of each.
_INSTEAD = {
    "collections.defaultdict": "dict(it)",
    "collections.deque": "list(it)",
    "builtins.frozenset": "set(it)",
    "builtins.range": "its start, stop and step",
    "numpy.ndarray": "a list, or an array of numbers",
}


def plain(obj: object, call: str, name: str) -> Any:
    """``obj`` as it is to be written: itself, or a copy of the containers in which numpy's scalars and
    arrays are numbers and tensors.

    Args:
        call: the call that is to save it, as in ``smp.save``.
        name: the name of ``obj`` in that call; leaves are named from it, as in ``obj['a'][3]``.

    Raises CheckpointError, with the path of the first bad leaf, if it cannot be loaded again without
    running code; not inside of ``smp.trust_checkpoints``, where ``obj`` is written as it is.
    """
    if trusted():
        return obj
    return _made_plain(obj, {}) if _check(obj, call, name) else obj


def _check(obj: object, call: str, name: str) -> bool:
    """Raise as :func:`plain` does; return whether the object holds a value of numpy's."""
    todo: list[tuple[str, object]] = [(name, obj)]
    seen: set[int] = set()  # a list may hold itself
    numpy = False
    while todo:
        where, value = todo.pop()
        kind = type(value)
        if kind in _LEAVES:
            continue
        if kind in _MAPPINGS or kind in _SEQUENCES:
            if id(value) not in seen:
                seen.add(id(value))
                if isinstance(value, dict | set):
                    _check_keys(where, value, call)
                todo.extend(reversed(list(_items(where, value))))
        elif _number_of(value) is not None:
            numpy = True
        elif (reason := _refusal(value)) is not None:
            said = f"{kind.__module__}.{kind.__qualname__}"
            instead = _INSTEAD.get(
                said, "tensors, numbers, strings, and dicts, lists, tuples and sets of them"
            )
            if callable(getattr(value, "to_dict", None)):
                instead = "it.to_dict()"
            if kind.__name__ == "ndarray":
                said += f" of {getattr(value, 'dtype', '?')}"
            raise CheckpointError(
                f"{call}: {where} is a {said}, which cannot be loaded without running code ({reason}). "
                f"Nothing was written. Save {instead} instead; or, if nobody else can write to the folder, "
                "let files run code: with smp.trust_checkpoints()"
            )
        elif data_objects.has_attributes(value) and id(value) not in seen:
            seen.add(id(value))
            todo.extend((f"{where}.{each}", item) for each, item in vars(value).items())
    return numpy


def _check_keys(where: str, value: Iterable[object], call: str) -> None:
    """Raise CheckpointError for a data object among keys or elements: it has its hash only after the file is read."""
    for key in value:
        if type(key) not in _LEAVES and data_objects.has_attributes(key):
            raise CheckpointError(
                f"{call}: {where} has a {type(key).__name__} as a key or an element of a set, which cannot be loaded "
                "without running code (its hash). Nothing was written. Save a list of pairs instead"
            )


def _number_of(value: object) -> object:
    """A scalar of numpy's as a number, an array of numbers as a tensor of its own; None of others."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return None
    if isinstance(value, numpy.ndarray):
        if type(value) is not numpy.ndarray or value.dtype.kind not in "biufc":
            return None
        native = numpy.array(value, dtype=value.dtype.newbyteorder("="), order="C", copy=True)
        try:
            return torch.from_numpy(native)
        except TypeError:  # long doubles
            return None
    number = value.item()
    return number if type(number) in (bool, int, float, complex, str, bytes) else None


def _made_plain(value: Any, made: dict[int, Any]) -> Any:
    """A copy of the containers; one that is in several places, or in itself, stays so. ``made``: copies by id."""
    kind = type(value)
    if id(value) in made:
        return made[id(value)]
    if kind in _MAPPINGS:
        copy = made[id(value)] = kind()
        for key, item in value.items():
            copy[_made_plain(key, made)] = _made_plain(item, made)
        for name, item in getattr(value, "__dict__", {}).items():
            setattr(copy, name, _made_plain(item, made))
        return copy
    if kind is list:
        items: list[object] = []
        made[id(value)] = items
        items.extend(_made_plain(item, made) for item in value)
        return items
    if kind in _SEQUENCES:
        result = kind(_made_plain(item, made) for item in value)
    else:
        number = None if kind in _LEAVES else _number_of(value)
        result = value if number is None else number
    made[id(value)] = result
    return result


def _items(where: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"key {key!r} of {where}", key
            yield f"{where}[{key!r}]", item
        attributes = getattr(value, "__dict__", None)  # a state_dict's _metadata
        if attributes:
            yield f"{where}.__dict__", attributes
        return
    items: Iterable[object] = value
    for index, item in enumerate(items):
        yield (f"an element of {where}" if isinstance(value, set) else f"{where}[{index}]"), item


def _refusal(value: object) -> str | None:
    """Why the value does not come back from a file, or None: it is tried."""
    file = io.BytesIO()
    try:
        torch.save(value, file, pickle_protocol=2)
        file.seek(0)
        loaded = data_objects.load(file, functools.partial(torch.load, file, weights_only=True))
        if isinstance(value, type) and loaded is not value:  # a file names a class for its objects
            return "a class does not come back as itself"
    except Exception as error:
        return why_not(error)
    return None
