"""The examples train as plain PyTorch does, whatever their ranks are and whoever starts them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import smp_core.torch as smp
from pytest_smp import replay
from smp_core.errors import BackendError
from smp_core.launch.mpiexec import find_mpiexec
from smp_core.torch.memory.recorder import Recorder, Sample

ROOT = Path(__file__).parents[1]
SMALL = {
    "digits": {"steps": 4, "batch": 32},
    "characters": {"steps": 3, "batch": 8, "width": 8, "heads": 2, "context": 12},
}


@pytest.fixture(params=SMALL)
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of a script. Scripts are no part of what is installed."""
    return module_of(request.param, monkeypatch)


@pytest.fixture
def characters(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module_of("characters", monkeypatch)


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module_of("digits", monkeypatch)


def module_of(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if name == "digits":
        pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module(f"examples.{name}.train")


def options_of(example: ModuleType, **more: object):
    return example.Options(**SMALL[example.__name__.split(".")[1]], **more)


@functools.cache
def expected(example: ModuleType, options: object) -> list[float]:
    """Plain PyTorch's curve."""
    return example.plain(options)


def check(smp_world, example: ModuleType, ranks: int, **more: object) -> list[float]:
    """Train on ranks: the curve is plain PyTorch's, on every rank."""
    options = options_of(example, **more)
    curves = smp_world.run(example.train, options, ranks=ranks)
    reference = options_of(
        example,
        microbatches=options.microbatches,
        replicas=ranks // options.pipeline,
        **({"exact": True} if more.get("exact") else {}),
    )
    wanted = expected(example, reference)
    assert len(wanted) == options.steps
    assert curves == [wanted] * ranks
    return wanted


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, {}),
        (1, {"microbatches": 1}),
        (2, {"pipeline": 2, "recompute": True}),
        (2, {"pipeline": 2, "auto": True, "schedule": "simple"}),
        (4, {"pipeline": 4}),
        (4, {"pipeline": 2, "microbatches": 2}),
        (4, {"pipeline": 1, "microbatches": 2}),
    ],
    ids=str,
)
def test_the_curve_is_that_of_plain_pytorch(smp_world, example, ranks, more):
    check(smp_world, example, ranks, **more)


def test_on_the_lattice_all_layouts_have_the_curve_of_the_loop_that_everybody_writes(
    smp_world, digits
):
    layouts = [(1, 1, 1), (1, 1, 4), (2, 2, 4), (2, 1, 2), (4, 2, 2), (4, 1, 4)]
    curves = [
        check(smp_world, digits, ranks, exact=True, pipeline=pipeline, microbatches=microbatches)
        for ranks, pipeline, microbatches in layouts
    ]
    assert curves == [curves[0]] * len(layouts)
    assert len(set(curves[0])) == len(curves[0])  # it moves


def test_the_lattice_holds_all_sums(digits):
    """The certificate (ENGINES 2.2 tier E): the same computation on magnitudes, each at its bound."""
    options = options_of(digits, exact=True)
    model = digits.build(options)
    assert all((p * 64).frac().eq(0).all() and p.abs().max() <= 1 for p in model.parameters())
    for parameter in model.parameters():
        parameter.data.fill_(1)
    x = torch.ones_like(digits.data(options)[0][: digits.Options().batch])
    loss = 17 * (1 + model(x)).sum() / 10  # of 10 digits one counts 8 times, the others once
    loss.backward()
    largest = max(loss.item(), *(p.grad.max().item() for p in model.parameters()))
    assert largest * 64 ** len(model.layers) <= 2**53


def test_dropout_is_the_same_in_every_layout(smp_world, characters):
    """Random numbers belong to microbatch and module (docs/pipelines.md); plain PyTorch draws others."""
    example = characters
    options = options_of(example, dropout=0.5)
    (alone,) = smp_world.run(example.train, options, ranks=1)
    piped = dataclasses.replace(options, pipeline=2, recompute=True, schedule="simple")
    assert smp_world.run(example.train, piped, ranks=2) == [alone] * 2
    assert alone != expected(example, options_of(example))


def test_training_goes_on_from_a_checkpoint(smp_world, example, tmp_path):
    options = options_of(example, pipeline=2, save=str(tmp_path / "saved"))
    cut = dataclasses.replace(options, steps=10)
    whole = dataclasses.replace(options, steps=12)
    wanted = expected(example, dataclasses.replace(whole, pipeline=1, save=""))
    assert smp_world.run(example.train, cut, ranks=2) == [wanted[:10]] * 2
    assert (tmp_path / "saved" / "newest").read_text().strip() == "step10_partial"
    assert smp_world.run(example.train, whole, ranks=2) == [wanted] * 2


