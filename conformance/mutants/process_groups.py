"""Bugs of groups that scripts make: their members, creation, destruction, errors and lists of objects."""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from conformance.mutants.blocks import PerRun
from conformance.mutants.point_to_point import EITHER, FinishedWork, wrap_dist
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from pytest_smp.ranks.sim.matching import Meeting
from pytest_smp.ranks.sim.process_group import SimProcessGroup
from smp_core.errors import ArgumentError, NotInitializedError, VerdictError

BUGS = Bugs("groups, roots and rank mapping")


# ---- Members -------------------------------------------------------------------------------------


@BUGS.enter("PG-WORLD")
def not_there_at_first(patch: Patch) -> None:
    """is_initialized is False until a script calls init_process_group"""
    patch.setattr(dist, "is_initialized", lambda: False)


@BUGS.enter("PG-RANKS", origin="B037")
def sorted_whatever_is_told(patch: Patch) -> None:
    """new_group sorts its ranks whatever it is told"""
    wrap_dist(patch, "new_group", lambda new, *a, **k: new(*a, **{**k, "sort_ranks": True}))


@BUGS.enter("PG-RANKS")
def sorted_when_told_only(patch: Patch) -> None:
    """new_group leaves its ranks in their order unless told to sort them"""
    wrap_dist(patch, "new_group", lambda new, *a, **k: new(*a, **{"sort_ranks": False, **k}))


@BUGS.enter("PG-NON-MEMBER", origin="B040")
def none_for_outsiders(patch: Patch) -> None:
    """new_group gives None, which means the default group, to ranks outside"""

    def new(original: Any, *args: Any, **kwargs: Any) -> Any:
        handle = original(*args, **kwargs)
        return None if handle == dist.GroupMember.NON_GROUP_MEMBER else handle

    wrap_dist(patch, "new_group", new)


@BUGS.enter("PG-TRANSLATE", origin="B041")
def positions_are_world_ranks(patch: Patch) -> None:
    """get_global_rank gives the position back"""
    wrap_dist(patch, "get_global_rank", lambda get, group, rank: (get(group, rank), rank)[1])


@BUGS.enter("PG-SUBGROUPS", *ASSERTION)
def subgroups_in_steps(patch: Patch) -> None:
    """new_subgroups deals the ranks out one by one"""

    def deal(original: Any, group_size: int) -> Any:
        count = dist.get_world_size() // group_size
        parts = [list(range(first, dist.get_world_size(), count)) for first in range(count)]
        return dist.new_subgroups_by_enumeration(parts)  # type: ignore[no-untyped-call]

    wrap_dist(patch, "new_subgroups", deal)


@BUGS.enter("PG-LOCAL", VerdictError, origin="B038")
def local_groups_are_of_all(patch: Patch) -> None:
    """use_local_synchronization is ignored: every rank must call"""
    wrap_dist(
        patch,
        "new_group",
        lambda new, *a, **k: new(*a, **{**k, "use_local_synchronization": False}),
    )


# ---- Life ----------------------------------------------------------------------------------------


@BUGS.enter(
    "PG-SAME-MEMBERS", NotInitializedError, ValueError, kind="errors, hangs, pickling and resources"
)
def one_handle_for_the_same_ranks(patch: Patch) -> None:
    """new_group gives the handle that it gave before for these ranks"""
    handles = PerRun(dict)

    def new(original: Any, ranks: Any = None, **kwargs: Any) -> Any:
        key = dist.get_rank(), None if ranks is None else tuple(ranks)
        if key not in handles():
            handles()[key] = original(ranks, **kwargs)
        return handles()[key]

    wrap_dist(patch, "new_group", new)


@BUGS.enter("PG-DESTROY", NotInitializedError, kind="errors, hangs, pickling and resources")
def later_groups_end_too(patch: Patch) -> None:
    """the end of a group is the end of every group that was made after it"""
    shutdown = SimProcessGroup.shutdown

    def end(self: SimProcessGroup) -> None:
        made = list(self._context.fabric.torch_world().pg_map)
        for group in made[made.index(self) + 1 :] if self in made[1:] else []:
            shutdown(group)
        shutdown(self)

    patch.setattr(SimProcessGroup, "shutdown", end)


@BUGS.enter("PG-DESTROY", NotInitializedError, kind="errors, hangs, pickling and resources")
def default_group_ends_too(patch: Patch) -> None:
    """the end of a group is the end of the default group"""
    shutdown = SimProcessGroup.shutdown

    def end(self: SimProcessGroup) -> None:
        shutdown(self)
        shutdown(self._context.fabric.torch_world().default_pg)

    patch.setattr(SimProcessGroup, "shutdown", end)


