"""smp.step on ``tf.function``: the body is traced and partitioned for one microbatch, and run for all (API 1.3, 2)."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from smp_core import microbatch
from smp_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    OutsideStepError,
    PartitionError,
    SmpError,
    StepAbortedError,
    UnsupportedTrainingError,
    VerdictError,
)
from smp_core.microbatch import CallArguments
from smp_core.tensorflow import auto, runner, segments
from smp_core.tensorflow import plan as plans
from smp_core.tensorflow import session as sessions
from smp_core.tensorflow import tensorflow_parts as parts
from smp_core.tensorflow.collective_try import collective_try
from smp_core.tensorflow.framework import FRAMEWORK, JOINING
from smp_core.tensorflow.plan import Plan
from smp_core.tensorflow.runner import FAILED, PLANNED
from smp_core.tensorflow.session import TensorFlowSession
from smp_core.tensorflow.tensorflow_parts import tf
from smp_core.topology import GroupKind
from smp_core.transport.protocols import Group

#: Instead of the number of a plan, when the ranks agree that all can decide the automatic partition.
_DECIDES = -2


class StepFunction:
    """A decorated function. Like the one of PyTorch it is no descriptor: as an attribute it does not bind ``self``."""

    def __init__(
        self,
        function: Callable[..., object],
        non_split_inputs: Collection[str] | None,
        input_split_axes: Mapping[str, int] | None,
        options: Mapping[str, Any],
    ) -> None:
        if isinstance(function, StepFunction):
            raise ArgumentTypeError(f"smp.step: {function!r} is decorated already")
        self._rules = microbatch.rules(function, non_split_inputs, input_split_axes)
        functools.update_wrapper(self, function)
        self._function, self._options = function, dict(options)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the step; every rank of the model-parallel group calls it together.

        Tensors of the result become StepOutput. A list of gradients becomes the list of this rank's, as
        ``model.trainable_variables`` has them.

        Raises:
            NotInitializedError: ``smp.init`` has not been called.
            OutsideStepError: a step is being traced on this rank.
            ArgumentTypeError: the function cannot be called with these arguments.
            BatchSizeError: ``microbatches`` does not divide a batch, or a tensor has no batch axis.
            PartitionError: the graph cannot be partitioned, or the ranks traced different ones.
            StepAbortedError: the body, an operation of it, a load that waited for the partition, or a hook raised on
                another rank.
            StructureError: the body returned another structure for one microbatch than for another.
        """
        name = self._rules.function
        session = sessions.current(f"smp.step: {name}")
        if session.tracing:
            raise OutsideStepError(
                f"smp.step: {name} was called inside a step: a step cannot run in a microbatch of another"
            )
        session.transport.open()
        with runner.notify_replicas(session):
            planned, flats = self._planned(session, CallArguments(args, kwargs))
        if not session.partitioned:
            with tf.init_scope():
                _complete_partition(session)
        results = runner.run(session, planned, flats, _averaging(session))
        return microbatch.join(JOINING, name, results)

    def _planned(
        self, session: TensorFlowSession, call: CallArguments
    ) -> tuple[list[Plan], list[list[Any]]]:
        """The plan of each microbatch, and the tensors that it is passed."""
        count = session.runtime.config.microbatches
        try:
            calls = microbatch.split(FRAMEWORK, self._rules, self._cast(call), count)
            state = session.functions.get(self)
            if state is None:
                state = session.functions[self] = _State(self._traced(session, count))
        except Exception as error:
            with tf.init_scope():
                _compare(session, None, error)
            raise
        planned, flats = [], []
        for each in calls:
            plan, flat = state.plan(session, each)
            planned.append(plan)
            flats.append(flat)
        return planned, flats

    def _traced(self, session: TensorFlowSession, count: int) -> Any:
        """The body as a ``tf.function`` of one microbatch."""
        function, options = self._function, dict(self._options)
        autograph = options.pop("autograph", True)
        if options.get("input_signature") is not None:
            options["input_signature"] = self._divided(options["input_signature"], count)

        @functools.wraps(function)
        def body(*args: Any, **kwargs: Any) -> Any:
            called = function
            if autograph:
                called = parts.convert(function, session.autograph)
            session.tracing, session.step_graph = True, tf.compat.v1.get_default_graph()
            try:
                result = called(*args, **kwargs)
            finally:
                session.tracing, session.step_graph = False, None
            return tf.nest.map_structure(functools.partial(_dense, self._rules.function), result)

        return tf.function(body, autograph=False, **options)

    def _cast(self, call: CallArguments) -> CallArguments:
        """The call with numpy's arrays in the dtypes of ``input_signature``, as ``tf.function`` casts them."""
        signature = self._options.get("input_signature")
        if signature is None:
            return call
        args, kwargs = list(call.args), dict(call.kwargs)
        for at, (spec, name) in enumerate(
            zip(signature, self._rules.signature.parameters, strict=False)
        ):
            if at < len(args):
                args[at] = _cast_arrays(args[at], spec)
            elif name in kwargs:
                kwargs[name] = _cast_arrays(kwargs[name], spec)
        return CallArguments(tuple(args), kwargs)

    def _divided(self, signature: Any, count: int) -> Any:
        """The signature of a microbatch: the batch axis of each tensor divided by the number of microbatches."""
        names = [
            each.name
            for each in self._rules.signature.parameters.values()
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]

        def divided(spec: Any, axis: int) -> Any:
            sizes = spec.shape.as_list() if spec.shape.rank is not None else None
            if not sizes or sizes[axis] is None:
                return spec
            if sizes[axis] % count:
                raise ArgumentError(
                    f"smp.step: input_signature has a batch of {sizes[axis]}, which microbatches={count} does not "
                    "divide"
                )
            sizes[axis] //= count
            return tf.TensorSpec(sizes, spec.dtype, spec.name)

        return [
            spec
            if names[at : at + 1] and names[at] in self._rules.whole
            else tf.nest.map_structure(
                functools.partial(
                    divided, axis=self._rules.axes.get(names[at], 0) if at < len(names) else 0
                ),
                spec,
            )
            for at, spec in enumerate(signature)
        ]

    def __repr__(self) -> str:
        return f"<smp.step of {self._function!r}>"


