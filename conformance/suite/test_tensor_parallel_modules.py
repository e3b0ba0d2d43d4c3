"""Properties of distributed modules: those that are chosen, and their arguments, weights, batches and norms."""

from __future__ import annotations

import logging
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor, nn

from conformance.cases.draws import needs
from conformance.cases.training import (
    claimed,
    smp,
    step_of_the_sum,
    tensor_cases,
    trials,
    with_engine,
)
from conformance.engines.capabilities import EngineCapability
from conformance.engines.names import find_engine
from conformance.requirements.catalogue import requirement
from pytest_smp.proxies import SmpWorld
from pytest_smp.strategies import training_oracle as oracle
from pytest_smp.strategies.training_models import Block, Model
from pytest_smp.strategies.training_script import Script
from pytest_smp.strategies.training_tensor import TensorTraining

Data = st.DataObject

CONFIG = {"tensor_parallel_degree": 2, "ddp": True}


def distributed(model: Any) -> list[str]:
    """The paths of the outermost distributed modules, without numbers of places that the model adds."""
    paths = {id(each): path for path, each in model.module.named_modules()}
    return [paths[id(each)] for each in model.distributed_modules()]


def layer(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that is to be distributed."""
    with smp.tensor_parallelism():
        return nn.Linear(inputs, outputs)


def run_on(
    smp_world: SmpWorld, engine: str, body: Any, *given: Any, ranks: int, config: dict[str, Any]
) -> list[Any]:
    """Run a function with the engine's API on so many ranks; skip a session with fewer."""
    __tracebackhide__ = True
    needs(smp_world, ranks)
    return smp_world.run(with_engine, engine, body, *given, ranks=ranks, config=config)


def said(call: Any) -> str | None:
    """The message of the exception that a call raises, of any type; None if it raises none."""
    try:
        call()
    except Exception as error:  # of any type: the API promises none
        return f"{type(error).__name__}: {error}"
    return None


# ---- Contexts ------------------------------------------------------------------------------------

#: The contexts that a script is inside of, from the outermost: the function, and whether it is enabled.
CONTEXTS = st.lists(
    st.sampled_from(
        [("tensor_parallelism", True), ("tensor_parallelism", False), ("model_creation", True)]
    ),
    min_size=1,
    max_size=3,
)


def created(contexts: list[tuple[str, bool]]) -> list[str]:
    """Create a layer before, between and after nested contexts; return which ones are distributed."""
    layers: dict[str, nn.Module] = {}

    def enter(depth: int) -> None:
        layers[f"before {depth}"] = nn.Linear(2, 2)
        if depth < len(contexts):
            name, enabled = contexts[depth]
            given = {"enabled" if name == "tensor_parallelism" else "tensor_parallelism": enabled}
            with getattr(smp, name)(**given):
                enter(depth + 1)
        layers[f"after {depth}"] = nn.Linear(2, 2)

    enter(0)
    layers["always"] = layer(2, 2)
    return distributed(smp.DistributedModel(nn.ModuleDict(layers)))


@requirement("TP-CONTEXT")
@given(contexts=CONTEXTS)
@trials(6)
def test_the_innermost_context_counts(
    smp_world: SmpWorld, smp_engine: str, contexts: list[tuple[str, bool]]
) -> None:
    found = run_on(smp_world, smp_engine, created, contexts, ranks=2, config=CONFIG)
    inside = [False, *(enabled for _, enabled in contexts)]
    expected = {
        f"{when} {at}" for at, on in enumerate(inside) if on for when in ("before", "after")
    }
    assert [set(each) for each in found] == [expected | {"always"}] * 2


#: Paths of a tree of layers, the leaves last.
TREE = ("", "0", "1", "0.0", "0.1", "1.0", "1.1")


def wished(calls: list[tuple[str, bool]]) -> list[str]:
    """Wish for parts of a tree of layers, one call after the other; return which ones are distributed."""
    tree = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)))
    for path, enabled in calls:
        smp.set_tensor_parallelism(tree.get_submodule(path), enabled)
    model = smp.DistributedModel(nn.ModuleDict({"tree": tree, "always": layer(2, 2)}))
    return [path.removeprefix("tree.") for path in distributed(model)]


