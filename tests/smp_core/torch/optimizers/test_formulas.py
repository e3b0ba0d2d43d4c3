"""LAMB and NovoGrad against the algorithms of their papers, computed with 50 decimal digits, and in pipelines.

The optimizer's result in float64 must be closer to the paper's than the one in float32 is: whatever is computed in
another way differs by more.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from decimal import Decimal, localcontext

import pytest
import torch
from torch import nn

import smp_core.torch as api
from smp_core.errors import ArgumentError
from smp_core.torch import fused
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.fused import PlainEquivalentWarning
from smp_core.torch.optimizers import FusedLAMB, FusedLamb, FusedNovoGrad

pytestmark = pytest.mark.filterwarnings("ignore::smp_core.torch.fused.PlainEquivalentWarning")

STEPS = 4
#: Two parameters: values, and a gradient for each step.
VALUES = ([0.5, -1.25, 2.0], [[0.75, -0.5], [1.5, 3.0]])
GENERATOR = torch.Generator().manual_seed(4)
GRADIENTS = [
    [torch.randn(torch.tensor(value).shape, generator=GENERATOR) for value in VALUES]
    for _ in range(STEPS)
]


def norm(values):
    return sum(each * each for each in values).sqrt()


def lamb(w, grads, *, lr, b1, b2, eps, decay, correct=True, average=True, adapt=True, inside=False):
    """Algorithm 2 of the paper, for one parameter, with phi(x) = x; ``inside``: decay as a part of the gradient."""
    m = v = [Decimal(0)] * len(w)
    for t, g in enumerate(grads, 1):
        if inside:
            g = [gi + decay * wi for gi, wi in zip(g, w, strict=True)]
        m = [b1 * mi + ((1 - b1) if average else 1) * gi for mi, gi in zip(m, g, strict=True)]
        v = [b2 * vi + (1 - b2) * gi * gi for vi, gi in zip(v, g, strict=True)]
        c1, c2 = (1 - b1**t, 1 - b2**t) if correct else (Decimal(1), Decimal(1))
        r = [(mi / c1) / ((vi / c2).sqrt() + eps) for mi, vi in zip(m, v, strict=True)]
        if not inside:
            r = [ri + decay * wi for ri, wi in zip(r, w, strict=True)]
        ratio = norm(w) / norm(r) if adapt and norm(w) and norm(r) else 1
        w = [wi - lr * ratio * ri for wi, ri in zip(w, r, strict=True)]
    return w


def novograd(w, grads, *, lr, b1, b2, eps, decay, zero=False):
    """Algorithm 1 of the paper, for one parameter; v of the first step is the norm's square, or begins with 0."""
    m = [Decimal(0)] * len(w)
    v = Decimal(0) if zero else norm(grads[0]) ** 2
    for g in grads:
        v = b2 * v + (1 - b2) * norm(g) ** 2
        m = [
            b1 * mi + (gi / (v.sqrt() + eps) + decay * wi)
            for mi, gi, wi in zip(m, g, w, strict=True)
        ]
        w = [wi - lr * mi for wi, mi in zip(w, m, strict=True)]
    return w


def adam_like(w, grads, *, lr, b1, b2, eps, decay, largest=False):
    """NovoGrad with the corrections of Adam and decay outside of the moment, as apex describes its default."""
    size = (lambda g: max(map(abs, g))) if largest else (lambda g: norm(g) ** 2)
    m, v = [Decimal(0)] * len(w), size(grads[0])
    for t, g in enumerate(grads, 1):
        v = b2 * v + (1 - b2) * size(g)
        m = [b1 * mi + (1 - b1) * gi for mi, gi in zip(m, g, strict=True)]
        mean = v / (1 - b2**t) if largest else (v / (1 - b2**t)).sqrt()
        w = [
            wi - lr * (mi / (1 - b1**t) / (mean + eps) + decay * wi)
            for mi, wi in zip(m, w, strict=True)
        ]
    return w


def clipped(grads, most):
    """The gradients of each step, scaled so that all of them together have at most this norm."""
    found = []
    for step in grads:
        total = norm([each for g in step for each in g])
        factor = most / total if total > most else 1
        assert factor != 1
        found.append([[factor * each for each in g] for g in step])
    return found


def decimals(tensor):
    return [Decimal(each) for each in tensor.double().reshape(-1).tolist()]


