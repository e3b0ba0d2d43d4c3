"""The state of a DistributedOptimizer: of this rank, gathered, loaded, merged (API 1.8).

States name parameters by their index among all of them in the original order, as plain torch's do, on
every rank: a rank's part has gaps. Each function takes the optimizer's parameters
(parameters.py).

The wrapped optimizer's state for a parameter has the shape of the tensor in the parameter's place
there: the parameter or its slice, a master, this rank's part of the parameter, or its shard. A state in the shape of
the whole parameter is cut to the local shape when it is loaded, so states of unsharded runs, of runs of
other degrees, and of runs without distributed modules load anywhere.

In a 16-bit run a state also has ``fp16_states``: the masters by name, and the state of the loss scaler.
Loading a model's state makes masters of its 16-bit values: load that first, and the optimizer's then.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from smp_core.errors import ArgumentTypeError
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import CheckpointError, UnsupportedTrainingError
from smp_core.torch.optimizer.parameters import OptimizerParameters
from smp_core.torch.parameters import slices
from smp_core.torch.parameters.split import split_of
from smp_core.torch.sharding import optimizer_states
from smp_core.torch.state_keys import PARTIAL, SHARD
from smp_core.torch.tensor_tree import StateDict

FP16 = "fp16_states"


def local_state_dict(parameters: OptimizerParameters, gather_if_shard: bool = True) -> Any:
    """This rank's part of the state, with ``_smp_is_partial``: False until the model is partitioned.

    Where the state is split over the RDP group, rdp_rank 0 gets the list of all parts, by rdp_rank, and the other ranks
    their own, and hold no other; collective over the RDP group. With ``shard_optimizer_state``, and not
    ``gather_if_shard``, there is no communication. Sharded data parallelism gathers always: Hugging Face's Trainer asks
    with False, and saves what rdp_rank 0 has got.
    """
    part = own_part(parameters)
    if not _split(parameters) or (not gather_if_shard and parameters.sharding.place is None):
        return part
    runtime = parameters.runtime
    group = runtime.group(GroupKind.RDP)
    objects, (first, *others) = runtime.fabric.objects, group.ranks
    if runtime.rank == first:
        return [part, *(objects.recv_from(rank) for rank in others)]
    objects.send(unshared(part), first)
    return part


def own_part(parameters: OptimizerParameters) -> StateDict:
    """This rank's part of the state, whoever has the others. No communication."""
    parameters.sharding.reshard()
    parameters.take_masters()
    indices = _indices(parameters)
    state = {
        indices[id(key)] if isinstance(key, torch.Tensor) else key: value
        for key, value in parameters.optimizer.state.items()
        if not isinstance(key, torch.Tensor) or id(key) in indices
    }
    groups = []
    for group, order, names in zip(
        parameters.optimizer.param_groups, parameters.order, parameters.names, strict=True
    ):
        whole = {key: value for key, value in group.items() if key != "params"}
        if names is not None:
            whole["param_names"] = list(names)
        groups.append({**whole, "params": [indices[id(parameters.face(each))] for each in order]})
    part = {"state": state, "param_groups": groups, PARTIAL: parameters.partitioned}
    masters, scaler = parameters.masters, parameters.scaler
    if masters is not None and masters.dtype is not None:
        part[FP16] = {
            "masters": masters.state_dict(),
            "loss_scaler": None if scaler is None else scaler.state_dict(),
        }
    place, own_slices = parameters.sharding.place, _slices_record(parameters)
    if own_slices is not None:
        part[slices.KEY] = own_slices
    return part if place is None else {**part, SHARD: place}


def _slices_record(parameters: OptimizerParameters) -> dict[str, object] | None:
    """Plain values that identify the slices of this rank (slices.py), by the parameter's index; None without any."""
    return slices.record(
        {
            index: found
            for each, index in _parameters(parameters)
            if (found := split_of(each)) is not None
        }
    )


def state_dict(parameters: OptimizerParameters, keep: bool = True) -> StateDict:
    """The whole state, as plain torch's optimizer over the whole model would have it.

    Collective over the MP group once the model is partitioned, and over the shard group: every rank
    of them calls. Without ``keep`` this rank only helps the others to gather, and its own state lacks the split parts.
    Raises UnsupportedTrainingError with ``shard_optimizer_state``, or with distributed modules (API 6).
    """
    masters = parameters.masters
    if masters is not None and masters.parts is not None:
        raise UnsupportedTrainingError(
            "optimizer.state_dict: with shard_optimizer_state each rank has a part of the state, and a full state "
            "is not supported (docs/spec/api.md#6). Take optimizer.local_state_dict(), or save a partial checkpoint"
        )
    if _slices_record(parameters) is not None:
        raise UnsupportedTrainingError(
            "optimizer.state_dict: with distributed modules each tp rank has the state of its slices, and a full state "
            "is not supported (docs/spec/api.md#6). Take optimizer.local_state_dict(), or save a partial checkpoint"
        )
    part = own_part(parameters)
    del part[PARTIAL]
    part.pop(SHARD, None)
    runtime = parameters.runtime
    group = runtime.group(GroupKind.MP)
    known = {index: each for each, index in _parameters(parameters)}
    part["state"] = optimizer_states.full_state(
        runtime, parameters.sharding, part["state"], known, keep
    )
    if FP16 in part:
        part[FP16]["masters"] = _full_masters(parameters, keep)
    if parameters.partitioned and len(group.ranks) > 1:
        for other in reversed(runtime.fabric.objects.allgather(unshared(part["state"]), group)):
            part["state"] = {**other, **part["state"]}
        # Ranks that have no parameter in common agree on the order of the keys.
        part["state"] = {index: part["state"][index] for index in sorted(part["state"], key=_place)}
        if FP16 in part:
            gathered = runtime.fabric.objects.allgather(unshared(part[FP16]["masters"]), group)
            part[FP16]["masters"] = {
                name: value for each in gathered for name, value in each.items()
            } | part[FP16]["masters"]
    return part