@requirement("TP-CONTEXT")
@given(calls=st.lists(st.tuples(st.sampled_from(TREE), st.booleans()), min_size=1, max_size=4))
@trials(6)
def test_the_last_call_counts_for_all_below(
    smp_world: SmpWorld, smp_engine: str, calls: list[tuple[str, bool]]
) -> None:
    found = run_on(smp_world, smp_engine, wished, calls, ranks=2, config=CONFIG)
    on = dict.fromkeys(TREE[3:], False)
    for path, enabled in calls:
        on |= {
            leaf: enabled for leaf in on if leaf == path or leaf.startswith(f"{path}.") or not path
        }
    expected = {leaf for leaf, enabled in on.items() if enabled}
    assert [set(each) for each in found] == [expected | {"always"}] * 2


def at_degree_one(inputs: int, outputs: int) -> tuple[bool, bool]:
    """Return whether a layer that is wished to be distributed keeps its weights, and whether it keeps its output."""
    torch.manual_seed(1)
    made, x = layer(inputs, outputs), torch.randn(2, inputs)
    weight, wanted = made.weight.detach().clone(), made(x)
    model = smp.DistributedModel(nn.Sequential(made))
    return torch.equal(model.state_dict()["0.weight"], weight), torch.equal(model(x), wanted)


@requirement("TP-DEGREE-ONE")
@given(ranks=st.integers(1, 2), inputs=st.integers(1, 4), outputs=st.integers(1, 4))
@trials(6)
def test_at_degree_one_modules_stay_what_they_are(
    smp_world: SmpWorld, smp_engine: str, ranks: int, inputs: int, outputs: int
) -> None:
    config, sizes = {"ddp": ranks > 1}, (inputs, outputs)
    found = run_on(smp_world, smp_engine, at_degree_one, *sizes, ranks=ranks, config=config)
    assert found == [(True, True)] * ranks


# ---- Modules -------------------------------------------------------------------------------------


class Outer(nn.Module):
    """A module with a linear layer; takes and gives its value by name."""

    def __init__(self, size: int, *, factor: float = 1.0) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(size, size, bias=False), factor

    def forward(self, *, given: Tensor) -> dict[str, Tensor]:
        return {"value": self.inner(given) * self.factor}


class Heir(Outer):
    """A subclass of a registered class."""


def registered(how: str) -> type[nn.Module]:
    """Register Outer with hooks; return the class that takes its place."""

    class Distributed(smp.nn.DistributedModule):  # type: ignore[misc]  # anybody's
        def __init__(self, features: int, scale: float) -> None:
            super().__init__()
            self.inner = smp.nn.DistributedLinear(features, features, bias=False)
            self.plain, self.scale = nn.Linear(features, features), scale

        def forward(self, x: Tensor) -> Tensor:
            value: Tensor = self.inner(x) * self.scale
            return value

    hooks: dict[str, Any] = {
        "init_hook": lambda size, *, factor=1.0: ((size,), {"scale": factor}),
        "forward_hook": lambda *, given: ((given,), {}),
        "return_hook": lambda value: {"value": value},
    }
    if how == "tp_register":
        smp.tp_register(Distributed, **hooks)(Outer)
    else:
        smp.tp_register_with_module(Outer, Distributed, **hooks)
    return Distributed


def hooked(how: str, size: int, factor: float | None, option: float | None) -> list[Tensor]:
    """Call a registered module through its hooks, on the rows of a unit matrix; with its scale."""
    registered(how)
    with smp.tensor_parallelism(**({} if option is None else {"scale": option})):
        module = Outer(size) if factor is None else Outer(size, factor=factor)
    model = smp.DistributedModel(nn.ModuleDict({"outer": module}))
    plain = model.module["outer"].plain.state_dict()
    state = {f"outer.plain.{name}": each for name, each in plain.items()}
    model.load_state_dict({"outer.inner.weight": weights(size), **state})
    with torch.no_grad():
        value: Tensor = model.module["outer"](given=torch.eye(size))["value"]
    return [value]


