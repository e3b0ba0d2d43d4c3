"""Layouts on `sim`: strided, offset, transposed, expanded and empty tensors give the same values as
contiguous ones, and the memory between a view's elements stays as it was (G1 to G6, B001 to
B011).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import distributed as dist

SIZE, ROWS, COLUMNS = 3, 2, 3
RANKS = range(SIZE)
GUARD = -7777.0
Table = list[list[float]]


def _contiguous(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    storage = torch.full((rows, columns), GUARD)
    return storage, storage


def _offset(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    storage = torch.full((rows * columns + 9,), GUARD)
    return storage, storage[5 : 5 + rows * columns].view(rows, columns)


def _strided(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    storage = torch.full((2 * rows + 1, 3 * columns + 1), GUARD)
    return storage, storage[1::2, 1::3]


def _transposed(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    storage = torch.full((columns + 2, rows + 3), GUARD)
    return storage, storage.t()[1 : 1 + rows, 1 : 1 + columns]


def _expanded(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    storage = torch.full((1, columns), GUARD)
    return storage, storage.expand(rows, columns)


OUTPUT_LAYOUTS: dict[str, Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]] = {
    "contiguous": _contiguous,
    "offset": _offset,
    "strided": _strided,
    "transposed": _transposed,
}
INPUT_LAYOUTS = {**OUTPUT_LAYOUTS, "expanded": _expanded}


def table(layout: str, rank: int, slot: int, rows: int = ROWS) -> Table:
    """The elements of an input: a value of its own in each element that has memory of its own."""
    return [
        [
            float(1 + c + COLUMNS * (0 if layout == "expanded" else r) + 50 * slot + 500 * rank)
            for c in range(COLUMNS)
        ]
        for r in range(rows)
    ]


class Buffers:
    """One rank's tensors in one call, with what their storages must look like afterwards."""

    def __init__(self, input_layout: str, output_layout: str) -> None:
        self.input_layout, self.output_layout = input_layout, output_layout
        self._inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.outputs: list[torch.Tensor] = []
        self._storages: list[torch.Tensor] = []

    def given(self, slot: int, rows: int = ROWS) -> torch.Tensor:
        storage, view = INPUT_LAYOUTS[self.input_layout](rows, COLUMNS)
        content = torch.tensor(table(self.input_layout, dist.get_rank(), slot, rows))
        if self.input_layout == "expanded":
            storage.copy_(content[:1])
        else:
            view.copy_(content)
        self._inputs.append((storage, storage.clone()))
        return view

    def room(self, rows: int = ROWS, slot: int | None = None) -> torch.Tensor:
        """An output; filled first for a collective that works in place."""
        storage, view = OUTPUT_LAYOUTS[self.output_layout](rows, COLUMNS)
        view.fill_(-1.0)
        if slot is not None:
            view.copy_(torch.tensor(table(self.output_layout, dist.get_rank(), slot, rows)))
        self._storages.append(storage)
        self.outputs.append(view)
        return view

    def check(self) -> list[Table]:
        """The outputs' values; raises if anything else was written."""
        result: list[Table] = [view.tolist() for view in self.outputs]
        for storage, before in self._inputs:
            assert torch.equal(storage, before), "an input was written"
        for storage, view in zip(self._storages, self.outputs, strict=True):
            view.fill_(GUARD)
            assert bool((storage == GUARD).all()), "memory outside of an output was written"
        return result


def add(*tables: Table) -> Table:
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]


# Each collective: the call, and what a rank's outputs must hold, where `before(rank, slot)` is the
# content of an input and `inside(rank, slot)` that of a tensor that is worked on in place.


def _broadcast(b: Buffers) -> None:
    dist.broadcast(b.room(slot=0), src=1)


def _all_reduce(b: Buffers) -> None:
    dist.all_reduce(b.room(slot=0))


def _reduce(b: Buffers) -> None:
    dist.reduce(b.room(slot=0), dst=2)


def _all_gather(b: Buffers) -> None:
    dist.all_gather([b.room() for _ in RANKS], b.given(0))


def _all_gather_single(b: Buffers) -> None:
    dist.all_gather_single(b.room(SIZE * ROWS), b.given(0))


def _reduce_scatter(b: Buffers) -> None:
    dist.reduce_scatter(b.room(), [b.given(slot) for slot in RANKS])


