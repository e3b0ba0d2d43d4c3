"""Helpers of the properties of training: they run a case on an engine and compare with plain PyTorch.

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
from pytest_smp.strategies.training_tensor import TensorTraining, tensor_trainings
from smp_core.transport import current_rank


def trials(count: int) -> settings:
    """Settings with so many examples in the default profile of 100, and in proportion in other profiles.

    A property gets at least the examples of :func:`~conformance.cases.draws.share`. Hypothesis's checks
    of slow and filtered draws are off, because drawing a model takes long.
    """
    return settings(
        share(count / 100),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def claimed(smp_world: SmpWorld, engine: str) -> frozenset[EngineCapability]:
    """The engine's claims whose operations the backend claims too."""
    found, there = find_engine(engine), smp_world.capabilities.claims
    return frozenset(each for each in found.capabilities if used(found, {each}) <= there)


def degrees(smp_world: SmpWorld, engine: str) -> tuple[int, ...]:
    """The pipeline degrees that an engine can train with on this backend."""
    return (2, 1, 3, 4) if EngineCapability.PIPELINE in claimed(smp_world, engine) else (1,)


def cases(
    smp_world: SmpWorld, engine: str, *, least: int = 1, most: int = 4, **fixed: Any
) -> st.SearchStrategy[Training]:
    """Draw a case for the session's ranks and the engine's pipeline degrees.

    A session with fewer than ``least`` ranks skips the test.
    """
    needs(smp_world, least)
    fixed.setdefault("pipeline", degrees(smp_world, engine))
    fixed.setdefault("without", without(engine))
    return trainings(min(most, MOST_RANKS, smp_world.ranks), **fixed)


#: Kinds of blocks that only engines with a certain capability get.
KINDS = {
    EngineCapability.UNUSED: ("unused", "route"),
    EngineCapability.ANY_PARAMETER: ("gain", "empty", "transposed", "hold"),
}


def without(engine: str) -> tuple[str, ...]:
    """The kinds of blocks that an engine does not get, for lack of a claim."""
    claims = find_engine(engine).capabilities
    return tuple(kind for need, kinds in KINDS.items() if need not in claims for kind in kinds)


def sharded_cases(
    smp_world: SmpWorld, engine: str, *, least: int = 1, most: int = 4, **fixed: Any
) -> st.SearchStrategy[ShardedTraining]:
    """Draw a case of sharded training with degrees and kinds of parameters that the engine claims.

    A session with fewer than ``least`` ranks skips the test.
    """
    needs(smp_world, least)
    claims = find_engine(engine).capabilities
    if EngineCapability.SHARDING not in claims:
        fixed["sharding"] = (1,)
    elif EngineCapability.BLOCKS not in claims:
        fixed["whole"] = True
    fixed.setdefault("without", without(engine))
    # A norm that is summed in another order differs in its last bits, and so does all that it scales.
    if not {EngineCapability.CLIPPING, EngineCapability.REPLAYED} <= claims:
        fixed.setdefault("clip", NO_CLIPPING)
    return sharded_trainings(min(most, MOST_RANKS, smp_world.ranks), **fixed)


def tensor_cases(
    smp_world: SmpWorld, engine: str, *, least: int = 2, most: int = 4, **fixed: Any
) -> st.SearchStrategy[TensorTraining]:
    """Draw a case of tensor parallelism with degrees, batches and kinds of parameters that the engine claims.

    A session with fewer than ``least`` ranks skips the test.
    """
    needs(smp_world, least)
    claims = claimed(smp_world, engine)
    if EngineCapability.OWN_BATCHES not in claims:
        fixed["prescaled"] = (True,)
    fixed.setdefault("without", without(engine))
    fixed.setdefault("clip", NO_CLIPPING)
    fixed.setdefault("split", True)
    # An engine with an order of its own may divide by the degree, which is exact for powers of two.
    fixed.setdefault("tensor", (2, 4, 3) if EngineCapability.REPLAYED in claims else (2, 4))
    return tensor_trainings(min(most, MOST_RANKS, smp_world.ranks), **fixed)


