"""The configuration: every key with its type, default and source, and every rule between keys.

Read it from the top: the constraints on a single value, the keys, and the rules, which are data
(:data:`RULES`). A question that the public record leaves open is decided beside the key that it concerns.
Two decisions stand here, because no key shows them:

- ``trace_execution_times`` and ``trace_device`` (API 3.5) are arguments of
  ``DistributedModel``, not keys.
- A path is refused. The name of a JSON file in place of the dict (API 3.4) is a form that
  the estimator takes, on the launcher's side.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

from smp_core.errors import ConfigError, SmpError, with_pages

# pytest leaves these frames out below an error that we raise on purpose; a bug of ours shows them.
__tracebackhide__ = operator.methodcaller("errisinstance", SmpError)


class IgnoredKeyWarning(UserWarning):
    """Issued for a key that is accepted and has no effect: its meaning was never published, or it
    belongs to a part of the API that is not here.
    """


# ---- Constraints on a single value ---------------------------------------------------------------


class Must(NamedTuple):
    """A constraint in the type of a key, in words that complete the message "must be ..."."""

    be: str


def _flag(value: object) -> object:
    # The SDK's own test writes `ddp: 1` (API 3.4). By `type`, because 1.0 == 1 is no flag.
    return bool(value) if type(value) is int and value in (0, 1) else value


def _whole(value: object) -> object:
    # The documented defaults are written 5e8, 1e6, 1e9 (AWS Sharded Data Parallelism), and JSON has no int(5e8).
    return int(value) if isinstance(value, float) and value.is_integer() else value


# A strict int is no bool, no str and no float.
Count = Annotated[StrictInt, Field(ge=1), Must("an int of at least 1")]
MaybeCount = Annotated[
    Annotated[StrictInt, Field(ge=1)] | None, Must("an int of at least 1, or None")
]
Index = Annotated[StrictInt, Field(ge=0), Must("an int of at least 0")]
Flag = Annotated[StrictBool, BeforeValidator(_flag), Must("True or False, or 1 or 0")]
Size = Annotated[
    StrictInt, Field(ge=1), BeforeValidator(_whole), Must("a whole number of at least 1")
]
Threshold = Annotated[
    StrictInt, Field(ge=0), BeforeValidator(_whole), Must("a whole number of at least 0")
]
Weight = Annotated[StrictFloat, Field(ge=0, le=1), Must("a number from 0 to 1")]
Norm = Annotated[
    StrictFloat, Field(gt=0, allow_inf_nan=False), Must("a finite number greater than 0")
]
# 0 asks the system for any free port.
Port = Annotated[Annotated[StrictInt, Field(ge=0, le=65535)] | None, Must("an int from 0 to 65535")]
Name = Annotated[StrictStr | None, Must("a str")]
Pipeline = Annotated[Literal["interleaved", "simple"], Must("'interleaved' or 'simple'")]
Optimize = Annotated[Literal["memory", "speed"], Must("'memory' or 'speed'")]
Placement = Annotated[
    Literal["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"],
    Must("'cluster', 'spread' or a permutation of the letters D, P and T, such as 'DPT'"),
]
DistBackend = Annotated[Literal["auto", "nccl"], Must("'auto' or 'nccl'")]


# ---- The keys ------------------------------------------------------------------------------------


def key(
    default: Any,
    means: str,
    source: str,
    since: str | None = None,
    without_effect: str | None = None,
) -> Any:
    """One row of the table of keys.

    Args:
        default: the default, or a function of the values of the keys above this one that gives it.
        means: the meaning of the key.
        source: where the key and its default come from; every error about the key ends with an address
            of the first section of the API that it names.
        since: the first version of the library that has the key, where published.
        without_effect: why no value of the key changes anything; ``smp.init`` warns of one that is
            not the default.
    """
    about: dict[str, Any] = {"source": source, "since": since, "without_effect": without_effect}
    if callable(default):
        return Field(default_factory=default, description=means, json_schema_extra=about)
    return Field(default, description=means, json_schema_extra=about)


def _two_more_than_partitions(values: dict[str, Any]) -> int:
    return int(values.get("pipeline_parallel_degree", 1)) + 2


def _by_optimize(values: dict[str, Any]) -> float:
    return 0.2 if values.get("optimize") == "speed" else 0.8


#: Second names of keys. Both are accepted; unequal values are refused (API 8.5).
ALIASES: Mapping[str, str] = MappingProxyType({"partitions": "pipeline_parallel_degree"})

#: Keys that scripts use and whose meaning was never published: accepted, with a warning.
#: Source: the end of API 3.3.
IGNORED_KEYS: tuple[str, ...] = (
    "static_mode",
    "fast_mode",
    "_match_weights",
    "_fp32_grad_accumulation",
    "checkpoint_attentions",
    "_prescaled_batch",
    "overlapping_allreduce",  # means something as an argument of DistributedModel only
)


_TENSORFLOW = "it is a key of the TensorFlow API"
_PARTITION_FILE = "the form of such a file was never published; smp.resume_from_checkpoint brings a partition along"
_IN_HOST_MEMORY = "models are trained on the CPU, where activations are in host memory already"


class Config(BaseModel):
    """A valid configuration: immutable, hashable, equal to any other with equal values.

    ``Config(ddp=True)`` and ``Config.parse({"ddp": True})`` are the same; ``parse`` also knows the
    launcher. The type of a key is its constraint. Sizes count elements, never bytes.

    Raises:
        ConfigError: for unknown keys, bad values, and values that break a rule of :data:`RULES`:
            a line for each of them, not only for the first. A rule between keys of which one has a
            bad value is not judged.

    Source: API 3, AWS Sharded Data Parallelism (Set up the SageMaker PyTorch estimator).
    """

    model_config = ConfigDict(frozen=True)

    # Common
    pipeline_parallel_degree: Count = key(
        1,
        "partitions that the model is cut into along its depth; also called `partitions`",
        # Required in the SDK's documentation and in AWS Run a Distributed Model Parallel Training Job,
        # optional in AWS Sharded Data Parallelism.
        source="API 3.1, 8.4",
        since="1.6",
    )
    microbatches: Count = key(
        1, "parts that a batch is split into; they divide it", source="API 3.1"
    )
    pipeline: Pipeline = key(
        # "_only_forward" is refused. The SDK's client-side check lets it through, but what it does
        # was never published (API 9.7), and what is not obeyed must not look obeyed.
        "interleaved",
        "order of the pipeline's tasks",
        source="API 3.1",
    )
    optimize: Optimize = key("memory", "what to save; a hint", "API 3.1, 8.9")
    placement_strategy: Placement = key(
        "cluster", "how ranks run through the parallel dimensions", "API 3.1, 4.2, 8.6"
    )
    auto_partition: Flag = key(True, "whether the library cuts the model", "API 3.1")
    default_partition: Index = key(0, "partition of modules that are assigned to none", "API 3.1")

    # TensorFlow
    contiguous: Flag = key(
        True,
        "each partition is a connected component",
        source="API 3.2",
        without_effect=_TENSORFLOW,
    )
    horovod: Flag = key(False, "data parallelism by Horovod", "API 3.2", without_effect=_TENSORFLOW)
    # No default of the next two was published; both are opt-ins by their names.
    xla: Flag = key(False, "compile by XLA", "API 3.2", without_effect=_TENSORFLOW)
    fork: Flag = key(False, "seen in container tests only", "API 3.2", without_effect=_TENSORFLOW)

    # PyTorch: pipeline
    memory_weight: Weight = key(
        _by_optimize,  # 0.2 if optimize == "speed" else 0.8
        "weight of memory, against computation, when the model is cut",
        source="API 3.3",
    )
    active_microbatches: Count = key(
        _two_more_than_partitions,  # pipeline_parallel_degree + 2
        "most microbatches in flight at a time",
        source="API 3.3",
        since="1.3",
    )
    deterministic_server: Flag = key(
        False, "same order of requests on all data parallel ranks", "API 3.3", since="1.3"
    )
    skip_tracing: Flag = key(False, "cut without a tracing step", "API 3.3", since="1.6")
    # Known only from the client-side check, without defaults: absent means that no file is read.
    load_partition: Flag = key(
        False, "take the partition from a file", "API 3.3", without_effect=_PARTITION_FILE
    )
    partition_file: Name = key(None, "that file", "API 3.3", without_effect=_PARTITION_FILE)

    # PyTorch: data parallelism
    ddp: Flag = key(False, "data parallelism by torch.distributed", "API 3.3")
    ddp_port: Port = key(
        None,
        "port where the ranks meet",
        source="API 3.3",
        without_effect="ranks meet where their launcher says (MASTER_PORT)",
    )
    ddp_dist_backend: DistBackend = key(
        "auto",
        "collectives to use",
        "API 3.3, AWS Sharded Data Parallelism (Supported configurations)",
        since="1.13",
    )
    prescaled_batch: Flag = key(
        False, "the ranks of a TP group read the same batch", "API 3.3, 4.4", since="1.6"
    )

    # PyTorch: tensor parallelism and memory
    tensor_parallel_degree: Count = key(
        1, "ranks that split single tensors", source="API 3.3", since="1.6"
    )
    shard_optimizer_state: Flag = key(
        False, "each rank keeps a part of the optimizer state", "API 3.3", since="1.6"
    )
    offload_activations: Flag = key(
        False,
        "checkpointed activations go to host memory",
        source="API 3.3",
        since="1.6",
        without_effect=_IN_HOST_MEMORY,
    )
    activation_loading_horizon: Count = key(
        4,
        "pipeline tasks ahead of which they come back",
        source="API 3.3",
        since="1.6",
        without_effect=_IN_HOST_MEMORY,
    )
    delayed_parameter_initialization: Flag = key(
        # No default was published. The delay is documented for a context manager that a script
        # enters (API 8.21), so it is off unless a script asks for it.
        False,
        "create parameters only when they are placed",
        source="API 3.3, 8.21",
    )

    # PyTorch: 16 bits
    fp16: Flag = key(False, "train in float16", "API 3.3", since="1.10")
    fp16_params: Flag = key(
        False,
        "distributed modules start in float16",
        source="API 3.3",
        since="1.6",
        without_effect="it is about distributed modules, and there are none; fp16 trains in float16",
    )
    bf16: Flag = key(
        False, "train in bfloat16", "API 3.3, AWS Sharded Data Parallelism (BF16 training)"
    )

    # PyTorch: sharded data parallelism
    sharded_data_parallel_degree: Count = key(
        1,
        "ranks that the training state is sharded over; 1 is off",
        source="API 3.3, AWS Sharded Data Parallelism (sharded_data_parallel_degree)",
        since="1.11",
    )
    sdp_reduce_bucket_size: Size = key(
        # The SDK alone restricts it to degrees above 2; that is not followed (API 8.22).
        500_000_000,
        "elements in a gradient bucket",
        source="API 3.3, AWS Sharded Data Parallelism (sdp_reduce_bucket_size)",
    )
    sdp_param_persistence_threshold: Threshold = key(
        1_000_000,
        "parameters of fewer elements than this are not sharded",
        source="API 3.3, AWS Sharded Data Parallelism (sdp_param_persistence_threshold)",
    )
    sdp_max_live_parameters: Size = key(
        1_000_000_000,
        "most elements recombined at a time",
        source="API 3.3, AWS Sharded Data Parallelism (sdp_max_live_parameters)",
    )
    sdp_hierarchical_allgather: Flag = key(
        # AWS's page says within nodes first; ENGINES 1.3 says why it is the other way round here.
        True,
        "gather in two hops, between nodes and within them",
        source="API 3.3, ENGINES 1.3, AWS Sharded Data Parallelism (sdp_hierarchical_allgather)",
    )
    sdp_gradient_clipping: Norm = key(
        # Clipping comes with sharding, so no value turns it off; a large one never clips.
        1.0,
        "largest L2 norm of the gradients",
        source="API 3.3, AWS Sharded Data Parallelism (sdp_gradient_clipping)",
    )
    ranks_per_node: MaybeCount = key(
        # The published library has no such key, since its launcher knows the nodes. This one tries out
        # layouts of nodes on one machine, as DeepSpeed's NDEV_PER_NODE does.
        None,
        "consecutive ranks that count as one node; None: as the launcher says",
        source="API 3.3, ENGINES 1.3, AWS Sharded Data Parallelism (sdp_hierarchical_allgather)",
    )

    def __init__(self, /, **parameters: Any) -> None:
        values, names, bad, complaints = _named(parameters)
        try:
            super().__init__(**values)
        except ValidationError as error:
            # Of the given keys alone: to pydantic a default that depends on a bad value fails too.
            failed = [name for name in _failed(error) if name in values]
            complaints += [_bad_value(name, names[name], values[name]) for name in failed]
            bad |= set(failed)
            # Without the bad values, so that the rules between the others can be judged.
            super().__init__(**{name: value for name, value in values.items() if name not in bad})
        complaints += [
            rule.complaint(self, names)
            for rule in RULES
            if bad.isdisjoint(rule.keys) and not rule.holds(self)
        ]
        if complaints:
            raise ConfigError("\n".join(complaints)) from None
        ignored = [name for name in parameters if name in IGNORED_KEYS]
        if ignored:
            warnings.warn(
                with_pages(
                    f"accepted without effect, because their meaning was never published: "
                    f"{', '.join(ignored)}. See docs/spec/api.md#3.3"
                ),
                IgnoredKeyWarning,
                stacklevel=3,  # whoever called `parse`
            )

    @classmethod
    def parse(
        cls,
        parameters: Mapping[str, Any] | None = None,
        *,
        launcher: Mapping[str, Any] | None = None,
    ) -> Self:
        """The configuration that a script's dict and the launcher make together.

        Args:
            parameters: the dict that the script passes to ``smp.init``; ``None`` is the empty dict.
            launcher: the launcher's values, which win over ``parameters``, key by key, by
                whichever of its names a key goes.

        Raises:
            ConfigError: as the class says, for what is left when the launcher's values have won;
                or at once if an argument is no mapping or has a key that is no str.

        Source: API 1.2.
        """
        script = _mapping("parameters", parameters)
        set_by_launcher = dict(_mapping("launcher", launcher))
        if (
            set_by_launcher.get("sharded_data_parallel_degree", 1) != 1
            and set_by_launcher.get("partitions") == 1
            and any(script.get(name, 1) != 1 for name in ("pipeline_parallel_degree", "partitions"))
        ):
            # A launcher adds this for libraries that look for the key: the rule that sharding needs one partition is
            # the script's to meet, and would not be asked of its own number.
            del set_by_launcher["partitions"]
        overruled = {ALIASES.get(name, name) for name in set_by_launcher}
        left = {
            name: value
            for name, value in script.items()
            if ALIASES.get(name, name) not in overruled
        }
        try:
            return cls(**left, **set_by_launcher)
        except ConfigError as error:
            if not set_by_launcher:
                raise
            raise ConfigError(
                f"{error}\nThe launcher set {', '.join(set_by_launcher)}; its values win."
            ) from None

    @property
    def partitions(self) -> int:
        """``pipeline_parallel_degree`` by its other name (API 8.5)."""
        return self.pipeline_parallel_degree

    def check_world(self, size: int) -> None:
        """Check the degrees against the number of ranks in the world.

        Raises:
            ConfigError: ``size`` is no int of at least 1; it is not a multiple of
                ``pipeline_parallel_degree * tensor_parallel_degree``; or the quotient, which is the
                reduced data parallel size, is not a multiple of ``sharded_data_parallel_degree``.

        Source: API 3.5, 8.1, 8.3; AWS Sharded Data Parallelism
            (Selecting the degree of sharded data parallelism).
        """
        if type(size) is not int or size < 1:
            raise ConfigError(f"world size {_show(size)}: must be an int of at least 1.")
        pipeline, tensor = self.pipeline_parallel_degree, self.tensor_parallel_degree
        sharded, replica = self.sharded_data_parallel_degree, pipeline * tensor
        reduced_data, rest = divmod(size, replica)
        if rest:
            below = size - rest
            sizes = [below, below + replica] if below else [replica]
            raise ConfigError(
                f"pipeline_parallel_degree={pipeline} with tensor_parallel_degree={tensor} in a "
                f"world of {size}: the world size must be a multiple of {pipeline} * {tensor} = "
                f"{replica}. Use {' or '.join(map(str, sizes))} ranks, or degrees whose product is "
                f"one of {_divisors(size)}. See docs/spec/api.md#3.5"
            )
        if reduced_data % sharded:
            raise ConfigError(
                f"sharded_data_parallel_degree={sharded} in a world of {size}: it must divide the "
                f"reduced data parallel size, which is world size / (pipeline_parallel_degree * "
                f"tensor_parallel_degree) = {size} / ({pipeline} * {tensor}) = {reduced_data}. "
                f"Use one of {_divisors(reduced_data)}. See docs/spec/api.md#8.3"
            )

    def without_effect(self) -> dict[str, str]:
        """The keys whose values are not the defaults and change nothing, and why."""
        reasons = {}
        for name in self.to_parameters():
            about = type(self).model_fields[name].json_schema_extra
            assert isinstance(about, dict)  # `key` made it
            if about["without_effect"] is not None:
                reasons[name] = str(about["without_effect"])
        return reasons

    def to_parameters(self) -> dict[str, Any]:
        """A dict of the values that differ from the defaults; it parses to an equal configuration.

        Plain values only, so it survives JSON.
        """
        values = dict(self)
        defaults = {
            name: field.get_default(call_default_factory=True, validated_data=values)
            for name, field in type(self).model_fields.items()
        }
        return {
            name: value
            for name, value in values.items()
            # The second: a rule wants it said, whatever it is.
            if value != defaults[name] or (name == "default_partition" and not self.auto_partition)
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}.parse({self.to_parameters()!r})"

    __str__ = __repr__


# ---- The rules between keys ----------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One rule between keys of a configuration, broken exactly if ``holds`` is false."""

    keys: tuple[
        str, ...
    ]  #: the keys that ``holds`` looks at, in the order in which the message shows them
    holds: Callable[[Config], bool]
    sentence: str  #: the rule in words; ends the message
    source: str

    def complaint(self, config: Config, names: Mapping[str, str] = MappingProxyType({})) -> str:
        """The message for a configuration that breaks this rule.

        Args:
            config: only its values of ``keys`` are looked at.
            names: by which name the user gave a key, where that is not its own.
        """
        shown = (
            f"{names.get(name, name)}={_show(getattr(config, name))}"
            + ("" if name in config.model_fields_set else " (the default)")
            for name in self.keys
        )
        return f"{' with '.join(shown)}: {self.sentence}. {_see(self.source)}"


