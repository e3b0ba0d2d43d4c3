"""Objects that hold data alone, such as a configuration of Hugging Face: read without running code of the file.

A file names the class of such an object and has its attributes. The class is one of those below, of a module that the
script has imported or of Transformers. While a file is read, a placeholder stands for the object and takes its
attributes; it gets the class after the last byte, so that no method of the class sees the file.

A member of an enumeration (a string enum of Transformers, say) is looked up by its value among the members that the
class has, and the class is not called.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import importlib
import pathlib
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable
from typing import IO, TypeVar

import torch

T = TypeVar("T")

#: Classes whose subclasses count too. Those of Transformers are looked up by name: it need not be installed.
_KINDS = (argparse.Namespace, types.SimpleNamespace)
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.WindowsPath)
_CONFIGURATIONS = ("PretrainedConfig", "PreTrainedConfig", "GenerationConfig")

#: Types of the values by which members of enumerations are looked up; comparing them runs no code of a class.
_ENUM_VALUES = (type(None), bool, int, float, str, bytes)

#: A class, or one with the name that stands for it in files.
_Allowed = Callable[..., object] | tuple[Callable[..., object], str]

#: Placeholders, with the classes that they are to get.
_Made = list[tuple[object, type]]

#: Torch has one table of allowed names for the process, and ranks may be threads.
_table = threading.Lock()

#: Methods by which a class has a say in how its objects are read or removed.
_OWN_CODE = ("__new__", "__setstate__", "__reduce__", "__reduce_ex__", "__del__")

#: Modules of Transformers that a file may have imported, once the script has imported Transformers.
_IMPORTABLE = re.compile(r"transformers(\.models\.\w+)?\.\w*configuration_\w+")


def load(file: IO[bytes], read: Callable[[], T]) -> T:
    """Return what ``read`` reads from the file, in which there may be data objects.

    ``read`` is `torch.load` with ``weights_only=True``. Raises what it raises.
    """
    with _table:
        try:
            return read()
        except pickle.UnpicklingError:
            file.seek(0)
            made: _Made = []
            allowed = _allowed(file, made)
            if not allowed:
                raise
        file.seek(0)
        with torch.serialization.safe_globals(allowed):
            result = read()
    for placeholder, cls in made:
        object.__setattr__(placeholder, "__class__", cls)  # the class may have a __setattr__
    return result


def has_attributes(value: object) -> bool:
    """Return whether the value is a data object whose attributes a file has by name."""
    return type(value) not in _PATHS and _has_data_attributes(type(value))


def _allowed(file: IO[bytes], made: _Made) -> list[_Allowed]:
    """Return what torch may find by the names in a file that it does not know; nothing if one is of no data object.

    Placeholders note themselves in ``made``.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # no archive, or not torch's
        return []
    allowed: list[_Allowed] = []
    for name in names:
        cls = _class_of(name)
        if cls is None:
            return []
        if cls in _PATHS:
            allowed.append((cls, name))
            continue
        if issubclass(cls, enum.Enum):
            # Not the class itself: its _missing_ would see a value of the file, and torch would set attributes of it.
            allowed.append((functools.partial(_enum_member, cls), name))
            continue
        if cls is types.SimpleNamespace:  # no object gets this class later, and it has no code
            kind = type("Maker", (), {"__new__": lambda _: types.SimpleNamespace()})
            filled: type = cls
        else:
            kind = filled = _placeholder(cls, made)
        # Torch calls what a name stands for. The second name, which no file can have, lets it set attributes.
        allowed += [(kind, name), (filled, f"{name}\n")]
    return allowed


def _class_of(name: str) -> type | None:
    """The class of a data object by its name in a file; None if there is no such class."""
    module, _, qualified = name.rpartition(".")
    if "transformers" in sys.modules and _IMPORTABLE.fullmatch(module):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # Not by getattr: a module's own __getattr__ may import whatever the name says.
    cls = vars(sys.modules[module]).get(qualified) if module in sys.modules else None
    return cls if isinstance(cls, type) and _holds_data(cls) else None


def _holds_data(cls: type) -> bool:
    return cls in _PATHS or _is_plain_enum(cls) or _has_data_attributes(cls)


def _is_plain_enum(cls: type) -> bool:
    """Return whether the class is an enumeration whose members are hashed and compared by Python's own code."""
    own = [base for base in cls.__mro__ if base.__module__ not in ("builtins", "enum")]
    return issubclass(cls, enum.Enum) and not any(
        name in vars(base) for base in own for name in ("__eq__", "__hash__")
    )


def _enum_member(cls: type[enum.Enum], value: object) -> enum.Enum:
    """Return the member of ``cls`` with this value of a file. Raises UnpicklingError if there is none."""
    for member in cls._member_map_.values():
        known = member._value_
        if type(known) is type(value) and type(value) in _ENUM_VALUES and known == value:
            return member
    raise pickle.UnpicklingError(f"{cls.__name__} has no member of the value in the file")


def _has_data_attributes(cls: type) -> bool:
    known = [each for each in cls.__mro__ if each in _KINDS or _is_configuration(each)]
    own = [each for each in cls.__mro__ if each not in (*_KINDS, object)]
    return bool(known) and not any(name in vars(each) for each in own for name in _OWN_CODE)


def _is_configuration(cls: type) -> bool:
    return cls.__name__ in _CONFIGURATIONS and cls.__module__.startswith("transformers.")


def _placeholder(cls: type, made: _Made) -> type:
    """A class of objects that can become objects of ``cls``, made without arguments."""
    base = types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object

    def new(kind: type) -> object:
        placeholder: object = base.__new__(kind)
        made.append((placeholder, cls))
        return placeholder

    def set_state(placeholder: object, state: object) -> None:
        # A pair would have values for slots and for setters of properties.
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise pickle.UnpicklingError(f"the attributes of a {cls.__name__} are no dict by names")
        vars(placeholder).update(state)

    return type(
        "Placeholder", (base,), {"__new__": new, "__setstate__": set_state, "__hash__": None}
    )
