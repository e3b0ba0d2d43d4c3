"""The fabric of the `sim` backend: what simulated ranks exchange data through.

``SimWorldFabric`` is what the ranks of one run share; ``SimFabric`` is one rank's side of it (see
base.Fabric).
"""

from __future__ import annotations

from typing import Any

from pytest_smp.ranks.isolation import prepare_thread
from pytest_smp.ranks.protocols import Job, VerdictKind
from pytest_smp.ranks.sim import profiling, torch_private
from pytest_smp.ranks.sim.executor import ThreadExecutor
from pytest_smp.ranks.sim.objects import ObjectRouter, SimObjects
from pytest_smp.ranks.sim.process_group import SharedGroup, SimProcessGroup
from pytest_smp.ranks.sim.rank_context import RankContext
from pytest_smp.ranks.sim.store import SimStore, StoreData
from pytest_smp.ranks.sim.work import SimWork
from smp_core.errors import BackendError, CollectiveMismatchError, NotInitializedError, RankError
from smp_core.transport import messages, torch_parts
from smp_core.transport.diagnosis import ranks_text
from smp_core.transport.memory import OverlapTable
from smp_core.transport.protocols import Fabric, Group
from smp_core.transport.stack_frames import Place, caller_place

_DEFAULT = "WORLD"
_MOST_IN_FLIGHT = 4  # operations that a note lists


