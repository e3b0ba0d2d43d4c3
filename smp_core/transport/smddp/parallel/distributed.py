"""SMDDP's data-parallel module, as scripts import it: torch's, with the arguments that scripts give."""

from __future__ import annotations

from typing import Any

from torch import nn


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's module of this name, on the default process group. ``device_ids`` and ``output_device`` are ignored: the
    backend `smddp` moves tensors of the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(module, **options)
