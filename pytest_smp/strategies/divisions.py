"""Divisions of rows, tokens and positions among ranks: uneven all_to_all, experts, sequence shards."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_smp.strategies.arguments import check_int

Matrix = tuple[tuple[int, ...], ...]


def split_matrices(size: int, *, max_rows: int = 3) -> SearchStrategy[Matrix]:
    """Draw who sends how many rows to whom in an uneven ``all_to_all_single`` of ``size`` ranks.

    ``matrix[i][j]`` is the number of rows that rank ``i`` sends to rank ``j``, so
    ``input_split_sizes`` of rank ``i`` is ``matrix[i]`` and ``output_split_sizes`` of rank ``j`` is
    ``[row[j] for row in matrix]``. Ranks that send nothing, ranks that receive nothing and a single
    receiver come often. Shrinks towards zeros.

    Args:
        size: ranks in the group.
        max_rows: most rows from one rank to another.

    Raises:
        InvalidArgument: ``size`` or ``max_rows`` is no int of at least 1.
    """
    check_int("size", size, at_least=1)
    check_int("max_rows", max_rows, at_least=1)
    return _split_matrices(size, max_rows)


@st.composite
def _split_matrices(draw: DrawFn, size: int, max_rows: int) -> Matrix:
    ranks = st.sets(st.integers(0, size - 1))
    silent = draw(st.just(set()) | ranks)
    shunned = draw(st.just(set()) | ranks)
    rows = st.integers(0, max_rows)
    return tuple(
        tuple(
            0 if sender in silent or receiver in shunned else draw(rows) for receiver in range(size)
        )
        for sender in range(size)
    )


def routings(tokens: int, experts: int, *, top_k: int = 1) -> SearchStrategy[Matrix]:
    """Draw the experts of each token: for each of ``tokens`` tokens ``top_k`` distinct experts, best first.

    Experts without a token, and one expert that all tokens prefer (which overflows any capacity),
    come often; so do routings of equal load. Shrinks towards experts 0 to ``top_k - 1`` for all
    tokens.

    Args:
        tokens: tokens to route, 0 or more.
        experts: experts in all, over all ranks.
        top_k: experts of a token.

    Raises:
        InvalidArgument: ``tokens`` is no int of at least 0, ``experts`` none of at least 1, or
            ``top_k`` none from 1 to ``experts``.
    """
    check_int("tokens", tokens, at_least=0)
    check_int("experts", experts, at_least=1)
    check_int("top_k", top_k, at_least=1, at_most=experts, why="experts")
    return _routings(tokens, experts, top_k)


@st.composite
def _routings(draw: DrawFn, tokens: int, experts: int, top_k: int) -> Matrix:
    if draw(st.integers(0, 3)) == 3:  # equal load, as far as the number of tokens allows it
        first = draw(st.integers(0, experts - 1))
        shifts = (first + token * top_k for token in range(tokens))
        return tuple(
            tuple((shift + choice) % experts for choice in range(top_k)) for shift in shifts
        )
    # Few experts that are chosen at all, so that others stay without a token.
    used = range(draw(st.integers(top_k, experts)))
    names = draw(st.permutations(range(experts)))
    choices = st.lists(st.sampled_from(used), unique=True, min_size=top_k, max_size=top_k)
    return tuple(tuple(names[choice] for choice in draw(choices)) for _ in range(tokens))


def sequence_shards(length: int, ranks: int) -> SearchStrategy[Matrix]:
    """Draw the positions of a sequence of ``length`` that each of ``ranks`` ranks holds.

    ``shards[rank]`` are that rank's positions in the order in which it holds them; each position
    belongs to one rank. Drawn are contiguous shards of equal and of unequal length, empty ones among
    them, positions in turn (``rank, rank + ranks, ...``), and the zigzag of causal ring attention:
    of ``2 * ranks`` chunks, rank ``r`` holds chunks ``r`` and ``2 * ranks - 1 - r``. Shrinks towards
    a sequence of which the last rank holds everything.

    Args:
        length: positions of the sequence, 0 or more; it need not be divisible.
        ranks: ranks in the group.

    Raises:
        InvalidArgument: ``length`` is no int of at least 0, or ``ranks`` none of at least 1.
    """
    check_int("length", length, at_least=0)
    check_int("ranks", ranks, at_least=1)
    return _sequence_shards(length, ranks)


@st.composite
def _sequence_shards(draw: DrawFn, length: int, ranks: int) -> Matrix:
    form = draw(st.sampled_from(("uneven", "even", "in turn", "zigzag")))
    if form == "in turn":
        return tuple(tuple(range(rank, length, ranks)) for rank in range(ranks))
    if form == "even":
        return tuple(_chunks(length, ranks))
    if form == "zigzag":
        chunks = _chunks(length, 2 * ranks)
        return tuple(chunks[rank] + chunks[2 * ranks - 1 - rank] for rank in range(ranks))
    inner = st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1)
    bounds = [0, *sorted(draw(inner)), length]
    return tuple(tuple(range(*bounds[rank : rank + 2])) for rank in range(ranks))


def _chunks(length: int, count: int) -> list[tuple[int, ...]]:
    """Cut positions as ``torch.tensor_split`` does: the first ``length % count`` chunks are longer by one."""
    size, longer = divmod(length, count)
    starts = [chunk * size + min(chunk, longer) for chunk in range(count + 1)]
    return [tuple(range(starts[chunk], starts[chunk + 1])) for chunk in range(count)]
