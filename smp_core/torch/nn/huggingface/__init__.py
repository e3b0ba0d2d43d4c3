"""The models of Hugging Face that tensor parallelism distributes as they are (API 1.10).

A module of one of these classes is replaced where a script wishes it, as a ``torch.nn.Linear`` is. Its state has the
names of ``smp.nn``; ``model.load_state_dict`` takes a state with Hugging Face's names, too. Nothing here imports
Transformers: classes are known by name, and a module is at hand where it is replaced.

The module of a family is imported at its first use, as an attribute too: ``smp.nn.huggingface.gpt2``.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from torch import nn

from smp_core.torch.tensor_parallel import registry
from smp_core.torch.tensor_parallel.registry import Registration

#: The module of this package for each class of Transformers.
FAMILIES = {
    "transformers.models.bert.modeling_bert.BertEncoder": "bert",
    "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel": "gpt2",
    "transformers.models.gpt2.modeling_gpt2.GPT2Model": "gpt2",
    "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoForCausalLM": "gptneo",
    "transformers.models.gpt_neo.modeling_gpt_neo.GPTNeoModel": "gptneo",
    "transformers.models.gptj.modeling_gptj.GPTJForCausalLM": "gptj",
    "transformers.models.gptj.modeling_gptj.GPTJModel": "gptj",
    "transformers.models.roberta.modeling_roberta.RobertaEncoder": "roberta",
}


def __getattr__(name: str) -> ModuleType:
    if name not in FAMILIES.values():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _module(name)


def registration_of(cls: type[nn.Module]) -> Registration | None:
    """The registration of a class of Transformers; None of any other class."""
    family = FAMILIES.get(f"{cls.__module__}.{cls.__qualname__}")
    if family is None:
        return None
    found: Registration = _module(family).registration(cls)
    return found


def _module(family: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{family}")


registry.FINDERS.append(registration_of)