def _see(source: str) -> str:
    """The end of a message: the page and the anchor of the first section of the API that a source names."""
    return f"See docs/spec/api.md#{re.findall(r'API ([0-9.]*[0-9])', source)[0]}"


def _sharded(config: Config) -> bool:
    return config.sharded_data_parallel_degree > 1


#: Every rule that depends on the configuration alone. For those that depend on the number of ranks
#: see :meth:`Config.check_world`.
RULES: tuple[Rule, ...] = (
    Rule(
        ("tensor_parallel_degree", "ddp"),
        lambda c: c.tensor_parallel_degree == 1 or c.ddp,
        "tensor parallelism (tensor_parallel_degree > 1) needs ddp",
        source="API 3.5",
    ),
    Rule(
        ("bf16", "sharded_data_parallel_degree"),
        lambda c: not c.bf16 or _sharded(c),
        "bf16 needs sharded data parallelism (sharded_data_parallel_degree > 1)",
        source="API 3.5, AWS Sharded Data Parallelism (BF16 training)",
    ),
    Rule(
        ("fp16", "bf16"),
        lambda c: not (c.fp16 and c.bf16),
        "fp16 and bf16 exclude each other",
        source="API 3.5, 8.11",
    ),
    Rule(
        ("sharded_data_parallel_degree", "pipeline_parallel_degree"),
        lambda c: not _sharded(c) or c.pipeline_parallel_degree == 1,
        "sharded data parallelism needs pipeline_parallel_degree 1",
        source="API 3.5, AWS Sharded Data Parallelism (Tips and considerations)",
    ),
    Rule(
        ("sharded_data_parallel_degree", "shard_optimizer_state"),
        lambda c: not _sharded(c) or not c.shard_optimizer_state,
        "sharded data parallelism needs shard_optimizer_state off",
        source="API 3.5, AWS Sharded Data Parallelism (Tips and considerations)",
    ),
    Rule(
        ("sharded_data_parallel_degree", "tensor_parallel_degree", "prescaled_batch"),
        lambda c: not _sharded(c) or c.tensor_parallel_degree == 1 or c.prescaled_batch,
        "sharded data parallelism together with tensor parallelism needs prescaled_batch",
        source="API 3.5, AWS Sharded Data Parallelism (Sharded data parallelism with tensor parallelism)",
    ),
    Rule(
        ("auto_partition", "default_partition"),
        lambda c: c.auto_partition or "default_partition" in c.model_fields_set,
        "without auto_partition, default_partition must be given",
        source="API 3.4, 3.5",
    ),
    Rule(
        ("default_partition", "pipeline_parallel_degree"),
        lambda c: c.default_partition < c.pipeline_parallel_degree,
        "default_partition counts from 0, so it must be less than the number of partitions",
        source="API 3.1, 3.4",
    ),
    Rule(
        ("ddp_port", "ddp"),
        lambda c: c.ddp_port is None or c.ddp,
        "ddp_port needs ddp",
        source="API 3.4",
    ),
    Rule(
        ("ddp_dist_backend", "ddp"),
        lambda c: "ddp_dist_backend" not in c.model_fields_set or c.ddp,
        "ddp_dist_backend needs ddp",
        source="API 3.4",
    ),
    Rule(
        ("horovod", "ddp"),
        lambda c: not (c.horovod and c.ddp),
        "horovod and ddp exclude each other",
        source="API 3.2, 3.4",
    ),
)


