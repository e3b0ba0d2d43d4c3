"""``LocalEstimator``: the training job of SageMaker's ``PyTorch(...).fit(...)``, on ranks of this machine."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_core.config import Config
from smp_core.errors import ArgumentError, ArgumentTypeError, ConfigError, ScriptFailedError
from smp_core.gather_buffers import GatherBuffers
from smp_core.launch import command, toolkit
from smp_core.launch.arguments import (
    FIT_WITHOUT_EFFECT,
    WITH_EFFECT,
    WITHOUT_EFFECT,
    check_names,
    is_set,
)
from smp_core.launch.distribution import Distribution, nearest
from smp_core.launch.instances import GPUS, LOCAL
from smp_core.launch.job import ScriptJob, cores
from smp_core.launch.local_paths import channel_folders, is_remote, local_folder, local_path
from smp_core.launch.output import OutputStyle

Text = str | os.PathLike[str]

_PARAMETERS = "mp_parameters"  # the hyperparameter as which SageMaker hands the parameters over
_INTERRUPTED = 130

_OWN = ("backend", "cpu", "output")
_FIT = ("inputs", "job_name")


class LocalEstimator:
    """A script with its ranks and hyperparameters, by the arguments of SageMaker's estimators.

    ``fit`` runs the script on ``processes_per_host * instance_count`` ranks of this machine. Each instance is
    ``processes_per_host`` consecutive ranks, which the parameter ``ranks_per_node`` says if none is given.

    Args:
        entry_point: the script, relative to ``source_dir`` if there is one.
        source_dir: the working folder of the ranks, from which they also import.
        hyperparameters: the script's arguments, by name.
        distribution: SageMaker's dictionary with the keys ``smdistributed`` and ``mpi``.
        instance_type: a type has no more ranks than GPUs; ``local`` and ``local_gpu`` have no limit.
        instance_count: the number of instances.
        environment: further environment variables of the ranks.
        output_path: the folder for results; a new one in the temporary folder if None or a URI of S3.
        base_job_name: the first part of the name of jobs; the script's name if None.
        backend: the backend by its name; None: as ``smp-run`` without ``--backend``.
        cpu: whether the script sees a stand-in for ``torch.cuda``; None: where there is no GPU.
        output: the form of the ranks' output: ``prefix``, ``group`` or ``plain``.
        **others: SageMaker's other arguments. ``fit`` names them, and they change nothing.

    Attributes:
        model_data: the folder that the last ``fit`` gave to the script as ``SM_MODEL_DIR``; None before.

    Raises:
        ConfigError: for a bad ``distribution``, or one that does not fit the instances.
        ArgumentError, ArgumentTypeError: for another bad argument.
    """

    def __init__(
        self,
        entry_point: Text,
        *,
        source_dir: Text | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        distribution: Mapping[str, Any] | None = None,
        instance_type: str | None = "local",
        instance_count: int | None = 1,
        environment: Mapping[str, str] | None = None,
        output_path: Text | None = None,
        base_job_name: str | None = None,
        backend: str | None = None,
        cpu: bool | None = None,
        output: str = OutputStyle.PREFIX.value,
        **others: Any,
    ) -> None:
        check_names("LocalEstimator", others, WITHOUT_EFFECT, (*WITH_EFFECT, *_OWN))
        if is_remote(output_path):
            others["output_path"], output_path = output_path, None
        self._notes = _ignored("LocalEstimator", others)
        self._entry_point = os.fspath(entry_point)
        self._folder = "" if source_dir is None else local_folder(source_dir, "source_dir")
        self._name = base_job_name or Path(self._entry_point).stem
        self._results = None if output_path is None else local_path(output_path, "output_path")
        self._environment = _environment(environment or {})
        GatherBuffers.of(self._environment)
        self._backend, self._cpu, self._style = backend, cpu, _style(output)
        self._instances = 1 if instance_count is None else instance_count
        if type(self._instances) is not int or self._instances < 1:
            raise ConfigError(f"instance_count={instance_count!r}: must be an int of at least 1")
        self._type = instance_type or LOCAL[0]
        if distribution is None:
            raise ConfigError(
                "distribution is missing: LocalEstimator launches model parallelism. Give "
                '{"smdistributed": {"modelparallel": {...}}, "mpi": {...}}'
            )
        self._distribution = Distribution.read(distribution)
        self._check_type()
        self._parameters = dict(self._distribution.parameters)
        if self._instances > 1:
            self._parameters.setdefault("ranks_per_node", self._distribution.processes_per_host)
        self._check_world()
        self._hyperparameters = {
            **_hyperparameters(hyperparameters or {}),
            _PARAMETERS: self._parameters,
        }
        self.model_data: str | None = None

    @classmethod
    def of(
        cls,
        estimator: Any,
        *,
        backend: str | None = None,
        cpu: bool | None = None,
        output: str = OutputStyle.PREFIX.value,
    ) -> LocalEstimator:
        """The job that an estimator of the package ``sagemaker`` describes, such as an object of its class ``PyTorch``.

        Raises ArgumentTypeError for an object that is none, and what the class raises.
        """
        values = {name: getattr(estimator, name, None) for name in (*WITH_EFFECT, *WITHOUT_EFFECT)}
        # The method `hyperparameters` encodes values, and adds those of SageMaker itself.
        values["hyperparameters"] = getattr(estimator, "_hyperparameters", None)
        if values["entry_point"] is None:
            raise ArgumentTypeError(
                f"LocalEstimator.of: {type(estimator).__name__} object without an entry_point: give an estimator of "
                "a framework, such as an object of sagemaker.pytorch.PyTorch"
            )
        given: dict[str, Any] = {name: value for name, value in values.items() if is_set(value)}
        return cls(**given, backend=backend, cpu=cpu, output=output)

    def fit(
        self,
        inputs: Text | Mapping[str, Text] | None = None,
        *,
        job_name: str | None = None,
        **others: Any,
    ) -> None:
        """Run the script, and wait for its end.

        Args:
            inputs: the folder of the channel ``training``, by path or ``file://`` URI, or a dict of folders by channel.
            job_name: the name of the job and of its folder of results; None: ``base_job_name`` and the time.
            **others: ``wait``, ``logs`` and ``experiment_config``, which change nothing.

        Raises:
            ScriptFailedError: the script failed; ``exit_code`` is that of the first rank that did.
            ArgumentError: there is no such script, backend or input, or an input is not on this machine.
            BackendError: the backend cannot run here.
        """
        check_names("fit", others, FIT_WITHOUT_EFFECT, _FIT)
        channels = channel_folders(inputs)
        job = self._job()
        job.check()
        name = job_name or f"{self._name}-{time.strftime('%Y-%m-%d-%H-%M-%S')}"
        if Path(name).name != name:
            raise ArgumentError(
                f"fit: the job's name {name!r} names a folder: leave out the separators"
            )
        environment = {
            **self._environment_of(name, channels).variables(),
            **self._distribution.environment,
            **self._environment,
        }
        job = dataclasses.replace(job, environment=environment)
        notes = [*self._notes, *_ignored("fit", others), f"SM_MODEL_DIR is {self.model_data}"]
        for note in notes:
            print(f"smp-run: {note}", file=sys.stderr, flush=True)
        code = command.run(job, self._backend, self._style)
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            raise ScriptFailedError(f"{job.script} failed with exit code {code}", code)

    def _check_type(self) -> None:
        """Raise ConfigError if an instance has more ranks than its type has GPUs."""
        processes, gpus = self._distribution.processes_per_host, GPUS.get(self._type)
        where = 'distribution["mpi"]["processes_per_host"]'
        if gpus is None and self._type not in LOCAL:
            near = nearest(self._type, GPUS)
            self._notes.append(
                f"instance_type {self._type} is not known, so nothing limits {where} {processes}. {near}".rstrip()
            )
        if gpus is not None and processes > gpus:
            raise ConfigError(
                f"{where} is {processes}: {self._type} has {gpus} {'GPU' if gpus == 1 else 'GPUs'}, and each rank "
                f"has one of its own. Give at most {gpus}, or an instance_type with more"
            )

    def _check_world(self) -> None:
        try:
            Config.parse(self._parameters).check_world(self._ranks)
        except ConfigError as error:
            raise ConfigError(
                f"processes_per_host * instance_count = {self._distribution.processes_per_host} * "
                f"{self._instances} = {self._ranks} ranks: {error}"
            ) from None

    @property
    def _ranks(self) -> int:
        return self._distribution.processes_per_host * self._instances

    def _job(self) -> ScriptJob:
        return ScriptJob(
            script=str(Path(self._folder, self._entry_point).resolve()),
            arguments=toolkit.arguments(self._hyperparameters),
            ranks=self._ranks,
            parameters=self._parameters,
            cpu=self._cpu,
            mpi_options=self._distribution.mpi_options,
            folder=self._folder,
        )

    def _environment_of(
        self, name: str, channels: Mapping[str, str]
    ) -> toolkit.TrainingEnvironment:
        """The values that the script reads; makes the folders of its results."""
        given = self._results
        results = given / name if given else Path(tempfile.mkdtemp(prefix=f"{name}-"))
        model, output = results / "model", results / "output"
        data, intermediate = output / "data", output / "intermediate"
        for folder in (model, data, intermediate):
            folder.mkdir(parents=True, exist_ok=True)
        self.model_data = str(model)
        distribution = self._distribution
        return toolkit.TrainingEnvironment(
            job_name=name,
            hosts=tuple(f"algo-{index + 1}" for index in range(self._instances)),
            num_gpus=GPUS.get(self._type, distribution.processes_per_host),
            num_cpus=cores(),
            current_instance_type=self._type,
            hyperparameters=self._hyperparameters,
            channels=channels,
            model_dir=str(model),
            output_dir=str(output),
            output_data_dir=str(data),
            output_intermediate_dir=str(intermediate),
            module_dir=self._folder or str(Path(self._entry_point).resolve().parent),
            user_entry_point=self._entry_point,
            framework_params={
                "sagemaker_mpi_enabled": True,
                "sagemaker_mpi_num_of_processes_per_host": distribution.processes_per_host,
                "sagemaker_mpi_custom_mpi_options": distribution.custom_mpi_options,
            },
        )


def _ignored(call: str, given: Mapping[str, Any]) -> list[str]:
    """The line that names arguments without effect, if there are any."""
    names = ", ".join(sorted(given))
    return [f"arguments of {call} without effect here: {names}"] if names else []


def _hyperparameters(given: Mapping[str, Any]) -> dict[str, Any]:
    if _PARAMETERS in given:
        raise ConfigError(
            f"hyperparameters[{_PARAMETERS!r}]: give the parameters of smp.init by "
            'distribution["smdistributed"]["modelparallel"]["parameters"]'
        )
    return toolkit.plain(given)


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ArgumentTypeError(f"environment[{name!r}]={value!r}: name and value must be str")
    return dict(given)


def _style(given: str) -> OutputStyle:
    try:
        return OutputStyle(given)
    except ValueError:
        known = ", ".join(each.value for each in OutputStyle)
        raise ArgumentError(f"output={given!r}: the forms are {known}") from None
