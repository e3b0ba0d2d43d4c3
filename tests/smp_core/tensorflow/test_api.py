"""The parts of the API that only TensorFlow has, on simulated ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smp_core.tensorflow as smp
from smp_core.errors import ArgumentTypeError, CheckpointError
from smp_core.tensorflow import auto
from smp_core.tensorflow import session as sessions
from smp_core.tensorflow import tensorflow_parts as parts

MANUAL = {
    "pipeline_parallel_degree": 2,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
}
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def name(variable: Any) -> list[str]:
    """Layer and name of a variable, of Keras 3 or 2."""
    return str(getattr(variable, "path", variable.name)).partition(":")[0].split("/")[-2:]


class Net(smp.DistributedModel):
    """Two layers on two partitions, and a count of the calls of each on this rank."""

    def __init__(self, called: list[int] | None = None) -> None:
        super().__init__()
        self.note = None if called is None else called.append  # a list would be copied by Keras
        self.one = tf.keras.layers.Dense(3, kernel_initializer="ones", name="one")
        self.two = tf.keras.layers.Dense(2, kernel_initializer="ones", name="two")

    def call(self, x: Any) -> Any:
        x = self.counted(0, self.one(x))
        with smp.partition(1):
            return self.counted(1, self.two(x))

    def counted(self, place: int, x: Any) -> Any:
        if self.note is None:
            return x

        def count(array: Any) -> Any:
            self.note(place)
            return array

        return tf.ensure_shape(tf.numpy_function(count, [x], tf.float32), x.shape)


def counted_steps() -> list[int]:
    called: list[int] = []
    outside: list[int] = []
    model = Net(called)

    @smp.step
    def step(x: Any) -> Any:
        outputs = model(x)
        return tf.ensure_shape(
            tf.numpy_function(lambda each: outside.append(2) or each, [outputs], tf.float32),
            outputs.shape,
        )

    step(tf.constant(X))
    step(tf.constant(X))
    return called + outside


def test_an_operation_of_the_model_runs_on_one_rank_and_others_on_all(smp_world: Any) -> None:
    assert smp_world.run(counted_steps, ranks=2, config=MANUAL) == [
        [0] * 4 + [2] * 4,
        [1] * 4 + [2] * 4,
    ]


def results() -> dict[str, Any]:
    model = Net()

    @smp.step(non_split_inputs=["factor"])
    def step(x: Any, factor: Any) -> Any:
        outputs = model(x) * factor
        return {"outputs": outputs, "sum": tf.reduce_sum(outputs), "nothing": None}

    made = step(tf.constant(X), factor=tf.constant(0.5))
    var = tf.Variable(0.0)
    assert made["sum"].accumulate(var=var) is var
    return {
        "merge": made["outputs"].merge().numpy(),
        "concat": made["outputs"].concat().numpy(),
        "stack": made["outputs"].stack().numpy(),
        "outputs": [each.numpy() for each in made["outputs"].outputs],
        "mean": made["sum"].reduce_mean().numpy(),
        "sum": made["sum"].reduce_sum().numpy(),
        "var": var.numpy(),
        "accumulate": [
            made["sum"].accumulate(method).numpy()
            for method in ("variable", "add_n", "accumulate_n")
        ],
        "nothing": made["nothing"],
    }


def test_results_are_on_all_ranks(smp_world: Any) -> None:
    # Kernels of ones: each output is 3 times the sum of the row.
    outputs = np.repeat(X.sum(1, keepdims=True) * 3 * 0.5, 2, axis=1)
    first, second = outputs[:2].sum(), outputs[2:].sum()
    for found in smp_world.run(results, ranks=2, config=MANUAL):
        np.testing.assert_array_equal(found["merge"], outputs)
        np.testing.assert_array_equal(found["concat"], outputs)
        np.testing.assert_array_equal(found["stack"], outputs.reshape(2, 2, 2))
        np.testing.assert_array_equal(np.concatenate(found["outputs"]), outputs)
        assert found["sum"] == first + second
        assert found["mean"] == found["var"] == (first + second) / 2
        assert found["accumulate"] == [found["mean"]] * 3
        assert found["nothing"] == [None, None]


def hooks() -> list[Any]:
    events: list[Any] = []
    model = Net()

    @smp.register_post_partition_hook
    def hook() -> None:
        assert tf.executing_eagerly()
        events.append(list(map(name, model.trainable_variables)))

    @smp.step
    def step(x: Any) -> Any:
        return model(x)

    step(tf.constant(X))
    step(tf.constant(X[:2]))
    return events


def test_the_hook_runs_once_after_the_partition(smp_world: Any) -> None:
    first, second = smp_world.run(hooks, ranks=2, config=MANUAL)
    assert first == [[["one", "kernel"], ["one", "bias"]]]
    assert second == [[["two", "kernel"], ["two", "bias"]]]


def freed() -> list[tuple[int, ...]]:
    model = Net()
    smp.step(lambda x: model(x))(tf.constant(X))
    return [tuple(each.numpy().shape) for each in model.all_variables()]


def test_variables_of_other_ranks_are_freed(smp_world: Any) -> None:
    assert smp_world.run(freed, ranks=2, config=MANUAL) == [
        [(3, 3), (3,), (0,), (0,)],
        [(0,), (0,), (3, 2), (2,)],
    ]


class Growing(smp.DistributedModel):
    """A layer on each of two partitions, and another two from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers_made = [
            tf.keras.layers.Dense(2, kernel_initializer="ones", name=f"layer_{at}")
            for at in range(4)
        ]

    def call(self, x: Any, more: bool = False) -> Any:
        x = self.layers_made[0](x)
        with smp.partition(1):
            x = self.layers_made[1](x)
        if more:
            x = self.layers_made[2](x)
            with smp.partition(1):
                x = self.layers_made[3](x)
        return x


