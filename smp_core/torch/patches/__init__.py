"""SMP's replacements of functions of torch (API 1.1)."""

from smp_core.torch.patches import checkpoint

__all__ = ["checkpoint"]
