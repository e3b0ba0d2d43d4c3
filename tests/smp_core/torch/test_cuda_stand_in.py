"""The stand-in for torch.cuda: a script sees GPUs, torch and our packages do not, and removal leaves nothing."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.utils._device
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import smp_core.torch as engine
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job
from smp_core.errors import SmpError
from smp_core.torch import cuda_stand_in
from smp_core.torch.cuda_stand_in import answers, names, requests
from smp_core.torch.exceptions import StandInError

DEVICES = 3
CPU = torch.device("cpu")
SEED_STATE = torch.Generator().manual_seed(7).get_state()


@pytest.fixture
def shown() -> Iterator[None]:
    with cuda_stand_in.installed(DEVICES), torch.random.fork_rng():
        yield


def inside(module: str, expression: str) -> Any:
    """The value that code of the module reads."""
    return eval(expression, {"__name__": module, "torch": torch})


# Names of torch.cuda: what a script writes, and the answer.

ANSWERS: list[tuple[str, Any]] = [
    ("cuda.is_available()", True),
    ("cuda.is_initialized()", True),
    ("cuda.init()", None),
    ("cuda.device_count()", DEVICES),
    ("cuda.current_device()", 0),
    ("cuda.synchronize()", None),
    ("cuda.synchronize('cuda:1')", None),
    ("cuda.synchronize(device=torch.device('cuda', 2))", None),
    ("cuda.empty_cache()", None),
    ("cuda.ipc_collect()", None),
    ("cuda.memory_allocated()", 0),
    ("cuda.memory_allocated(0)", 0),
    ("cuda.max_memory_allocated('cuda:0')", 0),
    ("cuda.memory_reserved(torch.device('cuda'))", 0),
    ("cuda.max_memory_reserved()", 0),
    ("cuda.memory_cached()", 0),
    ("cuda.max_memory_cached()", 0),
    ("cuda.memory.memory_allocated()", 0),
    ("cuda.memory.max_memory_allocated()", 0),
    ("cuda.reset_peak_memory_stats()", None),
    ("cuda.reset_max_memory_allocated()", None),
    ("cuda.reset_max_memory_cached()", None),
    ("cuda.reset_accumulated_memory_stats()", None),
    ("cuda.set_per_process_memory_fraction(0.5)", None),
    ("cuda.memory_stats()['allocated_bytes.all.peak']", 0),
    ("cuda.memory_stats().get('num_alloc_retries', 0)", 0),
    ("type(cuda.memory_summary(device=None, abbreviated=False))", str),
    ("cuda.memory_snapshot()", []),
    ("cuda.mem_get_info()[1] == cuda.get_device_properties(0).total_memory > 0", True),
    ("0 < cuda.mem_get_info(0)[0] <= cuda.mem_get_info(0)[1]", True),
    ("cuda.get_device_name()", "CPU, in place of a GPU"),
    ("cuda.get_device_name(1)", "CPU, in place of a GPU"),
    ("cuda.get_device_properties('cuda').name", "CPU, in place of a GPU"),
    ("cuda.get_device_capability()", (8, 0)),
    ("(lambda p: (p.major, p.minor))(cuda.get_device_properties(0))", (8, 0)),
    ("cuda.is_bf16_supported()", True),
    ("cuda.get_arch_list()", []),
    ("cuda.can_device_access_peer(0, 1)", True),
    ("cuda.utilization()", 0),
    ("cuda.current_stream().query()", True),
    ("cuda.current_stream().synchronize()", None),
    ("cuda.default_stream() == cuda.current_stream()", True),
    ("cuda.current_stream(1) == cuda.current_stream(0)", False),
    ("cuda.Stream().wait_stream(cuda.current_stream())", None),
    ("cuda.Stream(device='cuda:1', priority=-1).device", torch.device("cuda", 1)),
    ("cuda.set_stream(cuda.Stream())", None),
    ("cuda.Stream().record_event().query()", True),
    ("cuda.Event().synchronize()", None),
    ("cuda.Event().wait(cuda.current_stream())", None),
    ("cuda.is_current_stream_capturing()", False),
    ("cuda.nvtx.range_push('step')", 0),
    ("cuda.nvtx.range_pop()", 0),
    ("cuda.nvtx.mark('step')", None),
    ("cuda.profiler.start()", None),
    ("cuda.profiler.stop()", None),
    ("cuda.cudart().cudaProfilerStart()", 0),
    ("cuda.manual_seed(7)", None),
    ("cuda.manual_seed_all(7)", None),
    ("cuda.seed()", None),
    ("cuda.seed_all()", None),
    ("cuda.initial_seed() == torch.initial_seed()", True),
    ("len(cuda.get_rng_state_all())", DEVICES),
    ("cuda.set_rng_state(cuda.get_rng_state())", None),
    ("cuda.set_rng_state_all(cuda.get_rng_state_all())", None),
    ("cuda.random.get_rng_state_all()[2].equal(torch.get_rng_state())", True),
    ("len(cuda.default_generators)", DEVICES),
    ("cuda.FloatTensor is torch.FloatTensor", True),
    ("cuda.FloatTensor([1, 2]).tolist()", [1.0, 2.0]),
    ("cuda.LongTensor(3).dtype", torch.int64),
    ("cuda.HalfTensor([1]).dtype", torch.float16),
    ("torch.accelerator.is_available()", True),
    ("torch.accelerator.current_accelerator().type", "cuda"),
    ("torch.accelerator.device_count()", DEVICES),
    ("torch.accelerator.current_device_index()", 0),
    ("torch.accelerator.synchronize()", None),
    # Devices keep what the script has written.
    ("torch.device('cuda').type", "cuda"),
    ("torch.device('cuda', 1)", torch.device("cuda:1")),
    ("torch.device('cuda:2').index", 2),
    ("torch.device('gpu')", torch.device("cuda")),
    ("torch.device('gpu:1')", torch.device("cuda:1")),
    ("torch.device(2)", torch.device("cuda:2")),
    ("torch.device(type='cuda', index=1)", torch.device("cuda:1")),
    ("isinstance(torch.device('cuda'), torch.device)", True),
    ("type(torch.zeros(1).device) == torch.device", True),
    ("torch.ones(1).cuda().is_cuda", False),
    ("torch.backends.cudnn.enabled", True),
    ("setattr(torch.backends.cudnn, 'benchmark', torch.backends.cudnn.benchmark)", None),
    ("setattr(torch.backends.cudnn, 'deterministic', torch.backends.cudnn.deterministic)", None),
]


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(("expression", "expected"), ANSWERS, ids=[each for each, _ in ANSWERS])
def test_a_script_is_answered(expression: str, expected: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            eval(expression, {"__name__": "__main__", "torch": torch, "cuda": torch.cuda})
            == expected
        )


# Requests for a device: what a script writes, and the values.

TENSORS: list[tuple[str, Any]] = [
    (f"torch.{call.replace(')', f', device={device})')}", values)
    for call, values in [
        ("zeros(2)", [0, 0]),
        ("ones((2,))", [1, 1]),
        ("empty(2, 0)", [[], []]),
        ("full((2,), 7.0)", [7, 7]),
        ("tensor([3])", [3]),
        ("as_tensor([3])", [3]),
        ("asarray([3])", [3]),
        ("scalar_tensor(2)", 2),
        ("arange(3)", [0, 1, 2]),
        ("linspace(0, 1, 2)", [0, 1]),
        ("eye(2)", [[1, 0], [0, 1]]),
        ("zeros_like(torch.ones(2))".replace("(2))", "(2),)"), [0, 0]),
    ]
    for device in ("'cuda'", "'cuda:1'", "torch.device('cuda', 1)", "0", "'gpu'")
    if ",)" not in call
] + [
    ("torch.zeros_like(x, device='cuda')", [0, 0]),
    ("torch.ones_like(x, device=torch.device('cuda'))", [1, 1]),
    ("torch.full_like(x, 3, device='cuda')", [3, 3]),
    ("torch.empty_like(x, device='cuda') * 0", [0, 0]),
    ("torch.rand_like(x, device='cuda') // 1", [0, 0]),
    ("torch.randn_like(x, device='cuda') * 0", [0, 0]),
    ("torch.randint_like(x, 1, device='cuda')", [0, 0]),
    ("torch.rand(2, device='cuda') // 1", [0, 0]),
    ("torch.randn(2, device='cuda') * 0", [0, 0]),
    ("torch.randint(1, (2,), device='cuda')", [0, 0]),
    ("torch.randperm(1, device='cuda')", [0]),
    ("torch.zeros(2, pin_memory=True)", [0, 0]),
    ("x.new_zeros(1, device='cuda')", [0]),
    ("x.new_tensor([5], device='cuda:2')", [5]),
    ("x.new_full((1,), 5, device='cuda')", [5]),
    ("x.new_ones(1, device='cuda')", [1]),
    ("x.new_empty(0, device='cuda')", []),
    ("x.to('cuda')", [1, 2]),
    ("x.to(0)", [1, 2]),
    ("x.to(torch.device('cuda', 2), non_blocking=True)", [1, 2]),
    ("x.to(device='cuda:1', dtype=torch.float64)", [1, 2]),
    ("x.to('cuda', torch.float16)", [1, 2]),
    ("x.cuda()", [1, 2]),
    ("x.cuda(1, non_blocking=True)", [1, 2]),
    ("x.cuda(device='cuda:1')", [1, 2]),
    ("x.pin_memory()", [1, 2]),
    ("x.pin_memory().to('cuda', non_blocking=True)", [1, 2]),
    ("x.type(torch.cuda.FloatTensor)", [1, 2]),
    ("x.type('torch.cuda.LongTensor')", [1, 2]),
    ("torch.ones(2, device=x.cuda().get_device())", [1, 1]),
    ("nn.Parameter(x).cuda().detach()", [1, 2]),
    ("nn.Linear(2, 2, device='cuda').cuda(1).to(0).to('gpu').to('cuda').bias.detach() * 0", [0, 0]),
    ("nn.Linear(2, 2).to(device='cuda:1', dtype=torch.float64).bias.detach() * 0", [0, 0]),
    ("nn.Linear(2, 2, device='meta').to_empty(device='cuda').bias.detach() * 0", [0, 0]),
    ("nn.LazyLinear(2, device='cuda').to('cuda')(torch.ones(1, 2)).detach()[0] * 0", [0, 0]),
    ("nn.DataParallel(nn.Linear(2, 2)).cuda().module.bias.detach() * 0", [0, 0]),
]  # fmt: skip


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(("expression", "expected"), TENSORS, ids=[each for each, _ in TENSORS])
def test_a_request_for_a_device_gets_the_cpu(expression: str, expected: Any) -> None:
    found = eval(
        expression,
        {"__name__": "__main__", "torch": torch, "nn": nn, "x": torch.tensor([1.0, 2.0])},
    )
    assert found.device == CPU
    assert found.tolist() == expected


def test_every_factory_of_torch_is_in_the_table() -> None:
    named = {getattr(module, name) for module, name in names.factories()}
    listed = torch.utils._device._device_constructors()
    assert listed <= named, "torch lists factories that this does not"
    assert named - listed == {getattr(torch, name) for name in dir(torch) if name.endswith("_like")}


@pytest.mark.usefixtures("shown")
def test_the_current_device_is_a_state() -> None:
    torch.cuda.set_device(1)
    assert torch.cuda.current_device() == 1
    with torch.cuda.device(2):
        assert torch.cuda.current_device() == 2
        with torch.cuda.device(None), torch.cuda.device_of(torch.ones(1)):
            assert torch.cuda.current_device() == 2
    assert torch.cuda.current_device() == 1
    torch.cuda.set_device("cuda:0")
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(torch.device("cuda", 2))
    torch.cuda.set_device(-1)
    assert torch.cuda.current_device() == 2


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(
    "call",
    [
        "torch.cuda.set_device(3)",
        "torch.zeros(1).cuda(3)",
        "torch.zeros(1).to('cuda:3')",
        "torch.zeros(1, device=3)",
        "torch.zeros(1, device=torch.device('cuda', 3))",
        "nn.Linear(1, 1).cuda(3)",
        "nn.Linear(1, 1).to(torch.device('cuda', 3))",
        "torch.cuda.get_device_name(3)",
    ],
)
def test_a_device_that_does_not_exist_is_an_error_that_gives_the_number(call: str) -> None:
    with pytest.raises(RuntimeError, match=r"invalid device ordinal: cuda:3 .* 3 devices"):
        eval(call, {"__name__": "__main__", "torch": torch, "nn": nn})


@pytest.mark.usefixtures("shown")
def test_states_of_fewer_devices_than_there_are() -> None:
    """As of a checkpoint that was written with other devices."""
    torch.cuda.set_device(2)
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)]
    torch.cuda.set_rng_state_all(states)
    assert torch.get_rng_state().equal(states[-1])
    torch.cuda.set_rng_state_all([])
    assert torch.get_rng_state().equal(states[-1])


@pytest.mark.usefixtures("shown")
def test_seeds_and_states_are_those_of_the_numbers_that_are_drawn() -> None:
    torch.cuda.manual_seed_all(7)
    assert torch.get_rng_state().equal(SEED_STATE)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state, "cuda:1")
    assert torch.rand(3).equal(first)
    torch.cuda.set_rng_state_all([state] * DEVICES)
    assert torch.rand(3).equal(first)
    with torch.random.fork_rng(devices=[0, torch.cuda.current_device()]):
        torch.rand(1)
    torch.cuda.manual_seed(7)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.rand(1)
    assert torch.rand(3).equal(first)
    generator = torch.Generator(device="cuda").manual_seed(7)
    assert isinstance(generator, torch.Generator)
    assert torch.rand(3, generator=generator, device="cuda").equal(first)


@pytest.mark.usefixtures("shown")
def test_events_measure_the_time_between_them() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.nvtx.range("step"):
        end.record(torch.cuda.current_stream())
    torch.ones(1).cuda().record_stream(torch.cuda.current_stream())
    assert start.elapsed_time(end) > 0 > end.elapsed_time(start)
    with pytest.raises(ValueError, match="enable_timing"):
        start.elapsed_time(torch.cuda.Event())


@pytest.mark.usefixtures("shown")
def test_a_default_device_is_the_cpu() -> None:
    with torch.device("cuda:1"):
        assert torch.ones(2).device == CPU
        assert nn.Linear(2, 2).weight.device == CPU
    with torch.device("meta"):
        assert torch.ones(2).device.type == "meta"
    torch.set_default_device("cuda")
    try:
        assert torch.ones(2).device == CPU
    finally:
        torch.set_default_device(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, which torch says once a process
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        try:
            assert torch.ones(2).dtype is torch.float64
        finally:
            torch.set_default_tensor_type(torch.cuda.FloatTensor)
    assert torch.ones(2).dtype is torch.float32


@pytest.mark.usefixtures("shown")
def test_autocast_and_its_scaler_work_as_on_a_gpu() -> None:
    x = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda"):
        assert (x @ x).dtype is torch.float16  # the default of CUDA
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_gpu_dtype() is torch.get_autocast_dtype("cuda") is torch.float16
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype is torch.float32
    with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
    with (
        pytest.warns(FutureWarning, match="deprecated"),
        torch.cuda.amp.autocast(dtype=torch.bfloat16),
    ):
        assert (x @ x).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled()
    with pytest.warns(FutureWarning, match="deprecated"):
        scalers = [
            torch.cuda.amp.GradScaler(init_scale=8.0),
            torch.amp.GradScaler("cuda", init_scale=8.0),
        ]
    for scaler in scalers:
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.sum() * 0.5).backward()
        assert weight.grad is not None
        assert weight.grad.item() == 4.0
        scaler.step(optimizer)
        assert weight.item() == 0.5


@pytest.mark.usefixtures("shown")
def test_custom_forward_casts_as_on_a_gpu() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_autocast_enabled()
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    half = torch.ones(2, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cuda"):
        out = Double.apply(half)
    assert out.dtype is torch.float32
    out.sum().backward()
    assert half.grad is not None
    assert half.grad.tolist() == [2, 2]


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(
    "location",
    [
        "'cuda:0'", "'cuda'", "torch.device('cuda', 1)", "{'cpu': 'cuda:1'}", "lambda storage, _: storage.cuda(1)",
        "lambda storage, _: None", "lambda storage, _: storage.to(device='cuda')", "None",
    ],
)  # fmt: skip
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("saved_on", ["cpu", "cuda:2"])
def test_files_are_loaded(location: str, weights_only: bool, saved_on: str) -> None:
    file = io.BytesIO()
    with mock.patch("torch.serialization.location_tag", return_value=saved_on):
        torch.save({"weight": torch.arange(3.0), "device": torch.device("cuda", 1)}, file)
    file.seek(0)
    state = torch.load(file, map_location=eval(location), weights_only=weights_only)
    assert state["weight"].tolist() == [0, 1, 2]
    assert state["device"] == torch.device("cuda", 1)


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_pins_memory_gives_batches_without_a_warning(workers: int) -> None:
    loader = DataLoader(range(4), batch_size=2, pin_memory=True, num_workers=workers)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = [batch.cuda(non_blocking=True).tolist() for batch in loader]
    assert batches == [[0, 1], [2, 3]]
    assert loader.pin_memory


@pytest.mark.usefixtures("shown")
def test_devices_and_modules_are_pickled() -> None:
    device = torch.device("cuda", 1)
    assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device
    made = cloudpickle.loads(cloudpickle.dumps(lambda: torch.device("cuda", 1)))
    assert made() == device
    assert cloudpickle.loads(cloudpickle.dumps(torch)) is torch


@pytest.mark.usefixtures("shown")
def test_names_can_be_patched_by_a_script() -> None:
    with mock.patch("torch.cuda.is_available", return_value=False):
        assert torch.cuda.is_available() is False
    assert torch.cuda.is_available() is True
    torch.cuda.device_count = lambda: 9
    assert torch.cuda.device_count() == 9
    assert inside("torch.x", "torch.cuda.device_count()") == 0


# The truth, for torch and our packages.


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(
    "module", ["torch", "torch.utils.checkpoint", "smp_core", "smp_core.torch.x", "pytest_smp.x"]
)
def test_torch_and_our_packages_read_the_truth(module: str) -> None:
    assert inside(module, "torch.cuda.is_available()") is False
    assert inside(module, "torch.cuda.device_count()") == 0
    assert inside(module, "torch.accelerator.is_available()") is False
    assert inside(module, "torch.accelerator.current_accelerator()") is None
    assert inside(module, "torch.cuda.Stream") is vars(torch.cuda)["Stream"]
    assert inside(module, "torch.device") is type(CPU)


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(
    "module", ["__main__", "train", "transformers.trainer", "torchvision.x", "torch_extra"]
)
def test_everybody_else_reads_the_stand_in(module: str) -> None:
    assert inside(module, "torch.cuda.is_available()") is True


@pytest.mark.usefixtures("shown")
def test_torch_decides_by_the_truth() -> None:
    """Checkpointing of activations keeps no GPU's generator, the profiler sees no GPU, and replicas are the CPU's."""
    from torch.utils import checkpoint

    devices, states = checkpoint.get_device_states(torch.ones(1))
    assert (devices, states) == ([], [])
    x = torch.ones(2, requires_grad=True)
    checkpoint.checkpoint(torch.dropout, x, 0.5, True, use_reentrant=False).sum().backward()
    assert torch.backends.cuda.is_built() is False
    from smp_core.transport import launched

    assert launched._names("nccl") == "gloo"


@pytest.mark.usefixtures("shown")
def test_torch_enters_autocast_of_cuda_by_the_truth() -> None:
    """Torch restores the state of all kinds of devices by contexts that leave the CPU's autocast as it is."""
    off = inside("torch.utils.checkpoint", "torch.autocast('cuda', enabled=False)")
    with torch.autocast("cuda"), off:
        assert torch.is_autocast_enabled()


