"""What an engine is: how it is built, asked and closed on one rank, and its conventions as data.

An engine is an importable object, so that each rank finds it by its name. It is tested on a case
(:class:`~pytest_smp.strategies.training.Training`): a model, its weights, degrees, schedule and data.

Every session of the suite imports its engine, to know what it claims. So nothing here imports torch,
and neither should the module that has the engine: :meth:`Engine.build` can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from conformance.engines.capabilities import EngineCapability, Need
from pytest_smp.ranks.capabilities import Capability

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pytest_smp.strategies.training import Training
    from pytest_smp.strategies.training_script import Batch


#: The version of `Engine` and `Session`. It rises when one of them changes; an engine that was written for another
#: version is refused.
ENGINE_VERSION = 2


class EngineError(Exception):
    """Raised when an engine cannot be used: it is not there, or is no engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conventions:
    """How an engine reduces gradients; sums over accumulated passes.

    ``"as asked"`` follows the case's ``average``. ``shards``: what is split in equal parts, for those
    that split: the flat elements of a parameter, its rows, or all elements of a unit of parameters, one
    after the other (FSDP1's flat parameter). ``fresh``: whether processes that have trained a case cannot
    train another, because of what the engine keeps in them: they are replaced then, which takes time,
    and takes a backend whose ranks are processes.
    """

    dp: Literal["mean", "sum"] = "mean"
    microbatch: Literal["mean", "sum", "as asked"] = "as asked"
    shards: Literal["flat", "rows", "unit"] = "flat"
    fresh: bool = False

    def divisor(self, case: Training) -> int:
        """What the sum over replicas, passes and microbatches is divided by."""
        mean = case.average if self.microbatch == "as asked" else self.microbatch == "mean"
        return (case.dp if self.dp == "mean" else 1) * (case.microbatches if mean else 1)


class Session(Protocol):
    """One rank's training of one case.

    A case is trained so: for each of ``case.windows``, ``zero_grad``, ``case.passes`` times ``backward``,
    ``gradients``, and ``step`` where ``case.steps_after(window)``; then ``parameters`` and ``close``. So
    ``zero_grad`` may come again without a ``step`` in between, and drops the gradients of that window.
    """

    def backward(self, batch: Batch, *, boundary: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Forward and backward of one step: losses and outputs by microbatch, in order, detached.

        ``batch`` is what this rank's replica is given: inputs and targets of all microbatches, each
        with its batch axis. ``boundary``: the last of the passes whose gradients are summed.
        """
        ...

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients of the parameters that this rank holds, by the unwrapped model's names."""
        ...

    def parameters(self) -> dict[str, Tensor]:
        """The parameters that this rank holds, by the unwrapped model's names."""
        ...

    def zero_grad(self) -> None:
        """Set gradients to zero, or to None, as ``case.set_to_none`` says."""
        ...

    def step(self) -> None:
        """One step of the case's optimizer."""
        ...

    def close(self) -> None:
        """Give up what the session holds, and what its engine keeps in modules: groups, counters, the model
        that it knows. The next case is trained by the same processes.
        """
        ...


class Exchange(NamedTuple):
    """One exchange of tensors, as one of its ranks sees it."""

    operation: str  #: what is asked for: all_gather, reduce_scatter, all_reduce, or another word
    ranks: tuple[int, ...]  #: of the world
    elements: int  #: of the larger side


class ShardedSession(Session, Protocol):
    """What is also asked of engines that claim sharding; ``gradients`` and ``parameters`` are whole.

    ``module`` is the model's, as it is called: hooks of its submodules run where they are used.
    """

    module: nn.Module

    def state(self) -> dict[str, list[Tensor]]:
        """This rank's part of the training state: tensors by ``parameters``, ``gradients``, ``optimizer``."""
        ...

    def traffic(self) -> list[Exchange]:
        """What ``backward`` exchanged since it was asked last; for engines that claim it."""
        ...

    def live(self) -> int | None:
        """The most elements that were whole at a time, or on their way, if the engine counts them; for
        engines of the SMP API.
        """
        ...


@runtime_checkable
class Engine(Protocol):
    """A way to train.

    Attributes:
        name: as shown.
        conventions: how it reduces.
        capabilities: what it claims.
        api: the namespace that a script imports as ``smp``, by its module's name; empty without.
        protocol: the `ENGINE_VERSION` that it was written for.
        uses: by its capabilities, what it asks of the backend for them. What needs a capability of
            the engine is not asked for where the backend lacks that. An engine whose ``uses`` is
            empty is tested on every backend, and fails where an operation is missing.
    """

    name: str
    conventions: Conventions
    capabilities: frozenset[EngineCapability]
    api: str
    protocol: int
    uses: Mapping[EngineCapability, frozenset[Capability]]

    def replica(self, case: Training) -> int:
        """Which replica's data this rank is given."""
        ...

    def build(self, case: Training, *, salt: str = "") -> Session:
        """The session of this rank, in a world of ``case.ranks`` initialised with ``case.config``.

        Rank 0's weights count; ``salt`` makes those of this rank others.
        """
        ...


def used(engine: Engine, needs: Collection[Need]) -> frozenset[Capability]:
    """What the engine asks of the backend for these of its capabilities."""
    return frozenset().union(*(asked for each, asked in engine.uses.items() if each in needs))


def check(engine: Any, name: str) -> Engine:
    """``engine``, if it is one. Raises EngineError."""
    # First, because the parts are those of one version.
    version = getattr(engine, "protocol", None)
    if version != ENGINE_VERSION:
        names = "names no version" if version is None else f"was written for version {version}"
        raise EngineError(
            f"engine {name!r}: {engine!r} {names} of the engine protocol; this suite has "
            f"{ENGINE_VERSION}: see docs/extension_points.md"
        )
    missing = [
        each
        for each in ("name", "conventions", "capabilities", "api", "uses", "replica", "build")
        if not hasattr(engine, each)
    ]
    if missing:
        raise EngineError(f"engine {name!r}: {engine!r} has no {', '.join(missing)}")
    if EngineCapability.SMP_API in engine.capabilities and not engine.api:
        raise EngineError(f"engine {name!r}: claims the SMP API and names no module in `api`")
    found: Engine = engine
    return found
