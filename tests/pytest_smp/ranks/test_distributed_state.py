"""Contexts of torch.distributed that switch the whole process are a simulated rank's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._debug_utils import SimpleProfiler
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel


def test_loss_parallel_ends_on_each_rank_for_itself(smp_world: Any) -> None:
    logits = torch.randn(4, 8)
    target = torch.tensor([0, 3, 5, 7])

    def body() -> torch.Tensor:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            loss: Any = functional.cross_entropy(sharded, target)
            loss.backward()
        gradient: Any = sharded.grad
        full: torch.Tensor = gradient.full_tensor()
        return full

    plain = logits.clone().requires_grad_()
    loss: Any = functional.cross_entropy(plain, target)
    loss.backward()
    assert plain.grad is not None
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    for gradient in smp_world.run(body, ranks=2):
        torch.testing.assert_close(gradient, plain.grad)
    assert handlers == DTensor._op_dispatcher._custom_op_handlers


def test_context_parallel_of_a_rank_leaves_attention_of_others_plain(smp_world: Any) -> None:
    query = torch.randn(1, 2, 4, 8)
    attention = functional.scaled_dot_product_attention

    def body() -> tuple[bool, bool]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plain = functional.scaled_dot_product_attention is attention
        if dist.get_rank() == 0:
            with context_parallel(mesh, buffers=[query.clone()], buffer_seq_dims=[2]):
                inside = functional.scaled_dot_product_attention is attention
                dist.barrier()
            return plain, inside
        dist.barrier()
        return plain, functional.scaled_dot_product_attention(
            query, query, query
        ).shape == query.shape

    assert smp_world.run(body, ranks=2)[1] == (True, True)
    assert functional.scaled_dot_product_attention is attention


def test_simple_profiler_of_fsdp_is_a_ranks_own(smp_world: Any) -> None:
    def body() -> list[str]:
        with SimpleProfiler.profile(SimpleProfiler.Type.ALL):
            dist.barrier()
        return list(SimpleProfiler.results)

    assert smp_world.run(body, ranks=2) == [[SimpleProfiler.Type.ALL]] * 2
    assert not SimpleProfiler.results


def test_cached_plans_of_checkpoints_are_a_ranks_own(smp_world: Any, tmp_path: Any) -> None:
    def body() -> list[float]:
        own = f"of rank {dist.get_rank()}"
        for step in (1.0, 2.0):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            save({own: torch.tensor([step])}, checkpoint_id=tmp_path / str(step), planner=planner)
        loaded = {own: torch.zeros(1)}
        load(loaded, checkpoint_id=tmp_path / "2.0")
        return list(loaded[own].tolist())

    assert smp_world.run(body, ranks=2) == [[2.0]] * 2


def test_storage_is_tracked_on_the_rank_that_entered_the_tracker(smp_world: Any) -> None:
    resize = torch.UntypedStorage.resize_

    def body() -> list[bool]:
        plain = []
        if dist.get_rank():
            dist.barrier()  # enters when rank 0 is in, and leaves when it is out
        with MemTracker():
            plain.append(torch.UntypedStorage.resize_ is resize)
            dist.barrier()
            if dist.get_rank() == 0:
                dist.barrier()
        plain.append(torch.UntypedStorage.resize_ is resize)
        dist.barrier()
        return plain

    assert smp_world.run(body, ranks=2) == [[False, True]] * 2
    assert torch.UntypedStorage.resize_ is resize
