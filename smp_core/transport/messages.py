"""The texts of verdicts: the words of `sim`, from plain values instead of its live objects."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Hashable, Iterable, Mapping, Sequence

from smp_core.errors import CollectiveMismatchError
from smp_core.transport.diagnosis import ranks_text
from smp_core.transport.stack_frames import Place

Fields = Sequence[tuple[str, object]]
Size = int | tuple[int, ...]  # of a tensor: how many elements, or its shape
Made = tuple[int, str, Place | None]  # a call: by which rank, in words, where


def call_text(operation: str, fields: Fields) -> str:
    """``all_reduce(reduce op=SUM, dtype=float32, shape=[4])``."""
    return f"{operation}({', '.join(f'{name}={value}' for name, value in fields)})"


def object_call_text(call: str, group: str, to: Sequence[int], source: int | None) -> str:
    """``smp.send(world rank 1)``, ``smp.broadcast(group WORLD)``, ``smp.recv_from(world rank 0)``; a
    call that all members join is its name alone.
    """
    if source is not None:
        return f"{call}(world rank {source})"
    if call == "smp.send":
        return f"{call}(world rank {to[0]})"
    return f"{call}(group {group})" if to or call == "smp.broadcast" else call


def post_text(sends: bool, peer: int | None, dtype: object, shape: object, tag: int) -> str:
    """``recv from rank 0 (float32, shape [2], tag 0)``; None is any rank."""
    verb = "send to" if sends else "recv from"
    whom = "any rank" if peer is None else f"rank {peer}"
    return f"{verb} {whom} ({dtype}, shape {shape}, tag {tag})"


def group_text(name: str, ranks: Sequence[int]) -> str:
    """A group in messages: its name, and for one that is not the world its ranks, in its order."""
    if name == "WORLD":
        return name
    if name.startswith("smp:"):  # what torch.distributed calls a group of the API: smp:DP_GROUP:0
        name = name.split(":")[1]
    in_order = f"ranks {', '.join(map(str, ranks))} in this order"
    members = ranks_text(ranks) if list(ranks) == sorted(ranks) else in_order
    return f"{name} ({members})"


def never_destroyed(name: str, ranks: Sequence[int], place: Place | None) -> str:
    """The text on a process group that a rank has left."""
    return f"process group {name} of ranks {[*ranks]} was never destroyed{at(place)}"


def never_joined(call: str, absent: str) -> str:
    """The text on a collective call that some members of its group have not made."""
    return f"{call} was never joined by {absent}"


def left(items: Iterable[tuple[int, str]]) -> list[str]:
    """The texts on the things that ranks have left behind, with equal texts of several ranks joined into one."""
    ranks: dict[str, list[int]] = {}
    for rank, text in items:
        ranks.setdefault(text, []).append(rank)
    return [f"{ranks_text(sorted(set(each)))}: {text}" for text, each in ranks.items()]


def at(place: Place | None) -> str:
    """The line below a call that says where it was made."""
    return "" if place is None else f"\n      {place}"


def merged(calls: Iterable[Made]) -> list[str]:
    """One line for all ranks that made the same call at the same place."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, text, place in calls:
        groups.setdefault((text, at(place)), []).append(rank)
    return [f"  {ranks_text(ranks)}: {text}{where}" for (text, where), ranks in groups.items()]


def differing(descriptions: Sequence[tuple[str, Fields]]) -> str:
    """The properties in which these calls (operation and fields) differ."""
    if len({operation for operation, _ in descriptions}) > 1:
        return "operation"
    names = dict.fromkeys(name for _, fields in descriptions for name, _ in fields)
    return " and ".join(
        name
        for name in names
        if len({repr(dict(fields).get(name)) for _, fields in descriptions}) > 1
    )


def by_what_they_say(said: Mapping[int, Hashable]) -> list[list[int]]:
    """The ranks, in sets of those that say the same; the smallest set first, of equal ones the last
    to come.
    """
    sets: dict[Hashable, list[int]] = {}
    for rank, words in said.items():
        sets.setdefault(words, []).append(rank)
    last_first = reversed(list(sets.values()))
    return sorted(last_first, key=len)


def rank_to_blame(said: Mapping[int, Hashable], exceptions: Mapping[int, str]) -> int:
    """The rank to blame for calls that differ: one that calls while it handles an exception, else the odd one out.

    ``exceptions``: the exception that each rank handles, in words; empty if none.
    """
    sets = by_what_they_say(said)
    aside = [ranks for ranks in sets if all(exceptions[rank] for rank in ranks)]
    return (aside or sets)[0][0]


def odd_ones_out(said: Mapping[int, Hashable]) -> list[str]:
    """A line that names the ranks which differ from most others, if there are such."""
    *few, most = by_what_they_say(said)
    odd = [rank for ranks in few for rank in ranks]
    if not odd or len(odd) >= len(most):
        return []
    return [
        f"odd one out: {ranks_text(odd)}" if len(odd) == 1 else f"odd ones out: {ranks_text(odd)}"
    ]


def mismatch(
    number: int,
    group: str,
    what: str,
    calls: Sequence[Made],
    said: Mapping[int, Hashable] | None = None,
) -> CollectiveMismatchError:
    """The verdict on calls that meet and differ. ``said``: by rank, the text that the others must have, too."""
    lines = [f"mismatch: call {number} on group {group} differs in {what}", *merged(calls)]
    lines += odd_ones_out(said or {rank: text for rank, text, _ in calls})
    return CollectiveMismatchError("\n".join(lines))


def sizes_fit(operation: str, sent: Size, expected: Size) -> bool:
    """Return whether a tensor of the one size may be received as one of the other. The parts of an
    all_to_all_single are rows of larger tensors: their elements count, and not their shape.
    """
    if sent == expected:
        return True
    return operation == _OF_ROWS and elements(sent) == elements(expected)


