"""A step of a Keras model over a pipeline of two ranks, beside the unpartitioned step in one process.

The model has four layers of equal width. Each rank has one thread for operations. The unpartitioned step has as many
threads as there are ranks, or one; so has the step whose layers ``tf.device`` places on two devices of one process.
Steps of the ranks and steps of the unpartitioned model take turns, as do the two with more threads in a process of
their own. All are checked to have the same losses first.

Memory is that of a wider model, in processes of its own: a rank's variables with their slots, as counted, beside what
the process holds more than before the model was made. There TF_ENABLE_ONEDNN_OPTS=0 has TensorFlow take memory from the
system and give it back; otherwise its own allocator keeps the peak.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, median, seconds

RANKS, LAYERS, WIDTH, MICROBATCHES = 2, 4, 1024, 4
BATCHES = (256, 1024)  # 64 and 256 rows in a microbatch: of 64, a product takes longer for each row
WIDE = 4096  # of the model whose memory is measured
WARM, TIMED = 3, 15  # steps


def configure(threads: int) -> Any:
    """TensorFlow, with so many threads for one operation; all before its first operation."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(RANKS + 1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * RANKS
    )
    return tf


def layers(tf: Any, width: int) -> list[Any]:
    """The same layers everywhere."""
    start = tf.keras.initializers.GlorotUniform
    return [
        tf.keras.layers.Dense(width, activation="tanh", kernel_initializer=start(seed=seed))
        for seed in range(LAYERS)
    ]


def data(tf: Any, width: int, batch: int) -> tuple[Any, Any]:
    """Inputs and targets."""
    random = tf.random.Generator.from_seed(0)
    return random.normal((batch, width)), random.normal((batch, width))


