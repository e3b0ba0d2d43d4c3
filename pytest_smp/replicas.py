"""``smp_replicas`` and ``--smp-replicas``: the ranks that must be equal are, after each optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pytest_smp.ranks.protocols import OutcomeKind, Report, VerdictKind
from pytest_smp.ranks.replica_watch import (
    REPLICAS,
    STEPS,
    Digest,
    ReplicaWatch,
    Watched,
    digests,
    watch_of,
)
from smp_core.errors import ReplicaError, ThreadError
from smp_core.transport import current_rank, messages
from smp_core.transport.diagnosis import ranks_text


class ReplicaBody:
    """A body whose rank records its replicas."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body = body

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rank: Any = current_rank.current()
        with ReplicaWatch(rank):
            return self.body(*args, **kwargs)


class SmpReplicas:
    """The value of the fixture: on a rank, it takes further modules to compare."""

    def watch(
        self,
        module: Any,
        *,
        ranks: Sequence[int] | None = None,
        buffers: bool = False,
        generators: bool = False,
    ) -> None:
        """Compare a module's parameters and gradients among ``ranks`` (all, if not given) after each optimizer's step.

        With ``buffers`` its buffers too, with ``generators`` the generators of torch, numpy and Python. Raises
        ThreadError outside of a rank.
        """
        rank = current_rank.current()
        watch = watch_of(rank)
        if rank is None or watch is None:
            raise ThreadError("smp_replicas.watch was used outside a rank: call it in the body")
        members = tuple(range(rank.size)) if ranks is None else tuple(ranks)
        if rank.rank in members:
            watch.watch(
                Watched(weakref.ref(module), members, buffers=buffers, generators=generators)
            )

    def __repr__(self) -> str:
        return "smp_replicas"

    def __reduce__(self) -> tuple[Any, ...]:
        return SmpReplicas, ()


def judge(report: Report) -> None:
    """Compare what the ranks have recorded: a difference fails a run that passed, and is a note on another's error."""
    found = _difference(report)
    if found is None:
        return
    text, root = found
    if report.error is not None:
        report.error.add_note(text)
    elif all(outcome.kind is not OutcomeKind.SKIPPED for outcome in report.outcomes):
        report.verdict, report.root = VerdictKind.REPLICAS, root
        report.error = ReplicaError(text)


def _difference(report: Report) -> tuple[str, int] | None:
    """The first difference in words, and the rank to blame."""
    by_key: dict[tuple[Any, ...], dict[int, Digest]] = {}
    for outcome in report.outcomes:
        for digest in digests(outcome.records.get(REPLICAS, ())):
            key = digest.step, digest.members, digest.optimizer, digest.what
            by_key.setdefault(key, {})[outcome.rank] = digest
    differing = [of for of in by_key.values() if len({each.digest for each in of.values()}) > 1]
    if not differing:
        return _uneven_steps(report)
    first = min(differing, key=lambda of: next(iter(of.values())).step)
    sets = messages.by_what_they_say({rank: each.digest for rank, each in first.items()})
    digest = next(iter(first.values()))
    lines = [f"replicas differ: {digest.what} at step {digest.step} of {digest.optimizer}"]
    lines.append(f"  {_values(first, sets)}")
    lines += messages.odd_ones_out({rank: each.digest for rank, each in first.items()})
    more = len(differing) - 1
    if more:
        lines.append(f"and {more} more, at this step and later")
    return "\n".join(lines), sets[0][0]


def _values(first: dict[int, Digest], sets: list[list[int]]) -> str:
    """The first element in which the two smallest sets of equal ranks differ, and its values."""
    odd, others = sets[0], sets[-1]
    one, other = first[others[0]], first[odd[0]]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return (
            f"it is {one.dtype}{[*one.shape]} on {ranks_text(others)} and "
            f"{other.dtype}{[*other.shape]} on {ranks_text(odd)}"
        )
    if not one.data or not other.data:
        return f"{ranks_text(odd)} {'differs' if len(odd) == 1 else 'differ'} from {ranks_text(others)}"
    import torch

    dtype = getattr(torch, one.dtype)
    at = next(_differing_elements(one.data, other.data, dtype.itemsize))
    element = [int(each) for each in torch.unravel_index(torch.tensor(at), one.shape)]
    values = [
        torch.frombuffer(bytearray(each.data), dtype=dtype)[at].item() for each in (one, other)
    ]
    return f"element {element} is {values[0]} on {ranks_text(others)} and {values[1]} on {ranks_text(odd)}"


def _differing_elements(one: bytes, other: bytes, size: int) -> Iterator[int]:
    return (
        at // size
        for at in range(0, len(one), size)
        if one[at : at + size] != other[at : at + size]
    )


def _uneven_steps(report: Report) -> tuple[str, int] | None:
    """The replicas that made different numbers of steps, among ranks that have all come to their ends."""
    if report.error is not None:
        return None
    for outcome in report.outcomes:
        for name, members in outcome.records.get(STEPS, {}):
            if any(report.outcomes[rank].kind is not OutcomeKind.RETURNED for rank in members):
                continue  # a rank that smp.raises has held up would have gone on
            counts = {
                rank: report.outcomes[rank].records.get(STEPS, {}).get((name, members), 0)
                for rank in members
            }
            if len(set(counts.values())) > 1:
                ranks: dict[int, list[int]] = {}
                for rank, count in counts.items():
                    ranks.setdefault(count, []).append(rank)
                told = " and ".join(
                    f"{count} {'step' if count == 1 else 'steps'} on {ranks_text(ranks[count])}"
                    for count in sorted(ranks)
                )
                odd = messages.by_what_they_say(counts)[0][0]
                return f"replicas differ: {name} has made {told}", odd
    return None
