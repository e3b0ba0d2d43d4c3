"""A rank's part of its model, and the model's whole state: gathered, loaded, merged
(API 1.7).

Names are those of the wrapped module, without a prefix. Each function takes the DistributedModel.
Until the model is partitioned every rank holds all modules.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from smp_core.errors import ArgumentTypeError
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import CheckpointError
from smp_core.torch.parameters import foreign, sharing, slices
from smp_core.torch.parameters.split import split_of
from smp_core.torch.pipeline import placement
from smp_core.torch.session import SessionModel
from smp_core.torch.sharding import records
from smp_core.torch.state_keys import PARTIAL, SHARD
from smp_core.torch.tensor_parallel import full_parameters
from smp_core.torch.tensor_parallel.translation import Translation
from smp_core.torch.tensor_tree import StateDict

#: Attribute of the model: the full parameters in place of slices, since ``cpu`` (an ExitStack).
_READING = "_smp_reading"
#: In a part of a state with slices of distributed modules: whose they are (parameters/slices.py).
TENSOR = slices.KEY


def owns(model: SessionModel, path: str) -> bool:
    """Return whether this rank holds the module at ``path``."""
    if model.placement is None:
        return True
    return model.placement.modules[path] == _here(model)


def _here(model: SessionModel) -> int:
    return model._session.runtime.position(GroupKind.PP)


def local_named_modules(model: SessionModel) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of this partition, in the order of ``named_modules``."""
    for path, module in model.get_module().named_modules():
        if owns(model, path):
            yield path, module


def local_modules(model: SessionModel) -> Iterator[nn.Module]:
    """The modules of this partition."""
    for _, module in local_named_modules(model):
        yield module


def local_named_parameters(model: SessionModel) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of this partition, each parameter once. There may be none."""
    for name, parameter in model.get_module().named_parameters():
        if owns(model, name.rpartition(".")[0]):
            yield name, parameter


def local_parameters(model: SessionModel) -> Iterator[nn.Parameter]:
    """The parameters of this partition. There may be none."""
    for _, parameter in local_named_parameters(model):
        yield parameter


def local_named_buffers(model: SessionModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of this partition, each buffer once."""
    for name, buffer in model.get_module().named_buffers():
        if owns(model, name.rpartition(".")[0]):
            yield name, buffer


def local_buffers(model: SessionModel) -> Iterator[torch.Tensor]:
    """The buffers of this partition."""
    for _, buffer in local_named_buffers(model):
        yield buffer


def local_state_dict(model: SessionModel) -> dict[str, object]:
    """This rank's part of the state, and ``_smp_is_partial``, which is False as long as the part is
    the whole (before partitioning, without slices); of shards ``_smp_shard``, of slices ``_smp_tensor``, too, which say
    whose they are. No communication. Tensors share memory with the model, as those of torch's ``state_dict`` do.
    """
    end_reading(model)
    model.sharding.reshard()
    state = {key: value for key, value in _entries(model).items() if value is not _ELSEWHERE}
    own_slices = slices_record(model)
    state[PARTIAL] = model.placement is not None or own_slices is not None
    if own_slices is not None:
        state[TENSOR] = own_slices
    record = model.sharding.record()
    if record is not None:
        state[SHARD] = record
    return state


