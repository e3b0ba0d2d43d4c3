"""The steps of each collective: which bytes a member writes in a round, and which it reads.

In ``_share`` all members read one row of bytes, in ``_deal`` each reads a part of its own; both go through the
rounds in pieces. Reductions fold the rows of all members in the order of smp_core/reduction.py, so that the bits are
those of `sim`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from smp_core.transport import messages
from smp_core.transport.checked_group import Collective
from smp_core.transport.smddp.flat import Bytes, Target, apart, read
from smp_core.transport.smddp.folding import fold_rows
from smp_core.transport.smddp.rounds import Rounds, Steps
from smp_core.transport.smddp.segment import LARGEST

# An all_reduce of more bytes goes in two hops: each member reduces a part, and all read the results. Below, each
# member reduces everything.
SMALL = 32 * 1024
_LINE = 64  # bytes: parts begin at multiples, so that they are elements of every dtype

# Writes the piece that begins at a byte, from the rows of all members.
Take = Callable[[Any, int], None]


def cell_of(size: int) -> int:
    """The bytes that a member writes for each of ``size`` others in a round."""
    return LARGEST // size // _LINE * _LINE


def _share(rounds: Rounds, mine: Bytes, length: int, take: Take) -> Steps:
    """All read what some write; ``mine`` has ``length`` bytes, or none."""
    at = 0
    while True:
        end = min(at + LARGEST, length)
        piece = mine[at:end]
        rounds.own()[: piece.size] = piece
        yield end >= length
        take(rounds.came()[:, : end - at], at)
        at = end
        if at >= length:
            return


def _spread(rounds: Rounds, mine: Bytes | None, length: int, target: Bytes | None = None) -> Steps:
    """One member writes all of the slot, and all others read it."""
    most, at = LARGEST * rounds.size, 0
    while True:
        end = min(at + most, length)
        if mine is not None:
            rounds.slot().reshape(-1)[: end - at] = mine[at:end]
        yield end >= length
        if target is not None:
            target[at:end] = rounds.came().reshape(-1)[: end - at]
        at = end
        if at >= length:
            return


def _hand_out(rounds: Rounds, rows: Any, target: Bytes) -> Steps:
    """One member writes a row of the slot for each, which reads its own."""
    at = 0
    while True:
        end = min(at + LARGEST, target.size)
        if rows is not None:
            rounds.slot()[:, : end - at] = rows[:, at:end]
        yield end >= target.size
        target[at:end] = rounds.came()[rounds.me, : end - at]
        at = end
        if at >= target.size:
            return


def _deal(rounds: Rounds, parts: Any, length: int, take: Take) -> Steps:
    """Each reads what the others write for it. ``parts``: for each member ``length`` bytes; or None."""
    size, cell, at = rounds.size, cell_of(rounds.size), 0
    mine = rounds.me * cell
    while True:
        end = min(at + cell, length)
        if parts is not None:
            rounds.own()[: size * cell].reshape(size, cell)[:, : end - at] = parts[:, at:end]
        yield end >= length
        take(rounds.came()[:, mine : mine + end - at], at)
        at = end
        if at >= length:
            return


def _nothing(rows: Any, at: int) -> None:
    pass


def _folded(target: Bytes, dtype: torch.dtype, op: str) -> Take:
    def take(rows: Any, at: int) -> None:
        if rows.shape[1]:
            fold_rows(rows, dtype, op, target[at : at + rows.shape[1]])

    return take


def _rows(targets: Any) -> Take:
    """``targets``: a row for each member."""

    def take(rows: Any, at: int) -> None:
        targets[:, at : at + rows.shape[1]] = rows

    return take


def _each(targets: Sequence[Bytes]) -> Take:
    """``targets``: for each member its bytes, whose numbers may differ."""

    def take(rows: Any, at: int) -> None:
        for target, row in zip(targets, rows, strict=True):
            place = target[at : at + rows.shape[1]]
            place[:] = row[: place.size]

    return take


def _then(steps: Steps, *targets: Target) -> Steps:
    yield from steps
    for target in targets:
        target.finish()


# The collectives. Each is given the call, whose tensors are checked.


def _barrier(rounds: Rounds, call: Collective) -> Steps:
    return _share(rounds, read(()), 0, _nothing)


def _broadcast(rounds: Rounds, call: Collective) -> Steps:
    assert call.root is not None
    if call.root == rounds.me:
        mine = read(call.brings)
        return _spread(rounds, mine, mine.size)
    target = Target(call.gets)
    return _then(_spread(rounds, None, target.bytes.size, target.bytes), target)


def _all_reduce(rounds: Rounds, call: Collective) -> Steps:
    mine, target, dtype = read(call.brings), Target(call.gets), call.brings[0].dtype
    if mine.size <= SMALL or rounds.size == 1:
        steps = _share(rounds, mine, mine.size, _folded(target.bytes, dtype, call.op))
    else:
        steps = _two_hops(rounds, mine, target.bytes, dtype, call.op)
    return _then(steps, target)


def _two_hops(rounds: Rounds, mine: Bytes, target: Bytes, dtype: torch.dtype, op: str) -> Steps:
    """Each round carries a piece to be reduced, and the reduction of the piece before."""
    size, me = rounds.size, rounds.me
    most = LARGEST // (size + 1) // _LINE * _LINE  # bytes that each member reduces in a round
    at, reduced = 0, np.empty(0, np.uint8)
    waiting, waiting_cell = (
        target[:0],
        0,
    )  # the place of the piece before, and of each member's part of it
    while True:
        end = min(at + most * size, mine.size)
        cell = min(most, -(-(end - at) // (size * _LINE)) * _LINE)
        own = rounds.own()
        own[: end - at] = mine[at:end]
        own[LARGEST - most :][: reduced.size] = reduced
        yield at == end
        came = rounds.came()
        if waiting.size:
            results = came[:, LARGEST - most :][:, :waiting_cell]
            full = waiting.size // waiting_cell
            rest = full * waiting_cell
            waiting[:rest].reshape(full, waiting_cell)[:] = results[:full]
            if rest < waiting.size:
                waiting[rest:] = results[full, : waiting.size - rest]
        if at == end:
            return
        part = came[:, me * cell : min((me + 1) * cell, end - at)]
        reduced = np.empty(part.shape[1], np.uint8)
        if reduced.size:
            fold_rows(part, dtype, op, reduced)
        waiting, waiting_cell, at = target[at:end], cell, end


def _reduce(rounds: Rounds, call: Collective) -> Steps:
    mine, dtype = read(call.brings), call.brings[0].dtype
    if call.root != rounds.me:
        return _share(rounds, mine, mine.size, _nothing)
    target = Target(call.gets)
    steps = _share(rounds, mine, mine.size, _folded(target.bytes, dtype, call.op))
    return _then(steps, target)


def _gather(rounds: Rounds, call: Collective) -> Steps:
    mine = read(call.brings)
    if call.root != rounds.me:
        return _share(rounds, mine, mine.size, _nothing)
    targets = [Target([each]) for each in call.gets]
    mine = apart(mine, [each.bytes for each in targets], lambda _: False)
    return _then(_share(rounds, mine, mine.size, _each([each.bytes for each in targets])), *targets)


def _all_gather_single(rounds: Rounds, call: Collective) -> Steps:
    size, mine = rounds.size, read(call.brings)
    if len(call.gets) == 1:
        target = Target(call.gets)
        rows = target.bytes.reshape(size, mine.size)
        if mine.size > LARGEST:
            place = rows[rounds.me].ctypes.data
            mine = apart(mine, [target.bytes], lambda _: mine.ctypes.data == place)
        return _then(_share(rounds, mine, mine.size, _rows(rows)), target)
    flat = np.empty((size, mine.size), np.uint8)
    return _then_split(
        _share(rounds, mine, mine.size, _rows(flat)), flat, call.gets, call.brings, size
    )


def _then_split(
    steps: Steps, flat: Any, gets: Sequence[Any], brings: Sequence[Any], size: int
) -> Steps:
    yield from steps
    at = 0
    for output, value in zip(gets, brings, strict=True):
        end = at + value.numel() * value.itemsize
        rows = torch.from_numpy(flat[:, at:end].reshape(-1)).view(output.dtype)
        output.data.copy_(rows.view(output.shape))
        at = end


def _reduce_scatter_single(rounds: Rounds, call: Collective) -> Steps:
    size, target = rounds.size, Target(call.gets)
    parts = [read([each]).reshape(size, -1) if each.numel() else None for each in call.brings]
    there = [each for each in parts if each is not None]
    rows = there[0] if len(there) == 1 else np.concatenate(there, 1) if there else None
    return _reduce_rows(rounds, call, rows, target)


def _reduce_rows(rounds: Rounds, call: Collective, rows: Any, target: Target) -> Steps:
    length = target.bytes.size
    if rows is not None and length > cell_of(rounds.size):
        rows = apart(rows, [target.bytes], lambda _: False)
    take = _folded(target.bytes, call.gets[0].dtype, call.op)
    return _then(_deal(rounds, rows, length, take), target)


def _reduce_scatter(rounds: Rounds, call: Collective) -> Steps:
    """The members' parts may differ in size: rows are as long as the longest."""
    size, target = rounds.size, Target(call.gets)
    parts = [read(call.brings[member::size]) for member in range(size)]
    length = max(part.size for part in parts)
    rows = np.zeros((size, length), np.uint8)
    for row, part in zip(rows, parts, strict=True):
        row[: part.size] = part
    padded = np.empty(length, np.uint8)
    steps = _deal(rounds, rows, length, _folded(padded, call.gets[0].dtype, call.op))
    return _then(_then_cut(steps, padded, target.bytes), target)