def _reduce_scatter_single(b: Buffers) -> None:
    dist.reduce_scatter_single(b.room(), b.given(0, SIZE * ROWS))


def _scatter(b: Buffers) -> None:
    inputs = [b.given(slot) for slot in RANKS] if dist.get_rank() == 1 else None
    dist.scatter(b.room(), inputs, src=1)


def _gather(b: Buffers) -> None:
    outputs = [b.room() for _ in RANKS] if dist.get_rank() == 1 else None
    dist.gather(b.given(0), outputs, dst=1)


def _all_to_all(b: Buffers) -> None:
    dist.all_to_all([b.room() for _ in RANKS], [b.given(slot) for slot in RANKS])


def _all_to_all_single(b: Buffers) -> None:
    rank = dist.get_rank()
    sent = [(rank + 2 * target) % 3 for target in RANKS]
    received = [(source + 2 * rank) % 3 for source in RANKS]
    dist.all_to_all_single(b.room(sum(received)), b.given(0, sum(sent)), received, sent)


def _send_and_receive(b: Buffers) -> None:
    if dist.get_rank() == 0:
        dist.send(b.given(0), 2)
    if dist.get_rank() == 2:
        dist.recv(b.room(), 0)


def _rows_of_all_to_all(given: Any, rank: int) -> Table:
    rows: Table = []
    for source in RANKS:
        sent = [(source + 2 * target) % 3 for target in RANKS]
        start = sum(sent[:rank])
        rows += given(source, 0, sum(sent))[start : start + sent[rank]]
    return rows


Given = Callable[..., Table]
CALLS: list[tuple[Callable[[Buffers], None], Callable[[int, Given, Given], list[Table]]]] = [
    (_broadcast, lambda rank, given, inside: [inside(1, 0)]),
    (_all_reduce, lambda rank, given, inside: [add(*(inside(r, 0) for r in RANKS))]),
    (
        _reduce,
        lambda rank, given, inside: [
            add(*(inside(r, 0) for r in RANKS)) if rank == 2 else inside(rank, 0)
        ],
    ),
    (_all_gather, lambda rank, given, inside: [given(r, 0) for r in RANKS]),
    (_all_gather_single, lambda rank, given, inside: [[*chain(*(given(r, 0) for r in RANKS))]]),
    (_reduce_scatter, lambda rank, given, inside: [add(*(given(r, rank) for r in RANKS))]),
    (
        _reduce_scatter_single,
        lambda rank, given, inside: [
            add(*(given(r, 0, SIZE * ROWS) for r in RANKS))[rank * ROWS : (rank + 1) * ROWS]
        ],
    ),
    (_scatter, lambda rank, given, inside: [given(1, rank)]),
    (_gather, lambda rank, given, inside: [given(r, 0) for r in RANKS] if rank == 1 else []),
    (_all_to_all, lambda rank, given, inside: [given(r, rank) for r in RANKS]),
    (_all_to_all_single, lambda rank, given, inside: [_rows_of_all_to_all(given, rank)]),
    (_send_and_receive, lambda rank, given, inside: [given(0, 0)] if rank == 2 else []),
]


