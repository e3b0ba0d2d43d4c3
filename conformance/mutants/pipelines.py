"""Bugs of pipelines: messages, schedules, and what a rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import smp_core.torch as smp
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from smp_core import schedule
from smp_core.errors import SmpError
from smp_core.schedule import Progress, Ready
from smp_core.torch import weights
from smp_core.torch.exceptions import BatchSizeError
from smp_core.torch.execution import engine
from smp_core.torch.execution.remote import boundary
from smp_core.torch.execution.remote.boundary import ServedCall
from smp_core.torch.execution.remote.messages import Forward
from smp_core.torch.execution.server import Server
from smp_core.torch.memory import recompute
from smp_core.torch.pipeline import placement
from smp_core.torch.state_keys import PARTIAL

BUGS = Bugs("pipeline and microbatches")


def policy(patch: Patch, name: str, **changed: Any) -> None:
    """Change the rule of a schedule."""
    patch.setitem(schedule.POLICIES, name, dataclasses.replace(schedule.POLICIES[name], **changed))


def progress(patch: Patch, change: Callable[[Progress], Progress]) -> None:
    """Change what the schedule hears of the microbatches."""
    choose = schedule.choose

    def changed(rule: Any, ready: Sequence[Ready], so_far: Progress) -> int | None:
        return choose(rule, ready, change(so_far))

    patch.setattr(schedule, "choose", changed)


# ---- Schedules -----------------------------------------------------------------------------------


@BUGS.enter("PIPE-SIMPLE")
def simple_is_interleaved(patch: Patch) -> None:
    """under simple a backward begins as soon as it can"""
    policy(patch, "simple", turns_together=False, prefers=schedule.Phase.BACKWARD)


@BUGS.enter("PIPE-SIMPLE", origin="B058")
def simple_begins_one_early(patch: Patch) -> None:
    """under simple backwards begin while the last microbatch has forwards to do"""
    policy(patch, "simple", prefers=schedule.Phase.BACKWARD)
    progress(patch, lambda so_far: so_far._replace(forward=max(0, so_far.forward - 1)))


@BUGS.enter("PIPE-ACTIVE")
def no_cap(patch: Patch) -> None:
    """all microbatches are begun at once, whatever active_microbatches says"""
    policy(patch, "interleaved", capped=False, prefers=schedule.Phase.FORWARD)


@BUGS.enter("PIPE-ACTIVE", origin="B059")
def one_more_is_active(patch: Patch) -> None:
    """one microbatch more than active_microbatches is in progress"""
    policy(patch, "interleaved", prefers=schedule.Phase.FORWARD)
    progress(patch, lambda so_far: so_far._replace(cap=so_far.cap + 1))


@BUGS.enter("PIPE-INTERLEAVED")
def interleaved_is_simple(patch: Patch) -> None:
    """under interleaved all forwards come first"""
    patch.setitem(schedule.POLICIES, "interleaved", schedule.POLICIES["simple"])


# ---- Microbatches --------------------------------------------------------------------------------


@BUGS.enter("PIPE-EVERYWHERE", origin="B056")
def results_backwards(patch: Patch) -> None:
    """a step gives its results with the last microbatch first"""
    drive = Server.drive

    def reversed_(self: Server, bodies: Any) -> dict[int, Any]:
        done = drive(self, bodies)
        return {len(done) - 1 - number: value for number, value in done.items()}

    patch.setattr(Server, "drive", reversed_)


@BUGS.enter("PIPE-EVERYWHERE")
def others_get_the_first(patch: Patch) -> None:
    """ranks other than the first get the result of microbatch 0 for all"""
    run = engine._run

    def first(step: Any, *args: Any) -> list[Any]:
        done = run(step, *args)
        return done if step.rank == 0 else done[:1] * len(done)

    patch.setattr(engine, "_run", first)


@BUGS.enter("PIPE-FIRST-RANK", SmpError)
def everybody_needs_data(patch: Patch) -> None:
    """a rank whose input has no elements refuses the step"""
    original = smp.step

    def step(**how: Any) -> Any:
        def decorate(body: Any) -> Any:
            run = original(**how)(body)

            def looking(*args: Any) -> Any:
                if any(isinstance(each, torch.Tensor) and not each.numel() for each in args):
                    raise BatchSizeError("smp.step: an input has no elements")
                return run(*args)

            return looking

        return decorate

    patch.setattr(smp, "step", step)


@BUGS.enter("PIPE-EQUALS-PLAIN", *ASSERTION, RuntimeError, origin="B056")
def latest_call_only(patch: Patch) -> None:
    """a rank keeps only the latest call of each module for the backward pass"""
    backward, latest = boundary.run_backward, dict[str, ServedCall]()
    forward = boundary.run_forward

    def kept(*args: Any) -> Any:
        frozen, record = forward(*args)
        if record is not None:
            latest[record.path] = record
        return frozen, record

    def other(record: ServedCall, grads: Any) -> Any:
        found = latest.get(record.path, record)
        return backward(found if len(found.outputs) == len(grads) else record, grads)

    patch.setattr(boundary, "run_forward", kept)
    patch.setattr(boundary, "run_backward", other)


@BUGS.enter("PIPE-EQUALS-PLAIN", origin="B058")
def gradients_stop_at_the_boundary(patch: Patch) -> None:
    """the gradients of a call's inputs come back as zeros from another rank"""
    backward = boundary.run_backward

    def zeros(record: ServedCall, grads: Any) -> Any:
        return [
            None if each is None else torch.zeros_like(each) for each in backward(record, grads)
        ]

    patch.setattr(boundary, "run_backward", zeros)


