"""The arguments and environment variables of a script, as SageMaker's training toolkit makes them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping
from typing import Any

from smp_core.errors import ArgumentTypeError

#: Hyperparameters of these names are the toolkit's own, and no arguments of the script.
_OWN = "sagemaker_"


def plain(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters as they come out of JSON, through which SageMaker sends each: a tuple is a list then.

    Raises ArgumentTypeError for one that JSON cannot hold, or whose name is no str.
    """
    found = {}
    for name, value in hyperparameters.items():
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(f"hyperparameters: the name {name!r} must be a str")
        try:
            found[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise ArgumentTypeError(
                f"hyperparameters[{name!r}] is a {type(value).__name__}, which JSON cannot hold: {error}. "
                "Give a number, a str, a bool, or lists and dicts of them"
            ) from None
    return found


def arguments(hyperparameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Hyperparameters as arguments of a script: sorted by name, ``--name value``, or ``-n value`` for one letter.

    A dict is written ``key=value,key=value``, any other value as ``str`` writes it.
    """
    names = sorted(name for name in hyperparameters if not name.startswith(_OWN))
    pairs = (
        (f"--{name}" if len(name) > 1 else f"-{name}", _argument(hyperparameters[name]))
        for name in names
    )
    return tuple(itertools.chain.from_iterable(pairs))


def _argument(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={each}" for key, each in sorted(value.items()))
    return str(value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnvironment:
    """The values that the toolkit tells a script by ``SM_`` and the name of each in capitals.

    All ranks of a job get one environment, so ``current_host`` is the first node's on each of them.
    """

    job_name: str
    hosts: tuple[str, ...]
    num_gpus: int
    num_cpus: int
    current_instance_type: str
    hyperparameters: Mapping[str, Any]
    channels: Mapping[str, str]
    model_dir: str
    output_dir: str
    output_data_dir: str
    output_intermediate_dir: str
    module_dir: str
    user_entry_point: str
    framework_params: Mapping[str, Any]

    def variables(self) -> dict[str, str]:
        """The environment variables."""
        script = {
            name: value for name, value in self.hyperparameters.items() if not name.startswith(_OWN)
        }
        own = {name: each for name, each in self.hyperparameters.items() if name.startswith(_OWN)}
        values = {
            "hosts": self.hosts,
            "current_host": self.hosts[0],
            "current_instance_type": self.current_instance_type,
            "network_interface_name": "lo",
            "num_gpus": self.num_gpus,
            "num_cpus": self.num_cpus,
            "hps": script,
            "user_args": arguments(script),
            "channels": sorted(self.channels),
            "model_dir": self.model_dir,
            "output_dir": self.output_dir,
            "output_data_dir": self.output_data_dir,
            "output_intermediate_dir": self.output_intermediate_dir,
            "module_dir": self.module_dir,
            "module_name": os.path.splitext(self.user_entry_point)[0],
            "user_entry_point": self.user_entry_point,
            "framework_params": {**own, **self.framework_params},
            "log_level": 20,
        }
        described = {
            **values,
            "job_name": self.job_name,
            "hyperparameters": script,
            "channel_input_dirs": self.channels,
        }
        values |= {"training_env": described}
        values |= {f"channel_{name}": path for name, path in self.channels.items()}
        values |= {f"hp_{name}": value for name, value in script.items()}
        found = {f"SM_{name.upper()}": _variable(value) for name, value in values.items()}
        return {**found, "TRAINING_JOB_NAME": self.job_name}


def _variable(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
