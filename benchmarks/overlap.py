"""A data-parallel step on two machines with a slow link, beside its computation alone and its communication alone.

The machines are network namespaces, joined by a link whose rate the kernel limits. Each has one rank, on a core of its
own. A step is forward, backward with AllReduce of gradients, and an update. A slow link is waited for; through shared
memory communication is copying, which needs the cores that compute.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import smp_core.torch as smp
from benchmarks.figures import Figure, median, seconds
from smp_core.transport.smddp.process_group import SmddpProcessGroup
from tests.namespaces import Machines

RANKS = 2
LAYERS, WIDTH, ROWS = 12, 1024, 8192
LINKS = (1000, 250, 100)  # Mbit/s
BUCKET = 4  # MiB: the weights of one layer
WARM, TIMED = 1, 5  # steps
BUDGET = 1.1
#: The data-parallel engines, each with the backend of its process group.
ENGINES = {"ours": "smddp", "torch DDP": "smddp", "torch DDP on Gloo": "gloo"}


Span = tuple[str, float, float]


class Recorder:
    """The present step of an engine: its phases, and the AllReduces of `smddp`, as seconds since the step began.

    ``spans`` are (name, begin, end).
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._futures: list[torch.futures.Future[Any]] = []
        self._start = self._mark = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self.spans, self._futures = [], []
        self._start, self._mark = time.perf_counter(), 0.0

    def finished(self) -> list[Span]:
        """The spans in the order in which they began, once all AllReduces are noted."""
        torch.futures.wait_all(self._futures)
        return sorted(self.spans, key=lambda span: span[1:])

    def phase(self, name: str) -> None:
        """End a phase, which began with the step or where the one before ended."""
        now = time.perf_counter() - self._start
        self.spans.append((name, self._mark, now))
        self._mark = now

    def listen(self) -> None:
        """Note from now on each AllReduce of gradients, from its launch until its result is there."""
        allreduce = SmddpProcessGroup.allreduce

        def noted(group: Any, tensors: list[torch.Tensor], options: Any) -> Any:
            start, spans, launched = self._start, self.spans, time.perf_counter()
            work = allreduce(group, tensors, options)

            def end(_: object) -> None:
                spans.append(("bucket", launched - start, time.perf_counter() - start))

            if tensors[0].numel() >= WIDTH:  # no counts and flags
                self._futures.append(work.get_future().then(end))
            return work

        SmddpProcessGroup.allreduce = noted


