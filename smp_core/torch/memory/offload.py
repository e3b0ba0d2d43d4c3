"""Offloading of checkpointed activations, as a ledger of bytes (API 3.3: ``offload_activations``,
``activation_loading_horizon``).

On the CPU there is no other memory to put activations into: nothing is moved, and no number changes. What
would be moved is recorded: what a checkpointed module keeps for its repetition (its inputs) leaves when its
forward pass is over and is back ``activation_loading_horizon`` tasks before it is needed. A task is one
forward pass or one repetition of a checkpointed module on this rank. What is needed within the horizon
stays where it is.

As documented it has an effect only with activation checkpointing and more than one microbatch.
"""

from __future__ import annotations

import dataclasses

from smp_core.torch.session import Session


@dataclasses.dataclass(slots=True)
class OffloadEntry:
    """What one call of a checkpointed module keeps, in tasks of this rank.

    ``left`` is the task after which it is not needed for a while, ``needed`` the one that needs it
    again; None until then.
    """

    ledger: OffloadLedger
    step: int
    microbatch: int
    path: str
    nbytes: int
    left: int
    needed: int | None = None

    @property
    def back(self) -> int | None:
        """The task before which it is loaded; None if it never leaves, or is not needed again."""
        if self.needed is None or self.needed - self.left <= self.ledger.horizon:
            return None
        return self.needed - self.ledger.horizon

    @property
    def moved(self) -> bool:
        """Whether it is offloaded and loaded again."""
        return self.back is not None


@dataclasses.dataclass(slots=True)
class OffloadLedger:
    """What would have been offloaded on this rank, since it began to train."""

    horizon: int
    tasks: int = 0
    entries: list[OffloadEntry] = dataclasses.field(default_factory=list)

    @property
    def offloaded_bytes(self) -> int:
        """All that left; as much came back."""
        return sum(entry.nbytes for entry in self.entries if entry.moved)

    def peak(self, offloading: bool = True) -> int:
        """The most bytes of kept inputs at any task, with offloading or as they are without."""
        most = 0
        for task in range(1, self.tasks + 1):
            now = 0
            for entry in self.entries:
                if entry.needed is not None and entry.left <= task <= entry.needed:
                    away = entry.back if offloading else None
                    now += entry.nbytes if away is None or not entry.left < task < away else 0
            most = max(most, now)
        return most


def ledger(session: Session) -> OffloadLedger | None:
    """This rank's ledger; None where offloading has no effect."""
    config = session.runtime.config
    if not config.offload_activations or config.microbatches < 2:
        return None
    if session.offload is None:
        session.offload = OffloadLedger(config.activation_loading_horizon)
    kept: OffloadLedger = session.offload
    return kept


def leaves(session: Session, microbatch: int, path: str, nbytes: int) -> OffloadEntry | None:
    """A checkpointed module runs: its inputs, of ``nbytes``, leave afterwards."""
    kept = ledger(session)
    if kept is None:
        return None
    kept.tasks += 1
    entry = OffloadEntry(kept, session.steps, microbatch, path, nbytes, kept.tasks)
    kept.entries.append(entry)
    return entry


def needed(entry: OffloadEntry) -> None:
    """A checkpointed module is run again, and needs its inputs."""
    entry.ledger.tasks += 1
    if entry.needed is None:
        entry.needed = entry.ledger.tasks
