"""Bugs of distributed modules: contexts, registration, replacement, states, batches, refusals and norms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import smp_core.torch as smp
from conformance.mutants.protocol import Bugs, Patch
from smp_core.torch import model as models
from smp_core.torch.execution import batch_description, batches
from smp_core.torch.nn.module import DistributedModule
from smp_core.torch.optimizer import distributed as optimizers
from smp_core.torch.parameters.split import Split
from smp_core.torch.precision import update
from smp_core.torch.sharding import clipping
from smp_core.torch.tensor_parallel import registry, replacement, wishes
from smp_core.torch.tensor_parallel.exchange import TensorGroup
from smp_core.torch.tensor_parallel.registry import Registration
from smp_core.torch.tensor_parallel.replacement import Replacement
from smp_core.torch.tensor_parallel.wishes import WISH, Wish

BUGS = Bugs("distributed modules")


# ---- Contexts ------------------------------------------------------------------------------------


@BUGS.enter("TP-CONTEXT")
def tp_outermost_context_counts(patch: Patch) -> None:
    """of nested contexts the outermost decides"""

    @contextlib.contextmanager
    def inside(enabled: bool = True, **options: object) -> Iterator[None]:
        with WISH.inside(WISH.values[0] if WISH.values else Wish(enabled, dict(options))):
            yield

    patch.setattr(smp, "tensor_parallelism", inside)
    patch.setattr(wishes, "tensor_parallelism", inside)


@BUGS.enter("TP-CONTEXT")
def tp_contexts_do_not_end(patch: Patch) -> None:
    """behind an inner context the outer one has its wish"""

    @contextlib.contextmanager
    def inside(enabled: bool = True, **options: object) -> Iterator[None]:
        wish = Wish(enabled, dict(options))
        with WISH.inside(wish):
            yield
        if WISH.values:
            WISH.values[-1] = wish

    patch.setattr(smp, "tensor_parallelism", inside)
    patch.setattr(wishes, "tensor_parallelism", inside)


@BUGS.enter("TP-CONTEXT")
def tp_disabling_leaves_children(patch: Patch) -> None:
    """set_tensor_parallelism(module, False) is about the module and not about those below it"""
    wish = wishes.set_tensor_parallelism

    def alone(module: nn.Module, enabled: bool = True, **options: object) -> None:
        if enabled:
            wish(module, enabled, **options)
        else:
            WISH.set(module, Wish(False, {}))

    patch.setattr(smp, "set_tensor_parallelism", alone)


@BUGS.enter("TP-CONTEXT")
def tp_first_call_counts(patch: Patch) -> None:
    """set_tensor_parallelism leaves modules as they are for which it was called before"""
    wish = wishes.set_tensor_parallelism

    def first(module: nn.Module, enabled: bool = True, **options: object) -> None:
        known = [(each, WISH.of(each)) for each in module.modules()]
        wish(module, enabled, **options)
        for each, before in known:
            if before is not None:
                WISH.set(each, before)

    patch.setattr(smp, "set_tensor_parallelism", first)


@BUGS.enter("TP-DEGREE-ONE")
def tp_layers_are_made_anew_at_degree_one(patch: Patch) -> None:
    """linear layers get new weights whatever the degree is"""
    make = models._distributed

    def always(session: Any, module: nn.Module) -> Any:
        if session.runtime.config.tensor_parallel_degree == 1:
            for child in module.modules():
                if isinstance(child, nn.Linear):
                    child.reset_parameters()
        return make(session, module)

    patch.setattr(models, "_distributed", always)


# ---- Replacement ---------------------------------------------------------------------------------


@BUGS.enter("TP-OUTERMOST")
def tp_innermost_is_replaced(patch: Patch) -> None:
    """of nested supported modules those below are distributed"""
    make = Replacement._made

    def below(self: Replacement, path: str, module: nn.Module, *given: Any) -> nn.Module | None:
        inner = any(registry.registration_of(each) for each in list(module.modules())[1:])
        return None if inner else make(self, path, module, *given)

    patch.setattr(Replacement, "_made", below)


@BUGS.enter("TP-OUTERMOST")
def tp_subclasses_are_replaced(patch: Patch) -> None:
    """a subclass is distributed as its base is"""

    def of(module: nn.Module) -> Registration | None:
        found = (registry._registrations.get(each) for each in type(module).__mro__)
        return next(filter(None, found), None)

    patch.setattr(registry, "registration_of", of)
    note = registry._note_arguments

    def noted(module_cls: type[nn.Module]) -> None:
        note(module_cls)
        init: Any = module_cls.__init__

        def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            vars(self)[registry._ARGUMENTS] = (args, kwargs)
            init(self, *args, **kwargs)

        __init__._smp_notes = True  # type: ignore[attr-defined]
        patch.setattr(module_cls, "__init__", __init__)

    patch.setattr(registry, "_note_arguments", noted)


@BUGS.enter("TP-KEPT")
def tp_shared_weights_are_split(patch: Patch) -> None:
    """modules that share a weight, or stand in several places, are distributed one by one"""
    patch.setattr(Replacement, "_shared", lambda self, module: None)


@BUGS.enter("TP-KEPT")
def tp_slices_are_rounded_down(patch: Patch) -> None:
    """a size that the degree does not divide loses its rest"""
    patch.setattr(DistributedModule, "slice_size", lambda self, what, size: size // self.tp_size)
    register = DistributedModule.register_split

    def rounded(self: DistributedModule, name: str, full: Tensor, axis: int) -> None:
        size = full.shape[axis] // self.tp_size * self.tp_size
        register(self, name, full.detach().narrow(axis, 0, size), axis)

    patch.setattr(DistributedModule, "register_split", rounded)


@BUGS.enter("TP-KEPT")
def tp_kept_modules_are_not_logged(patch: Patch) -> None:
    """the log says nothing of modules that stay"""
    patch.setattr(Replacement, "_tell", lambda self: None)


@BUGS.enter("TP-KEPT")
def tp_one_odd_module_keeps_all(patch: Patch) -> None:
    """behind a module that stays, no further one is distributed"""
    make = Replacement._made

    def stopped(self: Replacement, path: str, *given: Any) -> nn.Module | None:
        if self.kept:
            self.kept[path] = "another one stays"
            return None
        return make(self, path, *given)

    patch.setattr(Replacement, "_made", stopped)


@BUGS.enter("TP-PLACE")
def tp_frozen_modules_are_trained(patch: Patch) -> None:
    """a distributed module's parameters need a gradient, also where the module's did not"""
    adopt = Replacement._adopt

    def thawed(self: Replacement, made: nn.Module, *given: Any) -> None:
        adopt(self, made, *given)
        made.requires_grad_(True)

    patch.setattr(Replacement, "_adopt", thawed)


@BUGS.enter("TP-PLACE")
def tp_evaluated_modules_train(patch: Patch) -> None:
    """a distributed module is in training mode"""
    adopt = Replacement._adopt

    def training(self: Replacement, made: nn.Module, *given: Any) -> None:
        adopt(self, made, *given)
        made.train()

    patch.setattr(Replacement, "_adopt", training)


@BUGS.enter("TP-PLACE")
def tp_weights_of_the_default_dtype(patch: Patch) -> None:
    """a distributed module has torch's default dtype, and not that of the module"""
    patch.setattr(replacement, "_made_like", lambda module: contextlib.nullcontext())