@pytest.mark.parametrize("output_layout", OUTPUT_LAYOUTS)
@pytest.mark.parametrize("input_layout", INPUT_LAYOUTS)
@pytest.mark.parametrize(("call", "oracle"), CALLS, ids=[call.__name__ for call, _ in CALLS])
def test_values_and_guards(
    smp_world: Any, call: Any, oracle: Any, input_layout: str, output_layout: str
) -> None:
    def body() -> list[Table]:
        buffers = Buffers(input_layout, output_layout)
        call(buffers)
        return buffers.check()

    def given(rank: int, slot: int, rows: int = ROWS) -> Table:
        return table(input_layout, rank, slot, rows)

    def inside(rank: int, slot: int) -> Table:
        return table(output_layout, rank, slot)

    expected = [oracle(rank, given, inside) for rank in RANKS]
    assert smp_world.run(body, ranks=SIZE) == expected


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (2, 1, 0, 3)], ids=str)
def test_scalars_and_empty_tensors(smp_world: Any, shape: tuple[int, ...]) -> None:
    """B011, B013: nothing to move is still a call that all ranks make."""

    def body() -> None:
        rank = dist.get_rank()

        def like(number: float) -> torch.Tensor:
            return torch.full(shape, float(number))

        def same(tensor: torch.Tensor, number: float) -> None:
            assert tensor.shape == shape
            assert torch.equal(tensor, like(number))

        mine = like(rank)
        dist.broadcast(mine, src=2)
        same(mine, 2)
        mine = like(rank + 1)
        dist.all_reduce(mine)
        same(mine, 6)
        mine = like(rank + 1)
        dist.reduce(mine, dst=1)
        same(mine, 6 if rank == 1 else rank + 1)
        outputs = [like(-1) for _ in RANKS]
        dist.all_gather(outputs, like(rank))
        for other in RANKS:
            same(outputs[other], other)
        inputs = [like(10 * rank + slot) for slot in RANKS]
        mine = like(-1)
        dist.reduce_scatter(mine, inputs)
        same(mine, 30 + 3 * rank)
        dist.scatter(mine, inputs if rank == 2 else None, src=2)
        same(mine, 20 + rank)
        dist.gather(like(rank), outputs if rank == 0 else None, dst=0)
        dist.all_to_all(outputs, inputs)
        for other in RANKS:
            same(outputs[other], 10 * other + rank)
        stacked = torch.full((SIZE, *shape), -1.0)
        dist.all_gather_single(stacked, like(rank))
        for other in RANKS:
            same(stacked[other], other)
        dist.reduce_scatter_single(mine, torch.stack(inputs))
        same(mine, 30 + 3 * rank)
        dist.all_to_all_single(stacked, torch.stack(inputs))
        for other in RANKS:
            same(stacked[other], 10 * other + rank)

    smp_world.run(body, ranks=SIZE)


def test_all_to_all_single_of_a_scalar_in_a_group_of_one(smp_world: Any) -> None:
    def body() -> float:
        output = torch.tensor(-1.0)
        dist.all_to_all_single(output, torch.tensor(5.0))
        return output.item()

    assert smp_world.run(body, ranks=1) == [5.0]


# Aliases.


def test_outputs_may_be_chunks_of_one_buffer(smp_world: Any) -> None:
    """B008: chunks share a storage and differ in their offset."""

    def body() -> tuple[list[float], list[float]]:
        rank = dist.get_rank()
        gathered, exchanged = torch.full((7,), GUARD), torch.full((7,), GUARD)
        inputs = list(torch.arange(1.0, 7.0).add(10 * rank).chunk(SIZE))
        dist.all_gather(list(gathered[:6].chunk(SIZE)), inputs[0])
        dist.all_to_all(list(exchanged[:6].chunk(SIZE)), inputs)
        return gathered.tolist(), exchanged.tolist()

    for rank, (gathered, exchanged) in enumerate(smp_world.run(body, ranks=SIZE)):
        assert gathered == [1, 2, 11, 12, 21, 22, GUARD]
        first, second = 1 + 2 * rank, 2 + 2 * rank
        assert exchanged == [first, second, 10 + first, 10 + second, 20 + first, 20 + second, GUARD]


def test_an_input_may_lie_in_its_own_output(smp_world: Any) -> None:
    """In place, as FSDP2 gathers; exchanging in place needs all inputs read before any write."""

    def body() -> tuple[Any, ...]:
        rank = dist.get_rank()
        buffer = torch.full((SIZE, 2), -1.0)
        buffer[rank] = torch.tensor([1.0, 2.0]) + 10 * rank
        dist.all_gather_single(buffer, buffer[rank])
        listed = torch.full((SIZE, 2), -1.0)
        listed[rank] = torch.tensor([1.0, 2.0]) + 10 * rank
        dist.all_gather(list(listed), listed[rank])
        elsewhere = torch.full((SIZE, 2), -1.0)  # the input lies where the next rank's goes
        elsewhere[(rank + 1) % SIZE] = torch.tensor([1.0, 2.0]) + 10 * rank
        dist.all_gather(list(elsewhere), elsewhere[(rank + 1) % SIZE])
        exchanged = torch.arange(1.0, 4.0) + 10 * rank
        dist.all_to_all_single(exchanged, exchanged)
        summed = torch.arange(1.0, 4.0) + 10 * rank
        dist.reduce_scatter_single(summed[rank : rank + 1], summed)
        scattered = torch.arange(1.0, 4.0)
        dist.scatter(
            scattered[1:2], [scattered[i : i + 1] for i in (2, 1, 0)] if rank == 0 else None, src=0
        )
        return tuple(
            each.tolist() for each in (buffer, listed, elsewhere, exchanged, summed, scattered)
        )

    for rank, got in enumerate(smp_world.run(body, ranks=SIZE)):
        rows = [[1, 2], [11, 12], [21, 22]]
        own = [1 + 10 * rank, 2 + 10 * rank, 3 + 10 * rank]
        total = [33, 36, 39]
        assert got == (
            rows,
            rows,
            rows,
            [1 + rank, 11 + rank, 21 + rank],
            own[:rank] + total[rank : rank + 1] + own[rank + 1 :],
            [1, [3, 2, 1][rank], 3],
        )


