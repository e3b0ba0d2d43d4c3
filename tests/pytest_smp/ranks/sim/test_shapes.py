"""Tensors of equal counts and different shapes: a mismatch in every collective that moves whole tensors.

Only the parts of ``all_to_all_single`` are compared by their elements: it cuts one buffer into rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, Report, VerdictKind

Shape = tuple[int, ...]
RANKS = 3


def x(shape: Shape) -> torch.Tensor:
    return torch.ones(shape)


def many(shape: Shape) -> list[torch.Tensor]:
    return [x(shape) for _ in range(dist.get_world_size())]


def rows(shape: Shape) -> torch.Tensor:
    return torch.ones(shape[0] * dist.get_world_size(), *shape[1:])


def at_root(shape: Shape) -> list[torch.Tensor] | None:
    return many(shape) if dist.get_rank() == 0 else None


def coalesced(call: Callable[..., object], *arguments: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each
        call(*arguments)


#: Each call with tensors of one shape, on this rank.
CALLS: dict[str, Callable[[Shape], object]] = {
    "broadcast": lambda s: dist.broadcast(x(s), 0),
    "all_reduce": lambda s: dist.all_reduce(x(s)),
    "all_reduce_coalesced": lambda s: coalesced(dist.all_reduce_coalesced, [x(s), x((2,))]),
    "reduce": lambda s: dist.reduce(x(s), 0),
    "all_gather": lambda s: dist.all_gather(many(s), x(s)),
    "all_gather_coalesced": lambda s: coalesced(
        dist.all_gather_coalesced, [[x((2,)), each] for each in many(s)], [x((2,)), x(s)]
    ),
    "all_gather_single": lambda s: dist.all_gather_single(rows(s), x(s)),
    "gather": lambda s: dist.gather(x(s), at_root(s), 0),
    "scatter": lambda s: dist.scatter(x(s), at_root(s), 0),
    "reduce_scatter": lambda s: dist.reduce_scatter(x(s), many(s)),
    "reduce_scatter_single": lambda s: dist.reduce_scatter_single(x(s), rows(s)),
    "all_to_all": lambda s: dist.all_to_all(many(s), many(s)),
}
#: The same with one shape for what is read and another for what is written, on all ranks.
ALIKE: dict[str, Callable[[Shape, Shape], object]] = {
    "all_gather": lambda s, t: dist.all_gather(many(t), x(s)),
    "gather": lambda s, t: dist.gather(x(s), at_root(t), 0),
    "scatter": lambda s, t: dist.scatter(x(t), at_root(s), 0),
    "reduce_scatter": lambda s, t: dist.reduce_scatter(x(t), many(s)),
}
SHAPES: dict[int, list[Shape]] = {
    4: [(4,), (1, 4), (4, 1), (2, 2), (1, 2, 2)],
    6: [(6,), (2, 3), (3, 2), (1, 6), (6, 1)],
}


def called(name: str, shapes: list[Shape]) -> None:
    CALLS[name](shapes[dist.get_rank()])


def crossed(name: str, given: Shape, taken: Shape) -> None:
    ALIKE[name](given, taken)


def different() -> st.SearchStrategy[tuple[Shape, Shape]]:
    """Two shapes of one number of elements."""
    return st.sampled_from(sorted(SHAPES)).flatmap(
        lambda count: st.tuples(*[st.sampled_from(SHAPES[count])] * 2).filter(
            lambda pair: pair[0] != pair[1]
        )
    )


@given(
    name=st.sampled_from(sorted(CALLS)),
    ranks=st.integers(2, 4),
    shapes=different(),
    data=st.data(),
)
def test_another_shape_on_one_rank(
    smp_world: Any, name: str, ranks: int, shapes: tuple[Shape, Shape], data: st.DataObject
) -> None:
    odd = data.draw(st.integers(0, ranks - 1), "odd rank")
    each = [shapes[rank == odd] for rank in range(ranks)]
    report = smp_world.report(called, name, each, ranks=ranks)
    assert report.verdict is VerdictKind.MISMATCH, report.error
    text = str(report.error)
    assert "differs in shape" in text
    assert f"rank {odd}" in text
    if name != "reduce_scatter_single":  # which shows the joined input
        assert all(str(list(shape)) in text for shape in shapes)
    same = smp_world.report(called, name, [shapes[0]] * ranks, ranks=ranks)
    assert same.verdict is VerdictKind.PASSED, same.error


@given(name=st.sampled_from(sorted(ALIKE)), shapes=different())
def test_what_is_written_has_the_shape_of_what_is_read(
    smp_world: Any, name: str, shapes: tuple[Shape, Shape]
) -> None:
    """As Gloo: an error of the rank itself, and no mismatch where all ranks make it."""
    report = smp_world.report(crossed, name, *shapes, ranks=2)
    assert report.verdict is VerdictKind.FAILED, report.error
    assert f"{name}: the output has shape {list(shapes[1])}" in str(report.error)


@pytest.fixture(scope="module")
def on_gloo() -> Iterator[Callable[..., Report]]:
    """Runs a body on rank processes of Gloo."""
    executor = open_backend("gloo", ExecutorOptions(ranks=RANKS))

    def run(body: Callable[..., None], *arguments: object) -> Report:
        job = Job(body=body, arguments=lambda rank: (arguments, {}), timeout=20)
        return executor.open(RANKS).run(job)

    yield run
    executor.close()


#: Of these torch's Gloo has none.
_NOT_GLOO = ("all_gather_coalesced", "all_reduce_coalesced")


@pytest.mark.parametrize("name", [name for name in CALLS if name not in _NOT_GLOO])
def test_another_shape_on_one_rank_of_gloo(on_gloo: Callable[..., Report], name: str) -> None:
    report = on_gloo(called, name, [(1, 4), (4, 1), (1, 4)])
    assert report.verdict is VerdictKind.MISMATCH, report.error
    assert "differs in shape" in str(report.error)
    assert "rank 1" in str(report.error)


def splits() -> None:
    dist.all_to_all_single(torch.zeros(4), torch.ones(4), [2, 1, 1], [2, 2, 1])


@pytest.mark.parametrize("name", [*ALIKE, "all_to_all_single"])
def test_an_error_in_the_arguments_of_all_ranks_of_gloo(
    on_gloo: Callable[..., Report], name: str
) -> None:
    """Such calls fit nobody's; each rank is told by Gloo, early or late."""
    single = name == "all_to_all_single"
    report = on_gloo(splits) if single else on_gloo(crossed, name, (1, 4), (4, 1))
    assert report.verdict is VerdictKind.FAILED, report.error
    assert isinstance(report.error, RuntimeError)