class SimFabric(Fabric):
    """One rank's side of the fabric."""

    def __init__(self, world: SimWorldFabric, context: RankContext) -> None:
        self.rank, self.size = context.rank, context.size
        self.local_rank, self.local_size = context.rank, context.size  # one simulated node
        self.objects = SimObjects(context, world.router)
        self.unwaited: dict[int, SimWork] = {}
        self.overlap_table: OverlapTable[SimWork] = OverlapTable()
        self._shared, self._context = world, context
        self._torch_world: torch_private.SimRankWorld | None = None
        self._handles: dict[Group, SimProcessGroup] = {}

    # Life of the rank.

    def enter(self) -> None:
        """See ThreadFabric."""
        prepare_thread()

    def in_flight(self) -> list[str]:
        """See ThreadFabric.

        Named when the rank raises: it may have read poison.
        """
        works = [work for work in self.unwaited.values() if work.in_flight.outputs]
        lines = [f"  {work.name}{_at(work.place)}" for work in works[:_MOST_IN_FLIGHT]]
        rest = len(works) - len(lines)
        lines += [f"  and {rest} more"] if rest else []
        head = (
            f"in flight on rank {self.rank}, so that outputs hold poison (NaN where there is one):"
        )
        return ["\n".join([head, *lines])] if works else []

    def leave(self) -> None:
        """See ThreadFabric."""
        for work in self.unwaited.values():
            work.forget()
        if self._torch_world is not None:
            torch_private.unregister_all_process_groups()
        profiling.end()
        prepare_thread()

    # torch.distributed.

    def torch_world(self) -> torch_private.SimRankWorld:
        """This rank's torch.distributed state; the default process group is made when it is first
        looked at.
        """
        world = self._torch_world
        if world is None:
            world = self._torch_world = torch_private.SimRankWorld(self.rank, self.size)
            self._make_default(world)
        return world

    def register_groups(self, registered: set[Any]) -> None:
        """Enter the rank's groups in torch's registry of the calling thread, which has ``registered`` already."""
        world = self._torch_world
        if world is None:
            return
        names = {name: group for group, name in list(world.pg_names.items())}
        if names.keys() == registered:
            return
        for name in registered - names.keys():
            torch_private.unregister_process_group(name)
        for name in names.keys() - registered:
            torch_private.register_once(name, names[name])  # another thread of the rank has made it
        registered.clear()
        registered.update(names)

    def forget_groups(self) -> None:
        """Empty torch's registry of the calling thread, which may have served another rank."""
        torch_private.unregister_all_process_groups()

    def _make_default(self, world: torch_private.SimRankWorld) -> None:
        world.default_pg = self._registered(
            _DEFAULT, tuple(range(self.size)), torch_private.DEFAULT_NAME
        )
        world.default_pg._set_group_desc("default_pg")
        world.group_count = 1  # torch numbers the groups that follow from here

    def _registered(
        self, name: str, ranks: tuple[int, ...], torch_name: str | None = None
    ) -> SimProcessGroup:
        """This rank's handle on a group, as torch.distributed knows it."""
        shared = self._shared.group(name, ranks, self.rank)
        known = name if torch_name is None else torch_name
        handle = SimProcessGroup(self._context, shared, known)
        torch_private.register_in_world(
            handle,
            backend_name="sim",
            store=SimStore(self._context, self._shared.store),
            group_name=torch_private.GroupName(known),
            backend_config="cpu:sim",
            rank_mapping=shared.rank_map,  # one for all: N maps of N entries took 280 MB at 1,536
            add_to_default_tag=name == _DEFAULT,
        )
        return handle

    def remade_default(self, rank: int, size: int) -> SimProcessGroup:
        """The default group again, after the rank destroyed it and called
        init_process_group("sim").
        """
        if (rank, size) != (self.rank, self.size):
            raise RankError(
                f"init_process_group: rank={rank}, world_size={size}, but this is rank {self.rank} of {self.size}"
            )
        shared = self._shared.group(_DEFAULT, tuple(range(self.size)), self.rank)
        return SimProcessGroup(self._context, shared, torch_private.DEFAULT_NAME)

    def new_group(
        self, ranks: tuple[int, ...], name: str | None, desc: str | None
    ) -> SimProcessGroup | None:
        """Make a group for torch's ``new_group``, which delegates here. None for a rank that is no member."""
        calls = self._shared.new_group_calls.setdefault(str(name), {})
        calls[self.rank] = ranks, caller_place()
        if len({members for members, _ in calls.values()}) > 1:
            mismatch = GroupMismatch(str(name), calls, self.size)
            self._context.scheduler.judge(self._context.thread_state, mismatch)
        shared = self._shared.group(str(name), ranks, self.rank)
        if self.rank not in ranks:
            return None
        group = SimProcessGroup(self._context, shared, str(name))
        self._shared.made_by_user.append((self.rank, group, caller_place()))
        if desc is not None:
            group._set_group_desc(desc)
        return group

    def process_group(self, group: Group) -> Any:
        """See Fabric.

        On `sim` making a group needs no communication, so it is made when first asked for.
        """
        if self._context.scheduler.threads is not None:
            self._context.check_thread("process_group")  # the names of groups are all ranks'
        world = self.torch_world()
        if group.name == _DEFAULT:
            if world.default_pg is None:
                raise NotInitializedError("the default process group has been destroyed")
            return world.default_pg
        handle = self._handles.get(group)
        if handle is None or handle not in world.pg_map:
            handle = self._handles[group] = self._registered(self._shared.name(group), group.ranks)
        return handle


#: By rank, the members that a call of new_group names, and its line.
NewGroupCalls = dict[int, tuple[tuple[int, ...], Place | None]]


class GroupMismatch:
    """The verdict on calls of new_group that name different members. A Judgement of the scheduler."""

    def __init__(self, name: str, calls: NewGroupCalls, size: int) -> None:
        self._name, self._calls, self._size = name, calls, size
        self.done = False

    def describe(self, rank: int) -> str:
        """See Operation."""
        return f"new_group number {self._name} of ranks {list(self._calls[rank][0])}"

    def missing(self, rank: int) -> list[int]:
        """See Operation."""
        return [other for other in range(self._size) if other not in self._calls]

    @property
    def ripe(self) -> bool:
        """True if every rank of the world has called."""
        return len(self._calls) == self._size

    def verdict(self) -> tuple[CollectiveMismatchError, int]:
        """The error, with every call that was made, and the rank to blame."""
        made = {rank: (list(ranks), place) for rank, (ranks, place) in sorted(self._calls.items())}
        members = {rank: tuple(ranks) for rank, (ranks, _) in made.items()}
        return messages.group_mismatch(self._name, made), messages.by_what_they_say(members)[0][0]


