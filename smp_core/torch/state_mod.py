"""The library's inside as scripts read it: ``smp.state``, ``smp.core`` (API 1.1,
1.9).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from smp_core import comm, runtime
from smp_core.config import Config
from smp_core.torch import session as sessions
from smp_core.torch import weights
from smp_core.torch.exceptions import UnsupportedTrainingError
from smp_core.torch.session import SessionModel

__all__ = ["core", "state"]

#: A function of state dicts.
Translator = Callable[[Mapping[str, object]], dict[str, object]]


class ModuleManager:
    """``state.module_manager``."""

    @property
    def translate_functions(self) -> tuple[tuple[Translator, Translator], ...]:
        """Pairs of translators of whole state dicts: from the model's to that with Hugging Face's names, and back.

        There is one pair if the model has modules of Hugging Face that are distributed, else none.
        """
        model = sessions.current("smp.state.module_manager").model
        if model is None or not model.translations:
            return ()
        return ((functools.partial(weights.original, model), functools.partial(_back, model)),)


def _back(model: SessionModel, state: Mapping[str, object]) -> dict[str, object]:
    return dict(weights.translated(model, state))


class State:
    """``smp.state``: this rank's configuration and model."""

    module_manager = ModuleManager()

    @property
    def cfg(self) -> Config:
        """The configuration, as ``cfg.fp16``. Raises NotInitializedError before ``smp.init``."""
        return runtime.current("smp.state.cfg").config

    @property
    def model(self) -> SessionModel | None:
        """The DistributedModel, or None."""
        return sessions.current("smp.state.model").model

    @property
    def optimizer(self) -> Any:
        """The DistributedOptimizer, or None."""
        return sessions.current("smp.state.optimizer").optimizer

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """For each tp rank its ``optimizer.param_name_to_index()``, which is the same on all of them.

        INF, API 1.9: the sources have the names of this member and the next alone; they say what is counted, and by
        whom. Raises UnsupportedTrainingError before there are a DistributedModel and a DistributedOptimizer.
        """
        return [self._indices("param_name_to_index_tp_group") for _ in range(comm.tp_size())]

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """For each tp rank the names of ``param_name_to_index_tp_group`` by index; of a shared parameter the first."""
        found: dict[int, str] = {}
        for name, index in self._indices("param_index_to_name_tp_group").items():
            found.setdefault(index, name)
        return [dict(found) for _ in range(comm.tp_size())]

    def _indices(self, member: str) -> dict[str, int]:
        optimizer = sessions.current(f"smp.state.{member}").optimizer
        if optimizer is None:
            raise UnsupportedTrainingError(
                f"smp.state.{member}: there is no optimizer whose parameters could be numbered. Read it after "
                "smp.DistributedModel(module) and smp.DistributedOptimizer(optimizer)"
            )
        return optimizer.param_name_to_index()


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