def partitioned(tf: Any, width: int) -> Callable[[Any, Any], Any]:
    """The step on this rank."""
    import smp_core.tensorflow as smp

    smp.shutdown()  # of a model that was before
    smp.init(
        {
            "pipeline_parallel_degree": RANKS,
            "microbatches": MICROBATCHES,
            "auto_partition": False,
            "default_partition": 0,
        }
    )

    class Model(smp.DistributedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = layers(tf, width)

        def call(self, x: Any) -> Any:
            for at, each in enumerate(self.parts):
                with smp.partition(at * RANKS // LAYERS):
                    x = each(x)
            return x

    model, optimizer = Model(), tf.keras.optimizers.Adam()

    @smp.step  # type: ignore[untyped-decorator]
    def gradients_of(x: Any, y: Any) -> Any:
        loss = tf.reduce_mean((model(x) - y) ** 2)
        return loss, optimizer.get_gradients(loss, model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        loss, gradients = gradients_of(x, y)
        mean = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    step.held = lambda: nbytes([*model.variables, *optimizer.variables])
    return step


def unpartitioned(tf: Any, width: int, placed: bool = False) -> Callable[[Any, Any], Any]:
    """The step of the whole model; if ``placed``, each layer is on the device of its partition."""

    def device(at: int) -> Any:
        return tf.device(f"/CPU:{at * RANKS // LAYERS}" if placed else "/CPU:0")

    class Model(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = layers(tf, width)
            for at, each in enumerate(self.parts):
                with device(at):
                    each.build((None, width))

        def call(self, x: Any) -> Any:
            for at, each in enumerate(self.parts):
                with device(at):
                    x = each(x)
            return x

    model, optimizer = Model(), tf.keras.optimizers.Adam()

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    step.held = lambda: nbytes([*model.variables, *optimizer.variables])
    return step


def nbytes(variables: list[Any]) -> int:
    """The bytes of variables."""
    return sum(each.numpy().nbytes for each in variables)


def job(path: str) -> None:
    """The time of a step: the work of each rank."""
    tf = configure(1)
    import smp_core.tensorflow as smp

    ours = partitioned(tf, WIDTH)
    theirs = unpartitioned(tf, WIDTH) if smp.rank() == 0 else lambda x, y: None
    found: dict[str, list[float]] = {}
    for batch in BATCHES:
        x, y = data(tf, WIDTH, batch)
        for number in range(WARM + TIMED):
            for name, step in (("partitioned", ours), ("unpartitioned", theirs)):
                smp.barrier(smp.WORLD)
                took = max(smp.allgather(seconds(lambda: _run(step, x, y)), smp.WORLD))  # noqa: B023
                if number >= WARM:
                    found.setdefault(f"{name} {batch}", []).append(took)
        losses = float(ours(x, y)), theirs(x, y)
        if smp.rank() == 0:
            check(losses[0], float(losses[1]))
    if smp.rank() == 0:
        Path(path).write_text(json.dumps(found))


def alone(path: str) -> None:
    """The time of a step of the unpartitioned model with as many threads as there are ranks, whole and placed."""
    tf = configure(RANKS)
    steps = {"threads": unpartitioned(tf, WIDTH), "placed": unpartitioned(tf, WIDTH, placed=True)}
    found: dict[str, list[float]] = {}
    for batch in BATCHES:
        x, y = data(tf, WIDTH, batch)
        for number in range(WARM + TIMED):
            for name, step in steps.items():
                took = seconds(lambda: _run(step, x, y))  # noqa: B023
                if number >= WARM:
                    found.setdefault(f"{name} {batch}", []).append(took)
        check(*(float(each(x, y)) for each in steps.values()))
    Path(path).write_text(json.dumps(found))


def _run(step: Callable[[Any, Any], Any], x: Any, y: Any) -> None:
    loss = step(x, y)
    if loss is not None:
        float(loss)  # the step has ended


def check(one: float, other: float) -> None:
    """Check that two losses are equal, up to the order of sums."""
    assert abs(one - other) <= 1e-3 * abs(other), (one, other)


def memory(path: str, whole: bool) -> None:
    """The memory of a process with a part of the wide model, or with all of it."""
    tf = configure(1)
    x, y = data(tf, WIDE, MICROBATCHES)
    if whole:
        ranks = [_memory_of(tf, unpartitioned, x, y)]
    else:
        import smp_core.tensorflow as smp

        ours = _memory_of(tf, partitioned, x, y)
        ranks = smp.allgather(ours, smp.WORLD)
        if smp.rank():
            return
    Path(path).write_text(json.dumps(ranks))


def _memory_of(tf: Any, make: Any, x: Any, y: Any) -> dict[str, int]:
    float(make(tf, 8)(*data(tf, 8, MICROBATCHES)))  # so that the runtime has what it needs
    before = resident("VmRSS")
    step = make(tf, WIDE)
    float(step(x, y))
    first = resident("VmHWM") - before
    for _ in range(3):
        float(step(x, y))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    held = resident("VmRSS") - before
    float(step(x, y))
    peak = resident("VmHWM") - before
    return {"owns": step.held(), "held": held, "peak": peak, "first": first}


def resident(name: str) -> int:
    """A size of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def started(what: str, ranks: int) -> Any:
    """Run a part of the benchmark in processes of its own; what it found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        words = [sys.executable]
        if ranks > 1:
            words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        if what in ("memory", "whole"):
            environment["TF_ENABLE_ONEDNN_OPTS"] = "0"
        subprocess.run(
            [*words, "-m", "benchmarks.tensorflow", what, str(path)],
            check=True,
            env=environment,
            timeout=1800,
        )
        return json.loads(path.read_text())


def measure() -> list[Figure]:
    """Start the jobs, and say what they found; nothing where TensorFlow is not installed."""
    if importlib.util.find_spec("tensorflow") is None:
        print("tensorflow: not installed")
        return []
    return figures(
        {**started("alone", 1), **started("job", RANKS)},
        started("memory", RANKS),
        started("whole", 1)[0],
    )


def figures(
    times: dict[str, list[float]], ranks: list[dict[str, int]], whole: dict[str, int]
) -> list[Figure]:
    """The rows of the table."""

    def row(name: str, key: str, ratio: str = "", budget: str = "") -> Figure:
        found = [1000 * each for each in times[key]]
        return Figure(name, median(found), "ms", (min(found), max(found)), ratio, budget)

    rows = []
    for batch in BATCHES:
        ours = median(times[f"partitioned {batch}"])
        alone, threads, placed = (
            ours / median(times[f"{name} {batch}"])
            for name in ("unpartitioned", "threads", "placed")
        )
        rows += [
            row(f"Keras, batch {batch}: a step, one thread", f"unpartitioned {batch}"),
            row(f"Keras, batch {batch}: a step, {RANKS} threads", f"threads {batch}"),
            row(f"Keras, batch {batch}: layers placed on {RANKS} devices", f"placed {batch}"),
            row(
                f"pipeline of {RANKS} ranks, batch {batch}: a step",
                f"partitioned {batch}",
                f"{alone:.2f} of one thread's, {threads:.2f} of {RANKS} threads', {placed:.2f} of the placed one's",
                f"at most 1.50 of {RANKS} threads'",
            ),
        ]
    mib = 2**20
    most = max(ranks, key=lambda each: each["held"] / each["owns"])
    return [
        *rows,
        Figure("Keras: variables and slots of the wide model", whole["owns"] / mib, "MiB"),
        Figure("Keras: held between steps", whole["held"] / mib, "MiB", None, _of(whole, "held")),
        Figure("Keras: peak of a step", whole["peak"] / mib, "MiB", None, _of(whole, "peak")),
        Figure("a rank: variables and slots that it owns", most["owns"] / mib, "MiB"),
        Figure(
            "a rank: held between steps",
            most["held"] / mib,
            "MiB",
            None,
            _of(most, "held"),
            "at most 1.05 of what it owns",
        ),
        Figure("a rank: peak of a step", most["peak"] / mib, "MiB", None, _of(most, "peak")),
        Figure(
            "a rank: peak of the first step", most["first"] / mib, "MiB", None, _of(most, "first")
        ),
    ]


def _of(found: dict[str, int], name: str) -> str:
    return f"{found[name] / found['owns']:.2f} of what it owns"


if __name__ == "__main__":
    what, found_path = sys.argv[1:]
    if what == "job":
        job(found_path)
    elif what == "alone":
        alone(found_path)
    else:
        memory(found_path, whole=what == "whole")
