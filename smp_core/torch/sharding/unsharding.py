"""Unsharded parameters: when a unit is all-gathered, and when its memory is freed again.

A parameter that is read in a module call unshards its unit, unless the unit is unsharded already. The unit is
resharded when the call of its own module ends (or the reading call, if its module is not being called). Autograd saves
a reference (unit, parameter, view geometry) instead of the tensor (execution/saving.py), so unsharded memory is freed
between forward and backward. Backward unshards each unit that it comes to, and reshards it once the gradients of all
its uses have come, or at the end of the backward pass.

*Live* are the elements of the units that are unsharded or being unsharded. A unit that is demanded is gathered
whatever ``sdp_max_live_parameters`` says, after every unit without users has been resharded; a prefetch never takes
the live elements above it (ENGINES 1.5). So the most that is ever live is ``sdp_max_live_parameters`` or what the open
calls use, whichever is more.

Prefetch. The order in which units were demanded in the last step is expected again: when one unit has been demanded,
the all-gather of the next is launched. If another unit is demanded instead, nothing is prefetched until the end of the
step. The order depends on nothing but the calls that were made, so the ranks of a shard group, which make the same
calls, gather in the same order. No value depends on it.
"""

from __future__ import annotations

import enum
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from smp_core.torch.exceptions import ShardingError
from smp_core.torch.execution import activity as activities
from smp_core.torch.execution import counted, saving
from smp_core.torch.execution.source import Frame
from smp_core.torch.sharding.sharded_parameter import ShardedParameter, Unit


class AllGather(Protocol):
    """collectives.Collectives, as far as it is needed here."""

    def all_gather_parts(self, shard: torch.Tensor, lengths: Sequence[int]) -> Any: ...


class UnitState(enum.Enum):
    """The amount of a unit that a rank holds in memory. The rank's own shards are held in every state."""

    SHARDED = "sharded"
    """The rank's own shards alone: ``1 / degree`` of the unit, padding included."""

    UNSHARDING = "unsharding"
    """An all-gather is in flight: the shards, and memory of the size of the whole unit that nobody may read."""

    UNSHARDED = "unsharded"
    """The shards, and every parameter of the unit in full, each in memory of its own."""


class _LiveUnit:
    """A unit that is not sharded. ``tensors`` are filled on the way from UNSHARDING to UNSHARDED."""

    __slots__ = ("all_gather", "state", "tensors", "users", "versions")

    def __init__(self, all_gather: Any) -> None:
        self.state = UnitState.UNSHARDING
        self.all_gather = all_gather
        self.tensors: list[torch.Tensor] = []
        self.versions: list[int] = []  # torch's counters, to see a change in place
        self.users: set[int] = set()  # open calls, by id


