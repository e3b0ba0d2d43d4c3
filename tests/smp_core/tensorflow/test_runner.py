"""One step on one rank: what is made once and used by every later step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.errors import DeadlockError, LeakError
from smp_core.tensorflow import runner
from smp_core.tensorflow import session as sessions
from smp_core.tensorflow.tasks import SegmentTask
from smp_core.tensorflow.transport import Spec

CONFIG = {
    "pipeline_parallel_degree": 2,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
}


class Net(smp.DistributedModel):
    """A layer on each of two partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (tf.keras.layers.Dense(2, kernel_initializer="ones") for _ in range(2))

    def call(self, x: Any) -> Any:
        x = self.one(x)
        with smp.partition(smp.pp_size() - 1):
            return self.two(x)


def steps(sizes: list[int]) -> list[float]:
    model = Net()
    step = smp.step(lambda x: tf.reduce_sum(model(x)))
    return [float(step(tf.ones((size, 2))).reduce_sum()) for size in sizes]


def broken(what: str) -> list[str]:
    """The loss of each of three steps, or its error; rank 0 cannot send in the second, or rank 1 use what it got."""
    model = Net()
    step = smp.step(lambda x: tf.reduce_sum(model(x)))
    transport = sessions.current("test").transport
    send, receive = transport.send, transport.receive
    bad = False

    def sending(*args: Any) -> None:
        if bad and what == "send" and smp.rank() == 0:
            raise MemoryError("on purpose")
        send(*args)

    def receiving(*args: Any) -> Any:
        arrays = receive(*args)
        return [object()] if bad and what == "receive" and smp.rank() == 1 else arrays

    transport.send, transport.receive = sending, receiving
    found = []
    for number in range(3):
        bad = number == 1
        try:
            found.append(str(float(step(tf.ones((4, 2))).reduce_sum())))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize(
    ("what", "failed", "kind", "when"),
    [
        ("send", 0, "MemoryError", "in the forward pass"),
        ("receive", 1, "ValueError", "with a message"),
    ],
)
def test_a_message_that_cannot_be_made_or_read_ends_the_step_on_every_rank(
    smp_world: Any, what: str, failed: int, kind: str, when: str
) -> None:
    found = smp_world.run(broken, what, ranks=2, config=CONFIG)
    for rank, (first, second, third) in enumerate(found):
        assert first == third == "32.0"
        if rank == failed:
            assert second.startswith(f"{kind}: ")
        else:
            own = found[failed][1]
            where = f"pp rank {failed} (world rank {failed})"
            assert second == (
                f"StepAbortedError: smp.step was aborted {when} of microbatch 0, because {where} raised {own}"
            )


def session_and_plan() -> tuple[sessions.TensorFlowSession, Any]:
    """This rank's session after one step, and the plan of the step."""
    model = Net()
    step = smp.step(lambda x: tf.reduce_sum(model(x)))
    step(tf.ones((4, 2)))
    session = sessions.current("test")
    (state,) = session.functions.values()
    (plan,) = state._plans.values()
    return session, plan


def constant_without_a_value() -> None:
    session, plan = session_and_plan()
    one = runner._StepRun(session.transport, [plan], [[tf.ones((2, 2))]], [])
    assert one._take(0, plan.leaves[0]) is None
    with pytest.raises(ValueError, match="None"):
        one.run([])
    assert one._when == "with a constant of microbatch 0"


def test_a_constant_that_cannot_be_made_ends_the_step(smp_world: Any) -> None:
    smp_world.run(
        constant_without_a_value, ranks=1, config={**CONFIG, "pipeline_parallel_degree": 1}
    )


def ended_world() -> None:
    session, plan = session_and_plan()

    def ends(*args: Any) -> None:
        raise DeadlockError("the world has ended")

    first = min(plan.functions)
    plan.functions[first] = ends
    one = runner._StepRun(session.transport, [plan], [[tf.ones((2, 2))]], [])
    with pytest.raises(DeadlockError, match="the world has ended"):
        one._run(SegmentTask(0, first))


def test_after_a_verdict_nobody_is_told(smp_world: Any) -> None:
    config = {**CONFIG, "pipeline_parallel_degree": 1}
    smp_world.run(ended_world, ranks=1, config=config)


