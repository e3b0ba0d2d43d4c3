"""The rounds of each collective: which bytes a member writes, and which it reads.

In ``_share`` all members read one row of bytes, in ``_deal`` each reads a part of its own; both go through the
rounds in pieces. Reductions fold the rows of all members in the order of smp_core/reduction.py, so that the bits are
those of `sim`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from smp_core.transport import messages
from smp_core.transport.checked_group import Collective
from smp_core.transport.smddp.flat import Bytes, Target, address, apart, read
from smp_core.transport.smddp.folding import fold_rows
from smp_core.transport.smddp.rounds import AHEAD, Parts, Rounds, Transfer
from smp_core.transport.smddp.segment import LARGEST

# An all_reduce of more bytes goes in two hops: each member reduces a part, and all read the results. Below, each
# member reduces everything.
SMALL = 32 * 1024
_LINE = 64  # bytes: parts begin at multiples, so that they are elements of every dtype

# Takes the piece that begins at a byte, from the rows of all members.
Take = Callable[[Any, int], None]
# The sizes that a member sends and those that it expects: each a run of equal sizes, and its length.
ToldSizes = tuple[tuple[tuple[Any, int], ...], tuple[tuple[Any, int], ...]]


def cell_of(size: int) -> int:
    """The bytes that a member writes for each of ``size`` others in a round."""
    return LARGEST // size // _LINE * _LINE


def _rounds_of(length: int, piece: int) -> int:
    return max(-(-length // piece), 1)


def _nothing(*_: Any) -> None:
    pass


def _no_parts(*_: Any) -> Iterable[tuple[int, int]]:
    return ()


def _cells(row: int, cell: int, length: int) -> Parts:
    """The parts of a row that begins at a byte of the slot, and has cells for ``length`` bytes of each member."""

    def parts(number: int, members: Sequence[int]) -> Iterable[tuple[int, int]]:
        count = min(cell, max(length - number * cell, 0))
        return [(row + member * cell, row + member * cell + count) for member in members]

    return parts


def _share(
    rounds: Rounds, mine: Bytes, length: int, take: Take, reader: int | None = None
) -> Transfer:
    """All read what some write, or one ``reader`` does; ``mine`` has ``length`` bytes, or none."""
    me = rounds.me

    def parts(number: int, members: Sequence[int]) -> Iterable[tuple[int, int]]:
        count = min(LARGEST, max(mine.size - number * LARGEST, 0))
        if reader is None or reader in members:
            yield me * LARGEST, me * LARGEST + count

    def write(number: int, slot: Any) -> None:
        piece = mine[number * LARGEST : (number + 1) * LARGEST]
        slot[me, : piece.size] = piece

    def come(number: int, slot: Any) -> None:
        at = number * LARGEST
        take(slot[:, : min(LARGEST, length - at)], at)

    return Transfer(write, come, _rounds_of(length, LARGEST), parts=parts)


def _spread(rounds: Rounds, mine: Bytes | None, length: int, target: Bytes | None) -> Transfer:
    """One member writes all of the slot, and all others read it."""
    most = LARGEST * rounds.size

    def write(number: int, slot: Any) -> None:
        if mine is not None:
            piece = mine[number * most : (number + 1) * most]
            slot.reshape(-1)[: piece.size] = piece

    def come(number: int, slot: Any) -> None:
        if target is not None:
            place = target[number * most : (number + 1) * most]
            place[:] = slot.reshape(-1)[: place.size]

    def parts(number: int, members: Sequence[int]) -> Iterable[tuple[int, int]]:
        if mine is not None:
            yield 0, min(most, max(mine.size - number * most, 0))

    return Transfer(write, come, _rounds_of(length, most), parts=parts)


def _hand_out(rounds: Rounds, rows: Any, target: Bytes) -> Transfer:
    """One member writes a row of the slot for each, which reads its own."""
    me = rounds.me

    def write(number: int, slot: Any) -> None:
        if rows is not None:
            piece = rows[:, number * LARGEST : (number + 1) * LARGEST]
            slot[:, : piece.shape[1]] = piece

    def come(number: int, slot: Any) -> None:
        place = target[number * LARGEST : (number + 1) * LARGEST]
        place[:] = slot[me, : place.size]

    parts = _no_parts if rows is None else _cells(0, LARGEST, rows.shape[1])
    return Transfer(write, come, _rounds_of(target.size, LARGEST), parts=parts)


def _deal(rounds: Rounds, parts: Any, length: int, take: Take) -> Transfer:
    """Each reads what the others write for it. ``parts``: for each member ``length`` bytes; or None."""
    size, me, cell = rounds.size, rounds.me, cell_of(rounds.size)
    mine = me * cell

    def write(number: int, slot: Any) -> None:
        if parts is not None:
            piece = parts[:, number * cell : (number + 1) * cell]
            slot[me, : size * cell].reshape(size, cell)[:, : piece.shape[1]] = piece

    def come(number: int, slot: Any) -> None:
        at = number * cell
        take(slot[:, mine : mine + min(cell, length - at)], at)

    ships = _no_parts if parts is None else _cells(me * LARGEST, cell, parts.shape[1])
    return Transfer(write, come, _rounds_of(length, cell), parts=ships)


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


def _then(transfer: Transfer, *targets: Target) -> Transfer:
    def finish() -> None:
        for target in targets:
            target.finish()

    if any(target.copies for target in targets):
        transfer.finish = finish
    return transfer


# The collectives. Each is given the call, whose tensors are checked.


def _barrier(rounds: Rounds, call: Collective) -> Transfer:
    return Transfer(_nothing, _nothing, parts=_no_parts)


def _broadcast(rounds: Rounds, call: Collective) -> Transfer:
    if call.root == rounds.me:
        mine = read(call.brings)
        return _spread(rounds, mine, mine.size, None)
    target = Target(call.gets)
    return _then(_spread(rounds, None, target.bytes.size, target.bytes), target)


def _all_reduce(rounds: Rounds, call: Collective) -> Transfer:
    target, dtype = Target(call.gets), call.brings[0].dtype
    in_place = call.brings is call.gets and not target.copies
    mine = target.bytes if in_place else read(call.brings)
    if mine.size <= SMALL or rounds.size == 1:
        transfer = _share(rounds, mine, mine.size, _folded(target.bytes, dtype, call.op))
    else:
        transfer = _two_hops(rounds, mine, target.bytes, dtype, call.op)
    return _then(transfer, target)


def _two_hops(rounds: Rounds, mine: Bytes, target: Bytes, dtype: torch.dtype, op: str) -> Transfer:
    """A round carries a piece to be reduced, and the reductions of the piece some rounds before."""
    size, me = rounds.size, rounds.me
    most = LARGEST // (size + 1) // _LINE * _LINE  # bytes that each member reduces in a round
    piece = most * size
    results = LARGEST - most
    pieces = _rounds_of(mine.size, piece)
    ahead = min(AHEAD, pieces)
    reduced = [np.empty(0, np.uint8)] * ahead

    def cell(length: int) -> int:
        """The bytes of a piece that each member reduces, the last ones perhaps less."""
        return min(most, -(-length // (size * _LINE)) * _LINE)

    def write(number: int, slot: Any) -> None:
        part = mine[number * piece : (number + 1) * piece]
        slot[me, : part.size] = part
        result = reduced[number % ahead]
        slot[me, results : results + result.size] = result

    def come(number: int, slot: Any) -> None:
        if number >= ahead:
            gather(target[(number - ahead) * piece : (number - ahead + 1) * piece], slot)
        length = min(piece, mine.size - number * piece)
        if length > 0:
            each = cell(length)
            part = slot[:, me * each : min((me + 1) * each, length)]
            result = reduced[number % ahead] = np.empty(part.shape[1], np.uint8)
            if result.size:
                fold_rows(part, dtype, op, result)

    def gather(place: Bytes, slot: Any) -> None:
        each = cell(place.size)
        full = place.size // each
        rest = full * each
        place[:rest].reshape(full, each)[:] = slot[:full, results : results + each]
        if rest < place.size:
            place[rest:] = slot[full, results : results + place.size - rest]

    def parts(number: int, members: Sequence[int]) -> Iterable[tuple[int, int]]:
        row, length = me * LARGEST, min(piece, max(mine.size - number * piece, 0))
        each = cell(length)
        for member in members:
            yield row + min(member * each, length), row + min((member + 1) * each, length)
        yield row + results, row + results + reduced[number % ahead].size

    transfer = Transfer(write, come, pieces + ahead, parts=parts)
    transfer.ahead = ahead
    return transfer


def _reduce(rounds: Rounds, call: Collective) -> Transfer:
    mine, dtype = read(call.brings), call.brings[0].dtype
    if call.root != rounds.me:
        return _share(rounds, mine, mine.size, _nothing, call.root)
    target = Target(call.gets)
    take = _folded(target.bytes, dtype, call.op)
    return _then(_share(rounds, mine, mine.size, take, call.root), target)


def _gather(rounds: Rounds, call: Collective) -> Transfer:
    mine = read(call.brings)
    if call.root != rounds.me:
        return _share(rounds, mine, mine.size, _nothing, call.root)
    targets = [Target([each]) for each in call.gets]
    places = [each.bytes for each in targets]
    mine = apart(mine, places, lambda _: False)
    return _then(_share(rounds, mine, mine.size, _each(places), call.root), *targets)


def _all_gather_single(rounds: Rounds, call: Collective) -> Transfer:
    size, mine = rounds.size, read(call.brings)
    if len(call.gets) == 1:
        target = Target(call.gets)
        rows = target.bytes.reshape(size, mine.size)
        if mine.size > LARGEST:
            place = address(rows[rounds.me])
            mine = apart(mine, [target.bytes], lambda _: address(mine) == place)
        return _then(_share(rounds, mine, mine.size, _rows(rows)), target)
    flat = np.empty((size, mine.size), np.uint8)
    transfer = _share(rounds, mine, mine.size, _rows(flat))
    transfer.finish = lambda: _split(flat, call.gets, call.brings)
    return transfer


def _split(flat: Any, gets: Sequence[Any], brings: Sequence[Any]) -> None:
    at = 0
    for output, value in zip(gets, brings, strict=True):
        end = at + value.numel() * value.itemsize
        rows = torch.from_numpy(flat[:, at:end].reshape(-1)).view(output.dtype)
        output.data.copy_(rows.view(output.shape))
        at = end


def _reduce_scatter_single(rounds: Rounds, call: Collective) -> Transfer:
    size, target = rounds.size, Target(call.gets)
    parts = [read([each]).reshape(size, -1) if each.numel() else None for each in call.brings]
    there = [each for each in parts if each is not None]
    rows = there[0] if len(there) == 1 else np.concatenate(there, 1) if there else None
    if rows is not None and target.bytes.size > cell_of(size):
        place = address(rows[rounds.me])  # which no other member reads
        rows = apart(rows, [target.bytes], lambda each: address(each) == place)
    if len({each.dtype for each in call.gets}) > 1:
        return _deal_mixed(rounds, rows, target, call)
    take = _folded(target.bytes, call.gets[0].dtype, call.op)
    return _then(_deal(rounds, rows, target.bytes.size, take), target)


def _deal_mixed(rounds: Rounds, rows: Any, target: Target, call: Collective) -> Transfer:
    """Outputs of different dtypes: the rows are kept until each output can be folded as what it is."""
    kept = np.empty((rounds.size, target.bytes.size), np.uint8)
    transfer = _deal(rounds, rows, target.bytes.size, _rows(kept))

    def finish() -> None:
        at = 0
        for output in call.gets:
            end = at + output.numel() * output.itemsize
            result = np.empty(end - at, np.uint8)  # aligned, as a part of the target may not be
            _folded(result, output.dtype, call.op)(np.ascontiguousarray(kept[:, at:end]), 0)
            target.bytes[at:end] = result
            at = end
        target.finish()

    transfer.finish = finish
    return transfer


def _reduce_scatter(rounds: Rounds, call: Collective) -> Transfer:
    """The members' parts may differ in size: rows are as long as the longest."""
    size, target = rounds.size, Target(call.gets)
    parts = [read(call.brings[member::size]) for member in range(size)]
    length = max(part.size for part in parts)
    rows = np.zeros((size, length), np.uint8)
    for row, part in zip(rows, parts, strict=True):
        row[: part.size] = part
    padded = np.empty(length, np.uint8)
    transfer = _deal(rounds, rows, length, _folded(padded, call.gets[0].dtype, call.op))

    def finish() -> None:
        target.bytes[:] = padded[: target.bytes.size]
        target.finish()

    transfer.finish = finish
    return transfer


