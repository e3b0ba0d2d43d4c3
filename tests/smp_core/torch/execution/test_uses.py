"""Per-call uses: what reads a parameter, and where its gradient goes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytest_smp import replay
from smp_core.torch.execution import uses
from smp_core.torch.execution.accumulation import Ledger


class Recorded:
    """A ledger that writes down what comes."""

    def __init__(self) -> None:
        self.came: list[tuple[int, nn.Parameter, torch.Tensor]] = []

    def expect(self, microbatch: int, parameter: nn.Parameter) -> None:
        pass

    def add(self, microbatch: int, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self.came.append((microbatch, parameter, gradient))


def recorded(module: nn.Module, body: Callable[[], Any], microbatch: int = 0) -> Recorded:
    ledger = Recorded()
    with replay.patched(module), uses.body(ledger, microbatch, 3):
        body()
    return ledger


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, nn.Parameter)
        assert self.weight is self.weight
        return x * self.weight


class ByReference(nn.Module):
    """Reads its child's parameter, and never calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.linear(x, self.child.weight), self.child.weight)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.ones(2), torch.full((2,), 3.0)])
        self.named = nn.ParameterDict({"a": torch.ones(2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.several:
            x = x * parameter
        return x * self.named["a"] + self.named["a"]


class Iterates(Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + sum(p.pow(2).sum() for p in self.parameters())


class Recursive(Own):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        return x * self.weight if depth == 0 else self(x * self.weight, depth - 1)


class Nested(nn.Module):
    """Calls by keyword, with a nest, and by ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(pair=(x, {"b": x + 1})) + self.inner.forward((x, {"b": x}))


class Pair(Own):
    def forward(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> torch.Tensor:
        return pair[0] * self.weight + pair[1]["b"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(2, 3, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x[None])[0]
        return output


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.attention(x[None], x[None], x[None])[0]
        return output


class InClosure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.scale = lambda x: x * weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x) * self.weight


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        module: nn.Module = nn.utils.weight_norm(nn.Linear(2, 2))
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "by reference": ByReference,
    "lists": Lists,
    "iterates": Iterates,
    "recursive": Recursive,
    "nested": Nested,
    "recurrent": Recurrent,
    "attention": Attention,
    "closure": InClosure,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "old weight norm": old_weight_norm,
    "in place": lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2)),
    "tied": lambda: tied(),
    "batch norm": lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
}


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    module[2].weight = module[0].weight
    return module


@pytest.mark.parametrize("name", MODULES)
def test_every_way_of_reading_a_parameter_gives_plain_gradients(name: str) -> None:
    torch.manual_seed(4)
    module = MODULES[name]()
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0]], requires_grad=True)
    ledger = Ledger(1)
    with replay.patched(module), uses.body(ledger, 0, 3):
        module(x).sum().backward()
    ledger.close(0)
    assert all(parameter.grad is None for parameter in module.parameters())
    of_input, x.grad = x.grad, None
    module(x).sum().backward()
    totals = ledger.totals()
    # To the bit, also where a call uses a parameter twice: the sum of two terms has one order.
    for parameter in module.parameters():
        assert torch.equal(totals[parameter], parameter.grad)
    assert torch.equal(of_input, x.grad)


def test_contributions_come_call_by_call_and_last_call_first() -> None:
    module = ByReference()
    with torch.no_grad():
        module.child.weight.copy_(torch.eye(2))

    def body() -> None:
        first = module(torch.tensor([[1.0, 0.0]]))
        second = module(torch.tensor([[0.0, 1.0]]))
        (first * 1 + second * 10).sum().backward()

    ledger = recorded(module, body, microbatch=5)
    assert [(mb, parameter) for mb, parameter, _ in ledger.came] == [(5, module.child.weight)] * 2
    second, first = (gradient for _, _, gradient in ledger.came)
    # Both readings of a call are in one contribution: d/dW of 1ᵀ W W x at W = 1 is 2 · 1 xᵀ.
    assert torch.equal(first, torch.tensor([[2.0, 0.0], [2.0, 0.0]]))
    assert torch.equal(second, torch.tensor([[0.0, 20.0], [0.0, 20.0]]))


def test_the_gradient_of_an_input_is_summed_within_the_call_first() -> None:
    # 1 + u + u, with u half the distance to the next float: one by one nothing is added, together it is.
    u = 2.0**-24
    seen: list[float] = []

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * u + x * u

    module = Twice()

    def body() -> None:
        x = torch.ones((), requires_grad=True)
        y = x * 1
        inner = module(y)
        (y + inner).backward()
        assert x.grad is not None
        seen.append(x.grad.item())

    recorded(module, body)
    body()
    assert seen == [1 + 2 * u, 1.0]


def test_a_tensor_given_twice_is_one_tensor_in_the_call() -> None:
    class Compares(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            assert x is y
            return x * y

    module = Compares()
    x = torch.tensor(3.0, requires_grad=True)
    recorded(module, lambda: module(x, y=x).backward())
    assert x.grad == 6.0


def test_in_place_modification_of_an_input_reaches_the_caller_with_its_gradient() -> None:
    module = nn.ReLU(inplace=True)
    x = torch.tensor([-1.0, 2.0], requires_grad=True)

    def body() -> None:
        y = x * 3
        module(y)
        (y * 5).sum().backward()  # the caller's own tensor, not what the module returned

    recorded(module, body)
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 15.0]


def test_in_place_modification_of_a_leaf_is_torchs_own_error() -> None:
    module = nn.ReLU(inplace=True)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        recorded(module, lambda: module(torch.ones(2, requires_grad=True)))


def test_nothing_is_made_without_gradients() -> None:
    module = Own()
    seen: list[bool] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.own.weight is weight and x is given)
            return x

    weight, given = module.weight, torch.ones(2)
    looks = Looks()
    with torch.no_grad():
        recorded(looks, lambda: looks(given))
    module.weight.requires_grad_(False)
    recorded(looks, lambda: looks(given))
    assert seen == [True, True]


def test_reading_outside_of_calls_gives_the_parameter_itself() -> None:
    module = Own()
    weight = module.weight

    def body() -> None:
        assert module.weight is weight
        assert next(iter(module.parameters())) is weight
        (module.weight * 3).sum().backward()

    ledger = recorded(module, body)
    assert [gradient.tolist() for _, _, gradient in ledger.came] == [[3.0, 3.0]]


def test_what_is_accumulated_already_stays_apart() -> None:
    module = InClosure()
    module.weight.grad = torch.tensor([100.0, 100.0])
    ledger = recorded(module, lambda: module(torch.ones(2)).sum().backward())
    assert module.weight.grad.tolist() == [100.0, 100.0]
    assert sum(gradient for _, _, gradient in ledger.came).tolist() == [2.0, 4.0]  # type: ignore[union-attr]


def test_torch_autograd_grad_sees_a_use_and_delivers_nothing() -> None:
    class Penalty(Own):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x * self.weight).sum()
            (gradient,) = torch.autograd.grad(y, self.weight, create_graph=True)
            return gradient.pow(2).sum() + y

    module = Penalty()
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    ledger = recorded(module, lambda: module(x).backward())
    assert [gradient.tolist() for _, _, gradient in ledger.came] == [[2.0, 3.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [2 * 2.0 + 1, 2 * 3.0 + 2]


def test_what_a_module_does_to_its_parameter_arrives() -> None:
    class Changes(Own):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(2)
            self.weight.data = self.weight.data + 1
            self.weight.requires_grad_(False)
            return x

    module = Changes()
    recorded(module, lambda: module(torch.ones(2)))
    assert module.weight.tolist() == [3.0, 5.0]
    assert not module.weight.requires_grad


def test_attributes_of_a_parameter_are_those_of_its_use() -> None:
    class Marked(Own):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.weight.mark == "here"  # type: ignore[attr-defined]
            return x * self.weight

    module = Marked()
    module.weight.mark = "here"  # type: ignore[attr-defined]
    assert len(recorded(module, lambda: module(torch.ones(2)).sum().backward()).came) == 1


def test_a_watched_module_is_copied_and_pickled_as_a_plain_one() -> None:
    module = nn.Linear(2, 2)
    watch = uses.Watch(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other._parameters) is dict
        assert torch.equal(other.weight, module.weight)
    watch.remove()
    assert type(module._parameters) is dict


def test_an_exception_in_a_call_leaves_the_thread_as_it_was() -> None:
    class Fails(Own):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("in forward")

    module = Fails()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="in forward"):
        recorded(module, lambda: module(torch.ones(2)))
    assert uses.current_microbatch() is None
    assert torch.equal(torch.get_rng_state(), before)
    assert module.weight is next(iter(module.parameters()))


def test_keys_tell_the_chain_of_calls() -> None:
    ledger = Recorded()
    with uses.activity(ledger, 2, 9):
        first, second, other = uses.next_key("a"), uses.next_key("a"), uses.next_key("b")
    assert [(key.microbatch, key.path, key.nth) for key in (first, second, other)] == [
        (2, "a", 0),
        (2, "a", 1),
        (2, "b", 0),
    ]
    assert len({first.stream, second.stream, other.stream}) == 3
    inner: list[uses.CallKey] = []
    for _ in range(2):  # a call that is repeated makes the same calls
        with uses.activity(ledger, 2, 9):
            uses.run(first, nn.Identity(), lambda: inner.append(uses.next_key("a.c")), (), {})
    assert inner[0] == inner[1]
    with pytest.raises(RuntimeError, match="module 'a' is called outside"):
        uses.next_key("a")
