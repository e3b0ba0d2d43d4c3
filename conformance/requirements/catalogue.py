"""All requirements, each declared once; properties point to them by :func:`requirement`.

Requirements of the API cite docs/spec. Requirements of process groups cite torch's documentation of
torch.distributed.
"""

from __future__ import annotations

import pytest

from conformance.requirements.api import API
from conformance.requirements.collectives import COLLECTIVES
from conformance.requirements.pipelines import PIPELINES
from conformance.requirements.precision import PRECISION
from conformance.requirements.programs import PROGRAMS
from conformance.requirements.registry import Registry
from conformance.requirements.sharded_checkpoints import SHARDED_CHECKPOINTS
from conformance.requirements.sharding import SHARDING
from conformance.requirements.steps import STEPS
from conformance.requirements.tensor_parallel import TENSOR_PARALLEL
from conformance.requirements.tensorflow import TENSORFLOW
from conformance.requirements.traffic import TRAFFIC

REQUIREMENTS = Registry(
    *API,
    *COLLECTIVES,
    *TRAFFIC,
    *PROGRAMS,
    *STEPS,
    *PIPELINES,
    *TENSOR_PARALLEL,
    *SHARDING,
    *SHARDED_CHECKPOINTS,
    *PRECISION,
    *TENSORFLOW,
)


def requirement(id: str) -> pytest.MarkDecorator:
    """Mark a property as a test of the requirement ``id``.

    Raises RequirementError for an unknown id; the error ends the collection of the property's file.
    """
    return pytest.mark.requirement(REQUIREMENTS.named(id).id)