def weights(size: int) -> Tensor:
    """A square matrix of small whole numbers, all rows and columns different."""
    return ((torch.arange(size * size) * 5) % 11 - 4.0).view(size, size)


@requirement("TP-HOOKS")
@given(
    how=st.sampled_from(["tp_register", "tp_register_with_module"]),
    size=st.sampled_from([2, 4]),
    factor=st.none() | st.sampled_from([2.0, -3.0]),
    option=st.none() | st.just(5.0),
)
@trials(6)
def test_hooks_translate_calls(
    smp_world: SmpWorld,
    smp_engine: str,
    how: str,
    size: int,
    factor: float | None,
    option: float | None,
) -> None:
    given_ = (how, size, factor, option)
    found = run_on(smp_world, smp_engine, hooked, *given_, ranks=2, config=CONFIG)
    scale = option or factor or 1.0  # the context's options override what the hook returned
    for rank, (value,) in enumerate(found):
        assert torch.equal(value, weights(size).t() * scale), f"rank {rank}: {value}"


def nested(kinds: list[str]) -> list[str]:
    """Put modules of these kinds into a tree; return the paths of the outermost distributed ones."""
    registered("tp_register")
    with smp.tensor_parallelism():
        made: dict[str, Any] = {
            "outer": lambda: Outer(2),
            "heir": lambda: Heir(2),
            "linear": lambda: nn.Linear(2, 2),
            "container": lambda: nn.Sequential(nn.Sequential(Outer(2)), nn.Linear(2, 2)),
        }
        tree = nn.ModuleList([made[kind]() for kind in kinds])
    return distributed(smp.DistributedModel(tree))


@requirement("TP-OUTERMOST")
@given(
    kinds=st.lists(
        st.sampled_from(["outer", "heir", "linear", "container"]), min_size=1, max_size=4
    )
)
@trials(6)
def test_the_outermost_supported_module_is_distributed(
    smp_world: SmpWorld, smp_engine: str, kinds: list[str]
) -> None:
    found = run_on(smp_world, smp_engine, nested, kinds, ranks=2, config=CONFIG)
    below = {"outer": [""], "heir": [".inner"], "linear": [""], "container": [".0.0", ".1"]}
    expected = [f"{at}{path}" for at, kind in enumerate(kinds) for path in below[kind]]
    assert found == [expected] * 2


