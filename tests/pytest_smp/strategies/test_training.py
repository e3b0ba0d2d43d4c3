"""Training cases: what is drawn is valid and certain, and the plain loop gives numbers of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.errors import InvalidArgument

from pytest_smp.strategies import Block, Model, Training, blocks, models, trainings
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training import features, owners
from pytest_smp.strategies.training_lattice import certified
from pytest_smp.strategies.training_models import KINDS, build
from pytest_smp.strategies.training_replay import replayed
from pytest_smp.strategies.training_script import Seen, compare, merged
from pytest_smp.strategies.training_sharding import ONLY_HERE
from smp_core.config import Config
from tools.profiles.training import WANTED

Drawn = Callable[..., list[Any]]
Minimal = Callable[..., Any]
Printed = Callable[..., tuple[Any, str]]
Paste = Callable[[str], Any]

quick = settings(deadline=None, database=None, max_examples=20)


# ---- What is drawn


@given(case=trainings(4))
@quick
def test_exact_cases_are_valid_and_certified(case: Training) -> None:
    assert case.ranks <= 4
    assert certified(case)
    assert case.tier == "exact"
    assert not case.model.kinds() & {"dropout", "norm"}
    Config(**case.config)
    assert set(dict(owners(case)).values()) <= set(range(case.pp))
    x, y = oracle.batch(case, 0, 0)
    rows = case.rows * case.microbatches
    assert [x.shape[case.axes[0]], y.shape[case.axes[1]]] == [rows, rows]


@given(case=trainings(4, real=True, windows=1, passes=1))
@quick
def test_real_cases_train(case: Training) -> None:
    assert case.tier == "replayed"
    gradients = oracle.plain(case).gradients[0]
    assert gradients["head.bias"] is not None


def test_fixed_fields_and_degrees_are_kept(drawn: Drawn) -> None:
    cases = drawn(trainings(8, pipeline=(2,), dp=2, passes=3, automatic=False), 20)
    assert {(each.pp, each.dp, each.passes) for each in cases} == {(2, 2, 3)}
    assert all(each.partition is not None for each in cases)


def test_every_kind_is_drawn_and_built(drawn: Drawn) -> None:
    kinds = set()
    for found in drawn(models(real=True), 150):
        kinds |= found.kinds()
        x = torch.ones(2, 1, found.inputs) if found.inputs else torch.zeros(2, 1, dtype=torch.int64)
        assert build(found)(x).shape == (2, 1, found.outputs)
    assert kinds == set(KINDS) - set(ONLY_HERE)


def test_every_feature_is_drawn(drawn: Drawn) -> None:
    cases = [*drawn(trainings(4), 60), *drawn(trainings(4, real=True), 40)]
    names = set().union(*map(features, cases))
    assert names >= {*WANTED, "replicas", "automatic partition", "norms", "dropout"}


def test_they_shrink_to_small_runs(minimal: Minimal) -> None:
    assert minimal(blocks()) == Block("linear", bias=False)
    least = minimal(trainings(4))
    assert (least.dp, least.microbatches, least.rows, least.passes, least.windows) == (1,) * 5
    assert list(least.model.body.walk()) == [least.model.body]


def test_they_can_be_pasted(printed: Printed, paste: Paste) -> None:
    for after in (0, 7, 15):
        value, code = printed(trainings(4), after)
        assert paste(code) == value, code
        assert paste(repr(value)) == value
    assert paste(repr(Training())) == Training()


def test_what_was_pasted_trains_as_before(printed: Printed, paste: Paste) -> None:
    value, code = printed(trainings(4, real=True), 3)
    first, again = oracle.plain(value), oracle.plain(paste(code))
    compare(again, [seen_of(first, replica) for replica in range(value.dp)])


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (lambda: trainings(0), "ranks=0"),
        (lambda: trainings(True), "ranks=True"),
        (lambda: trainings(4, real=1), "real=1"),  # type: ignore[arg-type]
        (lambda: trainings(4, automatic=None), "automatic=None"),  # type: ignore[arg-type]
        (lambda: trainings(2, pipeline=(3, 4)), "no degree is at most 2"),
        (lambda: trainings(4, pipeline=(2,), dp=4), "no degree is at most 1"),
        (lambda: trainings(4, pipeline=()), "no degree"),
        (lambda: trainings(4, pipeline=(0,)), "pipeline=0"),
        (lambda: trainings(4, dp=5), "dp=5"),
        (lambda: trainings(4, microbatch=2), "microbatch: Training has no such field"),
        (lambda: models(real=None), "real=None"),  # type: ignore[arg-type]
        (lambda: blocks(-1), "depth=-1"),
    ],
)
def test_bad_arguments_are_refused_at_once(strategy: Callable[[], Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        strategy()


def test_owners_go_down_the_tree_and_keep_shared_parameters_together() -> None:
    body = Block("chain", (Block("nested", (Block("linear"),)), Block("relu")))
    case = Training(Model(body), pp=3, partition=(("body", 1), ("body.0.parts.0", 2)), default=0)
    assert owners(case) == {
        "": 0,
        "stem": 0,
        "head": 0,
        "body": 1,
        "body.0": 1,
        "body.0.parts.0": 2,
        "body.1": 1,
    }
    assert "nested cross-partition calls" in features(case)
    tied = Model(Block("relu"), inputs=0, outputs=2, tied=True)
    assert owners(Training(tied, pp=2, partition=(("head", 1),)))["head"] == 0


# ---- The certificate


#: Twelve linear maps of ones and twos in a row: the sums grow by a factor at each of them.
DEEP = Model(Block("chain", (Block("linear"),) * 12), inputs=3, width=4, outputs=3)


def test_what_leaves_the_lattice_has_no_certificate() -> None:
    flat = Training(dataclasses.replace(DEEP, body=Block("chain")), rows=3, microbatches=4)
    assert certified(flat)
    assert not certified(dataclasses.replace(flat, model=DEEP))
    # A third has no end in binary.
    assert not certified(dataclasses.replace(flat, microbatches=3))
    assert certified(dataclasses.replace(flat, microbatches=3, average=False))
    assert not certified(dataclasses.replace(flat, dp=3))
    # Each sum fits, and all of them together do not.
    assert not certified(dataclasses.replace(flat, microbatches=2**20))


def test_certified_sums_do_not_depend_on_their_order() -> None:
    body = Block(
        "branches", (Block("mlp", size=3), Block("linear"), Block("residual", (Block("relu"),)))
    )
    case = Training(
        Model(body, inputs=2, width=3, outputs=2), microbatches=4, loss="product", seed=5
    )
    assert certified(case)
    parts = oracle.parts(case)
    for name, whole in oracle.plain(case).gradients[0].items():
        assert whole is not None
        given_ = [part[name] for part in parts]
        backwards = sum(each for each in reversed(given_) if each is not None)
        assert isinstance(backwards, torch.Tensor)
        assert torch.equal(whole, backwards / case.divisor), name


# ---- The plain loop


def numbers(case: Training) -> dict[str, Any]:
    """A linear model's gradients by hand: of ``sum((a (b x + c) + d - y) ** 2)``."""
    state = {name: float(value) for name, value in oracle.state(case).items()}
    b, c = state["stem.weight"], state["stem.bias"]
    a, d = state["head.weight"], state["head.bias"]
    found = dict.fromkeys(state, 0.0)
    losses = []
    for replica in range(case.dp):
        for step in range(case.passes):
            for x, y in zip(
                *(each.flatten().tolist() for each in oracle.batch(case, replica, step)),
                strict=True,
            ):
                h = b * x + c
                error = a * h + d - y
                losses.append(error**2)
                found["head.weight"] += 2 * error * h
                found["head.bias"] += 2 * error
                found["stem.weight"] += 2 * error * a * x
                found["stem.bias"] += 2 * error * a
    divisor = case.dp * (case.microbatches if case.average else 1)
    return {"losses": losses} | {name: value / divisor for name, value in found.items()}


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("dp", [1, 2])
def test_the_plain_loop_gives_numbers_computed_by_hand(dp: int, passes: int, average: bool) -> None:
    case = Training(Model(), dp=dp, microbatches=4, passes=passes, average=average, seed=3)
    expected, found = numbers(case), oracle.plain(case)
    gradients = {name: float(each) for name, each in found.gradients[0].items() if each is not None}
    assert gradients == {name: expected[name] for name in gradients}
    assert len(gradients) == 4
    assert any(gradients.values())
    losses = [float(loss) for replica in found.losses for step in replica for loss in step]
    assert losses == expected["losses"]
    for name, value in oracle.state(case).items():
        assert float(found.parameters[name]) == float(value) - 0.125 * gradients[name]


