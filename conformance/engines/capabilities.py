"""What an engine claims that it can do, as data. Nothing here imports torch."""

from __future__ import annotations

import enum


class EngineCapability(enum.StrEnum):
    """What an engine must have for a requirement to apply to it at all."""

    TRAINING = "training"  #: trains a model over replicas; every engine does
    PIPELINE = "pipeline"  #: pipeline degrees above 1
    SMP_API = "the SMP API"  #: it has ``api``: a namespace that a script imports as ``smp``
    REPLAYED = "replayed order"  #: the published order of reductions: no choice changes a bit
