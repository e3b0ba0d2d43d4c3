"""The state that ``smp.init`` builds on each rank: the configuration, the topology, the fabric and the
rank's number.

A rank of a simulated world is a thread and keeps its runtime in its rank context. Everywhere else
the runtime belongs to the process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from smp_core.config import Config, IgnoredKeyWarning
from smp_core.errors import (
    AlreadyInitializedError,
    ConfigError,
    NotInitializedError,
    SmpError,
)
from smp_core.topology import GroupKind, Topology
from smp_core.transport import current_rank as rank_threads
from smp_core.transport import ending as ending  # its exit handler is there before the script's
from smp_core.transport.diagnosis import ranks_text
from smp_core.transport.protocols import Fabric, Group
from smp_core.variables import PARAMETERS

# pytest leaves these frames out below an error that we raise on purpose; a bug of ours shows them.
__tracebackhide__ = operator.methodcaller("errisinstance", SmpError)


class Runtime:
    """One rank's place in the world."""

    __slots__ = ("_groups", "config", "fabric", "rank", "size", "topology", "training")

    def __init__(self, config: Config, topology: Topology, fabric: Fabric) -> None:
        self.config, self.topology, self.fabric = config, topology, fabric
        self.rank, self.size = fabric.rank, fabric.size
        self._groups: dict[GroupKind, Group] = {}
        self.training: Any = None  # a framework's session; it goes when the runtime goes

    def group(self, kind: GroupKind) -> Group:
        """The group of this kind that this rank is in."""
        group = self._groups.get(kind)
        if group is None:
            name = "WORLD" if kind is GroupKind.WORLD else f"{kind.name}_GROUP"
            group = self._groups[kind] = Group(name, self.topology.group(kind, self.rank))
        return group

    def position(self, kind: GroupKind) -> int:
        """This rank's index in its group of this kind."""
        return self.topology.position(kind, self.rank)


class _Process:
    """The runtime of a process that is no simulated rank."""

    runtime: Runtime | None = None


def init(config: Mapping[str, Any] | None = None) -> None:
    """Initialise the API on this rank; the first call of a script.

    ``config`` maps the parameters of API 3 to values; those that the launcher sets,
    as JSON in the environment variable SM_HP_MP_PARAMETERS, win over it (1.2). Calling again
    changes nothing if the configuration is the same or ``None``.

    Every rank calls it, and it returns when all have: it compares what the ranks were given. (In a run that
    initialises its ranks by itself it waits for nobody, unless the configuration is another one.) In a
    plain script the ranks are those of
    torchrun, mpiexec or srun, or of the default process group if there is one already; a process
    that was started alone is a world of one rank. From then on ``torch.distributed`` is initialised
    where there are several.

    Raises ConfigError for a bad configuration, before any rank is met, and on every rank for
    configurations that differ between ranks; AlreadyInitializedError for a different one in a further
    call; BackendError if the other ranks cannot be met.
    """
    context = rank_threads.current()
    if context is not None and context.runtime is None and context.job.parameters:
        context.runtime = _build(context.job.parameters, context.fabric)
    runtime = _Process.runtime if context is None else context.runtime
    if runtime is not None:
        if config is not None and _parse(config, _launcher_parameters()) != runtime.config:
            raise AlreadyInitializedError(
                f"smp.init: rank {runtime.rank} is initialised with {runtime.config!r}; it cannot change to "
                f"{dict(config)!r}. Call smp.shutdown() first, or pass one configuration everywhere"
            )
        return
    if context is not None:
        runtime, job = _build(config, context.fabric), context.job
        if _is_importing(sys._getframe(1)):
            # Simulated ranks share modules: the others will not run this one again, and mean it all the same.
            job.automatic_init, job.parameters = True, config
        # A rank that has been initialised by itself has the job's configuration, and will not meet the others.
        elif not job.automatic_init or runtime.config != _parse(
            job.parameters, _launcher_parameters()
        ):
            _check_agreement(runtime)
        context.runtime = runtime
    else:
        rank_threads.refuse_child_thread()
        _Process.runtime = _of_process(config)


def _is_importing(frame: FrameType) -> bool:
    """Return whether a frame is that of a module that is imported, and no script's."""
    return frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"


def is_initialized() -> bool:
    """Return whether ``init`` has run on this rank (API 1.2)."""
    context = rank_threads.current()
    return (_Process.runtime if context is None else context.runtime) is not None


def shutdown() -> None:
    """Forget the runtime of this rank; ``init`` may be called again.

    Does nothing before ``init``.
    """
    context = rank_threads.current()
    if context is None:
        _Process.runtime = None
    else:
        context.runtime = None


def current(call: str) -> Runtime:
    """This rank's runtime. Raises NotInitializedError, naming ``call``, before ``init``."""
    context = rank_threads.current()
    if context is None:
        if _Process.runtime is not None:
            return _Process.runtime
        rank_threads.refuse_child_thread()
        raise NotInitializedError(
            f"{call}: call smp.init() first; it must be the first call of the script"
        )
    runtime: Runtime | None = context.runtime
    if runtime is None:
        if not context.job.automatic_init:
            raise NotInitializedError(f"{call}: rank {context.rank} has not called smp.init()")
        runtime = context.runtime = _build(context.job.parameters, context.fabric)
    return runtime


def _build(config: Mapping[str, Any] | None, fabric: Fabric) -> Runtime:
    runtime = of_rank(config, fabric)
    _warn_of_keys_without_effect(runtime.config)
    return runtime


