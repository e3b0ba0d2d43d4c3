"""The protocol of the backends that packages bring to ``smp-run``."""

from __future__ import annotations

from typing import Protocol

from smp_core.launch.job import ScriptJob
from smp_core.launch.output import RankOutput

#: The version of `ScriptRunner`, higher after each change of the protocol; a runner that was written for another
#: version is refused.
RUNNER_VERSION = 1


class ScriptRunner(Protocol):
    """A backend that runs scripts on ranks. An entry point of the group ``smp_core.launch`` names such an object.

    Attributes:
        protocol: the `RUNNER_VERSION` that it was written for.
    """

    protocol: int

    def __call__(self, job: ScriptJob, output: RankOutput) -> int:
        """Run the script of a job on its ranks, and show their output. The job was checked.

        Returns the exit code of the first rank that failed, or 0. Raises BackendError if the backend cannot run here.
        """
