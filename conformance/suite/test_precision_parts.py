"""Properties of shard_optimizer_state: the same bits as a whole optimizer, and the size of the state."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from conformance.cases.precision import STAGES, PrecisionRun, PrecisionStages, batch
from conformance.cases.precision_runs import layouts, runs
from conformance.cases.training import cases, degrees, smp, train_on_rank, trials, with_engine
from conformance.engines.capabilities import EngineCapability
from conformance.engines.names import find_engine
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training_replay import replayed
from pytest_smp.strategies.training_script import compare

Data = st.DataObject


def dtypes(engine: str) -> list[str]:
    """The dtypes of the module that the engine can train."""
    fp16 = EngineCapability.FP16 in find_engine(engine).capabilities
    return ["float32", "float16"] if fp16 else ["float32"]


@requirement("PREC-STATE-EQUAL")
@given(data=st.data(), optimizer=st.sampled_from(["adam", "momentum", "adamw"]))
@trials(4)
def test_split_state_changes_no_bit(
    smp_world: SmpWorld, smp_engine: str, data: Data, optimizer: str
) -> None:
    dtype = data.draw(st.sampled_from(dtypes(smp_engine)), "dtype")
    pipeline = tuple(degree for degree in degrees(smp_world, smp_engine) if degree <= 2)
    drawn = cases(
        smp_world,
        smp_engine,
        least=2,
        real=True,
        automatic=False,
        pipeline=pipeline if smp_world.ranks >= 4 else (1,),
        dp=2,
        windows=2,
        dtype=dtype,
        optimizer=optimizer,
    )
    case = data.draw(drawn, "case")
    config = case.config | {"shard_optimizer_state": True}
    seen = smp_world.run(train_on_rank, smp_engine, case, False, ranks=case.ranks, config=config)
    expected = replayed(case)
    for each in (*seen, expected):
        each.gradients.clear()  # masters hold parts of gradients only; parameters show their effect
    compare(expected, seen, what="the whole optimizer")


def state_bytes(run: PrecisionRun) -> tuple[int, int]:
    """Train, and return the pp rank and the bytes of the optimizer's elementwise state on this rank."""
    module = PrecisionStages()
    model = smp.DistributedModel(module)
    if run.pp > 1:
        smp.set_partition(module.parts[1], 1)
    optimizer = smp.DistributedOptimizer(oracle.OPTIMIZERS[run.optimizer](model.parameters()))

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = (model(x)[:, -1] * y).sum()
        model.backward(loss)
        return loss

    for step in range(len(run.history)):
        optimizer.zero_grad()
        body(model, *batch(run, step, 0, smp.dp_rank()))
        optimizer.step()
    kept = [each for values in optimizer.state.values() for each in values.values()]
    return int(smp.pp_rank()), sum(
        each.nbytes for each in kept if isinstance(each, Tensor) and each.dim()
    )


@requirement("PREC-STATE-BYTES")
@given(data=st.data(), optimizer=st.sampled_from(["adam", "momentum"]))
@trials(4)
def test_state_is_split_over_replicas(
    smp_world: SmpWorld, smp_engine: str, data: Data, optimizer: str
) -> None:
    layout = layouts(smp_world, smp_engine, least=2, split=True)
    dtype = data.draw(st.sampled_from(dtypes(smp_engine)), "dtype")
    fixed: dict[str, Any] = {"scaling": (), "kinds": (), "passes": 1, "least": 1, "most": 2}
    run = data.draw(runs(layout, dtype=dtype, optimizer=optimizer, **fixed), "run")
    told = smp_world.run(
        with_engine, smp_engine, state_bytes, run, ranks=run.pp * run.dp, config=run.config
    )
    each = torch.float32.itemsize * (2 if optimizer == "adam" else 1)
    sizes = {0: [1, STAGES[0][1]], 1: [STAGES[1][1]]}  # by stage
    if run.pp == 1:
        sizes = {0: sizes[0] + sizes[1]}
    for stage, of in sizes.items():
        held = [count for at, count in told if at == stage]
        assert sum(held) == each * sum(of), f"stage {stage} of {run.pp}: {held} bytes"
        assert max(held) <= each * sum(-(-size // run.dp) for size in of), f"stage {stage}: {held}"
