"""The ordered collectives of data parallelism: shards gathered, gradients summed in a published order.

Two groups. The training state is split over the *shard group*; the *replicate group* has the ranks that hold the same
shard. Values are exchanged, and folded along the tree of ``smp_core.reduction`` over the order of the group, so that
the bits are the same on every backend. Sums are left to the backend `smddp` alone, whose own sums are folds in that
order (docs/decisions/9-sums-in-shared-memory.md). An all-reduce may divide its sum, once and before it is handed out.
Everything travels as bytes, because not every backend moves every dtype. A shard goes to each other member on its own:
that is one hop, where a ring has as many as there are members. A ring is left to gathers that would otherwise send a
shard between the same two nodes more than once.

All members of a group begin the same operations in the same order, and so all of :meth:`all_reduce`
and their results. Arguments must not change until the result is there. Only the rank's own thread
may call anything here.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch.distributed import distributed_c10d

from smp_core import reduction
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.execution import counted
from smp_core.torch.reduction import gather_plan
from smp_core.torch.reduction.gather_backend import GatherBackend
from smp_core.torch.reduction.layout import Layout
from smp_core.torch.reduction.traffic import Sent, Traffic
from smp_core.transport.protocols import SMDDP, Group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensor = torch.Tensor
_c10d: Any = distributed_c10d  # its stubs lack some options

#: The dtypes that may be folded: narrower floats would be rounded after every addition.
_FOLDED = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})

#: The dtypes that narrower floats are folded in.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)

#: The exchanges of an operation: each is waited for where it is yielded; the result is returned.
_Exchanges = Generator[object, None, _T]


class Pending(Protocol[_T_co]):
    """An operation in flight."""

    def result(self) -> _T_co:
        """Wait for it. The memory is new, and the same however often this is called."""

    def poll(self) -> None:
        """Without waiting: if the exchange in flight has completed, go on and free its buffers."""


class _Members:
    """The ranks of one exchange, as this one sees them."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        ranks: tuple[int, ...],
        nodes: Sequence[int],
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.size, self.rank = len(ranks), ranks.index(runtime.rank)
        self.process_group: Any = process_group
        if self.size > 1 and process_group is None:
            self.process_group = runtime.fabric.process_group(Group(f"smp {name}", ranks))
        here, all_ = nodes[runtime.rank], {nodes[rank] for rank in ranks}
        #: True if the backend's own gather is used. Gloo's gather goes around a ring, one hop after the other: on
        #: one machine, sending every shard by itself takes half the time (benchmarks/sharding.py). Where some members
        #: share a node, and some do not, a ring crosses between nodes less often.
        self.backend = _backend_of(self.process_group)
        self.ring = self.backend != "gloo" or 1 < len(all_) < self.size
        #: True if the backend's own reductions are folds in the published order.
        self.folds = self.backend == SMDDP
        #: How many of the others are on other nodes.
        self.elsewhere = sum(nodes[rank] != here for rank in ranks)
        #: How often a part leaves this rank's node in a gather. Around a ring as often as the next member is on another
        #: node. Alone as on a ring: shards go alone where all members are on one node, or each on its own.
        next_elsewhere = nodes[ranks[(self.rank + 1) % self.size]] != here
        self.crossings = self.size - 1 if next_elsewhere else 0
        if self.backend == SMDDP:  # once to each other node
            self.crossings = len(all_) - 1


def _backend_of(process_group: Any) -> str:
    """The name of the backend that a group's tensors on the CPU go through."""
    try:
        return str(process_group._get_backend(torch.device("cpu")).name())
    except (AttributeError, RuntimeError):  # no group, or one that is no collection of backends
        return ""