class Records(logging.Handler):
    """Keeps the messages of all loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def kept(kinds: list[str], size: int) -> tuple[list[str], list[str]]:
    """Wrap modules that may not be divided; return the distributed ones and the messages of the log."""
    tree = nn.ModuleDict()
    for at, kind in enumerate(kinds):
        name = f"{kind}{at}"
        if kind == "odd":
            tree[name] = layer(size + 1, 2)
        elif kind == "tied":
            tree[name], tree[f"{name}b"] = layer(size, size), layer(size, size)
            tree[f"{name}b"].weight = tree[name].weight
        elif kind == "twice":
            tree[name] = tree[f"{name}b"] = layer(size, size)
        else:
            tree[name] = layer(size, 3)
    tree["fine"] = layer(size, 1)
    root, records = logging.getLogger(), Records()
    root.addHandler(records)
    try:
        model = smp.DistributedModel(tree)
    finally:
        root.removeHandler(records)
    return distributed(model), records.texts


@requirement("TP-KEPT")
@given(
    kinds=st.lists(st.sampled_from(["odd", "tied", "twice", "even"]), min_size=1, max_size=3),
    tensor=st.sampled_from([2, 4]),
)
@trials(6)
def test_what_cannot_be_divided_stays_and_is_logged(
    smp_world: SmpWorld, smp_engine: str, kinds: list[str], tensor: int
) -> None:
    tensor = min(tensor, 2 if smp_world.ranks < 4 else 4)
    config = {**CONFIG, "tensor_parallel_degree": tensor}
    ranks = run_on(smp_world, smp_engine, kept, kinds, tensor, ranks=tensor, config=config)
    fine = [f"{kind}{at}" for at, kind in enumerate(kinds) if kind == "even"]
    stays = [f"{kind}{at}" for at, kind in enumerate(kinds) if kind != "even"]
    for rank, (found, texts) in enumerate(ranks):
        assert found == [*fine, "fine"], f"rank {rank}: {found} are distributed"
        unsaid = [name for name in stays if not any(name in text for text in texts)]
        assert not unsaid, f"rank {rank}: the log says nothing of {unsaid}: {texts}"


def replaced(frozen: bool, training: bool, dtype: str) -> tuple[set[Any], ...]:
    """Which requires_grad, modes and dtypes a distributed layer has, and which buffers and biases."""
    module = layer(4, 2).to(getattr(torch, dtype)).requires_grad_(not frozen).train(training)
    model = smp.DistributedModel(nn.ModuleDict({"layer": module, "other": nn.Linear(1, 1)}))
    (made,) = model.distributed_modules()
    given_ = list(made.parameters())
    return (
        {each.requires_grad for each in given_},
        {each.training for each in made.modules()},
        {str(each.dtype) for each in given_},
        {name for name, _ in made.named_parameters()},
    )


@requirement("TP-PLACE")
@given(frozen=st.booleans(), training=st.booleans(), dtype=st.sampled_from(["float32", "float64"]))
@trials(6)
def test_a_distributed_module_takes_the_place_as_it_is(
    smp_world: SmpWorld, smp_engine: str, frozen: bool, training: bool, dtype: str
) -> None:
    given_ = (frozen, training, dtype)
    found = run_on(smp_world, smp_engine, replaced, *given_, ranks=2, config=CONFIG)
    expected = ({not frozen}, {training}, {f"torch.{dtype}"}, {"weight", "bias"})
    assert found == [expected] * 2


#: Layers by kind, with the names of their slices and of their other parameters.
PARTS = {
    "linear": (["weight"], ["bias"]),
    "unbiased": (["weight"], []),
    "embedding": (["weight"], []),
    "plain": ([], ["weight", "bias"]),
}


def asked(kinds: list[str]) -> dict[str, list[str]]:
    """The names of the parameters for which each query of a model says yes."""
    layers = nn.ModuleList()
    for kind in kinds:
        with smp.tensor_parallelism(kind != "plain"):
            if kind == "embedding":
                layers.append(nn.Embedding(3, 2))
            else:
                layers.append(nn.Linear(2, 2, bias=kind != "unbiased"))
    model = smp.DistributedModel(layers)
    names = [(name.removeprefix("module."), each) for name, each in model.named_parameters()]
    return {
        "distributed": [name for name, each in names if model.is_distributed_parameter(each)],
        "scaled": [name for name, each in names if model.is_scaled_batch_parameter(each)],
        "over RDP": _plain(model.scaled_batch_reducer_named_parameters()),
        "over DP": _plain(model.default_reducer_named_parameters()),
        "modules": distributed(model),
    }


def _plain(named: Any) -> list[str]:
    return [name.removeprefix("module.") for name, _ in named]


@requirement("TP-QUERIES")
@given(kinds=st.lists(st.sampled_from(list(PARTS)), max_size=3), prescaled=st.booleans())
@trials(6)
def test_queries_tell_slices_from_whole_parameters(
    smp_world: SmpWorld, smp_engine: str, kinds: list[str], prescaled: bool
) -> None:
    kinds = [*kinds, "linear"]
    config = {**CONFIG, "prescaled_batch": prescaled}
    found = run_on(smp_world, smp_engine, asked, kinds, ranks=2, config=config)
    slices = [f"{at}.{name}" for at, kind in enumerate(kinds) for name in PARTS[kind][0]]
    whole = [f"{at}.{name}" for at, kind in enumerate(kinds) for name in PARTS[kind][1]]
    modules = [str(at) for at, kind in enumerate(kinds) if kind != "plain"]
    expected = {"distributed": slices, "scaled": slices, "over RDP": slices, "over DP": whole}
    assert found == [{**expected, "modules": modules}] * 2


# ---- States --------------------------------------------------------------------------------------


def states(engine: str, case: TensorTraining) -> list[dict[str, Tensor]]:
    """The full state after a step without an update, after a full load, and after a partial one."""
    found: Any = find_engine(engine)
    replica = found.replica(case)
    script = Script(found.namespace(), case)
    oracle.seed(case, replica)
    script.zero_grad()
    script.backward(oracle.batch(case, replica, 0))  # the first step partitions the model
    model, seen = script.model, [_copied(script.model.state_dict())]
    model.load_state_dict({name: each + 1 for name, each in seen[0].items()})
    part = {
        name: each.clone() if isinstance(each, Tensor) else each
        for name, each in model.local_state_dict().items()
    }
    seen.append(_copied(model.state_dict()))
    model.load_state_dict({name: each - 1 for name, each in seen[1].items()})
    model.load_state_dict(part)
    seen.append(_copied(model.state_dict()))
    return seen


def _copied(state: Any) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in state.items()}


@requirement("TP-STATE")
@given(data=st.data())
@trials(6)
def test_states_are_whole_and_load(smp_world: SmpWorld, smp_engine: str, data: Data) -> None:
    claims = claimed(smp_world, smp_engine)
    ways: list[dict[str, Any]] = [{}]
    if EngineCapability.PIPELINE in claims:
        ways.append({"pipeline": (2,)})
    if {EngineCapability.SHARDING, EngineCapability.BLOCKS} <= claims:
        ways.append({"sharding": (2,)})
    degrees = data.draw(st.sampled_from(ways), "degrees")
    fixed = {"tensor": (2,), "microbatches": 1, "without": ("norm",), **degrees}
    drawn = tensor_cases(smp_world, smp_engine, least=4 if degrees else 2, **fixed)
    case = data.draw(drawn, "case")
    expected = oracle.state(case)
    ranks = smp_world.run(states, smp_engine, case, ranks=case.ranks, config=case.config)
    for rank, (before, full, partial) in enumerate(ranks):
        assert list(before) == list(expected), f"rank {rank}: {list(before)}"
        for name, value in expected.items():
            assert torch.equal(before[name], value), f"rank {rank}: {name} is {before[name]}"
            for loaded in (full, partial):
                assert torch.equal(loaded[name], value + 1), (
                    f"rank {rank}: {name} is {loaded[name]}"
                )


def new_weights(seed: int, sizes: list[int], tokens: int) -> dict[str, Tensor]:
    """The full state of new distributed layers, made from one random state on each rank."""
    torch.manual_seed(seed)
    with smp.tensor_parallelism():
        made = nn.ModuleList([nn.Linear(size, 3) for size in sizes])
        made.append(nn.Embedding(tokens, 4))
    return _copied(smp.DistributedModel(made).state_dict())


@requirement("TP-WEIGHTS")
@given(
    seed=st.integers(0, 9),
    sizes=st.lists(st.sampled_from([4, 8]), max_size=2),
    tokens=st.integers(2, 4),
)
@trials(6)
def test_new_weights_are_those_of_any_degree(
    smp_world: SmpWorld, smp_engine: str, seed: int, sizes: list[int], tokens: int
) -> None:
    needed = [degree for degree in (2, 4) if degree <= smp_world.ranks]
    found = []
    for degree in needed:
        config = {**CONFIG, "tensor_parallel_degree": degree}
        given_ = (seed, sizes, tokens)
        found += run_on(smp_world, smp_engine, new_weights, *given_, ranks=degree, config=config)
    for state in found:
        for name, value in found[0].items():
            assert torch.equal(state[name], value), f"{name} is {state[name]}, and {value}"
            rows = value.view(len(value), -1)
            assert len(rows.unique(dim=1)[0]) == rows.shape[1], f"columns of {name} are equal"


# ---- Batches -------------------------------------------------------------------------------------


def different_batch(what: str, odd: int) -> str | None:
    """Train on batches of which that of rank ``odd`` is another one; return the message, or None."""
    model = smp.DistributedModel(nn.Sequential(layer(4, 2)))
    mine = smp.tp_rank() == odd
    x = torch.ones(2, 1, 4)
    if mine:
        x = {"rows": torch.ones(4, 1, 4), "dtype": x.double(), "rank": torch.ones(2, 2, 4)}.get(
            what, x + torch.eye(2, 1).unsqueeze(-1)
        )
    return said(lambda: step_of_the_sum(smp)(model, x))


@requirement("TP-BATCH-SHAPES")
@given(
    what=st.sampled_from(["rows", "rank", "dtype"]), odd=st.integers(0, 1), prescaled=st.booleans()
)
@trials(6)
def test_batches_of_different_shapes_are_named(
    smp_world: SmpWorld, smp_engine: str, what: str, odd: int, prescaled: bool
) -> None:
    config = {**CONFIG, "prescaled_batch": prescaled}
    found = run_on(smp_world, smp_engine, different_batch, what, odd, ranks=2, config=config)
    named(found, odd)


@requirement("TP-BATCH-VALUES")
@given(odd=st.integers(0, 3), tensor=st.sampled_from([2, 4]))
@trials(6)
def test_different_values_in_one_prescaled_batch_are_named(
    smp_world: SmpWorld, smp_engine: str, odd: int, tensor: int
) -> None:
    tensor = min(tensor, 2 if smp_world.ranks < 4 else 4)
    config = {"tensor_parallel_degree": tensor, "ddp": True, "prescaled_batch": True}
    odd %= tensor
    found = run_on(
        smp_world, smp_engine, different_batch, "values", odd, ranks=tensor, config=config
    )
    named(found, odd)


def named(found: list[str | None], odd: int) -> None:
    """Check that every rank of a TP group raised, and that the messages name rank ``odd``."""
    assert None not in found, f"trained on: {found}"
    assert all(f"rank {odd}" in str(each) for each in found), f"rank {odd} is not named: {found}"


class Chooses(nn.Module):
    """One of two distributed layers of one size, by the data."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.one, self.other = layer(size, size), layer(size, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.one if float(x.detach().sum()) > 0 else self.other)(x)
        return out


