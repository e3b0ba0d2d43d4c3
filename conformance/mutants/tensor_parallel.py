"""Bugs of tensor parallelism: exchanges of activations, slices, gradients and norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.mutants.defences import unseen_drift
from conformance.mutants.protocol import Bugs, Patch
from smp_core import reduction
from smp_core.torch.execution import batches
from smp_core.torch.nn.embedding import DistributedEmbedding
from smp_core.torch.nn.linear import DistributedLinear
from smp_core.torch.parameters import split as splitting
from smp_core.torch.parameters.split import Split
from smp_core.torch.reduction.collectives import Collectives
from smp_core.torch.reduction.reducer import GradientReducer
from smp_core.torch.reduction.shards import WholeGradients
from smp_core.torch.sharding import clipping
from smp_core.torch.sharding.sharded_model import ShardedModel
from smp_core.torch.tensor_parallel import exchange
from smp_core.torch.tensor_parallel.exchange import TensorGroup

BUGS = Bugs("tensor parallelism")


def change(patch: Patch, name: str, other: Any) -> None:
    """Replace a change of layout, ``_slice_channels`` or another one, by ``other(group, x, original)``."""
    original = getattr(exchange, name)
    patch.setattr(exchange, name, lambda group, x: other(group, x, original))


def reverse(x: Tensor, group: TensorGroup, axis: int) -> Tensor:
    """The equal parts of a tensor along an axis in reverse order."""
    return torch.cat(x.chunk(group.size, axis)[::-1], axis)


# ---- Changes of layout ---------------------------------------------------------------------------


@BUGS.enter("TP-EQUALS-PLAIN")
@BUGS.enter("TP-OWN-BATCHES")
def tp_channels_in_reverse(patch: Patch) -> None:
    """each rank computes with the channels of the rank at the other end of the group"""
    change(
        patch, "_slice_channels", lambda group, x, original: original(group, reverse(x, group, -1))
    )


@BUGS.enter("TP-EQUALS-PLAIN")
def tp_channels_merged_in_reverse(patch: Patch) -> None:
    """the slices of the gradient of the input are put together in reverse order"""
    change(
        patch, "_merge_channels", lambda group, x, original: reverse(original(group, x), group, -1)
    )


@BUGS.enter("TP-EQUALS-PLAIN", origin="B010")
def tp_input_gradients_stay_partial(patch: Patch) -> None:
    """the gradient of a layer's input has only the channels of the rank's slice: nobody exchanges"""

    def own(group: TensorGroup, x: Tensor, original: Any) -> Tensor:
        if not group.prescaled:
            return original(group, x)  # type: ignore[no-any-return]
        parts = [torch.zeros_like(x) for _ in range(group.size)]
        parts[group.rank] = x
        return torch.cat(parts, -1)

    change(patch, "_merge_channels", own)


@BUGS.enter("TP-EQUALS-PLAIN")
def tp_summands_for_sums(patch: Patch) -> None:
    """the output of a layer is the summand of the rank's own channels"""
    patch.setattr(TensorGroup, "all_reduce", lambda self, value: value.clone())


@BUGS.enter("TP-EQUALS-PLAIN")
def tp_outputs_are_averaged(patch: Patch) -> None:
    """summands are averaged over the TP group, not added up"""
    change(patch, "_sum_batch", lambda group, x, original: original(group, x) / group.size)


@BUGS.enter("TP-EQUALS-PLAIN")
def tp_gradients_are_summed_again(patch: Patch) -> None:
    """the gradient of a sum over the TP group is summed over it, as if each rank had a loss of its own"""

    def summed(group: TensorGroup, x: Tensor, original: Any) -> Tensor:
        floating = group.prescaled and x.is_floating_point()
        made: Tensor = group.all_reduce(x.contiguous()) if floating else original(group, x)
        return made

    change(patch, "_gather_batch", summed)


@BUGS.enter("TP-OWN-BATCHES")
def tp_samples_of_the_first_rank(patch: Patch) -> None:
    """each rank gets back the outputs for the samples of tp rank 0"""

    def first(group: TensorGroup, x: Tensor, original: Any) -> Tensor:
        if group.prescaled:
            return original(group, x)  # type: ignore[no-any-return]
        return group.all_reduce(x.contiguous()).chunk(group.size)[0].clone()

    change(patch, "_sum_batch", first)


@BUGS.enter("TP-OWN-BATCHES")
def tp_samples_in_reverse(patch: Patch) -> None:
    """the samples of tp ranks are stacked in reverse order, and given back in the right one"""

    def turned(group: TensorGroup, x: Tensor, original: Any) -> Tensor:
        made: Tensor = original(group, x)
        return made if group.prescaled else reverse(made, group, 0)

    change(patch, "_slice_channels", turned)