def _full_masters(parameters: OptimizerParameters, keep: bool) -> dict[str, torch.Tensor]:
    """The masters in full. Collective over the shard group."""
    assert parameters.masters is not None
    full = {}
    for name, parameter, master in parameters.masters.named():
        if parameters.sharding.shard(parameter) is None:
            full[name] = master.detach()
            continue
        (value,) = parameters.sharding.full_tensors([(parameter, master.detach())])
        if keep:
            full[name] = value
    return full


def _place(index: object) -> tuple[bool, object]:
    return isinstance(index, str), index


def _parameters(parameters: OptimizerParameters) -> Iterable[tuple[torch.nn.Parameter, int]]:
    """The model's parameters with their indices."""
    indices = _indices(parameters)
    for order in parameters.order:
        for each in order:
            yield each, indices[id(parameters.face(each))]


def _split(parameters: OptimizerParameters) -> bool:
    masters = parameters.masters
    return parameters.sharding.place is not None or (
        masters is not None and masters.parts is not None
    )


def check(given: object) -> None:
    """Raise ArgumentTypeError for a value that is no state at all."""
    if isinstance(given, list) and given and all(isinstance(each, Mapping) for each in given):
        for each in given:
            check(each)
    elif not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        raise ArgumentTypeError(
            "optimizer.load_state_dict: the state is no dict with 'state' and 'param_groups'"
        )


def load(parameters: OptimizerParameters, given: Any) -> None:
    """Load a whole state, this rank's part of one, or the list of all parts by rdp_rank. Parts are merged
    over the PP group, all of which must call. The model is partitioned.

    Raises ValueError as torch's does if groups differ; ArgumentTypeError for a list of another length;
    CheckpointError for the shard or the slices of another rank.
    """
    runtime = parameters.runtime
    parameters.sharding.reshard()
    if isinstance(given, list):
        ranks = len(runtime.group(GroupKind.RDP).ranks)
        if len(given) != ranks:
            raise ArgumentTypeError(
                f"optimizer.load_state_dict: a list of {len(given)} parts, and there are {ranks} rdp ranks, each "
                "of which needs its own. Run with as many as it was saved with"
            )
        given = given[runtime.position(GroupKind.RDP)]
    state, groups = given["state"], given["param_groups"]
    precise: StateDict | None = given.get(FP16)
    # Not over the MP group: other tp ranks have the states of other slices.
    group = runtime.group(GroupKind.PP)
    if given.get(PARTIAL, False) and len(group.ranks) > 1:
        named = {} if precise is None else precise["masters"]
        parts = runtime.fabric.objects.allgather(unshared((state, named)), group)
        merged = {index: value for part, _ in parts for index, value in part.items()}
        state = {**merged, **state}
        if precise is not None:
            masters = {name: value for _, part in parts for name, value in part.items()}
            precise = {**precise, "masters": {**masters, **named}}
    check_fits(parameters, given)
    parameters.take_masters()
    # torch's own load matches positions, so it is given the part that is here, renumbered.
    saved = [index for each in groups for index in each["params"]]
    of = dict(zip(saved, [each for order in parameters.order for each in order], strict=True))
    index_of = {id(parameters.face(each)): index for index, each in reversed(of.items())}
    narrowed: list[StateDict] = [
        {
            **saved_group,
            "params": [index_of[id(each)] for each in own["params"]],
            **({"param_names": own["param_names"]} if "param_names" in own else {}),
        }
        for saved_group, own in zip(groups, parameters.optimizer.param_groups, strict=True)
    ]
    mine = {index for each in narrowed for index in each["params"]}
    parameters.optimizer.load_state_dict(
        {
            "state": {
                index: parameters.moved(of[index], copy.deepcopy(state[index]))
                for index in sorted(mine)
                if index in state
            },
            "param_groups": narrowed,
        }
    )
    load_precise(parameters, precise)


