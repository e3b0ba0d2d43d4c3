"""Objects by value: an object that passes between ranks is pickled once and unpickled by each receiver."""

from __future__ import annotations

import copyreg
import io
import operator
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

from smp_core.errors import PayloadError, SmpError
from smp_core.transport.protocols import Group, ObjectTransport

# pytest leaves these frames out below an error that we raise on purpose; a bug of ours shows them.
__tracebackhide__ = operator.methodcaller("errisinstance", SmpError)

# Immutable and without parts: sharing one of these cannot be told from copying it.
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), type(Ellipsis)})

_Dumps = Callable[[object], bytes]


def plain_dumps(obj: object) -> bytes:
    """Pickle an object by pickle's newest protocol: classes and functions by name."""
    reducers = tensor_reducers()
    if not reducers:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | reducers
    pickler.dump(obj)
    return buffer.getvalue()


def tensor_reducers() -> dict[Any, Callable[[Any], Any]]:
    """The reducers of a pickler for tensors of every dtype: none, while torch is not imported."""
    torch = sys.modules.get("torch")
    return {} if torch is None else {torch.Tensor: _reduce_tensor}


# Dtypes that torch 2.13 pickles and cannot unpickle ("UntypedStorage has no attribute 'dtype'"), by
# width: such a tensor travels as another dtype of its width.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_CARRIED = ("uint16", "uint32", "uint64", "float8", "complex32")


def _reduce_tensor(tensor: Any) -> Any:
    name = str(tensor.dtype).removeprefix("torch.")
    if not name.startswith(_CARRIED):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    carrier = getattr(sys.modules["torch"], _CARRIERS[tensor.itemsize])
    return _rebuild_tensor, (tensor.detach().view(carrier), tensor.dtype, tensor.requires_grad)


def _rebuild_tensor(carried: Any, dtype: Any, requires_grad: bool) -> Any:
    return carried.view(dtype).requires_grad_(requires_grad)


class Payload:
    """One object, frozen at the time of the call; ``thaw`` gives a copy that nobody else holds."""

    __slots__ = ("_atom", "_call", "_data")

    def __init__(self, obj: object, call: str, dumps: _Dumps = plain_dumps) -> None:
        """Freeze ``obj``.

        Raises PayloadError, naming ``call`` and the part that cannot be pickled.
        """
        self._call = call
        self._data: bytes | None = None
        self._atom: object = None
        if type(obj) in _ATOMS:
            self._atom = obj
        else:
            self._data = _pickled(obj, call, dumps)

    @property
    def is_atom(self) -> bool:
        """True for an immutable object without parts, of which ``thaw`` gives no copy."""
        return self._data is None

    def thaw(self) -> Any:
        """A copy of the object as it was when frozen.

        Raises PayloadError for an object whose pickle cannot be read back.
        """
        return self._atom if self._data is None else _unpickled(self._data, self._call)


def allgather_alike(objects: ObjectTransport, obj: object, group: Group) -> list[Any]:
    """The objects of all members, most of which are alike: each different one is unpickled once.

    Objects that are alike are one object, so the caller changes none of them. In a world of n ranks ``allgather``
    unpickles n objects on each rank, which for reports of n ranks after each step is most of what they do.

    Raises PayloadError as Payload does.
    """
    call = "smp.allgather"
    gathered = objects.allgather(_pickled(obj, call, plain_dumps), group)
    different = {data: _unpickled(data, call) for data in dict.fromkeys(gathered)}
    return [different[data] for data in gathered]


def _pickled(obj: object, call: str, dumps: _Dumps) -> bytes:
    """The pickle of an object. Raises PayloadError, naming ``call`` and the part that cannot be pickled."""
    try:
        return dumps(obj)
    except Exception as error:
        path, part = _culprit(obj, dumps)
        if len(path) > 200:
            path = f"{path[:100]}...{path[-90:]}"
        what = f"{path or 'the object'} ({_short(part)}, a {type(part).__qualname__})"
        raise PayloadError(
            f"{call}: cannot pickle {what}: {type(error).__name__}: {error}. "
            "Objects pass between ranks by value; send what can be pickled."
        ) from None


def _unpickled(data: bytes, call: str) -> Any:
    """The object of a pickle. Raises PayloadError for one that cannot be read back."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise PayloadError(
            f"{call}: an object was pickled by its sender and cannot be unpickled: "
            f"{type(error).__name__}: {error}"
        ) from error


def _short(obj: object, limit: int = 120) -> str:
    try:
        text = repr(obj)
    except (
        Exception
    ) as error:  # a broken __repr__ must not hide the message that it would be part of
        text = f"<repr raised {type(error).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _parts(obj: object) -> Iterator[tuple[str, object]]:
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"key {_short(key, 40)}", key
            yield f"[{_short(key, 40)}]", value
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif isinstance(obj, set | frozenset):
        for value in obj:
            yield f"{{{_short(value, 40)}}}", value
    else:
        for name, value in getattr(obj, "__dict__", {}).items():
            yield f".{name}", value


def _culprit(obj: object, dumps: _Dumps) -> tuple[str, object]:
    """The innermost part that cannot be pickled by itself, and the path to it from ``obj``."""
    path, seen = "", {id(obj)}
    while True:
        for step, part in _parts(obj):
            if id(part) in seen or type(part) in _ATOMS:
                continue
            seen.add(id(part))
            try:
                dumps(part)
            except Exception:
                path, obj = path + step, part
                break
        else:
            return path, obj
