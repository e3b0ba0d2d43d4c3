"""What the properties of training share: running a case on an engine, and comparing with plain PyTorch.

The oracle itself is a few lines of torch (:mod:`pytest_smp.strategies.training_oracle`).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings

from conformance.cases.draws import MOST_RANKS, needs, share
from conformance.engines.capabilities import EngineCapability
from conformance.engines.names import find_engine
from conformance.engines.protocol import used
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import Training
from pytest_smp.strategies.training_draws import trainings
from pytest_smp.strategies.training_lattice import exact_outputs
from pytest_smp.strategies.training_models import Block, Model
from pytest_smp.strategies.training_script import Seen, compare, train
from pytest_smp.strategies.training_sharding import (
    NO_CLIPPING,
    ShardedTraining,
    sharded_trainings,
)
from smp_core.transport import current_rank


def trials(count: int) -> settings:
    """So many examples in the default profile of 100, and in proportion in others; at least those of
    :func:`~conformance.cases.draws.share`.

    An example trains a model: drawing it takes longer than Hypothesis is used to.
    """
    return settings(
        share(count / 100),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def claimed(smp_world: SmpWorld, engine: str) -> frozenset[EngineCapability]:
    """What an engine claims, as far as the backend claims what it uses for that."""
    found, there = find_engine(engine), smp_world.capabilities.claims
    return frozenset(each for each in found.capabilities if used(found, {each}) <= there)


def degrees(smp_world: SmpWorld, engine: str) -> tuple[int, ...]:
    """The pipeline degrees that an engine can have."""
    return (2, 1, 3, 4) if EngineCapability.PIPELINE in claimed(smp_world, engine) else (1,)


def cases(
    smp_world: SmpWorld, engine: str, *, least: int = 1, most: int = 4, **fixed: Any
) -> st.SearchStrategy[Training]:
    """Cases for the ranks of the session, and the pipeline degrees of the engine."""
    needs(smp_world, least)
    fixed.setdefault("pipeline", degrees(smp_world, engine))
    fixed.setdefault("without", without(engine))
    return trainings(min(most, MOST_RANKS, smp_world.ranks), **fixed)


#: Kinds of blocks that only engines with a capability are given.
KINDS = {
    EngineCapability.UNUSED: ("unused", "route"),
    EngineCapability.ANY_PARAMETER: ("gain", "empty", "transposed", "hold"),
}


def without(engine: str) -> tuple[str, ...]:
    """The kinds of blocks that the engine does not claim."""
    claims = find_engine(engine).capabilities
    return tuple(kind for need, kinds in KINDS.items() if need not in claims for kind in kinds)


def sharded_cases(
    smp_world: SmpWorld, engine: str, *, least: int = 1, most: int = 4, **fixed: Any
) -> st.SearchStrategy[ShardedTraining]:
    """Cases of sharded training for the ranks of the session: with degrees, and kinds of parameters, that
    the engine claims.
    """
    needs(smp_world, least)
    claims = find_engine(engine).capabilities
    if EngineCapability.SHARDING not in claims:
        fixed["sharding"] = (1,)
    elif EngineCapability.BLOCKS not in claims:
        fixed["whole"] = True
    fixed.setdefault("without", without(engine))
    # Norms in another order are others.
    if not {EngineCapability.CLIPPING, EngineCapability.REPLAYED} <= claims:
        fixed.setdefault("clip", NO_CLIPPING)
    return sharded_trainings(min(most, MOST_RANKS, smp_world.ranks), **fixed)


def blocks_of_two(
    smp_world: SmpWorld, engine: str, **fixed: Any
) -> st.SearchStrategy[ShardedTraining]:
    """Cases of four ranks in two shard groups, where the engine has several."""
    if EngineCapability.BLOCKS not in find_engine(engine).capabilities:
        return sharded_cases(smp_world, engine, least=2, sharding=(2, 4), **fixed)
    drawn = sharded_cases(smp_world, engine, least=4, sharding=(2,), **fixed)
    return drawn.filter(lambda case: case.dp == 4)


#: Models, optimizers and windows whose every step is exact (strategies/training_lattice.py): where only
#: the head is trained and the loss is a product, gradients are whole numbers for any weights, also
#: after steps of Adam's; elsewhere every step adds bits.
HEAD = Model(Block("chain", (Block("relu"),)), inputs=2, width=3, frozen=True)
ONE_LAYER = Model(Block("chain"), inputs=2, width=2)
TWO_LAYERS = Model(Block("chain", (Block("linear"), Block("linear"))), inputs=2, width=2)
STEPS: tuple[tuple[Model, str, int], ...] = (
    (HEAD, "decayed", 3),
    (HEAD, "adam", 3),
    (HEAD, "adamw", 3),
    (ONE_LAYER, "momentum", 3),
    (ONE_LAYER, "decayed", 2),
    (TWO_LAYERS, "momentum", 2),
)


def several_steps(model: Model, optimizer: str, windows: int) -> dict[str, Any]:
    """Fields of a case whose optimizer steps after each of several windows."""
    return {
        "model": model,
        "optimizer": optimizer,
        "windows": windows,
        "every": True,
        "loss": "product",
        "span": 1,
        "rows": 1,
        "length": 1,
        "microbatches": 1,
        "passes": 1,
    }


def train_on_rank(engine: str, case: Training, salted: bool = False) -> Seen:
    """Train the case with the engine; called on every rank.

    ``salted``: every rank but 0 makes other weights.
    """
    found = find_engine(engine)
    if found.conventions.fresh:
        current_rank.retire(f"engine {found.name} trains one case in a process")
    replica = found.replica(case)
    at = importlib.import_module("torch.distributed").get_rank() if case.ranks > 1 else 0
    session = found.build(case, salt=f"rank {at}" if salted and at else "")
    oracle.seed(case, replica)  # making a model draws numbers, too
    return train(session, case, replica)


def results(
    smp_world: SmpWorld, engine: str, case: Training, *, salted: bool = False
) -> list[Seen]:
    """Train the case in a world of its own."""
    __tracebackhide__ = True
    return smp_world.run(train_on_rank, engine, case, salted, ranks=case.ranks, config=case.config)


def check(
    smp_world: SmpWorld, engine: str, case: Training, *, none: bool = False, salted: bool = False
) -> list[Seen]:
    """Train the case, and compare all ranks with plain PyTorch, to the last bit, as far as its certificate
    goes. Losses and outputs past that are dropped.
    """
    __tracebackhide__ = True
    seen = results(smp_world, engine, case, salted=salted)
    expected = oracle.plain(case, find_engine(engine).conventions.divisor(case))
    steps = exact_outputs(case)
    for name in ("losses", "outputs"):
        for each in seen:
            del getattr(each, name)[steps:]
        for replica in getattr(expected, name):
            del replica[steps:]
    compare(expected, seen, none=none)
    return seen


# ---- Small worlds --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TrainingWorld:
    """Degrees and microbatches."""

    pp: int
    dp: int
    microbatches: int
    schedule: str

    @property
    def ranks(self) -> int:
        return self.pp * self.dp

    @property
    def config(self) -> dict[str, Any]:
        return {
            "pipeline_parallel_degree": self.pp,
            "microbatches": self.microbatches,
            "pipeline": self.schedule,
            "auto_partition": False,
            "default_partition": 0,
            "ddp": self.dp > 1,
        }


@st.composite
def worlds(draw: st.DrawFn, smp_world: SmpWorld, engine: str, least: int = 1) -> TrainingWorld:
    """Small worlds; skips the test where there are fewer ranks."""
    needs(smp_world, least)
    pairs = [(pp, dp) for pp in degrees(smp_world, engine) for dp in (1, 2) if least <= pp]
    fits = [(pp, dp) for pp, dp in pairs if pp <= 2 and pp * dp <= min(4, smp_world.ranks)]
    pp, dp = draw(st.sampled_from(fits))
    schedule = draw(st.sampled_from(["interleaved", "simple"]))
    return TrainingWorld(pp, dp, draw(st.integers(1, 3)), schedule)


# ---- The SMP API itself --------------------------------------------------------------------------


def namespace(engine: str) -> Any:
    """The engine's SMP API, as a script imports it."""
    return importlib.import_module(find_engine(engine).api)


def step_of_the_sum(smp: Any) -> Any:
    """A step function of model and batch, whose loss is the sum of the outputs."""

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(model: Any, x: Any) -> Any:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    return body


class _Api:
    """The SMP API of the engine that is tested, for functions that run on ranks."""

    engine = "smp"

    def __getattr__(self, name: str) -> Any:
        return getattr(namespace(self.engine), name)


#: In place of ``import ... as smp``, in what :func:`with_engine` runs.
smp: Any = _Api()


def with_engine(engine: str, body: Callable[..., Any], *args: Any) -> Any:
    """``body(*args)``, with :data:`smp` the engine's; called on every rank."""
    smp.engine = engine  # one in a session, whether ranks are threads or processes
    return body(*args)


def raised(call: Callable[[], object]) -> str | None:
    """The type of the exception that a call raises, or None.

    Which one is nobody's promise; that there is one, on every rank, is.
    """
    try:
        call()
    except Exception as error:  # of any type
        return type(error).__name__
    return None
