"""Random streams: which numbers a module call draws."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from pytest_smp import replay
from smp_core.torch.execution import streams, uses


def drawn(stream: int) -> list[float]:
    with streams.entered(stream):
        return torch.rand(3).tolist()


def test_a_stream_is_the_same_again_and_leaves_the_callers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2).tolist()
    torch.manual_seed(1)
    first = drawn(7)
    assert drawn(7) == first
    assert torch.rand(2).tolist() == expected
    assert drawn(8) != first


def test_the_callers_generator_comes_back_after_an_exception() -> None:
    before = torch.get_rng_state()
    with pytest.raises(KeyError), streams.entered(3):
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_a_worker_that_is_suspended_goes_on_where_it_was() -> None:
    with streams.entered(5):
        whole = torch.rand(4).tolist()
    with streams.entered(5):
        part = torch.rand(2).tolist()
        with streams.suspended():
            torch.manual_seed(99)
        part += torch.rand(2).tolist()
    assert part == whole


def test_streams_differ_in_each_of_their_origins() -> None:
    seeds = itertools.product((0, 1, 2**63 - 1), (0, 1, 2))
    roots = [streams.root(seed, microbatch) for seed, microbatch in seeds]
    calls = [
        streams.derive(root, path, nth) for root in roots for path in ("", "a") for nth in (0, 1)
    ]
    assert len({*roots, *calls}) == len(roots) + len(calls)
    assert len({tuple(drawn(stream)) for stream in roots + calls}) == len(roots) + len(calls)


def test_streams_are_published_numbers() -> None:
    # The same on every machine and in every process: a change breaks replayed references.
    assert streams.derive(streams.root(3, 1), "layers.0", 2) == 2580715392502221283


def test_a_step_seed_is_drawn_from_the_callers_generator() -> None:
    torch.manual_seed(4)
    seeds = [streams.draw_seed() for _ in range(3)]
    torch.manual_seed(4)
    assert [streams.draw_seed() for _ in range(3)] == seeds
    assert len(set(seeds)) == 3
    assert torch.tensor(seeds).tolist() == seeds


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(), nn.Dropout()

    def forward(self, x: torch.Tensor, draw: bool = False) -> torch.Tensor:
        if draw:
            torch.rand(100)
        return torch.stack([self.first(x), self.first(x), self.second(x), torch.rand(64)])


def test_a_modules_numbers_do_not_depend_on_what_others_draw() -> None:
    module = Drops()

    def body(draw: bool) -> torch.Tensor:
        if draw:
            torch.rand(10)
        return module(torch.ones(64), draw)  # type: ignore[no-any-return]

    def of(draws: list[bool], seed: int = 0) -> list[torch.Tensor]:
        return replay.gradients(module, body, [(draw,) for draw in draws], seed=seed).results

    plain, drawing = of([False, False]), of([True, True])
    for one, other in zip(plain, drawing, strict=True):
        assert torch.equal(one[:3], other[:3])  # the children's: calls have streams of their own
        assert not torch.equal(one[3], other[3])  # the module's own goes on
        assert len({tuple(row.tolist()) for row in one}) == 4
    assert not torch.equal(plain[0], plain[1])
    assert not torch.equal(of([False], seed=1)[0], plain[0])
    assert torch.equal(of([False])[0], plain[0])


def test_the_body_has_a_stream_of_its_own() -> None:
    before = torch.get_rng_state()

    class Nothing:
        def expect(self, microbatch: int, parameter: nn.Parameter) -> None:
            raise AssertionError

        def add(self, microbatch: int, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
            raise AssertionError

    def first(microbatch: int) -> float:
        with uses.body(Nothing(), microbatch, 0):
            return torch.rand(()).item()

    assert first(0) == first(0) != first(1)
    assert torch.equal(torch.get_rng_state(), before)
