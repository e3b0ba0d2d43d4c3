"""Bugs of tensor point-to-point, of asynchronous work, of groups that scripts make, and of payloads."""

from __future__ import annotations

from conformance.mutants import asynchronous, payloads, point_to_point, process_groups

BUGS = (*point_to_point.BUGS, *asynchronous.BUGS, *process_groups.BUGS, *payloads.BUGS)
