"""Freezing, partitions, activation checkpointing and, at degree 1, weights of a replaced module, which its distributed
module takes over (API 1.7).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from smp_core.torch import session as sessions
from smp_core.torch.memory import activations
from smp_core.torch.parameters.creation import is_on_tape
from smp_core.torch.parameters.marking import Mark
from smp_core.torch.tensor_parallel.translation import Translation

#: The attribute by which modules of Hugging Face are told to keep no activations.
_CHECKPOINTING = "gradient_checkpointing"


def freeze(made: nn.Module, module: nn.Module, translation: Translation | None) -> str | None:
    """Freeze the parameters of a distributed module whose counterparts in the original are frozen; a part of a frozen
    one is frozen. Return the name of one without a counterpart, if it is not the whole module that is frozen.
    """
    frozen = [name for name, each in module.named_parameters() if not each.requires_grad]
    if frozen and len(frozen) == len(list(module.parameters())):
        made.requires_grad_(False)
        return None
    ours = dict(made.named_parameters())
    for name in frozen:
        for counterpart in (name,) if translation is None else translation.names(name):
            if counterpart not in ours:
                return name
            ours[counterpart].requires_grad_(False)
    return None


def keeps_weights() -> bool:
    """Return whether distributed modules take weights over: at ``tensor_parallel_degree`` 1."""
    # The configuration has the degree: a registered class may be any class of modules, without an attribute for it.
    config = sessions.current("smp.DistributedModel").runtime.config
    degree: int = config.tensor_parallel_degree
    return degree == 1


def carry_weights(
    made: nn.Module, module: nn.Module, translation: Translation | None, initialised: bool
) -> str | None:
    """Give a distributed module the weights of the original at ``tensor_parallel_degree`` 1, unless these are delayed.

    Return the reason why it has new weights instead, if it should have had the original's.
    """
    if not keeps_weights() or any(map(is_on_tape, module.parameters())):
        return None
    if not initialised:
        return (
            "Transformers has neither initialised nor loaded them (init_weights is switched off); load weights after "
            "the model is wrapped"
        )
    state = module.state_dict()
    if translation is not None:
        state = translation.to_ours(state)
    ours = made.state_dict()
    shapes = {name: getattr(each, "shape", None) for name, each in state.items()}  # or extra state
    if any(shapes.get(name, ...) != getattr(each, "shape", None) for name, each in ours.items()):
        return "their entries differ in name or shape"
    made.load_state_dict({name: state[name] for name in ours})
    return None


def carry_marks(
    made: nn.Module,
    module: nn.Module,
    translation: Translation | None,
    marks: Sequence[Mark[int]],
) -> list[str]:
    """Give a distributed module the marks of the original, and its layers those of the original's. Return the paths
    below the original whose marks have no module to go to.
    """
    lost: list[str] = []
    parts = dict(made.named_modules())
    # The mark of a module counts for those below it, unless they have another.
    around: dict[str, dict[str, int | None]] = {}
    checkpointed = _checkpointed_layers(module, translation)
    for below, child in module.named_modules():
        name = below if translation is None or not below else translation.module(below)
        part = parts.get(name) if name is not None else None
        parent = around.get(below.rpartition(".")[0], {}) if below else {}
        around[below] = {mark.attribute: mark.of(child) for mark in marks}
        carried = True
        for mark in marks:
            value = mark.of(child)
            if value is None or value == parent.get(mark.attribute):
                continue
            carried = part is not None and carried
            for each in part.modules() if part is not None else ():
                mark.set(each, value)
        policy = vars(child).get(activations.MARK)
        if policy is None and below in checkpointed:
            policy = activations.CheckpointPolicy()
        if policy is not None and part is not None and policy.group is None:
            part.__dict__[activations.MARK] = policy
        elif policy is not None:
            carried = False
        if not carried:
            lost.append(below)
    return lost


def _checkpointed_layers(module: nn.Module, translation: Translation | None) -> set[str]:
    """The paths of layers for which Hugging Face's ``gradient_checkpointing_enable`` was called; the module itself, if
    it has no layers.
    """
    if translation is None:
        return {""} if getattr(module, _CHECKPOINTING, False) is True else set()
    layers = {
        path: child
        for path, child in module.named_modules()
        if translation.module(path) is not None
    }
    # From version 4.52 on each layer has a flag of its own, and before the module around them.
    if any(hasattr(layer, _CHECKPOINTING) for layer in layers.values()):
        return {path for path, layer in layers.items() if getattr(layer, _CHECKPOINTING, False)}
    asked = any(getattr(each, _CHECKPOINTING, False) is True for each in module.modules())
    return set(layers) if asked else set()