@pytest.mark.usefixtures("shown")
def test_other_devices_stay_what_they_are() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    assert torch.load(file, map_location="meta").device.type == "meta"
    file.seek(0)
    with pytest.raises(RuntimeError, match="don't know how to restore"):
        torch.load(file, map_location="elsewhere")
    assert torch.ones(2, device="meta").to("meta").device.type == "meta"
    assert nn.Linear(2, 2, device="meta").weight.device.type == "meta"
    assert torch.Generator("cpu").device == CPU
    assert torch.autocast("cpu").device == "cpu"


@pytest.mark.usefixtures("shown")
def test_recomputation_under_autocast_casts_as_the_first_time() -> None:
    from torch.utils.checkpoint import checkpoint

    seen = []

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        seen.append(y.dtype)
        return y

    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = checkpoint(body, x, use_reentrant=True)
    out.float().sum().backward()
    assert seen == [torch.bfloat16] * 2


@pytest.mark.smp(ranks=2)
def test_a_replica_of_torch_takes_device_numbers(smp: Any) -> None:
    with cuda_stand_in.installed(2):
        torch.cuda.set_device(smp.local_rank())
        device = torch.device("cuda", smp.local_rank())
        module = nn.Linear(1, 1).to(device)
        with torch.no_grad():
            module.weight.fill_(1.0)
            module.bias.fill_(0.0)
        model = nn.parallel.DistributedDataParallel(
            module, device_ids=[smp.local_rank()], output_device=device
        )
        model(torch.tensor([[smp.rank() + 1.0]], device=device)).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.item() == 1.5


