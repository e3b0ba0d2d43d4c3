"""Activation checkpointing: the policies of modules that keep no activations, and the place where a module
runs again (API 1.9).

A policy is left on the module, or comes with one call of the module (patches/checkpoint.py) as a keyword
argument of its own. The module's owner reads the policy where the module runs, and makes the call a region of
recompute.py. The region's repetition, during backward, is the same call once more: under the same key, so
with the same random stream, and with the buffers that the call found. A repetition asks no other rank for
anything, because a checkpointed module lies on one rank as a whole.

Decided here, because the sources are silent: a group of a Sequential's layers is one region where the
layers are on the Sequential's own rank; layers on other ranks are regions one by one, which changes memory and
no value ("best effort", API 1.9). ``preserve_rng_state=False`` saves memory outside of steps only: in a
step a repetition has the random stream of its call without keeping any state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from smp_core.errors import ArgumentError, ArgumentTypeError
from smp_core.schedule import Phase
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import (
    OutsideStepError,
    PartitionError,
    UnsupportedTrainingError,
)
from smp_core.torch.execution import activity as activities
from smp_core.torch.execution import uses
from smp_core.torch.execution.activity import Activity
from smp_core.torch.execution.calls import Site
from smp_core.torch.memory import recompute

MARK = "_smp_activation_checkpointing"  #: attribute in which a policy is left on a module
ARGUMENT = "_smp_checkpoint"  #: keyword argument by which a policy comes with a call
TAKES_TUPLE = "_smp_takes_tuple"  #: attribute of classes of layers whose only argument is a tuple


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """The activation checkpointing of one module. ``group``, for a Sequential: so many layers in one region; 0 for
    as many as lie on one rank one after the other; None if the module is no Sequential.
    """

    preserve_rng_state: bool = True
    pack_args_as_tuple: bool = False
    group: int | None = None


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Let every later call of ``module`` keep no activations: they are computed again in backward.
    Gradients do not change.

    Args:
        module: part of the model, before or after it is wrapped.
        preserve_rng_state: draw the same random numbers again; see the head of this file.
        pack_args_as_tuple: for `nn.Sequential`: the input is a tuple, which the first layer gets as
            one argument. Not needed for distributed transformer layers, whose input is always a tuple.
        strategy: for `nn.Sequential`: ``each`` layer by itself, ``contiguous`` for all of a partition at once,
            ``group_N`` for N at a time.

    Raises ArgumentError, ArgumentTypeError for bad values. When the module is called, PartitionError
    if a manual partition splits it; with an automatic one it warns, and does not checkpoint.
    """
    name = "smp.set_activation_checkpointing"
    session = sessions.current(name)
    model, given = (
        session.model,
        cast(object, module),
    )  # a DistributedModel is both, unknown to mypy
    if model is not None and given is model:
        module = model.get_module()
    policy = policy_of(name, module, preserve_rng_state, pack_args_as_tuple, strategy)
    module.__dict__[MARK] = policy


def policy_of(
    call: str, module: object, preserve_rng_state: bool, pack_args_as_tuple: bool, strategy: str
) -> CheckpointPolicy:
    """The policy that these arguments ask for. Raises ArgumentError, ArgumentTypeError."""
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"{call}: module is a {type(module).__name__}, not a torch.nn.Module: activations are "
            "checkpointed module by module. Put the function into a module"
        )
    if not isinstance(strategy, str):
        raise ArgumentTypeError(f"{call}: strategy must be a str, not {strategy!r}")
    if isinstance(module, nn.Sequential):
        group = {"each": 1, "contiguous": 0}.get(strategy)
        named = re.fullmatch(r"group_([1-9]\d*)", strategy)
        if group is None and named is None:
            raise ArgumentError(
                f"{call}: strategy={strategy!r}: must be 'each', 'contiguous', or 'group_N' with N layers "
                "in a group, as in 'group_2'"
            )
        size = group if named is None else int(named[1])
        return CheckpointPolicy(bool(preserve_rng_state), bool(pack_args_as_tuple), size)
    if pack_args_as_tuple or strategy != "each":
        raise ArgumentError(
            f"{call}: pack_args_as_tuple and strategy are for torch.nn.Sequential, and module is a "
            f"{type(module).__name__}. Leave them out"
        )
    return CheckpointPolicy(bool(preserve_rng_state))


