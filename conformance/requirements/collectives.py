"""Requirements of the tensor collectives of a process group: values, layouts, dtypes, roots."""

from __future__ import annotations

from conformance.registry import Requirement

COLLECTIVES: tuple[Requirement, ...] = ()