def _then_cut(steps: Steps, padded: Bytes, target: Bytes) -> Steps:
    yield from steps
    target[:] = padded[: target.size]


def _scatter(rounds: Rounds, call: Collective) -> Steps:
    assert call.root is not None
    target, rows = Target(call.gets), None
    if call.root == rounds.me:
        rows = np.stack([read([each]) for each in call.brings])
    return _then(_hand_out(rounds, rows, target.bytes), target)


# Collectives whose sizes may differ between members tell them in the first round.


def told_sizes(call: Collective) -> tuple[Any, ...] | None:
    """The sizes that a member tells of such a call: those that it sends, and those that it expects, as runs."""
    if call.sizes is None:
        return None
    return _runs([tuple(each.shape) for each in call.brings]), _runs(call.sizes)


def _runs(sizes: Sequence[Any]) -> tuple[tuple[Any, int], ...]:
    return tuple((size, len(list(run))) for size, run in itertools.groupby(sizes))


def _sizes(runs: Any) -> list[messages.Size]:
    return [
        size if isinstance(size, int) else tuple(size) for size, count in runs for _ in range(count)
    ]


def _fits(sent: messages.Size, expected: messages.Size) -> bool:
    return (messages.elements(sent) if isinstance(expected, int) else sent) == expected


def _check_pairs(rounds: Rounds, call: Collective, ranks: Sequence[int], gathers: bool) -> int:
    """The most elements that a member sends to another in the call.

    Raises CollectiveMismatchError where a pair of members disagrees in a size.
    """
    size, mine = rounds.size, told_sizes(call)
    assert mine is not None
    if rounds.alike and len(mine[0]) == len(mine[1]) == 1:
        (sent, _), (expected, _) = mine[0][0], mine[1][0]
        if _fits(sent, expected):
            return messages.elements(sent)
    told = rounds.told()
    sends = [_sizes(sent) for sent, _ in told]
    for receiver, (_, runs) in enumerate(told):
        for index, expected in enumerate(_sizes(runs)):
            sender = index % size
            sent = sends[sender][index // size if gathers else receiver]
            if not _fits(sent, expected):
                source, target = ((ranks[each], "", None) for each in (sender, receiver))
                count = messages.elements(sent) if isinstance(expected, int) else sent
                raise messages.pair_mismatch(call.operation, source, count, target, expected)
    return max(messages.elements(each) for sent in sends for each in sent)


def _all_gather(rounds: Rounds, call: Collective, ranks: Sequence[int]) -> Steps:
    size, mine = rounds.size, read(call.brings)
    targets = [Target(call.gets[member::size]) for member in range(size)]
    places = [each.bytes for each in targets]
    if max(place.size for place in places) > LARGEST:
        mine = apart(mine, places, lambda target: target.ctypes.data == mine.ctypes.data)
    take, at, length = _each(places), 0, 0
    while True:
        piece = mine[at : at + LARGEST]
        rounds.own()[: piece.size] = piece
        yield at > 0 and at + LARGEST >= length
        if at == 0:
            _check_pairs(rounds, call, ranks, gathers=True)
            length = max(place.size for place in places)
        take(rounds.came()[:, : min(LARGEST, length - at)], at)
        at += LARGEST
        if at >= length:
            break
    for target in targets:
        target.finish()


def _all_to_all(rounds: Rounds, call: Collective, ranks: Sequence[int]) -> Steps:
    if call.whole is not None and all(len(runs) == 1 for runs in told_sizes(call) or ()):
        return _all_to_all_alike(rounds, call, call.whole, ranks)
    return _all_to_all_uneven(rounds, call, ranks)


def _all_to_all_alike(
    rounds: Rounds, call: Collective, whole: tuple[Any, Any], ranks: Sequence[int]
) -> Steps:
    """This member's parts are equal, and rows of one tensor; those of others may be longer."""
    size, cell = rounds.size, cell_of(rounds.size)
    target = Target([whole[1]])
    places = target.bytes.reshape(size, -1) if target.bytes.size else np.empty((size, 0), np.uint8)
    parts = read([whole[0]])
    if parts.size > cell * size:
        parts = apart(parts, [target.bytes], lambda _: False)
    parts = parts.reshape(size, -1) if parts.size else np.empty((size, 0), np.uint8)
    at, length, mine = 0, 0, rounds.me * cell
    while True:
        piece = parts[:, at : at + cell]
        rounds.own()[: size * cell].reshape(size, cell)[:, : piece.shape[1]] = piece
        yield at > 0 and at + cell >= length
        if at == 0:
            length = whole[0].itemsize * _check_pairs(rounds, call, ranks, gathers=False)
        place = places[:, at : at + cell]
        place[:] = rounds.came()[:, mine : mine + place.shape[1]]
        at += cell
        if at >= length:
            break
    target.finish()


def _all_to_all_uneven(rounds: Rounds, call: Collective, ranks: Sequence[int]) -> Steps:
    cell = cell_of(rounds.size)
    targets = [Target([each]) for each in call.gets]
    places = [each.bytes for each in targets]
    parts = [read([each]) for each in call.brings]
    item = call.brings[0].itemsize
    if max(each.size for each in [*parts, *places]) > cell:
        parts = [apart(part, places, lambda _: False) for part in parts]
    take, at, length, mine = _each(places), 0, 0, rounds.me * cell
    while True:
        own = rounds.own()
        for member, part in enumerate(parts):
            piece = part[at : at + cell]
            own[member * cell : member * cell + piece.size] = piece
        yield at > 0 and at + cell >= length
        if at == 0:
            length = item * _check_pairs(rounds, call, ranks, gathers=False)
        take(rounds.came()[:, mine : mine + min(cell, length - at)], at)
        at += cell
        if at >= length:
            break
    for target in targets:
        target.finish()


_STEPS: dict[str, Callable[[Rounds, Collective], Steps]] = {
    "barrier": _barrier,
    "monitored_barrier": _barrier,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce,
    "reduce": _reduce,
    "all_gather_single": _all_gather_single,
    "all_gather_single_coalesced": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": _reduce_scatter_single,
    "scatter": _scatter,
    "gather": _gather,
}
_UNEVEN: dict[str, Callable[[Rounds, Collective, Sequence[int]], Steps]] = {
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
}


def steps_of(rounds: Rounds, call: Collective, ranks: Sequence[int]) -> Steps:
    """The steps of a call. ``ranks``: the world ranks of the members."""
    if call.operation in _UNEVEN:
        return _UNEVEN[call.operation](rounds, call, ranks)
    return _STEPS[call.operation](rounds, call)
