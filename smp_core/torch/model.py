"""``smp.DistributedModel``: a module tree, over the ranks of a pipeline and its replicas
(API 1.7).

Until it is partitioned (in the constructor at pipeline degree 1, at the first step otherwise) it is the
module that was wrapped, whole on every rank. From then on each rank holds its own partition's
parameters, and calls go to their owners.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn

from smp_core.config import IgnoredKeyWarning
from smp_core.errors import ArgumentError, ArgumentTypeError, SmpError
from smp_core.microbatch import CallArguments
from smp_core.runtime import Runtime
from smp_core.schedule import Phase
from smp_core.topology import GroupKind
from smp_core.torch import joining, weights
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import (
    DetachedLossError,
    OutsideStepError,
    SecondModelError,
    UnsupportedTrainingError,
)
from smp_core.torch.execution import activity as activities
from smp_core.torch.execution import batches, calls, failures, uses
from smp_core.torch.execution.calls import Site
from smp_core.torch.execution.collective_try import collective_try
from smp_core.torch.execution.remote.transport import Transport
from smp_core.torch.hooks import Handle, Hook, Hooks
from smp_core.torch.memory import activations, gradient_checkpointing
from smp_core.torch.module_view import ModuleView
from smp_core.torch.nn.module import DistributedModule
from smp_core.torch.optimizer.parts import OwnParts
from smp_core.torch.parameters import creation
from smp_core.torch.parameters.split import check_current, split_of
from smp_core.torch.pipeline import placement, tracing
from smp_core.torch.pipeline.placement import Placement
from smp_core.torch.precision import casting, half
from smp_core.torch.precision.masters import Masters
from smp_core.torch.reduction.policy import Options
from smp_core.torch.reduction.reducer import GradientReducer
from smp_core.torch.reduction.replicas import CommHook
from smp_core.torch.sharding.sharded_model import ShardedModel
from smp_core.torch.sharding.sharding import Sharding
from smp_core.torch.sharding.whole_model import WHOLE_MODEL
from smp_core.torch.tensor_parallel.exchange import TensorGroup
from smp_core.torch.tensor_parallel.replacement import Replacement
from smp_core.torch.tensor_parallel.translation import Translation
from smp_core.torch.tensor_tree import StateDict
from smp_core.transport import torch_parts

Tensors = torch.Tensor | Sequence[torch.Tensor]
_CALL = "smp.DistributedModel"


class DistributedModel(nn.Module):
    """The model of a script; there is one.

    Args:
        module: the ``nn.Module``, built alike on every rank; the values of pp_rank 0 and dp_rank 0 count.
        trace_device: "cpu" or "gpu", which are the same here.
        trace_execution_times: partition by measured seconds rather than by counted operations. Not
            with ``trace_device="cpu"``.
        overlapping_allreduce: reduce gradients over replicas during the backward pass, in buckets,
            rather than at the end of the step. The values are the same.
        backward_passes_per_step: steps whose gradients are summed before they are reduced.
        average_grads_across_microbatches: divide gradients by the number of microbatches.
        bucket_cap_mb: the most that one bucket holds.
        trace_memory_usage: partition by measured memory rather than by an estimate.
        broadcast_buffers: replicas take over dp_rank 0's buffers before each step.
        gradient_as_bucket_view: accepted; the values are the same.
        find_unused_parameters: accepted (REL 1.2.0); unused parameters are always found.

    Raises:
        SecondModelError: there is a model already.
        ArgumentTypeError: in a 16-bit run, a parameter is neither float32 nor of the run's dtype.
        ArgumentTypeError, ArgumentError: an argument is not as it must be.
        PartitionError: at pipeline degree 1, if the ranks built different models. Otherwise the first
            step raises that, and any other error of the partition.

    ``module`` leads to the wrapped module; ``partitioned``: whether it has been partitioned. ``sharding`` has the state
    that is split over the shard group (sharding/sharded_model.py); at degree 1 nothing is (sharding/whole_model.py).
    ``masters`` are the tensors that the optimizer works on (precision/masters.py); None where it works on parameters
    themselves. With ``fp16`` or ``bf16`` the module is converted, in place (precision/casting.py).
    """

    _outermost: nn.Module

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = True,
    ) -> None:
        super().__init__()
        torch_parts.require("training")
        session = sessions.current(_CALL)
        if session.model is not None:
            raise SecondModelError(
                f"{_CALL}: there is a model already, and a script may have one. Wrap one module that "
                "holds both; or call smp.shutdown() and smp.init() to start anew"
            )
        _check_module(module)
        tracing.check_options(trace_device, trace_execution_times)
        _check_number("backward_passes_per_step", backward_passes_per_step, int)
        _check_number("bucket_cap_mb", bucket_cap_mb, (int, float))
        module, self._translations = _distributed(session, module)
        self._distributes = session.tensor_group is not None and any(
            isinstance(each, DistributedModule) for each in module.modules()
        )
        self._half = casting.dtype_of(session.runtime.config)
        if self._half is not None:
            casting.convert(session, module, self._half)
        self.masters = _make_masters(session.runtime, self._half)
        self.add_module("module", module)
        # In the places of SMP's wrappers, DDP's and that of 16 bits; past nn.Module, which would register a view.
        vars(self)["_outermost"] = module
        for _ in range(session.runtime.config.ddp + (self._half is not None)):
            vars(self)["_outermost"] = ModuleView(self._outermost)
        calls.keep_forwards(module)
        self.partitioned = False
        self.placement: Placement | None = None
        self.sites: dict[str, Site] = {}
        self.gradients: GradientReducer | None = None  # once partitioned
        self.sharding: Sharding = WHOLE_MODEL  # until partitioned
        self._options = Options(
            overlapping_allreduce=bool(overlapping_allreduce),
            backward_passes_per_step=backward_passes_per_step,
            average_grads_across_microbatches=bool(average_grads_across_microbatches),
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=bool(broadcast_buffers),
            gradient_as_bucket_view=bool(gradient_as_bucket_view),
        )
        self._comm_hook: tuple[object, CommHook] | None = None  # until partitioned
        self._trace = {
            "execution_times": bool(trace_execution_times),
            "memory_usage": bool(trace_memory_usage),
        }
        self._session = session
        self._pp_rank = session.runtime.position(GroupKind.PP)
        self._alone = session.runtime.config.pipeline_parallel_degree == 1
        self._transport: Transport | None = None
        self._watch: uses.Watch | None = None
        self._settled = False  # hooks and loads that waited for the partition have had their turn
        self._post_partition = Hooks("post-partition", late=True)
        self._post_step = Hooks("post-step")
        if self._alone:
            self._partition(lambda: placement.decide(session, module))
        session.model = self

    # In a step.

    def forward(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the module: in a step only, unless the pipeline degree is 1.

        Raises OutsideStepError outside of one.
        """
        if not self._session.tracing and activities.current() is None:
            if not self._alone:
                raise OutsideStepError(
                    "the model was called outside of a step, and it is partitioned over pp ranks. Call it "
                    "in a function that smp.step decorates (docs/spec/api.md#1.3)"
                )
            self._begin()
            if self._distributes:
                runtime = self._session.runtime
                with batches.alike_outside_of_steps(
                    runtime, args, kwargs, self.get_module().training
                ):
                    return self._called(args, kwargs)
        return self._called(args, kwargs)

    def _called(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The output of the module; in a 16-bit run of arguments in its dtype."""
        if self._half is None:
            return self.get_module()(*args, **kwargs)
        args, kwargs = casting.inputs((args, kwargs), self._half)
        with self.computing():  # outside of steps, and where a step is traced
            return casting.outputs(self.get_module()(*args, **kwargs))

    def backward(self, tensors: Tensors, grad_tensors: Any = None) -> None:
        """The backward pass of a microbatch, instead of ``loss.backward()``: as
        ``torch.autograd.backward(tensors, grad_tensors)``, without retain_graph and create_graph. With
        ``fp16`` gradients are those of the tensors times the loss scale.

        Raises OutsideStepError outside of a step, unless the pipeline degree is 1; DetachedLossError
        if a tensor requires no gradient.
        """
        activity = activities.current()
        tracing_now = self._session.tracing
        if activity is None and not tracing_now and not self._alone:
            raise OutsideStepError(
                "model.backward was called outside of a step. Call it in the function that smp.step "
                "decorates, instead of loss.backward()"
            )
        given = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        _check_attached(given)
        if tracing_now:
            return
        grad_tensors = self._scaled(given, grad_tensors)
        if activity is None:
            self._backward_alone(given, grad_tensors)
            return
        activity.phase = Phase.BACKWARD
        activity.pause()  # until it is the microbatch's turn
        torch.autograd.backward(given, grad_tensors)
        self.sharding.unsharded.end_backward(activity.microbatch)
        activity.phase = Phase.FORWARD  # if it raises, that is where

    def _scaled(self, tensors: tuple[torch.Tensor, ...], grad_tensors: Any) -> Any:
        """The gradients to begin backward with: those given, or 1, times the loss scale."""
        if self.masters is None or self.masters.loss_scale == 1:
            return grad_tensors
        scale = self.masters.loss_scale
        if isinstance(grad_tensors, torch.Tensor):
            grad_tensors = (grad_tensors,)
        given = grad_tensors or (None,) * len(tensors)
        return tuple(
            gradient * scale
            if gradient is not None
            else torch.full_like(tensor, scale)
            if tensor.numel() == 1
            else None  # torch says that it needs one
            for tensor, gradient in zip(tensors, given, strict=True)
        )

    def _backward_alone(self, tensors: tuple[torch.Tensor, ...], grad_tensors: Any) -> None:
        """Outside of steps, at pipeline degree 1: a step of one microbatch, without its body."""
        assert self._watch is not None
        self._watch.refresh()
        with self.computing(), self._eager_calls.backward() as ledger:
            torch.autograd.backward(tensors, grad_tensors)
        ledger.close(0)
        assert self.gradients is not None
        # Late, but before the next forward pass: that one was not told of.
        source = joining.before_step(self._session)
        self.settle()
        self._follow()
        self.gradients.begin_step(list(self.local_buffers()), source, overlaps=False)
        self.gradients.end_step(ledger.totals(), None, microbatches=1)
        self.finished()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero gradients as torch's method does, those of masters included."""
        super().zero_grad(set_to_none)
        if self.masters is not None:
            self.masters.zero_grad(set_to_none)

    def join(self) -> joining.Join:
        """A context for replicas with different numbers of batches; needs ``ddp``. See joining.py.

        Raises UnsupportedTrainingError with distributed modules: the ranks of a TP group train together.
        """
        if self._session.tensor_group is not None:
            raise UnsupportedTrainingError(
                "model.join: not with tensor_parallel_degree above 1. Give all ranks the same number of batches"
            )
        return joining.Join(self._session)

    def no_sync(self) -> NoReturn:
        """Refused: SMP has no such method. Raises UnsupportedTrainingError."""
        raise UnsupportedTrainingError(
            "model.no_sync: SMP has none. To accumulate gradients over several steps before they are "
            "reduced, pass smp.DistributedModel(module, backward_passes_per_step=N)"
        )

    def __getstate__(self) -> NoReturn:
        """Refused, and so are copies of it: a script has one model, which belongs to its ranks."""
        raise UnsupportedTrainingError(
            f"{_CALL} cannot be copied, pickled or saved whole: there is one, and it belongs to the ranks. "
            "Save model.state_dict(), or use smp.save_checkpoint; at pipeline degree 1 model.module can be "
            "copied, with sharded data parallelism after model.cpu()"
        )

    # Hooks.

    def register_post_partition_hook(self, hook: Hook) -> Handle:
        """Have ``hook(model, optimizer)`` called once the model has been partitioned, before the first
        step's first forward pass; at once, if that has passed. Returns a handle with ``remove()``.
        """
        return self._post_partition.register(hook)

    def register_post_step_hook(self, hook: Hook) -> Handle:
        """Have ``hook(model, optimizer)`` called once, after the first step. Returns a handle with
        ``remove()``. (INF, API 9.9)
        """
        return self._post_step.register(hook)

    def register_comm_hook(self, state: object, callable: CommHook) -> None:
        """Have ``callable(state, bucket)`` reduce each bucket of gradients. The hook itself averages over
        replicas and microbatches (API 1.7).

        Raises UnsupportedTrainingError without ``ddp`` and ``overlapping_allreduce``, with distributed modules, and
        for a second hook; ArgumentTypeError for a value that cannot be called.
        """
        if any(split_of(each) is not None for each in self.get_module().parameters()):
            raise UnsupportedTrainingError(
                "model.register_comm_hook: not with distributed modules, whose gradients are reduced over RDP groups "
                "(all others over DP groups). Leave the hook out"
            )
        if not self._session.runtime.config.ddp or not self._options.overlapping_allreduce:
            raise UnsupportedTrainingError(
                "model.register_comm_hook needs the configuration parameter ddp=True and "
                f"{_CALL}(..., overlapping_allreduce=True)"
            )
        if not builtins.callable(callable):
            raise ArgumentTypeError(
                f"model.register_comm_hook: hook must be callable, not {callable!r}"
            )
        if self.gradients is not None:
            self.gradients.register_comm_hook(state, callable)
        elif self._comm_hook is not None:
            raise UnsupportedTrainingError("model.register_comm_hook: there is a hook already")
        else:
            self._comm_hook = state, callable

    # The modules and parameters of this rank, and the state of the whole model.

    def get_module(self) -> nn.Module:
        """The module that was wrapped."""
        module = self._modules["module"]
        assert module is not None
        return module

    @property
    def module(self) -> nn.Module:
        """The module that was wrapped, inside of a view for each of SMP's wrappers: that of ``ddp``, and that of
        ``fp16`` and ``bf16``. A view's ``module`` is what it wraps.
        """
        return self._outermost

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """This partition's modules, by path; all of them before partitioning."""
        return weights.local_named_modules(self)

    def local_modules(self) -> Iterator[nn.Module]:
        """This partition's modules."""
        return weights.local_modules(self)

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This partition's parameters, by name, each once; all of them before partitioning."""
        return weights.local_named_parameters(self)

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """This partition's parameters. There may be none."""
        return weights.local_parameters(self)

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This partition's buffers, by name, each once."""
        return weights.local_named_buffers(self)

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """This partition's buffers."""
        return weights.local_buffers(self)

    def local_state_dict(self) -> StateDict:
        """This rank's part of the state, with the key ``_smp_is_partial``; of shards with ``_smp_shard``, too."""
        return weights.local_state_dict(self)

    def state_dict(self, gather_to_rank0: bool = False) -> StateDict:  # type: ignore[override]
        """The state of the whole model, gathered: every rank of the PP group calls it and, with sharded data
        parallelism, every rank of the shard group. With ``gather_to_rank0`` all ranks but 0 get an empty dict.
        """
        return weights.state_dict(self, gather_to_rank0)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> Any:
        """Load a full or a partial state; before the model is partitioned it waits until it is. See
        weights.load_state_dict.
        """
        return weights.load_state_dict(self, state_dict, strict, same_partition_load)

    def cpu(self) -> Self:
        """Gather the whole model on every rank of the PP group, of the TP group, and of the shard group, on the CPU:
        all of them call this. The gathered model is for reading, until the next step.
        """
        weights.cpu(self)
        return self

    # Tensor parallelism.

    @property
    def translations(self) -> Mapping[str, Translation]:
        """The translations of the states of modules that distributed ones have replaced, by path."""
        return self._translations

    def distributed_modules(self) -> Iterator[nn.Module]:
        """The modules whose parameters are split over tp ranks: the outermost ones, those of this partition."""
        inside: set[nn.Module] = set()
        for child in self.local_modules():
            if isinstance(child, DistributedModule) and child not in inside:
                inside.update(child.modules())
                yield child

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Return whether each tp rank holds a slice of the parameter."""
        return split_of(parameter) is not None

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Return whether each tp rank holds a slice of the buffer."""
        return split_of(buffer) is not None

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter acts on the batch of the whole TP group, and not on the rank's own."""
        return split_of(parameter) is not None

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Return whether the buffer acts on the batch of the whole TP group, and not on the rank's own."""
        return split_of(buffer) is not None

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this partition whose gradients are reduced over DP_GROUP."""
        for name, parameter in self.local_named_parameters():
            if split_of(parameter) is None:
                yield name, parameter

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this partition whose gradients are reduced over RDP_GROUP."""
        for name, parameter in self.local_named_parameters():
            if split_of(parameter) is not None:
                yield name, parameter

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters as an optimizer sees them: those of this partition, or their masters."""
        masters = self.masters
        for name, parameter in self.local_named_parameters():
            yield name, parameter if masters is None else masters.of(parameter)

    # The members that the engine reads.

    def owner(self, path: str) -> int:
        """The pp rank that runs a module."""
        assert self.placement is not None
        return self.placement.owner(path)

    def transport(self) -> Transport | None:
        """The messages of this model's pipeline; None at pipeline degree 1."""
        if self._transport is None and not self._alone:
            self._transport = Transport(self._session.runtime)
        return self._transport

    def prepare(
        self, body: Callable[..., object], split: Callable[[], list[CallArguments]]
    ) -> None:
        """Before a step. Before the first: trace, partition, distribute, post-partition hooks."""
        session = self._session
        source = joining.before_step(session)
        self.sharding.begin_step()
        if not self.partitioned:
            self._partition(lambda: self._decide(body, split))
        else:
            self._check_calls()
        weights.reshard(self)
        self.settle()
        assert self._watch is not None
        self._watch.refresh()
        assert self.gradients is not None
        self._follow()
        self.gradients.begin_step(list(self.local_buffers()), source)

    def _check_calls(self) -> None:
        """Raise UnsupportedTrainingError if calls of a module do not go where it is any more."""
        for site in self.sites.values():
            if vars(site.module).get("_compiled_call_impl") != site.called:
                _check_compiled(self.get_module())

    def compile(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused: the calls of its modules have to be seen. Raises UnsupportedTrainingError."""
        raise UnsupportedTrainingError(
            f"{_CALL}.compile: torch.compile is not supported (docs/spec/api.md#6). Leave the call out"
        )

    def _follow(self) -> None:
        """A script may have replaced or added parameters since the last step."""
        assert self.gradients is not None
        local = dict(self.local_named_parameters())
        self.gradients.follow(local.values())
        if self.masters is not None:
            self.masters.follow(local)

    @property
    def wide(self) -> bool:
        """True if gradients of 16-bit parameters are summed in float32."""
        return self._half is not None

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Entered around forward and backward passes, in the thread that runs them: a 16-bit run computes operators
        in float32 that torch has no 16-bit kernel for.
        """
        return contextlib.nullcontext() if self._half is None else half.in_float32()

    def _run_eagerly(
        self,
        module: nn.Module,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """Call a module of the tree outside of a step."""
        weights.end_reading(self)
        with self.computing():
            return self._eager_calls.run(module, forward, args, kwargs)

    def settle(self) -> None:
        """Run the hooks and loads that wait for the partition: before the first step, and before the next one
        again as far as they failed.
        """
        if self._settled:
            return
        session = self._session
        collective_try(
            session.runtime,
            lambda: self._post_partition.run(self, session.optimizer),
            "in a post-partition hook; the model is partitioned, and the next step may be tried",
        )
        collective_try(
            session.runtime,
            lambda: weights.load_deferred(self),
            "in a load_state_dict that had waited for the partition; load the right state on every rank, "
            "and try the step again",
        )
        self._settled = True

    def _begin(self) -> None:
        """Before the first forward pass after partitioning, in a step or not; later it does nothing."""
        self._post_partition.run(self, self._session.optimizer)
        weights.load_deferred(self)

    def finished(self) -> None:
        """After a step that went well."""
        if not self._post_step.ran:
            collective_try(
                self._session.runtime,
                lambda: self._post_step.run(self, self._session.optimizer),
                "in a post-step hook; the step itself is complete, gradients and all",
            )

    def _decide(
        self, body: Callable[..., object], split: Callable[[], list[CallArguments]]
    ) -> Placement:
        """On the one rank that decides: a trace of the first microbatch, unless it is skipped."""
        session = self._session
        if session.runtime.config.skip_tracing or creation.is_delayed(self.get_module()):
            return placement.decide(session, self.get_module())
        call = split()[0]
        with tracing.Tracer(self.get_module(), session, **self._trace) as tracer, self.computing():
            body(*call.args, **call.kwargs)
        return placement.decide(session, self.get_module(), tracer.trace)

    def _partition(self, decide: Callable[[], Placement]) -> None:
        session = self._session
        gradient_checkpointing.heed(self.get_module())
        raised: list[Exception] = []

        def decide_or_tell() -> Placement:
            try:
                _check_compiled(self.get_module())  # since it was wrapped
                return decide()
            except SmpError:
                raise
            except Exception as error:
                raised.append(error)
                raise failures.aborted(session, error) from error

        try:
            decided = placement.settle(session, decide_or_tell)
        except SmpError:
            if raised:
                raise raised[0] from None
            raise
        placement.prepare(session, self)
        if session.runtime.topology.sharding > 1:
            # Before values come: each rank takes its own part of a parameter and never holds the rest.
            self.sharding = ShardedModel(session.runtime, self.get_module(), self.masters)
        placement.distribute(session, self, decided, self.sharding)
        self.placement = decided
        self._eager_calls = self.sharding.eager_calls(self.wide)
        self.sites = calls.install(
            self.get_module(),
            self.owner,
            self._pp_rank,
            self._run_eagerly,
            activations.CheckpointedSite,
        )
        self._watch = uses.Watch(self.get_module())
        local = dict(self.local_named_parameters())
        self.gradients = self._make_gradients(local)
        if self._comm_hook is not None:
            self.gradients.register_comm_hook(*self._comm_hook)
        self.partitioned = True
        if self.masters is not None:
            self.masters.follow(local)
        if session.optimizer is not None:
            session.optimizer._smp_mastered(self)

    def _make_gradients(self, parameters: dict[str, nn.Parameter]) -> GradientReducer:
        runtime = self._session.runtime
        shards = self.sharding.gradient_shards(runtime)
        return GradientReducer(runtime, parameters, self._options, shards, self.masters)


def _make_masters(runtime: Runtime, half: torch.dtype | None) -> Masters | None:
    replicas = len(runtime.group(GroupKind.RDP).ranks)
    split = runtime.config.shard_optimizer_state and replicas > 1
    parts = OwnParts(runtime) if split else None
    return None if half is None and parts is None else Masters(half, parts)


def _distributed(
    session: sessions.TrainingSession, module: nn.Module
) -> tuple[nn.Module, Mapping[str, Translation]]:
    """The module with distributed modules in the places that a script wished, and the translations of their states by
    path.
    """
    degree = session.runtime.config.tensor_parallel_degree
    replacement = Replacement(module, (placement.PARTITION,))
    root = replacement.root
    for number, child in enumerate(root.modules()):
        if isinstance(child, DistributedModule):
            child.mark_splits()
            child.number = number
    if degree > 1 and not any(isinstance(child, DistributedModule) for child in root.modules()):
        warnings.warn(
            f"{_CALL}: tensor_parallel_degree={degree} makes the groups, and "
            "no module is distributed: each rank of a tensor-parallel group holds a replica. Create modules in "
            "smp.model_creation(tensor_parallelism=True) or smp.tensor_parallelism()",
            IgnoredKeyWarning,
            stacklevel=3,
        )
    if session.optimizer is not None:
        groups = session.optimizer.optimizer.param_groups
        check_current(_CALL, (each for group in groups for each in group["params"]))
    if degree > 1:
        session.tensor_group = TensorGroup(session.runtime)
    return root, replacement.translations


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"{_CALL}: module is a {type(module).__name__}, not a torch.nn.Module"
        )
    _check_compiled(module)
    for path, child in module.named_modules():
        kind = type(child)
        if isinstance(child, nn.parallel.DistributedDataParallel | torch.jit.ScriptModule):
            raise UnsupportedTrainingError(
                f"{_CALL}: module {path!r} is a {kind.__name__}, which cannot be partitioned "
                "(docs/spec/api.md#6). Pass the plain module; replicas are reduced without a wrapper"
            )


def _check_compiled(module: nn.Module) -> None:
    """Raise UnsupportedTrainingError for a module that torch.compile, or its own ``compile``, was applied to."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    for path, child in module.named_modules():
        call = vars(child).get("_compiled_call_impl")
        forward: Any = getattr(child, "forward", None)
        if (
            (compiler is not None and isinstance(child, compiler.OptimizedModule))
            or (call is not None and not isinstance(getattr(call, "__self__", None), Site))
            or _is_compiled(forward)
        ):
            what = f"module {path!r}" if path else "the module"
            raise UnsupportedTrainingError(
                f"{_CALL}: {what} ({type(child).__name__}) is compiled (torch.compile), and calls of its modules "
                "could not be sent to the ranks that own them (docs/spec/api.md#6). Pass the module as it was before"
            )


def _is_compiled(function: object) -> bool:
    """Return whether a function is compiled by torch.compile; one of torch.compiler.disable is not."""
    return hasattr(function, "_torchdynamo_orig_callable") and not hasattr(
        function, "_torchdynamo_disable"
    )


def _check_number(name: str, value: Any, kinds: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ArgumentTypeError(f"{_CALL}: {name}={value!r} is no number")
    if value <= 0:
        raise ArgumentError(f"{_CALL}: {name} must be above 0, not {value!r}")


def _check_attached(tensors: tuple[torch.Tensor, ...]) -> None:
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(
                f"model.backward: element {index} is a {type(tensor).__name__}, not a tensor"
            )
        if not tensor.requires_grad:
            raise DetachedLossError(
                f"model.backward: tensor {index}, of shape {list(tensor.shape)}, requires no gradient: it "
                "was detached from the model, or computed without it or under torch.no_grad(). Pass the "
                "loss as the model's outputs gave it"
            )