@BUGS.enter("TP-OWN-BATCHES")
def tp_gradients_of_own_samples(patch: Patch) -> None:
    """a slice's gradient is of the rank's own samples: those of the others are not gathered in backward"""

    def own(group: TensorGroup, x: Tensor, original: Any) -> Tensor:
        if group.prescaled or not x.is_floating_point():
            return original(group, x)  # type: ignore[no-any-return]
        parts = [torch.zeros_like(x) for _ in range(group.size)]
        parts[group.rank] = x
        return torch.cat(parts)

    change(patch, "_gather_batch", own)


@BUGS.enter("TP-OWN-BATCHES")
def tp_ids_of_the_rank_alone(patch: Patch) -> None:
    """an embedding looks up the ids of its own rank for all ranks of the group"""
    patch.setattr(
        exchange,
        "gather_ids",
        lambda ids, group: ids if group.prescaled else torch.cat([ids] * group.size),
    )


@BUGS.enter("TP-EQUALS-PLAIN")
def tp_prescaled_batches_are_scaled(patch: Patch) -> None:
    """with prescaled_batch the samples of all ranks are exchanged, as if they were different ones"""

    def forgetful(self: TensorGroup, runtime: Any) -> None:
        made(self, runtime)
        self.prescaled = False

    made = TensorGroup.__init__
    patch.setattr(TensorGroup, "__init__", forgetful)


@BUGS.enter("TP-OWN-BATCHES")
def tp_own_batches_are_prescaled(patch: Patch) -> None:
    """without prescaled_batch nobody exchanges samples, as if all ranks had the same ones"""

    def forgetful(self: TensorGroup, runtime: Any) -> None:
        made(self, runtime)
        self.prescaled = True

    made = TensorGroup.__init__
    patch.setattr(TensorGroup, "__init__", forgetful)


@BUGS.enter("TP-REPLAYED")
def tp_sums_from_the_last_rank(patch: Patch) -> None:
    """summands are added up from the last tp rank to the first"""

    def backwards(group: TensorGroup, x: Tensor, original: Any) -> Tensor:
        parts = list(group.all_gather(x.contiguous()))
        if not group.prescaled:
            parts = [each.chunk(group.size)[group.rank] for each in parts]
        total: Tensor = parts[-1]
        for each in parts[-2::-1]:
            total = total + each
        return total

    change(patch, "_sum_batch", backwards)


@BUGS.enter("TP-RANDOM")
def tp_ranks_have_seeds_of_their_own(patch: Patch) -> None:
    """with prescaled_batch each rank of a TP group draws from its own random state"""
    unseen_drift(patch)
    compared = batches.compared

    def own(runtime: Any, split: Any, seed: int) -> Any:
        calls, _ = compared(runtime, split, seed)
        return calls, seed

    patch.setattr(batches, "compared", own)


@BUGS.enter("TP-FP16")
def tp_sums_in_16_bits(patch: Patch) -> None:
    """sums over tp ranks of 16-bit activations are rounded after each addition"""

    def narrow(group: TensorGroup, x: Tensor, original: Any) -> Tensor:
        parts = list(group.all_gather(x.contiguous()))
        if not group.prescaled:
            parts = [each.chunk(group.size)[group.rank] for each in parts]
        total: Tensor = reduction.fold(parts, torch.add)
        return total

    change(patch, "_sum_batch", narrow)


@BUGS.enter("TP-PIPELINE")
def tp_microbatches_share_an_exchange(patch: Patch) -> None:
    """in a pipeline a rank keeps the outputs of the microbatch before for the present one"""
    kept: dict[int, Tensor] = {}

    def late(group: TensorGroup, x: Tensor, original: Any) -> Tensor:
        made: Tensor = original(group, x)
        before = kept.get(id(group))
        kept[id(group)] = made.detach()
        return made if before is None or before.shape != made.shape else before

    change(patch, "_sum_batch", late)


# ---- Layers --------------------------------------------------------------------------------------


@BUGS.enter("TP-EQUALS-PLAIN")
def tp_bias_on_each_rank(patch: Patch) -> None:
    """every rank adds the bias to its summand, so that the sum has it several times"""

    def forward(self: DistributedLinear, input: Tensor) -> Tensor:
        group = self.group()
        sliced = exchange.slice_channels(input, group)
        return exchange.sum_batch(functional.linear(sliced, self.weight, self.bias), group)

    patch.setattr(DistributedLinear, "forward", forward)


@BUGS.enter("TP-EQUALS-PLAIN")
def tp_bias_on_the_first_rank(patch: Patch) -> None:
    """tp rank 0 alone adds the bias, so that the others have no gradient of theirs"""
    unseen_drift(patch)

    def forward(self: DistributedLinear, input: Tensor) -> Tensor:
        group = self.group()
        sliced = exchange.slice_channels(input, group)
        bias = self.bias if group.rank == 0 else None
        return exchange.sum_batch(functional.linear(sliced, self.weight, bias), group)

    patch.setattr(DistributedLinear, "forward", forward)


