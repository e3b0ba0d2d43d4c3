"""The memory of asynchronous operations on `sim`: poisoned outputs, copied inputs, races."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from pytest_smp.ranks.protocols import Report, VerdictKind
from pytest_smp.strategies.numbers import ALL
from smp_core.errors import ArgumentError, RaceError

Issue = Callable[[torch.Tensor, torch.Tensor], Any]


def pair(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor that an operation reads, and the one that it writes: 2 ranks, 4 elements."""
    return torch.arange(4.0) + 10 * rank, torch.zeros(4)


def peer() -> int:
    return 1 - dist.get_rank()


#: By name: an operation that reads its first tensor, with what else it writes.
READS: dict[str, Issue] = {
    "all_gather": lambda a, b: dist.all_gather(list(b.view(2, 2)), a[:2], async_op=True),
    "all_gather_single": lambda a, b: dist.all_gather_single(b, a[:2], async_op=True),
    "reduce_scatter": lambda a, b: dist.reduce_scatter(b[:2], list(a.view(2, 2)), async_op=True),
    "reduce_scatter_single": lambda a, b: dist.reduce_scatter_single(b[:2], a, async_op=True),
    "all_to_all": lambda a, b: dist.all_to_all(
        list(b.view(2, 2)), list(a.view(2, 2)), async_op=True
    ),
    "all_to_all_single": lambda a, b: dist.all_to_all_single(b, a, async_op=True),
    "gather": lambda a, b: dist.gather(
        a[:2], list(b.view(2, 2)) if dist.get_rank() == 0 else None, dst=0, async_op=True
    ),
    "scatter": lambda a, b: dist.scatter(
        b[:2], list(a.view(2, 2)) if dist.get_rank() == 0 else None, src=0, async_op=True
    ),
    "reduce": lambda a, b: dist.reduce(a if dist.get_rank() else b, dst=0, async_op=True),
    "broadcast": lambda a, b: dist.broadcast(b if dist.get_rank() else a, src=0, async_op=True),
}
WRITES = {**READS, "all_reduce": lambda a, b: dist.all_reduce(b, async_op=True)}


def race(report: Report) -> str:
    """The text of a verdict on a race."""
    assert report.verdict is VerdictKind.RACE, report
    assert isinstance(report.error, RaceError)
    return str(report.error)


@pytest.mark.parametrize("name", WRITES)
def test_outputs_are_poisoned_until_they_are_waited_for(smp_world: Any, name: str) -> None:
    def body() -> tuple[list[float], list[float]]:
        a, b = pair(dist.get_rank())
        work = WRITES[name](a, b)
        before = b.tolist()
        dist.barrier()  # by now all have called: it changes nothing
        assert [*map(math.isnan, b.tolist())] == [*map(math.isnan, before)]
        work.wait()
        return before, b.tolist()

    written = 2 if name in ("reduce_scatter", "reduce_scatter_single", "scatter") else 4
    for rank, (before, after) in enumerate(smp_world.run(body, ranks=2)):
        writes = {"gather": rank == 0, "reduce": rank == 0, "broadcast": rank == 1}.get(name, True)
        expected = written if writes else 0
        assert [*map(math.isnan, before)] == [True] * expected + [False] * (4 - expected)
        assert not any(map(math.isnan, after))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_poison_of_every_dtype(smp_world: Any, dtype: torch.dtype) -> None:
    def body() -> bool:
        if dist.get_rank() == 0:
            dist.send(torch.ones(3, dtype=dtype), 1)
            return True
        target = torch.ones(3, 2, dtype=dtype)[:, 0]
        work = dist.irecv(target, 0)
        bits = target.contiguous().view(torch.uint8).tolist()
        poisoned: bool = (
            bool(target.double().isnan().all())
            if dtype.is_floating_point
            else bool(target.isnan().all())
            if dtype.is_complex
            else bits == ([0] * 3 if dtype is torch.bool else [0xA5] * 3 * dtype.itemsize)
        )
        work.wait()
        return poisoned and bool((target == torch.ones(3, dtype=dtype)).all())

    if "float8" in str(dtype):  # torch has no comparison for these
        body = _float8(dtype)
    assert smp_world.run(body, ranks=2) == [True, True]


def _float8(dtype: torch.dtype) -> Callable[[], bool]:
    def body() -> bool:
        if dist.get_rank() == 0:
            dist.send(torch.ones(3).to(dtype), 1)
            return True
        target = torch.ones(3, 2).to(dtype)[:, 0]
        work = dist.irecv(target, 0)
        poisoned = bool(target.float().isnan().all())
        work.wait()
        return poisoned and target.float().tolist() == [1, 1, 1]

    return body


