"""Runs of :mod:`conformance.cases.precision` on ranks: trained, compared with plain PyTorch, and drawn."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

from conformance.cases.draws import MOST_RANKS, needs
from conformance.cases.precision import Plain, PrecisionRun, PrecisionStages, Told, batch, state_of
from conformance.cases.training import smp, with_engine
from conformance.engines.capabilities import EngineCapability
from conformance.engines.names import find_engine
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import overflows
from pytest_smp.strategies import training_oracle as oracle

# ---- On ranks ------------------------------------------------------------------------------------


def train(run: PrecisionRun, parts: tuple[str, ...]) -> list[Told]:
    """Train a run on one rank and return the results of each step.

    ``parts`` names the fields of a result to fill in; ``overflow``, ``scale`` and ``norm`` always are.
    """
    module = PrecisionStages()
    model = smp.DistributedModel(module, backward_passes_per_step=run.passes)
    if run.pp > 1:
        smp.set_partition(module.parts[1], 1)
    inner = oracle.OPTIMIZERS[run.optimizer](model.parameters())
    optimizer = smp.DistributedOptimizer(inner, **dict(run.scaling))

    @smp.step  # type: ignore[untyped-decorator]  # anybody's
    def body(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = (model(x)[:, -1] * y).sum()
        model.backward(loss)
        return loss

    told = []
    for step in range(len(run.history)):
        scale = run.scales[step % len(run.scales)]
        if scale is not None:
            optimizer.loss_scale = scale
        if run.after_skip or not optimizer.overflow:
            optimizer.zero_grad()
        for turn in range(run.passes):
            body(model, *batch(run, step, turn, smp.dp_rank()))
        norm = None
        if run.max_norm is not None:
            norm = float(optimizer.clip_master_grads(run.max_norm, norm_type=run.norm_type))
        optimizer.step()
        flag, scale = (optimizer.overflow, optimizer.loss_scale) if run.narrow else (False, 1.0)
        now = Told(flag, scale, norm)
        if "parameters" in parts:
            now.parameters = held(run, model)
        if "masters" in parts:
            now.masters = masters(model, optimizer)
        if "state" in parts:
            now.state = state_of(optimizer.state_dict())
        told.append(now)
    return told


def masters(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """The masters of the parameters that a rank holds, by the unwrapped model's names. A parameter that is its own
    master has none.
    """
    groups = zip(optimizer.fp16_groups, optimizer.fp32_from_fp16_groups, strict=True)
    pairs = (pair for group in groups for pair in zip(*group, strict=True))
    of = {id(own): master for own, master in pairs if master is not own}
    return {
        name.removeprefix("module."): of[id(each)].detach().clone()
        for name, each in model.local_named_parameters()
        if id(each) in of
    }


def held(run: PrecisionRun, model: Any) -> dict[str, Tensor]:
    """The parameters of a rank's stage, unsharded, by the unwrapped model's names."""
    own = {name.removeprefix("module."): each for name, each in model.local_named_parameters()}
    if run.sharding > 1:
        whole = model.state_dict()
        own = {name: whole[name] for name in own}
    return {name: each.detach().clone() for name, each in own.items()}


def alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and values; NaN equals NaN."""
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and bool(((one == other) | (one.isnan() & other.isnan())).all())
    )


def _compare(
    run: PrecisionRun, rank: int, part: str, expected: Told, told: Told, place: str
) -> None:
    want, got = getattr(expected, part), getattr(told, part)
    if not isinstance(got, dict):
        want, got = (each if isinstance(each, bool) else _float32(each) for each in (want, got))
        assert got == want, f"{place}{part} is {got}, plain PyTorch has {want}"
        return
    if part == "state":
        got, want = _flat(got), _flat(want)
        assert sorted(got) == sorted(want), f"{place}{part} is of {sorted(got)}, not {sorted(want)}"
    for name, value in got.items():
        assert name in want, f"{place}there is no {name}"
        wanted = run.own(want[name], rank) if part == "masters" else want[name]
        same = alike(value, wanted)
        assert same, f"{place}{part} {name}: is {value}, plain PyTorch has {wanted}"


def _flat(state: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{name} of {index}": v for index, values in state.items() for name, v in values.items()
    }


def _float32(value: float | None) -> float | None:
    """Round a norm or scale to float32, the precision that gradients are summed in."""
    return None if value is None else float(torch.tensor(value, dtype=torch.float32))


def check(smp_world: SmpWorld, engine: str, run: PrecisionRun, *parts: str) -> None:
    """Compare all ranks with plain PyTorch after every step, to the last bit.

    ``parts`` names the compared fields of a result; the first difference in their order is reported.
    Raises AssertionError.
    """
    __tracebackhide__ = True
    count = run.pp * run.dp
    ranks = smp_world.run(with_engine, engine, train, run, parts, ranks=count, config=run.config)
    for step, expected in enumerate(Plain(run).steps()):
        for part in parts:
            for rank, told in enumerate(ranks):
                _compare(run, rank, part, expected, told[step], f"rank {rank}, after step {step}: ")
            if isinstance(getattr(expected, part), dict):
                found = {name for told in ranks for name in getattr(told[step], part)}
                assert found == set(getattr(expected, part)), f"{part} of {found} only"


