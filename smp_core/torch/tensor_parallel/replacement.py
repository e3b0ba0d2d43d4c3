"""Distributed modules take the places of the modules that a script wished to be distributed (API 1.7, 1.9).

The tree is changed in place, in the constructor of ``smp.DistributedModel``. A distributed module has new random
weights: scripts load weights, and make the optimizer, afterwards. At degree 1 it takes the weights over, unless their
values are delayed, entries differ in name or shape, or the module was never initialised (initialisation.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn

from smp_core.torch.exceptions import IndivisibleError, UnsupportedTrainingError
from smp_core.torch.parameters import creation
from smp_core.torch.parameters.marking import Mark
from smp_core.torch.parameters.split import mark_replaced
from smp_core.torch.tensor_parallel import registry, takeover
from smp_core.torch.tensor_parallel.initialisation import uninitialised_modules
from smp_core.torch.tensor_parallel.registry import Registration
from smp_core.torch.tensor_parallel.translation import Translation
from smp_core.torch.tensor_parallel.wishes import WISH, Wish

log = logging.getLogger(__name__)

#: Torch has one default dtype for the process, and ranks may be threads.
_default_dtype = threading.Lock()


class Replacement:
    """The replacement of one tree.

    Attributes:
        replaced: the paths of the modules that were replaced.
        translations: those of the states of replaced modules, by path.
        kept: the paths of the modules that stay although a script wished them to be distributed, with the reason.
        renewed: by reason, the paths of modules replaced at degree 1 whose distributed modules have new weights.
        lost: the paths of modules below replaced ones whose marks have no module to go to.
    """

    def __init__(self, root: nn.Module, kept_marks: tuple[Mark[int], ...] = ()) -> None:
        self.replaced: list[str] = []
        self.kept: dict[str, str] = {}
        self.renewed: dict[str, list[str]] = {}
        self.lost: list[str] = []
        self.translations: dict[str, Translation] = {}
        self._marks = kept_marks
        #: How many modules of the tree hold each parameter, and how many parents each module has.
        self._holders = Counter(
            id(parameter)
            for child in root.modules()
            for parameter in child._parameters.values()
            if parameter is not None
        )
        self._parents = Counter(
            id(child)
            for parent in root.modules()
            for child in parent._modules.values()
            if child is not None
        )
        self._uninitialised = uninitialised_modules(root) if takeover.keeps_weights() else set()
        self.root = self._replaced("", root, set())
        self._tell()

    def _replaced(self, path: str, module: nn.Module, seen: set[int]) -> nn.Module:
        """The module for this place: a distributed one, or the module itself with its children replaced."""
        if id(module) in seen:
            return module
        seen.add(id(module))
        wish, registration = WISH.of(module), registry.registration_of(module)
        if wish is not None and wish.enabled and registration is not None:
            made = self._made(path, module, wish, registration)
            if made is not None:
                return made
        for name, child in list(module._modules.items()):
            if child is not None:
                below = f"{path}.{name}" if path else name
                replaced = self._replaced(below, child, seen)
                if replaced is not child:
                    setattr(module, name, replaced)
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
            self._without_fast_path(path, module)
        return module

    def _without_fast_path(self, path: str, module: nn.Module) -> None:
        """Have one of torch's encoders call the layers below it: in evaluation it reads their weights itself."""
        below = f"{path}." if path else ""
        if any(each.startswith(below) for each in self.replaced):
            if isinstance(module, nn.TransformerEncoder):
                vars(module)["use_nested_tensor"] = False
            else:
                vars(module)["activation_relu_or_gelu"] = 0

    def _made(
        self, path: str, module: nn.Module, wish: Wish, registration: Registration
    ) -> nn.Module | None:
        """The distributed module; None if the module is to stay."""
        arguments = registration.arguments(module)
        shared = self._shared(module)
        if shared is not None:
            self.kept[path] = shared
        elif arguments is None:
            self.kept[path] = "it was created before its class was registered"
        else:
            taken = _options(registration.distributed, wish)
            try:
                if registration.init_hook is not None:
                    call = f"smp.tp_register: for module {path!r} the init_hook"
                    arguments = registry.translated(call, registration.init_hook, arguments)
                args, kwargs = arguments
                with _made_like(module):
                    made = registration.distributed(*args, **{**kwargs, **taken})
            except (IndivisibleError, UnsupportedTrainingError) as error:
                self.kept[path] = str(error)
                return None
            if _is_torchs(module) and _own_names(made) != _own_names(module):
                self.kept[path] = "its parameters are not those of its class (weight_norm?)"
                return None
            translation = registration.translation and registration.translation(module)
            unknown = takeover.freeze(made, module, translation)
            if unknown is not None:
                self.kept[path] = f"its frozen parameter {unknown!r} has no counterpart"
                return None
            initialised = id(module) not in self._uninitialised
            reason = takeover.carry_weights(made, module, translation, initialised)
            if reason is not None:
                self.renewed.setdefault(reason, []).append(path or "the model itself")
            self._adopt(made, module, registration)
            lost = takeover.carry_marks(made, module, translation, self._marks)
            self.lost += [f"{path}.{each}" if path and each else path or each for each in lost]
            for parameter in module.parameters():
                mark_replaced(parameter, path)
            self.replaced.append(path)
            if translation is not None:
                self.translations[path] = translation
            return made
        return None

    def _shared(self, module: nn.Module) -> str | None:
        """The reason why a module's weights cannot be split, if it shares them."""
        inside: Counter[int] = Counter()
        for child in module.modules():
            if self._parents[id(child)] > 1:
                return "it is used in several places of the model"
            inside.update(id(each) for each in child._parameters.values() if each is not None)
        if any(self._holders[each] > count for each, count in inside.items()):
            return "it shares a parameter with another module"
        return None

    def _adopt(self, made: nn.Module, module: nn.Module, registration: Registration) -> None:
        """Give a distributed module the modes and hooks of the place that it takes."""
        made.train(module.training)
        for name in registration.keeps:
            setattr(made, name, getattr(module, name))
        if registration.forward_hook is not None or registration.return_hook is not None:
            hooked = functools.partial(_hooked, made.forward, registration)
            vars(made)["forward"] = functools.update_wrapper(hooked, made.forward)

    def _tell(self) -> None:
        for reason, paths in self.renewed.items():
            log.warning(
                "tensor parallelism: the distributed modules of these have new weights, because %s: %s",
                reason,
                ", ".join(paths),
            )
        if self.lost:
            log.warning(
                "tensor parallelism: partitions and activation checkpointing of these modules have no effect, because "
                "the distributed module has no such module: %s",
                ", ".join(self.lost),
            )
        if self.kept:
            told = "; ".join(
                f"{path or 'the model itself'}: {reason}" for path, reason in self.kept.items()
            )
            log.warning("tensor parallelism: not distributed: %s", told)