@BUGS.enter("PIPE-SHARED", origin="B059")
def second_call_gets_the_first_input(patch: Patch) -> None:
    """a module that is called again in a microbatch by another rank gets the input of its first call"""
    forward, inputs = boundary.run_forward, dict[Any, Any]()

    def aliased(message: Any, received: Any, run: Any) -> Any:
        key = message.seed, message.microbatch, message.key.path
        known = inputs.setdefault(key, received.tensors)
        if [each.shape for each in known] == [each.shape for each in received.tensors]:
            for mine, first in zip(received.tensors, list(known), strict=True):
                if mine is not first and mine.is_floating_point():
                    mine.data.copy_(first.data)
        return forward(message, received, run)

    patch.setattr(boundary, "run_forward", aliased)


@BUGS.enter("PIPE-REPLAYED", origin="B131")
def random_numbers_of_the_rank(patch: Patch) -> None:
    """modules on other ranks draw from a stream that does not depend on the step's seed"""
    asked = Server._asked

    def unseeded(self: Server, message: Any, received: Any) -> None:
        if isinstance(message, Forward):
            message = message._replace(key=dataclasses.replace(message.key, stream=0))
        asked(self, message, received)

    patch.setattr(Server, "_asked", unseeded)


@BUGS.enter("PIPE-CHECKPOINTING", *ASSERTION, RuntimeError)
def computed_again_from_other_inputs(patch: Patch) -> None:
    """recomputation in backward starts from inputs that are twice as large"""
    opened = recompute._Inputs.open

    def doubled(self: Any, name: str) -> Any:
        found = opened(self, name)
        return tuple(
            (each.detach() * 2).requires_grad_(each.requires_grad)
            if each.is_floating_point()
            else each
            for each in found
        )

    patch.setattr(recompute._Inputs, "open", doubled)


# ---- What a rank holds ---------------------------------------------------------------------------


@BUGS.enter("MODEL-BROADCAST")
def each_rank_keeps_its_weights(patch: Patch) -> None:
    """the owner of a partition keeps the values that it made itself"""
    patch.setattr(placement, "_send_part", lambda *args: None)


@BUGS.enter("PIPE-AUTOMATIC")
def automatic_partition_loses_values(patch: Patch) -> None:
    """with an automatic partition, parameters that move arrive as zeros"""
    distribute = placement.distribute

    def zeroed(session: Any, model: Any, placed: Any, sharded: Any) -> None:
        distribute(session, model, placed, sharded)
        config = session.runtime.config
        if config.auto_partition and config.pipeline_parallel_degree > 1 and model._pp_rank:
            with torch.no_grad():
                for each in weights.local_parameters(model):
                    each.zero_()

    patch.setattr(placement, "distribute", zeroed)


@BUGS.enter("PIPE-LOCAL")
def everybody_holds_everything(patch: Patch) -> None:
    """every rank lists the parameters of all partitions as its own"""
    patch.setattr(weights, "owns", lambda model, path: True)


@BUGS.enter("PIPE-LOCAL")
def first_rank_holds_nothing(patch: Patch) -> None:
    """the first rank of a pipeline lists no parameter as its own"""
    named = weights.local_named_parameters

    def none(model: Any) -> Any:
        alone = model._session.runtime.config.pipeline_parallel_degree == 1
        return iter(()) if model._pp_rank == 0 and not alone else named(model)

    patch.setattr(weights, "local_named_parameters", none)


@BUGS.enter("MODEL-ATTRIBUTES")
def state_is_local(patch: Patch) -> None:
    """state_dict has this rank's part only"""

    def local(model: Any, gather_to_rank0: bool = False) -> dict[str, Any]:
        found = weights.local_state_dict(model)
        return {key: value for key, value in found.items() if key != PARTIAL}

    patch.setattr(weights, "state_dict", local)


@BUGS.enter("CKPT-STATE")
def loading_keeps_what_is_there(patch: Patch) -> None:
    """load_state_dict before the partition has no effect"""
    patch.setattr(weights, "load_deferred", lambda model: None)
    patch.setattr(nn.Module, "load_state_dict", _forgetful(nn.Module.load_state_dict))


def _forgetful(load: Any) -> Any:
    """Loads the first state that a module gets, which is the property's own."""

    def loading(self: nn.Module, state: Any, *args: Any, **how: Any) -> Any:
        if vars(self).get("_planted"):
            return None
        vars(self)["_planted"] = True
        return load(self, state, *args, **how)

    return loading
