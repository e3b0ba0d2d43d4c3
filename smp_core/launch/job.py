"""A script that is to run on ranks, and what it is told: data that a launcher makes and each rank reads."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from smp_core.config import ALIASES, Config
from smp_core.errors import ArgumentError
from smp_core.gather_buffers import GatherBuffers
from smp_core.import_names import check_import_path
from smp_core.launch import gpus
from smp_core.variables import PARAMETERS, TRUST_CHECKPOINTS

#: The environment variable that does the same as TRUST_CHECKPOINTS for ``torch.load`` where it is called without
#: ``weights_only``, as libraries from before torch 2.6 do.
_TORCHS_TRUST = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
#: The environment variable that tells Hugging Face's libraries that a launcher of MPI jobs is at work (API 1.2).
_FRAMEWORK_PARAMETERS = "SM_FRAMEWORK_PARAMS"
_MPI_ENABLED = "sagemaker_mpi_enabled"
#: The parameter that these libraries look for; without it they do not take the ranks for those of SMP (API 1.2).
_PARTITIONS = "partitions"


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def import_path() -> list[str]:
    """The folders that this process imports from, without that of its own program or command."""
    return [each for each in (sys.path if sys.flags.safe_path else sys.path[1:]) if each]


def _object(text: str) -> dict[str, Any]:
    """The object that a text holds as JSON; an empty one for any other text, which libraries ignore as well."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScriptJob:
    """A script, its arguments, and the ranks that run it.

    Attributes:
        script: the path of the script; an absolute one if there is a folder.
        arguments: the script's own arguments.
        ranks: the number of ranks.
        parameters: parameters of ``smp.init`` that win over those of the script; empty for none.
        environment: further environment variables of the ranks.
        cpu: whether the script sees a stand-in for ``torch.cuda``; None: where there is no GPU.
        trusts_checkpoints: whether checkpoints may run code when they are loaded.
        mpiexec: the command that starts an MPI job, with all of its arguments; found by itself if empty.
        mpi_options: further arguments of that command, if it is Open MPI's.
        folder: the working folder of the ranks, from which they also import; that of the launcher if empty.
    """

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cpu: bool | None = False
    trusts_checkpoints: bool = False
    mpiexec: str = ""
    mpi_options: tuple[str, ...] = ()
    folder: str = ""

    def check(self) -> None:
        """Raise ArgumentError if there is no such script or it is not valid Python, ConfigError for parameters that are
        bad, or that do not fit the number of ranks, or a bad size of a buffer, and RealInstallationError if the script
        would find a ``smdistributed`` that is not ours.
        """
        path = Path(self.script)
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "there is no such file"
            raise ArgumentError(f"smp-run: script {self.script}: {what} (in {Path.cwd()})")
        try:
            self.code()
        except OSError as error:
            raise ArgumentError(f"smp-run: script {self.script}: {error.strerror}") from None
        except (SyntaxError, ValueError) as error:
            told = "".join(traceback.format_exception_only(error)).rstrip()
            raise ArgumentError(
                f"smp-run: script {self.script} is not valid Python:\n{told}"
            ) from None
        Config.parse(self.parameters).check_world(self.ranks)
        GatherBuffers.of({**os.environ, **self.environment})
        check_import_path("smp-run", [*self.folders(), *import_path()])

    def folders(self) -> list[str]:
        """The script's own folders, from which it imports first."""
        return [str(Path(self.script).resolve().parent), *([self.folder] if self.folder else [])]

    def code(self) -> CodeType:
        """The script's code. Raises SyntaxError or ValueError if it is not valid Python, OSError for other trouble."""
        path = os.path.abspath(self.script)
        return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)

    def variables(self, local: int | None = None) -> dict[str, str]:
        """The environment variables of the ranks of this machine, beside those that the launcher itself has.

        ``local`` is the number of these ranks; None: all ranks are here.
        """
        found = dict(self.environment)
        if self.parameters:
            found[PARAMETERS] = json.dumps(self._shown_parameters())
            given = found.get(_FRAMEWORK_PARAMETERS, os.environ.get(_FRAMEWORK_PARAMETERS, ""))
            found[_FRAMEWORK_PARAMETERS] = json.dumps({_MPI_ENABLED: True, **_object(given)})
        if self.trusts_checkpoints:
            found[TRUST_CHECKPOINTS] = found[_TORCHS_TRUST] = "1"
        threads = max(1, cores() // (local or self.ranks))
        found.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", str(threads)))
        for name, value in self._toolkit_defaults(local or self.ranks).items():
            if name not in os.environ:
                found.setdefault(name, value)
        return found

    def _toolkit_defaults(self, local: int) -> dict[str, str]:
        """The variables of SageMaker's training toolkit that scripts take for the defaults of their arguments."""
        here, devices = self.folder or os.getcwd(), gpus.count(self.environment)
        if self.cpu or (self.cpu is None and not devices):
            devices = local
        return {
            "SM_MODEL_DIR": here,
            "SM_OUTPUT_DATA_DIR": here,
            "SM_NUM_GPUS": str(devices),
            "SM_HOSTS": '["algo-1"]',
            "SM_CURRENT_HOST": "algo-1",
        }

    def _shown_parameters(self) -> dict[str, Any]:
        """The parameters as the ranks read them: with ``partitions``, by which Hugging Face's libraries find SMP, where
        the parameters say how many there are.
        """
        parameters = dict(self.parameters)
        for alias, name in ALIASES.items():
            if name in parameters:
                parameters.setdefault(alias, parameters[name])
        if Config.parse(parameters).sharded_data_parallel_degree > 1:
            parameters.setdefault(_PARTITIONS, 1)  # a rule allows no other number
        return parameters

    @property
    def hides_smp(self) -> bool:
        """True if there are parameters, and Hugging Face's libraries do not find SMP by them."""
        return bool(self.parameters) and _PARTITIONS not in self._shown_parameters()

    def write(self, path: Path) -> None:
        """Write the job for its ranks."""
        path.touch(0o600)
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ScriptJob:
        """Read a job that was written by ``write``."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values["arguments"], values["mpi_options"] = (
            tuple(values[name]) for name in ("arguments", "mpi_options")
        )
        return cls(**values)
