"""Mutants' switches for the own checks of ``smp_core``, so that only a property can find a bug.

Other engines may not have such checks.
"""

from __future__ import annotations

from conformance.mutants.protocol import Patch
from smp_core.torch.reduction import drift


def unseen_drift(patch: Patch) -> None:
    """Disable the check for drift: every tensor has the same checksum."""
    patch.setattr(drift, "digest", lambda tensor: 0)