# ---- What is drawn -------------------------------------------------------------------------------

#: Pipeline degree, replicas, sharding degree, and whether the optimizer's state is split.
_LAYOUTS = (
    (1, 1, 1, False),
    (1, 2, 1, False),
    (2, 1, 1, False),
    (1, 2, 2, False),
    (1, 2, 1, True),
    (1, 4, 2, False),
    (2, 2, 1, False),
    (1, 4, 4, False),
    (2, 2, 1, True),
    (1, 8, 4, False),
)


def layouts(
    smp_world: SmpWorld,
    engine: str,
    *,
    least: int = 1,
    sharded: bool | None = None,
    split: bool | None = None,
) -> list[dict[str, Any]]:
    """The degrees of a run that the session's ranks and the engine's claims allow, as fields of PrecisionRun.

    Args:
        smp_world: the session's ranks; a session with fewer than ``least`` skips the test.
        engine: the name of the engine.
        least: the fewest ranks.
        sharded: whether parameters are sharded; None allows both.
        split: whether the optimizer's state alone is split; None allows both.
    """
    needs(smp_world, least)
    claims = find_engine(engine).capabilities
    found = []
    for pp, dp, degree, split_state in _LAYOUTS:
        fits = least <= pp * dp <= min(MOST_RANKS, smp_world.ranks)
        claimed = (pp == 1 or EngineCapability.PIPELINE in claims) and (
            degree == 1 or EngineCapability.SHARDING in claims
        )
        claimed &= degree in (1, dp) or EngineCapability.BLOCKS in claims
        if fits and claimed and sharded in (None, degree > 1) and split in (None, split_state):
            found.append({"pp": pp, "dp": dp, "sharding": degree, "split_state": split_state})
    return found


@st.composite
def dynamic_args(draw: st.DrawFn, *, powers: bool = True) -> dict[str, Any]:
    """Draw ``dynamic_loss_args`` with any of their keys; ``powers`` allows only powers of two as factors."""
    whole = st.sampled_from([2.0, 4.0, 32.0])
    keys: dict[str, st.SearchStrategy[Any]] = {
        "init_scale": st.sampled_from([2**4, 2.0**15, 2**16, 1, 2.0**8]),
        "scale_factor": whole if powers else whole | st.sampled_from([1.5, 3.0]),
        "scale_window": st.integers(1, 4),
        "min_scale": st.sampled_from([1, 2, 64]),
        "delayed_shift": st.integers(1, 3),
        "consecutive_hysteresis": st.booleans(),
    }
    # The defaults of these two keys hide nearly every effect within a few steps, so they are mostly given.
    given = {"init_scale", "scale_window"} | draw(st.sets(st.sampled_from(list(keys))))
    left_out = (
        draw(st.sets(st.sampled_from(["init_scale", "scale_window"])))
        if draw(st.integers(0, 5)) == 5
        else set()
    )
    return {key: draw(values) for key, values in keys.items() if key in given - left_out}


@st.composite
def runs(
    draw: st.DrawFn,
    /,
    layouts: list[dict[str, Any]],
    *,
    powers: bool = True,
    kinds: tuple[str, ...] = ("absent", "large", "inf", "nan"),
    least: int = 2,
    most: int = 6,
    **fixed: Any,
) -> PrecisionRun:
    """Draw a run, with a dynamic loss scale unless ``fixed`` gives ``scaling``.

    Args:
        draw: Hypothesis's.
        layouts: the degrees to choose from, as :func:`layouts` returns them.
        powers: whether every scale factor is a power of two.
        kinds: the kinds of gradient beside finite ones.
        least: the fewest steps.
        most: the most steps; runs of many ranks have fewer.
        fixed: fields of the run that are not drawn.
    """
    layout = draw(st.sampled_from(layouts))
    if "scaling" not in fixed:
        arguments = draw(dynamic_args(powers=powers))
        given = {"dynamic_loss_scale": True, "dynamic_loss_args": arguments}
        fixed["scaling"] = tuple(given.items())
    # The ranks of a shard group must use the same parameters, so none of them may lack a gradient alone.
    odd = [kind for kind in kinds if kind != "absent" or layout["sharding"] == 1]
    ranks = layout["pp"] * layout["dp"]
    most = min(most, max(2, 24 // ranks))  # many ranks take long
    steps = {"min_steps": min(least, most), "max_steps": most}
    drawn = {
        "history": draw(overflows(ranks, kinds=odd, **steps)),
        "threshold": draw(st.sampled_from([4, 0, 6])),  # some parameters are sharded, all, none
        "microbatches": draw(st.sampled_from([1, 2])),
        "passes": draw(st.sampled_from([1, 1, 2])),
        "optimizer": draw(st.sampled_from(["momentum", "adam", "sgd"])),
        "seed": draw(st.integers(0, 99)),
    }
    return PrecisionRun(**drawn | layout | fixed)
