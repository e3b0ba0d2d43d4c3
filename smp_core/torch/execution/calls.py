"""Every call of a module goes through here, to the rank that owns the module.

``module(...)`` is caught by the attribute that torch looks at first, ``_compiled_call_impl``, so that
the module's forward hooks run once, where it runs; ``module.forward(...)`` by an attribute of the
instance. The class's own ``forward`` stays in reach as ``_orig_forward`` (API 1.7), of modules and, by
:func:`keep_forwards`, of their classes: ``super()._orig_forward(x)``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from smp_core.torch.exceptions import OutsideStepError, UnsupportedTrainingError
from smp_core.torch.execution import activity as activities
from smp_core.torch.execution import counted, uses
from smp_core.torch.execution.activity import Activity
from smp_core.torch.execution.failures import module_text
from smp_core.torch.execution.remote import boundary
from smp_core.torch.execution.uses import CallKey

Owner = Callable[[str], int | None]
Alone = Callable[[], AbstractContextManager[None]]


class Site:
    """One module of the tree.

    ``hooked`` calls it, hooks and all; ``plain`` is its own ``forward``. ``away``: another rank owns it.
    A subclass decides what a call keeps for backward: see ``_around``, ``_refuse`` and ``_own``.
    """

    __slots__ = (
        "_alone", "_copied", "_heard", "_torchs", "_tree", "away", "module", "path", "plain",
    )  # fmt: skip

    def __init__(self, module: nn.Module, path: str, away: bool, alone: Alone | None) -> None:
        self.module, self.path, self.away, self._alone = module, path, away, alone
        self._tree = list(module.modules())
        self._heard: dict[int, bytes] = {}
        self._torchs = None if away else _all_of_torch(module)
        self.plain: Callable[..., Any] = module.forward
        self._copied = False

    def __getstate__(self) -> dict[str, Any]:
        for name, parameter in dict.items(self.module._parameters):
            shape = getattr(parameter, "ds_shape", None)
            if parameter is not None and shape is not None and parameter.shape != shape:
                raise UnsupportedTrainingError(
                    f"{module_text(self.path)}, of a sharded model, cannot be copied or pickled: of its "
                    f"parameter {name!r} there is only this rank's part. Call model.cpu() on every rank first, which "
                    "gathers the model until its next step; or load model.state_dict() into a new module"
                )
        return {name: getattr(self, name) for name in ("away", "module", "path", "plain")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of a module of the model, or one that was saved with torch.save, is none of the model:
        a plain module again, if all that it calls was here.
        """
        for name, value in state.items():
            setattr(self, name, value)
        self._copied, self._alone = True, None

    def opens(self) -> None:
        """A module below it is another rank's."""
        self._torchs = None

    @property
    def closed(self) -> bool:
        """Whether its forward pass is sure to call no module of another rank: it is all of torch's own
        modules on this rank, without hooks.
        """
        return self._torchs is not None and not any(
            each._forward_hooks or each._forward_pre_hooks for each in self._torchs
        )

    def training(self) -> bytes:
        """Which modules from this one on are in training mode, as this rank knows."""
        return bytes(each.training for each in self._tree)

    def train(self, training: bytes) -> None:
        """Set the modules from this one on to what ``training`` gave. A body sets modes for the whole
        rank, and others run while it is paused: so each finds its own again.
        """
        for each, flag in zip(self._tree, training, strict=False):
            if each.training != flag:
                each.training = bool(flag)

    def follow(self, caller: int, training: bytes) -> None:
        """A rank that calls the module says which it knows to be in training mode: what has changed since
        it last said so is taken over. So ``model.eval()`` holds on every rank, though it be called on
        pp_rank 0 alone, or in the function of the step, which runs there; and what a module does to its
        own mode on its own rank stays.
        """
        heard = self._heard.get(caller)
        if training == heard:
            return
        self._heard[caller] = training
        for index, (each, flag) in enumerate(zip(self._tree, training, strict=False)):
            if heard is None or heard[index] != flag:
                each.training = bool(flag)

    def called(self, /, *args: Any, **kwargs: Any) -> Any:
        """``module(...)``."""
        return self._call(True, args, kwargs)

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        """``module.forward(...)``, by the module's own call or by the user's."""
        if self._copied:
            return self._of_a_copy(args, kwargs)
        activity = activities.current()
        if activity is not None and activity.entered is self:
            activity.entered = None
            return self._own(*args, **kwargs)
        if activity is None:
            return self._outside(self._own, args, kwargs)
        return self._call(False, args, kwargs)

    def _call(self, hooked: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        activity = activities.current()
        if activity is None:
            return self._around(args, kwargs, self._hooked_outside)
        activity.check()
        self._refuse(activity)
        key = uses.next_key(self.path)
        owner = activity.step.owner(self.path)
        if owner is None or owner == activity.step.rank:
            return self.run(activity, key, hooked, args, kwargs)
        return boundary.call_there(activity, owner, key, hooked, args, kwargs)

    def run(
        self,
        activity: Activity,
        key: CallKey,
        hooked: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the module on this rank; again in backward, if its activations are not kept."""
        return self._around(args, kwargs, functools.partial(self._once, key, hooked))

    def _once(self, key: CallKey, hooked: bool, /, *args: Any, **kwargs: Any) -> Any:
        activity = activities.current()
        assert activity is not None
        before, activity.entered = activity.entered, self if hooked else None
        try:
            run = self.module._call_impl if hooked else self._own
            output = uses.run(key, self.module, run, args, kwargs)
            counted.happened("call", self.path)
            return output
        finally:
            activity.entered = before

    def _of_a_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.away:
            raise OutsideStepError(
                f"{module_text(self.path)}, of a copy of the model's modules, was called on a rank "
                "that held no parameters of it when the copy was made: another pp rank owns it. Load a state_dict "
                "of the model, which is whole, into a new module"
            )
        return self.plain(*args, **kwargs)

    def _around(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], once: Callable[..., Any]
    ) -> Any:
        """Carry out a call where the module runs: ``once(*args, **kwargs)``, which may be repeated later."""
        return once(*args, **kwargs)

    def _refuse(self, activity: Activity) -> None:
        """Raise for a call that cannot be made as it is now."""

    def _own(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward``."""
        return self.plain(*args, **kwargs)

    def _hooked_outside(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._outside(self.module._call_impl, args, kwargs)

    def _outside(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.away:
            raise OutsideStepError(
                f"{module_text(self.path)} was called outside of a step, and another pp rank "
                "owns it. Call the model in a function that smp.step decorates"
            )
        if self._alone is None:
            return run(*args, **kwargs)
        with self._alone():
            return uses.hold(self.module, run, args, kwargs)


def _all_of_torch(module: nn.Module) -> list[nn.Module] | None:
    """The modules of a tree, if all of them are torch's."""
    tree = list(module.modules())
    own = all(type(each).__module__.startswith("torch.nn.modules.") for each in tree)
    return tree if own else None


_ORIGINAL = "_orig_forward"


class _OrigForward:
    """As an attribute of a class: the ``forward`` that this class defines."""

    __slots__ = ("_owner",)

    def __init__(self, owner: type) -> None:
        self._owner = owner

    def __get__(self, module: Any, kind: Any = None) -> Any:
        forward = vars(self._owner)["forward"]
        return forward.__get__(module, kind) if hasattr(forward, "__get__") else forward


def keep_forwards(module: nn.Module) -> None:
    """Give each class that defines a forward of a module of the tree an ``_orig_forward``, unless the module has
    something of that name. It stays: the class is the same for models to come.
    """
    for child in module.modules():
        if _has_member(child, _ORIGINAL):
            continue
        for kind in type(child).__mro__:
            own = vars(kind)
            if kind is not nn.Module and "forward" in own and _ORIGINAL not in own:
                with contextlib.suppress(TypeError):  # a class that takes no attributes
                    setattr(kind, _ORIGINAL, _OrigForward(kind))


def _has_member(module: nn.Module, name: str) -> bool:
    """Whether the module has a child, a parameter or a buffer of this name."""
    return any(
        name in members for members in (module._modules, module._parameters, module._buffers)
    )


def install(
    module: nn.Module,
    owner: Owner,
    rank: int,
    alone: Alone | None = None,
    kind: type[Site] = Site,
) -> dict[str, Site]:
    """Catch the calls of every module of the tree; gives the sites, of a ``kind``, by path.

    ``alone``, if it is given, is entered around calls outside of steps.
    """
    elsewhere = {path: owner(path) not in (None, rank) for path, _ in module.named_modules()}
    sites = {}
    for path, child in module.named_modules():
        site = sites[path] = kind(child, path, elsewhere[path], alone)
        below = [other for other in elsewhere if other.startswith(f"{path}." if path else "")]
        if any(elsewhere[other] for other in below):
            site.opens()
        if not _has_member(child, _ORIGINAL):
            child.__dict__[_ORIGINAL] = site.plain
        child.__dict__["forward"] = site.forward
        child.__dict__["_compiled_call_impl"] = site.called
    return sites