def freed_later(outer: bool) -> Any:
    model = Growing()
    few, many = (smp.step(functools.partial(model, more=more)) for more in (False, True))
    seen = []
    for step in (few, many, many):
        outputs = (tf.function(step) if outer else step)(tf.constant(X))
        seen.append(
            [float(tf.reduce_sum(each)) for each in outputs.outputs]
            + [each.numpy().size for each in model.all_variables()]
        )
    return seen


@pytest.mark.parametrize("outer", [False, True])
def test_variables_of_layers_that_are_built_later_are_freed_too(
    smp_world: Any, outer: bool
) -> None:
    first, second = smp_world.run(freed_later, outer, ranks=2, config=MANUAL)
    few, many = ([by * float(each.sum()) for each in (X[:2], X[2:])] for by in (4.0, 16.0))
    assert first == [[*few, 6, 2, 0, 0], *[[*many, 6, 2, 0, 0, 4, 2, 0, 0]] * 2]
    assert second == [[*few, 0, 0, 4, 2], *[[*many, 0, 0, 4, 2, 0, 0, 4, 2]] * 2]


def traces() -> int:
    count = [0]
    model = Net()

    @smp.step
    def step(x: Any, flag: Any) -> Any:
        count[0] += 1
        return model(x) + (1.0 if flag else 2.0)

    found = []
    for batch, flag in ((X, True), (X * 2, True), (X[:2], True), (X, True), (X, False), (X, False)):
        before = count[0]
        step(tf.constant(batch), flag)
        found.append(count[0] > before)
    return found


def test_a_step_is_traced_again_for_a_shape_and_a_value_and_only_then(smp_world: Any) -> None:
    wanted = [True, False, True, False, True, False]
    assert smp_world.run(traces, ranks=2, config=MANUAL) == [wanted, wanted]


def averaged() -> Any:
    model = Net()
    optimizer = tf.keras.optimizers.SGD(1.0)

    @smp.step
    def step(x: Any) -> Any:
        return optimizer.get_gradients(tf.reduce_mean(model(x)), model.trainable_variables)

    batch = X * (smp.dp_rank() + 1)
    gradients = step(tf.constant(batch))
    return [each.reduce_mean().numpy() for each in gradients]


@pytest.mark.parametrize("horovod", [True, False])
def test_gradients_are_averaged_over_replicas(smp_world: Any, horovod: bool) -> None:
    found = smp_world.run(averaged, ranks=4, config={**MANUAL, "horovod": horovod})
    alone = smp_world.run(averaged, ranks=2, config=MANUAL)  # of the batch of the first replica
    # All is linear in the batch: the second replica has twice the gradient of a kernel, and the same of a bias.
    for rank, own in enumerate(found):
        replica, place = rank // 2, rank % 2
        for got, base in zip(own, alone[place], strict=True):
            scale = (1.5 if horovod else replica + 1.0) if base.ndim == 2 else 1.0
            np.testing.assert_array_equal(got, base * scale)


def automatic() -> list[str]:
    model = Net()
    smp.step(lambda x: model(x))(tf.constant(X))
    return [name(each)[0] for each in model.trainable_variables]


def test_automatic_partition_gives_each_rank_layers_in_their_order(smp_world: Any) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    assert smp_world.run(automatic, ranks=2, config=config) == [["one", "one"], ["two", "two"]]


class Held(smp.DistributedModel):
    """A whole network in one attribute."""

    def __init__(self) -> None:
        super().__init__()
        layers = tf.keras.layers
        self.all = tf.keras.Sequential(
            [layers.Dense(3), layers.Activation("relu"), layers.Dense(3), layers.Dense(2)]
        )

    def call(self, x: Any) -> Any:
        return self.all(x)


