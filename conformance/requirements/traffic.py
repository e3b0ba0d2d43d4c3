"""Requirements of point-to-point, asynchronous work, groups in flight and their life."""

from __future__ import annotations

from conformance.registry import Requirement

TRAFFIC: tuple[Requirement, ...] = ()
