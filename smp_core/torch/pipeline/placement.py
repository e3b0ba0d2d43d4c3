"""Placement: the owner of each module, and the distribution of parameters and buffers to their owners.

On one rank, ``decide`` turns the contexts of ``smp.partition``, or the automatic partition, into a Placement.
``settle`` broadcasts the Placement. ``distribute`` sends every owner its parameters and buffers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from smp_core.errors import RUN_ENDED, SmpError
from smp_core.topology import GroupKind, Topology
from smp_core.torch.exceptions import PartitionError, UnsupportedTrainingError
from smp_core.torch.execution.source import KeptShard
from smp_core.torch.parameters import creation, foreign, sharing
from smp_core.torch.parameters.marking import Mark, new_mark
from smp_core.torch.parameters.sharing import Entry
from smp_core.torch.parameters.split import split_of
from smp_core.torch.pipeline import partitioner
from smp_core.torch.pipeline.tracing import Trace
from smp_core.torch.session import Owners, TrainingSession
from smp_core.transport.protocols import Group

#: The partition that smp.partition and smp.set_partition chose for a module.
PARTITION: Mark[int] = new_mark("_smp_partition")
#: Attribute of the model: true shapes by first name, also of emptied parameters and buffers.
SHAPES = "_smp_shapes"
_CHUNK = 32 << 20  # bytes of tensors in one broadcast


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """The owner, a pp rank, of every module, parameter and buffer, by each of its names.

    A module with several paths has one owner, and so has a tensor with several names.
    """

    degree: int
    modules: Mapping[str, int]
    parameters: Mapping[str, int]
    buffers: Mapping[str, int]

    def owner(self, path: str) -> int:
        """The pp rank that runs the module at ``path`` ("" is the root)."""
        return self.modules[path]


class Sharded(Protocol):
    """The parameters of a model of which each rank keeps a shard (sharding/sharded_model.py)."""

    def shard(self, parameter: torch.Tensor) -> KeptShard | None:
        """The shard of a parameter; None if the parameter is whole on every rank."""

    def describe(self) -> None:
        """Set the attributes of persistent parameters that scripts read, once parameters have values."""


def decide(session: TrainingSession, module: nn.Module, trace: Trace | None = None) -> Placement:
    """Compute the placement of ``module`` from the configuration, without communication.

    With ``auto_partition`` the assignment is balanced (partitioner.py). Otherwise a module goes to the partition that
    ``smp.partition`` or ``smp.set_partition`` chose, or else to ``default_partition``. In both cases a module without
    parameters in its subtree follows its parent (1.13), and so does a module without a forward (ParameterList,
    ModuleList).

    Raises PartitionError if modules on different partitions share a parameter or buffer;
    UnsupportedTrainingError for a parameter that is not initialised (lazy modules).
    """
    if session.restored is not None:  # the partition of a partial checkpoint that was resumed
        restored: Placement = session.restored
        return restored
    config = session.runtime.config
    degree = config.pipeline_parallel_degree
    for entry in sharing.entries(module):
        if nn.parameter.is_lazy(entry.tensor):
            raise UnsupportedTrainingError(
                f"smp.DistributedModel: {entry.kind} {entry.name!r} of module {entry.module!r} "
                f"({type(entry.owner).__name__}) has no shape yet. Call the model once on an example "
                "before it is wrapped, or give the sizes to the module's constructor"
            )
    if degree == 1:
        return place(module, dict.fromkeys(module.modules(), 0), 1)
    if config.auto_partition:
        wanted = partitioner.assign(module, degree, config.memory_weight, trace)
    else:
        marked = {each: PARTITION.of(each) for each in module.modules()}
        wanted = {
            each: config.default_partition if index is None else index
            for each, index in marked.items()
        }
        _check_indices(module, wanted, degree)
    placement = place(module, wanted, degree)
    _check_shared(module, placement)
    return placement


def place(module: nn.Module, wanted: Mapping[nn.Module, int], degree: int) -> Placement:
    """The placement by ``wanted``, in which modules without parameters follow their parents."""
    owner = follow_parents(module, wanted)
    modules = {path: owner[child] for path, child in module.named_modules(remove_duplicate=False)}
    parameters: dict[str, int] = {}
    buffers: dict[str, int] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for tensors, names in ((child._parameters, parameters), (child._buffers, buffers)):
            names.update(
                {
                    prefix + name: owner[child]
                    for name, tensor in tensors.items()
                    if tensor is not None
                }
            )
    return Placement(degree, modules, parameters, buffers)


def follow_parents(module: nn.Module, wanted: Mapping[nn.Module, int]) -> dict[nn.Module, int]:
    """The owner of each module: its own entry in ``wanted``, or the owner of its parent.

    A module with several parents follows the one that ``named_modules`` meets first.
    """
    owner: dict[nn.Module, int] = {}
    filled = _with_parameters(module)

    def visit(child: nn.Module, caller: int) -> None:
        if child in owner:
            return
        follows = child is not module and (
            child not in filled or not partitioner.callable_module(child)
        )
        owner[child] = caller if follows else wanted[child]
        for part in child.children():
            visit(part, owner[child])

    visit(module, wanted[module])
    return owner


def _with_parameters(module: nn.Module) -> set[nn.Module]:
    return {child for child in module.modules() if next(iter(child.parameters()), None) is not None}


def _check_indices(module: nn.Module, wanted: Mapping[nn.Module, int], degree: int) -> None:
    """Raise PartitionError for an index out of range."""
    # A model that was built under another configuration, or unpickled, may have any index.
    for path, child in module.named_modules():
        if not 0 <= wanted[child] < degree:
            raise PartitionError(
                f"module {path!r} ({type(child).__name__}) is on partition {wanted[child]}: with "
                f"pipeline_parallel_degree {degree} partitions run from 0 to {degree - 1}"
            )


def _check_shared(module: nn.Module, placement: Placement) -> None:
    for group in sharing.shared(module):
        owners = [placement.modules[entry.module] for entry in group]
        if len(set(owners)) > 1:
            first = group[0]
            where = ", ".join(
                f"module {entry.module!r} ({entry.name!r}) on partition {owner}"
                for entry, owner in zip(group, owners, strict=True)
            )
            raise PartitionError(
                f"{first.kind} {first.name!r} is shared across partitions: {where}. Put these modules on one "
                "partition (smp.partition, smp.set_partition), or set auto_partition"
            )


def settle(session: TrainingSession, make: Callable[[], Placement]) -> Placement:
    """Run ``make()`` on pp rank 0 of dp rank 0. Collective over the world: every rank returns the result, or raises
    the same SmpError.
    """
    # One rank decides for all replicas, because measured execution times differ between them.
    runtime = session.runtime
    source, world = _source(runtime.topology, None), runtime.group(GroupKind.WORLD)
    if runtime.rank != source:
        answer = runtime.fabric.objects.recv_from(source)
        if isinstance(answer, Placement):
            return answer
        answer.raised_by = source
        raise answer
    try:
        placement = make()
    except RUN_ENDED:
        raise
    except SmpError as error:
        if len(world.ranks) > 1:
            runtime.fabric.objects.broadcast(type(error)(*error.args), world)
        raise
    except BaseException as error:
        if len(world.ranks) > 1:
            runtime.fabric.objects.broadcast(
                PartitionError(
                    f"partitioning failed on world rank {source}: {type(error).__name__}: {error}"
                ),
                world,
            )
        raise
    if len(world.ranks) > 1:
        runtime.fabric.objects.broadcast(placement, world)
    return placement


def prepare(session: TrainingSession, model: Any) -> None:
    """Record the true shapes of ``model.module``. Collective over the world, before ``distribute``.

    If the ranks have built different models, every rank raises PartitionError before anything changes.
    """
    module: nn.Module = model.get_module()
    _check_same(session, module)
    _pin(module)
    vars(model)[SHAPES] = {entry.name: tuple(entry.tensor.shape) for entry in unique(module)}


def distribute(
    session: TrainingSession, model: Any, placement: Placement, sharded: Sharded
) -> None:
    """Send every rank its partition of ``model.module``, and free the rest. Collective over the world.

    The owners and their replicas get the values of (pp_rank 0, dp_rank 0) (API 1.3.8). Tensor objects stay in the
    module tree, emptied where another rank owns them.

    Args:
        placement: the result of ``settle``, the same on all ranks.
        sharded: the parameters of which each rank keeps a shard.
    """
    module: nn.Module = model.get_module()
    here = session.runtime.position(GroupKind.PP)
    for owner in range(placement.degree):
        _send_part(session, module, placement, owner, sharded, None)
        for tp_rank in range(session.runtime.topology.tensor):
            _send_part(session, module, placement, owner, sharded, tp_rank)
    sharded.describe()
    release(module, placement, here)
    session.tape = None
    model.placement = placement
    if session.optimizer is not None:
        session.optimizer._smp_partitioned(model)


def _pin(module: nn.Module) -> None:
    """Remove the marks of ``smp.partition``: from now on the placement counts."""
    for child in module.modules():
        PARTITION.remove(child)


def _source(topology: Topology, tp_rank: int | None) -> int:
    """The world rank whose values all ranks get: pp rank 0 of dp rank 0; for slices of a tp rank, of its rdp rank 0."""
    return _holders(topology, 0, tp_rank)[0]


def _holders(topology: Topology, owner: int, tp_rank: int | None) -> tuple[int, ...]:
    """The world ranks that hold the tensors of a partition: those that each tp rank holds whole, or the slices of one
    tp rank.
    """
    kind = GroupKind.DP if tp_rank is None else GroupKind.RDP
    return topology.group(kind, topology.rank_of(0, owner, tp_rank or 0))


def _check_same(session: TrainingSession, module: nn.Module) -> None:
    """Raise PartitionError unless all ranks have the same names, shapes, dtypes and ties between tensors."""
    runtime = session.runtime
    first: dict[int, str] = {}
    manifest = [
        (
            entry.name,
            entry.kind,
            _shape(entry.tensor),
            str(entry.tensor.dtype),
            first.setdefault(id(entry.tensor), entry.name),
        )
        for entry in sharing.entries(module)
    ]
    objects, world = runtime.fabric.objects, runtime.group(GroupKind.WORLD)
    if len(world.ranks) == 1:
        return
    digest = hashlib.sha256(repr(manifest).encode()).hexdigest()
    digests = objects.allgather(digest, world)
    if len(set(digests)) == 1:
        return
    manifests = objects.allgather(manifest, world)
    other = next(rank for rank, each in enumerate(manifests) if each != manifests[0])
    missing = (None,) * abs(len(manifests[0]) - len(manifests[other]))
    one, two = next(
        (one, two)
        for one, two in zip([*manifests[0], *missing], [*manifests[other], *missing], strict=False)
        if one != two
    )
    raise PartitionError(
        f"the ranks built different models: world rank 0 has {_say(one)} where world rank {other} has "
        f"{_say(two)}. Build the same model on every rank"
    )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return (-1,) if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def _say(line: tuple[str, str, tuple[int, ...], str, str] | None) -> str:
    if line is None:
        return "nothing"
    name, kind, shape, dtype, first = line
    tied = "" if name == first else f", tied to {first!r}"
    return f"{kind} {name!r} of shape {list(shape)} and {dtype}{tied}"


def _send_part(
    session: TrainingSession,
    module: nn.Module,
    placement: Placement,
    owner: int,
    sharded: Sharded,
    tp_rank: int | None,
) -> None:
    """Broadcast the values of one partition from the source to the ranks that own it: of the tensors that each tp rank
    holds whole, or the slices of one tp rank.
    """
    runtime = session.runtime
    topology = runtime.topology
    source = _source(topology, tp_rank)
    members = _holders(topology, owner, tp_rank)
    if runtime.rank != source and runtime.rank not in members:
        return
    name = f"smp placement {owner}" if tp_rank is None else f"smp placement {owner}, {tp_rank}"
    group = Group(name, tuple(sorted({source, *members})))
    objects = runtime.fabric.objects
    for chunk in _chunks(module, placement, owner, split=tp_rank is not None):
        if runtime.rank == source:
            values = [creation.value(session, entry.tensor, entry.name) for entry in chunk]
            if len(group.ranks) > 1:
                objects.broadcast([_packed(value) for value in values], group)
            if runtime.position(GroupKind.PP) == owner:
                for entry, value in zip(chunk, values, strict=True):
                    shard = sharded.shard(entry.tensor)
                    if shard is not None:
                        replace(entry.tensor, shard.copy_from_full(value))
                    elif entry.tensor.is_meta:
                        replace(entry.tensor, value)
            del values
        else:
            for entry, value in zip(chunk, objects.recv_from(source), strict=True):
                shard = sharded.shard(entry.tensor)
                if shard is None:
                    assign(entry.tensor, value)
                else:
                    replace(entry.tensor, shard.copy_from_full(value))


def _chunks(
    module: nn.Module, placement: Placement, owner: int, *, split: bool
) -> Iterator[list[Entry]]:
    chunk: list[Entry] = []
    size = 0
    for entry in unique(module):
        is_split = split_of(entry.tensor) is not None
        if placement.modules[entry.module] == owner and is_split is split:
            chunk.append(entry)
            size += entry.tensor.nbytes
            if size >= _CHUNK:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def unique(module: nn.Module) -> Iterator[Entry]:
    """Each parameter and buffer object once, by its first name."""
    seen: set[int] = set()
    for entry in sharing.entries(module):
        if id(entry.tensor) not in seen:
            seen.add(id(entry.tensor))
            yield entry


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, because a pickled view brings its whole storage along."""
    return tensor.detach().clone(memory_format=torch.preserve_format)