def trained_automatically(kind: str, others: int = 0) -> list[int]:
    """The sizes of this rank's variables after two steps of a script that knows nothing of partitions.

    ``others`` are the layers that rank 1 has made before, by which Keras counts on in names.
    """
    for _ in range(others * smp.rank()):
        tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model = Held() if kind == "held" else OneLayer()
    optimizer = tf.keras.optimizers.SGD(0.5)

    @smp.step
    def step(x: Any) -> Any:
        return optimizer.get_gradients(tf.reduce_sum(model(x)), model.trainable_variables)

    for _ in range(2):
        gradients = [each.accumulate() for each in step(tf.constant(X))]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert int(optimizer.iterations) == 2
    return [each.numpy().size for each in model.trainable_variables]


@pytest.mark.parametrize("others", [0, 9])
def test_a_network_in_one_attribute_is_split(smp_world: Any, others: int) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    found = smp_world.run(trained_automatically, "held", others, ranks=2, config=config)
    assert found == [[9, 3], [9, 3, 6, 2]]


class OneLayer(smp.DistributedModel):
    """A model that no partition can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.one = tf.keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.one(x)


def test_a_rank_without_variables_applies_no_gradients(smp_world: Any) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    found = smp_world.run(trained_automatically, "one layer", ranks=2, config=config)
    assert sorted(found) == [[], [9, 3]]


def test_the_first_rank_decides_the_automatic_partition(
    smp_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = auto.decide

    def differing(*args: Any) -> dict[str, int]:
        return dict.fromkeys(decide(*args), 1) if smp.rank() else decide(*args)

    monkeypatch.setattr(auto, "decide", differing)
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    assert smp_world.run(automatic, ranks=2, config=config) == [["one", "one"], ["two", "two"]]


@pytest.mark.parametrize(
    ("costs", "count", "trains", "bounds"),
    [
        ([1, 1, 1, 1], 2, None, [(0, 2), (2, 4)]),
        ([5, 1, 1, 1], 2, None, [(0, 1), (1, 4)]),
        ([1, 1, 1, 9], 2, None, [(0, 3), (3, 4)]),
        ([4], 3, None, None),
        ([], 2, None, [(0, 0), (0, 0)]),
        # The expensive one trains nothing: alone it would leave a rank without variables.
        ([1, 1, 9], 2, [True, True, False], [(0, 1), (1, 3)]),
        ([9, 1, 1], 2, [False, True, True], [(0, 2), (2, 3)]),
        ([9, 1, 1], 3, [False, True, True], [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_the_split_is_balanced(
    costs: list[int], count: int, trains: list[bool] | None, bounds: Any
) -> None:
    found = auto.split(costs, count, trains)
    assert len(found) == count
    assert [at for start, end in found for at in range(start, end)] == list(range(len(costs)))
    assert bounds is None or found == bounds


def sessions_by_rank() -> int:
    Net()
    return sessions.current("test").partition


def test_each_simulated_rank_has_a_session(smp_world: Any) -> None:
    assert smp_world.run(sessions_by_rank, ranks=2, config=MANUAL) == [0, 1]


class Extra(smp.DistributedModel):
    """Two layers on two partitions, and three variables beside them: one is used outside of ``call``, one never, and
    one when ``late`` is true.
    """

    def __init__(self) -> None:
        super().__init__()
        self.idle = self.add_weight(shape=(3,), initializer="ones", name="idle")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.later = self.add_weight(shape=(3,), initializer="ones", name="later")
        self.one = tf.keras.layers.Dense(3, kernel_initializer="ones", name="one")
        self.two = tf.keras.layers.Dense(2, kernel_initializer="ones", name="two")

    def call(self, x: Any, late: bool = False) -> Any:
        x = self.one(x)
        with smp.partition(1):
            return self.two(x * self.later if late else x)


def beside_the_call(late: bool) -> Any:
    model = Extra()
    optimizer = tf.keras.optimizers.SGD(1.0)

    @smp.step
    def step(x: Any, late: bool) -> Any:
        loss = tf.reduce_sum(model(x, late=late)) * model.scale
        loss += tf.nn.l2_loss(parts.inner(model.two.kernel))
        found = optimizer.get_gradients(loss, model.trainable_variables)
        return loss, found

    step(tf.constant(X), False)
    loss, gradients = step(tf.constant(X), late)
    return loss.reduce_sum().numpy(), {
        name(variable)[-1] if len(variable.shape) < 2 else name(variable)[-2]: (
            None if isinstance(each, list) else each.reduce_sum().numpy().tolist()
        )
        for each, variable in zip(gradients, model.trainable_variables, strict=True)
        if name(variable)[-1] != "bias"
    }


@pytest.mark.parametrize("late", [False, True])
def test_variables_that_the_call_does_not_use_keep_the_gradients_in_line(
    smp_world: Any, late: bool
) -> None:
    (loss, first), (other_loss, second) = smp_world.run(
        beside_the_call, late, ranks=2, config=MANUAL
    )
    total = float(X.sum()) * 3 * 2
    # The operations outside run on all ranks, those that read a variable of one rank among them.
    assert loss == other_loss == total + 2 * 3.0
    assert first["idle"] is None
    assert first["scale"] == total
    assert (first["later"] is not None) == late
    assert first["one"] == np.repeat(X.sum(0)[:, None] * 2, 3, axis=1).tolist()
    rows = float(X.sum())
    assert second == {"two": np.full((3, 2), rows + 2.0).tolist()}
    if late:
        assert first["later"] == [rows * 2] * 3


def checkpoint_files(folder: str) -> list[str]:
    own = Path(folder, str(smp.rank()))
    (own / "mp_rank_1").mkdir(parents=True)
    if smp.rank():
        (own / "mp_rank_1" / "ckpt-1.index").write_bytes(b"of rank 1")
        smp.utils.send_checkpoint_files(own, 0)
    else:
        smp.utils.receive_checkpoint_files(own, 1)
    return [
        f"{path.relative_to(own)}: {path.read_text()}" for path in own.rglob("*") if path.is_file()
    ]


def test_files_of_a_checkpoint_go_to_another_rank(smp_world: Any, tmp_path: Path) -> None:
    found = smp_world.run(checkpoint_files, str(tmp_path), ranks=2, config=MANUAL)
    assert found == [["mp_rank_1/ckpt-1.index: of rank 1"]] * 2


def outside_of_the_folder(folder: str) -> None:
    if smp.rank():
        smp.send({"../other": b"", "one": b""}, 0, smp.RankType.WORLD_RANK)
    else:
        smp.utils.receive_checkpoint_files(folder, 1)


def test_a_file_outside_of_the_folder_is_refused(smp_world: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1 sent a file '\.\./other'"):
        smp_world.run(outside_of_the_folder, str(tmp_path / "own"), ranks=2, config=MANUAL)
    assert not list(tmp_path.iterdir())


def no_folder(folder: str) -> None:
    if smp.rank():
        smp.utils.send_checkpoint_files(folder, 0)


def test_a_folder_that_is_not_there_is_told(smp_world: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        smp_world.run(no_folder, str(tmp_path / "none"), ranks=2, config=MANUAL)


class Doubled:
    """An argument that says itself what each microbatch gets."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
        assert axis == 0
        return tf.constant(np.split(self.rows, num_mb)[mb] * 2)


