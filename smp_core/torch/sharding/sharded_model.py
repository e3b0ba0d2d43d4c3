"""A sharded model on one rank: which parameters are split, full copies of them between steps, and the gradients' norm.

Made when the model is placed (model.py), before its values come: each rank copies its own shard
of a parameter and never holds the rest (AWS Sharded Data Parallelism (Tips and considerations:
delayed_parameter_initialization)).
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from smp_core import reduction
from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import ShardingError, UnsupportedTrainingError
from smp_core.torch.parameters import sharing, stand_ins
from smp_core.torch.parameters.split import split_of
from smp_core.torch.parameters.stand_ins import StandIn
from smp_core.torch.precision.masters import Masters, multiply
from smp_core.torch.reduction import drift, policy
from smp_core.torch.reduction.collectives import Collectives
from smp_core.torch.reduction.layout import Layout
from smp_core.torch.reduction.policy import Options, ReductionPolicy
from smp_core.torch.reduction.shards import GradientShards
from smp_core.torch.reduction.traffic import Traffic
from smp_core.torch.sharding import clipping, loading, records
from smp_core.torch.sharding.eager_calls import EagerCalls, ShardedEagerCalls
from smp_core.torch.sharding.sharded_parameter import ShardedParameter, describe, make_unit
from smp_core.torch.sharding.units import groups
from smp_core.torch.sharding.unsharding import Unsharded


def _always(parameter: nn.Parameter) -> bool:
    return True


class ShardedModel:
    """The sharded parameters of a model, and the persistent ones.

    ``collectives.traffic`` counts the bytes that are sent, ``unsharded.live`` and ``unsharded.peak`` the elements
    of parameters that are unsharded.
    """

    def __init__(self, runtime: Runtime, module: nn.Module, masters: Masters | None) -> None:
        config = runtime.config
        self._module, self._masters = module, masters
        self._runtime, self._interrupted = runtime, False
        self._read_whole = False  # unshard() was called, and reshard() was not
        self.collectives = Collectives(runtime)
        self._clipping = config.sdp_gradient_clipping
        #: The norm of the last step's gradients before they were clipped.
        self.norm = 0.0
        _check_memory(module)
        least = max(1, config.sdp_param_persistence_threshold)
        named = list(module.named_parameters())
        split = [(name, each) for name, each in named if each.numel() >= least]
        size, rank = self.collectives.size, self.collectives.rank
        units = [
            make_unit(number, owner, members, size, rank)
            for number, (owner, members) in enumerate(
                groups(module, split, config.sdp_max_live_parameters)
            )
        ]
        self.unsharded = Unsharded(self.collectives, units, config.sdp_max_live_parameters)
        self.describe()

    def describe(self) -> None:
        """Set the attributes of sharded parameters on persistent ones, too (sharded_parameter.describe); again once
        these have their values, which may lie elsewhere then.
        """
        for parameter in self._module.parameters():
            if self.shard(parameter) is None:
                layout = Layout(parameter.numel(), self.collectives.size)
                describe(parameter, layout, self.collectives.rank)

    @property
    def traffic(self) -> Traffic:
        """The traffic of the collectives of the shard group and the replicate group."""
        return self.collectives.traffic

    @property
    def unsharded_peak(self) -> int:
        """The most elements that were unsharded, or being unsharded, at a time."""
        return self.unsharded.peak

    @property
    def degree(self) -> int:
        """The ranks of a shard group."""
        return self.collectives.size

    @property
    def place(self) -> tuple[int, int] | None:
        """The number of this rank's shards, and the degree; None of a model without shards."""
        return self.collectives.rank, self.collectives.size

    def record(self) -> dict[str, object] | None:
        """Plain values that identify the shards of a state (records.py); None for a model without shards."""
        split = {shard.name: list(shard.shape) for shard in self.unsharded.shards()}
        return records.record(self.collectives.rank, self.collectives.size, split)

    def eager_calls(self, wide: bool) -> EagerCalls:
        """The eager calls of this model; ``wide`` as in a Ledger."""
        return ShardedEagerCalls(self, wide)

    # Gradients.

    clips = True  # in optimizer.step()

    def all_reducer(self, split: bool) -> Collectives:
        """The collectives that reduce gradients: with sharding, of slices and others alike over the RDP group."""
        return self.collectives

    def summands(self, split: bool) -> int:
        """The ranks of the RDP group."""
        return self.collectives.size * self.collectives.replicas

    def gradient_shards(self, runtime: Runtime) -> GradientShards:
        """The sharding as the reducer sees it; all ranks call this at the same point."""
        return self

    @property
    def gather_digest(self) -> int:
        """A checksum of the units that were gathered in this step, in order."""
        return self.unsharded.gather_digest

    def policy(self, options: Options, wide: bool) -> ReductionPolicy:
        """The reduction of sharded gradients."""
        return policy.sharded(self._runtime.config.sdp_reduce_bucket_size)

    # Steps.

    def begin_step(self, *, eager: bool = False) -> None:
        """Before a step, or before an ``eager`` call, outside of steps.

        Raises ShardingError as :meth:`resume` does, or if a parameter was changed in a forbidden way.
        """
        self.resume()
        self.unsharded.begin_step(eager)

    def resume(self) -> None:
        """Before any collective: reshard, and after a failed step compare how many collectives each rank has begun.

        A rank on which a step fails raises at once, in the midst of the step, and the others may wait for shards
        that it will not send. If every rank has failed after the same number of collectives, as for the same bad
        input, training goes on.

        Raises ShardingError, on the ranks that have failed, if the numbers differ.
        """
        self.reshard()
        if self._interrupted:
            begun = self._runtime.fabric.objects.allgather(
                self.collectives.begun, self._runtime.group(GroupKind.RDP)
            )
            if len(set(begun)) > 1:
                raise ShardingError(
                    "sharded data parallelism: a step failed, after other numbers of collectives on some ranks "
                    f"than on others ({', '.join(map(str, begun))}, in the order of rdp ranks), so that what one "
                    "sends is not what another waits for. Start again from a checkpoint"
                )
            # The same collectives were begun everywhere, so each one that was left finds its partners.
            self.collectives.settle()
            self._interrupted = False

    def end_step(self, failed: bool) -> bool:
        """At the end of a step on this rank; whether ranks then agree on how it ended."""
        if failed:
            # The others wait for a shard of this rank, and not to hear how the step ended here.
            self.interrupt()
            return False
        self.unsharded.end_step()
        return True

    def interrupt(self) -> None:
        """After a step, or an eager call, that failed on this rank."""
        self._interrupted = True
        self.unsharded.abandon()

    @property
    def gathered(self) -> Unsharded:
        """The former name of ``unsharded``, for one version."""
        warnings.warn(
            "model.sharding.gathered is called model.sharding.unsharded",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.unsharded

    # Parameters.

    def shard(self, parameter: torch.Tensor) -> ShardedParameter | None:
        """The shard of a parameter on this rank; None if the parameter is whole on every rank."""
        return self.unsharded.shard(parameter)

    def full_tensors(
        self, given: Sequence[tuple[nn.Parameter, torch.Tensor]]
    ) -> Iterator[torch.Tensor]:
        """All-gather tensors of the size of the owned range of a sharded parameter (values, a gradient, a state), and
        give each in full, in the parameter's shape; of each pair the second is this rank's, 1-D.

        Every rank of the shard group calls it alike. One is gathered at a time. Raises ShardingError as
        :meth:`resume` does.
        """
        self.resume()
        for parameter, own in given:
            shard = self.shard(parameter)
            assert shard is not None
            padded = own.new_zeros(shard.layout.shard_numel)
            padded[: shard.owned_numel] = own.detach()
            gathered = self.collectives.all_gather(padded).result()
            yield shard.shaped(shard.layout.full(gathered))

    def unshard(self) -> None:
        """Give every sharded parameter its full ``data``, for reading, until the next collective or update
        (``reshard``). Every rank of the shard group calls it alike.
        """
        self.resume()
        own = [(shard.parameter, shard.parameter.data) for shard in self.unsharded.shards()]
        if self._masters is not None:
            for parameter, _ in own:
                self._masters.of(parameter)  # of the shard, while it is one
        for (parameter, _), full in zip(own, self.full_tensors(own), strict=True):
            parameter.data = full
        self._read_whole = True

    def reshard(self) -> None:
        """Undo ``unshard``: of values that were changed meanwhile each rank keeps its own."""
        if not self._read_whole:
            return
        self._read_whole = False
        for shard in self.unsharded.shards():
            if shard.parameter.shape == shard.shape:
                shard.parameter.data = shard.copy_from_full(shard.parameter)

    @contextlib.contextmanager
    def full_tree(
        self, module: nn.Module, keep: Callable[[nn.Parameter], bool] = _always
    ) -> Iterator[None]:
        """While entered, full parameters with their values stand in the tree, for torch's ``state_dict``.
        Every rank of the shard group calls it alike.

        Parameters that it does not ``keep`` this rank only helps the others to, and has zeros that take no memory.
        """

        def value(parameter: nn.Parameter) -> torch.Tensor | None:
            shard = self.shard(parameter)
            if shard is None:
                return None
            (full,) = self.full_tensors([(parameter, parameter.data)])
            return full if keep(parameter) else full.new_zeros(()).expand(shard.shape)

        self.reshard()
        with stand_ins.standing(module, value) as standing:
            yield
        self._copy_to_shards(standing, look=False)

    @contextlib.contextmanager
    def loading_tree(self, module: nn.Module) -> Iterator[None]:
        """While entered, full parameters stand in the tree for ``load_state_dict``; afterwards each shard copies its
        elements of the loaded values.

        If modules load in ways of their own, full parameters have their true values, since such a module may
        look at them, or change a part of them only: then every rank of the shard group calls this alike.
        Otherwise values are unspecified, and nothing is exchanged.
        """
        special = stand_ins.is_special(module)
        self.reshard()

        def value(parameter: nn.Parameter) -> torch.Tensor | None:
            shard = self.shard(parameter)
            if shard is None:
                return None
            if special:
                return next(self.full_tensors([(parameter, parameter.data)]))
            return torch.empty_strided(shard.shape, shard.stride, dtype=parameter.dtype)

        with stand_ins.standing(module, value) as standing:
            yield
        self._copy_to_shards(standing, look=special)

    def _copy_to_shards(self, standing: Sequence[StandIn], look: bool) -> None:
        for each in standing:
            shard = self.shard(each.parameter)
            assert shard is not None
            loading.copy_to_shard(each, shard, look)

    # Clipping.

    def clip(
        self, targets: Sequence[nn.Parameter], scale: float = 1.0, max_norm: float | None = None
    ) -> None:
        """Multiply gradients so that their norm over the whole model is at most ``max_norm``, or
        ``sdp_gradient_clipping`` inside ``optimizer.step()`` (AWS Sharded Data Parallelism).

        ``targets`` are this rank's parameters, or masters, that have a gradient; it is changed in place. One that
        is none of the model's neither counts nor is clipped.
        Gradients are given multiplied by ``scale``, a loss scale, and come out without it. Every rank of the
        shard group calls it.

        Published order: the squares of a rank's own elements are summed in float64 parameter by
        parameter (of a persistent one those of the range that it would own, so that it counts once), then over
        the parameters in their order from the left, then over the ranks of the shard group along the tree. The sum of
        the slices of distributed modules goes its own way, last over the TP group along the tree, and is added to that
        of the other parameters.
        The coefficient is ``max_norm / (norm + 1e-6)`` and at most 1, the same bits on every rank; each gradient
        is multiplied once, by it divided by the scale, in its own dtype. A norm that is infinite or no number
        clips nothing.
        """
        self.resume()
        masters = self._masters
        with_gradient, counted = set(targets), []
        squares: list[torch.Tensor] = []
        of_slices: list[torch.Tensor] = []
        held: dict[str, int] = {}  # digests of the gradients that all ranks have
        for name, parameter in self._module.named_parameters():
            target = parameter if masters is None else masters.made(parameter)
            if target in with_gradient and target.grad is not None:
                counted.append(target)
                kind = squares if split_of(parameter) is None else of_slices
                kind.append(_square(self._own(parameter, target.grad)))
                if self.shard(parameter) is None:
                    held[name] = drift.digest(target.grad)
        local, local_slices = _added(squares), _added(of_slices)
        # Halves of the checksum: a float64 has 53 bits.
        halves = divmod(drift.checksum([*held.values(), len(held)]), 2**32)
        gathered = self.collectives.all_gather_values([local, local_slices, *map(float, halves)])
        if len({(high, low) for _, _, high, low in gathered}) > 1:
            ranks = self._runtime.group(GroupKind.SHARDING).ranks
            drifted = drift.found(
                self._runtime,
                GroupKind.SHARDING,
                "the gradient of parameter",
                held,
                [ranks],
                missing=True,
            )
            assert drifted is not None
            raise drifted
        square = reduction.fold([each for each, *_ in gathered], operator.add)
        slices = reduction.fold([each for _, each, *_ in gathered], operator.add)
        gathered_slices = clipping.over_tensor_group(self._runtime, slices)
        self.norm = math.sqrt(square + reduction.fold(gathered_slices, operator.add)) / scale
        coefficient = (self._clipping if max_norm is None else max_norm) / (self.norm + 1e-6)
        if not math.isfinite(self.norm) or coefficient > 1:
            coefficient = 1.0
        multiply(counted, coefficient / scale)
        multiply(with_gradient.difference(counted), 1 / scale)

    def has_shards(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Return whether one of these tensors is the gradient of one of this rank's shards (clipping.py)."""
        given = {id(each) for each in gradients}
        return any(id(each) in given for each in self._gradients_of_shards())

    def total_norm(self, gradients: Sequence[torch.Tensor], order: float) -> float:
        """The norm of whole gradients, given this rank's parts of them; the same bits on all ranks of the shard
        group, which all call. Gradients that every rank has count once. Raises ShardingError as :meth:`resume` does.
        """
        self.resume()
        shards = {id(each) for each in self._gradients_of_shards()}
        own = [each if id(each) in shards else self._slice(each) for each in gradients]
        gathered = self.collectives.all_gather_values([clipping.norm_of(own, order)])
        return clipping.norm_of_values([each for (each,) in gathered], order)

    def _gradients_of_shards(self) -> Iterator[torch.Tensor]:
        masters = self._masters
        for shard in self.unsharded.shards():
            target = shard.parameter if masters is None else masters.made(shard.parameter)
            for each in {shard.parameter, target}:
                if each.grad is not None:
                    yield each.grad

    def _own(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.shard(parameter) is not None else self._slice(gradient)

    def _slice(self, gradient: torch.Tensor) -> torch.Tensor:
        """The range of a whole gradient that this rank would own if it were sharded."""
        layout = Layout(gradient.numel(), self.collectives.size)
        return gradient.reshape(-1)[slice(*layout.owned_range(self.collectives.rank))]


def _check_memory(module: nn.Module) -> None:
    """Two parameters on one memory would become two. Raises UnsupportedTrainingError."""
    for entries in sharing.shared(module):
        objects = {id(entry.tensor): entry for entry in entries}
        if len(objects) > 1 and any(entry.kind == "parameter" for entry in entries):
            names = " and ".join(repr(entry.name) for entry in objects.values())
            raise UnsupportedTrainingError(
                f"smp.DistributedModel: {names} are different tensors on the same memory, which sharded data "
                "parallelism would take apart. Use one nn.Parameter in both places"
            )


def _added(squares: list[torch.Tensor]) -> float:
    """The sum of the squares, from the left."""
    values = torch.stack(squares).tolist() if squares else []
    return functools.reduce(operator.add, values, 0.0)  # later Pythons' sum() compensates


def _square(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of squares in float64."""
    real: torch.Tensor = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return real.double().square().sum()
