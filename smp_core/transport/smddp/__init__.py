"""The torch backend `smddp`: ranks of one host that exchange tensors through shared memory.

Importing this package registers it: ``init_process_group("smddp")``. Reductions have the bits of `sim`.
"""

from __future__ import annotations

from smp_core.transport import torch_parts

torch_parts.require("the smddp backend")

from smp_core.transport.smddp.process_group import register_backend  # noqa: E402

register_backend()