def test_the_published_order_gives_the_same_where_nothing_rounds() -> None:
    body = Block("repeat", (Block("nested", (Block("linear"),)),), 2)
    case = Training(Model(body, inputs=2, width=2), dp=2, passes=2, loss="product", span=1, seed=1)
    assert certified(case)
    plain = oracle.plain(case)
    compare(replayed(case), [seen_of(plain, replica) for replica in range(2)])


# ---- Comparing


def seen_of(found: oracle.Results, replica: int) -> Seen:
    """The results that a rank which holds everything would have seen."""
    return Seen(
        replica,
        found.losses[replica],
        found.outputs[replica],
        found.gradients,
        found.parameters,
    )


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: s.losses[0].reverse(), "losses of step 0, microbatch 0"),
        (lambda s: s.losses[0].pop(), "1 microbatches, not 2"),
        (lambda s: s.losses.pop(), "0 steps, not 1"),
        (lambda s: s.outputs[0][1].add_(1), "outputs of step 0, microbatch 1"),
        (lambda s: s.gradients[0]["stem.bias"].add_(1), "gradient of stem.bias after window 0"),
        (lambda s: s.gradients[0].update({"head.bias": None}), "gradient of head.bias"),
        (lambda s: s.gradients[0].update({"no.bias": None}), "there is no such parameter"),
        (lambda s: s.parameters["head.weight"].add_(1), "parameter head.weight at the end"),
        (lambda s: s.parameters.pop("stem.bias"), "no rank holds stem.bias"),
        (
            lambda s: s.parameters.update({"stem.bias": s.parameters["stem.bias"].double()}),
            "parameter stem.bias",
        ),
    ],
    ids=range(10),
)
def test_what_differs_is_found(spoil: Callable[[Seen], Any], said: str) -> None:
    case = Training(Model(), microbatches=2, seed=3)
    seen = seen_of(oracle.plain(case), 0)
    compare(oracle.plain(case), [seen])
    spoil(seen)
    with pytest.raises(AssertionError, match=said):
        compare(oracle.plain(case), [seen])