@pytest.mark.parametrize("name", READS)
def test_an_input_that_changes_in_flight_is_a_race(smp_world: Any, name: str) -> None:
    changer = 0 if name in ("scatter", "broadcast") else 1

    def body() -> None:
        a, b = pair(dist.get_rank())
        work = READS[name](a, b)
        if dist.get_rank() == changer:
            a[0] += 1
        work.wait()

    text = race(smp_world.report(body, ranks=2))
    assert text.startswith(f"race: rank {changer}: an input of {name} was written to while")
    assert "work = READS[name](a, b)" in text or "lambda a, b" in text


@pytest.mark.parametrize("name", WRITES)
def test_an_output_that_changes_in_flight_is_a_race(smp_world: Any, name: str) -> None:
    changer = 0 if name in ("gather", "reduce") else 1

    def body() -> None:
        a, b = pair(dist.get_rank())
        work = WRITES[name](a, b)
        if dist.get_rank() == changer:
            b[0] = 1
        work.wait()

    text = race(smp_world.report(body, ranks=2))
    assert text.startswith(f"race: rank {changer}: the output of {name} was written to while")


def test_what_the_others_get_is_what_was_there_at_issue(smp_world: Any) -> None:
    # And the race is found all the same, by the rank that made it.
    seen: list[list[float]] = []

    def body() -> None:
        mine, out = torch.ones(2), torch.zeros(2)
        if dist.get_rank() == 0:
            work = dist.isend(mine, 1)
            mine.fill_(2)
            dist.barrier()
            work.wait()
        else:
            dist.barrier()
            dist.recv(out, 0)
            seen.append(out.tolist())

    race(smp_world.report(body, ranks=2))
    assert seen == [[1, 1]]


