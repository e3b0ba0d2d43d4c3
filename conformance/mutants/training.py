"""Bugs of training around the steps: errors, hooks, checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import smp_core.torch as smp
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from smp_core.errors import SmpError, VerdictError
from smp_core.torch import hooks, weights
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import StepAbortedError
from smp_core.torch.execution import calls, engine
from smp_core.torch.execution.remote import boundary
from smp_core.torch.execution.running import RunningStep
from smp_core.torch.hooks import Hooks
from smp_core.torch.model import DistributedModel
from smp_core.torch.optimizer import state as optimizer_state

BUGS = Bugs("errors, hooks and checkpoints")


# ---- Errors --------------------------------------------------------------------------------------


@BUGS.enter("MODEL-BAD-BATCH", origin="B137")
def rows_left_over_are_dropped(patch: Patch) -> None:
    """rows that do not fill a microbatch are dropped without a word"""
    from smp_core import microbatch

    def view(self: Any, tensor: Any, axis: int, place: str) -> Any:
        shape = tuple(self.framework.shape(tensor))
        at = axis + len(shape) if axis < 0 else axis
        length = shape[at] // self.microbatches
        return self.framework.part(tensor, at, self.index * length, length)

    patch.setattr(microbatch._Splitter, "_view", view)


@BUGS.enter("MODEL-SECOND")
def models_replace_each_other(patch: Patch) -> None:
    """a second DistributedModel takes the place of the first"""
    init = DistributedModel.__init__

    def replacing(self: DistributedModel, *args: Any, **how: Any) -> None:
        sessions.current("the mutant").model = None
        init(self, *args, **how)

    patch.setattr(DistributedModel, "__init__", replacing)


@BUGS.enter("MODEL-RAISING-BODY", *ASSERTION, VerdictError, origin="B143")
def errors_stay_where_they_are(patch: Patch) -> None:
    """ranks on which nothing was raised return normally from a step that failed"""
    run = engine._run

    def swallowing(step: RunningStep, *args: Any) -> list[Any]:
        try:
            return run(step, *args)
        except StepAbortedError:
            return [torch.zeros(()) for _ in range(step.microbatches)]

    patch.setattr(engine, "_run", swallowing)


@BUGS.enter("MODEL-RAISING-BODY", *ASSERTION, SmpError, origin="B157")
def broken_for_good(patch: Patch) -> None:
    """no step can be run after one that failed"""
    refuse, init = RunningStep.refuse, RunningStep.__init__

    def remembering(self: RunningStep, failure: Any) -> Any:
        self.session.steps = -10_000
        refuse(self, failure)

    def refusing(self: RunningStep, session: Any, departures: Any) -> None:
        init(self, session, departures)
        if session.steps < 0:
            raise SmpError("a step has failed before")

    patch.setattr(RunningStep, "refuse", remembering)
    patch.setattr(RunningStep, "__init__", refusing)


@BUGS.enter("MODEL-DETACHED")
def detached_is_skipped(patch: Patch) -> None:
    """backward of a detached tensor does nothing"""
    backward = DistributedModel.backward

    def skipping(self: DistributedModel, tensors: Any, *args: Any) -> None:
        if not isinstance(tensors, torch.Tensor) or tensors.requires_grad:
            backward(self, tensors, *args)

    patch.setattr(DistributedModel, "backward", skipping)


@BUGS.enter("MODEL-UNUSED-INPUT")
def unused_input_gets_a_gradient(patch: Patch) -> None:
    """an input without influence gets the gradient of another one"""
    backward = boundary.run_backward

    def filled(*args: Any) -> Any:
        inputs = backward(*args)
        known = next((each for each in inputs if each is not None), None)
        return [known if each is None else each for each in inputs]

    patch.setattr(boundary, "run_backward", filled)


@BUGS.enter("MODEL-UNUSED-INPUT")
def unused_input_takes_the_others_along(patch: Patch) -> None:
    """where one input has no influence, none of the call's inputs gets a gradient"""
    backward = boundary.run_backward

    def emptied(*args: Any) -> Any:
        inputs = backward(*args)
        lost = any(each is None for each in inputs)
        return [None] * len(inputs) if lost else inputs

    patch.setattr(boundary, "run_backward", emptied)


@BUGS.enter("MODEL-ORIG-FORWARD")
def original_forward_twice(patch: Patch) -> None:
    """_orig_forward of a base class gives twice what its forward does"""
    get: Any = calls._OrigForward.__get__
    patch.setattr(
        calls._OrigForward,
        "__get__",
        lambda self, module, kind=None: lambda x: get(self, module, kind)(x) * 2,
    )


@BUGS.enter("MODEL-OUTSIDE-STEP")
def outside_is_the_identity(patch: Patch) -> None:
    """a call of the model outside a step gives its input back"""
    forward = DistributedModel.forward

    def lenient(self: DistributedModel, *args: Any, **kwargs: Any) -> Any:
        if self._session.step is None and not self._session.tracing:
            return args[0]
        return forward(self, *args, **kwargs)

    patch.setattr(DistributedModel, "forward", lenient)