def test_all_ranks_may_share_nothing_afterwards(smp_world: Any) -> None:
    """Received tensors are copies: writing them on one rank changes no other rank's."""

    def body() -> list[list[float]]:
        rank = dist.get_rank()
        mine = torch.arange(3.0) + 10 * rank
        outputs = [torch.empty(3) for _ in RANKS]
        flat = torch.empty(3 * SIZE)
        dist.all_gather(outputs, mine)
        dist.all_gather_single(flat, mine)
        dist.broadcast(mine, src=0)
        dist.barrier()
        kept = [each.tolist() for each in (*outputs, flat, mine)]
        for each in (*outputs, flat, mine):
            each.fill_(-rank)
        dist.barrier()
        assert all(bool((each == -rank).all()) for each in (*outputs, flat, mine))
        return kept

    rows = [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    expected = [*rows, [0, 1, 2, 10, 11, 12, 20, 21, 22], [0, 1, 2]]
    assert smp_world.run(body, ranks=SIZE) == [expected] * SIZE


def test_requires_grad_tensors_are_moved_and_stay_leaves(smp_world: Any) -> None:
    """A parameter can be broadcast: DDP does it."""

    def body() -> tuple[list[float], bool, Any]:
        parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]) + dist.get_rank())
        dist.broadcast(parameter, src=1)
        dist.all_reduce(parameter)
        return parameter.tolist(), parameter.is_leaf, parameter.grad_fn

    assert smp_world.run(body, ranks=2) == [([4.0, 6.0], True, None)] * 2


# A tensor that cannot be written is an error of the rank that passed it.


@pytest.mark.parametrize(
    "call",
    [
        lambda good, bad: dist.all_reduce(bad),
        lambda good, bad: dist.broadcast(bad, src=0),
        lambda good, bad: dist.reduce(bad, dst=1),
        lambda good, bad: dist.all_gather([good, bad, good], good.clone()),
        lambda good, bad: dist.reduce_scatter(bad, [good, good, good]),
        lambda good, bad: dist.all_to_all([bad, good, good], [good.clone()] * 3),
        lambda good, bad: dist.scatter(bad, None, src=0),
        lambda good, bad: dist.recv(bad, 0),
    ],
    ids=[
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "scatter",
        "recv",
    ],
)
def test_an_output_that_overlaps_itself_is_an_error_of_its_own_rank(
    smp_world: Any, call: Any
) -> None:
    """Not of the rank that happens to call last."""

    def body() -> None:
        if dist.get_rank() == 1:
            call(torch.zeros(2, 3), torch.zeros(1, 3).expand(2, 3))
        else:
            dist.barrier()

    report = smp_world.report(body, ranks=SIZE)
    assert (report.root, str(report.verdict)) == (1, "failed")
    assert isinstance(report.error, ValueError)
    assert "overlap" in str(report.error)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.ones(2, 2).to_sparse(), lambda: torch.empty(2, device="meta")],
    ids=["sparse", "meta"],
)
def test_other_kinds_of_tensor_are_refused_by_name(smp_world: Any, make: Any) -> None:
    def body() -> None:
        dist.all_reduce(make())

    report = smp_world.report(body, ranks=2)
    assert report.root == 0
    assert "this backend moves dense CPU tensors, not torch." in str(report.error)