def pair_mismatch(
    operation: str,
    places: Mapping[int, Place | None],
    sent: Sequence[Sequence[Size]],
    expected: Sequence[Sequence[Size]],
) -> tuple[CollectiveMismatchError, int] | None:
    """The verdict on members that send tensors of other sizes than their receivers expect, and the rank to
    blame; None if there are none.

    ``places``: by world rank, in group order, the line of each member's call. ``sent`` and ``expected``: each
    member's sizes. An all-to-all sends a tensor to each member, a gathering each of its tensors to all.
    """
    ranks = [*places]
    count, exchanges = len(ranks), operation.startswith("all_to_all")
    pairs = []
    for receiver, sizes in enumerate(expected):
        for index, size in enumerate(sizes[: len(sizes) // count * count]):
            sender = index % count
            tensors, part = sent[sender], receiver if exchanges else index // count
            if part < len(tensors) and not sizes_fit(operation, tensors[part], size):
                pairs.append((sender, part, receiver, index))
    if not pairs:
        return None
    sender, part, receiver, index = pairs[0]
    source, target = ranks[sender], ranks[receiver]
    what, sent_text, expected_text = _size_texts(sent[sender][part], expected[receiver][index])
    sent_splits = expected_splits = ""
    if operation == _OF_ROWS:
        sent_text, sent_splits = _rows_text("input", sent[sender], part)
        expected_text, expected_splits = _rows_text("output", expected[receiver], index)
    sends = f"  rank {source} sends {sent_text} to rank {target}{sent_splits}"
    expects = f"  rank {target} expects {expected_text} from rank {source}{expected_splits}"
    lines = [
        f"mismatch: {operation} differs in {what}",
        sends + at(places[source]),
        expects + at(places[target]),
    ]
    odd = set.intersection(*({ranks[sender], ranks[receiver]} for sender, _, receiver, _ in pairs))
    if len(pairs) > 1 and len(odd) == 1:
        (target,) = odd
        lines.append(f"odd one out: rank {target}")
    return CollectiveMismatchError("\n".join(lines)), target


_OF_ROWS = "all_to_all_single"


def _size_texts(sent: Size, expected: Size) -> tuple[str, str, str]:
    """The property in which two sizes differ, and each of them in words."""
    counts = elements(sent), elements(expected)
    if counts[0] == counts[1]:
        return "shape", f"shape {_shape(sent)}", f"shape {_shape(expected)}"
    return "element count", _counted(counts[0], "element"), _counted(counts[1], "element")


def _rows_text(tensor: str, parts: Sequence[Size], index: int) -> tuple[str, str]:
    """A part of a tensor in words, and the split sizes of the tensor."""
    shapes = [(part,) if isinstance(part, int) else part or (1,) for part in parts]
    rows, *row = shapes[index]
    text = _counted(rows, "element")
    if row:
        text = f"{_counted(rows, 'row')} of {_counted(math.prod(row), 'element')}"
    return text, f" ({tensor} split sizes {_SPLITS.repr([shape[0] for shape in shapes])})"


_SPLITS = reprlib.Repr()
_SPLITS.maxlist = 16


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def elements(size: Size) -> int:
    """The number of elements of a tensor of this size."""
    return size if isinstance(size, int) else math.prod(size)


def _shape(size: Size) -> str:
    return str([size] if isinstance(size, int) else [*size])


def post_mismatch(group: str, what: str, send: Made, receive: Made) -> CollectiveMismatchError:
    """The verdict on a send and its receive."""
    lines = [f"mismatch: a send and its receive on group {group} differ in {what}"]
    lines += [f"  rank {rank}: {text}{at(place)}" for rank, text, place in (send, receive)]
    return CollectiveMismatchError("\n".join(lines))


def group_mismatch(
    name: str, made: Mapping[int, tuple[object, Place | None]]
) -> CollectiveMismatchError:
    """The verdict on ranks that make different groups at one number of new_group."""
    lines = [f"mismatch: new_group number {name} differs in its ranks"]
    lines += merged((rank, f"ranks {ranks}", place) for rank, (ranks, place) in made.items())
    lines += odd_ones_out({rank: str(ranks) for rank, (ranks, _) in made.items()})
    lines.append(
        "hint: every rank of the world must call new_group, for every group, in the same order"
    )
    return CollectiveMismatchError("\n".join(lines))


def open_call_hint(rank: int, call: str, absent: int, place: Place | None) -> str:
    """The hint that a backend has let a rank go on from a call which another one has not made."""
    return f"rank {rank} has got past {call}, which rank {absent} has not joined{at(place)}"


def tag_hint(receiver: int, tag: int, sent: Iterable[tuple[int, int]]) -> str | None:
    """The likely cause of a wait in a receive of this tag; None if no message has another tag.

    ``sent``: sender and tag of each message from a rank that the receiver waits for, if nothing receives it.
    """
    for sender, other in sorted(set(sent)):
        if other != tag:
            return (
                f"rank {receiver} receives with tag {tag}; from rank {sender} a message with tag "
                f"{other} is there, which nobody receives"
            )
    return None


def object_hint(call: str, me: int, others: Mapping[str, Sequence[int]]) -> str | None:
    """The usual cause of an object that is never taken; None if the waits show none.

    ``others``: the sends in which the ranks wait that should take the object, each with the ranks that the send
    waits for.
    """
    if call.startswith("smp.broadcast") and any(
        other.startswith("smp.broadcast") for other in others
    ):
        return "smp.broadcast is called by the root alone; the receivers call smp.recv_from"
    if any(me in waiting for waiting in others.values()):
        return (
            "smp.send returns after the matching smp.recv_from: two ranks that both send first "
            "never receive"
        )
    return None