@BUGS.enter("PG-AGAIN", RuntimeError, origin="B151", kind="errors, hangs, pickling and resources")
def eight_groups_at_most(patch: Patch) -> None:
    """a rank can make eight groups; destroyed ones count"""
    made = PerRun(lambda: defaultdict(int))

    def new(original: Any, *args: Any, **kwargs: Any) -> Any:
        made()[dist.get_rank()] += 1
        if made()[dist.get_rank()] > 8:
            raise RuntimeError("no more groups")
        return original(*args, **kwargs)

    wrap_dist(patch, "new_group", new)


@BUGS.enter("PG-AGAIN", origin="B157", kind="collectives and layout")
def results_of_the_group_before(patch: Patch) -> None:
    """a group's calls give the results of an earlier group of the same ranks"""
    results = PerRun(dict)
    values = Meeting.values

    def stale(self: Meeting, rank: int) -> Any:
        if self.channel.group.name == "WORLD":
            return values(self, rank)
        key = self.channel.group.ranks, self.number, rank
        return results().setdefault(key, values(self, rank))

    patch.setattr(Meeting, "values", stale)


@BUGS.enter("PG-DESTROYED", origin="B154", kind="errors, hangs, pickling and resources")
def destroy_does_nothing(patch: Patch) -> None:
    """a destroyed group works on"""
    patch.setattr(SimProcessGroup, "shutdown", lambda self: None)


@BUGS.enter("PG-DESTROYED", origin="B152", kind="errors, hangs, pickling and resources")
def destroy_forgets_nothing(patch: Patch) -> None:
    """a group can be destroyed again and again"""

    def destroy(original: Any, group: Any = None) -> None:
        if group is None:
            original()
        elif group != dist.GroupMember.NON_GROUP_MEMBER:
            group.shutdown()

    wrap_dist(patch, "destroy_process_group", destroy)


# ---- Errors --------------------------------------------------------------------------------------


@BUGS.enter("PG-ERROR-TRANSLATE", kind="errors, hangs, pickling and resources")
def minus_1_for_outsiders(patch: Patch) -> None:
    """get_group_rank gives -1 for a rank outside"""

    def get(original: Any, group: Any, rank: int) -> int:
        inside = rank in dist.get_process_group_ranks(group)
        return int(original(group, rank)) if inside else -1

    wrap_dist(patch, "get_group_rank", get)


@BUGS.enter("PG-ERROR-RANKS", *EITHER, kind="errors, hangs, pickling and resources")
def ranks_are_mended(patch: Patch) -> None:
    """new_group leaves out ranks that are there twice, or not in the world"""

    def new(original: Any, ranks: Any = None, **kwargs: Any) -> Any:
        world = range(dist.get_world_size())
        mended = ranks and [rank for rank in dict.fromkeys(ranks) if rank in world]
        return original(mended, **kwargs)

    wrap_dist(patch, "new_group", new)


@BUGS.enter("PG-ERROR-LENGTH-THEN", VerdictError, origin="B142", kind="point-to-point")
def refused_calls_count(patch: Patch) -> None:
    """an all_gather that is refused takes a number among the calls of the group"""
    gather = SimProcessGroup.allgather

    def count(self: SimProcessGroup, *args: Any) -> Any:
        try:
            return gather(self, *args)
        except ArgumentError:
            self._shared.channel._counts[self._position] += 1
            raise

    patch.setattr(SimProcessGroup, "allgather", count)


