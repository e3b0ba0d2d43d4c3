"""Random numbers of distributed modules: each tp rank draws its own where activations are split.

Where all tp ranks hold the same activation (with ``prescaled_batch``), they draw the same numbers: in a step, all begin
from the seed of tp rank 0 (execution/engine.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from smp_core.torch.execution import streams
from smp_core.torch.tensor_parallel.exchange import TensorGroup


@contextlib.contextmanager
def of_this_rank(group: TensorGroup | None) -> Iterator[None]:
    """While entered, torch's default CPU generator is at the start of a stream of this tp rank's own.

    The stream derives from one number of the generator. On exit the generator is after that number, so that ranks
    whose generators were alike have generators alike. Without a group nothing is changed.
    """
    if group is None:
        yield
        return
    seed = streams.draw_seed()
    with streams.entered(streams.derive(seed, "tp rank", group.rank)):
        yield
