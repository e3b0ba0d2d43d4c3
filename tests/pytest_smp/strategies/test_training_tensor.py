"""Cases of tensor parallelism: drawn cases are valid and certain, and both references are what they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.errors import InvalidArgument

from pytest_smp.strategies import Block, Model, TensorTraining, tensor_trainings
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training_lattice import certified
from pytest_smp.strategies.training_replay import replayed
from pytest_smp.strategies.training_script import Seen, compare
from pytest_smp.strategies.training_sharding import DTYPES
from pytest_smp.strategies.training_tensor import (
    TensorWorld,
    candidates,
    splits,
    tensor_features,
    worlds,
)
from smp_core.config import Config
from tools.profiles.tensor import WANTED, mixed

Drawn = Callable[..., list[Any]]

quick = settings(deadline=None, database=None, max_examples=15)


def seen(case: TensorTraining, results: oracle.Results) -> list[Seen]:
    """Ranks that saw just this."""
    return [
        Seen(at, results.losses[at], results.outputs[at], results.gradients, results.parameters)
        for at in range(case.dp)
    ]


@given(case=tensor_trainings(8, pipeline=(1, 2), sharding=(1, 2), dtypes=DTYPES))
@quick
def test_exact_cases_are_valid_and_certified(case: TensorTraining) -> None:
    assert case.ranks == case.pp * case.tensor * case.rdp <= 8
    assert certified(case)
    Config(**case.config).check_world(case.ranks)
    # The published order gives the same bits where nothing rounds.
    compare(oracle.plain(case), seen(case, replayed(case)), none=True)


@pytest.mark.parametrize("oracle_of_bits", [oracle.plain, replayed], ids=["plain", "replayed"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_an_oracle_of_bits_computes_on_one_thread(
    oracle_of_bits: Callable[[TensorTraining], Any], tensor: int
) -> None:
    """The process has two, as one on two cores has."""
    before, threads = torch.get_num_threads(), set()
    register = torch.nn.modules.module.register_module_forward_hook
    hook = register(lambda *_: threads.add(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        oracle_of_bits(TensorTraining(Model(inputs=2), dp=2, tensor=tensor, distributed=("stem",)))
        assert (threads, torch.get_num_threads()) == ({1}, 2)
    finally:
        hook.remove()
        torch.set_num_threads(before)


def test_every_feature_is_drawn(drawn: Drawn) -> None:
    rows: set[str] = set()
    for case in drawn(mixed(8), 250):
        rows |= tensor_features(case)
    assert set(WANTED) | {"clipping", "tensor degree 3", "tensor degree 1"} <= rows


def test_what_is_asked_for_is_drawn(drawn: Drawn) -> None:
    strategy = tensor_trainings(8, tensor=(2,), pipeline=(2,), prescaled=(True,), size=8, passes=2)
    for case in drawn(strategy, 20):
        assert (case.tensor, case.pp, case.dp, case.prescaled) == (2, 2, 2, True)
        assert (case.ranks, case.passes) == (8, 2)


def test_a_case_prints_as_code() -> None:
    case = TensorTraining(Model(inputs=2), dp=2, tensor=2, distributed=("stem",))
    assert repr(case) == "TensorTraining(Model(inputs=2), dp=2, tensor=2, distributed=('stem',))"
    assert eval(repr(case)) == case


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (lambda: tensor_trainings(0), "ranks=0"),
        (lambda: tensor_trainings(4, real=1), "real=1"),  # type: ignore[arg-type]
        (lambda: tensor_trainings(4, tensor=(8,)), r"tensor=\(8,\).*: no world of at most 4 ranks"),
        (lambda: tensor_trainings(4, pipeline=(2,), sharding=(2,)), r"sharding=\(2,\).*: no world"),
        (lambda: tensor_trainings(4, without=("gains",)), "gains: there is no such kind"),
        (lambda: tensor_trainings(4, dtypes=("int8",)), "int8: there is no such dtype"),
        (lambda: tensor_trainings(4, sharded=2), "sharded: TensorTraining has no such field"),
    ],
)
def test_bad_arguments_are_refused_at_once(strategy: Callable[[], Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        strategy()


def test_worlds_are_those_that_the_configuration_takes() -> None:
    found = set(worlds(4, real=False))
    assert TensorWorld(2, 2, 1, 1, False) in found
    assert TensorWorld(1, 2, 2, 2, True) in found
    assert TensorWorld(1, 2, 2, 2, False) not in found  # sharding needs prescaled batches
    assert TensorWorld(1, 3, 1, 1, False) not in found  # three replicas: quotients would be rounded
    assert TensorWorld(1, 3, 1, 1, True) in found
    assert TensorWorld(1, 3, 1, 1, False) in set(worlds(4, real=True))


def test_ranks_with_the_same_data_are_no_replicas() -> None:
    own = TensorTraining(dp=4, tensor=2)
    assert (own.ranks, own.rdp, own.copies, own.divisor) == (4, 2, 1, 4)
    shared = dataclasses.replace(own, prescaled=True)
    assert (shared.ranks, shared.rdp, shared.copies, shared.divisor) == (8, 4, 2, 4)


def test_layers_that_are_split() -> None:
    parts = (
        Block("linear"),
        Block("mlp", size=3),
        Block("tied", size=1),
        Block("tied", size=1),
        Block("shared", size=1),
        Block("shared", size=1),
        Block("borrow"),
        Block("route", (Block("linear"), Block("linear"))),
    )
    model = Model(Block("chain", parts), inputs=0, width=2, outputs=3)
    every = candidates(model, prescaled=True)
    assert "body.6.lender" not in every  # its weight is read elsewhere
    assert set(every) - set(candidates(model, prescaled=False)) == {
        "body.7.parts.0",
        "body.7.parts.1",
    }
    case = TensorTraining(model, tensor=2, prescaled=True, distributed=every)
    # The second layer of the mlp has three inputs; tied and shared ones stay.
    expected = ["stem", "body.0", "body.1.0", "body.7.parts.0", "body.7.parts.1", "head"]
    assert splits(case) == {f"{path}.weight": 1 for path in expected}
    assert splits(dataclasses.replace(case, tensor=1)) == {}
    tied = dataclasses.replace(model, tied=True)
    assert "head.weight" not in splits(dataclasses.replace(case, model=tied))


def test_the_replay_sums_partial_products_in_the_order_of_tp_ranks() -> None:
    model = Model(inputs=3, width=1, outputs=1)
    case = TensorTraining(
        model, dp=1, tensor=3, prescaled=True, distributed=("stem",), real=True, seed=78
    )
    state, (x, _) = oracle.state(case), oracle.batch(case, 0, 0)
    w, x = state["stem.weight"][0], x[0, 0]
    products = w * x
    hidden = (products[0] + products[1]) + products[2]
    assert hidden != products[0] + (products[1] + products[2])
    hidden = hidden + state["stem.bias"][0]
    # The head's map is torch's own, which may multiply and add with one rounding.
    head = state["head.weight"], state["head.bias"]
    expected = torch.nn.functional.linear(hidden.view(1, 1), *head)
    assert torch.equal(replayed(case).outputs[0][0][0].view(1, 1), expected)


@pytest.mark.parametrize("prescaled", [True, False])
def test_the_replay_rounds_as_nothing_does_on_whole_numbers(prescaled: bool) -> None:
    model = Model(Block("linear"), inputs=4, width=4, outputs=2)
    case = TensorTraining(
        model, dp=4, tensor=4, prescaled=prescaled, distributed=("stem", "body"), windows=2
    )
    compare(oracle.plain(case), seen(case, replayed(case)))
