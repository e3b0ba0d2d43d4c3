"""A case that is certified for several optimizer steps is exact: in float64, and in any order of sums."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from conformance.cases.training import HEAD, ONE_LAYER, STEPS, TWO_LAYERS, several_steps
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import Training, models
from pytest_smp.strategies.training_lattice import _degree, certified
from pytest_smp.strategies.training_models import Block, Model


def run(case: Training, dtype: torch.dtype, *, backwards: bool = False) -> list[dict]:
    """The weights after each window, in plain torch; sums in this order or the other one."""
    module = oracle.make(case).to(dtype)
    held = oracle.parameters(module)
    optimizer = oracle.optimizer_of(case, held.values())
    after = []
    for window in range(case.windows):
        parts = []
        for replica in range(case.dp):
            for step in range(window * case.passes, (window + 1) * case.passes):
                for x, y in oracle.microbatches(case, replica, step):
                    module.zero_grad()
                    given = x.to(dtype) if x.is_floating_point() else x
                    oracle.loss_of(case, module(given), y.to(dtype)).backward()
                    parts.append({name: each.grad for name, each in held.items()})
        for name, each in held.items():
            given = [part[name] for part in parts if part[name] is not None]
            each.grad = None
            for grad in reversed(given) if backwards else given:
                divided = grad / case.divisor if backwards else grad
                each.grad = divided.clone() if each.grad is None else each.grad + divided
            if each.grad is not None and not backwards:
                each.grad /= case.divisor
        optimizer.step()
        after.append({name: each.detach().clone() for name, each in held.items()})
    return after


def equal(one: list[dict], other: list[dict]) -> bool:
    return all(
        torch.equal(a[name].double(), b[name].double())
        for a, b in zip(one, other, strict=True)
        for name in a
    )


CASES = st.builds(
    lambda steps, dp, microbatches, passes, seed: dataclasses.replace(
        Training(**several_steps(*steps)),
        dp=dp,
        microbatches=microbatches,
        passes=passes,
        seed=seed,
    ),
    st.sampled_from(STEPS),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(1, 2),
    st.integers(0, 999),
)


@given(case=CASES)
@settings(max_examples=60, deadline=None)
def test_the_cases_of_the_suite_are_exact_where_they_are_certified(case):
    assume(certified(case))
    assert equal(run(case, torch.float32), run(case, torch.float32, backwards=True))
    if "adam" not in case.optimizer:  # a quotient of roots is no dyadic number
        assert equal(run(case, torch.float32), run(case, torch.float64))


@given(
    model=models(),
    optimizer=st.sampled_from(["sgd", "momentum", "decayed"]),
    loss=st.sampled_from(["product", "square"]),
    windows=st.integers(1, 3),
    dp=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 999),
)
@settings(max_examples=100, deadline=None)
def test_any_model_is_exact_where_it_is_certified(model, optimizer, loss, windows, dp, seed):
    fixed = {"optimizer": optimizer, "loss": loss, "windows": windows, "dp": dp, "seed": seed}
    case = Training(model, every=True, span=1, **fixed)
    assume(certified(case))
    assert equal(run(case, torch.float32), run(case, torch.float64))
    assert equal(run(case, torch.float32), run(case, torch.float32, backwards=True))


@pytest.mark.parametrize("steps", STEPS)
def test_the_cases_of_the_suite_are_certified_on_few_replicas(steps):
    assert certified(Training(**several_steps(*steps), dp=2, seed=1))


@pytest.mark.parametrize(
    ("model", "degree"),
    [
        (HEAD, 1),
        (ONE_LAYER, 2),
        (TWO_LAYERS, 4),
        (Model(Block("repeat", (Block("linear"),), 3)), 5),
        (Model(Block("chain", (Block("linear", frozen=True),))), 2),
    ],
)
def test_degrees(model, degree):
    """A stem, so many layers one after the other, and a head; what is frozen counts for nothing."""
    assert _degree(Training(model)) == degree


def test_what_rounds_is_not_certified():
    case = Training(**several_steps(TWO_LAYERS, "momentum", 3), dp=4, seed=1)
    assert not certified(case)
    assert not certified(dataclasses.replace(case, optimizer="adam", windows=2))
    thirds = Training(**several_steps(HEAD, "adam", 2), dp=3)
    assert not certified(thirds)