RANKS = 8


def test_the_degree_of_sharding_does_not_change_the_curve(smp_world, characters):
    """Eight steps of the model as it is, whose every parameter is split: one curve, plain PyTorch's.

    Without accumulation and clipping, and with a power of two ranks in a group, the published order of
    sums is one and the same for all degrees (smp_core/reduction.py)."""
    options = characters.Options(steps=8, microbatches=1, whole=1)
    wanted = expected(characters, dataclasses.replace(options, replicas=RANKS, whole=1000))
    assert len(set(wanted)) == 8
    for degree in (1, 2, 4, 8):
        chosen = dataclasses.replace(options, sharding=degree)
        assert smp_world.run(characters.train, chosen, ranks=RANKS) == [wanted] * RANKS


# The small model's parameters have 8 to 288 elements, the qkv weights 192.
@pytest.mark.parametrize(
    ("degree", "whole"), [(2, 64), (2, 192), (4, 64), (4, 193), (4, 10**6), (8, 64), (8, 192)]
)
def test_what_stays_whole_does_not_change_the_curve(smp_world, characters, degree, whole):
    small = options_of(characters, microbatches=2)
    options = dataclasses.replace(small, batch=2 * RANKS, sharding=degree, whole=whole)
    plain = dataclasses.replace(options, replicas=RANKS, sharding=1, whole=1000)
    wanted = expected(characters, plain)
    assert smp_world.run(characters.train, options, ranks=RANKS) == [wanted] * RANKS


def in_order(example: ModuleType, options, ranks: int = RANKS) -> list[float]:
    """The curve of a plain loop on one process that adds up in the order that is published for this degree
    (docs/sharding.md): the reference where the degree makes a difference to the last bits.
    """
    dtype, degree = getattr(torch, options.dtype), options.sharding
    scale = 2.0**10 if dtype is torch.float16 else 1.0
    corpus = example.Corpus(options)
    module = example.build(corpus, options).to(dtype)
    masters = copy.deepcopy(module).float()
    optimizer = example.optimizer_of(masters)
    curve: list[float] = []
    window: list[list[dict[str, torch.Tensor | None]]] = [[] for _ in range(ranks)]

    def body(part: torch.Tensor) -> torch.Tensor:
        loss = example.loss_of(lambda lines: module(lines).float(), part)
        (loss * scale).backward()
        return loss.detach()

    for step, lines in enumerate(corpus.batches(), 1):
        losses = []
        for steps, share in zip(window, lines.chunk(ranks), strict=True):
            parts = [(part,) for part in share.chunk(options.microbatches)]
            found = replay.gradients(module, body, parts, wide=dtype is not torch.float32)
            steps.append(found.gradients)
            losses.append(torch.stack(found.results).mean().item())
        curve.append(example.mean(losses))
        if step % options.accumulate:
            continue
        gradients = replay.reduce_sharded(window, degree, ranks * options.microbatches)
        window = [[] for _ in range(ranks)]
        norm = replay.norm(gradients, degree) / scale
        coefficient = min(1.0, options.clip / (norm + 1e-6)) if degree > 1 else 1.0
        assert coefficient < 1 or degree == 1 or options.clip == 1e30
        for name, master in masters.named_parameters():
            master.grad = gradients[name] * (coefficient / scale)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(module.parameters(), masters.parameters(), strict=True):
                parameter.copy_(master)
    return curve


ORDERED = {
    "accumulation": {"steps": 10, "accumulate": 2},
    "clipping": {"steps": 5, "clip": 0.5},
    "both": {"steps": 8, "accumulate": 2, "clip": 0.5},
    "bfloat16": {"steps": 4, "accumulate": 2, "clip": 0.5, "dtype": "bfloat16"},
    "float16": {"steps": 4, "accumulate": 2, "clip": 0.5, "dtype": "float16"},
}


@pytest.mark.parametrize("more", ORDERED.values(), ids=ORDERED)
def test_each_degree_has_the_curve_of_its_own_published_order(smp_world, characters, more):
    small = options_of(characters, microbatches=1, whole=64)
    small = dataclasses.replace(small, batch=RANKS, blocks=2, **more)
    curves = []
    for degree in (1, 2, 4, 8):
        if degree == 1 and small.dtype == "bfloat16":
            continue  # needs sharding (API 3.3)
        options = dataclasses.replace(small, sharding=degree)
        curves.append(in_order(characters, options))
        ranks = smp_world.run(characters.train, options, ranks=RANKS)
        assert ranks == [curves[-1]] * RANKS
    # There is something to be told apart: 16-bit losses are too coarse for it.
    assert small.dtype != "float32" or any(curve != curves[0] for curve in curves)