# ---- Reading what the user gave ------------------------------------------------------------------


def _mapping(argument: str, given: object) -> dict[str, Any]:
    """``given`` as a dict with str keys. Raises ConfigError if it is none."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        hint = ""
        if isinstance(given, str | bytes) or hasattr(given, "__fspath__"):
            hint = " Read a JSON text or file with the json module first."
        raise ConfigError(
            f"{argument}={_show(given)}: must be a mapping from keys to values, "
            f"not {type(given).__name__}.{hint}"
        )
    strange = [name for name in given if not isinstance(name, str)]
    if strange:
        raise ConfigError(
            f"{argument} has {'keys' if strange[1:] else 'a key'} that must be str: "
            f"{', '.join(map(_show, strange))}."
        )
    return dict(given)


def _named(
    parameters: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, str], set[str], list[str]]:
    """Sort parameters by the keys that their names stand for.

    Returns:
        The value of each key; the name it was given by; the keys given two values; and a complaint
        for each of those and for each unknown name.
    """
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    bad: set[str] = set()
    complaints: list[str] = []
    for name, value in parameters.items():
        if name in Config.model_fields:
            values[name] = value
            names[name] = name
        elif name not in ALIASES and name not in IGNORED_KEYS:
            complaints.append(_unknown_key(name))
    for alias, name in ALIASES.items():
        if alias not in parameters:
            continue
        given = parameters[alias]
        if name not in values:
            values[name] = given
            names[name] = alias
        # Types first: True == 1, and `==` between foreign objects may have no truth value.
        elif not (type(given) is type(values[name]) is int and given == values[name]):
            bad.add(name)
            complaints.append(
                f"{alias}={_show(given)} with {name}={_show(values.pop(name))}: "
                f"two names of one key, so their values must be the same int. See docs/spec/api.md#8.5"
            )
    return values, names, bad, complaints


def _unknown_key(name: str) -> str:
    known = [*Config.model_fields, *ALIASES]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the known keys are {', '.join(known)}."
    return f"unknown key {_show(name)}: {hint} See docs/spec/api.md#3"


def _failed(error: ValidationError) -> list[str]:
    """The keys whose values pydantic refused, each once (a value may fail both arms of a union)."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return list(dict.fromkeys(str(each["loc"][0]) for each in found))


def _bad_value(key: str, name: str, value: object) -> str:
    field = Config.model_fields[key]
    must = next(each.be for each in field.metadata if isinstance(each, Must))
    about = field.json_schema_extra
    assert isinstance(about, dict)  # `key` made it
    return f"{name}={_show(value)}: must be {must}. {_see(str(about['source']))}"


def _show(value: object) -> str:
    """``value`` as code on one line that a message can hold, whatever its ``repr`` does."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a foreign object's, or an int of more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _divisors(number: int) -> str:
    """The divisors of a number in ascending order, listed."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return ", ".join(map(str, sorted({*small, *(number // each for each in small)})))
