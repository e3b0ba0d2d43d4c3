"""What our engine finds by itself is taken away from it, so that a bug is left for the property to find:
other engines may not look.
"""

from __future__ import annotations

from conformance.mutants.protocol import Patch
from smp_core.torch.reduction import drift


def unseen_drift(patch: Patch) -> None:
    """Replicas that have drifted apart go on: all values have one checksum."""
    patch.setattr(drift, "digest", lambda tensor: 0)
