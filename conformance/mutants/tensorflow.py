"""Bugs of the front end for TensorFlow, whose modules are imported only when a bug is planted."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from conformance.mutants.protocol import ASSERTION, Bugs, Patch
from smp_core import schedule
from smp_core.errors import PartitionError, SmpError, VerdictError
from smp_core.transport import current_rank

BUGS = Bugs("TensorFlow")


def wrapped(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by ``change``, which gets the original and its arguments."""
    original = getattr(owner, name)
    patch.setattr(
        owner, name, lambda *args, **kwargs: change(original, *args, **kwargs), raising=True
    )


# ---- Where operations run ------------------------------------------------------------------------


@BUGS.enter("TF-OPS-ONE-RANK")
def gradients_run_where_they_come_from(patch: Patch) -> None:
    """a gradient operation runs on the rank of what it takes, not of its forward operation"""
    from smp_core.tensorflow import placement

    def changed(direct: Any, traced: Sequence[Any], index: int) -> Any:
        return None if traced[index].backward else direct(traced, index)

    wrapped(patch, placement, "_direct", changed)


@BUGS.enter("TF-OPS-ONE-RANK")
def every_rank_runs_the_model(patch: Patch) -> None:
    """operations of the default partition run on every rank"""
    from smp_core.tensorflow import placement
    from smp_core.tensorflow.segmentation import EVERYWHERE

    def changed(direct: Any, traced: Sequence[Any], index: int) -> Any:
        found = direct(traced, index)
        return EVERYWHERE if found == 0 else found

    wrapped(patch, placement, "_direct", changed)


@BUGS.enter("TF-OPS-OUTSIDE-ALL")
def operations_outside_run_on_rank_0(patch: Patch) -> None:
    """operations outside of call run on rank 0 alone, which sends what they give"""
    from smp_core.tensorflow import placement

    patch.setattr(placement, "EVERYWHERE", 0)


def _tags(patch: Patch, chosen: Callable[[list[int]], int]) -> None:
    """Choose the tag from those of the contexts that are open in a graph, the outermost first."""
    from smp_core.tensorflow import tensorflow_parts

    tagged = tensorflow_parts.tagged
    opened: dict[int, list[int]] = {}

    @contextlib.contextmanager
    def changed(place: int) -> Iterator[None]:
        graph = tensorflow_parts.tf.compat.v1.get_default_graph()
        places = opened.setdefault(id(graph), [])
        places.append(place)
        try:
            with tagged(chosen(places) if place >= 0 else place):
                yield
        finally:
            places.pop()

    patch.setattr(tensorflow_parts, "tagged", changed)


@BUGS.enter("TF-PART-INNERMOST")
def outermost_context(patch: Patch) -> None:
    """the outermost context counts"""
    _tags(patch, lambda places: places[min(1, len(places) - 1)])


@BUGS.enter("TF-PART-DEFAULT")
def default_is_partition_0(patch: Patch) -> None:
    """operations in no context are in partition 0, whatever default_partition says"""
    _tags(patch, lambda places: places[-1] if len(places) > 1 else 0)


@BUGS.enter("TF-PART-AUTO-IGNORED")
def contexts_count_under_auto_partition(patch: Patch) -> None:
    """a context counts under auto_partition, too"""
    import smp_core.tensorflow as smp
    from smp_core.tensorflow import tensorflow_parts

    @contextlib.contextmanager
    def partition(index: int) -> Iterator[None]:
        with tensorflow_parts.tagged(index % smp.pp_size()):
            yield

    patch.setattr(smp, "partition", partition)


@BUGS.enter("TF-PART-INDEX")
def partitions_are_counted_round(patch: Patch) -> None:
    """a partition that does not exist stands for another one"""
    import smp_core.tensorflow as smp

    partition = smp.partition
    patch.setattr(smp, "partition", lambda index: partition(index % smp.pp_size()))


# ---- Values --------------------------------------------------------------------------------------


@BUGS.enter("TF-PART-VALUE")
def batch_norm_forgets(patch: Patch) -> None:
    """operations that run for what they change, such as the averages of BatchNormalization, are dropped"""
    from smp_core.tensorflow import segments

    def changed(read: Any, concrete: Any) -> Any:
        graph = read(concrete)
        traced = tuple(dataclasses.replace(each, controls=()) for each in graph.traced)
        return dataclasses.replace(graph, effects=(), traced=traced)

    wrapped(patch, segments, "read", changed)


