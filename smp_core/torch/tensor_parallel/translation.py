"""Translation of state dicts: between a class of modules and the distributed module that takes its place, both ways
(API 1.7, 1.10).

A translation is data: rules that pair keys of one form with those of the other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import torch

from smp_core.errors import ArgumentError

#: In a pattern of keys: the number of a layer.
_NUMBER = "{}"


@dataclasses.dataclass(frozen=True, slots=True)
class KeyRule:
    """One entry of the original's state, and the entries of the distributed module's that hold the same.

    Attributes:
        theirs: the key in the original's state, with ``{}`` for the number of a layer.
        ours: keys in the distributed module's state; several are parts of the tensor along axis 0, of equal sizes.
        transposed: whether the original holds the transpose.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


def pairs(
    theirs: str, ours: str | Sequence[str], *names: str, transposed: bool = False
) -> list[KeyRule]:
    """The rules for parameters ``names`` (``weight``, ``bias``) of a module; of these a weight alone is transposed."""
    paths = [ours] if isinstance(ours, str) else list(ours)
    return [
        KeyRule(
            f"{theirs}.{name}",
            tuple(f"{path}.{name}" for path in paths),
            transposed and name == "weight",
        )
        for name in names or ("weight", "bias")
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Translation:
    """A translation of state dicts both ways. Keys of which no rule knows are handed on.

    Attributes:
        rules: all pairs of entries.
        tied: keys of the original's state that hold the tensor of another key where the state has equal values for
            both, as a model with ``tie_word_embeddings`` has; others are entries of their own.
        dropped: keys of the original's state that have no counterpart: buffers.
    """

    rules: tuple[KeyRule, ...]
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    def to_ours(self, state: Mapping[str, object], prefix: str = "") -> dict[str, object]:
        """The state with the keys of the distributed module, in place of those of the original below ``prefix``.

        Raises ArgumentError for a tensor that does not have the parts that a rule says.
        """
        found: dict[str, object] = {}
        for key, value in state.items():
            below = key.removeprefix(prefix)
            if not key.startswith(prefix) or not isinstance(value, torch.Tensor):
                found[key] = value
            elif below in self.tied and _equal(value, state.get(prefix + self.tied[below])):
                continue
            elif not any(_number(each, below) is not None for each in self.dropped):
                found.update(self._ours(below, value, prefix))
        return found

    def to_theirs(self, state: Mapping[str, object], prefix: str = "") -> dict[str, object]:
        """The state with the keys of the original, in place of those of the distributed module below ``prefix``.

        Raises ArgumentError if the state has some parts of one of the original's tensors, and lacks others.
        """
        found: dict[str, object] = {}
        for key, value in state.items():
            below = key.removeprefix(prefix)
            if not key.startswith(prefix) or not isinstance(value, torch.Tensor):
                found[key] = value
                continue
            match = self._of_ours(below)
            if match is None:
                found[key] = value
                continue
            rule, number = match
            theirs = prefix + _numbered(rule.theirs, number)
            if theirs not in found:
                whole = _joined(state, [prefix + _numbered(each, number) for each in rule.ours])
                found[theirs] = whole.t().contiguous() if rule.transposed else whole
        for key, same in self.tied.items():
            if prefix + same in found and prefix + key not in found:
                found[prefix + key] = found[prefix + same]
        return found

    def names(self, theirs: str) -> tuple[str, ...]:
        """The keys of the distributed module's state that hold the original's ``theirs``, or a part of it."""
        theirs = self.tied.get(theirs, theirs)
        for rule in self.rules:
            if (number := _number(rule.theirs, theirs)) is not None:
                return tuple(_numbered(each, number) for each in rule.ours)
        return (theirs,)

    def module(self, theirs: str) -> str | None:
        """The path of the distributed module's layer that takes the place of the original's layer ``theirs``; None of
        a path that is no layer's.
        """
        for rule in self.rules:
            layer, found, _ = rule.theirs.partition(_NUMBER)
            if found and (number := _number(layer + _NUMBER, theirs)) is not None:
                return rule.ours[0].partition(_NUMBER)[0] + number
        return None

    def knows(self, state: Mapping[str, object], prefix: str) -> bool:
        """Return whether a state has any entry of the original below ``prefix``."""
        return any(
            key.startswith(prefix) and _number(rule.theirs, key.removeprefix(prefix)) is not None
            for key in state
            for rule in self.rules
        )

    def prefixes(self, state: Mapping[str, object]) -> list[str]:
        """The prefixes below which a state has entries of the original."""
        pattern = next(each.theirs for each in self.rules if _NUMBER in each.theirs)
        return _prefixes(_numbered(pattern, "0"), state)

    def our_prefixes(self, state: Mapping[str, object]) -> list[str]:
        """The prefixes below which a state has entries of the distributed module."""
        pattern = next(each.ours[0] for each in self.rules if _NUMBER in each.ours[0])
        return _prefixes(_numbered(pattern, "0"), state)

    def _of_ours(self, below: str) -> tuple[KeyRule, str] | None:
        """The rule that has a key of the distributed module's state, and the number of its layer."""
        for rule in self.rules:
            for each in rule.ours:
                if (number := _number(each, below)) is not None:
                    return rule, number
        return None

    def _ours(self, below: str, value: torch.Tensor, prefix: str) -> dict[str, torch.Tensor]:
        for rule in self.rules:
            if (number := _number(rule.theirs, below)) is not None:
                plain = value.t().contiguous() if rule.transposed else value
                keys = [prefix + _numbered(each, number) for each in rule.ours]
                if len(keys) == 1:
                    return {keys[0]: plain}
                if plain.dim() == 0 or plain.shape[0] % len(keys):
                    raise ArgumentError(
                        f"the state's {prefix + below!r} has the shape {tuple(value.shape)}, which has no "
                        f"{len(keys)} equal parts for {', '.join(keys)}"
                    )
                return dict(zip(keys, plain.chunk(len(keys)), strict=True))
        return {prefix + below: value}


def _joined(state: Mapping[str, object], keys: Sequence[str]) -> torch.Tensor:
    """The tensor whose parts are at the keys."""
    parts = [each for each in map(state.get, keys) if isinstance(each, torch.Tensor)]
    if len(parts) != len(keys):
        missing = next(key for key in keys if not isinstance(state.get(key), torch.Tensor))
        raise ArgumentError(
            f"the state has no tensor {missing!r}, and {', '.join(keys)} are parts of one tensor of the original: it "
            "is a part of a state. Translate the whole"
        )
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _equal(value: torch.Tensor, other: object) -> bool:
    """Return whether two entries of a state are the same tensor, or have the same values."""
    if not isinstance(other, torch.Tensor) or (value.shape, value.dtype, value.device) != (
        other.shape,
        other.dtype,
        other.device,
    ):
        return False
    # A tensor without memory has the address 0, and no values to compare.
    return value.data_ptr() == other.data_ptr() or torch.equal(value, other)


def _number(pattern: str, key: str) -> str | None:
    """The number of a layer with which a pattern is a key, "" for a pattern without one; None if it is not."""
    found = re.fullmatch(re.escape(pattern).replace(re.escape(_NUMBER), r"(?P<number>\d+)"), key)
    return None if found is None else found.groupdict().get("number", "")


def _numbered(pattern: str, number: str) -> str:
    return pattern.replace(_NUMBER, number)


def _prefixes(ending: str, state: Mapping[str, object]) -> list[str]:
    found = [key.removesuffix(ending) for key in state if key.endswith(ending)]
    return [each for each in found if not each or each.endswith(".")]