@BUGS.enter("TP-EQUALS-PLAIN")
def tp_no_bias(patch: Patch) -> None:
    """a distributed linear layer leaves its bias out"""
    forward = DistributedLinear.forward

    def without(self: DistributedLinear, input: Tensor) -> Tensor:
        out = forward(self, input)
        return out if self.bias is None else out - self.bias

    patch.setattr(DistributedLinear, "forward", without)


@BUGS.enter("TP-LAYOUT")
def tp_slices_in_reverse(patch: Patch) -> None:
    """the first tp rank has the last slice, and so on"""

    def turned(self: Split, full: Tensor) -> Tensor:
        size = self.shape[self.axis] // self.degree
        return full.narrow(self.axis, (self.degree - 1 - self.rank) * size, size)

    patch.setattr(Split, "slice_of", turned)


@BUGS.enter("TP-LAYOUT")
def tp_slices_of_every_other_channel(patch: Patch) -> None:
    """a rank has every second channel, and not neighbours"""

    def strided(self: Split, full: Tensor) -> Tensor:
        index = torch.arange(self.rank, self.shape[self.axis], self.degree)
        return full.index_select(self.axis, index)

    patch.setattr(Split, "slice_of", strided)


@BUGS.enter("TP-LAYOUT")
def tp_embedding_split_by_tokens(patch: Patch) -> None:
    """an embedding is split by its tokens, not by its dimensions"""
    register = DistributedEmbedding.register_split

    def by_rows(self: Any, name: str, full: Tensor, axis: int) -> None:
        register(self, name, full, 0)

    patch.setattr(DistributedEmbedding, "register_split", by_rows)


# ---- Gradients -----------------------------------------------------------------------------------


@BUGS.enter("TP-EQUALS-PLAIN")
@BUGS.enter("TP-REDUCTION")
def tp_slices_are_summed_over_all_ranks(patch: Patch) -> None:
    """gradients of slices are reduced over the DP group: those of different slices are added up"""
    patch.setattr(WholeGradients, "all_reducer", lambda self, split: self.collectives)


@BUGS.enter("TP-OWN-BATCHES")
@BUGS.enter("TP-REDUCTION")
def tp_whole_gradients_in_their_slice(patch: Patch) -> None:
    """gradients of parameters that are not split are reduced over the RDP group alone"""
    unseen_drift(patch)
    patch.setattr(WholeGradients, "all_reducer", lambda self, split: self._of_slices)


@BUGS.enter("TP-OWN-BATCHES")
def tp_slices_divided_by_their_replicas(patch: Patch) -> None:
    """gradients of slices are divided by the ranks that they are reduced over, and not by those that had samples"""
    patch.setattr(WholeGradients, "summands", lambda self, split: self.all_reducer(split).replicas)


@BUGS.enter("TP-EQUALS-PLAIN")
def tp_slices_divided_by_all_ranks(patch: Patch) -> None:
    """with prescaled_batch gradients of slices are divided by the degree, too"""
    patch.setattr(WholeGradients, "summands", lambda self, split: self.collectives.replicas)


@BUGS.enter("TP-EQUALS-PLAIN")
def tp_whole_gradients_divided_by_groups(patch: Patch) -> None:
    """with prescaled_batch the gradients of other parameters are divided by the number of TP groups"""
    patch.setattr(WholeGradients, "summands", lambda self, split: self._of_slices.replicas)


@BUGS.enter("TP-STEPS")
def tp_slices_are_left_out_of_the_second_step(patch: Patch) -> None:
    """gradients of slices are zero from the second reduction on"""
    deposit = GradientReducer._deposit

    def once(self: GradientReducer, parameter: nn.Parameter, gradient: Tensor) -> None:
        if self.reductions > 1 and splitting.split_of(parameter) is not None:
            gradient = torch.zeros_like(gradient)
        deposit(self, parameter, gradient)

    patch.setattr(GradientReducer, "_deposit", once)


@BUGS.enter("TP-BF16")
@BUGS.enter("TP-FP16")
def tp_slices_have_16_bit_gradients(patch: Patch) -> None:
    """gradients of slices are rounded to 16 bits before masters get them"""
    deposit = GradientReducer._deposit

    def rounded(self: GradientReducer, parameter: nn.Parameter, gradient: Tensor) -> None:
        if splitting.split_of(parameter) is not None:
            gradient = gradient.to(parameter.dtype).to(gradient.dtype)
        deposit(self, parameter, gradient)

    patch.setattr(GradientReducer, "_deposit", rounded)