# ---- Hooks ---------------------------------------------------------------------------------------


@BUGS.enter("TP-HOOKS")
def tp_values_are_not_translated(patch: Patch) -> None:
    """the return_hook is called, and its value is dropped"""
    hooked = replacement._hooked

    def untranslated(forward: Any, registration: Registration, *args: Any, **kwargs: Any) -> object:
        value = hooked(forward, registration, *args, **kwargs)
        return (
            {name: each * 0 for name, each in value.items()} if isinstance(value, dict) else value
        )

    patch.setattr(replacement, "_hooked", untranslated)


@BUGS.enter("TP-HOOKS")
def tp_hooks_override_options(patch: Patch) -> None:
    """the arguments of the init_hook override the options of the context"""
    patch.setattr(replacement, "_options", lambda distributed, wish: {})


@BUGS.enter("TP-HOOKS")
def tp_keyword_arguments_are_forgotten(patch: Patch) -> None:
    """the init_hook gets the positional arguments of the module alone"""
    translated = registry.translated

    def positional(call: str, hook: Any, arguments: Any) -> Any:
        args, kwargs = arguments
        return translated(call, hook, (args, {} if args else kwargs))

    patch.setattr(registry, "translated", positional)


@BUGS.enter("TP-HOOKS-WRONG")
def tp_any_value_of_a_hook_is_taken(patch: Patch) -> None:
    """a hook that returns no arguments is left out in silence"""
    translated = registry.translated

    def forgiving(call: str, hook: Any, arguments: Any) -> Any:
        try:
            return translated(call, hook, arguments)
        except Exception:
            args, kwargs = arguments
            return (args or tuple(kwargs.values())) * (1 + ("init" in call)), {}

    patch.setattr(registry, "translated", forgiving)