def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy values into ``tensor``. The object stays, and so do views of it."""
    if tensor.is_meta:
        replace(tensor, value)
        return
    overlaps = any(
        step == 0 and size > 1
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        if tensor.numel()
    )
    if overlaps:  # copy_ refuses an expanded buffer, whose elements share memory
        replace(tensor, value)
        return
    with torch.no_grad():
        tensor.data.copy_(value)


def replace(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give ``tensor`` other memory. The tensor object stays the same."""
    if tensor.is_meta != value.is_meta:
        # `.data =` refuses to change the device type of a tensor without memory.
        parameter = isinstance(tensor, nn.Parameter)
        made = nn.Parameter(value, requires_grad=tensor.requires_grad) if parameter else value
        for name, attribute in vars(tensor).items():
            setattr(made, name, attribute)
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
    else:
        tensor.data = value


def release(module: nn.Module, placement: Owners, here: int) -> None:
    """Empty the tensors that other ranks own."""
    gone: set[int] = set()
    kept: list[tuple[Entry, tuple[int, int, int]]] = []
    for entry in unique(module):
        owner = placement.modules[entry.module]
        span = sharing.span(entry.tensor)
        if owner == here:
            if span is not None:
                kept.append((entry, span))
            continue
        if span is not None:
            gone.add(span[0])
        if isinstance(entry.tensor, nn.Parameter):
            entry.tensor.grad = None
        device = "cpu" if entry.tensor.is_meta else entry.tensor.device
        replace(entry.tensor, torch.empty(0, dtype=entry.tensor.dtype, device=device))
        foreign.mark(entry.tensor, entry.name, entry.kind, owner, here)
    together = {id(entry.tensor) for group in sharing.shared(module) for entry in group}
    for entry, (storage, _, _) in kept:
        if storage in gone and id(entry.tensor) not in together:
            # An own tensor beside an emptied one would keep their common storage alive.
            entry.tensor.data = _packed(entry.tensor)
