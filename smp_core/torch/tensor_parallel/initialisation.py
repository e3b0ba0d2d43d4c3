"""Models of Hugging Face that were never initialised: their weights are those of torch's constructors.

Public GPT scripts switch ``PreTrainedModel.init_weights`` off to start faster, because distributed modules draw weights
of their own (API 1.7). The untouched values would train from a loss far above that of an initialised model.
"""

from __future__ import annotations

import math

from torch import nn

from smp_core.torch.parameters.creation import is_on_tape

#: The base class of Transformers' models, and the flag of modules that it has initialised or loaded (from 4.35 on).
_BASE, _FLAG = "PreTrainedModel", "_is_hf_initialized"
#: Standard errors between a sample's deviation and that of its distribution, beyond which it has another one.
_STANDARD_ERRORS = 5


def uninitialised_modules(root: nn.Module) -> set[int]:
    """Return the ids of all modules below models of Transformers that were neither initialised nor loaded."""
    return {
        id(module)
        for model in root.modules()
        if any(cls.__name__ == _BASE for cls in type(model).__mro__)
        and not any(hasattr(module, _FLAG) for module in model.modules())
        # A script may have loaded weights by load_state_dict, which sets no flag.
        and all(map(_has_torchs_weights, model.modules()))
        for module in model.modules()
    }


def _has_torchs_weights(module: nn.Module) -> bool:
    """Return whether weights are spread as torch's constructor draws them; True for any class but torch's."""
    if any(map(is_on_tape, module.parameters(recurse=False))):
        return False  # its values are delayed, and new at every degree
    if isinstance(module, nn.Embedding):
        deviation = 1.0
    elif isinstance(module, nn.Linear):
        deviation = (3 * module.in_features) ** -0.5
    else:
        return True
    # Torch draws from distributions whose kurtosis is at most that of the normal one, for which this is the error.
    error = 1 / math.sqrt(2 * module.weight.numel())
    measured = module.weight.detach().double().square().mean().sqrt().item()
    return abs(measured / deviation - 1) <= _STANDARD_ERRORS * error