def _meshes() -> None:
    mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("shard", "tensor"))
    DeviceMesh("cuda", [0, 1])
    DeviceMesh.from_group(dist.group.WORLD, "cuda")
    assert mesh["shard"].get_local_rank() == dist.get_rank()
    assert mesh.device_type == "cpu"


def _distributed_tensors() -> None:
    mesh = init_device_mesh("cuda", (2,))
    tensor = distribute_tensor(torch.arange(4.0, device="cuda"), mesh, [Shard(0)]).cuda()
    assert tensor.full_tensor().tolist() == [0, 1, 2, 3]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model(torch.ones(2, 4, device="cuda")).sum().backward()


def _fsdp2() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cuda", (2,)))
    nn.init.ones_(model.to_empty(device="cuda").weight)
    model(torch.ones(2, 4, device="cuda")).sum().backward()


def _fsdp1() -> None:
    for options in (
        {},
        {"device_id": torch.cuda.current_device()},
        {"device_id": torch.device("cuda", 0), "sync_module_states": True},
        {"device_mesh": init_device_mesh("cuda", (2,))},
    ):
        model = FullyShardedDataParallel(nn.Linear(4, 4), **options)
        model(torch.ones(2, 4, device="cuda")).sum().backward()


def _stages() -> None:
    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(4, 4).cuda(), rank, 2, torch.device("cuda", rank))
    schedule = ScheduleGPipe(stage, 2)
    schedule.step(*(() if rank else (torch.ones(4, 4),)))