def _cast_arrays(argument: Any, spec: Any) -> Any:
    """The argument with each array of numpy in the dtype of its spec; of another structure, as it is."""
    try:
        tf.nest.assert_same_structure(argument, spec)
    except (TypeError, ValueError):
        return argument  # tf.function says what differs
    return tf.nest.map_structure(
        lambda leaf, one: (
            leaf.astype(one.dtype.as_numpy_dtype)
            if isinstance(leaf, np.ndarray) and isinstance(one, tf.TensorSpec)
            else leaf
        ),
        argument,
        spec,
    )


def _dense(name: str, leaf: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor | tf.RaggedTensor):
        raise ArgumentError(
            f"smp.step: {name} returned a {type(leaf).__name__}: microbatches are joined as dense tensors. Return its "
            "parts, such as its values, or make it dense"
        )
    return tf.convert_to_tensor(leaf) if isinstance(leaf, tf.IndexedSlices) else leaf


class _State:
    """A step function on one rank: its ``tf.function``, and the plan of each trace."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._plans: dict[Any, Plan] = {}

    def plan(self, session: TensorFlowSession, call: CallArguments) -> tuple[Plan, list[Any]]:
        """The plan of a call for one microbatch, and the tensors that it passes."""
        # Asked here: a function that is traced without AutoGraph, as ours is, hides the choice of the caller.
        session.autograph = parts.autograph_of_caller()
        try:
            concrete = self._concrete(session, call)
        except VerdictError:
            raise
        except Exception as error:
            failure = _unwrapped(error)
            with tf.init_scope():
                _compare(session, None, failure)
            raise failure from None
        plan = self._plans.get(id(concrete))
        if plan is None:
            plan = self._make_plan(session, concrete)
            self._plans[id(concrete)] = (
                plan  # which keeps the function, so that the id stays its own
            )
        return plan, parts.flat_inputs(self.function, concrete, call.args, call.kwargs)

    def _concrete(self, session: TensorFlowSession, call: CallArguments) -> Any:
        # On simulated ranks functions run eagerly, so that one in the body would be inlined instead of traced. There
        # another rank may have set the value that stands here, if a body waits while it is traced.
        eager = session.eager or tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(False)
        try:
            return self.function.get_concrete_function(*call.args, **call.kwargs)
        finally:
            tf.config.run_functions_eagerly(eager)

    def _make_plan(self, session: TensorFlowSession, concrete: Any) -> Plan:
        model = session.model
        trainable: Sequence[Any] = ()
        if model is not None:
            session.shows_all, before = True, session.shows_all
            try:
                trainable = list(model.trainable_variables)
            finally:
                session.shows_all = before
        if session.runtime.config.auto_partition and not session.layers:
            _decide(session, concrete, trainable)
        # The others would wait for a rank that cannot make its plan: it sends them its error.
        failure: Exception | None = None
        plan: Plan | None = None
        try:
            plan = plans.make(session, concrete, trainable)
        except Exception as error:
            failure = error
        with tf.init_scope():
            _compare(session, plan, failure)
            if session.partitioned:
                _free_remote(session)  # of layers that this step was the first to build
        assert plan is not None
        return plan


def _decide(session: TensorFlowSession, concrete: Any, trainable: Sequence[Any]) -> None:
    """Have the automatic partition that the first rank of the pipeline decides."""
    failure: Exception | None = None
    local: dict[str, int] = {}
    try:
        graph = segments.read(concrete)
        local = auto.decide(graph, plans.layers_of(graph, trainable), session.partitions)
    except Exception as error:
        failure = error
    with tf.init_scope():
        runner.agree_to_run(
            session.transport, PLANNED if failure is None else FAILED, [_DECIDES], failure
        )
        if failure is not None:
            raise failure
        # By the order of the scopes: Keras counts layers in their names, which may differ by rank.
        texts = session.transport.pipeline.texts(json.dumps(list(local.values())))
        session.layers.update(zip(local, json.loads(texts[0]), strict=False))


def _unwrapped(error: Exception) -> Exception:
    """The error of this package that AutoGraph or Keras wrapped in one of their own; else the error itself."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, SmpError):
        found = found.__context__
    return found or error