def state_dict(model: SessionModel, gather_to_rank0: bool = False) -> dict[str, object]:
    """The state of the whole model: keys, order and values of the wrapped module's own
    ``state_dict``, as a plain dict.

    Collective over the PP group (API 1.7: called on every rank of at least ``dp_rank`` 0; with distributed
    modules of ``rdp_rank`` 0), over the TP group if there are distributed modules, and over the shard group; otherwise
    there is nothing to gather. Tensors that this rank holds whole share memory
    with the model. With ``gather_to_rank0`` only world rank 0 gets the state, the others an
    empty dict.
    """
    end_reading(model)
    runtime = model._session.runtime
    with _full_tree(model, gather_to_rank0):
        entries = _entries(model)
    group = runtime.group(GroupKind.PP)
    if model.placement is not None and len(group.ranks) > 1:
        objects = runtime.fabric.objects
        if not gather_to_rank0:
            parts = objects.allgather(_packed(entries), group)
        elif 0 not in group.ranks:
            return {}
        elif runtime.rank:
            objects.send(_packed(entries), 0)
            return {}
        else:
            parts = [objects.recv_from(rank) for rank in group.ranks[1:]]
        for keys, values in parts:
            for key, index in keys.items():
                if entries.get(key, _ELSEWHERE) is _ELSEWHERE:
                    entries[key] = values[index]
    if gather_to_rank0 and runtime.rank:
        return {}
    return entries


_ELSEWHERE: object = object()  # the value of a key that another rank holds


@contextlib.contextmanager
def _full_tree(model: SessionModel, to_rank0: bool) -> Iterator[None]:
    """While entered, full parameters stand in the tree in place of shards and slices. Collective over the shard group
    and the TP group. With ``to_rank0`` the ranks that rank 0 does not gather from have zeros that take no memory.
    """
    runtime = model._session.runtime
    pipeline, together = (runtime.group(kind).ranks for kind in (GroupKind.PP, GroupKind.MP))

    def keep(parameter: nn.Parameter) -> bool:
        # A slice is needed where it is sent from, too: on the other tp ranks of rank 0's MP group.
        return not to_rank0 or 0 in (pipeline if split_of(parameter) is None else together)

    with (
        model.sharding.full_tree(model.get_module(), keep),
        full_parameters.full_tree(runtime, model.get_module(), to_rank0=to_rank0),
    ):
        yield


@contextlib.contextmanager
def _loading_tree(model: SessionModel) -> Iterator[None]:
    """While entered, full parameters stand in the tree for a full state to be loaded."""
    with (
        model.sharding.loading_tree(model.get_module()),
        full_parameters.loading_tree(model._session.runtime, model.get_module()),
    ):
        yield


def slices_record(model: SessionModel) -> dict[str, object] | None:
    """Plain values that identify the slices that this rank holds (slices.py); None of a model without any."""
    end_reading(model)
    named = model.get_module().named_parameters()
    return slices.record(
        {name: found for name, each in named if (found := split_of(each)) is not None}
    )


def _check_part(model: SessionModel, state: Mapping[str, object]) -> None:
    """Raise CheckpointError unless a part of a state has the shards and the slices of this rank."""
    where = "model.load_state_dict: the state"
    records.check(where, state.get(SHARD), model.sharding.record())
    slices.check(where, state.get(TENSOR), slices_record(model))


def _entries(model: SessionModel) -> dict[str, object]:
    """The module's state in torch's order, where values of other ranks are ``_ELSEWHERE``.

    A parameter or buffer is the owner's under whatever key a hook of the module put it; any other entry
    (extra state, an addition of a hook) belongs to the module whose path its key starts with.
    """
    state = model.get_module().state_dict(keep_vars=True)
    owners = {id(entry.tensor): entry.module for entry in sharing.entries(model.get_module())}
    paths = {path for path, _ in model.get_module().named_modules(remove_duplicate=False)}
    entries: dict[str, object] = {}
    for key, value in state.items():
        path = owners.get(id(value))
        if path is None:
            path = key.rpartition(".")[0]
            while path not in paths:
                path = path.rpartition(".")[0]
        if not owns(model, path):
            entries[key] = _ELSEWHERE
        else:
            entries[key] = value.detach() if isinstance(value, torch.Tensor) else value
    return entries


def _packed(entries: Mapping[str, object]) -> tuple[dict[str, int], list[object]]:
    """(key to index, values) of this rank's entries: tied entries travel once, views without their base."""
    keys: dict[str, int] = {}
    values: list[object] = []
    known: dict[object, int] = {}
    for key, value in entries.items():
        if value is _ELSEWHERE:
            continue
        if isinstance(value, torch.Tensor):
            span = sharing.span(value)
            same = (span, value.shape, value.stride(), value.dtype) if span else (key,)
            if same in known:
                keys[key] = known[same]
                continue
            known[same] = len(values)
            value = value.clone(memory_format=torch.preserve_format)
        keys[key] = len(values)
        values.append(value)
    return keys, values


