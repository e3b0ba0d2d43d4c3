"""The protocol of an engine: its claims and conventions as data, and its session on one rank.

An engine is an importable object, so that each rank finds it by its name. A property tests an engine on a
case (:class:`~pytest_smp.strategies.training.Training`): a model, its weights, degrees, schedule and data.

Every session of the suite imports the tested engine to read its claims. So nothing here imports torch,
and the module of an engine should not either: :meth:`Engine.build` can import it.
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


#: The version of `Engine` and `Session`. The number rises when one of them changes; the suite refuses an
#: engine that was written for another version.
ENGINE_VERSION = 2


class EngineError(Exception):
    """Raised when an engine cannot be used: there is none of this name, or the object is no engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conventions:
    """The ways in which an engine reduces and shards. Every engine sums over accumulated passes.

    Attributes:
        dp: whether gradients are the mean or the sum over replicas.
        microbatch: whether gradients are the mean or the sum over microbatches; ``"as asked"`` follows
            the case's ``average``.
        shards: the sequence that sharding splits in equal parts: the flat elements of a parameter
            (``"flat"``), its rows (``"rows"``), or the elements of all parameters of a unit, one parameter
            after the other, as in FSDP1's flat parameter (``"unit"``).
        fresh: whether a process can train only one case, because of the state that the engine leaves in
            it. Such processes are replaced after each case. Replacing takes time, and a backend whose
            ranks are processes.
    """

    dp: Literal["mean", "sum"] = "mean"
    microbatch: Literal["mean", "sum", "as asked"] = "as asked"
    shards: Literal["flat", "rows", "unit"] = "flat"
    fresh: bool = False

    def divisor(self, case: Training) -> int:
        """The divisor of the sum over replicas, passes and microbatches."""
        mean = case.average if self.microbatch == "as asked" else self.microbatch == "mean"
        return (case.dp if self.dp == "mean" else 1) * (case.microbatches if mean else 1)


class Session(Protocol):
    """One rank's training of one case.

    The suite calls ``zero_grad``, ``case.passes`` times ``backward`` and ``gradients`` for each of
    ``case.windows``, followed by ``step`` if ``case.steps_after(window)``. At the end it calls
    ``parameters`` and ``close``. So a second ``zero_grad`` may follow without a ``step`` in between, and
    drops the gradients of the window.
    """

    def backward(self, batch: Batch, *, boundary: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Run forward and backward of one step, and return the microbatches' losses and outputs, detached.

        ``batch`` holds the inputs and targets of all microbatches of this rank's replica, each with its
        batch axis. ``boundary`` is true in the last of the passes whose gradients are summed.
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
        """Step the case's optimizer once."""
        ...

    def close(self) -> None:
        """Release the session's resources and the engine's module state: groups, counters, the known model.

        The same processes train the next case.
        """
        ...


class Exchange(NamedTuple):
    """One exchange of tensors, as one of its ranks sees it."""

    operation: str  #: all_gather, reduce_scatter, all_reduce, or another word
    ranks: tuple[int, ...]  #: the world ranks of the group
    elements: int  #: the elements of the larger one of input and output
    sent: int | None = (
        None  #: the bytes that leave this rank; None if the engine does not count them
    )


class ShardedSession(Session, Protocol):
    """The session of an engine that claims sharding or tensor parallelism.

    ``gradients`` and ``parameters`` are whole: unsharded, and put together from the slices of tp ranks.

    ``module`` is the module that the engine calls, so hooks on its submodules run with their calls.
    """

    module: nn.Module

    def state(self) -> dict[str, list[Tensor]]:
        """This rank's part of the training state, parameters in the order of the unwrapped model.

        The keys are ``parameters``, ``gradients`` and ``optimizer``; the values are lists of tensors.
        """
        ...

    def traffic(self) -> list[Exchange]:
        """The exchanges of ``backward`` since the last call; only for engines that claim TRAFFIC."""
        ...

    def live(self) -> int | None:
        """The peak of elements that were unsharded, or being gathered, at one time.

        None if the engine does not count them. Only engines of the SMP API are asked.
        """
        ...


@runtime_checkable
class Engine(Protocol):
    """A way to train a model on ranks.

    Attributes:
        name: the name in reports.
        conventions: the ways in which the engine reduces and shards.
        capabilities: the engine's claims.
        api: the name of the module that a script imports as ``smp``; empty without the SMP API.
        protocol: the `ENGINE_VERSION` that the engine was written for.
        uses: the capabilities of a backend that each capability of the engine depends on. If the backend
            lacks one, requirements of that capability are not tested. An engine with an empty ``uses`` is
            tested on every backend, and fails where an operation is missing.
    """

    name: str
    conventions: Conventions
    capabilities: frozenset[EngineCapability]
    api: str
    protocol: int
    uses: Mapping[EngineCapability, frozenset[Capability]]

    def replica(self, case: Training) -> int:
        """The number of the replica whose data this rank gets."""
        ...

    def build(self, case: Training, *, salt: str = "") -> Session:
        """Make this rank's session, in a world of ``case.ranks`` initialised with ``case.config``.

        Training starts from rank 0's weights; a ``salt`` makes this rank draw different ones first.
        """
        ...


def used(engine: Engine, needs: Collection[Need]) -> frozenset[Capability]:
    """The capabilities of a backend that the engine depends on for these needs."""
    return frozenset().union(*(asked for each, asked in engine.uses.items() if each in needs))


def check(engine: Any, name: str) -> Engine:
    """Return ``engine`` if it satisfies the protocol. Raises EngineError."""
    # The version is checked first, because it decides which attributes an engine must have.
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