def test_zeros_count_as_no_gradient_unless_asked() -> None:
    case = Training(Model(Block("unused", (Block("relu"), Block("linear")))), seed=3)
    seen = seen_of(oracle.plain(case), 0)
    assert seen.gradients[0]["body.parts.1.weight"] is None
    seen.gradients[0]["body.parts.1.weight"] = torch.zeros(1, 1)
    compare(oracle.plain(case), [seen])
    with pytest.raises(AssertionError, match=r"gradient of body\.parts\.1\.weight"):
        compare(oracle.plain(case), [seen], none=True)


def test_what_ranks_hold_is_put_together() -> None:
    case = Training(Model(), seed=3)
    whole = seen_of(oracle.plain(case), 0)
    halves = [
        dataclasses.replace(
            whole,
            gradients=[{n: g for n, g in whole.gradients[0].items() if n.startswith(part)}],
            parameters={n: p for n, p in whole.parameters.items() if n.startswith(part)},
        )
        for part in ("stem", "head")
    ]
    compare(merged(halves, 1), [whole])
    compare(oracle.plain(case), halves)
    with pytest.raises(AssertionError, match=r"no rank holds head\.bias, head\.weight"):
        compare(oracle.plain(case), halves[:1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_difference_in_the_last_bit_is_told_in_units(dtype: torch.dtype, sign: int) -> None:
    """Three thirds of three values, added before and after the division: two tensors that print alike."""
    case = Training(Model(), seed=3)
    expected, seen = oracle.plain(case), seen_of(oracle.plain(case), 0)
    value = torch.tensor([sign * 0.1, 0.0], dtype=dtype)
    toward = torch.tensor([sign * 1.0, 0.0], dtype=dtype)
    expected.parameters["stem.bias"], seen.parameters["stem.bias"] = value, value.nextafter(toward)
    with pytest.raises(AssertionError) as raised:
        compare(expected, [seen])
    text = str(raised.value)
    assert "\n1 of 2 elements differ, by at most 1 unit in the last place at [0]: " in text
    assert f", not {value[0].item()!r}\ndoes the engine divide before it adds?" in text
    seen.parameters["stem.bias"] = 2 * value
    with pytest.raises(AssertionError) as raised:
        compare(expected, [seen])
    assert "divide before" not in str(raised.value)