def overlapping() -> dict[str, tuple[Callable[[torch.Tensor], Any], bool]]:
    """Two operations on parts of one tensor of 2 x 4 elements; whether they race."""

    def two(first: Callable[[torch.Tensor], Any], second: Callable[[torch.Tensor], Any]) -> Any:
        return lambda base: [first(base), second(base)]

    def reduce(cut: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return lambda base: dist.all_reduce(cut(base), async_op=True)

    def send(cut: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return lambda base: dist.all_gather(
            [torch.zeros(4)] * 0 or rows(), cut(base), async_op=True
        )

    def rows() -> list[torch.Tensor]:
        return [torch.zeros(4), torch.zeros(4)]

    return {
        "the same row is written twice": (
            two(reduce(lambda b: b[0]), reduce(lambda b: b[0])),
            True,
        ),
        "two rows": (two(reduce(lambda b: b[0]), reduce(lambda b: b[1])), False),
        "columns between columns": (
            two(reduce(lambda b: b[:, ::2]), reduce(lambda b: b[:, 1::2])),
            False,
        ),
        "columns that share one": (
            two(reduce(lambda b: b[:, ::2]), reduce(lambda b: b[:, 2:])),
            True,
        ),
        "the same row is read twice": (two(send(lambda b: b[0]), send(lambda b: b[0])), False),
        "what is read is written": (two(send(lambda b: b[0]), reduce(lambda b: b)), True),
        "what is written is read": (two(reduce(lambda b: b), send(lambda b: b[1])), True),
        "nothing": (two(reduce(lambda b: b[:0]), reduce(lambda b: b)), False),
        "a repeated row is read": (
            two(send(lambda b: b[0, :1].expand(4)), reduce(lambda b: b[1])),
            False,
        ),
    }


@pytest.mark.parametrize("name", overlapping())
def test_two_operations_on_one_memory(smp_world: Any, name: str) -> None:
    issue, races = overlapping()[name]

    def body() -> None:
        for work in issue(torch.zeros(2, 4)):
            work.wait()

    report = smp_world.report(body, ranks=2)
    if races:
        text = race(report)
        assert "uses memory of" in text
        assert "which is still in flight" in text
    else:
        assert report.verdict is VerdictKind.PASSED, report.error


def test_a_synchronous_call_on_memory_in_flight_is_a_race(smp_world: Any) -> None:
    def body() -> None:
        tensor = torch.ones(2)
        work = dist.all_reduce(tensor, async_op=True)
        dist.broadcast(tensor, src=0)
        work.wait()

    assert "broadcast uses memory of all_reduce" in race(smp_world.report(body, ranks=2))


def test_an_input_may_be_its_own_slot_of_the_output(smp_world: Any) -> None:
    def body() -> list[float]:
        out = torch.zeros(2, 2)
        mine = out[dist.get_rank()]
        mine.fill_(dist.get_rank() + 1)
        dist.all_gather_single(out, mine, async_op=True).wait()
        values: list[float] = out.flatten().tolist()
        return values

    assert smp_world.run(body, ranks=2) == [[1, 1, 2, 2]] * 2


def test_memory_is_free_again_after_the_wait(smp_world: Any) -> None:
    def body() -> list[float]:
        tensor = torch.ones(1)
        for _ in range(3):
            work = dist.all_reduce(tensor, async_op=True)
            while not work.is_completed():
                pass
            tensor += 1
            work.wait()  # again: nothing is written, and nothing is a race
        return tensor.tolist()  # type: ignore[no-any-return]

    assert smp_world.run(body, ranks=2) == [[15.0]] * 2


def test_a_failure_names_what_was_in_flight(smp_world: Any) -> None:
    def body() -> None:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        assert tensor.item() == 2, work

    error = smp_world.report(body, ranks=2).error
    (note,) = [note for note in error.__notes__ if note.startswith("in flight on rank 0")]
    assert "all_reduce" in note
    assert "work = dist.all_reduce(tensor, async_op=True)" in note


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_arithmetic_on_poison_is_a_race(smp_world: Any, dtype: torch.dtype) -> None:
    # The element is not a number before, and not a number after, but has other bits.
    def body() -> None:
        tensor = torch.ones(5, dtype=dtype)
        work = dist.all_reduce(tensor, async_op=True)
        tensor /= 2
        work.wait()

    assert "the output of all_reduce" in race(smp_world.report(body, ranks=2))


def test_memory_that_is_freed_in_flight_is_a_race(smp_world: Any) -> None:
    def body() -> None:
        mine, out = torch.ones(4), torch.zeros(8)
        work = dist.all_gather_single(out, mine, async_op=True)
        mine.untyped_storage().resize_(0)  # as FSDP frees memory
        work.wait()

    assert "memory of an input of all_gather_single was freed" in race(
        smp_world.report(body, ranks=2)
    )


def test_one_memory_behind_two_storages(smp_world: Any) -> None:
    def body() -> None:
        array = np.zeros(8, "f4")
        work = dist.all_reduce(torch.from_numpy(array), async_op=True)
        dist.all_reduce(torch.from_numpy(array[2:]))
        work.wait()

    assert "all_reduce uses memory of all_reduce" in race(smp_world.report(body, ranks=2))


@pytest.mark.parametrize(
    "call",
    [
        lambda t: dist.all_gather([t[:2]] * 2, t[2:4]),
        lambda t: dist.all_gather([t[:2], t[1:3]], t[4:6]),
        lambda t: dist.all_to_all([t[:2], t[1:3]], [t[4:6], t[6:]]),
        lambda t: dist.all_reduce(t.as_strided((2, 2), (1, 1))),
        lambda t: dist.all_reduce(t[:1].expand(2)),
    ],
    ids=["one twice", "two that meet", "two of all_to_all", "diagonals", "a repeated one"],
)
def test_outputs_that_share_memory_are_refused(smp_world: Any, call: Any) -> None:
    report = smp_world.report(lambda: call(torch.zeros(8)), ranks=2)
    assert isinstance(report.error, ArgumentError)
    assert "share memory" in str(report.error) or "overlaps itself" in str(report.error)


def test_views_that_only_look_entangled_are_outputs(smp_world: Any) -> None:
    def body() -> None:
        base = torch.zeros(4, 6)
        dist.all_gather([base[:, ::2], base[:, 1::2]], torch.ones(4, 3))
        dist.all_reduce(base.t()[::2, 1:])
        dist.all_reduce(torch.zeros(5, 4).as_strided((2, 3), (10, 3)))

    assert smp_world.report(body, ranks=2).verdict is VerdictKind.PASSED


def test_thousands_in_flight(smp_world: Any) -> None:
    # All against all took half a minute.
    def body() -> float:
        base = torch.ones(8, 500)
        works = [dist.all_reduce(base[:, at], async_op=True) for at in range(500)]
        works += [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2000)]
        for work in works:
            work.wait()
        return base.sum().item()

    assert smp_world.run(body, ranks=2) == [8000.0] * 2
