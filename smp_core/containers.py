"""Containers: the types whose parts are visited (lists, tuples, dicts, sets), and the rebuilding of each.

A *container* is a list, tuple (named ones and torch's named results too), dict, set or frozenset, or an
instance of a subclass, or a ``UserDict``; everything else is a *leaf*: a string, a tensor, a module, a
dataclass. A container is rebuilt in its own class without calling that class's constructor, and keeps its
other contents (attributes, a default factory), so that an output class of a model library survives:
an ``OrderedDict`` that is a dataclass, whose attributes mirror its items (API 1.3.5).

Nothing here imports a framework.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

_HEAP_TYPE = (
    1 << 9
)  # Py_TPFLAGS_HEAPTYPE: a class that is not compiled into an interpreter or library

Leaf = Callable[[Any], Any]


class Container(NamedTuple):
    """A container, opened.

    ``places`` are the indices or keys of its ``parts``; of a set they only count. ``close`` builds the
    container anew, of other parts in the same order.
    """

    places: list[Hashable]
    parts: list[Any]
    close: Callable[[Sequence[Any]], Any]


def opened(value: Any) -> Container | None:
    """The parts of a container; None for a leaf."""
    kind = _kind(type(value))  # type: ignore[arg-type]  # a class is hashable
    return None if kind is None else kind(value)


def map_leaves(function: Leaf, value: Any) -> Any:
    """A container of the same structure with ``function(leaf)`` for each leaf.

    A container in which nothing changes is given back itself, not a copy. Empty containers are containers.
    """
    container = opened(value)
    if container is None:
        return function(value)
    return closed(value, container, [map_leaves(function, part) for part in container.parts])


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of a container, in its order: that of a dict's insertion, an arbitrary one in a set."""
    container = opened(value)
    if container is None:
        yield value
    else:
        for part in container.parts:
            yield from leaves(part)


def closed(value: Any, container: Container, parts: Sequence[Any]) -> Any:
    """``container`` of new parts, or ``value``, which it was opened from, if these are the old ones."""
    if all(new is old for new, old in zip(parts, container.parts, strict=True)):
        return value
    return container.close(parts)


def is_set(value: object) -> bool:
    """Return whether a value is a container without order."""
    return isinstance(value, set | frozenset)


# ---- One kind of container each ------------------------------------------------------------------


@functools.lru_cache(maxsize=512)
def _kind(cls: Any) -> Callable[[Any], Container] | None:
    if issubclass(cls, UserDict):
        return _user_dict
    if issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields"):
        return _result_tuple  # torch.return_types: a class of C that behaves like a named tuple
    # The class that lays out the memory. torch.Size is a tuple that lays out itself: a leaf.
    base = next(each for each in cls.__mro__ if not each.__flags__ & _HEAP_TYPE)
    return _KINDS.get(base)


def _bare(base: Any, value: Any, *contents: Any) -> Any:
    """An instance of value's class with its attributes; no constructor of a subclass is called."""
    new = base.__new__(type(value), *contents)
    if hasattr(value, "__dict__"):
        vars(new).update(vars(value))
    return new


def _list(value: list[Any]) -> Container:
    parts = list(list.__iter__(value))

    def close(new: Sequence[Any]) -> list[Any]:
        if type(value) is list:
            return list(new)
        copy = _bare(list, value)
        list.extend(copy, new)
        return copy  # type: ignore[no-any-return]

    return Container(list(range(len(parts))), parts, close)


def _tuple(value: tuple[Any, ...]) -> Container:
    parts = list(tuple.__iter__(value))
    return Container(list(range(len(parts))), parts, lambda new: _bare(tuple, value, new))


def _result_tuple(value: Any) -> Container:
    return Container(list(range(len(value))), list(value), lambda new: type(value)(list(new)))


def _dict_of(base: Any) -> Callable[[Any], Container]:
    def kind(value: Any) -> Container:
        items = list(base.items(value))
        places = [key for key, _ in items]

        def close(new: Sequence[Any]) -> Any:
            copy = _bare(base, value)
            if base is defaultdict:
                copy.default_factory = value.default_factory
            for (key, old), part in zip(items, new, strict=True):
                base.__setitem__(copy, key, part)
                _mirror(copy, key, old, part)
            return copy

        return Container(places, [part for _, part in items], close)

    return kind


def _mirror(copy: Any, key: object, old: object, new: object) -> None:
    """An attribute that is the item of its name stays that."""
    attributes = getattr(copy, "__dict__", {})
    if isinstance(key, str) and key in attributes and attributes[key] is old:
        attributes[key] = new


def _user_dict(value: UserDict[Any, Any]) -> Container:
    places = list(value.data)

    def close(new: Sequence[Any]) -> Any:
        copy = _bare(object, value)
        copy.__dict__["data"] = dict(zip(places, new, strict=True))
        return copy

    return Container(places, list(value.data.values()), close)


def _set_of(base: Any) -> Callable[[Any], Container]:
    def kind(value: Any) -> Container:
        parts = list(base.__iter__(value))

        def close(new: Sequence[Any]) -> Any:
            if base is frozenset:
                return _bare(base, value, new)
            copy = _bare(base, value)
            base.update(copy, new)
            return copy

        return Container(list(range(len(parts))), parts, close)

    return kind


_KINDS: dict[type, Callable[[Any], Container]] = {
    list: _list,
    tuple: _tuple,
    dict: _dict_of(dict),
    OrderedDict: _dict_of(OrderedDict),
    defaultdict: _dict_of(defaultdict),
    set: _set_of(set),
    frozenset: _set_of(frozenset),
}