def load_state_dict(
    model: SessionModel,
    state: Mapping[str, object],
    strict: bool = True,
    same_partition_load: bool = False,
) -> object:
    """Load a full state, or this rank's partial one (``_smp_is_partial`` true), into the model.

    Before the model is partitioned the load waits until it is, and the result is None; errors are raised
    then. Partial states are merged over the PP group, which all of it must load, so they may
    be of another partition; with ``same_partition_load`` each rank takes its own, unmerged. A full
    state needs no communication; but with sharded data parallelism every rank of the shard group, and with distributed
    modules of the TP group, must load it alike, since a module that loads in a way of its own, or has hooks that see
    it, finds its parameters whole.

    Returns torch's (missing_keys, unexpected_keys). Raises as torch's ``load_state_dict`` does, in its
    words: RuntimeError naming missing and unexpected keys if ``strict``, and sizes that differ, on
    every rank that loads the state. CheckpointError for the shards or slices of another rank, or degree.
    """
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(
            f"model.load_state_dict: the state is a {type(state).__name__}, not a dict"
        )
    state = translated(model, state)
    if not model.partitioned:
        deferred(model).append((state, strict, same_partition_load))
        return None
    return _load(model, state, strict, same_partition_load)


def translated(model: SessionModel, state: Mapping[str, object]) -> Mapping[str, object]:
    """A state with the keys of the modules that distributed ones have replaced, as the model's own. Any other, and one
    that says whether it is a part (``_smp_is_partial``), is the state itself (API 1.7).
    """
    if PARTIAL in state:
        return state
    for path, translation in _translations(model).items():
        prefix = f"{path}." if path else ""
        if translation.knows(state, prefix):
            state = translation.to_ours(state, prefix)
    return state


def _translations(model: SessionModel) -> Mapping[str, Translation]:
    return cast("Mapping[str, Translation]", model.translations)


def original(model: SessionModel, state: Mapping[str, object]) -> dict[str, object]:
    """The model's whole state with the keys of the modules that distributed ones have replaced."""
    found = dict(state)
    for path, translation in _translations(model).items():
        found = translation.to_theirs(found, f"{path}." if path else "")
    return found


def deferred(model: SessionModel) -> list[tuple[Mapping[str, object], bool, bool]]:
    """The loads that wait for the partition."""
    loads: list[tuple[Mapping[str, object], bool, bool]] = vars(model).setdefault("_smp_loads", [])
    return loads


def load_deferred(model: SessionModel) -> None:
    """Carry out the loads that waited, in order, the optimizer's too; after partitioning and its hooks,
    before the first step.
    """
    waiting = list(deferred(model))
    deferred(model).clear()
    for state, strict, same_partition in waiting:
        _load(model, state, strict, same_partition)
    optimizer = model._session.optimizer
    if optimizer is not None:
        optimizer.load_deferred()


def _load(
    model: SessionModel, state: Mapping[str, object], strict: bool, same_partition: bool
) -> object:
    result = _load_values(model, state, strict, same_partition)
    if model.masters is not None:
        model.masters.adopt()
    return result


