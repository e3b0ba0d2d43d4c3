"""``smp.DistributedModel``: a module tree, over the ranks of a pipeline and its replicas
(SMP_API.md 1.7).

Until it is partitioned (in the constructor at pipeline degree 1, at the first step otherwise) it is the
module that was wrapped, whole on every rank. From then on each rank holds its own partition's
parameters, and calls go to their owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from smp_core.errors import ArgumentTypeError
from smp_core.microbatch import Call
from smp_core.topology import GroupKind
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import (
    DetachedLossError,
    OutsideStepError,
    SecondModelError,
)
from smp_core.torch.pipeline import activity as activities
from smp_core.torch.pipeline import calls, placement, uses
from smp_core.torch.pipeline.calls import Site
from smp_core.torch.pipeline.placement import Placement
from smp_core.torch.pipeline.schedule import Phase
from smp_core.torch.pipeline.transport import Transport

Tensors = torch.Tensor | Sequence[torch.Tensor]


class DistributedModel(nn.Module):
    """The model of a script; there is one.

    ``partitioned``: whether the module has been partitioned. ``module``: what was wrapped.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        session = sessions.current("smp.DistributedModel")
        if session.model is not None:
            raise SecondModelError(
                "smp.DistributedModel: there is a model already, and a script may have one. Wrap one "
                "module that holds both, or call smp.shutdown() and smp.init() to start anew"
            )
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                f"smp.DistributedModel: module is a {type(module).__name__}, not a torch.nn.Module"
            )
        self.module = module
        self.partitioned = False
        self.sites: dict[str, Site] = {}
        self.placement: Placement | None = None
        self._session = session
        self._pp_rank = session.runtime.position(GroupKind.PP)
        self._transport: Transport | None = None
        self._watch: uses.Watch | None = None
        session.model = self
        if session.runtime.config.pipeline_parallel_degree == 1:
            self._partition(lambda: placement.decide(session, module))

    # Calls.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module: only in a step, unless the pipeline degree is 1.

        Raises OutsideStepError outside of one.
        """
        session = self._session
        if session.step is None and not session.tracing and not self._alone:
            raise OutsideStepError(
                "the model was called outside of a step, and it is partitioned over pp ranks. Call it "
                "in a function that smp.step decorates (SMP_API.md 1.3)"
            )
        return self.module(*args, **kwargs)

    def backward(self, tensors: Tensors, grad_tensors: Any = None) -> None:
        """The backward pass of a microbatch, instead of ``loss.backward()``: as
        ``torch.autograd.backward(tensors, grad_tensors)``, without retain_graph and create_graph.

        Raises OutsideStepError outside of a step, unless the pipeline degree is 1; DetachedLossError
        if a tensor does not depend on anything that requires a gradient.
        """
        session = self._session
        given = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        activity = activities.current()
        if activity is None and not session.tracing and not self._alone:
            raise OutsideStepError(
                "model.backward was called outside of a step. Call it in the function that smp.step "
                "decorates, instead of loss.backward()"
            )
        for index, tensor in enumerate(given):
            if not tensor.requires_grad:
                raise DetachedLossError(
                    f"model.backward: tensor {index} of shape {list(tensor.shape)} requires no gradient: "
                    "it was detached from the model, or computed without it or under torch.no_grad(). "
                    "Pass the loss as the model's outputs gave it"
                )
        if session.tracing:
            return
        if activity is None:
            torch.autograd.backward(given, grad_tensors)
            return
        activity.phase = Phase.BACKWARD
        try:
            activity.pause()  # until it is the microbatch's turn
            torch.autograd.backward(given, grad_tensors)
        finally:
            activity.phase = Phase.FORWARD

    @property
    def _alone(self) -> bool:
        """Whether all modules are on this rank."""
        return self._session.runtime.config.pipeline_parallel_degree == 1

    # What the engine asks for.

    def owner(self, path: str) -> int:
        """The pp rank that runs a module."""
        assert self.placement is not None
        return self.placement.owner(path)

    def transport(self) -> Transport | None:
        """The messages of this model's pipeline; None at pipeline degree 1."""
        if self._transport is None and not self._alone:
            self._transport = Transport(self._session.runtime)
        return self._transport

    def prepare(self, body: Callable[..., Any], split: Callable[[], list[Call]]) -> None:
        """Before a step: at the first one partition the model."""
        session = self._session
        if not self.partitioned:
            self._partition(lambda: placement.decide(session, self.module))
        assert self._watch is not None
        self._watch.refresh()

    def finish(self, step: Any) -> None:
        """After the last microbatch: gradients."""
        count = step.microbatches
        for parameter, total in step.ledger.totals().items():
            total = total / count
            parameter.grad = total if parameter.grad is None else parameter.grad + total

    def finished(self) -> None:
        """After a step that went well."""

    def _partition(self, decide: Callable[[], Placement]) -> None:
        session = self._session
        self.placement = placement.settle(session, decide)
        placement.distribute(session, self, self.placement)
        self.sites = calls.install(self.module, self.owner, self._pp_rank)
        self._watch = uses.Watch(self.module)
        self.partitioned = True
