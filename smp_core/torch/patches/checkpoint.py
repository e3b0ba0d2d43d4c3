"""``checkpoint`` and ``checkpoint_sequential``, to be used in a module's forward in place of those of
``torch.utils.checkpoint`` (API 1.9).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from smp_core.errors import ArgumentTypeError
from smp_core.torch.memory import activations

__all__ = ["checkpoint", "checkpoint_sequential"]

_NOT_GIVEN: Any = object()


def checkpoint(
    module: nn.Module = _NOT_GIVEN, /, *args: object, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """``module(*args, **kwargs)``, keeping its inputs and none of its activations: backward computes
    them again, on the rank that owns the module. Gradients do not change.

    ``module`` is a module, no function. If nothing is given by position, it may be given by its name: else
    ``module=`` is an argument of the module's own. Raises ArgumentTypeError if it is not; PartitionError if a
    manual partition splits it. With an automatic one it warns, and keeps the activations.
    """
    name = "checkpoint"
    if module is _NOT_GIVEN and "module" in kwargs:
        module = kwargs.pop("module")
    if isinstance(module, nn.Sequential):
        policy = activations.CheckpointPolicy(bool(preserve_rng_state))
    else:
        policy = activations.policy_of(name, module, preserve_rng_state, False, "each")
    return activations.call(module, policy, args, kwargs)


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """``sequential(input)``, keeping the inputs of its layers, or of groups of them, alone.

    Args:
        input: a tensor, or with ``pack_args_as_tuple`` a tuple, which is one argument of the layer.
        strategy: ``each`` layer by itself, ``contiguous`` for all of a partition at once, ``group_N``
            for N at a time, never across partitions.

    Raises ArgumentError, ArgumentTypeError for bad values.
    """
    name = "checkpoint_sequential"
    if not isinstance(sequential, nn.Sequential):
        raise ArgumentTypeError(
            f"{name}: sequential must be a torch.nn.Sequential, not a {type(sequential).__name__}. Use "
            "checkpoint(module, ...) for other modules"
        )
    policy = activations.policy_of(
        name, sequential, preserve_rng_state, pack_args_as_tuple, strategy
    )
    return activations.call(sequential, policy, (input,), {})