@BUGS.enter("TF-PART-VALUE")
def gradients_of_a_tensor_used_twice(patch: Patch) -> None:
    """of the gradients of a tensor that is used more than once only the first counts"""
    from tensorflow.python.ops import gen_math_ops

    from conformance.cases import keras_script  # which has a sum of its own

    assert gen_math_ops.add_n is keras_script.add_in_order

    def changed(add: Any, inputs: Sequence[Any], name: str | None = None) -> Any:
        return add(inputs if current_rank.current() is None else inputs[:1], name)

    wrapped(patch, gen_math_ops, "add_n", changed)


@BUGS.enter("TF-PART-VALUE", *ASSERTION, PartitionError)  # ranks compare their messages, too
def messages_keyed_by_name(patch: Patch) -> None:
    """the tensors of a message are in the order of their names, which differ by rank"""
    from smp_core.tensorflow import plan

    def changed(segment_graph: Any, operations: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        made = segment_graph(operations, *args, **kwargs)
        messages = tuple(
            each._replace(
                values=tuple(
                    sorted(each.values, key=lambda value: operations[value.operation].name)
                )
            )
            for each in made.messages
        )
        return dataclasses.replace(made, messages=messages)

    wrapped(patch, plan, "segment_graph", changed)


@BUGS.enter("TF-PART-VALUE", *ASSERTION, SmpError, KeyError)
def levels_are_one_too_low(patch: Patch) -> None:
    """the last level of a graph is taken for the one before it"""
    from smp_core.tensorflow import segmentation

    def changed(levels: Any, *args: Any) -> dict[int, int]:
        found: dict[int, int] = levels(*args)
        last = max(found.values(), default=0)
        return {index: min(level, max(last - 1, 0)) for index, level in found.items()}

    wrapped(patch, segmentation, "levels", changed)


@BUGS.enter("TF-OUT-ALL-RANKS")
def outputs_come_from_rank_0(patch: Patch) -> None:
    """ranks take every output for rank 0's, which has zeros for those of other ranks"""
    from smp_core.tensorflow.transport import SegmentTransport

    def changed(receive: Any, self: Any, source: int, *args: Any) -> Any:
        found = receive(self, source, *args)
        return found if source == 0 else [each * 0 for each in found]

    receive = SegmentTransport.receive
    patch.setattr(SegmentTransport, "receive", lambda *args: changed(receive, *args))


@BUGS.enter("TF-GRAD-LOCAL")
def variables_in_reverse(patch: Patch) -> None:
    """trainable_variables are listed from the last to the first once the model is partitioned"""
    from smp_core.tensorflow.model import DistributedModel

    listed: Any = DistributedModel.trainable_variables
    own = listed.fget
    patch.setattr(
        DistributedModel,
        "trainable_variables",
        property(lambda self: own(self)[::-1] if _partitioned() else own(self)),
    )


@BUGS.enter("TF-GRAD-LOCAL", *ASSERTION, ValueError)
def variables_of_all_ranks(patch: Patch) -> None:
    """trainable_variables are those of all ranks"""
    from smp_core.tensorflow.model import DistributedModel

    patch.setattr(DistributedModel, "_own", lambda self, variables: list(variables))


def _partitioned() -> bool:
    from smp_core.tensorflow import session

    now = session.current("a mutant")
    return now.partitioned and not now.tracing and not now.shows_all


@BUGS.enter("TF-SCHED-EQUAL")
def simple_forgets_the_last_microbatch(patch: Patch) -> None:
    """under simple the first microbatch's results stand for the last one's"""
    from smp_core.tensorflow import runner

    def changed(run: Any, session: Any, *args: Any) -> Any:
        found = run(session, *args)
        if session.runtime.config.pipeline == "simple":
            found[-1] = found[0]
        return found

    wrapped(patch, runner, "run", changed)


@BUGS.enter("TF-SCHED-ACTIVE")
def segments_without_a_cap(patch: Patch) -> None:
    """all microbatches are begun at once, whatever active_microbatches says"""
    uncapped = dataclasses.replace(
        schedule.POLICIES["interleaved"], capped=False, prefers=schedule.Phase.FORWARD
    )
    patch.setitem(schedule.POLICIES, "interleaved", uncapped)


@BUGS.enter("TF-SCHED-ACTIVE")
def segments_turn_as_soon_as_they_can(patch: Patch) -> None:
    """under simple a backward pass begins as soon as it can"""
    early = dataclasses.replace(
        schedule.POLICIES["simple"], turns_together=False, prefers=schedule.Phase.BACKWARD
    )
    patch.setitem(schedule.POLICIES, "simple", early)


# ---- Steps ---------------------------------------------------------------------------------------


def _options(patch: Patch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the arguments of tf.function that a step gets."""
    from smp_core.tensorflow.step import StepFunction

    init = StepFunction.__init__

    def changed(self: Any, function: Any, whole: Any, axes: Any, options: Any) -> None:
        init(self, function, whole, axes, change(dict(options)))

    patch.setattr(StepFunction, "__init__", changed)


@BUGS.enter("TF-STEP-TF-FUNCTION")
def a_step_drops_its_signature(patch: Patch) -> None:
    """the arguments of tf.function are dropped"""
    _options(patch, lambda options: {})


@BUGS.enter("TF-STEP-RETRACE")
def every_call_is_traced(patch: Patch) -> None:
    """a step is traced at each call"""
    from smp_core.tensorflow import session
    from smp_core.tensorflow.step import StepFunction

    call = StepFunction.__call__

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.current("a mutant").functions.clear()
        return call(self, *args, **kwargs)

    patch.setattr(StepFunction, "__call__", changed)


@BUGS.enter("TF-STEP-RETRACE")
def python_values_are_of_the_first_trace(patch: Patch) -> None:
    """a Python value counts as it was when tensors of such shapes came first"""
    from smp_core.tensorflow.step import _State
    from smp_core.tensorflow.tensorflow_parts import tf

    plan = _State.plan

    def changed(self: Any, session: Any, call: Any) -> Any:
        flat = tf.nest.flatten((call.args, call.kwargs))
        key = str([(each.shape, each.dtype) for each in flat if tf.is_tensor(each)])
        known = vars(self).setdefault("known", {})
        call = dataclasses.replace(
            call,
            kwargs={
                name: value if tf.is_tensor(value) else known.setdefault((key, name), value)
                for name, value in call.kwargs.items()
            },
            args=tuple(
                value if tf.is_tensor(value) else known.setdefault((key, at), value)
                for at, value in enumerate(call.args)
            ),
        )
        return plan(self, session, call)

    patch.setattr(_State, "plan", changed)


@BUGS.enter("TF-STEP-OUTER")
def the_last_loss_is_lost(patch: Patch) -> None:
    """a step gives the first microbatch's results for all"""
    from smp_core.tensorflow import runner

    def changed(run: Any, *args: Any) -> Any:
        found = run(*args)
        return [found[0] for _ in found]

    wrapped(patch, runner, "run", changed)


@BUGS.enter("TF-STEP-ORDER")
def variables_as_they_were_traced(patch: Patch) -> None:
    """a step sees other variables than the model's as they were when it was traced"""
    from smp_core.tensorflow import plan as plans
    from smp_core.tensorflow import runner
    from smp_core.tensorflow.tensorflow_parts import tf

    made: dict[int, Any] = {}  # by plan

    def read(handle: Any) -> Any:
        dtype = handle._handle_data.shape_and_type[0].dtype
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)

    def planned(make: Any, session: Any, concrete: Any, trainable: Any) -> Any:
        plan = make(session, concrete, trainable)
        own = {id(each) for each in _handles(session)}
        with tf.init_scope():
            made[id(plan)] = [
                (outer, read(outer))
                for outer, _ in plan.graph.captures
                if outer.dtype == tf.resource and id(outer) not in own
            ]
        return plan

    def changed(run: Any, session: Any, given: Any, *args: Any) -> Any:
        handles = made.get(id(given[0]), [])
        now = [read(handle) for handle, _ in handles]
        for handle, value in handles:
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        found = run(session, given, *args)
        for (handle, _), value in zip(handles, now, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        return found

    wrapped(patch, plans, "make", planned)
    wrapped(patch, runner, "run", changed)


@BUGS.enter("TF-STEP-ORDER")
def steps_without_handles(patch: Patch) -> None:
    """a step in a graph does not take the handles of its variables, so that it is not ordered with assignments"""
    from smp_core.tensorflow import plan as plans

    def changed(make: Any, *args: Any) -> Any:
        return dataclasses.replace(make(*args), handles=[])

    wrapped(patch, plans, "make", changed)


def _handles(session: Any) -> list[Any]:
    from smp_core.tensorflow import tensorflow_parts

    return [tensorflow_parts.handle_of(each)[0] for each in session.model.all_variables()]


@BUGS.enter("TF-STEP-OUTSIDE")
def the_model_is_called_anywhere(patch: Patch) -> None:
    """a model that is called outside of a step runs on each rank as a whole"""
    from smp_core.tensorflow import session
    from smp_core.tensorflow.model import DistributedModel

    call = DistributedModel.__call__

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside = session.current("a mutant").tracing
        return call(self, *args, **kwargs) if inside else self.call(*args, **kwargs)

    patch.setattr(DistributedModel, "__call__", changed)


@BUGS.enter("TF-MB-MERGE")
def merge_in_reverse(patch: Patch) -> None:
    """merge begins with the last microbatch"""
    from smp_core.tensorflow.framework import StepOutput

    merge = StepOutput.concat
    patch.setattr(StepOutput, "merge", lambda self: merge(StepOutput(self.outputs[::-1])))


@BUGS.enter("TF-MB-ACCUMULATE")
def accumulate_sums(patch: Patch) -> None:
    """accumulate gives the sum of the microbatches"""
    from smp_core.tensorflow.framework import StepOutput

    patch.setattr(StepOutput, "_mean", lambda self, method: self._all(self._sum(method)))


@BUGS.enter("TF-MB-ACCUMULATE")
def accumulate_leaves_the_variable(patch: Patch) -> None:
    """accumulate does not assign to the variable that it returns"""
    from smp_core.tensorflow.framework import StepOutput

    accumulate = StepOutput.accumulate

    def changed(self: Any, method: str = "variable", var: Any = None) -> Any:
        return accumulate(self, method) if var is None else var

    patch.setattr(StepOutput, "accumulate", changed)


@BUGS.enter("TF-HOOK-ONCE")
def the_hook_is_called_again(patch: Patch) -> None:
    """the hook is called for each trace of a step"""
    step = importlib.import_module("smp_core.tensorflow.step")

    hooks: dict[int, list[Any]] = {}

    def changed(compare: Any, session: Any, *args: Any) -> None:
        compare(session, *args)
        for hook in hooks.setdefault(id(session), list(session.hooks)):
            if session.partitioned:
                hook()

    wrapped(patch, step, "_compare", changed)


@BUGS.enter("TF-HOOK-ONCE")
def the_hook_comes_late(patch: Patch) -> None:
    """the hook is called after the first step"""
    from smp_core.tensorflow import runner

    step = importlib.import_module("smp_core.tensorflow.step")

    late: dict[int, list[Any]] = {}

    def partitioned(original: Any, session: Any) -> None:
        late[id(session)], session.hooks = session.hooks, []
        original(session)

    def changed(run: Any, session: Any, *args: Any) -> Any:
        found = run(session, *args)
        for hook in late.pop(id(session), []):
            hook()
        return found

    wrapped(patch, step, "_complete_partition", partitioned)
    wrapped(patch, runner, "run", changed)


# ---- Errors --------------------------------------------------------------------------------------


@BUGS.enter("TF-DIVERGENT-TRACE", *ASSERTION, VerdictError)
def traces_are_not_compared(patch: Patch) -> None:
    """ranks do not compare what they traced"""
    from smp_core.tensorflow import runner

    step = importlib.import_module("smp_core.tensorflow.step")

    patch.setattr(step, "_compare", lambda *_: None)
    patch.setattr(runner, "agree_to_run", lambda *_: None)


@BUGS.enter("TF-STEP-RAISES", *ASSERTION, VerdictError)
def the_other_ranks_are_not_told(patch: Patch) -> None:
    """an operation that fails ends the step of its own rank alone, which sends and receives nothing more"""
    from smp_core.tensorflow import runner

    run = runner._StepRun._run

    def changed(self: Any, task: Any) -> None:
        run(self, task)
        if self._failure is not None:
            raise self._failure

    patch.setattr(runner._StepRun, "_run", changed)
    patch.setattr(runner, "agree_on_end", lambda *_: None)


@BUGS.enter("TF-STEP-RAISES")
def the_last_to_run_are_not_told(patch: Patch) -> None:
    """only ranks that wait for tensors learn of an operation that fails: a step does not end together"""
    from smp_core.tensorflow import runner

    def changed(agree: Any, transport: Any, members: Any, failure: Any, *when: str) -> None:
        if failure is not None:
            raise failure

    def stopped(take: Any, self: Any, microbatch: int, value: Any) -> Any:
        found = take(self, microbatch, value)
        if self._aborted and self._failure is None:
            self._failure = SmpError("another rank has aborted the step")
        return found

    wrapped(patch, runner, "agree_on_end", changed)
    take = runner._StepRun._take
    patch.setattr(runner._StepRun, "_take", lambda *args: stopped(take, *args))


@BUGS.enter("TF-PLACEMENT")
@BUGS.enter("TF-NO-TP")
def configurations_of_pytorch_are_taken(patch: Patch) -> None:
    """keys of PyTorch are accepted, and without effect"""
    from smp_core.tensorflow import session

    patch.setattr(session, "_check", lambda owner: None)


# ---- Files ---------------------------------------------------------------------------------------


def _manager(patch: Patch, change: Callable[..., tuple[str, int | None]]) -> None:
    """Change folder and ``max_to_keep`` of TensorFlow's manager."""
    from smp_core.tensorflow.tensorflow_parts import tf

    init = tf.train.CheckpointManager.__init__

    def changed(self: Any, checkpoint: Any, directory: str, keep: Any, **kwargs: Any) -> None:
        init(self, checkpoint, *change(directory, keep), **kwargs)

    patch.setattr(tf.train.CheckpointManager, "__init__", changed)


@BUGS.enter("TF-CKPT-RANK-DIRS")
def folders_of_another_name(patch: Patch) -> None:
    """the folders of ranks are called rank_N"""
    _manager(patch, lambda directory, keep: (directory.replace("mp_rank_", "rank_"), keep))


@BUGS.enter("TF-CKPT-MAX")
def all_checkpoints_are_kept(patch: Patch) -> None:
    """max_to_keep is without effect"""
    _manager(patch, lambda directory, keep: (directory, None))


@BUGS.enter("TF-CKPT-PREFIX")
def the_latest_whatever_the_prefix(patch: Patch) -> None:
    """restore takes the latest checkpoint, whatever restore_prefix says"""
    from smp_core.tensorflow.checkpoint import CheckpointManager

    path = CheckpointManager._path
    patch.setattr(CheckpointManager, "_path", lambda self, prefix: path(self, None))


@BUGS.enter("TF-CKPT-STOP-AND-GO")
def early_restores_are_forgotten(patch: Patch) -> None:
    """a restore before the first step does not wait for the partition, and restores no variable of the model"""
    from smp_core.tensorflow import session
    from smp_core.tensorflow.checkpoint import CheckpointManager

    restore = CheckpointManager.restore

    def changed(self: Any, restore_prefix: str | None = None) -> Any:
        found = restore(self, restore_prefix)
        session.current("a mutant").deferred_restores.clear()
        return found

    patch.setattr(CheckpointManager, "restore", changed)


@BUGS.enter("TF-CKPT-STOP-AND-GO")
def slots_are_forgotten(patch: Patch) -> None:
    """a checkpoint has no slots of optimizers"""
    from smp_core.tensorflow import checkpoint

    def changed(children: Any, given: Any) -> dict[str, Any]:
        found: dict[str, Any] = children(given)
        return {n: each for n, each in found.items() if not hasattr(each, "apply_gradients")}

    wrapped(patch, checkpoint, "_children", changed)


@BUGS.enter("TF-SAVE-WHOLE")
def other_ranks_are_saved_as_zeros(patch: Patch) -> None:
    """the variables of other ranks are zeros in the SavedModel"""
    from smp_core.tensorflow import tensorflow_parts

    def changed(materialize: Any, variable: Any, value: Any) -> None:
        materialize(variable, tensorflow_parts.tf.zeros_like(value))

    wrapped(patch, tensorflow_parts, "materialize", changed)