def _groups_and_objects() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda:0"))
    dist.barrier(device_ids=[torch.cuda.current_device()])
    objects = [dist.get_rank()]
    dist.broadcast_object_list(objects, 1, device=torch.device("cuda"))
    assert objects == [1]


def _averages() -> None:
    torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2), device="cuda")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchs_own_code_takes_the_device_type_cuda(smp_world: Any) -> None:
    def body(part: Callable[[], None]) -> None:
        with cuda_stand_in.installed(2):
            torch.cuda.set_device(dist.get_rank())
            part()
            dist.destroy_process_group()  # with those of meshes

    for part in (
        *(_meshes, _distributed_tensors, _fsdp2, _fsdp1, _stages),
        *(_groups_and_objects, _averages),
    ):
        smp_world.run(body, part, ranks=2)


def test_what_a_script_imports_late_takes_it_as_well() -> None:
    """In a process of its own: here others have imported it."""
    code = """
        import sys
        import torch
        from smp_core.torch import cuda_stand_in
        from smp_core.torch.cuda_stand_in import requests
        assert not requests.LATE.keys() & sys.modules.keys()
        with cuda_stand_in.installed(1):
            import torch.distributed.fsdp, torch.distributed.pipelining
            owners = [
                (getattr(sys.modules[module], owner) if owner else sys.modules[module], name)
                for module, (owner, name, _) in requests.LATE.items()
            ]
            shown = [getattr(*each) for each in owners]
        assert [getattr(*each) for each in owners] == [each.__wrapped__ for each in shown]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.smp(ranks=4)
def test_each_rank_has_its_own_current_device(smp: Any) -> None:
    with cuda_stand_in.installed(4):
        torch.cuda.set_device(smp.local_rank())
        smp.barrier()
        assert torch.cuda.current_device() == smp.local_rank()
        with torch.cuda.device((smp.rank() + 1) % 4):
            smp.barrier()
            assert torch.cuda.current_device() == (smp.rank() + 1) % 4
        smp.barrier()


# Installing and removing


def namespaces() -> dict[tuple[int, str], object]:
    """Everything that the stand-in touches, by the identity of the values."""
    owners: list[Any] = [owner for owner, _, _ in requests.METHODS]
    owners += [module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"]
    found: dict[tuple[int, str], object] = {}
    for owner in owners:
        found[id(owner), "__class__"] = type(owner)
        if not isinstance(owner, types.ModuleType) or owner.__name__.startswith(
            ("torch.cuda", "torch.amp")
        ):
            found |= {(id(owner), name): value for name, value in vars(owner).items()}
    found |= {(id(torch), name): value for name, value in vars(torch).items()}
    allowed = vars(nn.parameter)["UninitializedTensorMixin"]._allowed_methods
    found |= {(1, str(number)): method for number, method in enumerate(allowed)}
    found |= {
        (0, str(number)): entry
        for number, entry in enumerate(torch.serialization._package_registry)
    }
    return found


def assert_same(
    before: dict[tuple[int, str], object], after: dict[tuple[int, str], object]
) -> None:
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_removal_gives_back_every_object(nested: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading deprecated attributes
        before = namespaces()
        for devices in nested:
            cuda_stand_in.install(devices)
            assert namespaces() != before
            cuda_stand_in.install(devices)
            cuda_stand_in.remove()
            assert torch.cuda.device_count() == devices
            cuda_stand_in.remove()
            assert_same(before, namespaces())
    assert torch.cuda.is_available() is False


@given(st.integers(0, 60))
def test_an_error_while_installing_leaves_nothing(failing: int) -> None:
    calls = 0
    before = namespaces()

    class Broken(Exception):
        pass

    def break_at(original: Any) -> Any:
        def patched(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > failing:
                raise Broken
            return original(*args, **kwargs)

        return patched

    with (
        mock.patch.object(requests, "replaced", break_at(requests.replaced)),
        mock.patch.object(cuda_stand_in, "shown", break_at(cuda_stand_in.shown)),
        contextlib.suppress(Broken),
    ):
        cuda_stand_in.install(1)
        cuda_stand_in.remove()
    assert calls > failing or failing >= calls > 30
    assert_same(before, namespaces())


def test_an_error_of_the_script_leaves_nothing() -> None:
    before = namespaces()
    with pytest.raises(KeyError), cuda_stand_in.installed(1):
        raise KeyError
    assert_same(before, namespaces())


def test_the_stand_in_is_refused_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(StandInError, match=r"this machine has 8 GPUs.*hide the GPUs"):
        cuda_stand_in.install(2)
    monkeypatch.undo()
    assert_same(before, namespaces())


@pytest.mark.parametrize("devices", [0, -1, 1.0, "2", None, True])
def test_a_number_of_devices_that_makes_no_sense_is_refused(devices: Any) -> None:
    with pytest.raises(StandInError, match="devices="):
        cuda_stand_in.install(devices)


def test_two_numbers_of_devices_are_refused_and_the_first_stays() -> None:
    with cuda_stand_in.installed(2):
        with pytest.raises(StandInError, match="devices=3, and 2 are installed"):
            cuda_stand_in.install(3)
        assert torch.cuda.device_count() == 2
    with pytest.raises(SmpError, match="nothing is installed"):
        cuda_stand_in.remove()


def test_the_current_device_is_the_first_again_when_nothing_is_installed() -> None:
    with cuda_stand_in.installed(2):
        torch.cuda.set_device(1)
    assert answers.current_index == 0


# Scripts

GPU_SCRIPT = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    torch.backends.cudnn.deterministic = True
    assert torch.cuda.is_available()
    torch.cuda.set_device(0)
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True, shuffle=True)
    scaler = torch.amp.GradScaler("cuda")
    losses, start, end = [], torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for epoch in range(2):
        start.record()
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.cuda(non_blocking=True)
            mask = torch.rand(x.shape, device=device) > 0.1
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x * mask), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) > 0
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
"""

