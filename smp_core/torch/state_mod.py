"""The library's inside as scripts read it: ``smp.state``, ``smp.core`` (API 1.1,
1.9).
"""

from __future__ import annotations

from typing import Any

from smp_core import comm, runtime
from smp_core.config import Config
from smp_core.torch import session as sessions

__all__ = ["core", "state"]


class ModuleManager:
    """``state.module_manager``: ``translate_functions`` are pairs of translators of state dicts. There
    are none.
    """

    translate_functions: tuple[object, ...] = ()


class State:
    """``smp.state``: this rank's configuration and model."""

    module_manager = ModuleManager()

    @property
    def cfg(self) -> Config:
        """The configuration, as ``cfg.fp16``. Raises NotInitializedError before ``smp.init``."""
        return runtime.current("smp.state.cfg").config

    @property
    def model(self) -> Any:
        """The DistributedModel, or None."""
        return sessions.current("smp.state.model").model

    @property
    def optimizer(self) -> Any:
        """The DistributedOptimizer, or None."""
        return sessions.current("smp.state.optimizer").optimizer


class Core:
    """``smp.core``."""

    @property
    def initialized(self) -> bool:
        """True if ``smp.init`` has run on this rank."""
        return runtime.is_initialized()

    def barrier(self, group: comm.CommGroup = comm.CommGroup.WORLD) -> None:
        """``smp.barrier``."""
        comm.barrier(group)


state, core = State(), Core()
