"""The optimizer of a script: its parameters, its update, and its state."""

from smp_core.torch.optimizer.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