CPU_SCRIPT = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for epoch in range(2):
        for x, y in loader:
            mask = torch.rand(x.shape) > 0.1
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x * mask), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
"""


def losses(script: str) -> list[float]:
    names: dict[str, Any] = {"__name__": "__main__"}
    deterministic = torch.backends.cudnn.deterministic
    try:
        with torch.random.fork_rng():
            exec(compile(textwrap.dedent(script), "train.py", "exec"), names)
    finally:
        torch.backends.cudnn.deterministic = deterministic
    return names["losses"]  # type: ignore[no-any-return]


def test_a_script_for_gpus_has_the_losses_of_its_twin_on_the_cpu() -> None:
    expected = losses(CPU_SCRIPT)
    assert len(expected) == 8
    with cuda_stand_in.installed(1):
        assert losses(GPU_SCRIPT) == expected


PIPELINE = {
    "pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "auto_partition": False, "default_partition": 0,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.near, self.far = nn.Linear(4, 4), nn.Linear(4, 4)
        engine.set_partition(self.far, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.far(torch.relu(self.near(x)))  # type: ignore[no-any-return]


def train(device: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    """The losses of a training in which tensors and modules are moved as said."""
    model = engine.DistributedModel(Net().to(device))
    optimizer = engine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @engine.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    found = []
    for _ in range(2):
        optimizer.zero_grad()
        batch = torch.arange(16.0).reshape(4, 4) / 16 * (engine.dp_rank() + 1)
        found.append(step(model, move(batch)).reduce_mean().item())
        optimizer.step()
    return found


def train_as_on_a_gpu() -> list[float]:
    with cuda_stand_in.installed(engine.local_size()):
        torch.cuda.set_device(engine.local_rank())
        device = torch.device("cuda", engine.local_rank())
        found = train(device, lambda batch: batch.to(device, non_blocking=True))
        assert torch.cuda.current_device() == engine.local_rank()
        return found


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_script_of_smp_for_gpus_has_the_losses_of_its_twin_on_the_cpu(backend: str) -> None:
    executor = open_backend(backend, ExecutorOptions(ranks=4))
    try:
        found = []
        for body in (lambda: train(CPU, lambda batch: batch), train_as_on_a_gpu):
            job = Job(body=body, arguments=lambda _: ((), {}), parameters=PIPELINE, timeout=120.0)
            report = executor.open(4).run(job)
            assert report.error is None, report.error
            found.append(report.values)
    finally:
        executor.close()
    assert found[0] == found[1]
    assert len({losses[0] for losses in found[0]}) == 2  # one for each replica


def test_a_model_of_hugging_face_moves_to_the_device_and_runs() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.arange(6).reshape(1, 6)
    expected = model(input_ids=tokens, labels=tokens).loss
    with cuda_stand_in.installed(2):
        batch = transformers.BatchEncoding({"input_ids": tokens, "labels": tokens}).to("cuda:1")
        assert model.to("cuda")(**batch).loss.equal(expected)
        assert model.cuda(1)(**batch.to(torch.device("cuda", 0))).loss.equal(expected)
        assert model.half().to(torch.device("cuda")).dtype is torch.float16


def test_the_example_of_the_page_runs() -> None:
    page = Path(__file__).parents[3] / "docs" / "cuda_stand_in.md"
    (block,) = re.findall(
        r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    exec(block, {"__name__": "__main__"})
