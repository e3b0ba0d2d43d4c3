"""The pickling of functions, exceptions and their contents, between the controller and rank processes.

An object that can be imported travels by name. A function that cannot (a closure, a lambda, a function
that a decorator hid) travels as its code and its cells, and is put back into its own module: there its
globals are that module's, and its classes are those of the one import, not copies. An object without a
module to go back to (``__main__``) travels by value, by cloudpickle. Exceptions keep their traceback,
by tblib.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
from tblib import Traceback

from pytest_smp.ranks import remote_errors
from smp_core.transport.payload import tensor_reducers

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def _import_by_name(name: str, file: str) -> types.ModuleType:
    return importlib.import_module(name)


class Importer:
    """Holds the function by which a rank process imports a module, from its name and file."""

    load: Callable[[str, str], types.ModuleType] = staticmethod(_import_by_name)


def _module(name: str, file: str) -> types.ModuleType:
    module = sys.modules.get(name)
    return Importer.load(name, file) if module is None else module


def _home(function: types.FunctionType) -> tuple[str, str] | None:
    """Name and file of the module that a function belongs to, if a rank can import it."""
    name = function.__globals__.get("__name__")  # functools.wraps changes __module__
    if not isinstance(name, str) or name == "__main__":
        return None
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None or not isinstance(file, str):
        return None
    return (name, file) if vars(module) is function.__globals__ else None


def _by_name(obj: types.FunctionType | type) -> bool:
    """Return whether the object's module has this very object under its qualified name."""
    found: Any = sys.modules.get(obj.__module__)
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


@functools.cache
def _real_home(cls: type) -> tuple[str, str] | None:
    """Module and name under which a class can be imported that says it is a builtin: pytest's
    outcomes do. By value it would be another class, which no `except` knows.
    """
    if _by_name(cls):
        return None
    for name, module in list(sys.modules.items()):
        if vars(module).get(cls.__qualname__) is cls:
            return name, cls.__qualname__
    return None  # one of Python's own that has no name: cloudpickle knows those


def _looked_up(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _empty_function(
    code: types.CodeType, name: str, file: str, cells: tuple[types.CellType, ...]
) -> types.FunctionType:
    return types.FunctionType(code, vars(_module(name, file)), closure=cells or None)


def _fill_function(function: types.FunctionType, state: tuple[dict[str, Any], Any]) -> None:
    attributes, members = state
    for name, value in attributes.items():
        setattr(function, name, value)
    vars(function).update(members)


def _empty_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    for value in contents:  # none, or one
        cell.cell_contents = value


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


_ATTRIBUTES = (
    "__name__",
    "__qualname__",
    "__module__",
    "__doc__",
    "__defaults__",
    "__kwdefaults__",
    "__annotations__",
)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Remembers which modules of the user's must be imported before its pickle can be read."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        table: Any = cloudpickle.Pickler.dispatch_table
        self.dispatch_table = table.new_child(tensor_reducers())
        self.modules: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            self._note(obj.__module__)
            home = _real_home(obj) if obj.__module__ == "builtins" else None
            if home is not None:
                return _looked_up, home
        elif isinstance(obj, types.FunctionType):
            self._note(obj.__module__)
            place = _home(obj)
            if place is not None:
                self._note(place[0])
            if place is not None and not _by_name(obj):
                attributes = {name: getattr(obj, name) for name in _ATTRIBUTES}
                construct = (obj.__code__, *place, obj.__closure__ or ())
                state = (attributes, dict(vars(obj)))
                return _empty_function, construct, state, None, None, _fill_function
        elif isinstance(obj, types.CellType):
            # Made first and filled afterwards: a function may be in a cell of its own closure, and
            # two functions may share a cell.
            return _empty_cell, (), _contents(obj), None, None, _fill_cell
        elif isinstance(obj, types.TracebackType):
            return _rebuild_traceback, (Traceback(obj, get_locals=_hides).as_dict(),)
        return super().reducer_override(obj)

    def _note(self, name: object) -> None:
        if not isinstance(name, str) or name in self.modules:
            return
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and name != "__main__" and not file.startswith(_LIBRARIES):
            self.modules[name] = file


def _hides(frame: types.FrameType) -> dict[str, Any]:
    """The local variable by which pytest leaves a frame out, if the frame or its module sets it to True."""
    for names in (frame.f_locals, frame.f_globals):
        if "__tracebackhide__" in names:
            return {"__tracebackhide__": True} if names["__tracebackhide__"] is True else {}
    return {}


def _rebuild_traceback(state: dict[str, Any]) -> types.TracebackType | None:
    rebuilt: types.TracebackType | None = Traceback.from_dict(state).as_traceback()
    return rebuilt


def _open(modules: dict[str, str], data: bytes) -> Any:
    for name, file in modules.items():
        _module(name, file)
    return pickle.loads(data)


def is_constant(body: object) -> bool:
    """Return whether a function is the same from run to run, so that its pickle can be reused.

    A function that is imported by name is. Any other one is only if it has a module and no cells,
    defaults or attributes: these travel with their present values, and so do the globals of a function
    without a module.
    """
    return (
        isinstance(body, types.FunctionType)
        and _home(body) is not None
        and (
            _by_name(body)
            or not (body.__closure__ or body.__defaults__ or body.__kwdefaults__ or vars(body))
        )
    )


def dumps(obj: object) -> bytes:
    """Pickle ``obj`` for another process of this run; ``pickle.loads`` there gives it back.

    Raises whatever pickling raises (PicklingError, TypeError, ...).
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(obj)
    if not pickler.modules:
        return buffer.getvalue()
    return pickle.dumps(_Opening(pickler.modules, buffer.getvalue()), pickle.HIGHEST_PROTOCOL)


class _Opening:
    """Pickles to a call that imports the modules and then reads the data."""

    def __init__(self, modules: dict[str, str], data: bytes) -> None:
        self._state = modules, data

    def __reduce__(self) -> Any:
        return _open, self._state


def dump_value(value: object) -> bytes:
    """Pickle a value that a body returned, and read it back: what its pickle does when it is read (end the
    process, wait for ever) must happen to the rank, whose verdict that is, and not to the controller.

    Raises whatever pickling and reading raise; SystemExit and KeyboardInterrupt are among that.
    """
    data = dumps(value)
    pickle.loads(data)
    return data


def dump_error(error: BaseException) -> bytes:
    """Pickle an exception with its traceback, its notes, its cause and its context; see
    remote_errors. Does not raise.
    """
    return remote_errors.dump_error(error, dumps)
