"""Hugging Face's ``gradient_checkpointing_enable()``, which becomes activation checkpointing of each layer.

Its own way is ``torch.utils.checkpoint`` around calls of modules, which cannot be repeated where modules lie on several
ranks (API 6). The flags stay, because models go by them in other things, such as caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from smp_core.torch.memory.activations import MARK, CheckpointPolicy

#: The attributes of modules that were asked: the flag, and the function by which they call what is checkpointed.
FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
#: The base of layers that have a flag of their own, from version 4.52 on.
_LAYER = "GradientCheckpointingLayer"


def heed(model: nn.Module) -> None:
    """Let each layer for which checkpointing is asked keep no activations; a policy that a script has set stays."""
    asked = [each for each in model.modules() if _asked(each)]
    for module in asked:
        for layer in _layers(module):
            vars(layer).setdefault(MARK, CheckpointPolicy())
        vars(module)[_FUNCTION] = _call


def _asked(module: nn.Module) -> bool:
    return getattr(module, FLAG, False) is True and callable(getattr(module, _FUNCTION, None))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules whose calls this one checkpoints: itself, or before version 4.52 those in its lists."""
    if _is_layer(module):
        yield module
        return
    for child in module.children():
        if isinstance(child, nn.ModuleList) and not any(map(_is_layer, child.modules())):
            yield from child


def _is_layer(module: nn.Module) -> bool:
    return any(each.__name__ == _LAYER for each in type(module).__mro__)


def _call(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Stands in for ``torch.utils.checkpoint.checkpoint``: the layer that is called checkpoints itself."""
    return function(*args, **kwargs)
