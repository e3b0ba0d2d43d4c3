"""The examples train as plain PyTorch does, whatever their ranks are and whoever starts them."""

from __future__ import annotations

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

from smp_core.backends.hosts.mpiexec import find_mpiexec
from smp_core.errors import BackendError

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
    """The certificate (ENGINES.md 2.2, tier E): the same computation on magnitudes, each at its bound."""
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


def test_dropout_is_the_same_in_every_layout(smp_world, monkeypatch):
    """Random numbers belong to microbatch and module (docs/pipelines.md); plain PyTorch draws others."""
    example = module_of("characters", monkeypatch)
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
    assert (tmp_path / "saved" / "newest").read_text().strip() == "step10"
    assert smp_world.run(example.train, whole, ranks=2) == [wanted] * 2


def alone() -> list[str]:
    return [sys.executable]


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


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
        ("digits", mpiexec),
        ("characters", torchrun),
        ("characters", mpiexec),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_script_has_the_same_curve_whoever_starts_it(name, launcher, monkeypatch, tmp_path):
    example = module_of(name, monkeypatch)
    options = options_of(example, curve=str(tmp_path / "curve.json"))
    if launcher is not alone:
        options = dataclasses.replace(options, pipeline=2)
    defaults = dataclasses.asdict(example.Options())
    words = [
        f"--{name}={value}"
        for name, value in dataclasses.asdict(options).items()
        if value != defaults[name]
    ]
    done = subprocess.run(
        [*launcher(), example.__file__, *words],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert curve == expected(example, options_of(example))
    assert f"loss {curve[0]:.6f}" in done.stdout
