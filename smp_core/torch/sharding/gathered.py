"""Whole parameters, for as long as somebody uses them.

A parameter that is read in a module call gathers its unit, unless that is gathered already. The unit
stays until the call of its own module is over (or the reading call, if its module is not being called).
What autograd has saved of it is kept as a reference to its place (saving.py), so memory is given back
between forward and backward; backward gathers again what it comes to, and gives a unit back once the
gradients of all its uses have come, or at the end.

*Live* are the elements of the units that are gathered or on their way. What is demanded is gathered
whatever ``sdp_max_live_parameters`` says, after everything that nobody uses any more has been given
back; what is prefetched never takes the live elements above it (ENGINES 1.5). So the most that is
ever live is ``sdp_max_live_parameters`` or what the open calls use, whichever is more.

Prefetch. The order in which units were demanded in the last step is expected again: when one has been
demanded, the next sets out. If another one is demanded instead, nothing is expected until the end of
the step. All of it depends on nothing but the calls that were made, so the ranks of a sharding group,
which make the same calls, gather in the same order. No value depends on any of it.

Ranks that make other calls would take each other's parts for those of something else, or wait for ever.
``route`` is a digest of the order; ranks compare theirs at the end of a step, before a gradient changes
(gradients.py).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from smp_core.torch.exceptions import ShardingError
from smp_core.torch.execution import activity as activities
from smp_core.torch.execution import counted
from smp_core.torch.execution.source import Frame
from smp_core.torch.sharding.shards import Shard, Unit


class AllGather(Protocol):
    """collectives.Collectives, as far as it is needed here."""

    def all_gather(self, part: torch.Tensor) -> Any: ...


class _State:
    """What is known of one unit while it is gathered, or on its way."""

    __slots__ = ("pending", "tensors", "users", "versions")

    def __init__(self, pending: Any) -> None:
        self.pending = pending
        self.tensors: dict[int, torch.Tensor] = {}
        self.versions: list[int] = []
        self.users: set[int] = set()  # open calls, by id


class Gathered:
    """The units of one rank's model, and which of them are whole now.

    ``live`` and ``peak`` are elements; the peak is that since :meth:`mark`.
    """

    def __init__(self, collectives: AllGather, units: Sequence[Unit], most: int) -> None:
        self._collectives, self.units, self._most = collectives, units, most
        self._of: dict[int, tuple[Unit, int]] = {
            id(shard.parameter): (unit, index)
            for unit in units
            for index, shard in enumerate(unit.shards)
        }
        self._states: dict[int, _State] = {}  # by the unit's number, in the order of their last use
        self._storages: dict[int, tuple[Unit, int]] = {}  # memory of gathered parameters
        self._due: dict[
            Any, Counter[int]
        ] = {}  # by microbatch: uses without a gradient, of each unit
        self._order: list[int] = []  # of demands in this step
        self._expected: list[int] = []  # that of the last step
        self._at: int | None = 0
        #: A digest of the units that were gathered since the step began, in order.
        self.route = 0
        self.live = self.peak = 0
        self.prefetch = True

    # Who is sharded.

    def shard(self, parameter: torch.Tensor) -> Shard | None:
        """What is kept of a parameter, None if it is whole on every rank."""
        known = self._of.get(id(parameter))
        return None if known is None else known[0].shards[known[1]]

    def shards(self) -> Iterable[Shard]:
        """All of them, in units."""
        return (shard for unit in self.units for shard in unit.shards)

    # Calls.

    def read(self, parameter: nn.Parameter, frame: Frame) -> torch.Tensor:
        """The whole parameter, for the call ``frame``, which has to be ended with :meth:`leave`."""
        unit, index = self._of[id(parameter)]
        self._demand(unit)
        holder = frame
        at: Frame | None = frame
        while at is not None:
            if at.module is unit.module:
                holder = at
            at = at.parent
        self._states[unit.number].users.update((id(holder), id(frame)))
        _units_of(holder).add(unit.number)
        _units_of(frame).add(unit.number)
        return self._states[unit.number].tensors[index]

    def leave(self, frame: Frame, backward: bool) -> None:
        """A call is over. In a backward pass what it used waits for its gradients."""
        for number in vars_of(frame):
            state = self._states.get(number)
            if state is None:
                continue
            state.users.discard(id(frame))
            if not state.users and not backward:
                self._release(number)

    # Backward.

    def expect(self, microbatch: Any, parameter: nn.Parameter) -> None:
        """A use of the parameter is to bring a gradient."""
        self._due.setdefault(microbatch, Counter())[self._of[id(parameter)][0].number] += 1

    def came(self, microbatch: Any, parameter: nn.Parameter) -> None:
        """It has. The last one of the microbatch releases the unit."""
        number = self._of[id(parameter)][0].number
        due = self._due.get(microbatch)
        if due is None:
            return
        due[number] -= 1
        state = self._states.get(number)
        if due[number] <= 0 and state is not None and not state.users:
            self._release(number)

    def over(self, microbatch: Any) -> None:
        """A backward pass of the microbatch is over: no gradient of it is waited for any more."""
        self._due.pop(microbatch, None)
        self._tidy(None)

    def place(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """Which gathered parameter's memory a tensor lies in, if any."""
        if not self._storages or tensor.layout is not torch.strided:
            return None
        return self._storages.get(tensor.untyped_storage()._cdata)

    def again(self, unit: Unit, index: int, microbatch: Any) -> torch.Tensor:
        """A parameter that autograd needs in a backward pass of the microbatch, whole."""
        state = self._states.get(unit.number)
        if state is None or not state.tensors:
            self._tidy(self._due.get(microbatch))
        self._demand(unit)
        return self._states[unit.number].tensors[index]

    # Steps.

    def begin_step(self, outside: bool = False) -> None:
        """Before a step, or a call outside of one, whose gradients other calls are not to wait for."""
        if not outside:
            self._due.clear()
        for unit in self.units:
            unit.check()
        self._expected, self._order, self._at = self._order or self._expected, [], 0
        self.route = 0

    def end_step(self) -> None:
        """It went well: give back everything, also what is on its way."""
        self._due.clear()
        self.rest()

    def abandon(self) -> None:
        """It failed: forget everything, and wait for nobody."""
        self._due.clear()
        self._states.clear()
        self._storages.clear()
        self.live = 0

    def rest(self) -> None:
        """Give back everything, until backward asks for it."""
        lost: ShardingError | None = None
        for number in list(self._states):
            try:
                self._release(number)
            except ShardingError as error:  # the others are given back, too
                lost = error
        if lost is not None:
            raise lost

    def mark(self) -> None:
        """Count the peak from here."""
        self.peak = self.live

    # Inside.

    def _demand(self, unit: Unit) -> None:
        number = unit.number
        state = self._states.get(number)
        if state is not None and state.tensors:
            self._states[number] = self._states.pop(number)  # used last
            return
        self._expect_order(number)
        in_own_thread(lambda: self._fetch(unit))

    def _expect_order(self, number: int) -> None:
        self._order.append(number)
        if self._at is not None:
            at = self._at
            right = at < len(self._expected) and self._expected[at] == number
            self._at = at + 1 if right else None

    def _fetch(self, unit: Unit) -> None:
        """In the rank's own thread: complete one unit, and let the next one set out."""
        state = self._states.get(unit.number)
        if state is None:
            self._make_room(unit.numel)
            state = self._begin(unit)
        with torch.inference_mode(False), torch.no_grad():  # others may use it without
            for index, whole in enumerate(unit.wholes(state.pending.result())):
                state.tensors[index] = whole
                state.versions.append(whole._version)
                self._storages[whole.untyped_storage()._cdata] = unit, index
                counted.holds(counted.GATHERED, whole)
            counted.happened("gathered", unit.shards[0].name)
            state.pending = None
            self._prefetch()

    def _begin(self, unit: Unit) -> _State:
        self.route = zlib.crc32(unit.number.to_bytes(4), self.route)
        self.live += unit.numel
        self.peak = max(self.peak, self.live)
        with torch.inference_mode(False):
            pending = self._collectives.all_gather(unit.flat)
        state = self._states[unit.number] = _State(pending)
        return state

    def _prefetch(self) -> None:
        if not self.prefetch or self._at is None or self._at >= len(self._expected):
            return
        unit = self.units[self._expected[self._at]]
        if unit.number not in self._states and self.live + unit.numel <= self._most:
            self._begin(unit)

    def _make_room(self, wanted: int) -> None:
        """Give back what no open call uses, what was used longest ago first, as far as it must be."""
        for number in list(self._states):
            if self.live + wanted <= self._most:
                return
            if not self._states[number].users:
                self._release(number)

    def _tidy(self, due: Counter[int] | None) -> None:
        """Give back what no open call uses and no gradient is due of; not what is on its way."""
        for number, state in list(self._states.items()):
            if state.pending is None and not state.users and not (due and due[number] > 0):
                self._release(number)

    def _release(self, number: int) -> None:
        state = self._states.pop(number)
        unit = self.units[number]
        self.live -= unit.numel
        if state.pending is not None:
            in_own_thread(state.pending.result)  # nobody asked for it: a wrong guess
            return
        for whole in state.tensors.values():
            del self._storages[whole.untyped_storage()._cdata]
        for index, whole in state.tensors.items():
            if whole._version != state.versions[index]:
                raise ShardingError(
                    f"parameter {unit.shards[index].name!r} was modified in place while it was gathered for a "
                    "module call, and each rank keeps its own part only, so the change would be lost on the "
                    "others. Change parameters between steps"
                )
        state.tensors.clear()
        del whole
        counted.happened("released", unit.shards[0].name)


def vars_of(frame: Any) -> set[int]:
    """The numbers of the units that a call has used."""
    return getattr(frame, "units", None) or set()


def _units_of(frame: Any) -> set[int]:
    if frame.units is None:
        frame.units = set()
    units: set[int] = frame.units
    return units


def in_own_thread(action: Callable[[], object]) -> None:
    """Run ``action`` in the rank's own thread, the only one that communicates."""
    activity = activities.current()
    if activity is None:
        action()
    else:
        activity.step_aside(action)
