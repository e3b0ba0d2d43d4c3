"""The errors of training (API 6 and 9.1: the sources name none, so the classes are ours).

Each derives from SmpError and from the built-in class that fits. An error of an API call is raised in the
same words on every rank of the world that takes part in the step.
"""

from __future__ import annotations

from smp_core.errors import BatchSizeError as BatchSizeError
from smp_core.errors import CheckpointError as CheckpointError
from smp_core.errors import OutsideStepError as OutsideStepError
from smp_core.errors import PartitionError as PartitionError
from smp_core.errors import SecondModelError as SecondModelError
from smp_core.errors import StepAbortedError as StepAbortedError
from smp_core.errors import StructureError as StructureError
from smp_core.errors import TrainingError as TrainingError
from smp_core.errors import UnsupportedTrainingError as UnsupportedTrainingError


class UnsupportedMemberError(UnsupportedTrainingError, AttributeError):
    """Raised when an attribute is read that SMP has, and this run or this package lacks. ``hasattr`` is then false."""


class DetachedLossError(TrainingError, RuntimeError):
    """Raised when ``model.backward`` gets a tensor that does not depend on the model's parameters."""


class ReplicaDriftError(TrainingError, RuntimeError):
    """Raised when ranks that hold the same parameters no longer do: an update, a clipping or a load was not the same
    on all of them.
    """


class ShardingError(TrainingError, RuntimeError):
    """Raised when a sharded parameter or its state was changed or read in a way that its sharding does not allow."""


class IndivisibleError(TrainingError, ValueError):
    """Raised when ``tensor_parallel_degree`` does not divide a size of a distributed module: channels, heads, or a
    dimension of an embedding.
    """


class TensorParallelError(TrainingError, RuntimeError):
    """Raised when the ranks of a TP group bring batches that do not go together, or a distributed module is used
    without the TP group.
    """


class StandInError(TrainingError, RuntimeError):
    """Raised when the stand-in for ``torch.cuda`` cannot be installed, or has not the device that a script asks for."""