@BUGS.enter("PG-ERROR-LENGTH", *EITHER, kind="errors, hangs, pickling and resources")
def lists_are_not_measured(patch: Patch) -> None:
    """lists of the wrong length are cut, or filled up"""
    gather = SimProcessGroup.allgather

    def mend(self: SimProcessGroup, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (given,), (value,) = outputs, inputs
        more = [value.clone() for _ in range(self.size())]
        return gather(self, [[*given, *more][: self.size()]], inputs, opts)

    patch.setattr(SimProcessGroup, "allgather", mend)


@BUGS.enter("PG-ERROR-SPLITS", origin="B143", kind="errors, hangs, pickling and resources")
def bad_splits_are_ignored(patch: Patch) -> None:
    """all_to_all_single does nothing if its splits do not add up"""
    exchange = SimProcessGroup.all_to_all_single

    def swallow(self: SimProcessGroup, *args: Any) -> Any:
        try:
            return exchange(self, *args)
        except ArgumentError:
            return FinishedWork()

    patch.setattr(SimProcessGroup, "all_to_all_single", swallow)


@BUGS.enter("PG-ERROR-SPLITS-THEN", VerdictError, origin="B143", kind="point-to-point")
def refused_splits_count(patch: Patch) -> None:
    """an all_to_all_single that is refused takes a number among the calls of the group"""
    exchange = SimProcessGroup.all_to_all_single

    def count(self: SimProcessGroup, *args: Any) -> Any:
        try:
            return exchange(self, *args)
        except ArgumentError:
            self._shared.channel._counts[self._position] += 1
            raise

    patch.setattr(SimProcessGroup, "all_to_all_single", count)


# ---- Objects -------------------------------------------------------------------------------------


@BUGS.enter("PG-OBJECTS-ALL-GATHER", origin="B041", kind="errors, hangs, pickling and resources")
def gathered_by_world_rank(patch: Patch) -> None:
    """all_gather_object puts the objects in the order of world ranks"""

    def gather(original: Any, objects: list[Any], obj: Any, group: Any = None) -> None:
        original(objects, obj, group=group)
        ranks = dist.get_process_group_ranks(group)
        objects[:] = [objects[ranks.index(rank)] for rank in sorted(ranks)]

    wrap_dist(patch, "all_gather_object", gather)


@BUGS.enter(
    "PG-OBJECTS-ALL-GATHER",
    *ASSERTION,
    EOFError,
    pickle.UnpicklingError,
    origin="B148",
    kind="errors, hangs, pickling and resources",
)
def gathered_by_the_first_size(patch: Patch) -> None:
    """the bytes of each object are as many as those of the first"""
    gather = SimProcessGroup.allgather

    def first_size(self: SimProcessGroup, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = gather(self, outputs, inputs, opts)
        wait = work.wait

        def then(*args: Any) -> bool:
            wait(*args)
            (value,), (into,) = inputs, outputs
            if value.dtype is torch.int64 and value.numel() == 1:
                for each in into[1:]:
                    each.copy_(into[0])
            return True

        work.wait = then  # type: ignore[method-assign, assignment]
        return work

    patch.setattr(SimProcessGroup, "allgather", first_size)


@BUGS.enter("PG-OBJECTS-GATHER", kind="errors, hangs, pickling and resources")
def objects_gathered_backwards(patch: Patch) -> None:
    """gather_object's list begins with the last rank's object"""

    def gather(original: Any, obj: Any, into: Any = None, **kwargs: Any) -> None:
        original(obj, into, **kwargs)
        if into:
            into.reverse()

    wrap_dist(patch, "gather_object", gather)


@BUGS.enter("PG-OBJECTS-BROADCAST", origin="B034")
def first_rank_broadcasts(patch: Patch) -> None:
    """broadcast_object_list takes the first rank of the group for the root"""

    def broadcast(original: Any, objects: list[Any], group_src: int, **kwargs: Any) -> None:
        original(objects, group_src=0, **kwargs)

    wrap_dist(patch, "broadcast_object_list", broadcast)


@BUGS.enter("PG-OBJECTS-SCATTER", origin="B028", kind="errors, hangs, pickling and resources")
def objects_scattered_to_the_next(patch: Patch) -> None:
    """scatter_object_list gives the object of position r to position r + 1"""

    def scatter(original: Any, into: list[Any], given: Any, **kwargs: Any) -> None:
        original(into, given and [given[-1], *given[:-1]], **kwargs)

    wrap_dist(patch, "scatter_object_list", scatter)


@BUGS.enter("PG-OBJECTS-SEND", kind="errors, hangs, pickling and resources")
def first_object_for_all(patch: Patch) -> None:
    """recv_object_list fills its list with the first object"""

    def receive(original: Any, objects: list[Any], **kwargs: Any) -> Any:
        sender = original(objects, **kwargs)
        objects[1:] = objects[:1] * (len(objects) - 1)
        return sender

    wrap_dist(patch, "recv_object_list", receive)


@BUGS.enter("PG-OBJECTS-OUTSIDER", origin="G16", kind="errors, hangs, pickling and resources")
def outsiders_lists_are_cleared(patch: Patch) -> None:
    """all_gather_object empties the list of a rank outside the group"""

    def gather(original: Any, objects: list[Any], obj: Any, group: Any = None) -> None:
        original(objects, obj, group=group)
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            objects[:] = [None] * len(objects)

    wrap_dist(patch, "all_gather_object", gather)