def trained(make, dtype):
    parameters = [nn.Parameter(torch.tensor(value, dtype=dtype)) for value in VALUES]
    optimizer = make(parameters)
    for gradients in GRADIENTS:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(dtype)
        optimizer.step()
    return parameters


def error(found, expected):
    return max(
        abs(one - other)
        for tensor, values in zip(found, expected, strict=True)
        for one, other in zip(decimals(tensor.detach()), values, strict=True)
    )


NUMBERS = {"lr": 2.0**-4, "betas": (0.75, 0.875), "eps": 2.0**-10}
DECAY = 2.0**-3
CASES = {
    "lamb: the paper": (
        FusedLAMB,
        {"use_nvlamb": True, "max_grad_norm": None, "weight_decay": DECAY},
        lamb,
        {},
    ),
    "lamb: the paper without decay": (
        FusedLAMB,
        {"use_nvlamb": True, "max_grad_norm": 0, "weight_decay": 0.0},
        lamb,
        {},
    ),
    "lamb: no ratio without decay": (
        FusedLAMB,
        {"max_grad_norm": 0, "weight_decay": 0.0},
        lamb,
        {"adapt": False},
    ),
    "lamb: no corrections, sums": (
        FusedLAMB,
        {
            "bias_correction": False,
            "grad_averaging": False,
            "max_grad_norm": 0,
            "weight_decay": DECAY,
        },
        lamb,
        {"correct": False, "average": False},
    ),
    "lamb: decay in the gradient": (
        FusedLAMB,
        {"adam_w_mode": False, "max_grad_norm": 0, "weight_decay": DECAY},
        lamb,
        {"inside": True},
    ),
    "lamb: clipped": (
        FusedLAMB,
        {"max_grad_norm": 0.5, "weight_decay": DECAY},
        lamb,
        {"clip": 0.5},
    ),
    "novograd: the paper": (
        FusedNovoGrad,
        {
            "bias_correction": False,
            "grad_averaging": False,
            "reg_inside_moment": True,
            "weight_decay": DECAY,
        },
        novograd,
        {},
    ),
    "novograd: from zero": (
        FusedNovoGrad,
        {
            "bias_correction": False,
            "grad_averaging": False,
            "reg_inside_moment": True,
            "weight_decay": DECAY,
            "init_zero": True,
        },
        novograd,
        {"zero": True},
    ),
    "novograd: the defaults": (FusedNovoGrad, {"weight_decay": DECAY}, adam_like, {}),
    "novograd: largest value": (
        FusedNovoGrad,
        {"weight_decay": DECAY, "norm_type": 0},
        adam_like,
        {"largest": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_the_paper(name):
    cls, options, oracle, more = CASES[name]
    clip = more.get("clip")
    with localcontext() as context:
        context.prec = 50
        grads = [[decimals(g) for g in step] for step in GRADIENTS]
        if clip is not None:
            grads = clipped(grads, Decimal(clip))
        numbers = {
            "lr": Decimal(NUMBERS["lr"]),
            "b1": Decimal(NUMBERS["betas"][0]),
            "b2": Decimal(NUMBERS["betas"][1]),
            "eps": Decimal(NUMBERS["eps"]),
            "decay": Decimal(options["weight_decay"]),
            **{key: value for key, value in more.items() if key != "clip"},
        }
        expected = [
            oracle(decimals(torch.tensor(value)), [step[number] for step in grads], **numbers)
            for number, value in enumerate(VALUES)
        ]

        def make(parameters):
            return cls(parameters, **NUMBERS, **options)

        rough = error(trained(make, torch.float32), expected)
        assert 0 < rough < Decimal(2) ** -20
        assert error(trained(make, torch.float64), expected) < rough * Decimal(2) ** -20


def test_lamb_without_ratio_is_adam():
    options = {"weight_decay": 0.0, "max_grad_norm": 0}
    found = trained(lambda each: FusedLAMB(each, **NUMBERS, **options), torch.float64)
    adam = trained(lambda each: torch.optim.Adam(each, **NUMBERS), torch.float64)
    rough = trained(lambda each: torch.optim.Adam(each, **NUMBERS), torch.float32)
    for one, other, third in zip(found, adam, rough, strict=True):
        assert (one - other).abs().max() < (third - other).abs().max()


@pytest.mark.parametrize("cls", [FusedLAMB, FusedNovoGrad])
def test_zeros_parameters_without_gradients_and_closures(cls):
    zero, lone = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    optimizer = cls([zero, lone], lr=0.5)

    def closure():
        zero.grad = torch.tensor([1.0, 0.0])
        assert torch.is_grad_enabled()
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert zero[0] < 0
    assert torch.isfinite(zero).all()
    assert torch.equal(lone.detach(), torch.ones(2))
    optimizer.zero_grad()
    assert zero.grad is None
    kept = cls([zero], lr=0.5, set_grad_none=False)
    zero.grad = torch.ones(2)
    kept.zero_grad()
    assert torch.equal(zero.grad, torch.zeros(2))


@pytest.mark.parametrize("cls", [FusedLAMB, FusedNovoGrad])
@pytest.mark.parametrize("way", ["state_dict", "pickle", "deepcopy"])
def test_an_optimizer_goes_on_from_its_state(cls, way):
    def steps(parameter, optimizer, numbers):
        for number in numbers:
            parameter.grad = GRADIENTS[number][0].clone()
            optimizer.step()

    one, two = (nn.Parameter(torch.tensor(VALUES[0])) for _ in range(2))
    whole, first = (cls([each], weight_decay=0.1) for each in (one, two))
    steps(one, whole, range(4))
    steps(two, first, range(2))
    if way == "state_dict":
        second, parameter = cls([two], lr=7.0), two
        second.load_state_dict(first.state_dict())
    else:
        second = pickle.loads(pickle.dumps(first)) if way == "pickle" else copy.deepcopy(first)
        (parameter,) = second.param_groups[0]["params"]
    steps(parameter, second, range(2, 4))
    assert torch.equal(parameter.detach(), one.detach())


HALVES = [torch.float16, torch.bfloat16]
LARGE = 300.0  # its square is beyond float16, and so is the norm of so many of them
MANY = 100_000


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (FusedLAMB, {}),
        (FusedLAMB, {"max_grad_norm": None, "adam_w_mode": False, "use_nvlamb": True}),
        (FusedNovoGrad, {}),
        (FusedNovoGrad, {"norm_type": 0, "init_zero": True}),
        (FusedNovoGrad, {"reg_inside_moment": True}),
    ],
)
@pytest.mark.parametrize("size", [LARGE, 2.0**-14])
@pytest.mark.parametrize("start", [0.0, LARGE])
def test_16_bits_are_updated_as_float32_is_up_to_the_last_rounding(
    cls, options, dtype, size, start
):
    """In the first step, from the same values; gradients whose squares over- and underflow in float16."""
    gradient = size * torch.tensor([1.0, -0.5]).repeat(MANY // 2)
    half = nn.Parameter(torch.full((MANY,), start, dtype=dtype))
    full = nn.Parameter(torch.full((MANY,), start))
    for parameter in (half, full):
        parameter.grad = gradient.to(parameter.dtype)
        cls([parameter], lr=0.25, weight_decay=0.125, **options).step()
    assert not torch.equal(full.detach(), torch.full((MANY,), start))
    assert torch.equal(half.detach(), full.detach().to(dtype))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("cls", [FusedLAMB, FusedNovoGrad])
def test_moments_have_at_least_float32_also_when_they_are_loaded(cls, dtype):
    parameter = nn.Parameter(torch.ones(MANY, dtype=dtype))
    first = cls([parameter], lr=0.25)
    parameter.grad = torch.full_like(parameter, LARGE)
    first.step()
    second = cls([parameter], lr=0.25)
    second.register_load_state_dict_pre_hook(lambda _, state: dict(state))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for name in ("exp_avg", "exp_avg_sq"):
        found = second.state[parameter][name]
        assert found.dtype == (torch.float32 if dtype in HALVES else dtype)
        assert torch.isfinite(found).all()
        assert torch.equal(found, first.state[parameter][name])
    assert second.state[parameter]["step"] == 1


@pytest.mark.parametrize(
    ("cls", "name"), [(FusedLAMB, "FusedLAMB.*LAMB"), (FusedNovoGrad, "FusedNovoGrad.*NovoGrad")]
)
def test_a_sparse_gradient_is_refused_with_the_shape(cls, name):
    embedding = nn.Embedding(5, 3, sparse=True)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedTrainingError, match=name) as error:
        cls(embedding.parameters()).step()
    assert "shape [5, 3] has a sparse gradient" in str(error.value)
    assert "sparse=False" in str(error.value)
    assert torch.equal(embedding.weight.detach(), before)


@pytest.mark.parametrize(
    ("cls", "options"), [(FusedLAMB, {}), (FusedNovoGrad, {}), (FusedNovoGrad, {"norm_type": 0})]
)
def test_an_empty_parameter_changes_nothing(cls, options):
    def updated(*more):
        parameter = nn.Parameter(torch.ones(3))
        for each in (parameter, *more):
            each.grad = torch.ones_like(each)
        cls([parameter, *more], lr=0.25, **options).step()
        return parameter.detach()

    assert torch.equal(updated(nn.Parameter(torch.empty(0, 2))), updated())


def test_what_is_not_supported_is_refused():
    assert FusedLamb is FusedLAMB
    parameters = [nn.Parameter(torch.ones(2))]
    for cls in (FusedLAMB, FusedNovoGrad):
        with pytest.raises(UnsupportedTrainingError, match=f"{cls.__name__}: .*amsgrad"):
            cls(parameters, amsgrad=True)
    with pytest.raises(ArgumentError, match=r"norm_type=1: 2, or 0 for the largest"):
        FusedNovoGrad(parameters, norm_type=1)


def test_each_class_warns_once_and_its_line_is_the_scripts(monkeypatch):
    monkeypatch.setattr(fused, "_told", set())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            FusedLAMB([nn.Parameter(torch.ones(2))])
            FusedNovoGrad([nn.Parameter(torch.ones(2))])
            api.nn.FusedLayerNorm(2)
    assert [each.category for each in found] == [PlainEquivalentWarning] * 3
    assert [str(each.message).partition(":")[0] for each in found] == [
        "smp.optimizers.FusedLAMB",
        "smp.optimizers.FusedNovoGrad",
        "smp.nn.FusedLayerNorm",
    ]
    assert {each.filename for each in found} == {__file__}


# In a distributed run.

SHAPES = ((3, 4), (4, 2), (2, 1))


def net():
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(*shape, dtype=torch.float64) for shape in SHAPES))


