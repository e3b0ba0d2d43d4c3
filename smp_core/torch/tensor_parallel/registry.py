"""The distributed module for each class of modules: ``smp.tp_register`` and ``smp.tp_register_with_module`` (API 1.9).

A distributed module is made with the arguments that the original was made with, which a registered class notes on its
instances. Torch's own classes are left as they are: their arguments are read from attributes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn

from smp_core.errors import ArgumentTypeError
from smp_core.torch.tensor_parallel.translation import Translation

#: Positional and keyword arguments of a call.
Arguments = tuple[tuple[object, ...], dict[str, object]]
#: A hook that translates the arguments of a method, without ``self``.
ArgumentsHook = Callable[..., object]
#: A hook that translates the value of a method.
ReturnHook = Callable[..., object]

#: The attribute in which an instance of a registered class keeps the arguments of its ``__init__``.
_ARGUMENTS = "_smp_init_arguments"

Cls = TypeVar("Cls", bound=type[nn.Module])


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    """A class of modules, and how its distributed module is made and called.

    Attributes:
        module: the class that is replaced; subclasses are not.
        distributed: the class that replaces it.
        init_hook: translates the arguments of ``module.__init__`` to those of ``distributed.__init__``; None if they
            are the same.
        forward_hook: translates those of ``forward`` in the same way.
        return_hook: translates the value that ``distributed.forward`` returns; None if it is the same.
        arguments: reads the arguments of an instance's ``__init__``.
        keeps: attributes of an instance that its distributed module takes over.
        translation: gives the translation between the state of an instance and that of its distributed module; None if
            keys and values are the same.
    """

    module: type[nn.Module]
    distributed: type[nn.Module]
    init_hook: ArgumentsHook | None = None
    forward_hook: ArgumentsHook | None = None
    return_hook: ReturnHook | None = None
    arguments: Callable[[nn.Module], Arguments | None] = lambda module: vars(module).get(_ARGUMENTS)
    keeps: tuple[str, ...] = ()
    translation: Callable[[nn.Module], Translation] | None = None


#: By class. Registrations are of the process, as classes are.
_registrations: dict[type[nn.Module], Registration] = {}

#: Functions that find registrations of classes which are not imported yet.
FINDERS: list[Callable[[type[nn.Module]], Registration | None]] = []


def registration_of(module: nn.Module) -> Registration | None:
    """The registration of a module's class; None if the class is not registered."""
    cls = type(module)
    if cls not in _registrations:
        for finder in FINDERS:
            found = finder(cls)
            if found is not None:
                register(found)
    return _registrations.get(cls)


def options() -> frozenset[str]:
    """The arguments that registered distributed modules take, beside those by position."""
    return frozenset(
        name
        for each in set(_registrations.values())
        for name in inspect.signature(each.distributed).parameters
    )


def register(registration: Registration) -> None:
    """Register a class, or register it anew."""
    _registrations[registration.module] = registration


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: ArgumentsHook | None = None,
    forward_hook: ArgumentsHook | None = None,
    return_hook: ReturnHook | None = None,
) -> None:
    """Have ``dist_module`` take the place of ``module_cls`` where tensor parallelism is enabled.

    ``init_hook`` and ``forward_hook`` have the signature of the original method without ``self``, and return
    ``(args, kwargs)`` for that of ``dist_module``; ``return_hook`` maps its output to that of the original. Without a
    hook arguments, or the output, are handed on. Modules that were created before this call are not replaced, unless
    ``module_cls`` is torch.nn.Linear or torch.nn.Embedding. (API 1.9)

    Raises ArgumentTypeError for a class that is no module's, or a hook that cannot be called.
    """
    call = "smp.tp_register_with_module"
    for name, given in (("module_cls", module_cls), ("dist_module", dist_module)):
        if not (isinstance(given, type) and issubclass(given, nn.Module)):
            raise ArgumentTypeError(f"{call}: {name} is {given!r}, not a class of torch.nn.Module")
    hooks = {"init_hook": init_hook, "forward_hook": forward_hook, "return_hook": return_hook}
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise ArgumentTypeError(f"{call}: {name} must be callable, not {hook!r}")
    known = _registrations.get(module_cls)
    made = Registration(module_cls, dist_module, init_hook, forward_hook, return_hook)
    if known is not None:
        made = dataclasses.replace(made, arguments=known.arguments)
    elif "__init__" not in vars(module_cls) or not hasattr(module_cls.__init__, "_smp_notes"):
        _note_arguments(module_cls)
    register(made)


def tp_register(
    dist_module: type[nn.Module],
    init_hook: ArgumentsHook | None = None,
    forward_hook: ArgumentsHook | None = None,
    return_hook: ReturnHook | None = None,
) -> Callable[[Cls], Cls]:
    """A class decorator: ``smp.tp_register_with_module`` for the class below it. (API 1.9)"""

    def decorate(module_cls: Cls) -> Cls:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return decorate


def _note_arguments(module_cls: type[nn.Module]) -> None:
    """Have instances of exactly this class keep the arguments of their ``__init__``."""
    original: Callable[..., None] = module_cls.__init__

    @functools.wraps(original)
    def __init__(self: nn.Module, /, *args: object, **kwargs: object) -> None:
        if type(self) is module_cls:
            vars(self)[_ARGUMENTS] = (args, kwargs)
        original(self, *args, **kwargs)

    __init__._smp_notes = True  # type: ignore[attr-defined]
    setattr(module_cls, "__init__", __init__)  # noqa: B010 - mypy allows no assignment to a method


def translated(call: str, hook: ArgumentsHook, arguments: Arguments) -> Arguments:
    """The arguments as a hook translates them.

    Raises ArgumentTypeError if the hook returns anything but ``(args, kwargs)``.
    """
    args, kwargs = arguments
    found = hook(*args, **kwargs)
    match found:
        case (tuple() | list() as positional, Mapping() as named) if all(
            isinstance(name, str) for name in named
        ):
            return tuple(positional), dict(named)
    raise ArgumentTypeError(
        f"{call} {getattr(hook, '__name__', hook)!r} returned {_shown(found)}: it must return a pair of a tuple of "
        "positional arguments and a dict of keyword arguments"
    )


def _shown(value: object) -> str:
    text = f"a {type(value).__name__}"
    return f"{text} of {len(value)} elements" if isinstance(value, tuple) else text