def _scatter(rounds: Rounds, call: Collective) -> Transfer:
    target, rows = Target(call.gets), None
    if call.root == rounds.me:
        rows = np.stack([read([each]) for each in call.brings])
    return _then(_hand_out(rounds, rows, target.bytes), target)


# Collectives whose sizes may differ between members tell them in the first round.


def told_sizes(call: Collective) -> ToldSizes | None:
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


def _check_pairs(rounds: Rounds, call: Collective, mine: ToldSizes, gathers: bool) -> int:
    """The most elements that a member sends to another in the call.

    Raises CollectiveMismatchError where a pair of members disagrees in a size.
    """
    size, ranks = rounds.size, rounds.ranks
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


def _pairwise(rounds: Rounds, transfer: Transfer, check: Callable[[], int], piece: int) -> Transfer:
    """A transfer whose first round shows the sizes. ``check`` gives the most bytes of a member for another."""
    come = transfer.read

    def come_first(number: int, slot: Any) -> None:
        if number == 0:
            transfer.rounds, transfer.known = _rounds_of(check(), piece), True
        come(number, slot)

    transfer.read, transfer.rounds, transfer.known = come_first, 1, False
    return transfer


def _all_gather(rounds: Rounds, call: Collective, sizes: ToldSizes) -> Transfer:
    size, mine = rounds.size, read(call.brings)
    targets = [Target(call.gets[member::size]) for member in range(size)]
    places = [each.bytes for each in targets]
    length = max(place.size for place in places)
    if length > LARGEST:
        own = address(places[rounds.me])
        mine = apart(mine, places, lambda place: address(place) == address(mine) == own)

    def check() -> int:
        _check_pairs(rounds, call, sizes, gathers=True)
        return int(length)

    transfer = _share(rounds, mine, length, _each(places))
    return _then(_pairwise(rounds, transfer, check, LARGEST), *targets)


