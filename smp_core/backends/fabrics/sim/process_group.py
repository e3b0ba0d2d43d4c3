"""The process group of `sim`: what torch.distributed, DDP and FSDP2 call, on a rank thread.

Every operation is issued and gives a work; synchronous calls are issue and wait. A call is checked
on its own rank before it meets the others, so that a bad argument is an error of the rank that made
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from smp_core.backends.base import Group
from smp_core.backends.fabrics.sim import collectives
from smp_core.backends.fabrics.sim.collectives import dtype_text, shape_text
from smp_core.backends.fabrics.sim.mailbox import ANY, Mailbox, Post
from smp_core.backends.fabrics.sim.matching import Call, Channel, Complete, Fields
from smp_core.backends.fabrics.sim.memory import Flight, overlaps_itself
from smp_core.backends.fabrics.sim.work import CombinedWork, SimWork
from smp_core.backends.frames import caller_place
from smp_core.backends.hosts.threads import RankContext
from smp_core.errors import ArgumentError, NotInitializedError, RankError, UnsupportedError
from smp_core.reduction import why_not

Tensor = torch.Tensor


class SharedGroup:
    """What the members' process groups of one group have in common."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.channel = Channel(group)
        self.mailbox = Mailbox(len(group.ranks))
        self.rank_map = {rank: index for index, rank in enumerate(group.ranks)}
        self.alive = 0  # handles not yet destroyed


def _check_tensors(call: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"{call}: this backend moves dense CPU tensors, not {tensor.layout} on {tensor.device}"
            )
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ArgumentError(
            f"{call}: tensors of one call must have one dtype, not {dtype_text(tensors)}"
        )


