"""The rounds of each collective: the bytes that a member writes, and those that it reads.

In ``_gather_rows`` all members read whole rows, in ``_exchange_blocks`` each reads its own block of every row; both go
through the rounds in pieces. Reductions fold the rows of all members in the order of smp_core/reduction.py, so that the
bits are those of `sim`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from smp_core.transport import messages
from smp_core.transport.checked_group import Collective
from smp_core.transport.smddp.flat import Bytes, Target, address, copied_if_shared, read
from smp_core.transport.smddp.folding import fold_rows
from smp_core.transport.smddp.rounds import AHEAD, Ranges, Rounds, Transfer
from smp_core.transport.smddp.segment import row_bytes

# An all_reduce of more bytes goes in two hops: each member reduces a part, and all read the results. Below, each
# member reduces everything.
ONE_HOP_BYTES = 32 * 1024
_LINE = 64  # bytes: parts begin at multiples, so that they are elements of every dtype

# Consumes the piece that begins at a byte, from the rows of all members.
Sink = Callable[[Any, int], None]
# The sizes that a member sends and those that it expects: each a run of equal sizes, and its length.
CallSizes = tuple[tuple[tuple[Any, int], ...], tuple[tuple[Any, int], ...]]


def block_bytes(size: int) -> int:
    """The bytes that a member writes for each of ``size`` others in a round."""
    return row_bytes(size) // size // _LINE * _LINE


def _rounds_of(length: int, piece: int) -> int:
    return max(-(-length // piece), 1)


def _nothing(*_: Any) -> None:
    pass


def _no_ranges(*_: Any) -> Iterable[tuple[int, int]]:
    return ()


def _block_ranges(row: int, block: int, length: int) -> Ranges:
    """The ranges of a row that begins at the byte ``row`` of the slot: a block for each member.

    ``length``: the bytes of each member in all rounds; a block has at most ``block`` of them.
    """

    def ranges(number: int, members: Sequence[int]) -> Iterable[tuple[int, int]]:
        count = min(block, max(length - number * block, 0))
        return [(row + member * block, row + member * block + count) for member in members]

    return ranges


def _gather_rows(
    rounds: Rounds, local: Bytes, length: int, sink: Sink, reader: int | None = None
) -> Transfer:
    """All members read the rows of all, or one ``reader`` does; ``local`` has ``length`` bytes, or none."""
    me, most = rounds.me, rounds.row_bytes

    def ranges(number: int, members: Sequence[int]) -> Iterable[tuple[int, int]]:
        count = min(most, max(local.size - number * most, 0))
        if reader is None or reader in members:
            yield me * most, me * most + count

    def write(number: int, slot: Any) -> None:
        piece = local[number * most : (number + 1) * most]
        slot[me, : piece.size] = piece

    def read_rows(number: int, slot: Any) -> None:
        at = number * most
        sink(slot[:, : min(most, length - at)], at)

    return Transfer(write, read_rows, _rounds_of(length, most), ranges=ranges)


def _broadcast_slot(
    rounds: Rounds, local: Bytes | None, length: int, target: Bytes | None
) -> Transfer:
    """One member writes all of the slot, and all others read it."""
    most = rounds.row_bytes * rounds.size

    def write(number: int, slot: Any) -> None:
        if local is not None:
            piece = local[number * most : (number + 1) * most]
            slot.reshape(-1)[: piece.size] = piece

    def read_rows(number: int, slot: Any) -> None:
        if target is not None:
            place = target[number * most : (number + 1) * most]
            place[:] = slot.reshape(-1)[: place.size]

    def ranges(number: int, members: Sequence[int]) -> Iterable[tuple[int, int]]:
        if local is not None:
            yield 0, min(most, max(local.size - number * most, 0))

    return Transfer(write, read_rows, _rounds_of(length, most), ranges=ranges)


def _scatter_rows(rounds: Rounds, rows: Any, target: Bytes) -> Transfer:
    """One member writes a row of the slot for each, which reads its own."""
    me, most = rounds.me, rounds.row_bytes

    def write(number: int, slot: Any) -> None:
        if rows is not None:
            piece = rows[:, number * most : (number + 1) * most]
            slot[:, : piece.shape[1]] = piece

    def read_rows(number: int, slot: Any) -> None:
        place = target[number * most : (number + 1) * most]
        place[:] = slot[me, : place.size]

    ranges = _no_ranges if rows is None else _block_ranges(0, most, rows.shape[1])
    return Transfer(write, read_rows, _rounds_of(target.size, most), ranges=ranges)


def _exchange_blocks(rounds: Rounds, parts: Sequence[Any], length: int, sink: Sink) -> Transfer:
    """Each member reads the blocks for it. ``parts`` have a row for each member; the rows of all parts, one behind the
    other, are ``length`` bytes, or none.
    """
    size, me, block = rounds.size, rounds.me, block_bytes(rounds.size)
    own, columns = me * block, _Columns(parts)

    def write(number: int, slot: Any) -> None:
        at = number * block
        blocks = slot[me, : size * block].reshape(size, block)
        for part, begin in columns.between(at, at + block):
            blocks[:, begin : begin + part.shape[1]] = part

    def read_rows(number: int, slot: Any) -> None:
        at = number * block
        sink(slot[:, own : own + min(block, length - at)], at)

    ranges = _block_ranges(me * rounds.row_bytes, block, columns.length)
    return Transfer(write, read_rows, _rounds_of(length, block), ranges=ranges)


def _folded(target: Bytes, dtype: torch.dtype, op: str) -> Sink:
    def sink(rows: Any, at: int) -> None:
        if rows.shape[1]:
            fold_rows(rows, dtype, op, target[at : at + rows.shape[1]])

    return sink


class _Columns:
    """Arrays whose rows lie one behind the other: each has consecutive columns of a whole of ``length`` columns."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = arrays
        self._ends = list(itertools.accumulate(each.shape[1] for each in arrays))
        self.length: int = self._ends[-1] if arrays else 0

    def between(self, begin: int, end: int) -> Iterator[tuple[Any, int]]:
        """The parts of the arrays in some columns, and where each begins there."""
        for number in range(bisect.bisect_right(self._ends, begin), len(self._arrays)):
            array, after = self._arrays[number], self._ends[number]
            first = after - array.shape[1]
            if first >= end:
                break
            yield array[:, max(begin - first, 0) : end - first], max(first - begin, 0)


