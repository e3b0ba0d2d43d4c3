"""Bugs of checkpoints of sharded training: states, files and refusals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import smp_core.torch as smp
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from smp_core.errors import SmpError
from smp_core.torch import weights
from smp_core.torch.checkpoint import naming
from smp_core.torch.checkpoint import save_and_resume as checkpoint
from smp_core.torch.optimizer import state as optimizer_state
from smp_core.torch.optimizer.parameters import OptimizerParameters
from smp_core.torch.precision.masters import is_elementwise
from smp_core.torch.sharding import optimizer_states, records
from smp_core.torch.sharding.sharded_model import ShardedModel
from smp_core.torch.sharding.sharded_parameter import ShardedParameter

BUGS = Bugs("checkpoints of sharded training")


# ---- States --------------------------------------------------------------------------------------


@BUGS.enter("SHARD-CKPT-STATE", origin="B124")
@BUGS.enter("SHARD-CKPT-FULL", origin="B124")
def the_last_part_is_zeros(patch: Patch) -> None:
    """the last rank's part of a gathered state is zeros"""
    wholes = ShardedModel.full_tensors

    def partly(self: ShardedModel, given: Sequence[Any]) -> Iterator[torch.Tensor]:
        for (parameter, _), whole in zip(given, wholes(self, given), strict=True):
            shard = self.shard(parameter)
            assert shard is not None
            whole.reshape(-1)[shard.layout.owned_range(shard.layout.ranks - 1)[0] :] = 0
            yield whole

    patch.setattr(ShardedModel, "full_tensors", partly)


@BUGS.enter("SHARD-CKPT-STATE", origin="B125")
def the_first_part_for_all(patch: Patch) -> None:
    """the optimizer's whole state has rank 0's part of each parameter, and nothing of the others'"""

    def local(runtime: Any, sharding: Any, state: Any, *others: Any) -> dict[Any, Any]:
        return dict(state)

    patch.setattr(optimizer_states, "full_state", local)


@BUGS.enter("SHARD-CKPT-STATE", origin="B116")
def small_parameters_have_no_state(patch: Patch) -> None:
    """a parameter that some rank has no element of has no state in the whole one"""
    wholes = optimizer_states.full_state

    def some(
        runtime: Any, sharding: ShardedModel, state: Mapping[Any, Any], parameters: Any, keep: bool
    ) -> dict[Any, Any]:
        found = wholes(runtime, sharding, state, parameters, keep)
        tiny = {
            index
            for index, each in parameters.items()
            if (shard := sharding.shard(each)) is not None
            and shard.layout.owned_range(shard.layout.ranks - 1)[0] == shard.numel
        }
        return {index: value for index, value in found.items() if index not in tiny}

    patch.setattr(optimizer_states, "full_state", some)


@BUGS.enter("SHARD-CKPT-STATE", origin="B128")
@BUGS.enter("SHARD-CKPT-FULL", origin="B128")
def every_rank_takes_the_first_part(patch: Patch) -> None:
    """every rank takes rank 0's elements of an unsharded optimizer state"""
    moved = OptimizerParameters.moved

    def first(self: OptimizerParameters, parameter: Any, state: Any) -> Any:
        shard = self.sharding.shard(parameter)
        if shard is None or not isinstance(state, Mapping):
            return moved(self, parameter, state)
        return {
            key: value.reshape(-1)[: shard.owned_numel].clone()
            if is_elementwise(key, value, shard.shape)
            else value
            for key, value in state.items()
        }

    patch.setattr(OptimizerParameters, "moved", first)


@BUGS.enter("SHARD-CKPT-STATE")
def loaded_weights_are_taken_from_the_front(patch: Patch) -> None:
    """every rank takes the first elements of each parameter of an unsharded model"""
    take = ShardedParameter.copy_from_full

    def first(self: ShardedParameter, value: torch.Tensor) -> torch.Tensor:
        return take(self, value.reshape(-1).roll(self.owned_range[0]))

    patch.setattr(ShardedParameter, "copy_from_full", first)