def held(example: ModuleType, options) -> Sample:
    """The memory that a rank holds after the first update, which makes the optimizer's state."""
    smp.init(
        {
            "ddp": True,
            "sharded_data_parallel_degree": options.sharding,
            "sdp_param_persistence_threshold": options.whole,
            "fp16": options.dtype == "float16",
            "bf16": options.dtype == "bfloat16",
        }
    )
    corpus = example.Corpus(options)
    model = smp.DistributedModel(example.build(corpus, options))
    adam = torch.optim.Adam(model.parameters())
    optimizer = smp.DistributedOptimizer(adam, static_loss_scale=2.0**10)
    share = options.batch // smp.dp_size()
    lines = next(corpus.batches())
    with Recorder() as recorder:
        example.train_step(model, lines[smp.dp_rank() * share :][:share])
        optimizer.step()
    return next(sample for sample in recorder.samples if sample.event == "update")


#: By dtype the bytes of an element: the parameter, its master, Adam's two tensors, the gradient.
BYTES = {"float32": 4 + 0 + 8 + 4, "bfloat16": 2 + 4 + 8 + 4, "float16": 2 + 4 + 8 + 4}


@pytest.mark.parametrize("dtype", BYTES)
def test_a_rank_holds_its_part_of_the_state(smp_world, characters, dtype):
    """Parameters, gradients and optimizer state, counted in bytes, against what follows from sizes: a
    degree-th, with padding, of what is split, and all of what is not.
    """
    options = characters.Options(batch=RANKS, microbatches=1, dtype=dtype, whole=100)
    module = characters.build(characters.Corpus(options), options)
    sizes = [parameter.numel() for parameter in module.parameters()]
    for degree in (1, 2, 4, 8):
        if degree == 1 and dtype == "bfloat16":
            continue  # needs sharding (API 3.3)
        kept = sum(size if size < 100 else -(-size // degree) for size in sizes)
        chosen = dataclasses.replace(options, sharding=degree)
        for sample in smp_world.run(held, characters, chosen, ranks=RANKS):
            assert sample.state == pytest.approx(BYTES[dtype] * kept, rel=0.02)


def alone() -> list[str]:
    return [sys.executable]


def torchrun(ranks: int = 2) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, f"--nproc-per-node={ranks}"]


def mpiexec() -> list[str]:
    pytest.importorskip("mpi4py", reason="the mpi backend needs mpi4py")
    try:
        return [*find_mpiexec("")[0], "-n", "2", sys.executable]
    except BackendError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("digits", alone),
        ("digits", torchrun),
        ("characters", mpiexec),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_script_has_the_same_curve_whoever_starts_it(name, launcher, monkeypatch, tmp_path):
    example = module_of(name, monkeypatch)
    options = options_of(example, curve=str(tmp_path / "curve.json"))
    if launcher is not alone:
        options = dataclasses.replace(options, pipeline=2)
    curve = run_script(example, launcher(), options, tmp_path)
    assert curve == expected(example, options_of(example))


def test_a_sharded_script_has_the_same_curve_on_real_ranks(characters, tmp_path):
    """Degree 2 of 4 ranks has every exchange: within the shard group, and between the replicas."""
    options = options_of(characters, sharding=2, whole=64, microbatches=2)
    wanted = expected(characters, options_of(characters, microbatches=2, replicas=4))
    chosen = dataclasses.replace(options, curve=str(tmp_path / "curve.json"))
    # Its ranks are forked from one process; torchrun's, which another test has, import torch one by one.
    smp_run = [sys.executable, "-m", "smp_core.launch", "-n4", "--backend=gloo", "--output=plain"]
    assert run_script(characters, smp_run, chosen, tmp_path) == wanted


def run_script(example: ModuleType, launcher: list[str], options, tmp_path: Path) -> list[float]:
    """The curve that a script has written, whose ranks a launcher starts."""
    defaults = dataclasses.asdict(example.Options())
    words = [
        f"--{name}={value}"
        for name, value in dataclasses.asdict(options).items()
        if value != defaults[name]
    ]
    done = subprocess.run(
        [*launcher, example.__file__, *words],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    curve: list[float] = json.loads((tmp_path / "curve.json").read_text())
    assert f"loss {curve[0]:.6f}" in done.stdout
    return curve
