"""A script's wishes for tensor parallelism: ``smp.tensor_parallelism`` and ``smp.set_tensor_parallelism`` (API 1.9).

A wish is left as a mark on modules. ``smp.DistributedModel`` carries the wishes out (replacement.py). With
``tensor_parallel_degree`` 1 a distributed module holds whole parameters and computes alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from torch import nn

from smp_core.errors import ArgumentError, ArgumentTypeError
from smp_core.torch import session as sessions
from smp_core.torch.fused import warn_options
from smp_core.torch.parameters.marking import Mark, new_mark
from smp_core.torch.tensor_parallel import registry

#: The options of distributed modules that scripts pass to the contexts (API 1.9). A module that does not take an
#: option is made without it.
OPTIONS = frozenset(
    {
        "attention_in_fp32",
        "distribute_embedding",
        "flash_attention",
        "fp32_residual_addition",
        "fused_bias_gelu",
        "fused_dropout",
        "fused_softmax",
        "optimize",
        "query_key_layer_scaling",
        "use_alibi",
        "zero_init",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """A script's wish for one module: to be distributed or not, and the options for the distributed module."""

    enabled: bool
    options: Mapping[str, object]


WISH: Mark[Wish] = new_mark("_smp_tensor_parallelism")


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **options: object) -> Iterator[None]:
    """Modules created inside are distributed over the TP group, where their class is registered.

    Of nested contexts the innermost counts. Of nested modules only the outermost supported one is distributed.
    Modules that share a parameter with others, and those whose sizes the degree does not divide, stay as they are;
    ``smp.DistributedModel`` logs them with the reason. ``options`` are passed to the distributed modules that take
    them, and override what an ``init_hook`` returned. (API 1.9)

    Raises ArgumentError for an unknown option, NotInitializedError before ``smp.init``.
    """
    wish = _wish("smp.tensor_parallelism", enabled, options)
    with WISH.inside(wish):
        yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: object) -> None:
    """Wish the same as ``smp.tensor_parallelism`` for an existing module and all modules below it, before the model
    is wrapped. The last call counts. (API 1.9)

    Raises ArgumentTypeError for a value that is no module, ArgumentError for an unknown option or if the model is
    wrapped already, NotInitializedError before ``smp.init``.
    """
    call = "smp.set_tensor_parallelism"
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"{call}: module is a {type(module).__name__}, not a torch.nn.Module"
        )
    wish = _wish(call, enabled, options)
    model = sessions.current(call).model
    if model is not None and any(each is module for each in model.modules()):
        raise ArgumentError(
            f"{call}: the model that holds this {type(module).__name__} is wrapped already, and modules are "
            "distributed by smp.DistributedModel. Call it before"
        )
    for child in module.modules():
        WISH.set(child, wish)


def _wish(call: str, enabled: object, options: Mapping[str, object]) -> Wish:
    sessions.current(call)
    if not isinstance(enabled, bool):
        raise ArgumentTypeError(f"{call}: enabled must be a bool, not {enabled!r}")
    known = OPTIONS | registry.options()
    unknown = sorted(set(options) - known)
    if unknown:
        raise ArgumentError(
            f"{call}: unknown option {unknown[0]!r}: no registered distributed module takes it. There is "
            f"{', '.join(sorted(known))}"
        )
    if enabled:
        warn_options(options)
    return Wish(enabled, dict(options))
