"""States of whole models, translated wherever they have modules of a family.

``family`` is the name of a module of this package, whose function an error names.
"""

from __future__ import annotations

from collections.abc import Mapping

from smp_core.errors import ArgumentError
from smp_core.torch.parameters import slices
from smp_core.torch.state_keys import PARTIAL
from smp_core.torch.tensor_parallel.translation import Translation


def to_ours(
    family: str, translation: Translation, state: Mapping[str, object]
) -> dict[str, object]:
    """The state with the keys of distributed modules.

    Raises ArgumentError if it has none of the family, or is a part of a distributed model's.
    """
    call = f"{family}.translate_hf_state_dict_to_smdistributed_{family}"
    found = _whole(call, state)
    for prefix in _some(call, family, translation.prefixes(state)):
        found = translation.to_ours(found, prefix)
    return found


def to_theirs(
    family: str, translation: Translation, state: Mapping[str, object]
) -> dict[str, object]:
    """The state with the keys of Hugging Face.

    Raises ArgumentError if it has none of the family's distributed ones, or is a part of a distributed model's.
    """
    call = f"{family}.translate_state_dict_to_hf_{family}"
    found = _whole(call, state)
    for prefix in _some(call, family, translation.our_prefixes(state)):
        found = translation.to_theirs(found, prefix)
    return found


def _whole(call: str, state: Mapping[str, object]) -> dict[str, object]:
    if state.get(PARTIAL, False) or slices.KEY in state:
        raise ArgumentError(
            f"{call}: the state is a part of a distributed model's, whose tensors may be slices. Gather the whole "
            "first: model.state_dict()"
        )
    return dict(state)


def _some(call: str, family: str, prefixes: list[str]) -> list[str]:
    if not prefixes:
        raise ArgumentError(
            f"{call}: the state has no layer of {family}: it is that of another model, in the other form, or a part"
        )
    return prefixes