def _rows(targets: Sequence[Any]) -> Sink:
    """``targets`` take consecutive columns of the rows; each has a row for each member."""
    columns = _Columns(targets)

    def sink(rows: Any, at: int) -> None:
        for target, begin in columns.between(at, at + rows.shape[1]):
            target[:] = rows[:, begin : begin + target.shape[1]]

    return sink


def _each(targets: Sequence[Bytes]) -> Sink:
    """``targets``: for each member its bytes, whose numbers may differ."""

    def sink(rows: Any, at: int) -> None:
        for target, row in zip(targets, rows, strict=True):
            place = target[at : at + rows.shape[1]]
            place[:] = row[: place.size]

    return sink


def _then(transfer: Transfer, *targets: Target) -> Transfer:
    def finish() -> None:
        for target in targets:
            target.finish()

    if any(target.copies for target in targets):
        transfer.finish = finish
    return transfer


# The collectives. Each is given the call, whose tensors are checked.


def _barrier(rounds: Rounds, call: Collective) -> Transfer:
    return Transfer(_nothing, _nothing, ranges=_no_ranges)


def _broadcast(rounds: Rounds, call: Collective) -> Transfer:
    if call.root == rounds.me:
        local = read(call.brings)
        return _broadcast_slot(rounds, local, local.size, None)
    target = Target(call.gets)
    return _then(_broadcast_slot(rounds, None, target.bytes.size, target.bytes), target)


