"""Collectives on 8 ranks of MPI: values from models of a few lines, inputs unique to rank and element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from pytest_smp.ranks.capabilities import DTYPES, REDUCTIONS
from smp_core.transport.mpi import exchange

Tensor = torch.Tensor
OPS = {name: getattr(dist.ReduceOp, name) for name in REDUCTIONS}


def raw(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits: NaNs with payloads, negative zeros, subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def bits(tensor: Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return values


def same(got: Tensor, expected: Tensor, what: object) -> None:
    assert got.dtype == expected.dtype, (what, got.dtype, expected.dtype)
    assert bits(got) == bits(expected), (what, got, expected)


def check_moves_of_every_dtype(world: Any) -> None:
    me, size = world.rank, world.size
    for name in sorted(DTYPES):
        dtype = getattr(torch, name)

        def of(rank: int, number: int = 0, dtype: torch.dtype = dtype) -> Tensor:
            return raw(dtype, (2, 3), 1000 * number + rank)

        def empty(dtype: torch.dtype = dtype, *shape: int) -> Tensor:
            return torch.zeros(shape or (2, 3), dtype=dtype)

        mine = of(me)
        dist.broadcast(mine, 3)
        same(mine, of(3), ("broadcast", name))

        outputs = [empty() for _ in range(size)]
        dist.all_gather(outputs, of(me))
        for rank, output in enumerate(outputs):
            same(output, of(rank), ("all_gather", name))

        whole = empty(dtype, 2 * size, 3)
        dist.all_gather_single(whole, of(me))
        same(
            whole, torch.cat([of(rank).view(torch.uint8) for rank in range(size)]).view(dtype), name
        )

        outputs = [empty() for _ in range(size)]
        dist.gather(of(me), outputs if me == 5 else None, dst=5)
        for rank, output in enumerate(outputs):
            same(output, of(rank) if me == 5 else empty(), ("gather", name))

        mine = empty()
        dist.scatter(mine, [of(4, rank) for rank in range(size)] if me == 4 else None, src=4)
        same(mine, of(4, me), ("scatter", name))

        outputs = [empty() for _ in range(size)]
        dist.all_to_all(outputs, [of(me, rank) for rank in range(size)])
        for rank, output in enumerate(outputs):
            same(output, of(rank, me), ("all_to_all", name))

        mine = empty()
        work = dist.isend(of(me, 1), (me + 1) % size, tag=7)
        assert dist.recv(mine, (me - 1) % size, tag=7) == (me - 1) % size
        work.wait()
        same(mine, of((me - 1) % size, 1), ("send", name))


def exactly(op: str, values: list[int], dtype: torch.dtype) -> Tensor:
    """The result of ``op``, by Python's own numbers, rounded or wrapped once."""
    total: Any = values[0]
    for value in values[1:]:
        total = {
            "SUM": total + value,
            "AVG": total + value,
            "PRODUCT": total * value,
            "MIN": min(total, value),
            "MAX": max(total, value),
            "BAND": total & value,
            "BOR": total | value,
            "BXOR": total ^ value,
        }[op]
    if op == "AVG":
        total = total / len(values)
    if dtype is torch.bool:
        return torch.tensor(bool(total))
    if not dtype.is_floating_point and not dtype.is_complex:
        width = 8 * dtype.itemsize
        total %= 2**width
        if dtype.is_signed and total >= 2 ** (width - 1):
            total -= 2**width
        return torch.tensor(total, dtype=dtype)
    return torch.tensor(float(total)).to(dtype)


def check_reductions_of_every_op_and_dtype(world: Any) -> None:
    me, size = world.rank, world.size
    for op, names in sorted(REDUCTIONS.items()):
        for name in sorted(names):
            dtype = getattr(torch, name)
            small = name == "bool" or "float8" in name

            def number(rank: int, at: int, small: bool = small) -> int:
                return (rank * 5 + at * 3) % 2 + (not small) * ((rank + at) % 3)

            def of(rank: int, first: int, count: int, dtype: torch.dtype = dtype) -> Tensor:
                return torch.tensor([number(rank, first + at) for at in range(count)]).to(dtype)

            def expected(
                first: int, count: int, op: str = op, dtype: torch.dtype = dtype
            ) -> Tensor:
                parts = [
                    exactly(op, [number(rank, first + at) for rank in range(size)], dtype)
                    for at in range(count)
                ]
                flat = [part.reshape(1).view(torch.uint8) for part in parts]
                return torch.cat(flat).view(dtype)

            complex_product = dtype.is_complex and op == "PRODUCT"  # torch refuses it here
            if not complex_product:
                mine = of(me, 0, 5)
                dist.all_reduce(mine, OPS[op])
                same(mine, expected(0, 5), ("all_reduce", op, name))

                mine = of(me, 1, 5)
                dist.reduce(mine, 6, OPS[op])
                same(mine, expected(1, 5) if me == 6 else of(me, 1, 5), ("reduce", op, name))

            mine = of(0, 0, 2)
            dist.reduce_scatter(mine, [of(me, 2 * rank, 2) for rank in range(size)], OPS[op])
            same(mine, expected(2 * me, 2), ("reduce_scatter", op, name))

            mine = of(0, 0, 2)
            dist.reduce_scatter_single(mine, of(me, 0, 2 * size), OPS[op])
            same(mine, expected(2 * me, 2), ("reduce_scatter_single", op, name))


