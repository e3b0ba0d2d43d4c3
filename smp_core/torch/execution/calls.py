"""Module calls, which run on the rank that owns the module.

An attribute ``_compiled_call_impl``, which torch looks at first, catches ``module(...)``, so the module's forward hooks
run once, on the owner. An attribute ``forward`` of the instance catches ``module.forward(...)``. The class's own
``forward`` stays available as ``_orig_forward`` (API 1.7), on modules and, by :func:`keep_forwards`, on their classes:
``super()._orig_forward(x)``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from torch import nn

from smp_core.torch.exceptions import OutsideStepError, UnsupportedTrainingError
from smp_core.torch.execution import activity as activities
from smp_core.torch.execution import counted, uses
from smp_core.torch.execution.activity import Activity
from smp_core.torch.execution.failures import module_text
from smp_core.torch.execution.remote import boundary
from smp_core.torch.execution.uses import CallKey

Owner = Callable[[str], int | None]
#: Runs an eager call of a module: ``run(module, forward, args, kwargs)``.
Eager = Callable[[nn.Module, Callable[..., object], tuple[object, ...], dict[str, object]], object]


def run_plainly(
    module: nn.Module,
    forward: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Run an eager call as a plain call."""
    return forward(*args, **kwargs)


class Site:
    """The site of one module of the model, which catches the module's calls.

    A subclass decides which tensors a call keeps for backward: see ``_around``, ``_refuse`` and ``_own``.

    Attributes:
        module: the module.
        path: as in ``named_modules``.
        remote: another rank owns the module.
        plain: the module's own ``forward``.
    """

    __slots__ = (
        "_copied", "_of_torch", "_received", "_run_eagerly", "_tree", "module", "path", "plain",
        "remote",
    )  # fmt: skip

    def __init__(self, module: nn.Module, path: str, remote: bool, eager: Eager) -> None:
        self.module, self.path, self.remote, self._run_eagerly = module, path, remote, eager
        self._tree = list(module.modules())
        self._received: dict[
            int, bytes
        ] = {}  # training modes by calling rank, as its last request had them
        self._of_torch = None if remote else _all_of_torch(module)
        self.plain: Callable[..., object] = module.forward
        self._copied = False

    def __getstate__(self) -> dict[str, object]:
        for name, parameter in dict.items(self.module._parameters):
            shape = getattr(parameter, "ds_shape", None)
            if parameter is not None and shape is not None and parameter.shape != shape:
                raise UnsupportedTrainingError(
                    f"{module_text(self.path)}, of a sharded model, cannot be copied or pickled: of its "
                    f"parameter {name!r} there is only this rank's part. Call model.cpu() on every rank first, which "
                    "gathers the model until its next step; or load model.state_dict() into a new module"
                )
        return {name: getattr(self, name) for name in ("module", "path", "plain", "remote")}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore a copied or unpickled module, which is not part of the model: a plain module again."""
        for name, value in state.items():
            # Version 0.1 wrote "away".
            setattr(self, "remote" if name == "away" else name, value)
        self._copied, self._run_eagerly = True, run_plainly

    def has_remote_child(self) -> None:
        """Note that another rank owns a module below this one."""
        self._of_torch = None

    @property
    def closed(self) -> bool:
        """True if the forward pass is sure to call no module of another rank.

        Only trees of torch's own modules on this rank without hooks are sure, because their code is known.
        """
        return self._of_torch is not None and not any(
            each._forward_hooks or each._forward_pre_hooks for each in self._of_torch
        )

    def training(self) -> bytes:
        """The training modes of this module and its children on this rank, one byte each."""
        return bytes(each.training for each in self._tree)

    def train(self, training: bytes) -> None:
        """Set the training modes to those that ``training`` returned.

        A body sets modes for the whole rank, and other bodies run in its pauses, so each restores its own.
        """
        for each, flag in zip(self._tree, training, strict=False):
            if each.training != flag:
                each.training = bool(flag)

    def follow(self, caller: int, training: bytes) -> None:
        """Take over the training modes that the calling rank has changed since its last request.

        ``model.eval()`` thereby holds on every rank, even if pp_rank 0 alone or the body of the step calls it.
        """
        heard = self._received.get(caller)
        if training == heard:
            return
        self._received[caller] = training
        # Only changes: a module may have set its own mode on its own rank.
        for index, (each, flag) in enumerate(zip(self._tree, training, strict=False)):
            if heard is None or heard[index] != flag:
                each.training = bool(flag)

    def called(self, /, *args: object, **kwargs: object) -> object:
        """Run ``module(...)``."""
        return self._call(True, args, kwargs)

    def forward(self, /, *args: object, **kwargs: object) -> object:
        """Run ``module.forward(...)``, called by the module's own ``__call__`` or by the user."""
        if self._copied:
            return self._of_a_copy(args, kwargs)
        activity = activities.current()
        if activity is not None and activity.entered is self:
            activity.entered = None
            return self._own(*args, **kwargs)
        if activity is None:
            return self._eager(self._own, args, kwargs)
        return self._call(False, args, kwargs)

    def _call(self, hooked: bool, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        activity = activities.current()
        if activity is None:
            return self._around(args, kwargs, self._eager_hooked)
        activity.check()
        self._refuse(activity)
        key = uses.next_key(self.path)
        owner = activity.step.owner(self.path)
        if owner is None or owner == activity.step.rank:
            return self.run(activity, key, hooked, args, kwargs)
        return boundary.call_remote(activity, owner, key, hooked, args, kwargs)

    def run(
        self,
        activity: Activity,
        key: CallKey,
        hooked: bool,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Run the module on this rank. With activation checkpointing it runs again in backward."""
        return self._around(args, kwargs, functools.partial(self._once, key, hooked))

    def _once(self, key: CallKey, hooked: bool, /, *args: object, **kwargs: object) -> object:
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

    def _of_a_copy(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if self.remote:
            raise OutsideStepError(
                f"{module_text(self.path)}, of a copy of the model's modules, was called on a rank "
                "that held no parameters of it when the copy was made: another pp rank owns it. Load a state_dict "
                "of the model, which is whole, into a new module"
            )
        return self.plain(*args, **kwargs)

    def _around(
        self, args: tuple[object, ...], kwargs: dict[str, object], once: Callable[..., object]
    ) -> object:
        """Make a call on the owner by ``once(*args, **kwargs)``, which a subclass may repeat in backward."""
        return once(*args, **kwargs)

    def _refuse(self, activity: Activity) -> None:
        """Raise if the call cannot be made at this moment."""

    def _own(self, /, *args: object, **kwargs: object) -> object:
        """Run the module's own ``forward``."""
        return self.plain(*args, **kwargs)

    def _eager_hooked(self, /, *args: object, **kwargs: object) -> object:
        return self._eager(self.module._call_impl, args, kwargs)

    def _eager(
        self, run: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if self.remote:
            raise OutsideStepError(
                f"{module_text(self.path)} was called outside of a step, and another pp rank "
                "owns it. Call the model in a function that smp.step decorates"
            )
        return self._run_eagerly(self.module, run, args, kwargs)


def _all_of_torch(module: nn.Module) -> list[nn.Module] | None:
    """The modules of a tree if all of them are torch's own; None otherwise."""
    tree = list(module.modules())
    own = all(type(each).__module__.startswith("torch.nn.modules.") for each in tree)
    return tree if own else None


_ORIGINAL = "_orig_forward"


class _OrigForward:
    """A class attribute whose value is the ``forward`` that the class defines."""

    __slots__ = ("_owner",)

    def __init__(self, owner: type) -> None:
        self._owner = owner

    def __get__(self, module: object, kind: object = None) -> object:
        forward = vars(self._owner)["forward"]
        return forward.__get__(module, kind) if hasattr(forward, "__get__") else forward


def keep_forwards(module: nn.Module) -> None:
    """Give each class that defines the forward of a module of the tree an attribute ``_orig_forward``.

    A module that has a member of that name keeps the member. The attribute stays after the model, for later models.
    """
    for child in module.modules():
        if _has_member(child, _ORIGINAL):
            continue
        for kind in type(child).__mro__:
            own = vars(kind)
            if kind is not nn.Module and "forward" in own and _ORIGINAL not in own:
                with contextlib.suppress(TypeError):  # some classes take no attributes
                    setattr(kind, _ORIGINAL, _OrigForward(kind))


def _has_member(module: nn.Module, name: str) -> bool:
    """Return whether the module has a child, a parameter or a buffer of this name."""
    return any(
        name in members for members in (module._modules, module._parameters, module._buffers)
    )


def install(
    module: nn.Module,
    owner: Owner,
    rank: int,
    eager: Eager = run_plainly,
    kind: type[Site] = Site,
) -> dict[str, Site]:
    """Catch the calls of every module of the tree. Returns the sites, instances of ``kind``, by path.

    ``eager`` runs the eager calls.
    """
    remote = {path: owner(path) not in (None, rank) for path, _ in module.named_modules()}
    # By module, not by the beginning of a path: a module in two places has the path of the first.
    away = {child for path, child in module.named_modules() if remote[path]}
    sites = {}
    for path, child in module.named_modules():
        site = sites[path] = kind(child, path, remote[path], eager)
        if not away.isdisjoint(child.modules()):
            site.has_remote_child()
        if not _has_member(child, _ORIGINAL):
            child.__dict__[_ORIGINAL] = site.plain
        child.__dict__["forward"] = site.forward
        child.__dict__["_compiled_call_impl"] = site.called
    return sites
