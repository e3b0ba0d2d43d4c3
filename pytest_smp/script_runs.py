"""``smp_world.run_script``: a script as ``__main__`` on the ranks of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from pytest_smp.ranks.sim.scripts import RankMain, execute_script, script_modules
from smp_core.errors import ArgumentTypeError
from smp_core.launch import script
from smp_core.launch.job import ScriptJob
from smp_core.transport import current_rank


def script_job(path: str | os.PathLike[str], arguments: Sequence[str], ranks: int) -> ScriptJob:
    """The script, found and compiled once.

    Raises ArgumentError if there is no such script or it is not valid Python, ArgumentTypeError for arguments that
    are no list of strings.
    """
    if isinstance(arguments, str) or not all(isinstance(each, str) for each in arguments):
        raise ArgumentTypeError(
            f"smp_world.run_script: arguments {arguments!r}: must be a list of strings, as ['--lr', '0.1']"
        )
    job = ScriptJob(script=os.path.abspath(path), arguments=tuple(arguments), ranks=ranks, cpu=None)
    job.check()
    return job


@contextlib.contextmanager
def _as_main(job: ScriptJob, main: ModuleType) -> Iterator[None]:
    """While entered, ``main`` is ``__main__``, and this process has the script's arguments and SMP's names."""
    with script_modules(job, main), script.prepare(job, job.ranks):
        yield


class ScriptRun:
    """The body of a script's run. Where ranks are threads, the controller enters it around them."""

    def __init__(self, job: ScriptJob) -> None:
        self.job = job
        self._names: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def around_threads(self) -> Iterator[None]:
        """While entered, ranks that are threads of this process may run the body."""
        self._names = [script.namespace_of(self.job.script) for _ in range(self.job.ranks)]
        with _as_main(self.job, RankMain(self._names)):
            yield

    def __call__(self) -> None:
        """Run the script on this rank; raise ScriptExit where it ends by an exit code other than 0."""
        rank = current_rank.current()
        assert rank is not None
        code = self.job.code()
        if current_rank.ranks_are_threads():
            execute_script(code, self._names[rank.rank])
            return
        main = ModuleType("__main__")
        vars(main).update(script.namespace_of(self.job.script))
        with _as_main(self.job, main):
            execute_script(code, vars(main))