def check_the_order_of_sums_is_the_documented_tree(world: Any) -> None:
    """Also of what goes in two rounds, and where slices of it end. The tree is written out."""
    me = world.rank
    trees: dict[int, Callable[[Callable[[Any, Any], Any], list[Any]], Any]] = {
        8: lambda f, v: f(f(f(v[0], v[1]), f(v[2], v[3])), f(f(v[4], v[5]), f(v[6], v[7]))),
        5: lambda f, v: f(f(f(v[0], v[1]), f(v[2], v[3])), v[4]),
        3: lambda f, v: f(f(v[0], v[1]), v[2]),
    }
    for members in ([*range(8)], [6, 1, 3, 7, 2], [5, 0, 4]):
        group = dist.new_group(members, sort_ranks=False)
        if me in members:
            for dtype in (torch.float32, torch.complex64, torch.bfloat16):
                for count in (5, exchange.LARGE // dtype.itemsize, exchange.LARGE // 2 + 1):
                    for op, combine in (("SUM", torch.add), ("PRODUCT", torch.mul)):
                        if dtype.is_complex and op == "PRODUCT":
                            continue  # torch refuses it here

                        def of(rank: int, dtype: torch.dtype = dtype, count: int = count) -> Tensor:
                            generator = torch.Generator().manual_seed(count + rank)
                            return torch.randn(count, generator=generator, dtype=dtype)

                        wide = torch.float32 if dtype is torch.bfloat16 else dtype
                        values = [of(rank).to(wide) for rank in members]
                        mine = of(me)
                        dist.all_reduce(mine, OPS[op], group)
                        expected = trees[len(members)](combine, values).to(dtype)
                        same_bits = torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))
                        assert same_bits, (members, dtype, count, op)
            dist.destroy_process_group(group)


