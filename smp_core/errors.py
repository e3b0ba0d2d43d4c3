"""Every error that the project raises on purpose.

An error that a user can catch derives from :class:`SmpError` and, where Python has a fitting built-in class,
from that class too. The exceptions that are no errors of the user's (:class:`Cancelled`,
:class:`RunTimeout`, :class:`JobLost`) derive from ``BaseException``, so that no ``except Exception`` in a test body
swallows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

#: How messages write the address of a page. A message may hold another one, whose addresses are replaced already.
_PAGES = re.compile(r"(?<![\w/])docs/spec/(?=\w+\.md)")
#: A wheel carries the specification inside of the package (pyproject.toml).
_SHIPPED = Path(__file__).parent / "_docs" / "spec"


def with_pages(message: str) -> str:
    """The message with addresses of pages that its reader can open: as they are where the package lies in a clone,
    otherwise those of the wheel's own copy.
    """
    if not _SHIPPED.is_dir():
        return message
    return _PAGES.sub(lambda found: f"{_SHIPPED}/", message)


class SmpError(Exception):
    """Base of all errors that the project raises on purpose.

    Attributes:
        raised_by: the world rank whose exception this rank raises the error for; None for an error of its own.
    """

    raised_by: int | None = None

    def __str__(self) -> str:
        return with_pages(super().__str__())


class ConfigError(SmpError, ValueError):
    """Raised when a configuration has an unknown key, a bad value, or values that contradict each
    other.

    The message names the key, the value and the rule. Sources: API 3.
    """


class NotInitializedError(SmpError, RuntimeError):
    """Raised when an API call needs ``smp.init`` and this rank has not called it."""


class AlreadyInitializedError(SmpError, RuntimeError):
    """Raised when ``smp.init`` is called again with a different configuration."""


class ImportNameError(SmpError, ModuleNotFoundError):
    """Raised when a script imports a module of ``smdistributed`` that is not here (import_names.py)."""


class RealInstallationError(SmpError, ImportError):
    """Raised when SMP's import names are asked for, and another ``smdistributed`` has them."""


class MissingTensorFlowError(SmpError, ModuleNotFoundError):
    """Raised when the front end for TensorFlow is imported and TensorFlow is not installed."""


class ArgumentTypeError(SmpError, TypeError):
    """Raised when an argument of a call is of a type that the call does not take."""


class ArgumentError(SmpError, ValueError):
    """Raised when a call's arguments have the right types and do not fit together."""


class ScriptFailedError(SmpError, RuntimeError):
    """Raised by ``LocalEstimator.fit`` when the script fails.

    Attributes:
        exit_code: the exit code of the first rank that failed; 128 and the number of a signal if one ended it.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class TrainingError(SmpError):
    """Base of the errors of steps, models, partitions and checkpoints."""


class BatchSizeError(TrainingError, ArgumentError):
    """Raised when ``microbatches`` does not divide a batch, or a tensor has no batch axis to split."""


class StructureError(TrainingError, ValueError):
    """Raised when the body of a step returns another structure for one microbatch than for another."""


class OutsideStepError(TrainingError, RuntimeError):
    """Raised when the model is called, or its ``backward``, outside of a step, and the pipeline degree
    is above 1; and when a step is entered inside a step.
    """


class SecondModelError(TrainingError, RuntimeError):
    """Raised when a second ``DistributedModel`` or ``DistributedOptimizer`` is made."""


class PartitionError(TrainingError, ValueError):
    """Raised when a partition does not exist, or parameters are shared across partitions."""


class StepAbortedError(TrainingError, RuntimeError):
    """Raised on the other ranks when the body of a step, a module in it, or a hook or load around it,
    raises on one rank.
    """


class UnsupportedTrainingError(TrainingError, NotImplementedError):
    """Raised when a documented limit of the API is met (API 6), as by ``no_sync``."""


class CheckpointError(TrainingError, ValueError):
    """Raised when a checkpoint is torn, foreign, or does not fit the model or the partition."""


class RankError(SmpError, ValueError):
    """Raised when a rank is out of range, is not in the group, or names the caller itself."""


class PayloadError(SmpError, TypeError):
    """Raised on the sender when an object cannot be pickled; names the part that cannot."""


class UnsupportedError(SmpError, NotImplementedError):
    """Raised when a backend is asked for an operation or dtype that it does not claim."""


class ThreadError(SmpError, RuntimeError):
    """Raised when a call that belongs to a rank is made in a thread that is not that rank."""


class BackendError(SmpError, RuntimeError):
    """Raised when a backend is unknown, cannot be opened, or does not fit the installed libraries."""


class VerdictError(SmpError, RuntimeError):
    """Base of the verdicts on a whole world: the cause of the run's end is a fact about all of its ranks."""


class DeadlockError(VerdictError):
    """Raised when no rank can run: each rank's operation and the wait-for graph are in the message.

    Attributes:
        waits_for: for each rank that waits, the ranks without which it cannot go on.
    """

    waits_for: Mapping[int, tuple[int, ...]] = {}


class CollectiveMismatchError(VerdictError):
    """Raised when ranks make different calls at one sequence number of a group; names both calls."""


class ReplicaError(VerdictError):
    """Raised when ranks that must hold equal parameters or gradients do not, after a step of an optimizer: names the
    tensor, the step, the first element and its values.
    """


class LeakError(VerdictError):
    """Raised when a run ends with a message never received or an asynchronous work never waited
    for.
    """


class RaceError(VerdictError):
    """Raised when memory of an operation in flight is changed before it was waited for; names the
    rank, the operation, and where it was issued.
    """


class CrashError(VerdictError):
    """Raised when a rank process ends before its body does: names the rank, the signal or exit code,
    and the rank's last activity.
    """


class InjectedError(SmpError, RuntimeError):
    """Raised on a rank by a fault that was asked for without an error of its own."""


class FaultNotReachedError(SmpError, RuntimeError):
    """Raised in the controller when a run ended well although one of its faults never struck: the test did
    not test the failure that it describes.
    """


class StuckError(VerdictError):
    """Raised when rank processes did not come back within the time limit; carries every rank's
    stack. They have been ended, so that Hypothesis may try again, where RunTimeout must not.
    """


class RankDisagreementError(VerdictError):
    """Raised when the ranks of one test do not agree whether to skip it or to expect its failure."""


class RunTimeout(BaseException):
    """Raised in the controller when a run exceeds its time limit; carries every rank's stack.

    A ``BaseException``, because Hypothesis must not shrink it: each further example would take the
    whole limit again.
    """


class JobLost(BaseException):
    """Raised in the controller when a launcher's job has lost a rank: nothing more can run on it.

    A ``BaseException``, because Hypothesis must not try again.
    """


class Cancelled(BaseException):
    """Raised in a rank whose world has ended, to unwind it. Passes through ``except Exception``."""


#: Exceptions that end a rank because its run has ended; no other rank is left to hear of them.
RUN_ENDED: tuple[type[BaseException], ...] = (Cancelled, VerdictError)


class UnknownTorchWarning(UserWarning):
    """Issued once by a process that opens ranks with a release of torch that was not tried."""


class UnknownTensorFlowWarning(UserWarning):
    """Issued once by a process that uses a release of TensorFlow that was not tried."""
