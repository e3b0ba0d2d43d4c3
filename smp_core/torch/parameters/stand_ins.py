"""Parameters of another shape that stand in a module tree for a while, as whole ones for slices or shards.

Torch's ``state_dict`` and ``load_state_dict``, and the hooks and methods of modules that take part in them, then see
the plain module's parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from smp_core.torch.parameters.split import mark, split_of

#: These copy values into parameters, all of each, and do nothing else to them.
_COMMON = {nn.Module._load_from_state_dict, nn.modules.batchnorm._NormBase._load_from_state_dict}


def is_special(module: nn.Module) -> bool:
    """Return whether any module of the tree loads its state in a way of its own, or has hooks that see the load."""
    return type(module).load_state_dict is not nn.Module.load_state_dict or any(
        getattr(each._load_from_state_dict, "__func__", None) not in _COMMON
        or each._load_state_dict_pre_hooks
        or each._load_state_dict_post_hooks
        for each in module.modules()
    )


@dataclasses.dataclass(eq=False, slots=True)
class StandIn:
    """A full parameter in the place of one of which this rank keeps a part."""

    parameter: nn.Parameter
    full: nn.Parameter
    version: int

    @property
    def changed(self) -> bool:
        """True if the full parameter was changed, or replaced, since it was made, as far as torch counts."""
        return self.full._version != self.version


@contextlib.contextmanager
def standing(
    module: nn.Module, value: Callable[[nn.Parameter], torch.Tensor | None]
) -> Iterator[Sequence[StandIn]]:
    """While entered, each parameter of the tree for which there is a ``value`` is replaced by one with that value;
    afterwards, by itself again. A parameter that somebody puts into its place meanwhile is the full one then.
    """
    stand_ins: dict[int, StandIn | None] = {}
    registries: list[tuple[dict[str, nn.Parameter | None], str, StandIn]] = []
    for child in module.modules():
        for name, parameter in dict.items(child._parameters):
            if parameter is None:
                continue
            if id(parameter) not in stand_ins:
                stand_ins[id(parameter)] = _made(parameter, value(parameter))
            known = stand_ins[id(parameter)]
            if known is not None:
                registries.append((child._parameters, name, known))
                dict.__setitem__(child._parameters, name, known.full)
    made_here = [each for each in stand_ins.values() if each is not None]
    originals = [(each, each.full) for each in made_here]
    try:
        yield made_here
    finally:
        before = {id(each): full for each, full in originals}
        for registry, name, each in registries:
            found = dict.get(registry, name)
            if isinstance(found, nn.Parameter) and found is not before[id(each)]:
                each.full, each.version = found, -1
            dict.__setitem__(registry, name, each.parameter)


def _made(parameter: nn.Parameter, value: torch.Tensor | None) -> StandIn | None:
    if value is None:
        return None
    full, split = nn.Parameter(value, parameter.requires_grad), split_of(parameter)
    if split is not None and tuple(full.shape) == split.local_shape:
        # Of a slice that is sharded: whole slices stand in first, then whole parameters for those.
        mark(full, split)
    return StandIn(parameter, full, full._version)
