"""A module whose attributes answer by who reads them: torch and our packages get the truth, everybody else the
stand-in.

The module's class is replaced for a while by one with a property for each name. Nothing in the module's namespace
changes, so torch's own tables of its functions stay right, and to put the class back is to undo everything. Reading
any other name costs what it did before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from types import FrameType, ModuleType

#: Packages that decide by the truth.
INSIDE = ("torch", "smp_core", "pytest_smp")


@functools.cache
def _is_inside(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in INSIDE


def inside(frame: FrameType) -> bool:
    """Return whether the code of the frame belongs to torch or to us."""
    return _is_inside(frame.f_globals.get("__name__"))


def _attribute(name: str, answers: dict[str, object], passing_on: tuple[str, ...]) -> property:
    """The property for one name. Readers in the packages ``passing_on`` get the stand-in although they are inside."""
    there = tuple(f"{package}." for package in passing_on)

    def truthful(frame: FrameType) -> bool:
        return inside(frame) and not f"{frame.f_globals['__name__']}.".startswith(there)

    def read(module: ModuleType) -> object:
        if not truthful(sys._getframe(1)):
            return answers[name]
        try:
            return vars(module)[name]
        except KeyError:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}") from None

    def write(module: ModuleType, value: object) -> None:
        if truthful(sys._getframe(1)):
            vars(module)[name] = value
        elif value is vars(module).get(
            name, answers
        ):  # unittest.mock puts back what it saw in the namespace
            answers[name] = stand_in
        else:
            answers[name] = value

    stand_in = answers[name]
    return property(read, write)


def _reduce(module: ModuleType) -> tuple[object, ...]:
    """Pickle a module by name, because cloudpickle and dill know modules by their exact class."""
    return importlib.import_module, (module.__name__,)


@contextlib.contextmanager
def shown(
    module: ModuleType,
    answers: Mapping[str, object],
    passing_on: Mapping[str, tuple[str, ...]] = {},
) -> Iterator[None]:
    """While entered, readers outside of ``INSIDE`` see the answers in the module.

    ``passing_on`` names, for attributes that need it, packages inside whose modules get the answer, too.
    """
    own = dict(answers)
    kept = module.__class__
    attributes: dict[str, object] = {
        name: _attribute(name, own, passing_on.get(name, ())) for name in own
    }
    module.__class__ = type(
        kept.__name__, (kept,), {**attributes, "__slots__": (), "__reduce__": _reduce}
    )
    try:
        yield
    finally:
        module.__class__ = kept
