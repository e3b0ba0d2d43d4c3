"""Valid configurations, as the dicts that a script passes to ``smp.init``.

:data:`KEYS` lists the values that a key may have, given the values of the keys above it. The list is
written down from API 3 and uses nothing of ``smp_core.config``, so that each can be tested against the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_smp.strategies.arguments import check_bool, check_int
from pytest_smp.strategies.worlds import joint_degrees, placements

Parameters = dict[str, Any]
_Chosen = Mapping[str, Any]

_OFF: SearchStrategy[Any] = st.sampled_from([False, 0])  # 1 and 0 are flags too (API 3.4)
_ON: SearchStrategy[Any] = st.sampled_from([True, 1])
_FLAG: SearchStrategy[Any] = st.sampled_from([True, False, 1, 0])
_COUNT: SearchStrategy[Any] = st.integers(1, 9)
_SOMETIMES = st.sampled_from([False] * 5 + [True])
_SIZE: SearchStrategy[Any] = st.sampled_from([1, 7, 1000, 5e8, 10**9])  # the docs write 5e8


def _sharded(chosen: _Chosen) -> bool:
    return bool(chosen["sharded_data_parallel_degree"] > 1)


def _tensor_parallel(chosen: _Chosen) -> bool:
    return bool(chosen["tensor_parallel_degree"] > 1)


class ConfigurationKey(NamedTuple):
    """One key: its values and whether it must be given, as functions of the keys above it.

    The three degrees are always among the keys above, whether or not the dict will say them.
    """

    name: str
    values: Callable[[_Chosen], SearchStrategy[Any] | None]  #: None: the key must be left out
    needed: Callable[[_Chosen], bool] = lambda chosen: False


def _any(values: SearchStrategy[Any]) -> Callable[[_Chosen], SearchStrategy[Any]]:
    return lambda chosen: values


DEGREES = ("pipeline_parallel_degree", "tensor_parallel_degree", "sharded_data_parallel_degree")

#: Keys that no cross-rule concerns. Source: API 3.1 to 3.3.
FREE_KEYS: tuple[ConfigurationKey, ...] = (
    ConfigurationKey("microbatches", _any(_COUNT)),
    ConfigurationKey("pipeline", _any(st.sampled_from(["simple", "interleaved"]))),
    ConfigurationKey("optimize", _any(st.sampled_from(["speed", "memory"]))),
    ConfigurationKey("placement_strategy", _any(placements())),
    ConfigurationKey("contiguous", _any(_FLAG)),
    ConfigurationKey("xla", _any(_FLAG)),
    ConfigurationKey("fork", _any(_FLAG)),
    ConfigurationKey("memory_weight", _any(st.sampled_from([0.0, 1.0, 0.25, 0.5]))),
    ConfigurationKey("active_microbatches", _any(_COUNT)),
    ConfigurationKey("deterministic_server", _any(_FLAG)),
    ConfigurationKey("skip_tracing", _any(_FLAG)),
    ConfigurationKey("load_partition", _any(_FLAG)),
    ConfigurationKey("partition_file", _any(st.sampled_from(["partition.json", "a b/ü.pt"]))),
    ConfigurationKey("offload_activations", _any(_FLAG)),
    ConfigurationKey("activation_loading_horizon", _any(_COUNT)),
    ConfigurationKey("delayed_parameter_initialization", _any(_FLAG)),
    ConfigurationKey("fp16_params", _any(_FLAG)),
    ConfigurationKey("sdp_reduce_bucket_size", _any(_SIZE)),
    ConfigurationKey("sdp_param_persistence_threshold", _any(_SIZE)),
    ConfigurationKey("sdp_max_live_parameters", _any(_SIZE)),
    ConfigurationKey("sdp_hierarchical_allgather", _any(_FLAG)),
    ConfigurationKey("sdp_gradient_clipping", _any(st.sampled_from([1.0, 0.5, 100.0]))),
    ConfigurationKey("ranks_per_node", _any(_COUNT)),
)

#: Keys that a cross-rule ties to others. Source: API 3.4, 3.5.
TIED_KEYS: tuple[ConfigurationKey, ...] = (
    ConfigurationKey("ddp", lambda c: _ON if _tensor_parallel(c) else _FLAG, _tensor_parallel),
    ConfigurationKey("ddp_port", lambda c: st.integers(0, 65535) if c.get("ddp") else None),
    ConfigurationKey(
        "ddp_dist_backend", lambda c: st.sampled_from(["auto", "nccl"]) if c.get("ddp") else None
    ),
    ConfigurationKey("horovod", lambda c: _OFF if c.get("ddp") else _FLAG),
    ConfigurationKey(
        "prescaled_batch",
        lambda c: _ON if _sharded(c) and _tensor_parallel(c) else _FLAG,
        lambda c: _sharded(c) and _tensor_parallel(c),
    ),
    ConfigurationKey("shard_optimizer_state", lambda c: _OFF if _sharded(c) else _FLAG),
    ConfigurationKey("fp16", _any(_FLAG)),
    ConfigurationKey("bf16", lambda c: _FLAG if _sharded(c) and not c.get("fp16") else _OFF),
    ConfigurationKey("auto_partition", _any(_FLAG)),
    ConfigurationKey(
        "default_partition",
        lambda c: st.integers(0, c["pipeline_parallel_degree"] - 1),
        lambda c: not c.get("auto_partition", True),
    ),
)

KEYS = (*FREE_KEYS, *TIED_KEYS)

#: Keys that are accepted with a warning, because their meaning was never published (the last row of
#: the table in API 3.3).
IGNORED_KEYS = (
    "static_mode",
    "fast_mode",
    "_match_weights",
    "_fp32_grad_accumulation",
    "checkpoint_attentions",
    "_prescaled_batch",
    "overlapping_allreduce",
)

_PIPELINE_NAMES = (
    ("pipeline_parallel_degree",),
    ("partitions",),
    ("partitions", "pipeline_parallel_degree"),  # both, if equal (API 8.5)
)


def configs(size: int, *, ignored: bool = False) -> SearchStrategy[Parameters]:
    """Draw valid configurations for a world of ``size`` ranks: what a script passes to ``smp.init``.

    Every key occurs, by both of its names if it has two; most are left out of any one dict, and
    most that are in it differ from their defaults. All cross-rules hold, and the degrees fit the
    world. Shrinks towards ``{}``.

    Args:
        size: ranks in the world.
        ignored: whether keys occur that are accepted without effect; they come with a warning.

    Raises:
        InvalidArgument: ``size`` is no int of at least 1, or ``ignored`` is no bool.

    Source: API 3, 8.1, 8.3, 8.5.
    """
    check_int("size", size, at_least=1)
    check_bool("ignored", ignored)
    return _configs(size, ignored)


@st.composite
def _configs(draw: DrawFn, size: int, ignored: bool) -> Parameters:
    degrees = dict(zip(DEGREES, draw(joint_degrees(size)), strict=True))
    said = {name: degree for name, degree in degrees.items() if draw(_SOMETIMES) or degree > 1}
    names = draw(st.sampled_from(_PIPELINE_NAMES))
    if "pipeline_parallel_degree" in said:
        said |= dict.fromkeys(names, said.pop("pipeline_parallel_degree"))
    chosen = said | draw(assignments(KEYS, degrees))
    if ignored:
        chosen |= {name: True for name in IGNORED_KEYS if draw(_SOMETIMES)}
    return chosen


@st.composite
def assignments(draw: DrawFn, keys: Sequence[ConfigurationKey], above: Parameters) -> Parameters:
    """Values for some of ``keys``: those that are needed, and few of those that are allowed."""
    chosen = dict(above)
    for key in keys:
        values = key.values(chosen)
        # The presence of a key is drawn beside its value, so that both go together in shrinking.
        if values is not None and (draw(_SOMETIMES) or key.needed(chosen)):
            chosen[key.name] = draw(values)
    return {name: value for name, value in chosen.items() if name not in above}
