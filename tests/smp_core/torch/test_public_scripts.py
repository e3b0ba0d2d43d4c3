"""The calls of public training scripts, on every backend, against plain PyTorch on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torchs

import smp_core.torch as smp
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import Executor, ExecutorOptions, Job
from smp_core.torch.exceptions import ReplicaDriftError, UnsupportedTrainingError
from tests.smp_core.torch.checkpoint import tensor_runs
from tests.smp_core.torch.sharding.checkpoint_models import equal, snapshot

RANKS = 4
PIPELINE = {
    "pipeline_parallel_degree": RANKS,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
}


def _nothing(rank: int) -> Any:
    return (), {}


@pytest.fixture(scope="module", params=["sim", "gloo", "mpi"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    opened = open_backend(request.param, ExecutorOptions(ranks=RANKS))
    yield opened
    opened.close()


def run(executor: Executor, body: Callable[[], Any], config: dict[str, Any]) -> list[Any]:
    """The value of ``body()`` on each rank."""
    job = Job(body=body, arguments=_nothing, parameters=config, timeout=120.0)
    report = executor.open(RANKS).run(job)
    if report.error is not None:
        raise report.error
    return report.values


class Attention(nn.Module):
    """As BERT and ViT have it: attention called by the names of its arguments, and an output layer that is given the
    residual and does not use it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dtype=torch.float64)
        self.output = Output(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(query=hidden, key=hidden, value=hidden)
        return hidden + self.output(attended, hidden)  # type: ignore[no-any-return]


class Output(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.dense(hidden)  # type: ignore[no-any-return]


class Vision(nn.Module):
    """A vision transformer of two layers, each on two partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4, dtype=torch.float64))
        self.layers = nn.ModuleList([Attention(4), Attention(4)])
        self.head = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([self.token.expand(len(patches), -1, -1), patches], 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden[:, 0])  # type: ignore[no-any-return]


def _vision() -> tuple[Vision, torch.Tensor]:
    torch.manual_seed(3)
    return Vision(), torch.randn(4, 3, 4, dtype=torch.float64)


def vision_gradients() -> dict[str, torch.Tensor]:
    module, patches = _vision()
    for index, layer in enumerate(module.layers):
        smp.set_partition(layer, index)
        smp.set_partition(layer.output, index + 2)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, patches: torch.Tensor) -> None:
        model.backward(model(patches).square().sum())

    step(model, patches)
    return {name: parameter.grad for name, parameter in model.local_named_parameters()}


def test_an_argument_that_a_module_on_another_rank_does_not_use(executor: Executor) -> None:
    module, patches = _vision()
    for part in patches.chunk(2):
        (module(part).square().sum() / 2).backward()  # type: ignore[no-untyped-call]
    found = {
        name: each
        for part in run(executor, vision_gradients, PIPELINE)
        for name, each in part.items()
    }
    expected = {name: each.grad for name, each in module.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(RANKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.5)
        return x


def generators() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    module = Drops()
    for index, layer in enumerate(module.layers):
        smp.set_partition(layer, index)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    before = torch.get_rng_state()
    step(model, torch.ones(2, 4))
    return before, torch.get_rng_state()


def test_a_step_draws_alike_from_the_generators_of_all_ranks(executor: Executor) -> None:
    (before, after), *others = run(executor, generators, PIPELINE)
    assert not torch.equal(before, after)
    assert all(torch.equal(other, after) for _, other in others)


SHARDED = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 5,
    "sdp_gradient_clipping": 1e300,
}


def _network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def clipped() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = smp.DistributedModel(_network())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).square().sum())

    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        step(model, torch.arange(8.0).view(2, 4))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25))
        optimizer.step()
    return norms, model.state_dict()


def test_clipping_as_hugging_face_does_it(executor: Executor) -> None:
    module, norms = _network(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.arange(8.0).view(2, 4)).square().sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.25))
        optimizer.step()
    for found, state in run(executor, clipped, SHARDED):
        torch.testing.assert_close(found, norms)
        torch.testing.assert_close(dict(state), dict(module.state_dict()))


def drifts() -> str:
    model = smp.DistributedModel(_network())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).square().sum())

    step(model, torch.ones(2, 4))
    if smp.rank() != 1:
        optimizer.step()
    try:
        step(model, torch.ones(2, 4))
    except ReplicaDriftError as error:
        return str(error)
    return "nothing"


def test_replicas_that_drift_apart(executor: Executor) -> None:
    for told in run(executor, drifts, {"ddp": True}):
        assert "step 2: replicas have drifted apart: parameter '0.weight' of rank 1" in told


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Second(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torchs.checkpoint(self.second, self.first(x), use_reentrant=False)  # type: ignore[no-any-return]


class Second(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super()._orig_forward(x) * 2  # type: ignore[misc, no-any-return]


def refused() -> str:
    module = Checkpointed()
    smp.set_partition(module.second, 1)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())

    try:
        step(model, torch.ones(2, 4))
    except UnsupportedTrainingError as error:
        return str(error)
    return "nothing"


def test_torchs_checkpoint_around_a_module_is_refused_on_all_ranks(executor: Executor) -> None:
    for told in run(executor, refused, PIPELINE):
        assert "module 'second' was called under torch.utils.checkpoint" in told


def compiled() -> str:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].forward = torch.compile(module[1].forward, backend="eager")
    try:
        smp.DistributedModel(module)
    except UnsupportedTrainingError as error:
        return str(error)
    return "nothing"


def test_a_compiled_module_is_refused_on_all_ranks(executor: Executor) -> None:
    for told in run(executor, compiled, PIPELINE):
        assert "module '1' (Linear) is compiled" in told


def original() -> torch.Tensor:
    torch.manual_seed(3)
    module = nn.Sequential(*[Second(4, 4) for _ in range(RANKS)])
    for index, layer in enumerate(module):
        smp.set_partition(layer, index)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        model.backward(y.sum())
        return y

    return step(model, torch.ones(2, 4)).concat()  # type: ignore[no-any-return]


def test_the_forward_of_a_base_class(executor: Executor) -> None:
    torch.manual_seed(3)
    expected = torch.ones(2, 4)
    for layer in [nn.Linear(4, 4) for _ in range(RANKS)]:
        expected = layer(expected) * 2
    for found in run(executor, original, PIPELINE):
        torch.testing.assert_close(found, expected.detach())


@pytest.mark.parametrize("name", ["pp2tp2", "tp2sdp2fp16"])
def test_checkpoints_with_tensor_parallelism(executor: Executor, tmp_path: Path, name: str) -> None:
    """Training goes on from a partial checkpoint as if it had not stopped, and a full one is the plain module's."""

    def saves() -> list[Any]:
        script = tensor_runs.Run()
        script.steps(0, 1)
        script.save(tmp_path, "whole", partial=False)
        script.save(tmp_path, "parts", user_content={"steps": 2})
        whole = snapshot(script.model.state_dict())
        return [whole, script.steps(2, 3), script.state()]

    def goes_on() -> list[Any]:
        script = tensor_runs.Run(seed=99)
        assert smp.resume_from_checkpoint(tmp_path) == {"steps": 2}
        return [script.steps(2, 3), script.state()]

    config = tensor_runs.world(name)["config"]
    saved = run(executor, saves, config)
    for (_, *went_on), resumed in zip(saved, run(executor, goes_on, config), strict=True):
        equal(resumed, went_on)
    plain = tensor_runs.Net(7)
    if "fp16" in name:
        plain.half()
    plain.load_state_dict(torch.load(tmp_path / "whole", weights_only=True))
    equal(dict(plain.state_dict()), saved[0][0])
