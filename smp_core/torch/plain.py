"""What a file may hold: tensors and plain containers, so that it is read again without running code.

Looked at when something is saved, while the training that made it is still there, and not when it is
needed back.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from smp_core.torch.exceptions import CheckpointError
from smp_core.torch.files import why_not

_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)
_SEQUENCES = (list, tuple, set)

#: What people try to save, and what to save instead.
_INSTEAD = {
    "argparse.Namespace": "vars(it), a dict",
    "collections.defaultdict": "dict(it)",
    "collections.deque": "list(it)",
    "builtins.frozenset": "set(it)",
    "builtins.range": "its start, stop and step",
    "numpy.ndarray": "torch.from_numpy(it)",
    "pathlib.PosixPath": "str(it)",
}


def check(obj: object, call: str, name: str) -> None:
    """Raise CheckpointError, with the path of the first bad leaf, if ``obj`` cannot be loaded again
    without running code.

    Args:
        call: the call that was to save it, as in ``smp.save``.
        name: what ``obj`` is called there; leaves are named from it, as in ``obj['a'][3]``.
    """
    todo: list[tuple[str, object]] = [(name, obj)]
    seen: set[int] = set()  # a list may hold itself
    while todo:
        where, value = todo.pop()
        kind = type(value)
        if kind in _LEAVES:
            continue
        if kind in _MAPPINGS or kind in _SEQUENCES:
            if id(value) not in seen:
                seen.add(id(value))
                todo.extend(reversed(list(_items(where, value))))
        elif (reason := _refusal(value)) is not None:
            said = f"{kind.__module__}.{kind.__qualname__}"
            instead = _INSTEAD.get(
                said, "tensors, numbers, strings, and dicts, lists, tuples and sets of them"
            )
            if hasattr(value, "item") and said.startswith("numpy.") and kind.__name__ != "ndarray":
                instead = "it.item()"
            raise CheckpointError(
                f"{call}: {where} is a {said}, which cannot be loaded without running code ({reason}). "
                f"Nothing was written. Save {instead} instead"
            )


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
        torch.load(file, weights_only=True)
    except Exception as error:
        return why_not(error)
    return None
