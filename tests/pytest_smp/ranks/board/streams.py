"""Records as ranks write them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_smp.ranks.board import Board, BoardRecorder
from pytest_smp.ranks.board.recorder import Description
from smp_core.transport.peers import Source
from smp_core.transport.protocols import Group

FLOAT4 = ("dtype", "float32"), ("shape", "[4]")
SUM, MAX = (("reduce op", op) for op in ("SUM", "MAX"))

ALL_REDUCE = Description("all_reduce", (SUM, *FLOAT4), elements=4)
ALL_REDUCE_MAX = Description("all_reduce", (MAX, *FLOAT4), elements=4)
BARRIER = Description("barrier", ())
BROADCAST = Description("broadcast", (("root", 0), *FLOAT4), elements=4)
REDUCE = Description("reduce", (SUM, ("root", 0), *FLOAT4), elements=4)
TENSOR = Description("post", FLOAT4, sent=(4,), elements=4)


class Rank:
    """One rank's recorder, whose records go straight to the board."""

    def __init__(self, board: Board, rank: int, world: Sequence[int], run: int = 0) -> None:
        self.rank, self.board = rank, board
        self.recorder = BoardRecorder(rank, lambda data: board.feed(rank, data))
        self.recorder.begin(run)
        self.world = self.group("WORLD", world)

    def group(
        self, name: str, ranks: Sequence[int], kind: str = "torch", generation: int = 0
    ) -> int:
        """The number of a group."""
        return self.recorder.group(kind, name, name, generation, ranks)

    def calls(self, what: Description, group: int | None = None) -> int:
        """Issue a collective; the backend has not come back."""
        where = self.world if group is None else group
        return self.recorder.collective(where, what, lambda: what)

    def starts(self, what: Description, group: int | None = None) -> int:
        """Issue a collective that the backend takes."""
        number = self.calls(what, group)
        self.recorder.returned(number)
        return number

    def joins(self, what: Description, group: int | None = None) -> int:
        """Be in a synchronous collective."""
        number = self.calls(what, group)
        self.recorder.waits([number])
        return number

    def does(self, what: Description, group: int | None = None) -> None:
        """Go through a synchronous collective."""
        self.recorder.done([self.joins(what, group)])

    def posts(self, verb: str, peer: Source, tag: int = 0, what: Description = TENSOR) -> int:
        """``isend`` or ``irecv``; the peer is what the caller gives, or ANY."""
        number = self.recorder.post(
            verb == "isend", self.world, peer, tag, (verb, what), lambda: what
        )
        self.recorder.returned(number)
        return number

    def waits(self, *numbers: int) -> None:
        """Be in a wait."""
        self.recorder.waits(numbers)

    def done(self, *numbers: int) -> None:
        """Have learnt that calls are over."""
        self.recorder.done(numbers)

    def enters(self, call: str, to: Sequence[int] = (), source: int | None = None) -> None:
        """Be in a call of the object transport."""
        context = self.recorder.call(call, self.api_group(), to=to, source=source)
        context.__enter__()
        self._entered = context  # a context that is let go of ends

    def leaves(self) -> None:
        """Leave it."""
        self._entered.__exit__(None, None, None)

    def api_group(self) -> Group:
        """The world as the object transport names it."""
        return Group("WORLD", tuple(range(self.board.size)))

    def returns(self) -> None:
        """The body is over."""
        self.recorder.end()


def world(size: int, **options: float) -> tuple[Board, list[Rank]]:
    """A board and its ranks, at the beginning of a run."""
    board = Board(size, **options)  # type: ignore[arg-type]
    return board, [Rank(board, rank, range(size)) for rank in range(size)]