def different_ways(odd: int, size: int, rows: int) -> tuple[str | None, list[Any]]:
    """Train where rank ``odd`` takes another way; return the message, and the gradients afterwards."""
    model = smp.DistributedModel(Chooses(size))
    x = torch.ones(rows, size)
    step = step_of_the_sum(smp)
    message = said(lambda: step(model, -x if smp.tp_rank() == odd else x))
    return message, [each.grad for each in model.parameters()]


@requirement("TP-ORDER")
@given(odd=st.integers(0, 1), size=st.sampled_from([2, 4]), rows=st.integers(1, 3))
@trials(6)
def test_ranks_that_call_different_modules_are_told(
    smp_world: SmpWorld, smp_engine: str, odd: int, size: int, rows: int
) -> None:
    given_ = (odd, size, rows)
    found = run_on(smp_world, smp_engine, different_ways, *given_, ranks=2, config=CONFIG)
    for rank, (message, gradients) in enumerate(found):
        assert message is not None, f"rank {rank} trained with another module's activations"
        assert gradients == [None] * 4, f"rank {rank}: {gradients}"


# ---- Refusals ------------------------------------------------------------------------------------


def stale(first: str, plain: int, size: int) -> str | None:
    """Make the optimizer before the model is wrapped, and hand it to SMP before or after that."""
    module = nn.Sequential(*(nn.Linear(size, size) for _ in range(plain)), layer(size, size))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    calls = {"model": smp.DistributedModel, "optimizer": smp.DistributedOptimizer}
    given_ = {"model": module, "optimizer": optimizer}

    def use() -> None:
        for name in (first, *(each for each in calls if each != first)):
            calls[name](given_[name])

    return said(use)