def run(
    site: Site, args: tuple[object, ...], kwargs: dict[str, object], once: Callable[..., object]
) -> object:
    """``once(*args, **kwargs)``, which runs the module of ``site`` on this rank, as its policy says.

    Called where the module runs; ``once`` is called again, maybe in another thread, by backward.
    """
    policy: Any = kwargs.pop(ARGUMENT, None) if ARGUMENT in kwargs else vars(site.module).get(MARK)
    if policy is None or not torch.is_grad_enabled():
        return once(*args, **kwargs)
    if policy.group is not None:
        with _grouping(site, policy):
            return once(*args, **kwargs)
    if not _whole(site):
        return once(*args, **kwargs)
    return _region(site.module, site.path, policy, once, args, kwargs)


def refuse_torchs(path: str, activity: Activity | None) -> None:
    """Raise UnsupportedTrainingError for a call of the module at ``path`` under ``torch.utils.checkpoint``.

    Such a call would be made again in backward, with another random stream, and only if its module is on this rank:
    so it is refused in forward, whatever the partition. In backward a call is one that is repeated; ours are known.
    """
    backward = activity is not None and activity.phase is Phase.BACKWARD
    if backward and not _thread.repeating:
        how = "during the backward pass, as torch.utils.checkpoint does"
    elif not backward and _under_torchs(activity):
        how = "under torch.utils.checkpoint"
    else:
        return
    raise UnsupportedTrainingError(
        f"module {path or '(the whole)'!r} was called {how}, which is not supported (docs/spec/api.md#6). "
        "Use smp.set_activation_checkpointing(module), or checkpoint of smp_core.torch.patches.checkpoint"
    )


def _under_torchs(activity: Activity | None) -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", None) == _TORCHS:
        return True
    if torch.is_grad_enabled() or (activity is not None and not activity.step.modes.grad):
        return False
    # Its older variant runs the first time without recording, as a script's evaluation does, too.
    module = sys.modules.get(_TORCHS)
    if module is None:
        return False
    code = module.CheckpointFunction.forward.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


_TORCHS = "torch.utils.checkpoint"


def forward(site: Site, /, *args: object, **kwargs: object) -> object:
    """The module's own ``forward``; of a Sequential that is checkpointed, layer by layer as it says."""
    policy = _thread.policies.get(id(site.module))
    if policy is None or kwargs or len(args) != 1:
        return site.plain(*args, **kwargs)
    return _layers(site, policy, args[0])


class CheckpointedSite(Site):
    """The site of one module, whose calls keep the activations that the module's policy allows."""

    __slots__ = ()
    _around = run
    _own = forward

    def _refuse(self, activity: Activity) -> None:
        refuse_torchs(self.path, activity)


