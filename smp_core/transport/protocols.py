"""The protocols through which ranks exchange data, and the values that pass between them.

On each rank the *fabric* gives the default process group and the object transport. Nothing here
imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """An ordered list of world ranks, and the name that messages give it.

    Two groups of the same members but different names are different groups, as they are on a real
    backend.
    """

    name: str
    ranks: tuple[int, ...]


class ObjectTransport(Protocol):
    """A carrier of picklable objects between ranks, one operation per call, by world ranks.

    Every call is synchronous (API 1.6). Each receiver gets a copy of its own. The caller has
    checked that ranks are in range, in the group, and not its own.
    """

    def send(self, obj: object, dest: int) -> None:
        """Return after ``dest`` has taken the object.

        Raises PayloadError here if it cannot be pickled.
        """

    def broadcast(self, obj: object, group: Group) -> None:
        """Send to every other member; return after all of them have taken the object."""

    def recv_from(self, src: int) -> Any:
        """Return the next object that ``src`` sent or broadcast to this rank, in the order of
        sending.
        """

    def allgather(self, obj: object, group: Group) -> list[Any]:
        """Return the members' objects in the order of the group."""

    def barrier(self, group: Group) -> None:
        """Return after every member has called."""


#: The backend over shared memory, by its name in torch. Its own sums have the bits of a fold in the published order.
SMDDP = "smddp"

#: How the names of the API's own process groups begin.
PRIVATE = "smp "


class Fabric(Protocol):
    """The object that one rank exchanges data through."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    objects: ObjectTransport

    def process_group(self, group: Group) -> ProcessGroup:
        """The process group over ``group``, made on the first call; members call in the same order.

        No body is given one whose name begins with ``PRIVATE``: a fabric may keep it for later runs.
        """

    def smddp_group(self, group: Group) -> ProcessGroup | str:
        """A process group of the backend `smddp` over ``group``, beside that of ``process_group``, or the reason why
        there is none. All members call it, and get the same kind of answer. Optional: a fabric may have no other group.
        """
        return "the backend of the ranks has no other beside it"


class CallRecorder(Protocol):
    """The recorder to which a rank process writes its next calls (the board; see pytest_smp/ranks/board)."""

    def call(
        self, call: str, group: Group, *, to: Sequence[int] = (), source: int | None = None
    ) -> AbstractContextManager[None]:
        """Entered around a synchronous call of the object transport.

        ``call`` is its name (``smp.send``), ``to`` the world ranks that must take the sent object,
        ``source`` the world rank that it receives from; a call with neither is one that all of
        ``group`` join.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class RankEnvironment:
    """The values that the fabric is told on a rank process when a world forms.

    ``folder`` is private to this forming of the world, the same on all of its ranks, and empty at
    first; ``forming`` counts the formings of this session. ``check`` raises Cancelled once the run
    has been ended: a fabric whose waits call it needs no killing (``RankFabric.cooperative``).
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    folder: Path
    forming: int
    check: Callable[[], None]
    board: CallRecorder
    store: str = "file"  # one in `folder` serves all ranks; "env": the launcher's, by MASTER_ADDR


#: The version of `RankFabric`, higher after each change of the protocol; a fabric that was written for another version
#: is refused.
FABRIC_VERSION = 2


class RankFabric(Fabric, Protocol):
    """The fabric as an executor of rank processes drives it: formed once, entered for every run.

    Attributes:
        protocol: the `FABRIC_VERSION` that it was written for.
        cooperative: whether its waits call `RankEnvironment.check`, so that a rank can be unwound
            without killing its process.
    """

    protocol: int
    cooperative: bool

    @property
    def holds(self) -> bool:
        """True if process groups of the last run are still there, because they are destroyed when the
        next run is entered. Their descriptors are not counted as left open by the body.
        """
        return False

    def opened(self) -> set[str]:
        """The numbers of descriptors that the fabric opened for itself since the last call: it keeps them."""
        return set()

    def enter(self) -> None:
        """Before each body: torch.distributed is this world's from now on."""

    def leave(self) -> list[str]:
        """After each body, however it ended: torch.distributed is nobody's. The process groups that
        the body made and left, in words; no later run finds them.
        """

    def close(self) -> None:
        """The world is not used again."""
