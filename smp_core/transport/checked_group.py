"""A process group whose calls are checked on their own rank before they are issued, so that a bad
argument is an error of the rank that made it.

The class has torch's names and arguments, and every operation gives a work; synchronous calls are issue and
wait. A subclass decides how a correct call is issued.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from smp_core.errors import ArgumentError, UnsupportedError
from smp_core.reduction import why_not
from smp_core.transport.combined_work import CombinedWork
from smp_core.transport.memory import overlaps_itself
from smp_core.transport.messages import Size
from smp_core.transport.peers import ANY, Source, member
from smp_core.transport.unseen import hide

Tensor = torch.Tensor
Fields = tuple[tuple[str, Any], ...]


def shape_text(tensors: Sequence[Tensor]) -> str:
    """Shapes in words: ``[2, 3]`` for one tensor, ``[2, 3] [4]`` for two."""
    return " ".join(_shape(tensor.shape) for tensor in tensors)


def dtype_text(tensors: Sequence[Tensor]) -> str:
    """Dtypes in words, each once."""
    return " ".join(dict.fromkeys(_dtype(tensor.dtype) for tensor in tensors))


def _shape(shape: torch.Size) -> str:
    return str(list(shape))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensors(call: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"{call}: this backend moves dense CPU tensors, not {tensor.layout} on {tensor.device}"
            )
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ArgumentError(
            f"{call}: tensors of one call must have one dtype, not {dtype_text(tensors)}"
        )


def check_outputs(call: str, tensors: Sequence[Tensor]) -> None:
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


def _check_alike(call: str, what: str, tensor: Tensor, other: Tensor, whose: str) -> None:
    """Collectives of lists move whole tensors: a written tensor has the shape of the one that is read."""
    _check_count(call, what, tensor, other.numel(), f"the elements of {whose}")
    if tensor.shape != other.shape:
        raise ArgumentError(
            f"{call}: the {what} has shape {list(tensor.shape)}, {whose} {list(other.shape)}"
        )


def _check_list(call: str, what: str, tensors: Sequence[Tensor], size: int) -> None:
    if len(tensors) != size:
        raise ArgumentError(f"{call}: {len(tensors)} {what} tensors for a group of {size} ranks")


def fields_of(
    tensors: Sequence[Tensor], *, op: str | None = None, root: int | None = None
) -> Fields:
    if len(tensors) == 1:
        (tensor,) = tensors
        return _fields_of_one(op, root, tensor.dtype, tensor.shape)
    return _fields(op, root, dtype_text(tensors), shape_text(tensors))


@functools.lru_cache(maxsize=4096)  # texts take longer than a short call waits
def _fields_of_one(
    op: str | None, root: int | None, dtype: torch.dtype, shape: torch.Size
) -> Fields:
    return _fields(op, root, _dtype(dtype), _shape(shape))


def _fields(op: str | None, root: int | None, dtype: str, shape: str) -> Fields:
    fields: list[tuple[str, Any]] = []
    if op is not None:
        fields.append(("reduce op", op))
    if root is not None:
        fields.append(("root", root))
    return (*fields, ("dtype", dtype), ("shape", shape))


class Collective(NamedTuple):
    """A collective call as one member makes it, checked and not yet issued.

    Attributes:
        operation: its name, that of torch's functions.
        fields: the values in which all members must agree.
        op: the name of the reduce op; empty without.
        root: a position in the group, or None.
        brings: the tensors that this member sends; their number depends on the operation.
        gets: the tensors that are written, in the order of the values that this member receives.
        sizes: the shape of each of ``gets``, where it may differ between members.
        told: values that may differ between members, and that a message shows.
        whole: the tensor that ``brings`` are the rows of, and the one that ``gets`` are the rows of, where there
            are such: a backend that watches memory has two tensors to watch, and not two for each member.
        result: the tensors that torch's callers expect of the work, if these are not ``gets``.
    """

    operation: str
    fields: Fields = ()
    op: str = ""
    root: int | None = None
    brings: Sequence[Tensor] = ()
    gets: Sequence[Tensor] = ()
    sizes: Sequence[Size] | None = None
    told: Fields = ()
    whole: tuple[Tensor, Tensor] | None = None
    result: Any = None

    @property
    def outputs(self) -> Any:
        """The tensors that torch's callers expect of the work."""
        return list(self.gets) if self.result is None else self.result


