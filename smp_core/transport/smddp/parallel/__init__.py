"""SMDDP's data-parallel module, by the shorter one of its two names."""

from __future__ import annotations

from smp_core.transport.smddp.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