@BUGS.enter("TP-HOOKS-WRONG")
def tp_wrong_hooks_are_not_named(patch: Patch) -> None:
    """a hook that returns something else fails where its value is used"""

    def unchecked(call: str, hook: Any, arguments: Any) -> Any:
        args, kwargs = arguments
        made, named = hook(*args, **kwargs)
        return made, named

    patch.setattr(registry, "translated", unchecked)


# ---- Queries and states --------------------------------------------------------------------------


@BUGS.enter("TP-QUERIES")
def tp_biases_are_distributed(patch: Patch) -> None:
    """all parameters of a distributed module are said to be split"""

    def within(self: Any, parameter: nn.Parameter) -> bool:
        return any(
            parameter is each for made in self.distributed_modules() for each in made.parameters()
        )

    patch.setattr(smp.DistributedModel, "is_distributed_parameter", within)


@BUGS.enter("TP-QUERIES")
def tp_reducers_are_swapped(patch: Patch) -> None:
    """the iterators of the two reducers give each other's parameters"""
    one = smp.DistributedModel.default_reducer_named_parameters
    other = smp.DistributedModel.scaled_batch_reducer_named_parameters
    patch.setattr(smp.DistributedModel, "default_reducer_named_parameters", other)
    patch.setattr(smp.DistributedModel, "scaled_batch_reducer_named_parameters", one)


@BUGS.enter("TP-QUERIES")
def tp_marks_are_lost(patch: Patch) -> None:
    """slices of embeddings count as whole parameters"""
    scaled = smp.DistributedModel.is_scaled_batch_parameter

    def tall(self: Any, parameter: nn.Parameter) -> bool:
        return scaled(self, parameter) and parameter.shape[0] <= 2

    patch.setattr(smp.DistributedModel, "is_scaled_batch_parameter", tall)


@BUGS.enter("TP-STATE")
def tp_states_have_one_slice(patch: Patch) -> None:
    """the full state has the slice of tp rank 0 in all places"""
    full = Split.full
    patch.setattr(Split, "full", lambda self, slices: full(self, [slices[0]] * len(slices)))


@BUGS.enter("TP-STATE")
def tp_states_in_reverse(patch: Patch) -> None:
    """the full state has the slices in reverse order"""
    full = Split.full
    patch.setattr(Split, "full", lambda self, slices: full(self, list(slices)[::-1]))