def _all_reduce(rounds: Rounds, call: Collective) -> Transfer:
    target, dtype = Target(call.gets), call.brings[0].dtype
    in_place = call.brings is call.gets and not target.copies
    local = target.bytes if in_place else read(call.brings)
    if local.size <= ONE_HOP_BYTES or rounds.size == 1:
        transfer = _gather_rows(rounds, local, local.size, _folded(target.bytes, dtype, call.op))
    else:
        transfer = _two_hops(rounds, local, target.bytes, dtype, call.op)
    return _then(transfer, target)


def _two_hops(rounds: Rounds, local: Bytes, target: Bytes, dtype: torch.dtype, op: str) -> Transfer:
    """A round carries a piece to be reduced, and the reductions of the piece some rounds before."""
    size, me = rounds.size, rounds.me
    # The bytes that each member reduces in a round.
    most = rounds.row_bytes // (size + 1) // _LINE * _LINE
    piece = most * size
    results = rounds.row_bytes - most
    pieces = _rounds_of(local.size, piece)
    ahead = min(AHEAD, pieces)
    reduced = [np.empty(0, np.uint8)] * ahead

    def block_of(length: int) -> int:
        """The bytes of a piece that each member reduces, the last ones perhaps less."""
        return min(most, -(-length // (size * _LINE)) * _LINE)

    def write(number: int, slot: Any) -> None:
        part = local[number * piece : (number + 1) * piece]
        slot[me, : part.size] = part
        result = reduced[number % ahead]
        slot[me, results : results + result.size] = result

    def read_rows(number: int, slot: Any) -> None:
        if number >= ahead:
            gather(target[(number - ahead) * piece : (number - ahead + 1) * piece], slot)
        length = min(piece, local.size - number * piece)
        if length > 0:
            each = block_of(length)
            part = slot[:, me * each : min((me + 1) * each, length)]
            result = reduced[number % ahead] = np.empty(part.shape[1], np.uint8)
            if result.size:
                fold_rows(part, dtype, op, result)

    def gather(place: Bytes, slot: Any) -> None:
        each = block_of(place.size)
        full = place.size // each
        rest = full * each
        place[:rest].reshape(full, each)[:] = slot[:full, results : results + each]
        if rest < place.size:
            place[rest:] = slot[full, results : results + place.size - rest]

    def ranges(number: int, members: Sequence[int]) -> Iterable[tuple[int, int]]:
        row, length = me * rounds.row_bytes, min(piece, max(local.size - number * piece, 0))
        each = block_of(length)
        for member in members:
            yield row + min(member * each, length), row + min((member + 1) * each, length)
        yield row + results, row + results + reduced[number % ahead].size

    transfer = Transfer(write, read_rows, pieces + ahead, ranges=ranges)
    transfer.ahead = ahead
    return transfer


def _reduce(rounds: Rounds, call: Collective) -> Transfer:
    local, dtype = read(call.brings), call.brings[0].dtype
    if call.root != rounds.me:
        return _gather_rows(rounds, local, local.size, _nothing, call.root)
    target = Target(call.gets)
    sink = _folded(target.bytes, dtype, call.op)
    return _then(_gather_rows(rounds, local, local.size, sink, call.root), target)


def _gather(rounds: Rounds, call: Collective) -> Transfer:
    local = read(call.brings)
    if call.root != rounds.me:
        return _gather_rows(rounds, local, local.size, _nothing, call.root)
    targets = [Target([each]) for each in call.gets]
    places = [each.bytes for each in targets]
    local = copied_if_shared(local, places, lambda _: False)
    return _then(_gather_rows(rounds, local, local.size, _each(places), call.root), *targets)


def _all_gather_single(rounds: Rounds, call: Collective) -> Transfer:
    size, local = rounds.size, read(call.brings)
    targets = [Target([each]) for each in call.gets]
    places = [
        target.bytes.reshape(size, value.numel() * value.itemsize)
        for target, value in zip(targets, call.brings, strict=True)
    ]
    if local.size > rounds.row_bytes:
        # In place, a member's input is its own row of the output, which no other member's row is written to.
        own = address(places[0][rounds.me]) if len(places) == 1 else None
        local = copied_if_shared(local, places, lambda _: address(local) == own)
    return _then(_gather_rows(rounds, local, local.size, _rows(places)), *targets)


def _reduce_scatter_single(rounds: Rounds, call: Collective) -> Transfer:
    size, target = rounds.size, Target(call.gets)
    parts = [read([each]).reshape(size, -1) for each in call.brings if each.numel()]
    if target.bytes.size > block_bytes(size):
        # A round is read before the last one is written. No other member reads this one's own row.
        own = address(parts[0][rounds.me]) if len(parts) == 1 else None
        parts = [
            copied_if_shared(each, [target.bytes], lambda place: address(place) == own)
            for each in parts
        ]
    if len({each.dtype for each in call.gets}) > 1:
        return _exchange_mixed(rounds, parts, target, call)
    sink = _folded(target.bytes, call.gets[0].dtype, call.op)
    return _then(_exchange_blocks(rounds, parts, target.bytes.size, sink), target)


def _exchange_mixed(
    rounds: Rounds, parts: Sequence[Any], target: Target, call: Collective
) -> Transfer:
    """Outputs of different dtypes: the rows are kept until each output can be folded in its dtype."""
    kept = np.empty((rounds.size, target.bytes.size), np.uint8)
    transfer = _exchange_blocks(rounds, parts, target.bytes.size, _rows([kept]))

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
    transfer = _exchange_blocks(
        rounds, [rows], length, _folded(padded, call.gets[0].dtype, call.op)
    )

    def finish() -> None:
        target.bytes[:] = padded[: target.bytes.size]
        target.finish()

    transfer.finish = finish
    return transfer


def _scatter(rounds: Rounds, call: Collective) -> Transfer:
    target, rows = Target(call.gets), None
    if call.root == rounds.me:
        rows = np.stack([read([each]) for each in call.brings])
    return _then(_scatter_rows(rounds, rows, target.bytes), target)


# Collectives whose sizes may differ between members exchange them in the first round.


def sizes_of_call(call: Collective) -> CallSizes | None:
    """The sizes of such a call on this member: those that it sends, and those that it expects, as runs."""
    if call.sizes is None:
        return None
    return _runs([tuple(each.shape) for each in call.brings]), _runs(call.sizes)


def _runs(sizes: Sequence[Any]) -> tuple[tuple[Any, int], ...]:
    return tuple((size, len(list(run))) for size, run in itertools.groupby(sizes))


def _sizes(runs: Any) -> list[messages.Size]:
    return [tuple(size) for size, count in runs for _ in range(count)]


def _check_pairs(rounds: Rounds, call: Collective, local: CallSizes) -> int:
    """The most elements that a member sends to another in the call.

    Raises CollectiveMismatchError where a pair of members disagrees in a size.
    """
    if rounds.sizes_equal and len(local[0]) == len(local[1]) == 1:
        (sent, _), (expected, _) = local[0][0], local[1][0]
        if messages.sizes_fit(call.operation, sent, expected):
            return messages.elements(sent)
    gathered = rounds.gathered_sizes()
    sends, expects = ([_sizes(runs[side]) for runs in gathered] for side in (0, 1))
    places = dict.fromkeys(rounds.ranks)
    mismatch = messages.pair_mismatch(call.operation, places, sends, expects)
    if mismatch is not None:
        raise mismatch[0]
    return max(messages.elements(size) for sizes in sends for size in sizes)


def _pairwise(rounds: Rounds, transfer: Transfer, check: Callable[[], int], piece: int) -> Transfer:
    """A transfer whose first round shows the sizes. ``check`` gives the most bytes of a member for another."""
    read_rows = transfer.read

    def read_first(number: int, slot: Any) -> None:
        if number == 0:
            transfer.rounds, transfer.known = _rounds_of(check(), piece), True
        read_rows(number, slot)

    transfer.read, transfer.rounds, transfer.known = read_first, 1, False
    return transfer


def _all_gather(rounds: Rounds, call: Collective, sizes: CallSizes) -> Transfer:
    size, local = rounds.size, read(call.brings)
    targets = [Target(call.gets[member::size]) for member in range(size)]
    places = [each.bytes for each in targets]
    length = max(place.size for place in places)
    if length > rounds.row_bytes:
        own = address(places[rounds.me])
        local = copied_if_shared(
            local, places, lambda place: address(place) == address(local) == own
        )

    def check() -> int:
        _check_pairs(rounds, call, sizes)
        return int(length)

    transfer = _gather_rows(rounds, local, length, _each(places))
    return _then(_pairwise(rounds, transfer, check, rounds.row_bytes), *targets)


def _all_to_all(rounds: Rounds, call: Collective, sizes: CallSizes) -> Transfer:
    block = block_bytes(rounds.size)

    def check() -> int:
        elements = _check_pairs(rounds, call, sizes)
        return elements * call.brings[0].itemsize

    if call.whole is not None and all(len(runs) == 1 for runs in sizes):
        target = Target([call.whole[1]])
        transfer = _all_to_all_even(rounds, call.whole[0], target.bytes)
        targets = [target]
    else:
        targets = [Target([each]) for each in call.gets]
        transfer = _all_to_all_uneven(rounds, call.brings, [each.bytes for each in targets])
    return _then(_pairwise(rounds, transfer, check, block), *targets)


def _all_to_all_even(rounds: Rounds, whole: torch.Tensor, target: Bytes) -> Transfer:
    """This member's parts are equal, and rows of one tensor; those of others may be longer."""
    size, me, block = rounds.size, rounds.me, block_bytes(rounds.size)
    flat = read([whole])
    if flat.size > block * size:
        flat = copied_if_shared(flat, [target], lambda _: False)
    parts, places = (each.reshape(size, each.size // size) for each in (flat, target))
    own = me * block

    def write(number: int, slot: Any) -> None:
        piece = parts[:, number * block : (number + 1) * block]
        slot[me, : size * block].reshape(size, block)[:, : piece.shape[1]] = piece

    def read_rows(number: int, slot: Any) -> None:
        place = places[:, number * block : (number + 1) * block]
        place[:] = slot[:, own : own + place.shape[1]]

    return Transfer(
        write, read_rows, ranges=_block_ranges(me * rounds.row_bytes, block, parts.shape[1])
    )


def _all_to_all_uneven(
    rounds: Rounds, brings: Sequence[torch.Tensor], places: Sequence[Bytes]
) -> Transfer:
    me, block = rounds.me, block_bytes(rounds.size)
    parts = [read([each]) for each in brings]
    if max(each.size for each in [*parts, *places]) > block:
        parts = [copied_if_shared(part, places, lambda _: False) for part in parts]
    own = me * block

    def write(number: int, slot: Any) -> None:
        own, at = slot[me], number * block
        for member, part in enumerate(parts):
            piece = part[at : at + block]
            own[member * block : member * block + piece.size] = piece

    def read_rows(number: int, slot: Any) -> None:
        at = number * block
        for row, place in zip(slot, places, strict=True):
            piece = place[at : at + block]
            piece[:] = row[own : own + piece.size]

    def ranges(number: int, members: Sequence[int]) -> Iterable[tuple[int, int]]:
        for member in members:
            ((begin, end),) = _block_ranges(me * rounds.row_bytes, block, parts[member].size)(
                number, [member]
            )
            yield begin, end

    return Transfer(write, read_rows, ranges=ranges)


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
_UNEVEN: dict[str, Callable[[Rounds, Collective, CallSizes], Transfer]] = {
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
}


def transfer_of(rounds: Rounds, call: Collective, sizes: CallSizes | None) -> Transfer:
    """The transfer of a call. ``sizes``: its ``sizes_of_call``."""
    if sizes is not None:
        return _UNEVEN[call.operation](rounds, call, sizes)
    return _TRANSFERS[call.operation](rounds, call)