def sliced() -> Any:
    model = Net()
    step = smp.step(lambda x: model(x))
    return step(Doubled(X)).concat().numpy()


def test_an_object_gives_the_part_of_each_microbatch(smp_world: Any) -> None:
    wanted = np.repeat(X.sum(1, keepdims=True) * 3 * 2, 2, axis=1)
    for found in smp_world.run(sliced, ranks=2, config=MANUAL):
        np.testing.assert_array_equal(found, wanted)


def traced_for_any_batch() -> list[Any]:
    model, traces = Net(), list[int]()

    @smp.step(reduce_retracing=True)
    def step(x: Any) -> Any:
        traces.append(1)
        return model(x)

    found = []
    for rows in (4, 6, 8, 10):
        outputs = step(tf.ones((rows, 3)))
        found.append((len(traces), [each.shape[0] for each in outputs.outputs]))
    return found


def test_arguments_of_tf_function_reach_it(smp_world: Any) -> None:
    # The second batch shows that the size varies; from then on one trace is of any size, which leaves a partition, too.
    for found in smp_world.run(traced_for_any_batch, ranks=2, config=MANUAL):
        counts = [count for count, _ in found]
        assert counts[1] > counts[0]
        assert counts[1:] == [counts[1]] * 3
        assert [sizes for _, sizes in found] == [[rows // 2] * 2 for rows in (4, 6, 8, 10)]


def other_names() -> list[Any]:
    model = Net()
    model.profile(tf.constant(X))
    with pytest.raises(ArgumentTypeError, match="inputs must be tensors"):
        model.profile("images")
    metric = tf.keras.metrics.Mean()
    metric.update_state(3.0)
    metric.reset_states()
    optimizer = tf.keras.optimizers.SGD(0.5)
    smp.core.barrier()
    return [float(metric.result()), len(optimizer.variables()), smp.core.initialized]


def test_names_that_scripts_use_besides(smp_world: Any) -> None:
    optimizer = tf.keras.optimizers.SGD(0.5)
    wanted = [0.0, len(optimizer.variables), True]
    assert smp_world.run(other_names, ranks=2, config=MANUAL) == [wanted] * 2
    assert not smp.core.initialized
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = smp.core.other
