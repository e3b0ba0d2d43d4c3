"""Process groups that stay from run to run: those of the API's own, which no body is given.

To make one over Gloo takes 10 to 40 ms, because a file store is looked at every 10 ms; a step of a
small model takes 3. So a world makes each once. Between runs they are not torch.distributed's: a body
that does not train finds the groups, and the numbers of groups, of a fresh process.
"""

from __future__ import annotations

import datetime
from typing import Any

from torch.distributed import distributed_c10d as c10d

from pytest_smp.ranks.processes.process_state import open_descriptors
from smp_core.transport.protocols import PRIVATE, CallRecorder, Group


class LastingGroups:
    """The process groups that stay from run to run, of one world on one rank."""

    def __init__(self, board: CallRecorder, limit: datetime.timedelta) -> None:
        self._board, self._limit = board, limit
        self._made: dict[Group, tuple[Any, dict[str, Any]]] = {}  # the group, and its registration
        self._known: set[Group] = set()  # to torch.distributed, in this run
        self.descriptors: set[str] = set()  # opened by making groups, since the last question

    def get(self, group: Group) -> Any:
        """The process group over ``group``; all members call, the first time in the same order."""
        made = self._made.get(group)
        if made is None:
            handle, registration = self._made[group] = self._make(group)
        else:
            handle, registration = made
            if (
                handle not in c10d._world.pg_map
            ):  # of a former run, or from before destroy_process_group()
                c10d._register_pg_in_world(handle, **registration)
        self._known.add(group)
        return handle

    def _make(self, group: Group) -> tuple[Any, dict[str, Any]]:
        world: Any = c10d._world
        backend, store = world.pg_map[world.default_pg]
        ranks = list(group.ranks)
        # torch would number it by the groups that this rank has, which its members need not share.
        name = c10d.GroupName(f"{group.name} {group.ranks}")
        before = open_descriptors()
        # Written down, so that a member which never comes is a deadlock.
        with self._board.call("smp.process_group", group):
            handle, _ = c10d._new_process_group_helper(
                len(ranks),
                ranks.index(world.default_pg.rank()),
                ranks,
                backend,
                store,
                name,
                timeout=self._limit,
                group_desc=group.name,
            )
        mapping = {rank: position for position, rank in enumerate(ranks)}
        world.pg_group_ranks[handle] = mapping
        world.pg_names.kept.add(handle)
        self.descriptors |= open_descriptors(before)
        return handle, {
            "backend_name": backend,
            "store": world.pg_map[handle][1],
            "group_name": name,
            "backend_config": world.pg_backend_config[handle],
            "rank_mapping": mapping,
        }

    def leave(self) -> None:
        """The run is over: torch.distributed forgets the groups."""
        world: Any = c10d._world
        for group in self._known:
            handle, _ = self._made[group]
            for known in (
                world.pg_map,
                world.pg_names,
                world.pg_group_ranks,
                world.pg_backend_config,
            ):
                known.pop(handle, None)
            tag = world.pg_to_tag.pop(handle, None)
            for each in {tag, ""} & set(world.tags_to_pg):
                world.tags_to_pg[each] = [one for one in world.tags_to_pg[each] if one != handle]
        self._known.clear()

    def close(self) -> None:
        """The world is not used again."""
        while self._made:
            _, (handle, _) = self._made.popitem()
            handle.shutdown()


def lasts(group: Group) -> bool:
    """Return whether a group may stay after the run. A default group with a ``new_group`` of its own makes
    all groups anew.
    """
    default: Any = c10d._world.default_pg
    return group.name.startswith(PRIVATE) and not callable(getattr(default, "new_group", None))
