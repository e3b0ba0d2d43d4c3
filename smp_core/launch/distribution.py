"""The dictionary ``distribution`` of SageMaker's estimators, read and checked: which ranks it asks for.

Sources: AWS Run a Distributed Model Parallel Training Job (Launch a Training Job with the SageMaker
Python SDK); API 3.4.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from smp_core.config import Config
from smp_core.errors import ConfigError
from smp_core.gather_buffers import GatherBuffers

_COPY_MECHANISM = "btl_vader_single_copy_mechanism"
#: The options that a job of Open MPI always has.
DEFAULT_MPI_OPTIONS = ("--mca", _COPY_MECHANISM, "none")


@dataclasses.dataclass(frozen=True, slots=True)
class Distribution:
    """The ranks that a ``distribution`` asks for.

    Attributes:
        parameters: the parameters of ``smp.init``.
        processes_per_host: the number of ranks of a node.
        custom_mpi_options: options of Open MPI's command, as they were given.
        mpi_options: those without ``-x``, behind the default ones.
        environment: the variables that ``-x NAME=VALUE`` gives to the ranks.
    """

    parameters: Mapping[str, Any]
    processes_per_host: int
    custom_mpi_options: str
    mpi_options: tuple[str, ...]
    environment: Mapping[str, str]

    @classmethod
    def read(cls, given: object, where: str = "distribution") -> Distribution:
        """The ranks that a dictionary asks for.

        Raises ConfigError for a dictionary that launches no model parallelism, or with a bad value at any key;
        ``where`` is the dictionary's place in the message.
        """
        given = _mapping(given, where, ("smdistributed", "mpi"))
        parameters = _parameters(given, where)
        where += '["mpi"]'
        mpi = given.get("mpi")
        if mpi is None:
            raise ConfigError(
                f"{where} is missing: MPI starts the ranks of model parallelism. "
                'Give {"enabled": True, "processes_per_host": RANKS_OF_A_NODE}'
            )
        mpi = _mapping(mpi, where, ("enabled", "processes_per_host", "custom_mpi_options"))
        _check_enabled(mpi, where)
        processes = mpi.get("processes_per_host")
        if type(processes) is not int or processes < 1:
            found = repr(processes) if "processes_per_host" in mpi else "missing"
            raise ConfigError(
                f'{where}["processes_per_host"] is {found}: must be an int of at least 1, '
                "the number of ranks of each instance"
            )
        custom = mpi.get("custom_mpi_options") or ""
        options, environment = _mpi_options(custom, f'{where}["custom_mpi_options"]')
        return cls(parameters, processes, custom, DEFAULT_MPI_OPTIONS + options, environment)


def nearest(name: object, known: Iterable[str]) -> str:
    """The known name that is nearest to an unknown one, as a question; empty if none is near."""
    near = difflib.get_close_matches(str(name).lower(), known, n=1)
    return f"did you mean {near[0]}?" if near else ""


def _mapping(given: object, where: str, keys: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a dict, not {type(given).__name__} {given!r:.60}")
    for key in given:
        if key not in keys:
            near = nearest(key, keys) or f"the keys are {', '.join(keys)}"
            raise ConfigError(f"{where} has the unknown key {key!r}: {near}")
    return given


def _check_enabled(given: Mapping[str, Any], where: str) -> None:
    if given.get("enabled") is not True:
        found = repr(given["enabled"]) if "enabled" in given else "missing"
        raise ConfigError(
            f'{where}["enabled"] is {found}: model parallelism needs "enabled": True here'
        )


def _parameters(given: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The parameters of ``smp.init``: those of ``smdistributed``."""
    where += '["smdistributed"]'
    model: object = given.get("smdistributed")
    # AWS's page has both forms: the second stands in its listing for a container of one's own. Neither key is the name
    # of a strategy, so the form can mean one thing alone.
    short = isinstance(model, Mapping) and model.keys() & {"enabled", "parameters"}
    if not short:
        if isinstance(model, Mapping) and "dataparallel" in model:
            reason = (
                'the data parallelism library and "modelparallel" exclude each other'
                if "modelparallel" in model
                else 'jobs of the data parallelism library alone are not launched; give "modelparallel"'
            )
            raise ConfigError(
                f'{where} has "dataparallel": {reason}. Leave "dataparallel" out; the parameter "ddp": True is data '
                "parallelism of this library. See docs/spec/api.md#3.4"
            )
        if not model or (isinstance(model, Mapping) and not model.get("modelparallel")):
            raise ConfigError(
                f'{where}["modelparallel"] is missing: give {{"enabled": True, "parameters": {{...}}}}, '
                "with the parameters of smp.init"
            )
        model = _mapping(model, where, ("modelparallel",))["modelparallel"]
        where += '["modelparallel"]'
    model = _mapping(model, where, ("enabled", "parameters"))
    _check_enabled(model, where)
    where += '["parameters"]'
    parameters = model.get("parameters")
    if isinstance(parameters, str | os.PathLike):
        parameters, where = _read(Path(parameters), where), f"{where}: {os.fspath(parameters)}"
    if not parameters:
        found = "empty" if "parameters" in model else "missing"
        raise ConfigError(
            f'{where} is {found}: give the parameters of smp.init, such as {{"partitions": 2}}, '
            "or the path of a JSON file with them"
        )
    try:
        Config.parse(parameters)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return dict(parameters)


def _read(path: Path, where: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{where} is the path {path} (in {Path.cwd()}): {error.strerror}. "
            "Give a dict, or the path of a JSON file"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{where} is the path {path}, which holds no JSON: {error}") from None


def _mpi_options(given: object, where: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Options of Open MPI's command without ``-x``, and the variables that ``-x`` names with values.

    Without a value ``-x`` hands a variable of the launcher on, which ranks of this machine inherit anyway.
    """
    if not isinstance(given, str):
        raise ConfigError(
            f"{where} must be a str, as on a command line, not {type(given).__name__}"
        )
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise ConfigError(f"{where}={given!r}: {error}") from None
    if _COPY_MECHANISM in words:
        raise ConfigError(
            f"{where} has {_COPY_MECHANISM}: {' '.join(DEFAULT_MPI_OPTIONS)} is given to MPI already, which "
            "refuses a parameter that is listed twice. Leave it out. See docs/spec/api.md#6"
        )
    options: list[str] = []
    environment: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if word != "-x":
            options.append(word)
            continue
        name, equals, value = next(rest, "").partition("=")
        if not name:
            raise ConfigError(f"{where}={given!r}: behind -x stands NAME or NAME=VALUE")
        if equals:
            environment[name] = value
    try:
        GatherBuffers.of(environment)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return tuple(options), environment
