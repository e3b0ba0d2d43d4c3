"""The configurations that each architecture is trained with, on four ranks each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

RANKS = 4
MICROBATCHES = 2


@dataclasses.dataclass(frozen=True)
class Layout:
    """One column of the table.

    Attributes:
        name: the heading of the column.
        config: the keys of ``smp.init``.
        replicas: the number of different batches that the world trains on in a step.
        tensor: whether modules are distributed over TP groups.
    """

    name: str
    config: Mapping[str, Any]
    replicas: int
    tensor: bool = False


def _sharded(degree: int) -> dict[str, Any]:
    return {
        "sharded_data_parallel_degree": degree,
        "sdp_param_persistence_threshold": 12,  # biases of tiny models stay whole, weights do not
        "sdp_reduce_bucket_size": 3000,
        "sdp_gradient_clipping": 1e300,  # is never met: plain PyTorch does not clip
    }


_TENSOR = {"tensor_parallel_degree": 2}

LAYOUTS = tuple(
    Layout(name, {"ddp": True, "microbatches": MICROBATCHES, **config}, replicas, tensor)
    for name, config, replicas, tensor in (
        ("pp 2 x dp 2", {"pipeline_parallel_degree": 2}, 2, False),
        ("pp 4", {"pipeline_parallel_degree": 4}, 1, False),
        ("sharded 2", _sharded(2), 4, False),
        ("sharded 4", _sharded(4), 4, False),
        ("tp 2", _TENSOR, 4, True),
        ("tp 2 x sharded 2", {**_TENSOR, **_sharded(2), "prescaled_batch": True}, 2, True),
    )
)
BY_NAME = {layout.name: layout for layout in LAYOUTS}