@requirement("TP-STALE")
@given(
    first=st.sampled_from(["model", "optimizer"]),
    plain=st.integers(0, 3),
    size=st.sampled_from([2, 4]),
)
@trials(6)
def test_an_optimizer_of_replaced_parameters_is_refused(
    smp_world: SmpWorld, smp_engine: str, first: str, plain: int, size: int
) -> None:
    given_ = (first, plain, size)
    found = run_on(smp_world, smp_engine, stale, *given_, ranks=2, config=CONFIG)
    assert None not in found, found


#: Values that are no pair of positional and keyword arguments.
NO_ARGUMENTS: tuple[Any, ...] = (None, 3, (2,), ((2,),), ((2, 2), 3))


def wrong_hook(which: str, value: Any) -> str | None:
    """Register hooks of which one returns something else, then wrap and call; return the message, or None."""
    hooks: dict[str, Any] = {
        "init_hook": lambda size, *, factor=1.0: ((size, size), {}),
        "forward_hook": lambda *, given: ((given,), {}),
    }
    smp.tp_register_with_module(
        Outer, smp.nn.DistributedLinear, **{**hooks, which: lambda *a, **k: value}
    )

    def use() -> None:
        with smp.tensor_parallelism():
            module = Outer(2)
        model = smp.DistributedModel(nn.Sequential(module, layer(2, 2)))
        model.module[0](given=torch.ones(2, 2))

    return said(use)


