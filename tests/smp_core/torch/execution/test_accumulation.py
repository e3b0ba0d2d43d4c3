"""The ledger: in which order gradients are summed, and when their memory is freed."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch
from torch import nn

from smp_core.errors import SmpError
from smp_core.torch.execution.accumulation import Ledger

# 1 + u + u is 1, 1 + (u + u) is not: the order of three such numbers can be read from their sum.
U = 2.0**-24


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("values", [(1.0, U, U), (U, U, 1.0), (U, 1.0, U)])
def test_microbatches_fold_in_index_order_whatever_ends_first(
    order: tuple[int, ...], values: tuple[float, ...]
) -> None:
    weight, ledger = parameter(), Ledger(3)
    for microbatch in order:
        ledger.add(microbatch, weight, torch.tensor(values[microbatch]))
        ledger.close(microbatch)
    plain = torch.tensor(values[0])
    for value in values[1:]:
        plain = plain + value
    assert torch.equal(ledger.totals()[weight], plain)


def test_contributions_within_a_microbatch_are_summed_apart_from_others() -> None:
    weight, ledger = parameter(), Ledger(2)
    ledger.add(0, weight, torch.tensor(1.0))
    ledger.add(1, weight, torch.tensor(U))
    ledger.add(1, weight, torch.tensor(U))
    ledger.close(1)
    ledger.close(0)
    assert ledger.totals()[weight].item() == 1 + 2 * U


def test_contributions_are_added_as_they_come() -> None:
    weight, ledger = parameter(), Ledger(1)
    for value in (1.0, U, U):
        ledger.add(0, weight, torch.tensor(value))
    ledger.close(0)
    assert ledger.totals()[weight].item() == 1.0


def test_a_sum_is_freed_when_it_is_folded_and_waits_no_longer_than_needed() -> None:
    weight, ledger = parameter(4), Ledger(4)
    given = [torch.ones(4) for _ in range(4)]
    alive = [weakref.ref(tensor) for tensor in given]
    for microbatch in (0, 2, 3):
        ledger.add(microbatch, weight, given[microbatch])
    ledger.add(1, weight, given[1])
    del given
    for microbatch, waiting in ((2, 4), (0, 3), (1, 1), (3, 0)):
        ledger.close(microbatch)
        assert ledger.waiting == waiting
        folded = 4 - waiting
        assert [one() is None for one in alive[1:folded]] == [True] * len(alive[1:folded])
    assert ledger.complete
    assert ledger.totals()[weight].tolist() == [4.0] * 4


def test_a_parameter_without_a_gradient_has_no_total() -> None:
    used, unused, ledger = parameter(2), parameter(2), Ledger(2)
    ledger.add(1, used, torch.ones(2))
    ledger.close(0)
    ledger.close(1)
    assert list(ledger.totals()) == [used]
    assert unused not in ledger.totals()


def test_parameters_of_equal_value_are_different_parameters() -> None:
    first, second, ledger = parameter(2), parameter(2), Ledger(1)
    ledger.add(0, first, torch.ones(2))
    ledger.add(0, second, torch.full((2,), 2.0))
    ledger.close(0)
    assert ledger.totals()[first].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_sums_are_of_the_parameters_dtype_as_in_plain_torch(dtype: torch.dtype) -> None:
    weight, plain = (nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2))
    ledger = Ledger(3)
    for microbatch in range(3):
        factor = torch.tensor([0.1, 3.3, 1e-3], dtype=dtype) * (microbatch + 1)
        (plain * factor).sum().backward()
        ledger.add(microbatch, weight, factor.clone())
        ledger.close(microbatch)
    total = ledger.totals()[weight]
    assert total.dtype is dtype
    assert torch.equal(total, plain.grad)  # type: ignore[arg-type]


def test_sparse_gradients_stay_sparse() -> None:
    embedding, plain = (nn.Embedding(6, 2, sparse=True) for _ in range(2))
    plain.weight.data.copy_(embedding.weight.data)
    ledger = Ledger(2)
    for microbatch, rows in enumerate(([1, 1, 4], [4, 5])):
        (gradient,) = torch.autograd.grad(embedding(torch.tensor(rows)).sum(), embedding.weight)
        ledger.add(microbatch, embedding.weight, gradient)
        ledger.close(microbatch)
        plain(torch.tensor(rows)).sum().backward()
    total = ledger.totals()[embedding.weight]
    assert total.is_sparse
    assert total.coalesce().indices().tolist() == [[1, 4, 5]]
    assert plain.weight.grad is not None
    assert torch.equal(total.to_dense(), plain.weight.grad.to_dense())


@pytest.mark.parametrize("sparse_first", [True, False])
def test_a_sparse_and_a_dense_gradient_make_a_dense_one(sparse_first: bool) -> None:
    weight, ledger = parameter(3, 2), Ledger(1)
    both = [torch.eye(3, 2).to_sparse(), torch.ones(3, 2)]
    for gradient in both if sparse_first else reversed(both):
        ledger.add(0, weight, gradient)
    ledger.close(0)
    assert torch.equal(ledger.totals()[weight], torch.eye(3, 2) + 1)


def test_a_parameters_hooks_see_the_sum_of_each_microbatch_once() -> None:
    weight, ledger, seen = parameter(), Ledger(2), list[float]()
    kept = torch.tensor(5.0)

    def hook(gradient: torch.Tensor) -> torch.Tensor | None:
        seen.append(gradient.item())
        return kept if len(seen) == 1 else None

    weight.register_hook(hook)
    for microbatch in (0, 1):
        for value in (1.0, 2.0):
            ledger.add(microbatch, weight, torch.tensor(value * (microbatch + 1)))
    ledger.close(0)
    ledger.close(1)
    assert seen == [3.0, 6.0]
    assert ledger.totals()[weight].item() == 11.0
    assert kept.item() == 5.0


def test_nothing_comes_late_and_nothing_is_read_early() -> None:
    weight, ledger = parameter(2), Ledger(2)
    ledger.close(1)
    for microbatch in (1,):
        with pytest.raises(SmpError, match=r"arrived for microbatch 1, whose backward has ended"):
            ledger.add(microbatch, weight, torch.ones(2))
    with pytest.raises(ValueError, match="closed already"):
        ledger.close(1)
    with pytest.raises(ValueError, match="2 of 2 cannot be closed"):
        ledger.close(2)
    with pytest.raises(SmpError, match="2 microbatches, of which 0 are folded"):
        ledger.totals()
    ledger.close(0)
    with pytest.raises(SmpError, match="arrived for microbatch 0"):
        ledger.add(0, weight, torch.ones(2))
    with pytest.raises(ValueError, match="at least one microbatch"):
        Ledger(0)


class Heard:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, nn.Parameter, float | None]] = []
        self.left: set[nn.Parameter] = set()  # of no use before the end

    def takes(self, parameter: nn.Parameter) -> bool:
        return parameter not in self.left

    def on_ready(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        self.said.append(("ready", parameter, total.item()))

    def on_late_grad(self, parameter: nn.Parameter) -> None:
        self.said.append(("late", parameter, None))


def test_a_listener_hears_of_totals_that_seem_complete_and_of_what_comes_late() -> None:
    weight, other, hooked, heard = parameter(), parameter(), parameter(), Heard()
    hooked.register_hook(lambda gradient: gradient * 2)
    ledger = Ledger(2, heard)

    def use(microbatch: int, *used: nn.Parameter) -> None:
        for one in used:
            ledger.expect(microbatch, one)
            ledger.add(microbatch, one, torch.tensor(1.0))

    use(0, weight, other)
    ledger.expect(1, weight)
    use(1, weight, hooked)  # one of two expected
    assert heard.said == []
    ledger.add(1, weight, torch.tensor(1.0))  # both microbatches are open, and nothing is awaited
    assert heard.said == [("ready", weight, 3.0)]
    ledger.close(0)
    assert heard.said == [("ready", weight, 3.0)]
    use(1, other)
    use(1, weight)  # another call, after its backward
    assert heard.said[1:] == [
        ("ready", other, 2.0),
        ("late", weight, None),
        ("ready", weight, 4.0),
    ]
    ledger.close(1)
    assert [ledger.totals()[one].item() for one in (weight, other, hooked)] == [4.0, 2.0, 2.0]


def test_a_listener_hears_when_the_microbatch_that_has_brought_nothing_is_closed() -> None:
    first, last, heard = parameter(), parameter(), Heard()
    ledger = Ledger(3, heard)
    for microbatch, one in ((2, first), (0, first), (2, last), (1, last)):
        ledger.expect(microbatch, one)
        ledger.add(microbatch, one, torch.tensor(float(microbatch + 1)))
    ledger.close(0)
    assert heard.said == [("ready", last, 5.0)]
    ledger.close(1)
    assert heard.said[1:] == [("ready", first, 4.0)]


def test_a_listener_is_not_given_totals_that_it_has_no_use_for() -> None:
    taken, left, heard = parameter(), parameter(), Heard()
    heard.left.add(left)
    ledger = Ledger(1, heard)
    for each in (taken, left):
        ledger.expect(0, each)
        ledger.add(0, each, torch.ones(1))
    assert [each for _, each, _ in heard.said] == [taken]
    ledger.close(0)
    assert set(ledger.totals()) == {taken, left}