def call(
    module: nn.Module, policy: CheckpointPolicy, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Call a module under a policy, wherever it is."""
    site = site_of(module)
    if site is not None:
        return module(*args, **kwargs, **{ARGUMENT: policy})
    if not torch.is_grad_enabled() or sessions.current("activation checkpointing").tracing:
        return module(*args, **kwargs)
    path = type(module).__name__  # no part of the model, or not of one that is partitioned
    if policy.group is None:
        return _region(module, path, policy, module, args, kwargs)
    value = args[0]
    _check_input(path, module, policy, value)
    for layers in _cut([each for each in module._modules.values() if each], policy.group):
        part = _Run(layers)
        value = _region(part, path, policy, part.forward, (value,), {})
    return value


def site_of(module: nn.Module) -> Site | None:
    """The site that catches the calls of a module, or None if they are not caught."""
    caught = vars(module).get("_compiled_call_impl")
    owner = getattr(caught, "__self__", None)
    return owner if isinstance(owner, Site) else None


# Regions.


class _Thread(threading.local):
    """The state of one thread: the Sequentials that run by groups around the present call, and whether the call
    is a repetition.
    """

    def __init__(self) -> None:
        self.policies: dict[int, CheckpointPolicy] = {}
        self.repeating = False


_thread = _Thread()


def _region(
    module: nn.Module,
    path: str,
    policy: CheckpointPolicy,
    once: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    activity = activities.current()
    buffers = recompute.Buffers(module)

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        now = activities.current()
        if activity is not None and now is None:
            raise OutsideStepError(
                f"module {path or '(the whole)'}: backward through a checkpointed module was called "
                "outside of the step in which it ran. Call model.backward(loss) in the function that smp.step decorates"
            )
        with buffers.restored(), _in_timeline(now, path), uses.repeating():
            before, _thread.repeating = _thread.repeating, True
            try:
                yield
            finally:
                _thread.repeating = before

    preserve = policy.preserve_rng_state and activity is None
    name = f"module {path!r} ({type(module).__name__})"
    return recompute.run(name, once, args, kwargs, again, preserve)


def _in_timeline(
    activity: activities.Activity | None, path: str
) -> contextlib.AbstractContextManager[None]:
    """A context in which a module repeats its forward pass: an event of the step's timeline, outside of steps none."""
    if activity is None:
        return contextlib.nullcontext()
    return activity.step.timeline.recomputes(activity, path)


def _owners(path: str) -> set[int]:
    """The pp ranks that own a part of the module at ``path``."""
    model = sessions.current("activation checkpointing").model
    placed = None if model is None else model.placement
    if placed is None:
        return set()
    below = f"{path}." if path else ""
    return {
        owner for each, owner in placed.modules.items() if each == path or each.startswith(below)
    }


def _whole(site: Site) -> bool:
    """Return whether the module lies on one rank. Raises PartitionError, or warns, if not."""
    owners = vars(site.module).get("_smp_checkpoint_owners")
    if owners is None:
        owners = site.module.__dict__["_smp_checkpoint_owners"] = _owners(site.path)
        if len(owners) > 1:
            config = sessions.current("activation checkpointing").runtime.config
            text = (
                f"activation checkpointing: module {site.path or '(the whole)'!r} "
                f"({type(site.module).__name__}) is split over the partitions {sorted(owners)}"
            )
            if not config.auto_partition:
                del site.module.__dict__["_smp_checkpoint_owners"]
                raise PartitionError(
                    f"{text}. Put it on one partition (smp.partition, smp.set_partition), or checkpoint its "
                    "children"
                )
            warnings.warn(
                f"{text}, so that its activations are kept. Checkpoint its children instead",
                stacklevel=2,
            )
    return len(owners) <= 1


# Sequentials.


class _Run(nn.Module):
    """Layers one after the other, in one region."""

    layers: list[nn.Module]

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        # Not by register_module: they stay where they are in the tree of the model.
        self.__dict__["layers"] = layers

    def modules(self) -> object:  # type: ignore[override]
        """The modules of the layers, each once."""
        return iter({id(each): each for layer in self.layers for each in layer.modules()}.values())

    def forward(self, value: object) -> object:
        for layer in self.layers:
            value = layer(value)
        return value


@contextlib.contextmanager
def _grouping(site: Site, policy: CheckpointPolicy) -> Iterator[None]:
    before = _thread.policies.copy()
    _thread.policies[id(site.module)] = policy
    try:
        yield
    finally:
        _thread.policies = before


def _layers(site: Site, policy: CheckpointPolicy, value: object) -> object:
    """The layers of a Sequential, group by group."""
    assert policy.group is not None
    _check_input(site.path, site.module, policy, value)
    each = CheckpointPolicy(policy.preserve_rng_state)
    here = _owners(site.path) if activities.current() is None else {_rank()}
    layers = list(site.module._modules.values())
    for owners, run in itertools.groupby(layers, lambda layer: _owners_of(layer)):
        for group in _cut([layer for layer in run if layer is not None], policy.group):
            if len(group) == 1 or owners != here:
                for layer in group:
                    value = call(layer, each, (value,), {})
            else:
                part = _Run(group)
                value = _region(part, site.path, each, _same_keys(part), (value,), {})
    return value


def _rank() -> int:
    activity = activities.current()
    rank: int = activity.step.rank  # type: ignore[union-attr]
    return rank


def _owners_of(layer: nn.Module | None) -> set[int]:
    site = None if layer is None else site_of(layer)
    return set() if site is None else _owners(site.path)


def _cut(layers: list[nn.Module], size: int) -> list[list[nn.Module]]:
    """Groups of ``size`` layers, the last with the rest; one group if ``size`` is 0."""
    size = size or max(1, len(layers))
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def _check_input(path: str, module: nn.Module, policy: CheckpointPolicy, value: object) -> None:
    first = next(iter(module._modules.values()), None)
    if not isinstance(value, tuple) or getattr(first, TAKES_TUPLE, False):
        return
    if not policy.pack_args_as_tuple:
        raise ArgumentError(
            f"activation checkpointing: module {path!r} (Sequential) got a tuple. Set pack_args_as_tuple=True: its "
            "first layer then gets the tuple as one argument"
        )


def _same_keys(part: _Run) -> Callable[..., object]:
    """A region that is a module call has its key. A group of layers is part of its Sequential's call,
    so callers that count calls do not see it.
    """
    return uses.same_keys(part.forward)