def guarded(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A block of numbers, and views of 3 x 2 of its elements that lie in it each in another way."""
    block = torch.arange(600.0) + 1000 * seed
    square = block[:400].view(20, 20)
    return block, {
        "column": square[2:5, 3:9:4],
        "transposed": square[10:12, 10:13].T,
        "offset": block[407:413].view(3, 2),
    }


def check_views_are_written_as_they_lie_and_nothing_beside_them(world: Any) -> None:
    me, size = world.rank, world.size

    def of(rank: int) -> Tensor:
        return torch.arange(6.0).view(3, 2) * 10 + rank + 7

    total = torch.stack([of(rank) for rank in range(size)]).sum(0)
    # Rank i's rows are sent by the rank on its left.
    to_left = [3 * ((rank + 1) % size == me) for rank in range(size)]
    to_right = [3 * ((me + 1) % size == rank) for rank in range(size)]
    calls: dict[str, tuple[Callable[[Tensor], object], Callable[[], Tensor]]] = {
        "broadcast": (lambda view: dist.broadcast(view, 2), lambda: of(2)),
        "all_reduce": (lambda view: dist.all_reduce(view), lambda: total),
        "reduce": (lambda view: dist.reduce(view, 1), lambda: total if me == 1 else of(me)),
        "scatter": (
            lambda view: dist.scatter(
                view, [of(r).T.clone().T for r in range(size)] if me == 3 else None, 3
            ),
            lambda: of(me),
        ),
        "recv": (
            lambda view: (dist.isend(of(me), me), dist.irecv(view, me).wait()),
            lambda: of(me),
        ),
        "reduce_scatter_single": (
            lambda view: dist.reduce_scatter_single(view, torch.cat([of(r) for r in range(size)])),
            lambda: of(me) * size,
        ),
        "all_to_all_single": (
            lambda view: dist.all_to_all_single(view, of((me + 1) % size), to_left, to_right),
            lambda: of(me),
        ),
    }
    for name, (call, expected) in calls.items():
        for way in guarded(0)[1]:
            block, views = guarded(me + 1)
            view, before = views[way], block.clone()
            view.copy_(of(me))
            call(view)
            assert torch.equal(view, expected()), (name, way, view, expected())
            view.copy_(guarded(me + 1)[1][way])
            assert torch.equal(block, before), (name, way, "wrote beside the view")


def check_lists_of_views_of_one_tensor(world: Any) -> None:
    me, size = world.rank, world.size
    block = torch.zeros(3, size)
    dist.all_gather(list(block.unbind(1)), torch.arange(3.0) + 10 * me)
    assert torch.equal(block, torch.arange(3.0)[:, None] + 10 * torch.arange(size)), block
    inputs = torch.arange(2.0 * size) + 100 * me
    outputs = torch.zeros(2 * size)
    dist.all_to_all(list(outputs.chunk(size)), list(inputs.chunk(size)))
    expected = torch.cat([torch.arange(2.0) + 2 * me + 100 * rank for rank in range(size)])
    assert torch.equal(outputs, expected)
    in_place = torch.full((size, 2), -1.0)
    in_place[me] = torch.tensor([me, me + 0.5])
    dist.all_gather_single(in_place, in_place[me])
    assert in_place.tolist() == [[rank, rank + 0.5] for rank in range(size)]


def check_uneven_and_empty(world: Any) -> None:
    me, size = world.rank, world.size
    outputs = [torch.zeros(rank) for rank in range(size)]
    dist.all_gather(outputs, torch.arange(float(me)) + 100 * me)
    for rank, output in enumerate(outputs):
        assert torch.equal(output, torch.arange(float(rank)) + 100 * rank)
    # Rank i sends (i + j) % 3 rows to rank j.
    sends = [(me + rank) % 3 for rank in range(size)]
    inputs = torch.arange(float(2 * sum(sends))).view(-1, 2) + 1000 * me
    output = torch.zeros(sum(sends), 2)  # as many as it sends: the table is symmetric
    dist.all_to_all_single(output, inputs, sends, sends)
    expected = []
    for rank in range(size):
        counts = [(rank + other) % 3 for other in range(size)]
        theirs = torch.arange(float(2 * sum(counts))).view(-1, 2) + 1000 * rank
        expected.append(theirs.split(counts)[me])
    assert torch.equal(output, torch.cat(expected))
    for shape in ((0,), (0, 3), (2, 0)):
        nothing = torch.zeros(shape)
        dist.all_reduce(nothing)
        dist.broadcast(nothing, 1)
        dist.all_gather([torch.zeros(shape) for _ in range(size)], nothing)
        dist.all_to_all([torch.zeros(shape) for _ in range(size)], [nothing] * size)
        work = dist.isend(nothing, (me + 1) % size)
        dist.recv(nothing, (me - 1) % size)
        work.wait()
    scalar = torch.tensor(float(me))
    dist.all_reduce(scalar, dist.ReduceOp.MAX)
    assert scalar.shape == ()
    assert scalar.item() == size - 1


def check_coalesced(world: Any) -> None:
    me, size = world.rank, world.size
    tensors = [torch.arange(float(count)) + me for count in (1, 3, 0, 2)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        assert torch.equal(tensor, torch.arange(float(tensor.numel())) * size + 28)
    lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [torch.tensor([me, 0.5]), torch.tensor([-1.0 * me])])
    assert [[t.tolist() for t in each] for each in lists] == [
        [[rank, 0.5], [-rank]] for rank in range(size)
    ]
    whole, parts = [torch.zeros(size), torch.zeros(2 * size)], []
    with dist._coalescing_manager():
        for count, output in enumerate(whole, 1):
            parts.append(torch.full((count,), 10.0 * me + count))
            dist.all_gather_single(output, parts[-1])
    assert whole[1].tolist() == [10.0 * rank + 2 for rank in range(size) for _ in range(2)]
    outputs = [torch.zeros(1), torch.zeros(2)]
    with dist._coalescing_manager():
        for count, output in enumerate(outputs, 1):
            dist.reduce_scatter_single(output, torch.arange(float(count * size)) + me)
    assert outputs[1].tolist() == [(2 * me) * size + 28.0, (2 * me + 1) * size + 28.0]


def check_inputs_stay_and_may_change_after_the_wait(world: Any) -> None:
    me, size = world.rank, world.size
    for count in (3, 50_000):
        mine = torch.full((count,), float(me))
        outputs = [torch.zeros(count) for _ in range(size)]
        dist.all_gather(outputs, mine)
        assert (mine == me).all()
        mine.fill_(-1.0)
        assert all((output == rank).all() for rank, output in enumerate(outputs))
        dist.barrier()


def check_two_calls_of_one_shape_and_many(world: Any) -> None:
    me, size = world.rank, world.size
    for number in range(200):
        value = torch.tensor([float(me + number)])
        if number % 3 == me % 3:
            world.fabric.messenger.progress()
        dist.all_reduce(value)
        assert value.item() == 28 + size * number


def check_a_barrier_waits_for_all(world: Any) -> None:
    """Each rank leaves a file before the barrier: behind it, all are there."""
    folder = world.environment(1).folder
    for number in range(20):
        group = dist.group.WORLD
        (folder / f"{number}-{world.rank}").touch()
        dist.barrier(group)
        assert len(list(folder.glob(f"{number}-*"))) == world.size
        dist.barrier(group)