def _compare(session: TensorFlowSession, plan: Plan | None, failure: Exception | None) -> None:
    """Raise on every rank of the pipeline if one has failed, or if they traced different graphs.

    A rank that has failed raises its own error; the others StepAbortedError. For different graphs it is PartitionError.
    """
    transport = session.transport
    number = -1 if plan is None else plan.fingerprint
    runner.agree_to_run(transport, PLANNED if failure is None else FAILED, [number], failure)
    if failure is not None:
        raise failure
    if transport.pipeline.size > 1:
        rows = transport.pipeline.agree(number)
        if len({tuple(row) for row in rows}) > 1:
            assert plan is not None
            group = session.runtime.group(GroupKind.PP)
            all_lines = session.runtime.fabric.objects.allgather(
                plan.description, Group("PP_GROUP", group.ranks)
            )
            difference = _difference(all_lines)
            raise PartitionError(
                f"smp.step: the ranks of the pipeline traced different graphs: {difference}. A step must make the same "
                "operations on every rank: no branch on a rank in it, no random Python value"
            )


def _difference(lines: Sequence[Sequence[str]]) -> str:
    most = max(map(len, lines))
    padded = [[*each, *["nothing"] * (most - len(each))] for each in lines]
    for at, each in enumerate(zip(*padded, strict=True)):
        if len(set(each)) > 1:
            words = "; ".join(f"on rank {rank} it is {line}" for rank, line in enumerate(each))
            return f"operation {at} differs: {words}"
    return "they differ"


def _complete_partition(session: TensorFlowSession) -> None:
    """Do what is due once, between the partition and the first forward pass."""
    if session.transport.world is not session.transport.pipeline:
        runner.agree_on_end(session.transport, session.transport.world, None)  # see notify_replicas
    _owners(session)
    session.partitioned = True  # a load asks the model for the variables that this rank owns
    try:
        given = _first_replica(session)
        collective_try(
            session.runtime, "smp.step", lambda: _take_over(session, given), StepAbortedError
        )

        def load() -> None:
            for each in session.deferred_restores:
                each()

        collective_try(session.runtime, "smp.CheckpointManager.restore", load, StepAbortedError)
    except BaseException:
        session.partitioned = False  # the next step begins with the same loads
        raise
    session.deferred_restores.clear()
    _free_remote(session)
    hooks, session.hooks = session.hooks, []

    def call() -> None:
        for each in hooks:
            each()

    collective_try(
        session.runtime, "smp.register_post_partition_hook: a hook", call, StepAbortedError
    )