def _check_outputs(call: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if overlaps_itself(tensor):
            raise ArgumentError(
                f"{call}: an output of shape {list(tensor.shape)} overlaps itself (strides "
                f"{list(tensor.stride())}): several elements are one place in memory. Pass a copy"
            )


def _check_count(call: str, what: str, tensor: Tensor, expected: int, why: str) -> None:
    if tensor.numel() != expected:
        raise ArgumentError(
            f"{call}: the {what} has {tensor.numel()} elements, {why} need {expected}"
        )


def _check_list(call: str, what: str, tensors: Sequence[Tensor], size: int) -> None:
    if len(tensors) != size:
        raise ArgumentError(f"{call}: {len(tensors)} {what} tensors for a group of {size} ranks")


def _fields(tensors: Sequence[Tensor], *, op: str | None = None, root: int | None = None) -> Fields:
    fields: list[tuple[str, Any]] = []
    if op is not None:
        fields.append(("reduce op", op))
    if root is not None:
        fields.append(("root", root))
    fields += [("dtype", dtype_text(tensors)), ("shape", shape_text(tensors))]
    return tuple(fields)


class SimProcessGroup(dist.ProcessGroup):
    """One rank's handle on a group. Belongs to the rank's own thread."""

    def __init__(self, context: RankContext, shared: SharedGroup, name: str) -> None:
        group = shared.group
        self._position = shared.rank_map[context.rank]
        super().__init__(self._position, len(group.ranks))  # type: ignore[call-arg]
        self._context, self._shared, self._name = context, shared, name
        self._size = len(group.ranks)
        self._desc = name
        self._destroyed = False
        self._coalesced: list[SimWork] | None = None
        shared.alive += 1

    # Issuing.

    def _enter(self, call: str) -> RankContext:
        context = self._context
        context.check(call, "process group")
        if self._destroyed:
            raise NotInitializedError(f"{call}: process group {self._name} has been destroyed")
        return context

    def _collective(
        self,
        operation: str,
        fields: Fields,
        complete: Complete,
        opts: Any,
        *,
        brings: Sequence[Tensor] = (),
        gets: Sequence[Tensor] = (),
        counts: Sequence[int] | None = None,
        told: Fields = (),
        result: Any = None,
    ) -> SimWork:
        """Issue a collective.

        ``gets`` are written with the values that ``complete`` gives this member; ``result`` is what
        torch's callers expect of the work, if it is nested otherwise.
        """
        context = self._enter(operation)
        call = Call(operation, fields, None, caller_place(), told=told)
        flight = Flight(brings, gets)
        self._take_off(flight, operation, asynchronous=getattr(opts, "asyncOp", True))
        call.data = flight.inputs if counts is None else (flight.inputs, counts)

        def completed(calls: list[Call]) -> Any:
            with torch.no_grad():
                return complete(calls)

        meeting = self._shared.channel.join(context, call, completed)
        outputs = list(gets) if result is None else result
        return self._issued(SimWork(context, meeting, flight, outputs, operation, call.place))

    def _take_off(self, flight: Flight, call: str, *, asynchronous: bool) -> None:
        """The tensors of a call may not be those of another one in flight."""
        if flight.outputs_meet():
            raise ArgumentError(
                f"{call}: two outputs share memory: one value would overwrite the other"
            )
        work = self._context.fabric.airspace.conflict(flight)
        if work is not None:
            work.race(f"{call} uses memory of {work.name}, which is still in flight")
        if asynchronous:
            flight.take_off(call)

    def _issued(self, work: SimWork) -> SimWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _reduce_op(self, call: str, opts: Any, tensors: Sequence[Tensor]) -> str:
        op = str(opts.reduceOp.op.name)  # the object itself has no stable text
        for tensor in tensors:
            reason = why_not(op, tensor.dtype)
            if reason is not None:
                raise UnsupportedError(f"{call}: {reason}")
        return op

    def _root(self, call: str, opts: Any) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self._size:
            raise RankError(
                f"{call}: root {root} is not in the group; group ranks are 0 to {self._size - 1}"
            )
        return root

    # Collectives. Names and arguments are those of torch's ProcessGroup.

    def barrier(self, opts: Any = None) -> SimWork:
        return self._collective("barrier", (), collectives.barrier, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> SimWork:
        _check_tensors("broadcast", tensors)
        root = self._root("broadcast", opts)
        mine = root == self._position
        if not mine:
            _check_outputs("broadcast", tensors)
        return self._collective(
            "broadcast",
            _fields(tensors, root=root),
            collectives.broadcast(root),
            opts,
            brings=tensors if mine else (),
            gets=() if mine else tensors,
            result=tensors,
        )

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimWork:
        return self._all_reduce("all_reduce", tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> SimWork:
        return self._all_reduce(
            "all_reduce_coalesced", tensors, opts or dist.AllreduceCoalescedOptions()
        )

    def _all_reduce(self, name: str, tensors: list[Tensor], opts: Any) -> SimWork:
        _check_tensors(name, tensors)
        _check_outputs(name, tensors)
        op = self._reduce_op(name, opts, tensors)
        fields, complete = _fields(tensors, op=op), collectives.all_reduce(op)
        return self._collective(name, fields, complete, opts, brings=tensors, gets=tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> SimWork:
        _check_tensors("reduce", tensors)
        op, root = self._reduce_op("reduce", opts, tensors), self._root("reduce", opts)
        mine = root == self._position
        if mine:
            _check_outputs("reduce", tensors)
        return self._collective(
            "reduce",
            _fields(tensors, op=op, root=root),
            collectives.reduce(op, root),
            opts,
            brings=tensors,
            gets=tensors if mine else (),
            result=tensors,
        )

    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> SimWork:
        return self._all_gather("all_gather", output_tensors, input_tensors, opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> SimWork:
        # torch hands over one list per rank, each with one tensor per input.
        by_input = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self._all_gather("all_gather_coalesced", by_input, input_list, opts)

    def _all_gather(
        self, name: str, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> SimWork:
        for targets, value in zip(outputs, inputs, strict=True):
            _check_list(name, "output", targets, self._size)
            _check_tensors(name, [value, *targets])
            _check_outputs(name, targets)
            mine = targets[self._position]
            _check_count(name, "output", mine, value.numel(), "the elements of this rank's input")
        flat = [target for targets in outputs for target in targets]
        return self._collective(
            name,
            (("dtype", dtype_text(inputs)),),  # sizes may differ: counts are compared by pairs
            collectives.all_gather,
            opts,
            brings=inputs,
            gets=flat,
            counts=[target.numel() for target in flat],
            told=(("shape", shape_text(inputs)),),
            result=outputs,
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SimWork:
        return self._all_gather_single("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimWork:
        return self._all_gather_single("all_gather_single_coalesced", outputs, inputs, opts)

    def _all_gather_single(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> SimWork:
        for output, value in zip(outputs, inputs, strict=True):
            _check_tensors(name, [output, value])
            _check_outputs(name, [output])
            why = f"{self._size} ranks x {value.numel()}"
            _check_count(name, "output", output, self._size * value.numel(), why)
        fields, complete = _fields(inputs), collectives.all_gather_single
        return self._collective(name, fields, complete, opts, brings=inputs, gets=outputs)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> SimWork:
        name = "reduce_scatter"
        for output, inputs in zip(output_tensors, input_tensors, strict=True):
            _check_list(name, "input", inputs, self._size)
            _check_tensors(name, [output, *inputs])
            _check_outputs(name, [output])
            own = inputs[self._position]
            _check_count(name, "output", output, own.numel(), "the elements of this rank's input")
        op = self._reduce_op(name, opts, output_tensors)
        brought = [tensor for inputs in input_tensors for tensor in inputs]
        fields, complete = _fields(brought, op=op), collectives.reduce_scatter(op)
        return self._collective(name, fields, complete, opts, brings=brought, gets=output_tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SimWork:
        return self._reduce_scatter_single("reduce_scatter_single", [output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimWork:
        return self._reduce_scatter_single("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def _reduce_scatter_single(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> SimWork:
        for output, value in zip(outputs, inputs, strict=True):
            _check_tensors(name, [output, value])
            _check_outputs(name, [output])
            why = f"{self._size} ranks x {output.numel()}"
            _check_count(name, "input", value, self._size * output.numel(), why)
        op = self._reduce_op(name, opts or dist.ReduceScatterOptions(), outputs)
        fields, complete = _fields(inputs, op=op), collectives.reduce_scatter_single(op)
        return self._collective(name, fields, complete, opts, brings=inputs, gets=outputs)

    def scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> SimWork:
        name, root = "scatter", self._root("scatter", opts)
        (output,) = output_tensors
        inputs = input_tensors[0] if input_tensors else []
        if root == self._position:
            _check_list(name, "input", inputs, self._size)
            for value in inputs:
                _check_count(name, "output", output, value.numel(), "the elements of each input")
        _check_tensors(name, [output, *inputs])
        _check_outputs(name, [output])
        fields = _fields([output], root=root)
        complete = collectives.scatter(root)
        return self._collective(name, fields, complete, opts, brings=inputs, gets=output_tensors)

    def gather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any
    ) -> SimWork:
        name, root = "gather", self._root("gather", opts)
        (value,) = input_tensors
        outputs = output_tensors[0] if output_tensors else []
        if root == self._position:
            _check_list(name, "output", outputs, self._size)
            for output in outputs:
                _check_count(name, "output", output, value.numel(), "the input's elements")
        _check_tensors(name, [value, *outputs])
        _check_outputs(name, outputs)
        fields = _fields([value], root=root)
        complete = collectives.gather(root)
        return self._collective(name, fields, complete, opts, brings=[value], gets=outputs)

    def alltoall(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> SimWork:
        name = "all_to_all"
        _check_list(name, "output", output_tensors, self._size)
        _check_list(name, "input", input_tensors, self._size)
        _check_tensors(name, [*output_tensors, *input_tensors])
        _check_outputs(name, output_tensors)
        return self._all_to_all(name, input_tensors, output_tensors, opts)

    def _all_to_all(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        opts: Any,
        result: Any = None,
    ) -> SimWork:
        return self._collective(
            name,
            (("dtype", dtype_text(inputs)),),
            collectives.all_to_all,
            opts,
            brings=inputs,
            gets=outputs,
            counts=[output.numel() for output in outputs],
            result=result,
        )

    def all_to_all_single(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: list[int] | None,
        input_split_sizes: list[int] | None,
        opts: Any = None,
    ) -> SimWork:
        name = "all_to_all_single"
        _check_tensors(name, [output_tensor, input_tensor])
        _check_outputs(name, [output_tensor])
        outputs = self._split(name, "output", output_tensor, output_split_sizes)
        inputs = self._split(name, "input", input_tensor, input_split_sizes)
        return self._all_to_all(name, inputs, outputs, opts, result=[output_tensor])

    alltoall_base = all_to_all_single

    def _split(self, call: str, what: str, tensor: Tensor, sizes: list[int] | None) -> list[Tensor]:
        rows = tensor.size(0) if tensor.dim() else 1
        if not sizes:
            if rows % self._size:
                raise ArgumentError(
                    f"{call}: {rows} rows of the {what} do not divide among {self._size} ranks"
                )
            sizes = [rows // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != rows or min(sizes) < 0:
            raise ArgumentError(
                f"{call}: {what} split sizes {list(sizes)} do not cut {rows} rows for {self._size} ranks"
            )
        return list(torch.split(tensor, list(sizes))) if tensor.dim() else [tensor]

    # Older names of torch for the same operations.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Point-to-point.

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> SimWork:
        return self._post("send", tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> SimWork:
        return self._post("recv", tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> SimWork:
        return self._post("recv", tensors, ANY, tag)

    def _post(self, verb: str, tensors: list[Tensor], peer: int, tag: int) -> SimWork:
        context = self._enter(verb)
        (tensor,) = tensors
        _check_tensors(verb, tensors)
        if verb == "recv":
            _check_outputs(verb, tensors)
        if peer != ANY and not 0 <= peer < self._size:
            raise RankError(
                f"{verb}: rank {peer} is not in the group; group ranks are 0 to {self._size - 1}"
            )
        # torch issues its synchronous send and recv in the same way, so each is in flight.
        sends, place = verb == "send", caller_place()
        flight = Flight(tensors if sends else (), () if sends else tensors)
        post = Post(
            context, self._shared.group, verb, self._position, peer, tag, tensor, flight, place
        )
        self._take_off(flight, post.text(), asynchronous=True)
        self._shared.mailbox.post(post)
        return self._issued(SimWork(context, post, flight, tensors, post.text(), place))

    # Coalescing: operations are issued one by one; their works are waited for as one.

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> CombinedWork:
        works, self._coalesced = self._coalesced or [], None
        return CombinedWork(works)

    # Life cycle and what torch asks a group about itself.

    def new_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> SimProcessGroup | None:
        """The hook of torch's ``new_group``: every rank of the world calls it, members get their
        handle.
        """
        context = self._enter("new_group")
        group: SimProcessGroup | None = context.fabric.new_group(
            tuple(ranks), group_name, group_desc
        )
        return group

    def shutdown(self) -> None:
        if not self._destroyed:
            self._destroyed = True
            self._shared.alive -= 1

    abort = shutdown

    def rank(self) -> int:
        return self._position

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "sim"

    def getBackendName(self) -> str:
        return "sim"

    _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> SimProcessGroup:
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __repr__(self) -> str:
        return f"SimProcessGroup(rank {self._context.rank}, group {self._name} of ranks {self._shared.group.ranks})"
