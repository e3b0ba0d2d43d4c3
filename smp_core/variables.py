"""The environment variables by which a launcher tells a training script something."""

from __future__ import annotations

#: The parameters of ``smp.init``, as JSON (API 1.2).
PARAMETERS = "SM_HP_MP_PARAMETERS"
#: Lets checkpoints run code when they are loaded, if it is "1".
TRUST_CHECKPOINTS = "SMP_TRUST_CHECKPOINTS"
