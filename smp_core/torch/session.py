"""What training remembers on one rank: its model, its optimizer, and the step in progress.

A session belongs to the rank's runtime, so it is the rank's own where ranks are threads, and it goes
with ``smp.shutdown``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from smp_core import runtime
from smp_core.runtime import Runtime

if TYPE_CHECKING:
    from smp_core.torch.model import DistributedModel
    from smp_core.torch.optimizer import DistributedOptimizer


@dataclasses.dataclass(eq=False, slots=True)
class Session:
    """One rank's training.

    ``step`` is the step in progress, as the engine keeps it; None outside of steps. ``steps`` counts
    the steps that have begun, the same on every rank. ``restored`` is the Placement that a partial
    checkpoint brought; it holds instead of a new decision.
    """

    runtime: Runtime
    model: DistributedModel | None = None
    optimizer: DistributedOptimizer | None = None
    step: Any = None
    steps: int = 0
    timeline: Any = ()  # what the last step executed here (pipeline/timeline.py)
    tracing: bool = False
    tape: Any = None  # of delayed initialisation (creation.Tape)
    restored: Any = None
    offload: Any = None  # what would have been offloaded (offload.Ledger)


def current(call: str) -> Session:
    """This rank's session, made on the first call. Raises NotInitializedError, naming ``call``."""
    owner = runtime.current(call)
    if owner.training is None:
        owner.training = Session(owner)
    session: Session = owner.training
    return session