class CheckedGroup(dist.ProcessGroup):
    """One rank's handle on a group. A subclass says ``_collective`` and ``_post``."""

    def __init__(self, position: int, size: int, name: str) -> None:
        super().__init__(position, size)  # type: ignore[call-arg]
        self._position, self._size = position, size
        self._name = self._desc = name
        self._destroyed = False
        self._coalesced: list[Any] | None = None

    # Issuing.

    def _collective(self, call: Collective, opts: Any) -> dist.Work:
        """Issue a collective that is in order. ``opts`` are torch's options of the call, or None."""
        raise NotImplementedError

    def _post(self, verb: str, tensors: list[Tensor], peer: Source, tag: int) -> dist.Work:
        """Issue a ``send`` or a ``recv``, whose tensors and peer are to be checked by
        ``_check_message``. A peer is a position in the group, as the caller gave it, or ANY.
        """
        raise NotImplementedError

    # Checks.

    def _check_message(self, verb: str, tensors: Sequence[Tensor], peer: Source) -> Source:
        """Check a send or a receive, and return its peer.

        Raises UnsupportedError, ArgumentError, or RankError for a peer that is no member.
        """
        check_tensors(verb, tensors)
        if verb == "recv":
            check_outputs(verb, tensors)
        return peer if peer is ANY else member(verb, "rank", peer, self._size)

    def _reduce_op(self, call: str, opts: Any, tensors: Sequence[Tensor]) -> str:
        op = str(opts.reduceOp.op.name)  # the object itself has no stable text
        for tensor in tensors:
            reason = why_not(op, tensor.dtype)
            if reason is not None:
                raise UnsupportedError(f"{call}: {reason}")
        return op

    def _root(self, call: str, opts: Any) -> int:
        return member(call, "root", opts.rootRank, self._size)

    # Collectives. Names and arguments are those of torch's ProcessGroup.

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._collective(Collective("barrier"), opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier. The verdict names a rank that does not come to it, whatever the arguments."""
        options = dist.BarrierOptions()
        options.asyncOp = False
        self._collective(Collective("monitored_barrier"), options).wait()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        check_tensors("broadcast", tensors)
        root = self._root("broadcast", opts)
        mine = root == self._position
        if not mine:
            check_outputs("broadcast", tensors)
        return self._collective(
            Collective(
                "broadcast",
                fields_of(tensors, root=root),
                root=root,
                brings=tensors if mine else (),
                gets=() if mine else tensors,
                result=tensors,
            ),
            opts,
        )

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._all_reduce("all_reduce", tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._all_reduce(
            "all_reduce_coalesced", tensors, opts or dist.AllreduceCoalescedOptions()
        )

    def _all_reduce(self, name: str, tensors: list[Tensor], opts: Any) -> dist.Work:
        check_tensors(name, tensors)
        check_outputs(name, tensors)
        op = self._reduce_op(name, opts, tensors)
        fields = fields_of(tensors, op=op)
        return self._collective(Collective(name, fields, op=op, brings=tensors, gets=tensors), opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        check_tensors("reduce", tensors)
        op, root = self._reduce_op("reduce", opts, tensors), self._root("reduce", opts)
        mine = root == self._position
        if mine:
            check_outputs("reduce", tensors)
        return self._collective(
            Collective(
                "reduce",
                fields_of(tensors, op=op, root=root),
                op=op,
                root=root,
                brings=tensors,
                gets=tensors if mine else (),
                result=tensors,
            ),
            opts,
        )

    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._all_gather("all_gather", output_tensors, input_tensors, opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> dist.Work:
        # torch hands over one list per member, each with one tensor per input.
        if len(output_lists) != self._size or not input_list:
            raise ArgumentError(
                f"all_gather_coalesced: {len(output_lists)} lists of outputs and {len(input_list)} inputs; it needs a "
                f"list for each of {self._size} members, and an input"
            )
        for position, outputs in enumerate(output_lists):
            if len(outputs) != len(input_list):
                raise ArgumentError(
                    f"all_gather_coalesced: the list for member {position} has {len(outputs)} outputs, and there are "
                    f"{len(input_list)} inputs"
                )
        by_input = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self._all_gather("all_gather_coalesced", by_input, input_list, opts)

    def _all_gather(
        self, name: str, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        for targets, value in zip(outputs, inputs, strict=True):
            _check_list(name, "output", targets, self._size)
            check_tensors(name, [value, *targets])
            check_outputs(name, targets)
            mine = targets[self._position]
            _check_alike(name, "output", mine, value, "this rank's input")
        flat = [target for targets in outputs for target in targets]
        fields: Fields = (("dtype", dtype_text(inputs)),)
        if name == "all_gather_coalesced":
            fields += (("number of tensors", len(inputs)),)
        # Sizes may differ: they are compared by pairs, and are no field.
        return self._collective(
            Collective(
                name,
                fields,
                brings=inputs,
                gets=flat,
                sizes=[tuple(target.shape) for target in flat],
                told=(("shape", shape_text(inputs)),),
                result=outputs,
            ),
            opts,
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._all_gather_single("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._all_gather_single("all_gather_single_coalesced", outputs, inputs, opts)

    def _all_gather_single(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        for output, value in zip(outputs, inputs, strict=True):
            check_tensors(name, [output, value])
            check_outputs(name, [output])
            why = f"{self._size} ranks x {value.numel()}"
            _check_count(name, "output", output, self._size * value.numel(), why)
        return self._collective(
            Collective(name, fields_of(inputs), brings=inputs, gets=outputs), opts
        )

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> dist.Work:
        name = "reduce_scatter"
        for output, inputs in zip(output_tensors, input_tensors, strict=True):
            _check_list(name, "input", inputs, self._size)
            check_tensors(name, [output, *inputs])
            check_outputs(name, [output])
            own = inputs[self._position]
            _check_alike(name, "output", output, own, "this rank's input")
        op = self._reduce_op(name, opts, output_tensors)
        brought = [tensor for inputs in input_tensors for tensor in inputs]
        fields = fields_of(brought, op=op)
        return self._collective(
            Collective(name, fields, op=op, brings=brought, gets=output_tensors), opts
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._reduce_scatter_single("reduce_scatter_single", [output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._reduce_scatter_single("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def _reduce_scatter_single(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> dist.Work:
        for output, value in zip(outputs, inputs, strict=True):
            check_tensors(name, [output, value])
            check_outputs(name, [output])
            why = f"{self._size} ranks x {output.numel()}"
            _check_count(name, "input", value, self._size * output.numel(), why)
        op = self._reduce_op(name, opts or dist.ReduceScatterOptions(), outputs)
        fields = fields_of(inputs, op=op)
        return self._collective(Collective(name, fields, op=op, brings=inputs, gets=outputs), opts)

    def scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> dist.Work:
        name, root = "scatter", self._root("scatter", opts)
        (output,) = output_tensors
        inputs = input_tensors[0] if input_tensors else []
        if root == self._position:
            _check_list(name, "input", inputs, self._size)
            for value in inputs:
                _check_alike(name, "output", output, value, "each input")
        check_tensors(name, [output, *inputs])
        check_outputs(name, [output])
        fields = fields_of([output], root=root)
        return self._collective(
            Collective(name, fields, root=root, brings=inputs, gets=output_tensors), opts
        )

    def gather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any
    ) -> dist.Work:
        name, root = "gather", self._root("gather", opts)
        (value,) = input_tensors
        outputs = output_tensors[0] if output_tensors else []
        if root == self._position:
            _check_list(name, "output", outputs, self._size)
            for output in outputs:
                _check_alike(name, "output", output, value, "the input")
        check_tensors(name, [value, *outputs])
        check_outputs(name, outputs)
        fields = fields_of([value], root=root)
        return self._collective(
            Collective(name, fields, root=root, brings=[value], gets=outputs), opts
        )

    def alltoall(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        name = "all_to_all"
        _check_list(name, "output", output_tensors, self._size)
        _check_list(name, "input", input_tensors, self._size)
        check_tensors(name, [*output_tensors, *input_tensors])
        check_outputs(name, output_tensors)
        sizes = [tuple(output.shape) for output in output_tensors]
        return self._all_to_all(name, input_tensors, output_tensors, sizes, opts)

    def _all_to_all(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        sizes: Sequence[Size],
        opts: Any,
        whole: tuple[Tensor, Tensor] | None = None,
    ) -> dist.Work:
        return self._collective(
            Collective(
                name,
                (("dtype", dtype_text(inputs)),),
                brings=inputs,
                gets=outputs,
                sizes=sizes,
                whole=whole,
                result=None if whole is None else [whole[1]],
            ),
            opts,
        )

    def all_to_all_single(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        output_split_sizes: list[int] | None,
        input_split_sizes: list[int] | None,
        opts: Any = None,
    ) -> dist.Work:
        name = "all_to_all_single"
        check_tensors(name, [output_tensor, input_tensor])
        check_outputs(name, [output_tensor])
        outputs = self._split(name, "output", output_tensor, output_split_sizes)
        inputs = self._split(name, "input", input_tensor, input_split_sizes)
        sizes = [tuple(output.shape) for output in outputs]
        whole = (input_tensor, output_tensor)
        return self._all_to_all(name, inputs, outputs, sizes, opts, whole)

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

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work:
        return self._post("send", tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work:
        return self._post("recv", tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        return self._post("recv", tensors, ANY, tag)

    # Coalescing: operations are issued one by one; their works are waited for as one.

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> CombinedWork:
        works, self._coalesced = self._coalesced or [], None
        return CombinedWork(works)

    # Torch's questions to a group about itself.

    def rank(self) -> int:
        return self._position

    def size(self) -> int:
        return self._size

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

    def _get_backend(self, device: torch.device) -> CheckedGroup:
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False


_OPERATIONS = (
    "barrier",
    "monitored_barrier",
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "gather",
    "alltoall",
    "all_to_all_single",
    "alltoall_base",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "send",
    "recv",
    "recv_anysource",
)
hide(CheckedGroup, _OPERATIONS)