#: Keys that do have an effect, because a front end that gives them one was imported (smp_core/tensorflow).
keys_with_effect: set[str] = set()


def _warn_of_keys_without_effect(config: Config) -> None:
    for name, reason in _without_effect(_Same(config)).items():
        if name in keys_with_effect:
            continue
        warnings.warn(
            f"smp.init: {name}={getattr(config, name)!r} has no effect: {reason}",
            IgnoredKeyWarning,
            stacklevel=4,  # whoever called `init`
        )


class _Same:
    """A configuration as a key of a cache, compared by identity. Each rank of each run asks the cache, and hashing
    the values of thirty fields took longer than finding the entry.
    """

    __slots__ = ("config",)

    def __init__(self, config: Config) -> None:
        self.config = config

    def __hash__(self) -> int:
        return id(self.config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.config is other.config


@functools.lru_cache(maxsize=256)
def _without_effect(key: _Same) -> Mapping[str, str]:
    """Worked out once, not on each rank of each run: this looks at every key's default."""
    return key.config.without_effect()


def of_rank(config: Mapping[str, Any] | None, fabric: Fabric) -> Runtime:
    """The runtime that ``init(config)`` makes on a rank with this fabric; nothing is initialised,
    and nothing is warned of.

    Raises ConfigError for a bad configuration.
    """
    parsed = _parse(config, _launcher_parameters())
    return Runtime(parsed, _topology(_Same(parsed), fabric.size), fabric)


def _launcher_parameters() -> str:
    return os.environ.get(PARAMETERS, "")


def _parse(config: Mapping[str, Any] | None, launcher: str) -> Config:
    if config is None or (
        isinstance(config, Mapping)
        and all(isinstance(key, str) and type(config[key]) in _PLAIN for key in config)
    ):
        items = tuple(sorted((config or {}).items()))
        return _parse_cached(items, tuple(type(value) for _, value in items), launcher)
    return Config.parse(config, launcher=_load(launcher))


_PLAIN = (bool, int, float, str, type(None))


@functools.lru_cache(maxsize=256)
def _parse_cached(
    items: tuple[tuple[str, Any], ...], types: tuple[type, ...], launcher: str
) -> Config:
    # The types are part of the key: 1, True and 1.0 are equal, and not equally good.
    return Config.parse(dict(items), launcher=_load(launcher))


def _load(launcher: str) -> Mapping[str, Any] | None:
    if not launcher:
        return None
    try:
        parameters = json.loads(launcher)
    except ValueError as error:
        raise ConfigError(f"environment variable {PARAMETERS} is not JSON: {error}") from None
    if not isinstance(parameters, dict):
        raise ConfigError(
            f"environment variable {PARAMETERS} must hold a JSON object, not {launcher!r}"
        )
    return parameters


@functools.lru_cache(maxsize=256)
def _topology(key: _Same, size: int) -> Topology:
    config = key.config
    config.check_world(size)
    return Topology(
        size=size,
        pipeline=config.pipeline_parallel_degree,
        tensor=config.tensor_parallel_degree,
        sharding=config.sharded_data_parallel_degree,
        placement=config.placement_strategy,
    )


def _of_process(config: Mapping[str, Any] | None) -> Runtime:
    """The runtime of a plain script. The configuration is refused before any rank is met."""
    from smp_core.transport.launched import find_rendezvous

    parsed, rendezvous = _parse(config, _launcher_parameters()), find_rendezvous()
    topology = _topology(_Same(parsed), rendezvous.size)
    _warn_of_keys_without_effect(parsed)
    runtime = Runtime(parsed, topology, rendezvous.join(parsed.ddp_dist_backend))
    _check_agreement(runtime)
    return runtime


def _check_agreement(runtime: Runtime) -> None:
    """Raise ConfigError, the same on every rank, if the configurations of the ranks differ.

    All ranks call. One exchange of a digest; where digests differ, one of the configurations.
    """
    if runtime.size == 1:
        return
    # A group of its own: a rank that does not call `init` would take this for a call of the script's.
    group = Group("smp init", tuple(range(runtime.size)))
    objects = runtime.fabric.objects
    if len({*objects.allgather(_digest(_Same(runtime.config)), group)}) > 1:
        raise ConfigError(_difference(objects.allgather(runtime.config, group)))


def _difference(configs: Sequence[Config]) -> str:
    """The text on configurations that differ, one for each rank in rank order: a line for each key."""
    # A default that depends on another key differs with that key, which has a line of its own.
    names = {name for config in configs for name in config.to_parameters()}
    lines = ["smp.init: the ranks have different configurations, where all need the same one:"]
    for name in Config.model_fields:
        ranks: dict[str, list[int]] = {}
        for rank, config in enumerate(configs):
            ranks.setdefault(repr(getattr(config, name)), []).append(rank)
        if name in names and len(ranks) > 1:
            values = "; ".join(f"{value} on {ranks_text(at)}" for value, at in ranks.items())
            lines.append(f"  {name}: {values}")
    return "\n".join(lines)


@functools.lru_cache(maxsize=256)
def _digest(key: _Same) -> str:
    """A digest of all values of a configuration."""
    return hashlib.blake2b(repr(dict(key.config)).encode(), digest_size=16).hexdigest()


def validate(config: Mapping[str, Any] | None, size: int) -> None:
    """Raise ConfigError if ``config`` is bad, or does not fit a world of ``size`` ranks.

    Starts nothing.
    """
    _topology(_Same(_parse(config, _launcher_parameters())), size)