class Unsharded:
    """The units of one rank's model, and which of them are unsharded now.

    ``live`` and ``peak`` are elements; the peak is that since :meth:`mark`.
    """

    def __init__(self, collectives: AllGather, units: Sequence[Unit], most: int) -> None:
        self._collectives, self.units, self._most = collectives, units, most
        self._places: dict[int, tuple[Unit, int]] = {
            id(shard.parameter): (unit, index)
            for unit in units
            for index, shard in enumerate(unit.shards)
        }
        self._live_units: dict[
            int, _LiveUnit
        ] = {}  # by unit number, in the order of their last use
        self._storages: dict[int, tuple[Unit, int]] = {}  # memory of unsharded parameters
        #: By microbatch: the uses of each unit that have brought no gradient yet.
        self._due: dict[object, Counter[int]] = {}
        self._order: list[int] = []  # of demands in this step
        self._expected: list[int] = []  # that of the last step
        self._at: int | None = 0
        #: A checksum of the numbers of the units that were gathered since the step began, in order. Ranks compare
        #: theirs at the end of the step: those that gathered other units took each other's shards for something else.
        self.gather_digest = 0
        self.live = self.peak = 0
        self.prefetch = True

    # The sharded parameters.

    def shard(self, parameter: torch.Tensor) -> ShardedParameter | None:
        """The shard of a parameter on this rank; None if the parameter is whole on every rank."""
        known = self._places.get(id(parameter))
        return None if known is None else known[0].shards[known[1]]

    def shards(self) -> Iterable[ShardedParameter]:
        """All sharded parameters, unit by unit."""
        return (shard for unit in self.units for shard in unit.shards)

    def state(self, unit: Unit) -> UnitState:
        """The amount of a unit that this rank holds now."""
        live = self._live_units.get(unit.number)
        return UnitState.SHARDED if live is None else live.state

    # Forward.

    def read(self, parameter: nn.Parameter, frame: Frame) -> torch.Tensor:
        """The full parameter, for the call ``frame``, which has to be ended with :meth:`leave`."""
        unit, index = self._places[id(parameter)]
        live = self._demand(unit)
        holder = frame
        at: Frame | None = frame
        while at is not None:
            if at.module is unit.module:
                holder = at
            at = at.parent
        live.users.update((id(holder), id(frame)))
        _units_of(holder).add(unit.number)
        _units_of(frame).add(unit.number)
        return live.tensors[index]

    def leave(self, frame: Frame, backward: bool) -> None:
        """End a call: reshard the units that no other call uses. In a backward pass they wait for their gradients."""
        for number in vars_of(frame):
            live = self._live_units.get(number)
            if live is None:
                continue
            live.users.discard(id(frame))
            if not live.users and not backward:
                self._reshard(number)

    # Backward.

    def expect(self, microbatch: object, parameter: nn.Parameter) -> None:
        """Announce one gradient: a use of the parameter is to bring it."""
        number = self._places[id(parameter)][0].number
        self._due.setdefault(microbatch, Counter())[number] += 1

    def on_grad(self, microbatch: object, parameter: nn.Parameter) -> None:
        """Count one gradient announced by ``expect``; reshard the unit after the microbatch's last."""
        number = self._places[id(parameter)][0].number
        due = self._due.get(microbatch)
        if due is None:
            return
        due[number] -= 1
        live = self._live_units.get(number)
        if due[number] <= 0 and live is not None and not live.users:
            self._reshard(number)

    def end_backward(self, microbatch: object) -> None:
        """End a backward pass of the microbatch: gradients that have not come are not waited for any more."""
        self._due.pop(microbatch, None)
        self._reshard_unused(None)

    def saved_tensor_hooks(self, microbatch: object) -> AbstractContextManager[object]:
        """While entered, autograd saves references to unsharded parameters (execution/saving.py)."""
        return saving.entered(self, microbatch)

    def place(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """The unsharded parameter in whose memory a tensor lies, as unit and index; None if there is none."""
        if not self._storages or tensor.layout is not torch.strided:
            return None
        return self._storages.get(tensor.untyped_storage()._cdata)

    def unshard_for_backward(self, unit: Unit, index: int, microbatch: object) -> torch.Tensor:
        """The full parameter that autograd saved a reference to in a forward pass of the microbatch."""
        if self.state(unit) is not UnitState.UNSHARDED:
            # Backward goes on to another unit: those whose gradients have all come are done with.
            self._reshard_unused(self._due.get(microbatch))
        return self._demand(unit).tensors[index]

    # Steps.

    def begin_step(self, eager: bool = False) -> None:
        """Before a step, or before an ``eager`` call, whose gradients other calls are not to wait for."""
        if not eager:
            self._due.clear()
        for unit in self.units:
            unit.check()
        self._expected, self._order, self._at = self._order or self._expected, [], 0
        self.gather_digest = 0

    def end_step(self) -> None:
        """After a step that went well: reshard all units, those in flight too."""
        self._due.clear()
        self.reshard_all()

    def abandon(self) -> None:
        """After a step that failed: forget everything, and wait for nobody."""
        self._due.clear()
        self._live_units.clear()
        self._storages.clear()
        self.live = 0

    def reshard_all(self) -> None:
        """Reshard every unit, until backward asks for it."""
        lost: ShardingError | None = None
        for number in list(self._live_units):
            try:
                self._reshard(number)
            except ShardingError as error:  # the other units are resharded, too
                lost = error
        if lost is not None:
            raise lost

    def mark(self) -> None:
        """Count the peak from here."""
        self.peak = self.live

    # Inside.

    def _demand(self, unit: Unit) -> _LiveUnit:
        number = unit.number
        if self.state(unit) is UnitState.UNSHARDED:
            self._live_units[number] = self._live_units.pop(number)  # used last
        else:
            self._expect_order(number)
            in_own_thread(lambda: self._unshard(unit))
        return self._live_units[number]

    def _expect_order(self, number: int) -> None:
        self._order.append(number)
        if self._at is not None:
            at = self._at
            right = at < len(self._expected) and self._expected[at] == number
            self._at = at + 1 if right else None

    def _unshard(self, unit: Unit) -> None:
        """Complete the all-gather of one unit, and launch the next unit's. Only for the rank's own thread."""
        if self.state(unit) is UnitState.SHARDED:
            self._make_room(unit.numel)
            self._launch(unit)
        live = self._live_units[unit.number]
        # Made outside of inference mode, since calls that record a graph may use the tensors, too.
        with torch.inference_mode(False), torch.no_grad():
            live.tensors.clear()  # of an attempt that failed midway
            live.versions.clear()
            for index, full in enumerate(unit.full_tensors(live.all_gather.result())):
                live.tensors.append(full)
                live.versions.append(full._version)
                self._storages[full.untyped_storage()._cdata] = unit, index
                counted.holds(counted.GATHERED, full)
            counted.happened("gathered", unit.shards[0].name)
            live.state, live.all_gather = UnitState.UNSHARDED, None
            self._prefetch()

    def _launch(self, unit: Unit) -> None:
        # Only here does a rank of the shard group send shards, so the digest sees every gather.
        self.gather_digest = zlib.crc32(unit.number.to_bytes(4), self.gather_digest)
        self.live += unit.numel
        self.peak = max(self.peak, self.live)
        with torch.inference_mode(False):
            self._live_units[unit.number] = _LiveUnit(
                self._collectives.all_gather_parts(unit.flat, unit.lengths)
            )

    def _prefetch(self) -> None:
        if not self.prefetch or self._at is None or self._at >= len(self._expected):
            return
        unit = self.units[self._expected[self._at]]
        # A prefetch may never take the live elements above the limit; a demand may.
        if self.state(unit) is UnitState.SHARDED and self.live + unit.numel <= self._most:
            self._launch(unit)

    def _make_room(self, wanted: int) -> None:
        """Reshard units that no open call uses, the one that was used longest ago first, as far as it must be."""
        for number in list(self._live_units):
            if self.live + wanted <= self._most:
                return
            if not self._live_units[number].users:
                self._reshard(number)

    def _reshard_unused(self, due: Counter[int] | None) -> None:
        """Reshard unsharded units that no open call uses and no gradient is due of; not those in flight."""
        for number, live in list(self._live_units.items()):
            unsharded = live.state is UnitState.UNSHARDED
            if unsharded and not live.users and not (due and due[number] > 0):
                self._reshard(number)

    def _reshard(self, number: int) -> None:
        """Free the full parameters of a unit."""
        live = self._live_units.pop(number)
        unit = self.units[number]
        self.live -= unit.numel
        if live.state is UnitState.UNSHARDING:
            # A wrong guess: nobody asked for the unit. The other ranks wait for this one's shards all the same.
            in_own_thread(live.all_gather.result)
            return
        for full in live.tensors:
            del self._storages[full.untyped_storage()._cdata]
        for index, full in enumerate(live.tensors):
            if full._version != live.versions[index]:
                raise ShardingError(
                    f"parameter {unit.shards[index].name!r} was modified in place while it was gathered for a "
                    "module call, and each rank keeps its own part only, so the change would be lost on the "
                    "others. Change parameters between steps"
                )
        live.tensors.clear()
        del full
        counted.happened("released", unit.shards[0].name)


def vars_of(frame: object) -> set[int]:
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
