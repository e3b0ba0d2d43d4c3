"""Properties of 16-bit training: loss scales, overflows and skipped steps, compared with a small model."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from conformance.cases.precision import Plain, PrecisionRun, PrecisionStages, batch
from conformance.cases.precision_runs import alike, check, dynamic_args, held, layouts, runs
from conformance.cases.training import smp, trials, with_engine
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import Overflows
from pytest_smp.strategies import training_oracle as oracle

Data = st.DataObject

#: Kinds of gradients that are the same at any loss scale; a large one overflows at some scales only.
CERTAIN = ("absent", "inf", "nan")


@requirement("PREC-LOSS-SCALE")
@given(data=st.data())
@trials(6)
def test_the_scale_follows_the_rules(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    # The first layouts are small, which leaves time for long histories of overflows.
    small = layouts(smp_world, smp_engine)[:4]
    drawn = runs(small, powers=False, least=6, most=12, optimizer="sgd", passes=1)
    check(smp_world, smp_engine, data.draw(drawn, "run"), "overflow", "scale")


@requirement("PREC-LOSS-SCALE")
@given(data=st.data(), shift=st.sampled_from([2, 3, 1]), consecutive=st.booleans())
@trials(14)
def test_overflows_in_a_row_and_apart(
    smp_world: SmpWorld, smp_engine: str, data: Data, shift: int, consecutive: bool
) -> None:
    bad = st.sampled_from([("inf",), ("finite",), ("nan",), ("finite",)])
    history = Overflows(*data.draw(st.lists(bad, min_size=10, max_size=16), "history"))
    arguments = data.draw(dynamic_args(powers=False), "arguments")
    # The scale starts between its floor and values that overflow by themselves, and good steps do not always
    # fill a window.
    arguments |= {
        "init_scale": 2.0**8,
        "min_scale": 1,
        "scale_window": data.draw(st.integers(2, 4), "window"),
    }
    arguments |= {"delayed_shift": shift, "consecutive_hysteresis": consecutive}
    scaling = (("dynamic_loss_scale", True), ("dynamic_loss_args", arguments))
    check(smp_world, smp_engine, PrecisionRun(history, scaling=scaling), "overflow", "scale")


@requirement("PREC-OVERFLOW")
@given(data=st.data())
@trials(6)
def test_an_overflow_on_one_rank_is_one_on_all(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    drawn = runs(layouts(smp_world, smp_engine, least=2), least=3, optimizer="sgd")
    check(smp_world, smp_engine, data.draw(drawn, "run"), "overflow", "scale")


@requirement("PREC-OVERFLOW")
@given(data=st.data(), kind=st.sampled_from(["inf", "nan", "large"]))
@trials(4)
def test_an_overflow_in_one_part_is_one_on_all_parts(
    smp_world: SmpWorld, smp_engine: str, data: Data, kind: str
) -> None:
    split = layouts(smp_world, smp_engine, least=2, sharded=True)
    split += layouts(smp_world, smp_engine, least=2, split=True)
    drawn = runs(split, kinds=(kind,), least=4, optimizer="sgd")
    check(smp_world, smp_engine, data.draw(drawn, "run"), "overflow", "scale")


@requirement("PREC-SKIP")
@given(data=st.data())
@trials(5)
def test_a_skipped_step_touches_nothing(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    optimizer = data.draw(st.sampled_from(["decayed", "adamw", "momentum", "adam"]), "optimizer")
    layout = layouts(smp_world, smp_engine, split=False)
    after_skip = data.draw(st.booleans(), "after skip")
    fixed: dict[str, Any] = {"optimizer": optimizer, "after_skip": after_skip}
    drawn = runs(layout, kinds=CERTAIN, least=4, **fixed)
    check(smp_world, smp_engine, data.draw(drawn, "run"), "state", "masters", "parameters")


@requirement("PREC-SKIP")
@given(data=st.data())
@trials(2)
def test_a_skipped_step_touches_nothing_of_split_state(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    drawn = runs(layouts(smp_world, smp_engine, least=2, split=True), least=4, optimizer="adam")
    check(smp_world, smp_engine, data.draw(drawn, "run"), "parameters")


@requirement("PREC-STATIC")
@given(data=st.data(), exponent=st.integers(0, 11))
@trials(4)
def test_a_static_scale_is_divided_out_and_overflows_never(
    smp_world: SmpWorld, smp_engine: str, data: Data, exponent: int
) -> None:
    scaling = (("static_loss_scale", 2.0**exponent),)
    drawn = runs(layouts(smp_world, smp_engine), scaling=scaling, least=3)
    check(smp_world, smp_engine, data.draw(drawn, "run"), "overflow", "scale", "parameters")


@requirement("PREC-SET-SCALE")
@given(data=st.data(), dynamic=st.booleans())
@trials(3)
def test_a_scale_that_is_set_counts_from_then_on(
    smp_world: SmpWorld, smp_engine: str, data: Data, dynamic: bool
) -> None:
    scaling: tuple[tuple[str, Any], ...] = (("static_loss_scale", 4.0),)
    if dynamic:
        arguments = {"init_scale": 2.0**10, "scale_window": 2}
        scaling = (("dynamic_loss_scale", True), ("dynamic_loss_args", arguments))
    scales = data.draw(st.permutations([None, 1.0, 2.0**9]).map(tuple), "scales")
    drawn = runs(layouts(smp_world, smp_engine), scaling=scaling, scales=scales, least=4)
    check(smp_world, smp_engine, data.draw(drawn, "run"), "scale", "overflow", "parameters")


@requirement("PREC-IGNORED")
@given(data=st.data(), dynamic=st.booleans())
@trials(2)
def test_without_fp16_scaling_is_ignored(
    smp_world: SmpWorld, smp_engine: str, data: Data, dynamic: bool
) -> None:
    arguments = data.draw(dynamic_args(), "arguments")
    scaling = (
        ("static_loss_scale", 64.0),
        ("dynamic_loss_scale", dynamic),
        ("dynamic_loss_args", arguments),
    )
    layout = layouts(smp_world, smp_engine, sharded=False, split=False)
    drawn = runs(layout, scaling=scaling, dtype="float32", kinds=CERTAIN)
    check(smp_world, smp_engine, data.draw(drawn, "run"), "parameters", "state")


# ---- smp.amp.GradScaler --------------------------------------------------------------------------


def train_with_grad_scaler(run: PrecisionRun, arguments: dict[str, Any]) -> list[tuple[float, Any]]:
    """Train the run in float32 with a GradScaler; return this rank's scale and parameters by step."""
    module = PrecisionStages()
    model = smp.DistributedModel(module, backward_passes_per_step=run.passes)
    if run.pp > 1:
        smp.set_partition(module.parts[1], 1)
    optimizer = smp.DistributedOptimizer(oracle.OPTIMIZERS[run.optimizer](model.parameters()))
    scaler = smp.amp.GradScaler(**arguments)

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(model: Any, scaler: Any, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = (model(x)[:, -1] * y).sum()
        model.backward(scaler.scale(loss))
        return loss

    told = []
    for step in range(len(run.history)):
        optimizer.zero_grad()
        for turn in range(run.passes):
            body(model, scaler, *batch(run, step, turn, smp.dp_rank()))
        scaler.step(optimizer)
        scaler.update()
        told.append((scaler.get_scale(), held(run, model)))
    return told


@requirement("PREC-GRAD-SCALER")
@given(
    data=st.data(),
    interval=st.integers(1, 3),
    factors=st.sampled_from([(2.0, 0.5), (4.0, 0.25), (2.0, 0.125)]),
)
@trials(4)
def test_a_grad_scaler_knows_of_all_ranks(
    smp_world: SmpWorld, smp_engine: str, data: Data, interval: int, factors: tuple[float, float]
) -> None:
    layout = layouts(smp_world, smp_engine, least=2, sharded=False, split=False)
    drawn = runs(layout, scaling=(), dtype="float32", kinds=CERTAIN, least=4)
    run = data.draw(drawn, "run")
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    arguments: dict[str, Any] = dict(zip(names, (2.0**6, *factors, interval), strict=True))
    ranks = smp_world.run(
        with_engine,
        smp_engine,
        train_with_grad_scaler,
        run,
        arguments,
        ranks=run.pp * run.dp,
        config=run.config,
    )
    plain, scaler = Plain(run), torch.amp.GradScaler("cpu", **arguments)
    for step in range(len(run.history)):
        sums = plain.sums(step, scaler.scale(torch.ones(())).item())
        for name, parameter in plain.held.items():
            parameter.grad = sums[name]
        scaler.step(plain.optimizer)
        scaler.update()
        for rank, told in enumerate(ranks):
            scale, parameters = told[step]
            assert scale == scaler.get_scale(), f"rank {rank}, step {step}: the scale is {scale}"
            for name, value in parameters.items():
                wanted = plain.held[name].detach()
                assert alike(value, wanted), f"rank {rank}, step {step}: {name} is {value}"