class SimWorldFabric:
    """The state that the ranks of one run share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.router = ObjectRouter()
        self.store = StoreData()
        self.made_by_user: list[tuple[int, SimProcessGroup, Place | None]] = []
        self.new_group_calls: dict[str, NewGroupCalls] = {}
        self._names: dict[Group, str] = {}
        self._groups: dict[str, tuple[SharedGroup, int, Place | None]] = {}
        self._fabrics: list[SimFabric] = []
        self._worlds = torch_private.rank_worlds()
        self._worlds.enter()

    def rank_fabric(self, context: RankContext) -> SimFabric:
        """The fabric of one rank, on this shared state."""
        fabric = SimFabric(self, context)
        self._fabrics.append(fabric)
        return fabric

    def group(self, name: str, ranks: tuple[int, ...], rank: int) -> SharedGroup:
        """The state that the members of one group share, made when the first of them comes."""
        known = self._groups.get(name)
        if known is None:
            known = self._groups[name] = SharedGroup(Group(name, ranks)), rank, caller_place()
        return known[0]

    def name(self, group: Group) -> str:
        """torch's name for a group of the API: the same on every member, and its alone."""
        name = self._names.get(group)
        if name is None:
            name = self._names[group] = f"smp:{group.name}:{len(self._names)}"
        return name

    def leaks(self, strict: bool) -> tuple[list[str], list[str]]:
        """See WorldFabric."""
        found: list[tuple[int, str]] = []
        for shared, _, _ in self._groups.values():
            for post in shared.mailbox.unmatched():
                found.append(
                    (post.context.rank, f"{post.text()} was never matched{_at(post.place)}")
                )
            for meeting in shared.channel.unfinished():
                without = ranks_text(meeting.missing(-1))
                for rank, call in zip(shared.group.ranks, meeting.calls, strict=True):
                    if call is not None and not call.given_up:
                        text = messages.never_joined(meeting.describe(rank), without)
                        found.append((rank, f"{text}{_at(call.place)}"))
        for fabric in sorted(self._fabrics, key=lambda each: each.rank):
            for work in fabric.unwaited.values():
                # Works not done are in the list already; works that torch's own code leaves do not count.
                if work.done and (work.place is None or work.place.direct):
                    found.append(
                        (fabric.rank, f"{work.name} was never waited for{_at(work.place)}")
                    )
        fatal = messages.left(found)
        everybody = set(range(self.size))
        for name, calls in self.new_group_calls.items():
            absent = everybody - calls.keys()
            if absent and name.isdecimal():  # other names are those of use_local_synchronization
                shared, maker, place = self._groups[name]
                fatal.append(
                    f"rank {maker}: new_group number {name} of ranks {list(shared.group.ranks)} was "
                    f"never called by {ranks_text(absent)}; every rank of the world must{_at(place)}"
                )
        groups = messages.left(
            (rank, messages.never_destroyed(group.group_name, group.members, place))
            for rank, group, place in sorted(self.made_by_user, key=lambda each: each[0])
            if group.alive and (place is None or place.direct)  # torch's own code keeps its groups
        )
        return (fatal + groups, []) if strict else (fatal, groups)

    def close(self) -> None:
        """Give torch.distributed back."""
        self._worlds.leave()
        self._fabrics.clear()


def _at(place: object) -> str:
    return "" if place is None else f"\n      {place}"


def open_executor() -> ThreadExecutor:
    """The executor of `sim`, ready to open worlds."""
    torch_private.register_backend()
    torch_parts.require("the sim backend", self_check=_self_check)
    return ThreadExecutor(SimWorldFabric)


def _self_check() -> None:
    """Two ranks do what `sim` gives torch's own code a say in. Raises what they raise, or
    BackendError if they stop in any other way.
    """
    from pytest_smp.ranks.sim import self_check

    executor = ThreadExecutor(SimWorldFabric)
    try:
        report = executor.open(2).run(
            Job(body=self_check.body, arguments=lambda rank: ((), {}), timeout=self_check.LIMIT)
        )
    finally:
        executor.close()
    for outcome in report.outcomes:
        if outcome.error is not None:
            raise outcome.error
    if report.verdict is not VerdictKind.PASSED:
        raise BackendError(f"the self-check ends in {report.verdict}")
