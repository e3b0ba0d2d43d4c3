"""``smp.optimizers``: the optimizers that SMP has from apex, by the formulas of their papers (API 1.1, 1.9)."""

from smp_core.torch.optimizers.lamb import FusedLAMB
from smp_core.torch.optimizers.novograd import FusedNovoGrad

#: The documentation's spelling of the one that scripts import (API 8.16).
FusedLamb = FusedLAMB

__all__ = ["FusedLAMB", "FusedLamb", "FusedNovoGrad"]