def _all_to_all(rounds: Rounds, call: Collective, sizes: ToldSizes) -> Transfer:
    cell = cell_of(rounds.size)

    def check() -> int:
        elements = _check_pairs(rounds, call, sizes, gathers=False)
        return elements * call.brings[0].itemsize

    if call.whole is not None and all(len(runs) == 1 for runs in sizes):
        target = Target([call.whole[1]])
        transfer = _all_to_all_alike(rounds, call.whole[0], target.bytes)
        targets = [target]
    else:
        targets = [Target([each]) for each in call.gets]
        transfer = _all_to_all_uneven(rounds, call.brings, [each.bytes for each in targets])
    return _then(_pairwise(rounds, transfer, check, cell), *targets)


def _all_to_all_alike(rounds: Rounds, whole: torch.Tensor, target: Bytes) -> Transfer:
    """This member's parts are equal, and rows of one tensor; those of others may be longer."""
    size, me, cell = rounds.size, rounds.me, cell_of(rounds.size)
    flat = read([whole])
    if flat.size > cell * size:
        flat = apart(flat, [target], lambda _: False)
    parts, places = (each.reshape(size, each.size // size) for each in (flat, target))
    mine = me * cell

    def write(number: int, slot: Any) -> None:
        piece = parts[:, number * cell : (number + 1) * cell]
        slot[me, : size * cell].reshape(size, cell)[:, : piece.shape[1]] = piece

    def come(number: int, slot: Any) -> None:
        place = places[:, number * cell : (number + 1) * cell]
        place[:] = slot[:, mine : mine + place.shape[1]]

    return Transfer(write, come, parts=_cells(me * LARGEST, cell, parts.shape[1]))


def _all_to_all_uneven(
    rounds: Rounds, brings: Sequence[torch.Tensor], places: Sequence[Bytes]
) -> Transfer:
    me, cell = rounds.me, cell_of(rounds.size)
    parts = [read([each]) for each in brings]
    if max(each.size for each in [*parts, *places]) > cell:
        parts = [apart(part, places, lambda _: False) for part in parts]
    mine = me * cell

    def write(number: int, slot: Any) -> None:
        own, at = slot[me], number * cell
        for member, part in enumerate(parts):
            piece = part[at : at + cell]
            own[member * cell : member * cell + piece.size] = piece

    def come(number: int, slot: Any) -> None:
        at = number * cell
        for row, place in zip(slot, places, strict=True):
            piece = place[at : at + cell]
            piece[:] = row[mine : mine + piece.size]

    def ships(number: int, members: Sequence[int]) -> Iterable[tuple[int, int]]:
        for member in members:
            ((begin, end),) = _cells(me * LARGEST, cell, parts[member].size)(number, [member])
            yield begin, end

    return Transfer(write, come, parts=ships)


_TRANSFERS: dict[str, Callable[[Rounds, Collective], Transfer]] = {
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
_UNEVEN: dict[str, Callable[[Rounds, Collective, ToldSizes], Transfer]] = {
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
}


def transfer_of(rounds: Rounds, call: Collective, sizes: ToldSizes | None) -> Transfer:
    """The transfer of a call. ``sizes``: its ``told_sizes``."""
    if sizes is not None:
        return _UNEVEN[call.operation](rounds, call, sizes)
    return _TRANSFERS[call.operation](rounds, call)