def blocks_of_two(
    smp_world: SmpWorld, engine: str, **fixed: Any
) -> st.SearchStrategy[ShardedTraining]:
    """Draw a case of four ranks in two shard groups; in one, if the engine has no more."""
    if EngineCapability.BLOCKS not in find_engine(engine).capabilities:
        return sharded_cases(smp_world, engine, least=2, sharding=(2, 4), **fixed)
    drawn = sharded_cases(smp_world, engine, least=4, sharding=(2,), **fixed)
    return drawn.filter(lambda case: case.dp == 4)


#: Models, optimizers and windows whose every step is exact (strategies/training_lattice.py). If only the
#: head is trained and the loss is a product, gradients are whole numbers for any weights, even for those
#: that Adam leaves. In other models every step needs more bits, so windows are few.
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
    """The fields of a case whose optimizer steps after each of several windows."""
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
    """Train the case with the engine; every rank must call this function.

    With ``salted`` every rank but 0 makes different weights, which rank 0's must replace.
    """
    found = find_engine(engine)
    if found.conventions.fresh:
        current_rank.retire(f"engine {found.name} trains one case in a process")
    replica = found.replica(case)
    at = importlib.import_module("torch.distributed").get_rank() if case.ranks > 1 else 0
    session = found.build(case, salt=f"rank {at}" if salted and at else "")
    oracle.seed(case, replica)  # after the build: making a model draws random numbers
    return train(session, case, replica)


def results(
    smp_world: SmpWorld, engine: str, case: Training, *, salted: bool = False
) -> list[Seen]:
    """Train the case in a world of its own, and return the results of all ranks.

    Raises ValueError for a case with a block that the engine does not claim: it would be the property's failure, and
    not the engine's.
    """
    __tracebackhide__ = True
    if unclaimed := sorted(case.model.kinds().intersection(without(engine))):
        raise ValueError(
            f"the case has blocks of the kinds {', '.join(unclaimed)}, which the engine {engine!r} does not claim: "
            "draw it by cases(), sharded_cases() or tensor_cases()"
        )
    return smp_world.run(train_on_rank, engine, case, salted, ranks=case.ranks, config=case.config)


def check(
    smp_world: SmpWorld, engine: str, case: Training, *, none: bool = False, salted: bool = False
) -> list[Seen]:
    """Train the case, and compare all ranks with plain PyTorch to the last bit.

    Losses and outputs of steps that the case's certificate does not cover are dropped on both sides.
    Raises AssertionError.
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
    """Degrees, microbatches and schedule of a small world."""

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
    """Draw a world of at most four ranks, with pipeline degree ``least`` to 2.

    A session with fewer than ``least`` ranks skips the test.
    """
    needs(smp_world, least)
    pairs = [(pp, dp) for pp in degrees(smp_world, engine) for dp in (1, 2) if least <= pp]
    fits = [(pp, dp) for pp, dp in pairs if pp <= 2 and pp * dp <= min(4, smp_world.ranks)]
    pp, dp = draw(st.sampled_from(fits))
    schedule = draw(st.sampled_from(["interleaved", "simple"]))
    return TrainingWorld(pp, dp, draw(st.integers(1, 3)), schedule)


# ---- The SMP API itself --------------------------------------------------------------------------


def namespace(engine: str) -> Any:
    """The namespace of the engine's SMP API, as a script imports it."""
    return importlib.import_module(find_engine(engine).api)


def step_of_the_sum(smp: Any) -> Any:
    """Make a step function of model and batch, whose loss is the sum of the outputs."""

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(model: Any, x: Any) -> Any:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    return body


class _Api:
    """The SMP API of the engine under test, for functions that run on ranks."""

    engine = "smp"

    def __getattr__(self, name: str) -> Any:
        return getattr(namespace(self.engine), name)


#: The namespace that functions run by :func:`with_engine` use in place of ``import ... as smp``.
smp: Any = _Api()


def with_engine(engine: str, body: Callable[..., Any], *args: Any) -> Any:
    """Return ``body(*args)``, run with the engine's API as :data:`smp`; every rank must call."""
    smp.engine = engine  # safe for ranks that are threads: a session has one engine
    return body(*args)


def raised(call: Callable[[], object]) -> str | None:
    """The name of the type of the exception that a call raises, or None.

    The API promises an exception on every rank, and not its type.
    """
    try:
        call()
    except Exception as error:  # of any type
        return type(error).__name__
    return None