@BUGS.enter("MODEL-BAD-PARTITION")
def partitions_wrap_around(patch: Patch) -> None:
    """a partition that does not exist is taken modulo their number"""
    original = smp.set_partition
    patch.setattr(smp, "set_partition", lambda m, index: original(m, index % smp.pp_size()))


@BUGS.enter("MODEL-SHARED-ACROSS", origin="B095")
def shared_parameters_drift(patch: Patch) -> None:
    """a parameter that modules share becomes one for each of them"""
    init = DistributedModel.__init__

    def untied(self: DistributedModel, module: nn.Module, *args: Any, **how: Any) -> None:
        seen: set[nn.Parameter] = set()
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if parameter in seen:
                    setattr(child, name, nn.Parameter(parameter.detach().clone()))
                elif parameter is not None:
                    seen.add(parameter)
        init(self, module, *args, **how)

    patch.setattr(DistributedModel, "__init__", untied)


# ---- Hooks and attributes ------------------------------------------------------------------------


@BUGS.enter("HOOK-POST-STEP")
def hooks_after_every_step(patch: Patch) -> None:
    """post-step hooks are called after every step"""
    run = Hooks.run

    def again(self: Hooks, model: Any, optimizer: Any) -> None:
        if "step" in self.when and "partition" not in self.when:
            for hook in self._registered.values():
                hook(model, optimizer)
        else:
            run(self, model, optimizer)

    patch.setattr(Hooks, "run", again)


@BUGS.enter("HOOK-POST-PARTITION")
def hooks_without_optimizer(patch: Patch) -> None:
    """hooks get None for the optimizer"""
    run = Hooks.run
    patch.setattr(Hooks, "run", lambda self, model, optimizer: run(self, model, None))


@BUGS.enter("HOOK-POST-PARTITION", origin="B091")
def hooks_get_the_module(patch: Patch) -> None:
    """hooks get the wrapped module, not the model"""
    run = Hooks.run
    patch.setattr(Hooks, "run", lambda self, model, opt: run(self, model.module, opt))


@BUGS.enter("HOOK-POST-STEP")
def removed_hooks_run(patch: Patch) -> None:
    """a hook that was removed is called all the same"""
    patch.setattr(hooks.Handle, "remove", lambda self: None)


@BUGS.enter("HOOK-FORWARD")
def hooks_do_not_run(patch: Patch) -> None:
    """forward hooks of modules are not called"""
    once = calls.Site._once

    def plain(self: Any, key: Any, hooked: bool, *args: Any, **kwargs: Any) -> Any:
        return once(self, key, False, *args, **kwargs)

    patch.setattr(calls.Site, "_once", plain)


@BUGS.enter("MODEL-ATTRIBUTES")
def state_has_a_prefix(patch: Patch) -> None:
    """the names of state_dict begin with "module.", as DistributedDataParallel's do"""
    state_dict = weights.state_dict
    patch.setattr(
        weights,
        "state_dict",
        lambda *args: {f"module.{name}": value for name, value in state_dict(*args).items()},
    )


@BUGS.enter("MODEL-JOIN", origin="B023")
def joined_replicas_do_not_count(patch: Patch) -> None:
    """replicas that have joined count with their last gradients"""
    from smp_core.torch.reduction.reducer import GradientReducer

    end_step = GradientReducer.end_step

    def stale(self: GradientReducer, totals: Any, failure: Any, *, joined: bool = False) -> Any:
        if not joined:
            vars(self)["_planted"] = dict(totals)
        else:
            totals = vars(self).get("_planted", totals)
        return end_step(self, totals, failure, joined=joined)

    patch.setattr(GradientReducer, "end_step", stale)


# ---- Checkpoints ---------------------------------------------------------------------------------


@BUGS.enter("CKPT-PARTIAL", origin="B125")
def optimizer_starts_afresh(patch: Patch) -> None:
    """the optimizer's state is not loaded"""
    patch.setattr(optimizer_state, "load", lambda optimizer, given: None)


@BUGS.enter("CKPT-PARTIAL")
def content_is_lost(patch: Patch) -> None:
    """resuming gives no user content"""
    resume = smp.resume_from_checkpoint

    def forgetful(*args: Any, **how: Any) -> None:
        resume(*args, **how)

    patch.setattr(smp, "resume_from_checkpoint", forgetful)


@BUGS.enter("CKPT-FULL", origin="B124")
def full_checkpoint_is_the_first_part(patch: Patch) -> None:
    """a full checkpoint has zeros for what the first rank does not hold"""
    state_dict = weights.state_dict

    def partly(model: Any, gather_to_rank0: bool = False) -> dict[str, Any]:
        found = state_dict(model, gather_to_rank0)
        return {
            key: value
            if weights.owns(model, key.rpartition(".")[0]) or not isinstance(value, torch.Tensor)
            else torch.zeros_like(value)
            for key, value in found.items()
        }

    patch.setattr(weights, "state_dict", partly)


@BUGS.enter("CKPT-MISSING")
def missing_is_nothing(patch: Patch) -> None:
    """a checkpoint that cannot be read counts as none"""
    resume = smp.resume_from_checkpoint

    def lenient(*args: Any, **how: Any) -> Any:
        try:
            return resume(*args, **how)
        except SmpError:
            return None

    patch.setattr(smp, "resume_from_checkpoint", lenient)