def check(
    model: SessionModel, state: Mapping[str, object], strict: bool, same_partition: bool
) -> None:
    """Raise the errors that :func:`load_state_dict` would raise about keys and shapes, and change nothing: for a
    partitioned model, and a state that needs no communication (full, or with ``same_partition``).

    Modules load the state as they do, with their hooks, into tensors without memory. Extra state, which a module
    takes as it likes, is left out.
    """
    end_reading(model)
    state = translated(model, state)
    partial = bool(state.get(PARTIAL, False))
    plain = {
        key: value for key, value in state.items() if key not in _SAID and not key.endswith(_EXTRA)
    }
    if getattr(state, "_metadata", None) is not None and not partial:
        plain = _with_metadata(plain, state)
    with _meta(model, parts=partial) as away:
        try:
            result = model.get_module().load_state_dict(plain, strict=False)
        except RuntimeError as error:
            if str(error).startswith("Error(s) in loading state_dict"):
                raise
            return  # of a module that looks at values: the load itself will tell
        except Exception:
            return
    missing = [
        key
        for key in result.missing_keys
        if not key.endswith(_EXTRA)
        and not (partial and (key in away or not owns(model, _module_of(model, key))))
    ]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(_complaint(model, missing, result.unexpected_keys))


#: How torch's keys of extra state end.
_EXTRA = "_extra_state"
#: Keys by which a part of a state describes itself.
_SAID = {PARTIAL, SHARD, TENSOR}


def _load_values(
    model: SessionModel, state: Mapping[str, object], strict: bool, same_partition: bool
) -> object:
    end_reading(model)
    model.sharding.reshard()
    partial = bool(state.get(PARTIAL, False))
    plain = {key: value for key, value in state.items() if key not in _SAID}
    group = model._session.runtime.group(GroupKind.PP)
    if partial and not same_partition and len(group.ranks) > 1:
        plain = _merged_parts(model, state, plain)
    elif partial:
        _check_part(model, state)
    if getattr(state, "_metadata", None) is not None and not partial:
        plain = _with_metadata(plain, state)
    # The tensors of a part have the sizes of the shards and slices, so it is loaded into them as they are.
    whole = contextlib.nullcontext() if partial else _loading_tree(model)
    with whole, _meta(model, parts=partial, elsewhere=True) as away:
        if not (partial and same_partition):
            return model.get_module().load_state_dict(plain, strict=strict)
        result = model.get_module().load_state_dict(plain, strict=False)
        missing = [
            key
            for key in result.missing_keys
            if key not in away and owns(model, _module_of(model, key))
        ]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(_complaint(model, missing, result.unexpected_keys))
        return type(result)(missing, result.unexpected_keys)


def _merged_parts(
    model: SessionModel, state: Mapping[str, object], plain: dict[str, object]
) -> dict[str, object]:
    """The entries of the parts of all pp ranks. Collective over the PP group: a part that is not its rank's is refused
    on all of it, so that none waits for a rank that has failed.
    """
    runtime, refusal = model._session.runtime, None
    try:
        _check_part(model, state)
    except CheckpointError as error:
        refusal = str(error)
    gathered = runtime.fabric.objects.allgather(
        (refusal, _packed(plain)), runtime.group(GroupKind.PP)
    )
    for refused, _ in gathered:
        if refused is not None:
            raise CheckpointError(refused)
    merged: dict[str, object] = {}
    for _, (keys, values) in gathered:
        merged.update({key: values[index] for key, index in keys.items()})
    return {**merged, **plain}


def _with_metadata(plain: dict[str, object], state: Any) -> Any:
    """A copy that keeps the versions of the modules, by which they read old states."""
    import collections

    ordered: Any = collections.OrderedDict(plain)
    ordered._metadata = state._metadata
    return ordered


def _module_of(model: SessionModel, key: str) -> str:
    path = key.rpartition(".")[0]
    assert model.placement is not None
    while path not in model.placement.modules:
        path = path.rpartition(".")[0]
    return path


def _complaint(model: SessionModel, missing: list[str], unexpected: list[str]) -> str:
    """The message about keys that a load misses or does not expect, in the words of torch.nn.Module.load_state_dict."""
    lines = [
        f"{what} key(s) in state_dict: " + ", ".join(f'"{key}"' for key in keys) + ". "
        for what, keys in (("Unexpected", unexpected), ("Missing", missing))
        if keys
    ]
    name = type(model.get_module()).__name__
    return f"Error(s) in loading state_dict for {name}:\n\t" + "\n\t".join(lines)


