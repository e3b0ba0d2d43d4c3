"""The torch backend `smddp`: ranks exchange tensors through shared memory, and through TCP streams between machines.

Importing this package registers it: ``init_process_group("smddp")``. Reductions have the bits of `sim`.
"""

from __future__ import annotations

from smp_core.transport import torch_parts

torch_parts.require("the smddp backend")

from smp_core.transport.smddp.process_group import (  # noqa: E402
    BACKEND,
    register_backend,
    trouble,
)

__all__ = ["BACKEND", "trouble"]

register_backend()
