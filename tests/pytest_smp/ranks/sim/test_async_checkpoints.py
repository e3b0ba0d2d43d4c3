"""Asynchronous checkpoints of torch on `sim`: a pool's thread saves, and communicates, while the rank trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from pytest_smp.ranks.protocols import VerdictKind
from smp_core.errors import UnsupportedError


def save(folder: Any) -> Any:
    state = {"shared": torch.arange(3.0), f"of rank {dist.get_rank()}": torch.ones(2)}
    return async_save(state, checkpoint_id=folder)


def test_training_goes_on_while_a_checkpoint_is_saved(smp_world: Any, tmp_path: Any) -> None:
    def body() -> tuple[float, list[float], list[float]]:
        group, own = dist.new_group(), f"of rank {dist.get_rank()}"
        saved = save(tmp_path)
        total = torch.ones(1)
        for _ in range(3):
            dist.all_reduce(total, group=group)
        saved.result()
        dist.destroy_process_group(group)
        loaded = {"shared": torch.zeros(3), own: torch.zeros(2)}
        load(loaded, checkpoint_id=tmp_path)
        return total.item(), loaded["shared"].tolist(), loaded[own].tolist()

    assert smp_world.run(body, ranks=2) == [(8.0, [0.0, 1.0, 2.0], [1.0, 1.0])] * 2


def test_checkpoint_that_one_rank_leaves_out_is_a_deadlock(smp_world: Any, tmp_path: Any) -> None:
    def body() -> None:
        if dist.get_rank():
            save(tmp_path).result()

    report = smp_world.report(body, ranks=3)
    assert report.verdict is VerdictKind.DEADLOCK
    assert "in thread 'AsyncCheckpointExecutor_0'" in str(report.error)


def test_process_that_saves_for_one_rank_is_refused(smp_world: Any, tmp_path: Any) -> None:
    def body() -> None:
        with pytest.raises(UnsupportedError, match=r"AsyncCheckpointerType\.PROCESS"):
            async_save(
                {}, checkpoint_id=tmp_path, async_checkpointer_type=AsyncCheckpointerType.PROCESS
            )

    smp_world.run(body, ranks=2)
