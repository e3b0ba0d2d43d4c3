"""Invalid configurations: valid ones in which exactly one thing is planted wrong.

Tables list the planted mistakes: bad values per key, misspelt keys, broken cross-rules, degrees that do
not fit the world. The tables are written down from API 3.4, 3.5 and 8, and use nothing of
``smp_core.config``, so that a checker of configurations can be tested against them. A value that
the sources do not clearly refuse (``True`` for a count, ``"_only_forward"``) is not planted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_smp.strategies.arguments import check_int
from pytest_smp.strategies.configuration import (
    DEGREES,
    FREE_KEYS,
    IGNORED_KEYS,
    KEYS,
    Parameters,
    assignments,
    configs,
)
from pytest_smp.strategies.worlds import divisors

_PP, _TP, _SDP = DEGREES
_Names = tuple[str, ...]


class Plant(NamedTuple):
    """One mistake: parameters to add to a valid dict, and the keys that the error must name."""

    parameters: Parameters
    keys: _Names


# ---- Bad values ----------------------------------------------------------------------------------

_NOT_A_FLAG = (2, -1, "yes", "True", 0.5, [True])
_NOT_A_COUNT = (0, -1, 1.5, "2", [2], -(10**20))
_NOT_A_SIZE = (-1, 0.5, "1e6", -(10**20))
_NOT_A_CHOICE = ("", "other", "CLUSTER ", 7, ["auto"])

#: Values that a key refuses. Source: API 3.1 to 3.4.
BAD_VALUES: Mapping[str, Sequence[Any]] = {
    "microbatches": _NOT_A_COUNT,
    _PP: _NOT_A_COUNT,
    "partitions": _NOT_A_COUNT,
    _TP: _NOT_A_COUNT,
    _SDP: _NOT_A_COUNT,
    "active_microbatches": _NOT_A_COUNT,
    "activation_loading_horizon": _NOT_A_COUNT,
    "ranks_per_node": _NOT_A_COUNT,
    "default_partition": (-1, 0.5, "0", [0]),
    "ddp_port": (-1, 0.5, "80"),
    "pipeline": ("simpel", *_NOT_A_CHOICE),
    "optimize": ("both", *_NOT_A_CHOICE),
    "placement_strategy": ("DPP", "DP", "DPTD", "clusters", *_NOT_A_CHOICE),
    "ddp_dist_backend": _NOT_A_CHOICE,
    "memory_weight": (-0.1, 1.1, 2, math.inf, "0.5"),
    "sdp_gradient_clipping": (-1.0, -1, "1.0"),
    "sdp_reduce_bucket_size": _NOT_A_SIZE,
    "sdp_param_persistence_threshold": _NOT_A_SIZE,
    "sdp_max_live_parameters": _NOT_A_SIZE,
    "partition_file": (7, ["partition.json"]),
    **dict.fromkeys(
        (
            "auto_partition",
            "contiguous",
            "horovod",
            "xla",
            "fork",
            "deterministic_server",
            "skip_tracing",
            "load_partition",
            "ddp",
            "prescaled_batch",
            "shard_optimizer_state",
            "offload_activations",
            "delayed_parameter_initialization",
            "fp16",
            "fp16_params",
            "bf16",
            "sdp_hierarchical_allgather",
        ),
        _NOT_A_FLAG,
    ),
}

#: The parameters that must be given beside a key, so that the key's bad value is the only mistake.
_BESIDE: Mapping[str, Parameters] = {"ddp_port": {"ddp": True}, "ddp_dist_backend": {"ddp": True}}


def _bad_values() -> Iterator[Plant]:
    for key, values in BAD_VALUES.items():
        for value in values:
            yield Plant({**_BESIDE.get(key, {}), key: value}, (key,))


# ---- Unknown keys --------------------------------------------------------------------------------

KNOWN_NAMES = (*DEGREES, "partitions", *(each.name for each in KEYS))


def _misspellings(name: str) -> Iterator[str]:
    for at in range(len(name)):
        yield name[:at] + name[at + 1 :]
        yield name[: at + 1] + name[at:]
        yield name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :]
    yield name.upper()
    yield name.replace("_", "-")
    yield name.replace("_", "")


def unknown_keys() -> Iterator[Plant]:
    """Every misspelling of a known key that can only mean that one."""
    meant: dict[str, set[str]] = {}
    for name in KNOWN_NAMES:
        for typo in _misspellings(name):
            meant.setdefault(typo, set()).add(name)
    for typo, names in meant.items():
        names |= {name for name in KNOWN_NAMES if _one_letter_apart(typo, name)}
        # A typo of two keys (`p16`, `fb16`) has no nearest one, and one of a short key may be empty.
        if typo not in (*KNOWN_NAMES, *IGNORED_KEYS, "") and len(names) == 1:
            yield Plant({typo: True}, (typo, *names))


def _one_letter_apart(a: str, b: str) -> bool:
    return len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) == 1


# ---- Broken cross-rules --------------------------------------------------------------------------


class Breach(NamedTuple):
    """A cross-rule and how to break it and no other.

    ``degrees`` are above 1 and fit the world together; a world that has no such degrees cannot
    break the rule. ``may_say`` are the defaults by which the rule is broken: said, or left out.
    """

    keys: _Names
    degrees: _Names = ()
    parameters: Mapping[str, SearchStrategy[Any]] = MappingProxyType({})
    may_say: Mapping[str, Any] = MappingProxyType({})


_TRUE: SearchStrategy[Any] = st.sampled_from([True, 1])
_FALSE: SearchStrategy[Any] = st.sampled_from([False, 0])

#: Source: API 3.4, 3.5.
BREACHES: tuple[Breach, ...] = (
    Breach((_TP, "ddp"), degrees=(_TP,), may_say={"ddp": False}),
    Breach(("bf16", _SDP), parameters={"bf16": _TRUE}, may_say={_SDP: 1}),
    Breach(("fp16", "bf16"), degrees=(_SDP,), parameters={"fp16": _TRUE, "bf16": _TRUE}),
    Breach((_SDP, _PP), degrees=(_SDP, _PP)),
    Breach((_SDP, "partitions"), degrees=(_SDP, "partitions")),
    Breach(
        (_SDP, "shard_optimizer_state"),
        degrees=(_SDP,),
        parameters={"shard_optimizer_state": _TRUE},
    ),
    Breach(
        (_SDP, _TP, "prescaled_batch"),
        degrees=(_SDP, _TP),
        parameters={"ddp": _TRUE},
        may_say={"prescaled_batch": False},
    ),
    Breach(("auto_partition", "default_partition"), parameters={"auto_partition": _FALSE}),
    Breach(
        ("default_partition", _PP),
        parameters={"default_partition": st.integers(1, 9)},
        may_say={_PP: 1},
    ),
    Breach(("ddp_port", "ddp"), parameters={"ddp_port": st.integers(0, 65535)}),
    Breach(
        ("ddp_dist_backend", "ddp"),
        parameters={"ddp_dist_backend": st.sampled_from(["auto", "nccl"])},
        may_say={"ddp": False},
    ),
    Breach(("horovod", "ddp"), parameters={"horovod": _TRUE, "ddp": _TRUE}),
)


def _breaches(size: int) -> list[SearchStrategy[Plant]]:
    named = [_broken(rule, splits) for rule in BREACHES if (splits := _splits(size, rule.degrees))]
    return named if size == 1 else [*named, _partition_beyond_the_last(size)]


@st.composite
def _partition_beyond_the_last(draw: DrawFn, size: int) -> Plant:
    name = draw(st.sampled_from([_PP, "partitions"]))
    degree = draw(st.sampled_from(divisors(size)[1:]))
    first_bad = degree  # because partitions count from 0
    default = draw(st.integers(first_bad, first_bad + 3))
    return Plant({name: degree, "default_partition": default}, ("default_partition", name))


def _splits(size: int, names: _Names) -> list[dict[str, int]]:
    """The choices of degrees above 1 for these keys whose product divides ``size``."""
    above_one = divisors(size)[1:]
    return [
        dict(zip(names, degrees, strict=True))
        for degrees in itertools.product(above_one, repeat=len(names))
        if size % math.prod(degrees) == 0
    ]


@st.composite
def _broken(draw: DrawFn, rule: Breach, splits: list[dict[str, int]]) -> Plant:
    degrees = draw(st.sampled_from(splits))
    given = {name: draw(values) for name, values in rule.parameters.items()}
    said = rule.may_say if draw(st.booleans()) else {}
    return Plant({**degrees, **given, **said}, rule.keys)


# ---- Degrees that do not fit the world -----------------------------------------------------------


def _misfits(size: int) -> Iterator[Plant]:
    """Source: API 3.5, 8.1, 8.3, 8.5."""
    degrees = divisors(size)
    for degree in (*range(2, min(size, 16)), size + 1, size + 2):
        if size % degree:
            yield Plant({_PP: degree}, (_PP,))
            yield Plant({_TP: degree, "ddp": True}, (_TP,))
            yield Plant({_SDP: degree}, (_SDP,))
    for pipeline, tensor in itertools.product(degrees, repeat=2):
        if size % (pipeline * tensor):
            yield Plant({_PP: pipeline, _TP: tensor, "ddp": True}, (_PP, _TP))
    for tensor, sharded in itertools.product(degrees, repeat=2):
        if (size // tensor) % sharded:
            yield Plant({_TP: tensor, "ddp": True, _SDP: sharded, "prescaled_batch": True}, (_SDP,))
    for first, second in itertools.permutations(degrees, 2):
        yield Plant({"partitions": first, _PP: second}, ("partitions", _PP))


# ---- The strategy --------------------------------------------------------------------------------


def invalid_configs(size: int) -> SearchStrategy[tuple[Parameters, tuple[str, ...]]]:
    """Draw ``(parameters, keys)``: a configuration with one mistake, and the names that the error must hold.

    The mistake is a bad value, a misspelt key, a broken cross-rule, or degrees that do not fit a
    world of ``size`` ranks (the only kind that needs the world to be seen). ``keys`` are the names
    that the message must hold: of a misspelt key, the key that was meant too. Without the mistake
    the configuration is valid. Shrinks towards the mistake alone.

    Args:
        size: ranks in the world.

    Raises:
        InvalidArgument: ``size`` is no int of at least 1.

    Source: API 3.4, 3.5, 8.
    """
    check_int("size", size, at_least=1)
    return st.one_of(
        _in_free_keys(st.sampled_from(tuple(_bad_values()))),
        _in_any(st.sampled_from(tuple(unknown_keys())), size),
        _in_free_keys(st.one_of(_breaches(size))),
        _in_free_keys(st.sampled_from(tuple(_misfits(size)))),
    )


@st.composite
def _in_any(
    draw: DrawFn, plants: SearchStrategy[Plant], size: int
) -> tuple[Parameters, tuple[str, ...]]:
    parameters, keys = draw(plants)
    return {**draw(configs(size)), **parameters}, keys


@st.composite
def _in_free_keys(
    draw: DrawFn, plants: SearchStrategy[Plant]
) -> tuple[Parameters, tuple[str, ...]]:
    # The other keys stand in no rule, so the plant is the only mistake, and no other check meets it first.
    parameters, keys = draw(plants)
    return {**draw(assignments(FREE_KEYS, {})), **parameters}, keys