def train(cls, empty=False):
    """Parameters after three steps, beside those of plain torch on one process."""
    module = net()
    plain = net()
    options = {"lr": 0.25, "weight_decay": 0.1}
    expected = cls(plain.parameters(), **options)
    for number, layer in enumerate(module):
        api.set_partition(layer, 0 if empty else number % api.pp_size())
    model = api.DistributedModel(module)
    optimizer = api.DistributedOptimizer(cls(model.parameters(), **options))

    @api.step
    def step(model, x):
        model.backward(model(x).square().mean())

    for number in range(3):
        x = torch.arange(6.0, dtype=torch.float64).view(2, 3) - number
        optimizer.zero_grad()
        expected.zero_grad()
        step(model, x)
        plain(x).square().mean().backward()
        optimizer.step()
        expected.step()
    return dict(model.state_dict()), dict(plain.state_dict())


@pytest.mark.parametrize("cls", [FusedLAMB, FusedNovoGrad])
@pytest.mark.parametrize("empty", [False, True])
def test_in_a_pipeline_the_update_is_that_of_the_whole_model(smp_world, cls, empty):
    """LAMB clips by the norm of all partitions' gradients, also if a rank has none."""
    config = {"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}
    for found, expected in smp_world.run(
        train, cls, empty, ranks=4, config={**config, "ddp": True}
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cls", [FusedLAMB, FusedNovoGrad])
@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"shard_optimizer_state": True}, "shard_optimizer_state"),
        ({"sharded_data_parallel_degree": 2}, "sharded_data_parallel_degree"),
        ({"tensor_parallel_degree": 2}, "tensor parallelism"),
    ],
)
def test_on_parts_of_parameters_they_are_refused(smp_world, cls, config, what):
    def body():
        with api.tensor_parallelism(what == "tensor parallelism"):
            module = nn.Linear(4, 4)
        model = api.DistributedModel(module)
        with pytest.raises(UnsupportedTrainingError, match=f"with {what} it would see parts"):
            api.DistributedOptimizer(cls(model.parameters()))

    smp_world.run(body, ranks=2, config={"ddp": True, **config})
