"""The order in which each rank runs its segments, for all microbatches of a step, as data.

The order is made by a simulation in which every rank runs one segment at each tick. Among the segments that a rank can
run, the rule of the pipeline schedule chooses (smp_core/schedule.py). All ranks do the same simulation. A rank that
follows its order waits only for what runs at an earlier tick, so ranks never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smp_core.schedule import POLICIES, Kind, Phase, Progress, Ready, choose
from smp_core.tensorflow.segmentation import EVERYWHERE, Segmentation


class SegmentTask(NamedTuple):
    """One segment of one microbatch; ``segment`` is its index in the segmentation."""

    microbatch: int
    segment: int


#: Pairs of segments of one segmentation: the second of a microbatch runs before the first of the next one.
Serial = Sequence[tuple[int, int]]


def orders(
    segmentations: Sequence[Segmentation], schedule: str, cap: int, serial: Sequence[Serial] = ()
) -> list[list[SegmentTask]]:
    """For each partition, the tasks of its rank in order.

    Args:
        segmentations: the segmentation of each microbatch.
        schedule: the name of the pipeline schedule.
        cap: the most microbatches in progress, where the schedule has such a limit.
        serial: for each microbatch, the segments that must wait for the microbatch before it.
    """
    policy = POLICIES[schedule]
    ranks = range(segmentations[0].partitions)
    queues = [[_chain(segmentation, rank) for segmentation in segmentations] for rank in ranks]
    done: list[set[SegmentTask]] = [set() for _ in ranks]
    order: list[list[SegmentTask]] = [[] for _ in ranks]
    begun: set[int] = set()
    needs = [_needs(segmentation) for segmentation in segmentations]

    def ready(rank: int, task: SegmentTask) -> bool:
        segmentation = segmentations[task.microbatch]
        for source in needs[task.microbatch][task.segment]:
            place = segmentation.segments[source].key.place
            if (
                SegmentTask(task.microbatch, source)
                not in done[rank if place == EVERYWHERE else place]
            ):
                return False
        before = task.microbatch - 1
        if before < 0:
            return True
        if (
            segmentations[before] is segmentation
            and SegmentTask(before, task.segment) not in done[rank]
        ):
            return False
        return all(
            SegmentTask(before, last) in done[rank]
            for first, last in (serial[before] if serial else ())
            if segmentations[before] is segmentation
            and first == task.segment
            and last in queues[rank][before].all
        )

    while any(queue.left for each in queues for queue in each):
        chosen: list[tuple[int, SegmentTask]] = []
        for rank in ranks:
            active = sum(
                any(queues[each][microbatch].left for each in ranks) for microbatch in begun
            )
            forward = sum(
                any(queues[each][at].forward_left(segmentation) for each in ranks)
                for at, segmentation in enumerate(segmentations)
            )
            options: list[tuple[Ready, SegmentTask]] = []
            for microbatch, queue in enumerate(queues[rank]):
                if not queue.left:
                    continue
                task = SegmentTask(microbatch, queue.left[0])
                if not ready(rank, task):
                    continue
                backward = segmentations[microbatch].is_backward(task.segment)
                kind = (
                    Kind.START if microbatch not in begun else Kind.TURN if backward else Kind.GO_ON
                )
                phase = Phase.BACKWARD if backward else Phase.FORWARD
                options.append((Ready(phase, microbatch, kind, task.segment), task))
            at = choose(policy, [each for each, _ in options], Progress(forward, active, cap))
            if at is not None:
                task = options[at][1]
                begun.add(task.microbatch)
                chosen.append((rank, task))
        assert chosen, "no rank can go on"
        for rank, task in chosen:
            done[rank].add(task)
            order[rank].append(task)
            queues[rank][task.microbatch].left.pop(0)
    return order


class _Queue:
    """The segments of one microbatch that one rank has not run yet, in order."""

    def __init__(self, segments: Sequence[int]) -> None:
        self.left, self.all = list(segments), frozenset(segments)

    def forward_left(self, segmentation: Segmentation) -> bool:
        return bool(self.left) and not segmentation.is_backward(self.left[0])


def _chain(segmentation: Segmentation, rank: int) -> _Queue:
    return _Queue(
        [
            at
            for at, each in enumerate(segmentation.segments)
            if each.key.place in (rank, EVERYWHERE)
        ]
    )


def _needs(segmentation: Segmentation) -> list[set[int]]:
    """For each segment, the segments whose tensors it takes."""
    made = {value: at for at, each in enumerate(segmentation.segments) for value in each.outputs}
    return [{made[value] for value in each.inputs} for each in segmentation.segments]
