"""The requirements, each declared once; properties point to them by :func:`requirement`.

Sources of the API's requirements are in docs/spec; of the process groups', torch's own
documentation of torch.distributed.
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
from conformance.requirements.traffic import TRAFFIC

REQUIREMENTS = Registry(
    *API,
    *COLLECTIVES,
    *TRAFFIC,
    *PROGRAMS,
    *STEPS,
    *PIPELINES,
    *SHARDING,
    *SHARDED_CHECKPOINTS,
    *PRECISION,
)


def requirement(id: str) -> pytest.MarkDecorator:
    """Mark a property as a test of the requirement ``id``.

    Raises RequirementError, which ends the collection of the property's file, if there is none.
    """
    return pytest.mark.requirement(REQUIREMENTS.named(id).id)