@BUGS.enter("TP-STATE")
def tp_slices_of_the_first_rank_are_loaded(patch: Patch) -> None:
    """every rank loads the slice of tp rank 0"""

    def first(self: Split, full: Tensor) -> Tensor:
        return full.narrow(self.axis, 0, self.shape[self.axis] // self.degree)

    patch.setattr(Split, "slice_of", first)


@BUGS.enter("TP-WEIGHTS")
def tp_slices_are_drawn_one_by_one(patch: Patch) -> None:
    """each rank draws its slice, and all draw the same numbers"""
    register = DistributedModule.register_split

    def drawn(self: DistributedModule, name: str, full: Tensor, axis: int) -> None:
        size = full.shape[axis] // self.tp_size
        part = full.detach().narrow(axis, 0, size)
        register(self, name, torch.cat([part] * self.tp_size, axis), axis)

    patch.setattr(DistributedModule, "register_split", drawn)


@BUGS.enter("TP-WEIGHTS")
def tp_the_degree_scales_weights(patch: Patch) -> None:
    """the standard deviation of new weights follows the channels of a slice"""
    register = DistributedModule.register_split

    def scaled(self: DistributedModule, name: str, full: Tensor, axis: int) -> None:
        register(self, name, full.detach() * self.tp_size, axis)

    patch.setattr(DistributedModule, "register_split", scaled)


# ---- Batches -------------------------------------------------------------------------------------


@BUGS.enter("TP-BATCH-SHAPES")
def tp_different_batches_are_not_named(patch: Patch) -> None:
    """the error says that batches differ, and not whose"""
    patch.setattr(batches, "_difference", lambda *given: "the batches of a TP group differ")


@BUGS.enter("TP-BATCH-SHAPES")
def tp_the_next_rank_is_named(patch: Patch) -> None:
    """the error names the tp rank in place of the rank, counted from one"""
    difference = batches._difference

    def shifted(first: int, ours: Any, other: int, theirs: Any) -> str:
        return difference(first + 1, ours, other + 1, theirs).replace("rank 1", "the first rank")

    patch.setattr(batches, "_difference", shifted)


@BUGS.enter("TP-BATCH-VALUES")
def tp_values_are_not_compared(patch: Patch) -> None:
    """with prescaled_batch the ranks of a TP group compare shapes and dtypes alone"""
    patch.setattr(batch_description, "_checksum", lambda tensor: "")


@BUGS.enter("TP-BATCH-VALUES")
def tp_neighbours_are_compared(patch: Patch) -> None:
    """a rank compares its batch with that of the first rank, and goes on if these are the same"""
    difference = batches._difference

    def own(first: int, ours: Any, other: int, theirs: Any) -> str:
        if smp.rank() not in (first, other):
            return "the batch of another rank differs"
        return difference(first, ours, other, theirs)

    patch.setattr(batches, "_difference", own)


@BUGS.enter("TP-ORDER")
def tp_different_ways_are_not_seen(patch: Patch) -> None:
    """ranks of a TP group do not compare the modules that they called"""
    patch.setattr(TensorGroup, "take_digest", lambda self: 0)


# ---- Refusals and norms --------------------------------------------------------------------------


@BUGS.enter("TP-STALE")
def tp_stale_parameters_are_taken(patch: Patch) -> None:
    """an optimizer made before wrapping trains the parameters that are gone, as in the published library"""
    patch.setattr(models, "check_current", lambda call, parameters: None)
    patch.setattr(optimizers, "check_current", lambda call, parameters: None)


@BUGS.enter("TP-STALE")
def tp_stale_parameters_are_taken_before(patch: Patch) -> None:
    """an optimizer that smp has wrapped before the model may hold parameters that are gone"""
    patch.setattr(models, "check_current", lambda call, parameters: None)


@BUGS.enter("TP-NORM")
def tp_norms_of_own_gradients(patch: Patch) -> None:
    """clip_grad_norm_ goes by the gradients that a rank holds"""
    patch.setattr(clipping, "_of_slices", lambda given: set())


@BUGS.enter("TP-NORM")
def tp_norms_over_the_group(patch: Patch) -> None:
    """clip_grad_norm_ counts parameters that are not split once for each tp rank"""
    patch.setattr(clipping, "_of_slices", lambda given: {id(each) for each in given})


@BUGS.enter("TP-NORM-MASTERS")
def tp_masters_of_own_slices(patch: Patch) -> None:
    """clip_master_grads counts the slices of its own rank"""
    norm: Any = update.norm

    def own(runtime: Any, gradients: Any, *given: Any) -> float:
        return float(norm(runtime, gradients, *given[:-1]))

    patch.setattr(update, "norm", own)


@BUGS.enter("TP-NORM-MASTERS")
def tp_masters_are_counted_on_each_rank(patch: Patch) -> None:
    """clip_master_grads counts parameters that are not split once for each tp rank"""
    norm: Any = update.norm

    def each_rank(runtime: Any, gradients: Any, *given: Any) -> float:
        places = {place for place, _ in gradients}
        return float(norm(runtime, gradients, *given[:-1], places))

    patch.setattr(update, "norm", each_rank)
