"""The numbers that the recorder gave to process groups, and the keys that tell groups apart."""

from __future__ import annotations

import collections
import weakref
from typing import Any, NamedTuple

from torch.distributed import distributed_c10d as c10d

from pytest_smp.ranks.board.recorder import BoardRecorder
from smp_core.topology import GroupKind
from smp_core.transport import messages

#: The descriptions (torch's group_desc) of the API's own process groups.
_OF_THE_API = frozenset(f"{kind.name}_GROUP" for kind in GroupKind)


class Known(NamedTuple):
    """A group as records name it, and its world ranks in group order."""

    number: int
    ranks: tuple[int, ...]
    name: str
    generation: int


class GroupRegistry:
    """The process groups that torch.distributed knows, for one run after the other.

    torch gives the name of a destroyed group away again, so a group is its name and how many of
    that name this rank has made in this run; every member counts the same.
    """

    def __init__(self, recorder: BoardRecorder) -> None:
        self._recorder = recorder
        self._run = -1
        self._known: dict[int, tuple[weakref.ref[Any], Known | None]] = {}
        self._generations: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._made: collections.Counter[str] = collections.Counter()

    def _renew(self) -> None:
        if self._run != self._recorder.run:
            self._run = self._recorder.run
            self._known.clear()
            self._generations.clear()
            self._made.clear()

    def made(self, group: Any) -> None:
        """torch.distributed has learnt of a new process group."""
        self._renew()
        name = str(c10d._world.pg_names.get(group))
        self._made[name] += 1
        self._generations[id(group)] = weakref.ref(group), self._made[name]
        self._known.pop(id(group), None)

    def known(self, group: Any) -> Known | None:
        """The group's number; None for one that torch.distributed does not know."""
        self._renew()
        entry = self._known.get(id(group))
        if entry is None or entry[0]() is not group:
            if group is None or group not in c10d._world.pg_names:
                return None
            entry = self._known[id(group)] = weakref.ref(group), self._look_up(group)
        return entry[1]

    def _look_up(self, group: Any) -> Known | None:
        world: Any = c10d._world
        ranks = world.pg_group_ranks.get(group)
        if not ranks:  # it is being made
            ranks = (
                {rank: rank for rank in range(group.size())} if group is world.default_pg else {}
            )
        if not ranks:
            return None
        in_order = tuple(sorted(ranks, key=ranks.__getitem__))
        name = str(world.pg_names[group])
        made = self._generations.get(id(group))
        generation = made[1] if made is not None and made[0]() is group else 0
        desc = str(getattr(group, "group_desc", ""))
        known = desc if desc in _OF_THE_API and not name.isdecimal() else name
        shown = messages.group_text("WORLD" if group is world.default_pg else known, in_order)
        number = self._recorder.group("torch", name, shown, generation, in_order)
        return Known(number, in_order, name, generation)

    def makers(self, world: Known) -> int:
        """The number of the group whose collectives are the calls of new_group."""
        return self._recorder.group("new_group", world.name, "WORLD", world.generation, world.ranks)