class Collectives:
    """One rank's exchanges with its shard group and its replicate group.

    All ranks make one at the same point, because the constructor makes process groups and asks for the layout of nodes.

    Args:
        runtime: this rank's.
        group: the kind of group that state is split over.
        replicate: the kind of group whose members hold the same shard; None: there are no others.
        plan: the name of the gather plan (``gather_plan.PLANNERS``); None for the configuration's.

    Raises ConfigError for sizes of SMDDP's buffers in the environment that do not serve (GatherBackend).
    """

    def __init__(
        self,
        runtime: Runtime,
        group: GroupKind = GroupKind.SHARDING,
        replicate: GroupKind | None = GroupKind.REPLICATION,
        plan: str | None = None,
    ) -> None:
        nodes = gather_plan.nodes_of(runtime)
        ranks = runtime.group(group).ranks
        others = (runtime.rank,) if replicate is None else runtime.group(replicate).ranks
        if plan is None:
            plan = "hierarchical" if runtime.config.sdp_hierarchical_allgather else "flat"
        self.traffic = Traffic()
        self._shard_kind, self._replicate_kind = group, replicate or group
        self._shard_group = _Members(runtime, group.value, ranks, nodes)
        # A process group of their own: reduce-scatters are launched when gradients are complete, which may be
        # earlier on one rank than on another, between other gathers.
        self._sums = _Members(runtime, f"{group.value} sums", ranks, nodes)
        self._replicate_group = _Members(runtime, (replicate or group).value, others, nodes)
        self._flat = (("all_gather", self._shard_group),)
        #: The hops of the plan, each with its operation's name for the counters.
        self._hops: Sequence[tuple[str, _Members]] = self._flat
        self._order: Tensor | None = None
        planned = gather_plan.PLANNERS[plan](ranks, runtime.rank, nodes)
        if len(planned.hops) > 1:
            self._hops = tuple(
                (
                    f"all_gather {hop.name}",
                    _Members(runtime, f"{group.value} {hop.name}", hop.ranks, nodes),
                )
                for hop in planned.hops
            )
            self._order = torch.tensor(planned.order, device="cpu")
        self._gather_backend = GatherBackend(runtime, group)
        self._smddp: Sequence[tuple[str, _Members]] = ()
        if self._gather_backend.group is not None:
            members = _Members(runtime, group.value, ranks, nodes, self._gather_backend.group)
            self._smddp = (("all_gather", members),)
        self.size, self.rank, self.replicas = len(ranks), self._shard_group.rank, len(others)
        self._queue: deque[_Operation[object]] = deque()
        self._reductions: deque[_Operation[object]] = deque()
        self._open: dict[_Operation[object], None] = {}  # in the order in which they began
        #: How many operations have begun: the same on all members that have done the same.
        self.begun = 0

    def all_gather(self, shard: Tensor) -> Pending[Tensor]:
        """The shards of all members, one after the other in the order of the group.

        ``shard`` is ``(n,)``, contiguous, of any dtype and the same size on all, 0 included; the result
        is ``(size * n,)``.
        """
        hops, order, against = self._gather_route(shard)
        exchanges = self._gather(shard.detach(), hops, order, against)
        return self._begin(exchanges, self._queue if len(hops) > 1 else None)

    def all_gather_parts(self, shard: Tensor, lengths: Sequence[int]) -> Pending[list[Tensor]]:
        """The shards of all members, taken apart.

        ``shard`` is as for :meth:`all_gather`, and has parts of these lengths, one after the other. The result has
        a tensor for each part, ``(size, length)``: that part of the shards of all members, in the order of the group.
        Each is contiguous, in memory of its own, or all are views of one buffer.

        Raises ValueError if the lengths are not those of the shard.
        """
        if sum(lengths) != shard.numel():
            raise ValueError(f"{shard.numel()} elements have no parts of {list(lengths)}")
        hops, order, against = self._gather_route(shard)
        ((_, members), *further) = hops
        if members.backend == SMDDP and not further and shard.numel():
            return self._begin(self._gather_parts(shard.detach(), lengths, members, against))
        exchanges = self._split_gathered(
            self._gather(shard.detach(), hops, order, against), lengths
        )
        return self._begin(exchanges, self._queue if further else None)

    @property
    def takes_columns(self) -> bool:
        """True if a reduce-scatter sends each of its columns from where it is; otherwise it joins them first."""
        return self._sums.folds

    def reduce_scatter(self, columns: Sequence[Tensor]) -> Pending[Tensor]:
        """The sum over the members of the row that each has for this rank: the one with this rank's number.

        ``columns`` are ``(size, n_i)`` each, contiguous, of one dtype: float32, float64 or complex. A row is that of
        all columns, one behind the other; the result is ``(n,)``, ``n`` the sum of all ``n_i``.
        Raises TypeError for another dtype.
        """
        for each in columns:
            _check("reduce_scatter", each.dtype)
        return self._begin(self._reduce([each.detach() for each in columns]))

    def all_to_all(self, rows: Tensor) -> Pending[Tensor]:
        """Exchange rows: row i goes to member i, and row i of the result came from member i.

        ``rows`` is ``(size, ...)``, contiguous, of any dtype and the same shape on all, 0 elements included.
        """
        return self._begin(self._exchange(rows.detach()))

    def all_reduce(self, flat: Tensor, divisor: int = 1) -> Pending[Tensor]:
        """The sum over the ranks that hold the same shard, divided once; ``(n,)`` to ``(n,)``, with the same bits
        on all. 16-bit values are folded and divided in float32, and rounded once.

        ``flat`` is contiguous, of a floating-point or complex dtype. Raises TypeError for another one. The traffic
        is that of a ring.
        """
        _check("all_reduce", _WIDE.get(flat.dtype, flat.dtype))
        return self._begin(
            self._reduce_all(flat.detach(), divisor), self._reductions, together=True
        )

    def all_gather_values(self, values: Sequence[float]) -> list[list[float]]:
        """The values of each member, as many of all, in the order of the group; exactly."""
        local = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        exchanges = self._gather(local, self._flat, None, "these are no parameters")
        gathered = self._begin(exchanges).result()
        return (
            gathered.view(self.size, -1).tolist() if len(local) else [[] for _ in range(self.size)]
        )

    def settle(self) -> None:
        """Complete the operations in flight that nobody waited for, as after a step that failed on every rank."""
        for operation in list(self._open):
            operation.result()

    def _begin(
        self,
        exchanges: _Exchanges[_T],
        queue: deque[_Operation[object]] | None = None,
        together: bool = False,
    ) -> Pending[_T]:
        self.begun += 1
        return _Operation(exchanges, queue, self._open, together)

    def _gather_route(
        self, shard: Tensor
    ) -> tuple[Sequence[tuple[str, _Members]], Tensor | None, str]:
        """The hops of a gather of these shards, the order that they leave the shards in, and the reason why they are
        not those of `smddp`.
        """
        against = self._gather_backend.reason_against(shard.numel() * shard.element_size())
        return (self._hops, self._order, against) if against else (self._smddp, None, "")

    def _gather_parts(
        self, shard: Tensor, lengths: Sequence[int], members: _Members, reason: str
    ) -> _Exchanges[list[Tensor]]:
        """Gather each part into its result: no buffer holds the shards of all members first."""
        parts = list(torch.split(shard, list(lengths)))
        self._count_gather(shard, members, "all_gather", self._shard_kind, reason)
        wholes = [shard.new_empty(members.size, length) for length in lengths]
        for whole in wholes:
            counted.holds(counted.EXCHANGED, whole)
        group = members.process_group
        yield group.allgather_into_tensor_coalesced(wholes, parts, _c10d.AllgatherOptions())
        return wholes

    def _split_gathered(
        self, exchanges: _Exchanges[Tensor], lengths: Sequence[int]
    ) -> _Exchanges[list[Tensor]]:
        """The parts, as views of the shards of all members."""
        whole = yield from exchanges
        return list(torch.split(whole.view(self.size, sum(lengths)), list(lengths), dim=1))

    def _gather(
        self,
        shard: Tensor,
        hops: Sequence[tuple[str, _Members]],
        order: Tensor | None,
        reason: str = "",
    ) -> _Exchanges[Tensor]:
        shards, kind = shard, self._shard_kind
        for operation, members in hops:
            shards = yield from self._gather_from(shards, members, operation, kind, reason)
        if order is None or not shard.numel():
            return shard.clone() if shards is shard else shards
        # After several hops the shards lie in the order of the last hop, not in that of the group.
        rows = shards.view(torch.uint8).view(self.size, -1)
        return rows.index_select(0, order.to(rows.device)).view(-1).view(shard.dtype)

    def _exchange(self, rows: Tensor) -> _Exchanges[Tensor]:
        received = yield from self._exchange_rows(
            rows, self._shard_group, "all_to_all", self._shard_kind
        )
        return received.clone() if received is rows else received

    def _reduce(self, columns: Sequence[Tensor]) -> _Exchanges[Tensor]:
        members = self._sums
        if members.folds and any(each.numel() for each in columns):
            return (yield from self._reduce_columns(columns, members))
        rows = columns[0] if len(columns) == 1 else torch.cat(list(columns), 1)
        del columns
        received = yield from self._exchange_rows(rows, members, "reduce_scatter", self._shard_kind)
        total = _fold(received)
        return total.clone() if received is rows else total

    def _reduce_columns(self, columns: Sequence[Tensor], members: _Members) -> _Exchanges[Tensor]:
        """The sum by the backend's own reduce-scatter."""
        elements = sum(each.numel() for each in columns)
        self._count("reduce_scatter", self._shard_kind, members, elements, columns[0].dtype)
        for each in columns:
            counted.holds(counted.EXCHANGED, each)
        total = columns[0].new_empty(elements // members.size)
        parts = list(torch.split(total, [each.shape[1] for each in columns]))
        options = _c10d.ReduceScatterOptions()
        yield members.process_group.reduce_scatter_tensor_coalesced(parts, list(columns), options)
        return total

    def _reduce_all(self, flat: Tensor, divisor: int) -> _Exchanges[Tensor]:
        members, kind = self._replicate_group, self._replicate_kind
        if members.folds and flat.dtype not in _WIDE and flat.numel():
            return (yield from self._reduce_all_at_once(flat, members, kind, divisor))
        layout = Layout(flat.numel(), members.size)
        even = layout.padded_numel == layout.numel
        rows = flat.view(members.size, layout.shard_numel) if even else layout.shards(flat)
        rows = yield from self._exchange_rows(rows, members, "all_reduce", kind)
        total = divided(_fold(rows.to(_WIDE.get(flat.dtype, flat.dtype))), divisor).to(flat.dtype)
        whole = yield from self._gather_from(total, members, "all_reduce, handed out", kind)
        if whole.data_ptr() == flat.data_ptr():  # a group of one, and nothing to divide
            return whole.clone()
        return whole[: flat.numel()]

    def _reduce_all_at_once(
        self, flat: Tensor, members: _Members, kind: GroupKind, divisor: int
    ) -> _Exchanges[Tensor]:
        """The sum over the replicate group by the backend's own all-reduce, divided once.

        The traffic counts the bytes of the exchanges of other backends (traffic.py): the backend's hops are its own.
        """
        padded = Layout(flat.numel(), members.size).padded_numel
        for operation in ("all_reduce", "all_reduce, handed out"):
            self._count(operation, kind, members, padded, flat.dtype)
        total = flat.clone()
        counted.holds(counted.EXCHANGED, total)
        yield members.process_group.allreduce([total], _c10d.AllreduceOptions())
        return divided(total, divisor)

    def _gather_from(
        self,
        shard: Tensor,
        members: _Members,
        operation: str,
        kind: GroupKind,
        reason: str = "",
    ) -> Generator[object, None, Tensor]:
        size, ring = members.size, members.ring
        self._count_gather(shard, members, operation, kind, reason)
        if size == 1 or not shard.numel():
            return shard
        whole = shard.new_empty(shard.numel() * size)
        counted.holds(counted.EXCHANGED, whole)
        to, from_ = whole.view(torch.uint8), shard.view(torch.uint8)
        group = members.process_group
        if ring:
            yield group._allgather_base(to, from_, _c10d.AllgatherOptions())
            return whole
        rows, works = to.view(size, -1), []
        for distance in range(1, size):
            source = (members.rank - distance) % size
            works.append(group.recv([rows[source]], source, 0))
        for distance in range(1, size):
            works.append(group.send([from_], (members.rank + distance) % size, 0))
        rows[members.rank].copy_(from_)
        yield from works
        return whole

    def _exchange_rows(
        self, rows: Tensor, members: _Members, operation: str, kind: GroupKind
    ) -> Generator[object, None, Tensor]:
        """The members' rows for this one; the given rows themselves where this one is alone, or rows are empty."""
        self._count(operation, kind, members, rows.numel(), rows.dtype)
        if members.size == 1 or not rows.numel():
            return rows
        received = torch.empty_like(rows)
        counted.holds(counted.EXCHANGED, rows)
        counted.holds(counted.EXCHANGED, received)
        to, from_ = received.view(-1).view(torch.uint8), rows.view(-1).view(torch.uint8)
        options = _c10d.AllToAllOptions()
        yield members.process_group.alltoall_base(to, from_, [], [], options)
        return received

    def _count_gather(
        self, shard: Tensor, members: _Members, operation: str, kind: GroupKind, reason: str
    ) -> None:
        """Count a gather in which each member is sent the shards of all others."""
        size, each = members.size, shard.numel() * shard.element_size()
        counts = each * (size - 1), each * members.crossings
        where = members.backend, reason
        self.traffic.add(Sent(operation, kind, shard.numel() * size, shard.dtype, *counts, *where))

    def _count(
        self, operation: str, kind: GroupKind, members: _Members, elements: int, dtype: torch.dtype
    ) -> None:
        """Count an exchange in which each other member is sent a part of so many elements."""
        part = elements // members.size * dtype.itemsize
        others = part * (members.size - 1), part * members.elsewhere
        self.traffic.add(Sent(operation, kind, elements, dtype, *others))


class OperationState(enum.Enum):
    """The stage that an operation has reached, and the memory that it holds there."""

    FIRST_EXCHANGE = "first exchange"
    """The sent tensor, and a buffer of the same size (of a gather: of all shards) that is being received into."""

    LATER_EXCHANGE = "later exchange"
    """The result of the exchange before, folded or gathered, and a buffer that the present one receives into."""

    DONE = "done"
    """The result alone."""


class _Operation(Generic[_T_co]):
    """An operation of several exchanges (see Pending). The first exchange begins at once, the next ones when the
    result is asked for.

    Operations of several exchanges go through a queue: the later exchanges begin in the order in which the
    operations did, whatever is asked for first, and so in the same order on all ranks. If they are batched
    (``together``), the first result that is asked for begins the second exchange of all that have begun.
    """

    def __init__(
        self,
        exchanges: _Exchanges[_T_co],
        queue: deque[_Operation[object]] | None,
        open_: dict[_Operation[object], None],
        together: bool = False,
    ) -> None:
        self._exchanges, self._queue, self._open = exchanges, queue, open_
        self._together = together
        self._work: Any = None
        self._result: _T_co | None = None
        self._error: Exception | None = None
        self._state = OperationState.FIRST_EXCHANGE
        open_[self] = None
        self._advance(OperationState.FIRST_EXCHANGE)
        if self._state is not OperationState.DONE and queue is not None:
            queue.append(self)

    def result(self) -> _T_co:
        while self._state is not OperationState.DONE and self._queue:
            if self._together:
                for each in self._queue:
                    each._begin_second()
            self._queue.popleft()._finish()
        self._finish()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def poll(self) -> None:
        # Operations in a queue have a second exchange, which begins in the queue's order alone.
        waits = self._queue is None and self._state is not OperationState.DONE
        if waits and self._work.is_completed():
            self._go_on()

    def _begin_second(self) -> None:
        if self._state is OperationState.FIRST_EXCHANGE:
            self._go_on()

    def _finish(self) -> None:
        while self._state is not OperationState.DONE:
            self._go_on()

    def _go_on(self) -> None:
        self._advance(OperationState.LATER_EXCHANGE)

    def _advance(self, state: OperationState) -> None:
        """Wait for the exchange in flight, if there is one; begin the next, or keep the result if there is none.

        An operation that fails is done, and is waited for no more.
        """
        try:
            if self._work is not None:
                self._work.wait()
            self._work = next(self._exchanges)
            self._state = state
        except StopIteration as stop:
            self._result = stop.value
            self._end()
        except Exception as error:
            self._error = error
            self._end()
            raise

    def _end(self) -> None:
        self._work = None
        self._state = OperationState.DONE
        self._open.pop(self, None)


def _fold(rows: Tensor) -> Tensor:
    """The sum of the rows along the tree: of one row, that row itself."""
    total: Tensor = reduction.fold(list(rows), torch.add)
    return total


def divided(total: Tensor, divisor: int) -> Tensor:
    """The total, divided once; complex values component by component, as smp_core.reduction does."""
    if divisor == 1:
        return total
    if total.is_complex():
        return torch.view_as_complex(torch.view_as_real(total) / divisor)
    return total / divisor


def _check(call: str, dtype: torch.dtype) -> None:
    if dtype not in _FOLDED:
        raise TypeError(
            f"{call}: {dtype} would be rounded after every addition; pass float32, float64 or "
            f"complex values"
        )