@contextlib.contextmanager
def _meta(model: SessionModel, *, parts: bool, elsewhere: bool = False) -> Iterator[set[str]]:
    """While entered, parameters and buffers, or only those ``elsewhere``, on other ranks, stand in the tree as meta
    tensors of their full shapes: a load checks them and copies nothing. Yields the names of other ranks'.

    ``parts``: shards and slices have their own shapes.
    """
    before: list[tuple[StateDict, str, object]] = []
    names: set[str] = set()
    first_name = {id(entry.tensor): entry.name for entry in placement.unique(model.get_module())}
    shapes = vars(model).get(placement.SHAPES, {})
    for entry in list(sharing.entries(model.get_module())):
        mine = owns(model, entry.module)
        if mine and elsewhere:
            continue
        own = entry.name.rpartition(".")[2]
        registry: StateDict = (
            entry.owner._parameters if entry.kind == "parameter" else entry.owner._buffers
        )
        shard = None if parts else model.sharding.shard(entry.tensor)
        split = None if parts else split_of(entry.tensor)
        if not mine:
            shape = shapes[first_name[id(entry.tensor)]]
            names.add(entry.name)
        else:
            shape = entry.tensor.shape if shard is None else shard.shape
        if split is not None:
            shape = split.shape  # also of a slice that is sharded
        stand_in = torch.empty(shape, dtype=entry.tensor.dtype, device="meta")
        before.append((registry, own, registry[own]))
        dict.__setitem__(
            registry,
            own,
            nn.Parameter(stand_in, requires_grad=entry.tensor.requires_grad)
            if entry.kind == "parameter"
            else stand_in,
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            yield names
    finally:
        for registry, own, tensor in before:
            dict.__setitem__(registry, own, tensor)


def cpu(model: SessionModel) -> None:
    """Make the wrapped module whole on every rank of the PP group, on the CPU: parameters and all
    buffers are gathered (API 1.7). Collective over the PP group, the shard group and, with distributed modules, the TP
    group.

    The copies of other ranks' parameters are for reading, as after training; the next step empties them again
    (``reshard``). Shards are themselves again at the next step, call, update, or state, too. So are slices at the next
    step, call, or state of the model: full parameters stand in the tree until then.
    """
    end_reading(model)
    model.sharding.unshard()
    model.get_module().cpu()
    if slices_record(model) is not None:
        reading = contextlib.ExitStack()
        reading.enter_context(full_parameters.full_tree(model._session.runtime, model.get_module()))
        vars(model)[_READING] = reading
    if model.placement is None or model.placement.degree == 1:
        return
    runtime = model._session.runtime
    mine = {
        entry.name: entry.tensor.detach()
        for entry in placement.unique(model.get_module())
        if owns(model, entry.module)
    }
    group = runtime.group(GroupKind.PP)
    gathered: dict[str, torch.Tensor] = {}
    for keys, values in runtime.fabric.objects.allgather(_packed(mine), group):
        gathered.update({key: values[index] for key, index in keys.items()})
    for entry in list(placement.unique(model.get_module())):
        if not owns(model, entry.module):
            foreign.unmark(entry.tensor)
            placement.replace(entry.tensor, gathered[entry.name])
    vars(model)["_smp_whole"] = True


def reshard(model: SessionModel) -> None:
    """Before a step: give up the parameters of other pp and tp ranks that ``cpu`` gathered."""
    end_reading(model)
    _release(model)


def end_reading(model: SessionModel) -> None:
    """Put slices back into the tree, if full parameters stand there since ``cpu``, for reading; with those go the
    parameters of other pp ranks.
    """
    reading: contextlib.ExitStack | None = vars(model).pop(_READING, None)
    if reading is not None:
        _release(model)
        reading.close()


def _release(model: SessionModel) -> None:
    if vars(model).pop("_smp_whole", False):
        assert model.placement is not None
        placement.release(model.get_module(), model.placement, _here(model))
