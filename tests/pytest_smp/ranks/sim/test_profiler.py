"""Each rank has torch's profiler to itself."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import profiler as torch_profiler

import smp_core.torch as smp
from smp_core.errors import UnsupportedError

KINDS = {
    "autograd": lambda **options: torch.autograd.profiler.profile(**options),
    "autograd, kineto": lambda **options: torch.autograd.profiler.profile(
        use_kineto=True, **options
    ),
    "torch.profiler": lambda **options: torch_profiler.profile(
        activities=[torch_profiler.ProfilerActivity.CPU], **options
    ),
}


@pytest.fixture(params=KINDS)
def profile(request):
    return KINDS[request.param]


def names(profile):
    return [event.name for event in profile.events()]


@pytest.fixture(autouse=True)
def _events(monkeypatch):
    # torch.autograd's profile has them as an attribute, torch.profiler's as a method.
    monkeypatch.setattr(
        torch.autograd.profiler.profile, "events", lambda self: self.function_events, raising=False
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_sees_its_own_operations(smp_world, profile, ranks):
    def body():
        value = torch.ones(2)
        with profile() as profiled:
            with torch_profiler.record_function(f"rank {smp.rank()}"):
                dist.all_reduce(value)
            if smp.rank() == 0:
                torch.sin(value)
        return value.tolist(), names(profiled)

    results = smp_world.run(body, ranks=ranks)
    for rank, (value, seen) in enumerate(results):
        assert value == [ranks, ranks]
        assert [name for name in seen if name.startswith("rank ")] == [f"rank {rank}"]
        assert ("aten::sin" in seen) == (rank == 0)


def test_profiles_that_begin_and_end_at_different_times(smp_world, profile):
    def body():
        seen = []
        for turn in range(4):
            if turn % 3 == smp.rank():
                profiled = profile()
                profiled.__enter__()
            torch.full((2,), turn)
            smp.barrier()
            if turn % 3 == (smp.rank() + 1) % 3 and turn > smp.rank():
                profiled.__exit__(None, None, None)
                seen.append(names(profiled).count("aten::full"))
        return seen

    # Each profiles two turns, which begin one after the other. Rank 0 begins another and leaves it.
    assert smp_world.run(body, ranks=3) == [[2], [2], [2]]


def test_what_a_rank_leaves_on_ends_with_the_run(smp_world, profile):
    def leaves():
        profile().__enter__()
        smp.barrier()

    def body():
        return torch.autograd._profiler_enabled()

    smp_world.run(leaves, ranks=2)
    assert smp_world.run(body, ranks=2) == [False, False]
    assert not torch.autograd._profiler_enabled()


def test_a_profile_may_be_open_around_the_run(smp_world):
    def body():
        with torch.autograd.profiler.profile() as profiled:
            dist.all_reduce(torch.ones(2))
        return names(profiled)

    with torch.autograd.profiler.profile() as outside:
        torch.cos(torch.ones(2))
        inside = smp_world.run(body, ranks=2)
    assert "aten::cos" in names(outside)
    assert all("aten::ones" in seen and "aten::cos" not in seen for seen in inside)


def test_shapes_memory_averages_and_a_trace_file(smp_world, tmp_path):
    def body():
        with torch_profiler.profile(
            activities=[torch_profiler.ProfilerActivity.CPU],
            record_shapes=True,
            profile_memory=True,
        ) as profiled:
            torch.mm(torch.ones(2, 3), torch.ones(3, 4))
            smp.barrier()
        profiled.export_chrome_trace(str(tmp_path / f"{smp.rank()}.json"))
        (event,) = (each for each in profiled.events() if each.name == "aten::mm")
        averages = {each.key: each.count for each in profiled.key_averages()}
        return event.input_shapes, event.cpu_memory_usage, averages["aten::ones"]

    for shapes, memory, ones in smp_world.run(body, ranks=2):
        assert shapes == [[2, 3], [3, 4]]
        assert memory == 2 * 4 * 4
        assert ones == 2
    for rank in range(2):
        trace = json.loads((tmp_path / f"{rank}.json").read_text())
        assert any("aten::mm" in each["name"] for each in trace)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_schedule_of_steps(smp_world):
    def body():
        counts = []
        with torch_profiler.profile(
            activities=[torch_profiler.ProfilerActivity.CPU],
            schedule=torch_profiler.schedule(wait=1, warmup=1, active=2),
            on_trace_ready=lambda each: counts.append(names(each).count("aten::sin")),
        ) as profiled:
            for _ in range(8):
                dist.all_reduce(torch.sin(torch.ones(1)))
                profiled.step()
        return counts

    assert smp_world.run(body, ranks=2) == [[2, 2]] * 2


@pytest.mark.parametrize("kind", ["emit_itt", "memory timeline"])
def test_what_exists_once_per_process_is_refused(smp_world, kind, tmp_path):
    def body():
        if kind == "emit_itt":
            with torch.autograd.profiler.emit_itt():
                smp.barrier()
        else:
            with torch_profiler.profile(
                profile_memory=True, record_shapes=True, with_stack=True
            ) as profiled:
                smp.barrier()
            profiled._memory_profile()

    with pytest.raises(UnsupportedError, match="exists once per process") as refused:
        smp_world.run(body, ranks=2)
    # Around the run nothing is recorded: rank threads start before the profiler of the caller.
    assert str(refused.value).endswith("Run on processes (--smp-backend=gloo)")