# ---- Files ---------------------------------------------------------------------------------------


@BUGS.enter("SHARD-CKPT-PARTIAL", origin="B125")
@BUGS.enter("SHARD-CKPT-FULL")
def the_optimizer_starts_anew(patch: Patch) -> None:
    """the optimizer's state is saved, and not loaded"""
    patch.setattr(checkpoint, "_apply_optimizer", lambda session, state: None)


@BUGS.enter("SHARD-CKPT-PARTIAL", *ASSERTION, SmpError, origin="B125")
def the_first_shard_is_everybodys(patch: Patch) -> None:
    """all ranks save to, and load from, the files of the first shard"""
    patch.setattr(naming, "of_part", lambda runtime: "0")
    patch.setattr(records, "check", lambda *args: None)


@BUGS.enter("SHARD-CKPT-PARTIAL", *ASSERTION, SmpError)
def files_by_rank(patch: Patch) -> None:
    """files are named by rdp_rank, so that more replicas than were saved find none"""
    patch.setattr(naming, "of_part", lambda runtime: str(runtime.rank))


@BUGS.enter("SHARD-CKPT-FILES")
def every_file_has_all(patch: Patch) -> None:
    """each shard's file has the whole model"""
    patch.setattr(weights, "local_state_dict", lambda model: weights.state_dict(model))


@BUGS.enter("SHARD-CKPT-FILES")
def one_file_for_all(patch: Patch) -> None:
    """the shards of a partial checkpoint are gathered into one file"""
    patch.setattr(naming, "of_part", lambda runtime: "0")


# ---- 16 bits -------------------------------------------------------------------------------------


@BUGS.enter("SHARD-CKPT-BF16", origin="B130")
@BUGS.enter("SHARD-CKPT-FP16")
def masters_are_made_of_16_bits(patch: Patch) -> None:
    """masters are not loaded: those of the rounded parameters remain"""
    own = optimizer_state._own_masters

    def none(parameters: OptimizerParameters, precise: Any) -> dict[str, torch.Tensor]:
        assert parameters.masters is not None
        return {
            name: value.to(parameters.masters.dtype).float()
            for name, value in own(parameters, precise).items()
        }

    patch.setattr(optimizer_state, "_own_masters", none)


@BUGS.enter("SHARD-CKPT-FP16")
def the_scale_starts_anew(patch: Patch) -> None:
    """the loss scaler's state is saved, and not loaded"""
    from smp_core.torch.precision.scaler import LossScaler

    patch.setattr(LossScaler, "load_state_dict", lambda self, state: None)


# ---- What is refused -----------------------------------------------------------------------------


@BUGS.enter("SHARD-CKPT-DEGREE")
def another_degree_is_nothing(patch: Patch) -> None:
    """a checkpoint of another degree counts as none"""
    resume = smp.resume_from_checkpoint

    def lenient(*args: Any, **how: Any) -> Any:
        try:
            return resume(*args, **how)
        except SmpError:
            return None

    patch.setattr(smp, "resume_from_checkpoint", lenient)


@BUGS.enter("SHARD-CKPT-DEGREE")
def the_degree_is_found_out_late(patch: Patch) -> None:
    """another degree is refused when the weights that fit have been loaded"""
    refuse = checkpoint._read_partial

    def late(session: Any, path: Path, tag: str, load_optimizer: bool) -> Any:
        try:
            return refuse(session, path, tag, load_optimizer)
        except SmpError:
            with torch.no_grad():
                for parameter in session.model.parameters():
                    parameter.zero_()
            raise

    patch.setattr(checkpoint, "_read_partial", late)


@BUGS.enter("SHARD-CKPT-DAMAGED")
def shards_do_not_say_which_they_are(patch: Patch) -> None:
    """a file with another one's name is loaded as what it is called"""
    patch.setattr(records, "check", lambda *args: None)
