"""Bugs of smp.step: splitting of batches, calls of smp_slice, joining of results."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import smp_core.torch as smp
from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from smp_core import containers, microbatch
from smp_core.microbatch import CallArguments, Rules, _Joiner, _Splitter
from smp_core.torch import session
from smp_core.torch.exceptions import StepAbortedError
from smp_core.torch.framework import StepOutput, TorchFramework

# `import smp_core.torch.step as step` would give the decorator of this name in place of the module.
step = importlib.import_module("smp_core.torch.step")

BUGS = Bugs("point-to-point, pipeline and microbatches")

# ---- Splitting -----------------------------------------------------------------------------------


@BUGS.enter("STEP-INDIVISIBLE")
def remainder_is_dropped(patch: Patch) -> None:
    """the rest of a batch that cannot be divided is dropped, as in the published smp_slice"""

    def view(self: _Splitter, tensor: torch.Tensor, axis: int, place: str) -> torch.Tensor:
        size = tensor.shape[axis] // self.microbatches
        return tensor.narrow(axis, self.index * size, size)

    patch.setattr(_Splitter, "_view", view)


@BUGS.enter("STEP-INDIVISIBLE", origin="B055")
def last_microbatch_is_smaller(patch: Patch) -> None:
    """a batch that cannot be divided is split into uneven microbatches, as by torch.tensor_split"""

    def view(self: _Splitter, tensor: torch.Tensor, axis: int, place: str) -> torch.Tensor:
        return tensor.tensor_split(self.microbatches, axis)[self.index]

    patch.setattr(_Splitter, "_view", view)


def parts(patch: Patch, changed: Callable[[torch.Tensor, int, int, int], torch.Tensor]) -> None:
    """Take parts of tensors by ``changed(tensor, axis, start, length)``."""
    patch.setattr(
        TorchFramework,
        "part",
        lambda self, tensor, axis, start, length: changed(tensor, axis, start, length),
    )


@BUGS.enter("STEP-SPLIT")
def samples_are_dealt_out(patch: Patch) -> None:
    """microbatch i gets every n-th sample from i on"""

    def dealt(tensor: torch.Tensor, axis: int, start: int, length: int) -> torch.Tensor:
        if length == 0:
            return tensor.narrow(axis, 0, 0)
        chosen = [slice(None)] * tensor.dim()
        chosen[axis] = slice(start // length, None, tensor.shape[axis] // length)
        return tensor[tuple(chosen)]

    parts(patch, dealt)


@BUGS.enter("STEP-SPLIT", origin="B059")
def one_buffer_for_all(patch: Patch) -> None:
    """large tensors of all microbatches are the first microbatch's part"""
    parts(
        patch,
        lambda tensor, axis, start, length: tensor.narrow(
            axis, start if length == 1 else 0, length
        ),
    )