@requirement("TP-HOOKS-WRONG")
@given(
    which=st.sampled_from(["init_hook", "forward_hook"]),
    value=st.integers(0, len(NO_ARGUMENTS) - 1),
)
@trials(6)
def test_a_hook_that_returns_no_arguments_is_named(
    smp_world: SmpWorld, smp_engine: str, which: str, value: int
) -> None:
    given_ = (which, NO_ARGUMENTS[value])
    found = run_on(smp_world, smp_engine, wrong_hook, *given_, ranks=2, config=CONFIG)
    for rank, message in enumerate(found):
        assert message is not None, f"rank {rank} went on"
        assert which in message, f"rank {rank} does not name the hook: {message}"


# ---- Norms ---------------------------------------------------------------------------------------

LAYERS = Model(Block("chain", (Block("linear"), Block("linear"))), inputs=2, width=2)


def norm_on_rank(engine: str, case: TensorTraining) -> tuple[float, float]:
    """The norm that clipping returns after one step, and that of the clipped gradients, which are whole then."""
    found: Any = find_engine(engine)
    replica = found.replica(case)
    script = Script(found.namespace(), case)
    script.zero_grad()
    script.backward(oracle.batch(case, replica, 0))
    if case.dtype == "float16":
        norm = float(script.optimizer.clip_master_grads(0.5))
    else:
        norm = float(nn.utils.clip_grad_norm_(script.model.parameters(), 0.5))
    return norm, oracle.norm(script.gradients())


def norms(smp_world: SmpWorld, smp_engine: str, data: Data, dtype: str) -> None:
    """Check that clipping goes by the norm of the whole model, on every rank."""
    fixed: dict[str, Any] = {"model": LAYERS, "windows": 1, "passes": 1, "checkpointing": False}
    fixed["distributed"] = data.draw(st.sampled_from([("body.0",), ("stem", "body.1", "head")]))
    drawn = tensor_cases(smp_world, smp_engine, tensor=(2,), dtypes=(dtype,), **fixed)
    case = data.draw(drawn, "case")
    expected = oracle.norm(oracle.plain(case).gradients[0])
    ranks = smp_world.run(norm_on_rank, smp_engine, case, ranks=case.ranks, config=case.config)
    after = expected * min(1.0, 0.5 / (expected + 1e-6))  # as torch defines it
    part = (
        2.0**-22
    )  # four roundings to float32: the norm, the factor, each product, and half a bit to spare
    for rank, (norm, clipped) in enumerate(ranks):
        assert abs(norm - expected) <= part * expected, f"rank {rank}: {norm}, not {expected}"
        assert abs(clipped - after) <= part * after, f"rank {rank}: {clipped}, not {after}"


@requirement("TP-NORM")
@given(data=st.data())
@trials(6)
def test_torchs_norm_counts_each_element_once(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    norms(smp_world, smp_engine, data, "float32")


@requirement("TP-NORM-MASTERS")
@given(data=st.data())
@trials(6)
def test_the_norm_of_masters_counts_each_element_once(
    smp_world: SmpWorld, smp_engine: str, data: Data
) -> None:
    norms(smp_world, smp_engine, data, "float16")