def _owners(session: TensorFlowSession) -> list[tuple[Any, int]]:
    """Every variable of the model with its owner: the default partition where no step has used it."""
    default = session.runtime.config.default_partition
    return [
        (each, session.owners.setdefault(parts.handle_key(parts.handle_of(each)[0]), default))
        for each in ([] if session.model is None else session.model.all_variables())
    ]


def _free_remote(session: TensorFlowSession) -> None:
    """Free the variables that other ranks own."""
    for each, owner in _owners(session):
        if owner != session.partition:
            parts.free(each)


def _variables(session: TensorFlowSession) -> list[Any]:
    return [] if session.model is None else list(session.model.variables)


def _first_replica(session: TensorFlowSession) -> Sequence[Any] | None:
    """The values of the variables of the first replica, on the others; None on the first one itself."""
    group = session.runtime.group(GroupKind.DP)
    if len(group.ranks) == 1:
        return None
    first = group.ranks[0] == session.runtime.rank
    values = [each.numpy() for each in _variables(session)] if first else None
    given: Sequence[Any] = session.runtime.fabric.objects.allgather(values, group)[0]
    return None if first else given


def _take_over(session: TensorFlowSession, given: Sequence[Any] | None) -> None:
    """Assign the values of the first replica to the variables of this one, if it has the same ones."""
    if given is None:
        return
    variables = _variables(session)
    first = session.runtime.group(GroupKind.DP).ranks[0]
    problem = ""
    if len(variables) != len(given):
        problem = f"the model has {len(variables)} variables here and {len(given)} on rank {first}"
    else:
        for each, value in zip(variables, given, strict=True):
            if not tf.TensorShape(each.shape).is_compatible_with(value.shape):
                name = getattr(each, "path", each.name)
                shapes = f"{tuple(each.shape)} here and {value.shape} on rank {first}"
                problem = f"{name} has the shape {shapes}"
                break
    if problem:
        raise PartitionError(
            f"smp.step: {problem}, the first replica, whose values the others take. Make the same model on every rank"
        )
    for each, value in zip(variables, given, strict=True):
        parts.materialize(each, value)


def _averaging(session: TensorFlowSession) -> Callable[[Any], Any] | None:
    """The average of a gradient over replicas; None if there is nothing to average."""
    replicas = session.transport.replicas
    if replicas.size == 1:
        return None

    def reduce(array: Any) -> Any:
        local = torch.from_numpy(np.array(array).reshape(-1))
        total = torch.zeros_like(local)
        for row in replicas.gathered(local):
            total = total + row
        return (total / replicas.size).numpy().reshape(array.shape)

    def averaged(tensor: Any) -> Any:
        if tf.executing_eagerly():
            return tf.constant(reduce(tensor.numpy()))
        found = tf.numpy_function(reduce, [tensor], tensor.dtype, stateful=True)
        return tf.ensure_shape(found, tensor.shape)

    return averaged


_COMPILE = ("jit_compile", "experimental_compile")


def step(
    first: Any = None,
    /,
    *,
    func: Any = None,
    non_split_inputs: Collection[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    **options: Any,
) -> Any:
    """Decorate a function so that its body runs once for each microbatch, over a pipeline of ranks.

    Args:
        first: the function.
        func: the same, as ``tf.function`` calls it.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: batch axis by name of argument; 0 where none is said.
        detach_outputs: accepted, and without meaning in TensorFlow.
        options: the other arguments of ``tf.function``. ``input_signature`` is of the whole batch.

    Raises UnsupportedTrainingError for ``jit_compile=True``, and ArgumentTypeError for an argument that ``tf.function``
    does not take.
    """
    function = first if first is not None else func
    for name in _COMPILE:
        if options.pop(name, None):
            raise UnsupportedTrainingError(
                f"smp.step: {name}=True: XLA cannot compile the messages between ranks. Use "
                "tf.config.optimizer.set_jit(True), which compiles what lies between them"
            )
    unknown = options.keys() - inspect.signature(tf.function).parameters.keys()
    if unknown:
        raise ArgumentTypeError(
            f"smp.step: {', '.join(sorted(unknown))}: tf.function takes no such argument"
        )

    def decorate(function: Callable[..., object]) -> StepFunction:
        return StepFunction(function, non_split_inputs, input_split_axes, options)

    return decorate if function is None else decorate(function)