def model_of() -> nn.Sequential:
    """A model with the same values on both ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            layer
            for _ in range(LAYERS)
            for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())
        )
    )


def plain(x: torch.Tensor) -> Callable[[], None]:
    """A step of one rank without the other."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def ours(x: torch.Tensor, recorder: Recorder) -> Callable[[], None]:
    """A step of ``smp``, whose groups are those of the world."""
    model = smp.DistributedModel(model_of(), bucket_cap_mb=BUCKET)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))

    @smp.step
    def train_step(model: Any, x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        recorder.phase("forward")
        model.backward(loss)

    def step() -> None:
        recorder.begin()
        optimizer.zero_grad()
        train_step(model, x)
        recorder.phase("backward")
        optimizer.step()
        recorder.phase("update")

    return step


def torchs(x: torch.Tensor, group: dist.ProcessGroup, recorder: Recorder) -> Callable[[], None]:
    """A step of torch's DDP."""
    model = DistributedDataParallel(
        model_of(), process_group=group, bucket_cap_mb=BUCKET, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        recorder.begin()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        recorder.phase("forward")
        loss.backward()
        recorder.phase("backward")
        optimizer.step()
        recorder.phase("update")

    return step


def exchange(group: dist.ProcessGroup) -> Callable[[], None]:
    """The AllReduce of all buckets of a step, launched together."""
    buckets = [torch.ones(WIDTH * WIDTH) for _ in range(LAYERS)]

    def communicate() -> None:
        works = [dist.all_reduce(each, group=group, async_op=True) for each in buckets]
        for work in works:
            assert work is not None
            work.wait()

    return communicate


def job(path: str) -> None:
    """The work of a rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["RANK"])]})
    dist.init_process_group("smddp")
    groups = {"smddp": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    smp.init({"ddp": True})
    torch.manual_seed(dist.get_rank())
    x = torch.randn(ROWS, WIDTH)
    recorder = Recorder()
    recorder.listen()
    runs = {"computation": plain(x), "ours": ours(x, recorder)}
    for backend, group in groups.items():
        runs[f"communication on {backend}"] = exchange(group)
    for name, backend in ENGINES.items():
        if name != "ours":
            runs[name] = torchs(x, groups[backend], recorder)
    times: dict[str, list[float]] = {name: [] for name in runs}
    timelines: dict[str, list[list[Span]]] = {}
    for number in range(WARM + TIMED):
        for name, run in runs.items():
            dist.barrier()
            local = seconds(run)
            gathered = smp.allgather(local, smp.WORLD)
            if number < WARM:
                continue
            times[name].append(max(gathered))
            if ENGINES.get(name) == "smddp":
                timelines.setdefault(name, []).append(recorder.finished())
    if dist.get_rank() == 0:
        timeline = {
            name: spans[times[name].index(statistics.median_low(times[name]))]
            for name, spans in timelines.items()
        }
        Path(path).write_text(json.dumps({"times": times, "timeline": timeline}))
    smp.shutdown()
    dist.destroy_process_group()


def measure_on(rate: int) -> dict[str, Any]:
    """The results of a job on two machines whose link has so many Mbit/s in each direction."""
    machines = Machines()
    environment = os.environ | {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": machines.address,
        "MASTER_PORT": "29513",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    started: list[subprocess.Popen[bytes]] = []
    try:
        machines.make()
        machines.limit(rate)
        path = machines.folder / "found.json"
        for rank, host in enumerate("ab"):
            command = machines.on(host, sys.executable, "-m", "benchmarks.overlap", str(path))
            started.append(subprocess.Popen(command, env=environment | {"RANK": str(rank)}))
        end = time.monotonic() + 600
        while any(each.poll() is None for each in started):
            if any(each.poll() for each in started) or time.monotonic() > end:
                break  # the other rank would wait for this one
            time.sleep(0.1)
        codes = [each.poll() for each in started]
        if codes != [0] * RANKS:
            raise RuntimeError(
                f"exit codes of ranks 0 and 1 at {rate} Mbit/s: {codes} (None: it went on). The error is above"
            )
        found: dict[str, Any] = json.loads(path.read_text())
    finally:
        for each in started:
            each.kill()
            each.wait()
        machines.remove()
    return found


def rows(rate: int, found: dict[str, Any]) -> list[Figure]:
    """The figures of one link."""
    times: dict[str, list[float]] = found["times"]
    figures = []
    for name, values in times.items():
        ratio = budget = ""
        if name in ENGINES:
            bound = times[f"communication on {ENGINES[name]}"]
            ratios = [
                step / max(computation, communication)
                for step, computation, communication in zip(
                    values, times["computation"], bound, strict=True
                )
            ]
            low, middle, high = statistics.quantiles(ratios, n=4)
            ratio = f"{middle:.2f} ({low:.2f} to {high:.2f}) of the larger"
            budget = f"at most {BUDGET} of the larger" if ENGINES[name] == "smddp" else ""
        label = f"{name}: a step" if name in ENGINES else name
        spread = (1000 * min(values), 1000 * max(values))
        figures.append(
            Figure(f"{rate} Mbit/s, {label}", 1000 * median(values), "ms", spread, ratio, budget)
        )
    for name, spans in found["timeline"].items():
        for what, begin, end in spans:
            figures.append(
                Figure(
                    f"{rate} Mbit/s, {name}: {what} in the median step",
                    1000 * (end - begin),
                    "ms",
                    (1000 * begin, 1000 * end),
                )
            )
    return figures


def measure() -> list[Figure]:
    """The figures of each link; the extremes of what is in the median step are its begin and its end there.

    None, and a line that says why, where two machines cannot be made.
    """
    programs = ("ip", "tc", "unshare", "mount", "hostname")
    missing = [program for program in programs if shutil.which(program) is None]
    figures: list[Figure] = []
    try:
        if missing or len(os.sched_getaffinity(0)) < RANKS:
            raise OSError(f"it needs {', '.join(missing) or 'two cores'}")
        for rate in LINKS:
            figures += rows(rate, measure_on(rate))
    except subprocess.CalledProcessError as error:
        print(f"overlap is left out: {' '.join(map(str, error.cmd))}: {error.stderr!r}")
    except OSError as error:
        print(f"overlap is left out: {error}")
    return figures


if __name__ == "__main__":
    job(*sys.argv[1:])