def test_the_order_of_a_step_is_made_once_for_each_of_its_plans(
    smp_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    orders = runner.orders
    monkeypatch.setattr(runner, "orders", lambda *args: made.append(1) or orders(*args))
    found = smp_world.run(steps, [4, 4, 6, 4, 6], ranks=2, config=CONFIG)
    assert found == [[8.0 * size for size in (4, 4, 6, 4, 6)]] * 2
    assert len(made) == 2 * 2  # two ranks, two sizes


class Wide(smp.DistributedModel):
    """A layer whose variables have their own dtype."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.one = tf.keras.layers.Dense(2, kernel_initializer="ones", dtype=dtype)

    def call(self, x: Any) -> Any:
        return tf.cast(self.one(x), tf.float32)


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is the only rank, so that a function around a step is traced."""
    smp.init({**CONFIG, "pipeline_parallel_degree": 1, "microbatches": 4})
    yield
    smp.shutdown()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("kernel", "bias"),
    [("sum", "sum"), ("outputs", "sum"), ("sum", "nothing"), ("both", "outputs")],
)
def test_a_step_in_a_function_returns_what_the_function_asks_for(
    dtype: str, kernel: str, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = Wide(dtype), tf.keras.optimizers.SGD(0.5)
    x = tf.constant(np.random.default_rng(0).standard_normal((12, 3)), tf.float32)
    returned: list[list[int]] = []
    execute = runner._executed

    def noted(*args: Any) -> Any:
        results, totals = execute(*args)
        returned.append([len(each) for each in results] + [len(totals)])
        return results, totals

    @smp.step
    def step(x: Any) -> Any:
        return optimizer.get_gradients(tf.reduce_mean(model(x) ** 2), model.trainable_variables)

    def asked(output: Any, what: str) -> list[Any]:
        wanted = [output.accumulate(), output.reduce_sum()] if what in ("sum", "both") else []
        return wanted + (output.outputs if what in ("outputs", "both") else [])

    def train(x: Any) -> Any:
        gradients = step(x)
        return [asked(each, what) for each, what in zip(gradients, (kernel, bias), strict=True)]

    wanted = train(x)  # eagerly: each microbatch's gradients, then their sums
    monkeypatch.setattr(runner, "_executed", noted)
    found = tf.function(train)(x)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    parts, sums = (
        sum(what in words for what in (kernel, bias))
        for words in (("outputs", "both"), ("sum", "both"))
    )
    assert returned == [[parts] * 4 + [sums]]


def one_step_less() -> None:
    model = Net()
    step = smp.step(lambda x: tf.reduce_sum(model(x)))
    for _ in range(2 - smp.rank()):
        step(tf.ones((4, 2)))


def test_a_rank_that_skips_a_step_is_a_deadlock(smp_world: Any) -> None:
    words = r"(?s)rank 0 waits in all_gather_single.*for rank 1.* in one_step_less: .*rank 1 has returned"
    with pytest.raises(DeadlockError, match=words):
        smp_world.run(one_step_less, ranks=2, config=CONFIG)


def message_too_many() -> None:
    model = Net()
    smp.step(lambda x: tf.reduce_sum(model(x)))(tf.ones((4, 2)))
    if smp.rank() == 0:
        array = np.ones(3, np.float32)
        transport = sessions.current("test").transport
        transport.send(1, 99, [Spec(np.float32, (3,))], [array])


def test_a_message_that_nobody_receives_is_a_leak(smp_world: Any) -> None:
    with pytest.raises(LeakError, match=r"(?s)rank 0.*13.*in message_too_many"):
        smp_world.run(message_too_many, ranks=2, config=CONFIG)


def sent_bytes(training: bool) -> list[tuple[int, int]]:
    """The destination and the bytes of each message of a step."""
    model, optimizer = Net(), tf.keras.optimizers.SGD(0.5)

    @smp.step
    def step(x: Any) -> Any:
        loss = tf.reduce_sum(model(x))
        return loss, optimizer.get_gradients(loss, model.trainable_variables) if training else None

    transport, sent = sessions.current("test").transport, []
    post = transport._post

    def posted(to: int, tag: int, buffer: Any) -> None:
        sent.append((to, len(buffer)))
        post(to, tag, buffer)

    transport._post = posted
    step(tf.ones((6, 2)))
    return sent


@pytest.mark.parametrize("training", [False, True])
def test_a_tensor_crosses_once_for_each_microbatch(smp_world: Any, training: bool) -> None:
    # Of three rows of two floats: there the layer's output, back the model's and the gradient of the layer's output.
    # The loss and its gradient are computed on every rank. Each message ends with a byte.
    size = 3 * 2 * 4
    first, second = smp_world.run(sent_bytes, training, ranks=2, config=CONFIG)
    assert first == [(1, size + 1)] * 2
    assert {to for to, _ in second} == {0}
    assert sum(count - 1 for _, count in second) == 2 * (size * 2 if training else size)