@BUGS.enter("TP-REPLICAS")
def tp_bias_of_a_rank_runs_away(patch: Patch) -> None:
    """from the third reduction on, tp ranks above 0 get gradients of biases with another last bit"""
    unseen_drift(patch)
    deposit = GradientReducer._deposit

    def other(self: GradientReducer, parameter: nn.Parameter, gradient: Tensor) -> None:
        whole = splitting.split_of(parameter) is None
        group = self._runtime.training.tensor_group
        if self.reductions > 2 and whole and group is not None and group.rank > 0:
            gradient = torch.nextafter(gradient, torch.full_like(gradient, torch.inf))
        deposit(self, parameter, gradient)

    patch.setattr(GradientReducer, "_deposit", other)


@BUGS.enter("TP-REPLICAS")
def tp_slices_are_not_reduced(patch: Patch) -> None:
    """a slice gets the gradient of its own TP group"""
    unseen_drift(patch)
    all_reduce = Collectives.all_reduce

    class Done:
        def __init__(self, value: Tensor) -> None:
            self.result = lambda: value.clone()
            self.poll = lambda: None

    def alone(self: Collectives, flat: Tensor, divisor: int = 1) -> Any:
        if self._replicate_kind.name == "RDP":
            return Done(flat / divisor)
        return all_reduce(self, flat, divisor)

    patch.setattr(Collectives, "all_reduce", alone)


# ---- With sharding -------------------------------------------------------------------------------


@BUGS.enter("TP-SHARDED")
@BUGS.enter("TP-COMBINATIONS")
def tp_sharded_gradients_divided_by_the_degree(patch: Patch) -> None:
    """with sharding gradients are divided by the ranks of the DP group, and were summed over the RDP group"""
    summands = ShardedModel.summands

    def all_ranks(self: ShardedModel, split: bool) -> int:
        return summands(self, split) * self._runtime.topology.tensor

    patch.setattr(ShardedModel, "summands", all_ranks)


@BUGS.enter("TP-SHARDED")
def tp_sharded_slices_alone_divided_by_the_degree(patch: Patch) -> None:
    """with sharding gradients of slices are divided by the degree, too"""
    divisor = GradientReducer._divisor

    def more(self: GradientReducer, microbatches: int, split: bool = False) -> int:
        found = divisor(self, microbatches, split)
        degree: int = self._runtime.topology.tensor
        return found * degree if split and self._policy.scatters else found

    patch.setattr(GradientReducer, "_divisor", more)


@BUGS.enter("TP-CLIP")
def tp_norm_of_own_slices(patch: Patch) -> None:
    """the clipping norm counts the slices of the rank's own tp rank"""
    unseen_drift(patch)
    patch.setattr(clipping, "over_tensor_group", lambda current, value: [value])


@BUGS.enter("TP-CLIP")
def tp_norm_counts_whole_parameters_on_each_rank(patch: Patch) -> None:
    """the clipping norm counts parameters that are not split once for each tp rank"""
    patch.setattr("smp_core.torch.sharding.sharded_model.split_of", lambda parameter: True)


@BUGS.enter("TP-CLIP")
def tp_norm_leaves_slices_out(patch: Patch) -> None:
    """the clipping norm is that of the parameters that are not split"""
    patch.setattr(clipping, "over_tensor_group", lambda current, value: [0.0])


# ---- Traffic -------------------------------------------------------------------------------------


@BUGS.enter("TP-TRAFFIC")
def tp_whole_inputs_travel(patch: Patch) -> None:
    """every rank gets all channels of all samples, and keeps its slice"""

    def gathered(group: TensorGroup, x: Tensor, original: Any) -> Tensor:
        if group.prescaled:
            return original(group, x)  # type: ignore[no-any-return]
        rows = group.all_gather(x.contiguous()).flatten(0, 1)
        return rows.chunk(group.size, -1)[group.rank].contiguous()

    change(patch, "_slice_channels", gathered)


@BUGS.enter("TP-TRAFFIC")
def tp_outputs_travel_as_float64(patch: Patch) -> None:
    """summands are sent with twice their bytes"""

    def wide(group: TensorGroup, x: Tensor, original: Any) -> Tensor:
        made: Tensor = original(group, x.double())
        return made.to(x.dtype)

    change(patch, "_sum_batch", wide)


@BUGS.enter("TP-TRAFFIC")
def tp_prescaled_slices_are_exchanged(patch: Patch) -> None:
    """with prescaled_batch a rank asks the others for the slice that it has"""

    def asked(group: TensorGroup, x: Tensor, original: Any) -> Tensor:
        if group.prescaled:
            group.all_gather(x.contiguous())
        return original(group, x)  # type: ignore[no-any-return]

    change(patch, "_slice_channels", asked)