@BUGS.enter("STEP-SPLIT", *ASSERTION, ValueError, StepAbortedError, origin="B055")
def size_of_the_first_tensor(patch: Patch) -> None:
    """all tensors of a step are cut as long as its first one is"""
    split = microbatch.split

    def first(framework: Any, rules: Rules, call: CallArguments, count: int) -> list[CallArguments]:
        sizes = [each.shape[0] // count for each in call.args[:1] if hasattr(each, "shape")]
        with_size = (lambda t, a, s, n: t.narrow(a, s, min(n, sizes[0]))) if sizes else None
        changed = copy.copy(framework)
        if with_size is not None:
            changed.part = with_size
        return split(changed, rules, call, count)

    patch.setattr(microbatch, "split", first)


@BUGS.enter("STEP-SPLIT")
def single_samples_pass_whole(patch: Patch) -> None:
    """a tensor of which a microbatch would get one element is handed whole"""
    parts(
        patch,
        lambda tensor, axis, start, length: (
            tensor if length == 1 and tensor.dim() > 1 else tensor.narrow(axis, start, length)
        ),
    )


@BUGS.enter("STEP-IDENTITY", origin="B008")
def storage_offset_is_lost(patch: Patch) -> None:
    """the part of a view begins where its storage does"""

    def lost(tensor: torch.Tensor, axis: int, start: int, length: int) -> torch.Tensor:
        part = tensor.narrow(axis, start, length)
        return part.as_strided(
            part.shape, part.stride(), part.storage_offset() - tensor.storage_offset()
        )

    parts(patch, lost)


@BUGS.enter("STEP-IDENTITY", *ASSERTION, RuntimeError, StepAbortedError, origin="B001")
def strides_are_ignored(patch: Patch) -> None:
    """the part of a view is read as if it were dense"""

    def dense(tensor: torch.Tensor, axis: int, start: int, length: int) -> torch.Tensor:
        part = tensor.narrow(axis, start, length)
        strides = torch.empty(part.shape, device="meta").stride()
        return part.as_strided(part.shape, strides) if part.numel() else part

    parts(patch, dense)


@BUGS.enter("STEP-IDENTITY")
def detour_through_float32(patch: Patch) -> None:
    """parts make a detour through float32"""

    def detour(tensor: torch.Tensor, axis: int, start: int, length: int) -> torch.Tensor:
        part = tensor.narrow(axis, start, length)
        return part if tensor.is_complex() else part.float().to(tensor.dtype)

    parts(patch, detour)


@BUGS.enter("STEP-INPUT-GRADIENT")
def parts_are_copies(patch: Patch) -> None:
    """parts are copies that gradients do not leave"""
    parts(
        patch,
        lambda tensor, axis, start, length: (
            tensor.detach().narrow(axis, start, length).clone().requires_grad_(tensor.requires_grad)
        ),
    )


@BUGS.enter("STEP-INPUT-GRADIENT", origin="B064")
def gradient_of_the_first_microbatch(patch: Patch) -> None:
    """only the first microbatch's part is attached to the batch"""

    def first(tensor: torch.Tensor, axis: int, start: int, length: int) -> torch.Tensor:
        part = tensor.narrow(axis, start, length)
        return part.detach().requires_grad_(tensor.requires_grad) if start else part

    parts(patch, first)


# ---- Axes and names ------------------------------------------------------------------------------


def axis_of(patch: Patch, changed: Callable[[Rules, str], int | None]) -> None:
    """Give arguments the batch axis ``changed(rules, name)``."""
    patch.setattr(Rules, "_axis", changed)


@BUGS.enter("STEP-AXES")
def axes_are_ignored(patch: Patch) -> None:
    """input_split_axes is ignored wherever axis 0 can be split, too"""

    def part(self: _Splitter, tensor: torch.Tensor, axis: int, place: str) -> torch.Tensor:
        at = axis if tensor.shape[0] % self.microbatches else 0
        size = tensor.shape[at] // self.microbatches
        return tensor.narrow(at, self.index * size, size)

    patch.setattr(_Splitter, "_view", part)


@BUGS.enter("STEP-AXES")
def axes_only_by_keyword(patch: Patch) -> None:
    """input_split_axes speaks of arguments passed by keyword only"""
    places = Rules.places

    def by_keyword(self: Rules, call: CallArguments) -> Iterator[tuple[str, int | None]]:
        for index, (place, axis) in enumerate(places(self, call)):
            yield place, (0 if axis and index < len(call.args) else axis)

    patch.setattr(Rules, "places", by_keyword)

    def lenient(self: _Splitter, tensor: torch.Tensor, axis: int, place: str) -> torch.Tensor:
        size = tensor.shape[axis] // self.microbatches
        return tensor.narrow(axis, self.index * size, size)

    patch.setattr(_Splitter, "_view", lenient)


@BUGS.enter("STEP-AXES")
def axes_from_the_end_lose_their_sign(patch: Patch) -> None:
    """axis -1 is axis 1 where there is one"""

    def positive(self: _Splitter, tensor: torch.Tensor, axis: int, place: str) -> torch.Tensor:
        at = abs(axis) if abs(axis) < tensor.dim() else axis
        size = tensor.shape[at] // self.microbatches
        return tensor.narrow(at, self.index * size, size)

    patch.setattr(_Splitter, "_view", positive)


@BUGS.enter("STEP-WHOLE")
def whole_arguments_are_split_if_they_can_be(patch: Patch) -> None:
    """an argument of non_split_inputs is split, too, if it is a tensor that can be"""
    axis = Rules._axis
    axis_of(patch, lambda self, name: axis(self, name) or 0)

    def view(self: _Splitter, tensor: torch.Tensor, axis: int, place: str) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[axis] % self.microbatches:
            return tensor
        size = tensor.shape[axis] // self.microbatches
        return tensor.narrow(axis, self.index * size, size)

    patch.setattr(_Splitter, "_view", view)


@BUGS.enter("STEP-WHOLE")
def whole_arguments_are_sliced(patch: Patch) -> None:
    """smp_slice is called in arguments of non_split_inputs, too"""
    call = _Splitter.call

    def sliced(
        self: _Splitter, given: CallArguments, places: Sequence[tuple[str, int | None]]
    ) -> CallArguments:
        got = call(self, given, places)

        def part(leaf: Any) -> Any:
            slicing = getattr(type(leaf), "smp_slice", None)
            return slicing(leaf, self.microbatches, self.index, 0) if slicing else leaf

        kwargs = {key: containers.map_leaves(part, value) for key, value in got.kwargs.items()}
        return CallArguments(
            tuple(containers.map_leaves(part, value) for value in got.args), kwargs
        )

    patch.setattr(_Splitter, "call", sliced)


@BUGS.enter("STEP-UNKNOWN-NAME")
def names_are_not_checked(patch: Patch) -> None:
    """a rule for a parameter that does not exist is dropped"""
    rules = microbatch.rules

    def lenient(function: Any, whole: Any, axes: Any) -> Rules:
        known = inspect.signature(function).parameters
        kept = [name for name in whole or () if name in known]
        return rules(function, kept, {n: a for n, a in (axes or {}).items() if n in known})

    patch.setattr(microbatch, "rules", lenient)


@BUGS.enter("STEP-NO-AXIS")
def tensors_without_the_axis_pass(patch: Patch) -> None:
    """a tensor without the batch axis is handed whole"""
    view = _Splitter._view

    def lenient(self: _Splitter, tensor: torch.Tensor, axis: int, place: str) -> Any:
        return view(self, tensor, axis, place) if -tensor.dim() <= axis < tensor.dim() else tensor

    patch.setattr(_Splitter, "_view", lenient)


@BUGS.enter("STEP-NO-AXIS")
def axes_wrap_around(patch: Patch) -> None:
    """a batch axis beyond the last counts from the first again"""
    view = _Splitter._view

    def wrapped(self: _Splitter, tensor: torch.Tensor, axis: int, place: str) -> Any:
        return view(self, tensor, axis % tensor.dim() if tensor.dim() else axis, place)

    patch.setattr(_Splitter, "_view", wrapped)


# ---- Containers and other objects ----------------------------------------------------------------


def opened(patch: Patch, changed: Callable[[Any], Any]) -> None:
    """Decide by ``changed`` which containers of arguments are opened."""
    patch.setattr(microbatch, "opened", changed)


@BUGS.enter("STEP-NESTS")
def sets_pass_whole(patch: Patch) -> None:
    """sets are handed whole"""
    opened(patch, lambda value: None if containers.is_set(value) else containers.opened(value))


@BUGS.enter("STEP-NESTS")
def one_level_only(patch: Patch) -> None:
    """containers in containers are handed whole"""
    part = _Splitter._part

    def shallow(self: _Splitter, value: Any, axis: int, place: str) -> Any:
        deep = place.endswith(("]", ")")) and containers.opened(value) is not None
        return value if deep else part(self, value, axis, place)

    patch.setattr(_Splitter, "_part", shallow)


@BUGS.enter("STEP-NESTS")
def named_tuples_lose_their_names(patch: Patch) -> None:
    """a named tuple becomes a tuple"""

    def plain(value: Any) -> Any:
        container = containers.opened(value)
        return (
            container._replace(close=tuple) if container and isinstance(value, tuple) else container
        )

    opened(patch, plain)


@BUGS.enter("STEP-NESTS")
def keys_are_sorted(patch: Patch) -> None:
    """the keys of a dict are sorted by their texts"""

    def by_text(value: Any) -> Any:
        container = containers.opened(value)
        if container is None or not isinstance(value, Mapping):
            return container

        def close(new: Sequence[Any]) -> Any:
            made = dict(zip(container.places, new, strict=True))
            return type(value)((key, made[key]) for key in sorted(made, key=str))  # type: ignore[call-arg]

        return container._replace(close=close)

    opened(patch, by_text)


@BUGS.enter("STEP-UNCHANGED")
def other_objects_are_copied(patch: Patch) -> None:
    """an argument that cannot be split is copied for each microbatch"""
    part = _Splitter._part

    def copied(self: _Splitter, value: Any, axis: int, place: str) -> Any:
        got = part(self, value, axis, place)
        return copy.copy(got) if got is value else got

    patch.setattr(_Splitter, "_part", copied)


@BUGS.enter("STEP-UNCHANGED")
def whatever_iterates_is_a_list(patch: Patch) -> None:
    """an object that can be iterated over is split as the list of its parts"""
    part = _Splitter._part

    def listed(self: _Splitter, value: Any, axis: int, place: str) -> Any:
        known = isinstance(value, str | torch.Tensor) or containers.opened(value) is not None
        if not known and hasattr(type(value), "__len__"):
            return list(value)
        return part(self, value, axis, place)

    patch.setattr(_Splitter, "_part", listed)


# ---- smp_slice -----------------------------------------------------------------------------------


def slicing(patch: Patch, changed: Callable[..., Any]) -> None:
    """Replace calls of smp_slice by ``changed(method, microbatches, index, axis, object)``."""
    part = _Splitter._part

    def other(self: _Splitter, value: Any, axis: int, place: str) -> Any:
        if hasattr(type(value), "smp_slice"):
            return changed(value.smp_slice, self.microbatches, self.index, axis, value)
        return part(self, value, axis, place)

    patch.setattr(_Splitter, "_part", other)


@BUGS.enter("STEP-SLICE-CALLS")
def microbatches_count_from_1(patch: Patch) -> None:
    """smp_slice gets microbatches that count from 1"""
    slicing(patch, lambda call, count, index, axis, value: call(count, index + 1, axis))


@BUGS.enter("STEP-SLICE-CALLS")
def index_before_number(patch: Patch) -> None:
    """smp_slice gets the microbatch first and their number second"""
    slicing(patch, lambda call, count, index, axis, value: call(index, count, axis))


@BUGS.enter("STEP-SLICE-CALLS")
def slice_axis_is_0(patch: Patch) -> None:
    """smp_slice gets axis 0 always"""
    slicing(patch, lambda call, count, index, axis, value: call(count, index, 0))


@BUGS.enter("STEP-SLICE-CALLS")
def slice_axis_is_counted_up(patch: Patch) -> None:
    """smp_slice gets no axes from the end"""
    slicing(patch, lambda call, count, index, axis, value: call(count, index, abs(axis)))


@BUGS.enter("STEP-SLICE-CALLS")
def asked_twice(patch: Patch) -> None:
    """smp_slice is tried once before it is called"""

    def twice(call: Any, count: int, index: int, axis: int, value: Any) -> Any:
        call(count, index, axis)
        return call(count, index, axis)

    slicing(patch, twice)


@BUGS.enter("STEP-SLICE-CALLS")
def asked_again_when_the_body_begins(patch: Patch) -> None:
    """a call is split anew for every microbatch, all of it"""
    split = microbatch.split

    def anew(framework: Any, rules: Rules, call: CallArguments, count: int) -> list[CallArguments]:
        return [split(framework, rules, call, count)[index] for index in range(count)]

    patch.setattr(microbatch, "split", anew)


@BUGS.enter("STEP-SLICE")
def none_is_no_slice(patch: Patch) -> None:
    """where smp_slice returns None the object is handed on whole"""

    def whole(call: Any, count: int, index: int, axis: int, value: Any) -> Any:
        got = call(count, index, axis)
        return value if got is None else got

    slicing(patch, whole)


@BUGS.enter("STEP-SLICE")
def slices_are_sliced(patch: Patch) -> None:
    """the result of smp_slice is sliced again if possible"""

    def again(call: Any, count: int, index: int, axis: int, value: Any) -> Any:
        got = call(count, index, axis)
        return got.smp_slice(1, 0, axis) if hasattr(type(got), "smp_slice") else got

    slicing(patch, again)


@BUGS.enter("STEP-SLICE")
def slices_only_at_the_top(patch: Patch) -> None:
    """objects in containers are not asked for a slice"""
    part = _Splitter._part

    def top(self: _Splitter, value: Any, axis: int, place: str) -> Any:
        deep = place.endswith(("]", ")")) and hasattr(type(value), "smp_slice")
        return value if deep else part(self, value, axis, place)

    patch.setattr(_Splitter, "_part", top)


@BUGS.enter("STEP-SLICE", origin="B055")
def type_of_the_first_slice(patch: Patch) -> None:
    """smp_slice must return the same type for all microbatches"""

    def alike(call: Any, count: int, index: int, axis: int, value: Any) -> Any:
        got = call(count, index, axis)
        return got if type(got) is type(value.parts[0]) else value.parts[0]

    slicing(patch, alike)


# ---- Running -------------------------------------------------------------------------------------


def stepping(patch: Patch, changed: Callable[..., Any]) -> None:
    """Replace calls of steps by ``changed(original, step, args, kwargs)``."""
    call = step.StepFunction.__call__
    patch.setattr(
        step.StepFunction,
        "__call__",
        lambda self, /, *args, **kwargs: changed(call, self, args, kwargs),
    )


@BUGS.enter("STEP-ONCE")
def first_microbatch_runs_twice(patch: Patch) -> None:
    """microbatch 0 of the first step runs once more, as if it were traced"""
    split = microbatch.split

    def traced(
        framework: Any, rules: Rules, call: CallArguments, count: int
    ) -> list[CallArguments]:
        calls = split(framework, rules, call, count)
        current = session.current("mutant")
        if current.steps == 1:
            body = _bodies[rules.function]
            body(*calls[0].args, **calls[0].kwargs)
        return calls

    _bodies: dict[str, Any] = {}

    def remember(call: Any, self: Any, args: Any, kwargs: Any) -> Any:
        _bodies[self._rules.function] = self._function
        return call(self, *args, **kwargs)

    patch.setattr(microbatch, "split", traced)
    stepping(patch, remember)


@BUGS.enter("STEP-SELF")
def steps_bind_self(patch: Patch) -> None:
    """a step in a class body is a method"""

    def get(self: Any, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else lambda *args, **kw: self(instance, *args, **kw)

    patch.setattr(step.StepFunction, "__get__", get, raising=False)


def deciding(patch: Patch, changed: Callable[..., Any]) -> None:
    """Replace the decorator by ``changed(original, args, kwargs)``."""
    decorate = smp.step
    patch.setattr(smp, "step", lambda *args, **kwargs: changed(decorate, args, kwargs))


@BUGS.enter("STEP-FORMS")
def rules_are_lost(patch: Patch) -> None:
    """the rules are lost where detach_outputs is given, too"""

    def lost(decorate: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        both = "detach_outputs" in kwargs
        rules = {} if both else kwargs
        return decorate(*args, **rules)

    deciding(patch, lost)

    def lenient(self: _Splitter, tensor: torch.Tensor, axis: int, place: str) -> torch.Tensor:
        size = tensor.shape[axis] // self.microbatches if tensor.dim() else 0
        return tensor.narrow(axis, self.index * size, size) if tensor.dim() else tensor

    patch.setattr(_Splitter, "_view", lenient)


@BUGS.enter("STEP-NESTED")
def steps_in_steps_run_as_functions(patch: Patch) -> None:
    """a step inside a step runs as the plain function"""

    def plain(call: Any, self: Any, args: Any, kwargs: Any) -> Any:
        if session.current("mutant").step is not None:
            return self._function(*args, **kwargs)
        return call(self, *args, **kwargs)

    stepping(patch, plain)


@BUGS.enter("STEP-NESTED")
def a_failed_step_stays_in_progress(patch: Patch) -> None:
    """after a step that failed, all further steps are inside it"""

    def stays(call: Any, self: Any, args: Any, kwargs: Any) -> Any:
        current = session.current("mutant")
        try:
            return call(self, *args, **kwargs)
        except Exception:
            current.step = object()
            raise

    stepping(patch, stays)


# ---- Results -------------------------------------------------------------------------------------


def results(patch: Patch, changed: Callable[[list[Any]], Any]) -> None:
    """Apply ``changed`` to the list of the microbatches' results before they are joined."""
    join = microbatch.join

    def other(framework: Any, function: str, given: Any, microbatches: Any = None) -> Any:
        if microbatches is not None:
            return join(framework, function, given, microbatches)
        return join(framework, function, changed(list(given)))

    patch.setattr(microbatch, "join", other)


@BUGS.enter("STEP-OUTPUT-ORDER")
def last_microbatch_first(patch: Patch) -> None:
    """results come in the reverse order"""
    results(patch, lambda given: given[::-1])


@BUGS.enter("STEP-OUTPUT-ORDER", origin="B056")
def only_the_latest_result(patch: Patch) -> None:
    """only the latest result is kept, for all microbatches"""
    results(patch, lambda given: [given[-1]] * len(given))


@BUGS.enter("STEP-OUTPUT-ORDER")
def parts_in_reverse(patch: Patch) -> None:
    """the first microbatch gets the last part"""
    parts(
        patch,
        lambda tensor, axis, start, length: tensor.narrow(
            axis, tensor.shape[axis] - length - start, length
        ),
    )


@BUGS.enter("STEP-OUTPUT-ORDER")
def outputs_are_a_tuple(patch: Patch) -> None:
    """outputs is a tuple"""
    patch.setattr(StepOutput, "outputs", property(lambda self: self._outputs))


def joining(patch: Patch, changed: Callable[..., Any]) -> None:
    """Replace joining by ``changed(original, joiner, results at one place, place)``."""
    join = _Joiner.join
    patch.setattr(_Joiner, "join", lambda self, given, at: changed(join, self, given, at))


@BUGS.enter("STEP-OUTPUT-STRUCTURE")
def dict_subclasses_become_dicts(patch: Patch) -> None:
    """a subclass of dict comes back as a dict, as before SMP 1.2.0"""

    def plain(join: Any, self: _Joiner, given: list[Any], at: str) -> Any:
        got = join(self, given, at)
        return dict(got) if isinstance(got, dict) else got

    joining(patch, plain)


@BUGS.enter("STEP-OUTPUT-STRUCTURE")
def attributes_go_stale(patch: Patch) -> None:
    """the attributes of an output class keep the tensors of microbatch 0"""
    patch.setattr(containers, "_mirror", lambda copy, key, old, new: None)


@BUGS.enter("STEP-OUTPUT-STRUCTURE")
def returned_tuples_become_lists(patch: Patch) -> None:
    """tuples come back as lists"""

    def lists(join: Any, self: _Joiner, given: list[Any], at: str) -> Any:
        got = join(self, given, at)
        return list(got) if isinstance(got, tuple) else got

    joining(patch, lists)


@BUGS.enter("STEP-OUTPUT-STRUCTURE")
def a_single_result_is_unpacked(patch: Patch) -> None:
    """a list of one result comes back as that result"""

    def unpacked(join: Any, self: _Joiner, given: list[Any], at: str) -> Any:
        got = join(self, given, at)
        one = type(got) in (list, tuple) and len(got) == 1 and type(given[0]) in (list, tuple)
        return got[0] if one else got

    joining(patch, unpacked)


@BUGS.enter("STEP-OUTPUT-LISTS")
def none_stays_none(patch: Patch) -> None:
    """None comes back as None, not as a list"""

    def dropped(join: Any, self: _Joiner, given: list[Any], at: str) -> Any:
        return None if given[0] is None else join(self, given, at)

    joining(patch, dropped)


@BUGS.enter("STEP-OUTPUT-LISTS")
def none_is_left_out(patch: Patch) -> None:
    """microbatches that returned None are left out of the list"""

    def left_out(join: Any, self: _Joiner, given: list[Any], at: str) -> Any:
        got = join(self, given, at)
        return [each for each in got if each is not None] if got is given else got

    joining(patch, left_out)


@BUGS.enter("STEP-OUTPUT-LISTS")
def value_of_the_first_microbatch(patch: Patch) -> None:
    """a result that is no tensor is the first microbatch's alone"""

    def first(join: Any, self: _Joiner, given: list[Any], at: str) -> Any:
        got = join(self, given, at)
        return got[0] if got is given and type(got[0]) in (str, int) else got

    joining(patch, first)


@BUGS.enter("STEP-OUTPUT-LISTS")
def numbers_become_tensors(patch: Patch) -> None:
    """floats come back as a StepOutput"""

    def tensors(join: Any, self: _Joiner, given: list[Any], at: str) -> Any:
        if all(type(each) is float for each in given):
            return StepOutput([torch.tensor(each) for each in given])
        return join(self, given, at)

    joining(patch, tensors)


@BUGS.enter("STEP-OUTPUT-DIFFERS")
def structure_is_that_of_microbatch_0(patch: Patch) -> None:
    """results of another structure are taken for those of microbatch 0"""
    join = microbatch.join

    def lenient(framework: Any, function: str, given: Any, microbatches: Any = None) -> Any:
        try:
            return join(framework, function, given, microbatches)
        except Exception:
            return join(framework, function, [given[0]] * len(given), microbatches)

    patch.setattr(microbatch, "join", lenient)


@BUGS.enter("STEP-OUTPUT-DIFFERS", origin="B139")
def structure_is_checked_where_it_differs(patch: Patch) -> None:
    """results of another structure are an error of that rank alone"""
    join = microbatch.join

    def late(framework: Any, function: str, given: Any, microbatches: Any = None) -> Any:
        return None if microbatches is not None else join(framework, function, given)

    patch.setattr(microbatch, "join", late)


@BUGS.enter("STEP-DETACH")
def outputs_keep_their_graphs(patch: Patch) -> None:
    """outputs are not detached"""
    engine = importlib.import_module("smp_core.torch.execution.engine")
    run = engine.run_step
    patch.setattr(
        engine, "run_step", lambda session, body, split, _: run(session, body, split, False)
    )


@BUGS.enter("STEP-DETACH")
def outputs_are_always_detached(patch: Patch) -> None:
    """outputs are detached, whatever detach_outputs says"""
    engine = importlib.import_module("smp_core.torch.execution.engine")
    run = engine.run_step
    patch.setattr(
        engine, "run_step", lambda session, body, split, _: run(session, body, split, True)
    )


@BUGS.enter("STEP-DETACH")
def detached_at_the_top(patch: Patch) -> None:
    """outputs in lists are not detached"""
    engine = importlib.import_module("smp_core.torch.execution.engine")

    def shallow(result: Any) -> Any:
        if isinstance(result, dict):
            return {key: shallow(each) for key, each in result.items()}
        return result.detach() if isinstance(result, torch.Tensor) else result

    patch.setattr(engine, "detached", shallow)


# ---- StepOutput ----------------------------------------------------------------------------------


def method(patch: Patch, name: str, changed: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    """Replace a method of StepOutput by ``changed(outputs)``."""
    patch.setattr(StepOutput, name, lambda self: changed(self.outputs))


@BUGS.enter("STEP-REDUCE-MEAN", origin="B067")
def mean_is_not_divided(patch: Patch) -> None:
    """reduce_mean is the sum"""
    method(patch, "reduce_mean", lambda outputs: torch.stack(outputs).sum(0))


@BUGS.enter("STEP-REDUCE-MEAN")
def mean_of_everything(patch: Patch) -> None:
    """reduce_mean is one number, the mean of all elements"""
    method(patch, "reduce_mean", lambda outputs: torch.stack(outputs).mean())


@BUGS.enter("STEP-REDUCE-MEAN", origin="B068")
def running_mean(patch: Patch) -> None:
    """reduce_mean is the mean of the last output and the mean of those before"""

    def running(outputs: list[torch.Tensor]) -> torch.Tensor:
        mean = outputs[0]
        for each in outputs[1:]:
            mean = (mean + each) / 2
        return mean

    method(patch, "reduce_mean", running)


@BUGS.enter("STEP-REDUCE-SUM", origin="B091")
def sum_is_the_mean(patch: Patch) -> None:
    """reduce_sum is the mean"""
    method(patch, "reduce_sum", lambda outputs: torch.stack(outputs).mean(0))


@BUGS.enter("STEP-REDUCE-SUM", origin="B073")
def sum_leaves_out_the_first(patch: Patch) -> None:
    """reduce_sum overwrites the first output with the second"""
    method(patch, "reduce_sum", lambda outputs: torch.stack(outputs[1:] or outputs).sum(0))


@BUGS.enter("STEP-REDUCE-SUM", origin="B119")
def sum_of_the_elements(patch: Patch) -> None:
    """reduce_sum adds up the elements of each output, too"""
    method(patch, "reduce_sum", lambda outputs: torch.stack(outputs).sum())


@BUGS.enter("STEP-CONCAT", origin="B055")
def concat_of_equal_sizes(patch: Patch) -> None:
    """concat cuts every output to the size of the first"""
    method(
        patch, "concat", lambda outputs: torch.cat([each[: len(outputs[0])] for each in outputs])
    )


@BUGS.enter("STEP-CONCAT")
def concat_in_reverse(patch: Patch) -> None:
    """concat takes the outputs from the last to the first"""
    method(patch, "concat", lambda outputs: torch.cat(outputs[::-1]))


@BUGS.enter("STEP-STACK")
def stack_behind(patch: Patch) -> None:
    """stack makes the last axis the new one"""
    method(patch, "stack", lambda outputs: torch.stack(outputs, -1))


@BUGS.enter("STEP-STACK")
def stack_is_concat(patch: Patch) -> None:
    """stack concatenates"""
    method(patch, "stack", torch.cat)
