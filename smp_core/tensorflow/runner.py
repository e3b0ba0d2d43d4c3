"""One step on one rank: the tasks of its order, the messages between them, and the results of all microbatches.

A step runs eagerly. Inside an outer ``tf.function`` it is one operation of that graph, which runs the step whenever the
graph runs: an error of a segment is caught there, and sent to the other ranks, before it ends the graph.

A rank whose segment has failed computes nothing more, but sends and receives every message of the step, and marks
those that it sends as aborted. A rank that receives such a message does the same. So no message outlives the step, and
at its end all ranks agree that it failed, and who did.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from smp_core.errors import (
    PartitionError,
    StepAbortedError,
    UnsupportedTrainingError,
    VerdictError,
)
from smp_core.tensorflow import tensorflow_parts as parts
from smp_core.tensorflow.collective_try import error_text
from smp_core.tensorflow.framework import StepSum, sum_dtype
from smp_core.tensorflow.plan import Plan
from smp_core.tensorflow.segmentation import SegmentMessage, Value
from smp_core.tensorflow.session import TensorFlowSession
from smp_core.tensorflow.tasks import SegmentTask, orders
from smp_core.tensorflow.tensorflow_parts import tf
from smp_core.tensorflow.transport import Members, SegmentTransport

#: The states of a rank when it agrees on a step: it has made its plan now, it runs one, it is done with it, it failed.
PLANNED, RUNS, DONE, FAILED = 0, 1, 2, 3
BEFORE = "before it ran"
#: A message of another rank, with its microbatch.
Incoming = tuple[int, SegmentMessage]
#: The messages for which a rank has room beside the one that it waits for.
_PREFETCHED = 2
#: The microbatches whose gradients a rank holds before it adds them to the sums. The last ones wait for the end of the
#: step, where a rank waits for others anyhow.
_UNSUMMED = 2
_NO_SUMS: Mapping[Value, StepSum] = MappingProxyType({})


def run(
    session: TensorFlowSession,
    plans: Sequence[Plan],
    flats: Sequence[Sequence[Any]],
    averaged: Callable[[Any], Any] | None,
) -> list[Any]:
    """Run a step, and return what each microbatch returned on this rank.

    ``plans`` and ``flats`` are the plans and the arguments of the microbatches.
    """
    given = [
        [*flat, *(outer for outer, _ in plan.graph.fed_captures)]
        for plan, flat in zip(plans, flats, strict=True)
    ]
    sums: dict[Value, StepSum] = {}
    if tf.executing_eagerly():
        results, _ = _executed(session, plans, given)
    else:
        results, sums = _traced(session, plans, given)
    return [plan.result(each, averaged, sums) for plan, each in zip(plans, results, strict=True)]


def _executed(
    session: TensorFlowSession,
    plans: Sequence[Plan],
    given: Sequence[Sequence[Any]],
    sums: Mapping[Value, StepSum] = _NO_SUMS,
) -> tuple[list[dict[Value, Any]], dict[Value, Any]]:
    """The tensors that each microbatch returns on this rank, and those that are wanted of ``sums``."""
    order, incoming = _order(session, tuple(plans))
    with notify_replicas(session):
        agree_to_run(session.transport, RUNS, [plan.fingerprint for plan in plans])
    return _StepRun(session.transport, plans, given, incoming, sums).run(order)


def _order(
    session: TensorFlowSession, plans: tuple[Plan, ...]
) -> tuple[Sequence[SegmentTask], Sequence[Incoming]]:
    """The tasks of this rank and the messages that it takes, in order.

    Both are made once for the plans of a step: the simulation of all ranks takes milliseconds.
    """
    found = session.orders.get(plans)
    if found is None:
        config = session.runtime.config
        order = orders(
            [plan.segmentation for plan in plans],
            config.pipeline,
            config.active_microbatches,
            [plan.serial for plan in plans],
        )[session.partition]
        found = session.orders[plans] = order, _incoming(plans, order)
    return found


def _incoming(plans: Sequence[Plan], order: Sequence[SegmentTask]) -> list[Incoming]:
    """The messages of other ranks, each where its first tensor is taken."""
    taken = [
        *((task.microbatch, value) for task in order for value in _takes(plans, task)),
        *((microbatch, value) for microbatch, plan in enumerate(plans) for value in plan.leaves),
    ]
    messages = (
        (at, plans[at].receives[value]) for at, value in taken if value in plans[at].receives
    )
    return list(dict.fromkeys(messages))


def _takes(plans: Sequence[Plan], task: SegmentTask) -> Iterator[Value]:
    """The tensors that a task takes: for its function, and for what it sends."""
    plan = plans[task.microbatch]
    yield from plan.feeds[task.segment]
    for message in plan.sends.get(task.segment, ()):
        yield from message.values


def _traced(
    session: TensorFlowSession, plans: Sequence[Plan], given: Sequence[Sequence[Any]]
) -> tuple[list[dict[Value, Any]], dict[Value, StepSum]]:
    """The same, as results of an operation of the graph that is being traced, with the sums of the rank's gradients.

    Raises UnsupportedTrainingError if TensorFlow has no thread for anything but this operation.
    """
    if parts.inter_op_threads() < 2:
        raise UnsupportedTrainingError(
            "smp.step in a tf.function: TensorFlow has one inter-op thread, on which the step would wait for ever for "
            "its own operations. Set TF_NUM_INTEROP_THREADS=2, or call "
            "tf.config.threading.set_inter_op_parallelism_threads(2) before anything else"
        )
    # The variables are inputs, so that the operation takes its turn among those that assign to them.
    handles = {id(handle): handle for plan in plans for handle in plan.handles}
    counts = [len(each) for each in given]

    sums = {value: StepSum() for value in _summable(plans)}
    leaves = [(plan.graph.tensor(value).dtype, value) for plan in plans for value in plan.leaves]
    wide = [sum_dtype(plans[0].graph.tensor(value).dtype) for value in sums]

    def call(*tensors: Any) -> list[Any]:
        rest = iter(tensors)
        parted = [[next(rest) for _ in range(each)] for each in counts]
        found, totals = _executed(session, plans, parted, sums)
        values = (
            each.get(value)
            for plan, each in zip(plans, found, strict=True)
            for value in plan.leaves
        )
        # Nothing takes the tensors that stand for those that are not wanted.
        nothing = functools.cache(functools.partial(tf.zeros, (0,)))
        return [
            nothing(dtype) if each is None else each
            for dtype, each in zip(types, (*values, *map(totals.get, sums)), strict=True)
        ]

    types = [*(dtype for dtype, _ in leaves), *wide]
    inputs = [*(tensor for each in given for tensor in each), *handles.values()]
    made = tf.py_function(call, inputs, types)
    found = iter(made if types else ())
    results = []
    for plan in plans:
        results.append({value: next(found) for value in plan.leaves})
        for value, tensor in results[-1].items():
            tensor.set_shape(plan.graph.tensor(value).shape)
    for value, each in sums.items():
        each.tensor = next(found)
        each.tensor.set_shape(plans[0].graph.tensor(value).shape)
    return results, sums


def _summable(plans: Sequence[Plan]) -> list[Value]:
    """The gradients that this rank has computed itself, if all microbatches have the same ones."""
    if len(plans) == 1 or any(each is not plans[0] for each in plans):
        return []
    return [
        value
        for value in plans[0].leaves
        if value in plans[0].owned and value not in plans[0].receives
    ]


class _StepRun:
    """The tensors of all microbatches of one step, as far as this rank has them and still needs them."""

    def __init__(
        self,
        transport: SegmentTransport,
        plans: Sequence[Plan],
        given: Sequence[Sequence[Any]],
        incoming: Sequence[Incoming],
        sums: Mapping[Value, StepSum] = _NO_SUMS,
    ) -> None:
        self._transport, self._plans = transport, plans
        self._incoming = iter(incoming)
        self._known: list[dict[Value, Any]] = [
            dict(zip(plan.graph.given, tensors, strict=True))
            for plan, tensors in zip(plans, given, strict=True)
        ]
        self._left = [Counter(plan.uses) for plan in plans]
        self._offsets = [0]
        for plan in plans:
            self._offsets.append(self._offsets[-1] + len(plan.segmentation.messages))
        self._received: set[int] = set()
        self._sums = [value for value, each in sums.items() if each.wanted]
        self._unwanted = {value for value, each in sums.items() if not each.parts_wanted}
        for value in self._sums:
            for left in self._left:
                left[value] += value not in self._unwanted
        self._totals: dict[Value, Any] = {}
        self._unsummed = list(range(len(plans)))
        self._aborted = False
        self._failure: Exception | None = None
        self._when = ""

    def run(self, order: Sequence[SegmentTask]) -> tuple[list[dict[Value, Any]], dict[Value, Any]]:
        """Run the tasks in order, and return the results of each microbatch, and their sums that are wanted.

        Raises an error if a rank has failed.
        """
        for _ in range(_PREFETCHED):
            self._post_receive()
        left = Counter(task.microbatch for task in order)
        for task in order:
            self._run(task)
            left[task.microbatch] -= 1
            ended_ones = next(
                (at for at, each in enumerate(self._unsummed) if left[each]), len(self._unsummed)
            )
            if ended_ones >= _UNSUMMED:
                self._add(ended_ones)
        self._add(len(self._unsummed))
        results = [
            {
                value: self._take(microbatch, value)
                for value in plan.leaves
                if value not in self._unwanted
            }
            for microbatch, plan in enumerate(self._plans)
        ]
        self._transport.wait_for_sends()
        agree_on_end(self._transport, self._transport.failure_domain, self._failure, self._when)
        return results, self._totals

    def _add(self, count: int) -> None:
        """Add the gradients of the next so many microbatches to the sums, in the order of the microbatches."""
        added, self._unsummed = self._unsummed[:count], self._unsummed[count:]
        for value in self._sums if added else ():
            terms = [self._take(microbatch, value) for microbatch in added]
            if self._aborted:
                return
            try:
                wide = [tf.cast(each, sum_dtype(each.dtype)) for each in terms]
                known = self._totals.pop(value, None)
                self._totals[value] = parts.added(wide if known is None else [known, *wide])
            except Exception as error:
                self._failed(f"with the sums up to microbatch {added[-1]}", error)

    def _run(self, task: SegmentTask) -> None:
        """Run one segment, and send what leaves with it."""
        plan, known = self._plans[task.microbatch], self._known[task.microbatch]
        segment = plan.segmentation.segments[task.segment]
        inputs = [self._take(task.microbatch, value) for value in plan.feeds[task.segment]]
        if not self._aborted:
            try:
                outputs = parts.call(plan.functions[task.segment], inputs)
            except Exception as error:
                self._failed(self._pass(task), error)
            else:
                known.update(zip(segment.outputs, outputs or (), strict=True))
        for message in plan.sends.get(task.segment, ()):
            tensors = [self._take(task.microbatch, value) for value in message.values]
            number = self._offsets[task.microbatch] + message.number
            specs = [plan.specs[value] for value in message.values]
            if not self._aborted:
                try:
                    arrays = [parts.array_of(each) for each in tensors]
                    self._transport.send(message.destination, number, specs, arrays)
                except Exception as error:
                    self._failed(self._pass(task), error)
            if self._aborted:
                self._transport.abort(message.destination, number, specs)

    def _post_receive(self) -> None:
        """Post the receive of the next message. A rank that has aborted the step sends it, too."""
        found = next(self._incoming, None)
        if found is not None:
            microbatch, message = found
            specs = [self._plans[microbatch].specs[each] for each in message.values]
            number = self._offsets[microbatch] + message.number
            self._transport.post_receive(message.source.place, number, specs)

    def _failed(self, when: str, error: Exception) -> None:
        """Abort the step because of an error on this rank, unless the world has ended, so that nobody waits."""
        if isinstance(error, VerdictError):
            raise error
        if not self._aborted:
            self._when, self._failure, self._aborted = when, error, True

    def _pass(self, task: SegmentTask) -> str:
        plan = self._plans[task.microbatch]
        backward = plan.segmentation.is_backward(task.segment)
        return (
            f"in the {'backward' if backward else 'forward'} pass of microbatch {task.microbatch}"
        )

    def _take(self, microbatch: int, value: Value) -> Any:
        """A tensor for one of its uses here: received if it is another rank's, copied if it is a constant.

        None once the step is aborted. After its last use the tensor is not kept.
        """
        plan, known = self._plans[microbatch], self._known[microbatch]
        message = plan.receives.get(value)
        if message is not None and (number := self._offsets[microbatch] + message.number) not in (
            self._received
        ):
            self._received.add(number)
            self._post_receive()
            specs = [plan.specs[each] for each in message.values]
            try:
                arrays = self._transport.receive(message.source.place, number, specs)
                if arrays is None:
                    self._aborted = True
                elif not self._aborted:
                    known.update(zip(message.values, map(parts.tensor_of, arrays), strict=True))
            except Exception as error:
                self._failed(f"with a message of microbatch {microbatch}", error)
        if value not in known and not self._aborted:
            try:
                known[value] = tf.constant(tf.get_static_value(plan.graph.tensor(value)))
            except Exception as error:
                self._failed(f"with a constant of microbatch {microbatch}", error)
        if self._aborted:
            return None
        self._left[microbatch][value] -= 1
        return known[value] if self._left[microbatch][value] else known.pop(value)


def agree_to_run(
    transport: SegmentTransport,
    kind: int,
    numbers: Sequence[int],
    failure: Exception | None = None,
) -> None:
    """Compare what the ranks of the pipeline are about to run, so that none waits for what never comes.

    ``failure`` is the error of a rank that cannot run: it returns, and the others raise StepAbortedError.

    Raises PartitionError, on every rank, if the ranks are about to run different steps.
    """
    digest = hash(tuple(numbers)) & (2**62 - 1)
    rows = transport.pipeline.agree(kind, digest)
    _raise_remote_failure(transport, transport.pipeline, rows, failure, BEFORE)
    if failure is not None or len({tuple(row) for row in rows}) == 1:
        return
    if {row[0] for row in rows} == {PLANNED}:
        return  # the caller compares the descriptions line by line
    kinds = ", ".join(
        f"rank {rank} {'traces a new step' if row[0] == PLANNED else 'runs a step traced before'}"
        for rank, row in enumerate(rows)
    )
    raise PartitionError(
        f"smp.step: the ranks of the pipeline run different steps ({kinds}). Every rank must call the same step "
        "with tensors of the same shapes and dtypes and with equal Python values"
    )


def agree_on_end(
    transport: SegmentTransport, members: Members, failure: Exception | None, when: str = BEFORE
) -> None:
    """Agree that a step, or the way to it, has ended well on every rank of ``members``.

    A rank that failed raises its own error, the others StepAbortedError, which names the rank, its error and ``when``.
    """
    rows = members.agree(DONE if failure is None else FAILED)
    _raise_remote_failure(transport, members, rows, failure, when)
    if failure is not None:
        raise failure


def _raise_remote_failure(
    transport: SegmentTransport,
    members: Members,
    rows: Sequence[Sequence[int]],
    failure: Exception | None,
    when: str,
) -> None:
    """If a member has failed, give its error to the others, which raise StepAbortedError."""
    failed = [at for at, row in enumerate(rows) if row[0] == FAILED]
    if not failed:
        return
    sentence = ""
    if failure is not None:
        where = f"pp rank {transport.position} (world rank {transport.rank})"
        sentence = f"smp.step was aborted {when}, because {where} raised {error_text(failure)}"
    texts = members.texts(sentence)
    if failure is None:
        error = StepAbortedError(texts[failed[0]])
        error.raised_by = members.ranks[failed[0]]
        raise error


@contextlib.contextmanager
def notify_replicas(session: TensorFlowSession) -> Iterator[None]:
    """Send an error inside to the ranks of other pipelines; all ranks of this one raise it.

    Before the first step all ranks wait for each other once; then those of one failure domain, after each step.
    """
    try:
        yield
    except VerdictError:
        raise
    except Exception as error:
        transport = session.transport
        members = transport.failure_domain if session.partitioned else transport.world
        if members is not transport.pipeline:
            with tf.init_scope():
                # A remote error goes no further: the rank that failed has sent its own to all.
                agree_on_end(
                    transport, members, None if isinstance(error, StepAbortedError) else error
                )
        raise