def take(parameters: OptimizerParameters, source: int) -> None:
    """Take over the state of dp rank ``source``'s optimizer for each parameter, in place of this rank's own.

    Collective over the DP group, whose ranks hold the same parameters. Groups and their options stay.
    """
    runtime = parameters.runtime
    group = runtime.group(GroupKind.DP)
    parameters.take_masters()
    own, objects = parameters.optimizer.state, runtime.fabric.objects
    if runtime.rank == group.ranks[source]:
        states = [unshared(own[each]) if each in own else None for each in parameters.held()]
        objects.broadcast(states, group)
        return
    states = objects.recv_from(group.ranks[source])
    for each, state in zip(parameters.held(), states, strict=True):
        own.pop(each, None)
        if state is not None:
            own[each] = state


def load_precise(parameters: OptimizerParameters, precise: Mapping[str, Any] | None) -> None:
    """Masters and loss scaler of a state's ``fp16_states``, as far as there are any, and this run has such."""
    if precise is None:
        return
    parameters.take_masters()
    if parameters.masters is not None:
        parameters.masters.load_state_dict(_own_masters(parameters, precise))
    if parameters.scaler is not None and precise.get("loss_scaler") is not None:
        parameters.scaler.load_state_dict(precise["loss_scaler"])


def _own_masters(
    parameters: OptimizerParameters, precise: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The saved values of this rank's masters, cut as the masters are. Raises CheckpointError for another shape."""
    masters = parameters.masters
    if masters is None or masters.dtype is None:
        return {}
    own: dict[str, torch.Tensor] = {}
    for name, parameter, master in masters.named():
        value = precise["masters"].get(name)
        if value is None:
            continue
        split, shard = split_of(parameter), parameters.sharding.shard(parameter)
        if split is not None and tuple(value.shape) == split.shape:
            value = split.slice_of(value)
        if shard is not None and tuple(value.shape) == shard.shape:
            value = shard.owned_slice(value.reshape(-1))
        elif masters.parts is not None and value.shape == parameter.shape:
            value = masters.parts.own(value)
        if value.shape != master.shape:
            raise CheckpointError(
                f"the master of {name!r} is of shape {list(value.shape)} in the state, and here of "
                f"{list(master.shape)}"
            )
        own[name] = value
    return own


def check_fits(parameters: OptimizerParameters, given: Mapping[str, Any]) -> None:
    """Raise ValueError if groups differ, CheckpointError for another rank's shard or slices. Changes nothing."""
    here = [len(each) for each in parameters.order]
    there = [len(each["params"]) for each in given["param_groups"]]
    if here != there:
        raise ValueError(
            "loaded state dict has a different number of parameter groups, or a group of different "
            f"size: {there} parameters, {here} here"
        )
    own_slices = _slices_record(parameters)
    if slices.KEY in given or given.get(PARTIAL, False):
        where = "optimizer.load_state_dict: the state"
        slices.check(where, given.get(slices.KEY), own_slices)
    elif own_slices is not None:
        _check_full(parameters, given)
    if FP16 in given:
        _own_masters(parameters, given[FP16])
    if SHARD in given and given.get(PARTIAL, False):
        mine, (rank, degree) = parameters.sharding.place, given[SHARD]
        if mine != (rank, degree):
            have = (
                "nothing is split"
                if mine is None
                else f"this rank has shard {mine[0]} of {mine[1]}"
            )
            raise CheckpointError(
                f"optimizer.load_state_dict: the state is of shard {rank} of {degree}, and here {have}. Load the "
                "part of this rank, or a whole state (optimizer.state_dict())"
            )


def _check_full(parameters: OptimizerParameters, given: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless slices can be taken of a full state. A distributed module may have other parameters
    than the module in whose place it is, so that a state of that one says nothing of them.
    """
    session = parameters.runtime.training
    model = None if session is None else session.model
    what = "optimizer.load_state_dict: the state is of another model"
    if model is not None and model.translations:
        raise CheckpointError(
            f"{what}: a distributed module, as that of {next(iter(model.translations))!r}, has other parameters than "
            "the one that it replaces. Load the model's state alone (load_optimizer=False), or a partial checkpoint"
        )
    saved = [index for each in given["param_groups"] for index in each["params"]]
    held = [each for order in parameters.order for each in order]
    for index, parameter in zip(saved, held, strict=True):
        split, state = split_of(parameter), given["state"].get(index)
        for key, value in state.items() if isinstance(state, Mapping) and split else ():
            assert split is not None
            if (
                isinstance(value, torch.Tensor)
                and value.dim()
                and tuple(value.shape) != split.shape
            ):
                raise CheckpointError(
                    f"{what}: {key!r} of parameter {index} is of shape {list(value.shape)}, and the parameter of "
                    f"{list(split.shape)}. Build the model that was saved, or load the model's state alone "
                    "(load_optimizer=False)"
                )


def _indices(parameters: OptimizerParameters) -> dict[int, int]:
    """Index of each parameter, or of its master, in the original order, first occurrence, as torch
    numbers them.
    """
    indices: dict[int, int] = {}
    for order in parameters.order:
        for parameter in order:
            indices.setdefault(id(parameters.face(parameter)), len(indices))
    return indices


def unshared(state: Any) -> Any:
    """The state with tensors that own their memory: a pickled view drags its storage along."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: unshared(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(unshared(value) for value in state)
    return state