def _is_torchs(module: nn.Module) -> bool:
    """Return whether the module's class is torch's own, whose distributed module has parameters of the same names."""
    return type(module).__module__.startswith("torch.nn.")


def _own_names(module: nn.Module) -> set[str]:
    return {name for name, each in module._parameters.items() if each is not None}


def _hooked(
    forward: Callable[..., object], registration: Registration, *args: object, **kwargs: object
) -> object:
    """A distributed module's ``forward`` with the arguments and the value of the original's."""
    if registration.forward_hook is not None:
        call = f"smp.tp_register: of {registration.module.__name__} the forward_hook"
        args, kwargs = registry.translated(call, registration.forward_hook, (args, kwargs))
    value = forward(*args, **kwargs)
    return value if registration.return_hook is None else registration.return_hook(value)


def _options(distributed: type[nn.Module], wish: Wish) -> dict[str, object]:
    """The options of a wish that the distributed module takes."""
    parameters = inspect.signature(distributed).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(wish.options)
    return {name: value for name, value in wish.options.items() if name in parameters}


@contextlib.contextmanager
def _made_like(module: nn.Module) -> Iterator[None]:
    """While entered, new parameters have the dtype and the device of the module's, and are delayed if those are."""
    like = next((each for each in module.parameters() if each.is_floating_point()), None)
    if like is None:
        yield
        return
    delayed = creation.is_on_tape(like)
    with _default_dtype:
        before = torch.get_default_dtype()
        torch.set_default_dtype(like.dtype)
        try:
            with creation.delayed() if delayed else torch.device(like.device):
                yield
        finally:
            torch.set_default_dtype(before)
