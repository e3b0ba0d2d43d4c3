"""The place of every operation of a traced microbatch: the partition that runs it, or every rank.

The rules, in the order in which they win:

1. Constants, arguments and captured tensors are copied to where they are used.
2. A variable belongs to one partition. All operations that take its handle run there: reads for other partitions too,
   which get the value. The owner is the partition of the first loop, branch or function that takes the handle, else of
   the first operation that does. One that only operations outside of ``call`` use has a default owner.
3. An operation made inside of the model's ``call`` runs in the partition of its tag.
4. A gradient operation runs where its forward operation does.
5. An operation outside of ``call`` that is not for gradients runs everywhere.
6. Any other operation runs where its inputs are, if these are in one partition; a gradient is summed and clipped where
   it is. If they are in several, it runs where the first gradient operation takes its result, else at the owner of the
   variable whose gradient it is, else everywhere. If they are in none, it runs everywhere.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from smp_core.errors import PartitionError
from smp_core.tensorflow.segmentation import COPIED, EVERYWHERE, GraphOperation, Value

_COPIED_TYPES = frozenset({"Const", "Placeholder"})
_READ = "ReadVariableOp"
#: Operations that only use a handle, so that they can run in any partition.
_MOVABLE = frozenset(
    {
        _READ,
        "AssignVariableOp",
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "ResourceGather",
        "VariableShape",
    }
)
_READERS = frozenset({_READ, "ResourceGather", "VariableShape"})
#: Dtypes of tensors that refer to something in one process.
LOCAL_DTYPES = frozenset({"resource", "variant"})


@dataclasses.dataclass(frozen=True, slots=True)
class TracedOperation:
    """One operation as it was traced, before it has a place.

    Attributes:
        name: its name in the graph.
        type: the name of its kernel.
        inputs: the tensors that it takes.
        controls: the operations that must run before it.
        outputs: the dtypes of its outputs, by name.
        tag: the partition, or EVERYWHERE, that the operation was made for; None if for none.
        origin: the forward operation whose gradient it computes; None if none is known.
        backward: whether it computes gradients.
    """

    name: str
    type: str
    inputs: tuple[Value, ...] = ()
    controls: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ()
    tag: int | None = None
    origin: int | None = None
    backward: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class OperationPlaces:
    """The operations with their places, and the owner of each captured handle, by the index of its placeholder."""

    operations: tuple[GraphOperation, ...]
    owners: Mapping[int, int]

    def changed(self) -> frozenset[int]:
        """The placeholders of the variables that the step assigns to."""
        return frozenset(
            value.operation
            for each in self.operations
            for value in each.inputs
            if value.operation in self.owners and each.type not in _READERS
        )


def place(
    traced: Sequence[TracedOperation],
    handles: Mapping[int, str],
    *,
    known_owners: Mapping[int, int] | None = None,
    colocated: Mapping[int, int] | None = None,
    default_owners: Mapping[int, int] | None = None,
) -> OperationPlaces:
    """Give every operation its place.

    Args:
        traced: the operations, in the order of creation.
        handles: the names of the variables whose handles are captured, by the index of the placeholder.
        known_owners: owners that earlier steps decided, by placeholder.
        colocated: by operation, the placeholder of the variable whose gradient it is: it runs at the owner of that
            variable unless its inputs decide.
        default_owners: by placeholder, the owner of a variable that nothing in a partition uses; else it is everywhere.

    Raises PartitionError for a variable that loops, branches or functions of two partitions take, and for a tensor
    that cannot leave its process and is needed in another partition.
    """
    direct = [_direct(traced, index) for index in range(len(traced))]
    owners = _owners(traced, handles, direct, known_owners or {}, default_owners or {})
    for index, each in enumerate(traced):
        for value in each.inputs:
            if value.operation in owners:
                direct[index] = owners[value.operation]

    users: defaultdict[int, list[int]] = defaultdict(list)
    for index, each in enumerate(traced):
        for value in each.inputs:
            users[value.operation].append(index)
    backward = _backward(traced)
    for index in _outside(traced, users, backward):
        if direct[index] is None:
            direct[index] = EVERYWHERE

    places: list[int] = []
    for index, each in enumerate(traced):
        found = direct[index]
        if found is None:
            variable = (colocated or {}).get(index)
            owner = EVERYWHERE if variable is None else owners.get(variable, EVERYWHERE)
            found = _by_neighbours(each, places, users[index], direct, owner)
        places.append(found)
    for index in reversed(range(len(traced))):
        # A loop's gradient needs what the loop kept, so both are in one process.
        if direct[index] is None and LOCAL_DTYPES & set(traced[index].outputs):
            places[index] = next((places[user] for user in users[index]), places[index])
    _check_edges(traced, places)

    deferrable = _deferrable(traced, handles)
    operations = tuple(
        GraphOperation(
            each.name,
            each.type,
            each.inputs,
            each.controls,
            each.outputs,
            places[index],
            backward[index],
            deferrable[index],
        )
        for index, each in enumerate(traced)
    )
    return OperationPlaces(operations, owners)


def _direct(traced: Sequence[TracedOperation], index: int) -> int | None:
    """The place that an operation has by itself; None if its neighbours decide."""
    each = traced[index]
    if each.type in _COPIED_TYPES and not each.inputs:
        return COPIED
    if each.tag is not None:
        return each.tag
    seen = {index}
    origin = each.origin
    while origin is not None and origin not in seen:  # the gradient of a gradient
        if traced[origin].tag is not None:
            tag = traced[origin].tag
            return None if tag == EVERYWHERE else tag
        seen.add(origin)
        origin = traced[origin].origin
    return None


def _owners(
    traced: Sequence[TracedOperation],
    handles: Mapping[int, str],
    direct: Sequence[int | None],
    known_owners: Mapping[int, int],
    default_owners: Mapping[int, int],
) -> dict[int, int]:
    users: defaultdict[int, list[int]] = defaultdict(list)
    for index, each in enumerate(traced):
        for value in each.inputs:
            if value.operation in handles and index not in users[value.operation]:
                users[value.operation].append(index)
    owners = {}
    for handle, name in handles.items():
        placed = [(index, direct[index]) for index in users[handle]]
        bound = [
            (index, at)
            for index, at in placed
            if at not in (None, EVERYWHERE) and traced[index].type not in _MOVABLE
        ]
        free = [at for _, at in placed if at not in (None, EVERYWHERE)]
        default = default_owners.get(handle, EVERYWHERE)
        first = known_owners.get(handle, bound[0][1] if bound else free[0] if free else default)
        assert first is not None
        for index, at in bound:
            if at != first:
                raise PartitionError(
                    f"smp.partition: {traced[index].name} ({traced[index].type}) in partition {at} uses the variable "
                    f"{name}, which partition {first} owns. A loop, branch or nested function must be in the "
                    "partition of its variables: read the variable outside of it, or move it"
                )
        owners[handle] = first
    return owners


def _outside(
    traced: Sequence[TracedOperation], users: Mapping[int, Sequence[int]], backward: Sequence[bool]
) -> list[int]:
    """The operations that a step makes outside of ``call``, but for gradients and what only gradients take."""
    found = [False] * len(traced)
    for index in reversed(range(len(traced))):
        each, taken = traced[index], users.get(index, ())
        if each.tag is None and not backward[index] and not LOCAL_DTYPES & set(each.outputs):
            found[index] = not taken or any(
                found[user] or (traced[user].tag is not None and not backward[user])
                for user in taken
            )
    return [index for index, each in enumerate(found) if each]


def _by_neighbours(
    each: TracedOperation,
    places: Sequence[int],
    users: Sequence[int],
    direct: Sequence[int | None],
    owner: int,
) -> int:
    given = {places[value.operation] for value in each.inputs} - {COPIED, EVERYWHERE}
    if not given:
        return EVERYWHERE
    if len(given) == 1:
        return given.pop()
    for user in users:
        at = direct[user]
        if at is not None and at >= 0:
            return at
    return owner


def _check_edges(traced: Sequence[TracedOperation], places: Sequence[int]) -> None:
    for index, each in enumerate(traced):
        for value in each.inputs:
            source = traced[value.operation]
            at = places[value.operation]
            if at == COPIED or at == places[index]:
                continue
            dtype = source.outputs[value.output] if source.outputs else ""
            if dtype in LOCAL_DTYPES or (dtype == "string" and at != EVERYWHERE):
                raise PartitionError(
                    f"smp.partition: {each.name} ({each.type}) in partition {places[index]} takes a tensor of dtype "
                    f"{dtype} from {source.name} ({source.type}) in partition {at}: such a tensor cannot leave "
                    "its rank. Put both in one partition"
                )


def _deferrable(traced: Sequence[TracedOperation], handles: Mapping[int, str]) -> list[bool]:
    """For each operation, whether it gives a tensor and depends on nothing but variables and constants."""
    found: list[bool] = []
    for index, each in enumerate(traced):
        if each.type in _COPIED_TYPES and not each.inputs:
            found.append(index in handles or each.type == "Const")
        else:
            found.append(
                bool(each.outputs) and all(found[value.operation] for value in each.inputs)
            )
    return found


def _backward(traced: Sequence[TracedOperation]) -> list[bool]:
    """For each operation, whether it is for gradients: by itself, or because it takes a result of one that is.

    An operation with a tag is the model's, whatever it takes: the gradient of a loop gives the loop further inputs.
    """
    found: list[bool] = []
    for each in traced:
        taken = each.tag is None and any(found[value.operation] for value in each.inputs)
        found.append(each.backward or taken)
    return found
