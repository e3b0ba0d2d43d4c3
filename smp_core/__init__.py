"""The SMP API on PyTorch. A script imports ``smp_core.torch as smp``, or SMP's own names (import_names.py)."""

from smp_core.import_names import install_import_names, remove_import_names

__all__ = ["install_import_names", "remove_import_names"]
