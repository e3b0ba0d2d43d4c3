"""The command ``smp-run``: it starts a script on ranks of this machine, or runs it as one rank of another launcher."""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from smp_core.config import Config
from smp_core.errors import ArgumentError, ConfigError, SmpError
from smp_core.launch import backends, gpus, rank
from smp_core.launch.distribution import Distribution
from smp_core.launch.job import ScriptJob, cores
from smp_core.launch.local_paths import local_folder
from smp_core.launch.output import OutputStyle, RankOutput
from smp_core.transport.launchers import Launch, launch_of
from smp_core.variables import PARAMETERS

_USAGE = 2  # the exit code for a command that was given wrongly
_EPILOG = """\
Under another launcher leave out -n: `mpirun -n 8 smp-run --cpu train.py` makes each process a rank of that job.
"""


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    found = argparse.ArgumentParser(
        "smp-run",
        description="Run a training script that was written for SMP on several ranks.",
        epilog=_EPILOG,
    )
    found.add_argument(
        "-n",
        "--ranks",
        type=int,
        help="the number of ranks (default: processes_per_host, or the product of the degrees)",
    )
    found.add_argument(
        "--backend",
        help=f"{', '.join(backends.names())} (default: mpi where an MPI is present, else gloo)",
    )
    found.add_argument(
        "--cpu", action="store_true", help="let the script see a stand-in for torch.cuda"
    )
    found.add_argument(
        "--config",
        metavar="FILE",
        help="parameters of smp.init as JSON, or an estimator's whole distribution",
    )
    found.add_argument(
        "-p",
        dest="parameters",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a parameter of smp.init; wins over --config and over the script; may be repeated",
    )
    found.add_argument(
        "--channel",
        dest="channels",
        metavar="NAME=DIR",
        action="append",
        default=[],
        help="a folder that the script finds as SM_CHANNEL_NAME; may be repeated",
    )
    found.add_argument(
        "--trust-checkpoints",
        action="store_true",
        help="let checkpoints run code when they are loaded",
    )
    found.add_argument(
        "--output",
        choices=[each.value for each in OutputStyle],
        default=OutputStyle.PREFIX.value,
        help="show lines behind their ranks, rank by rank at the end, or as they are",
    )
    found.add_argument(
        "--mpiexec", default="", metavar="COMMAND", help="the command that starts an MPI job"
    )
    found.add_argument("script", help="the script")
    found.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    count = len(options.arguments)
    if words[len(words) - count - 2 :][:2] == [options.script, "--"]:
        options.arguments.insert(0, "--")  # argparse takes the first one for its own
    try:
        return _run(options)
    except SmpError as error:
        print(_message(error), file=sys.stderr)
        return _USAGE
    except KeyboardInterrupt:
        print("smp-run: ended by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _message(error: SmpError) -> str:
    text = str(error)
    return text if text.startswith("smp-run: ") else f"smp-run: {text}"


def _run(options: argparse.Namespace) -> int:
    launch = launch_of(os.environ)
    inside = launch if launch is not None and launch.size > 1 else None
    given, distribution = _config(options.config)
    parameters = _parameters(given, options.parameters)
    ranks = options.ranks
    if ranks is None and inside is None and distribution is not None:
        ranks = distribution.processes_per_host
    if ranks is None and not options.backend and launch is not None and launch.starts_one_rank:
        inside = launch if not parameters or _ranks(None, parameters, None) == 1 else None
    job = ScriptJob(
        script=options.script,
        arguments=tuple(options.arguments),
        ranks=_ranks(ranks, parameters, inside),
        parameters=parameters,
        environment={
            **({} if distribution is None else distribution.environment),
            **_channels(options.channels),
        },
        mpi_options=() if distribution is None else distribution.mpi_options,
        cpu=options.cpu,
        trusts_checkpoints=options.trust_checkpoints,
        mpiexec=options.mpiexec,
    )
    job.check()
    if inside is not None:
        _check_gpus(job)
        if inside.rank == 0:
            for note in _notes(job, inside.local_size or inside.size):
                print(note, file=sys.stderr, flush=True)
        os.environ.update(job.variables(inside.local_size))
        rank.run_here(job, inside, None)
    return run(job, options.backend, OutputStyle(options.output))


def run(job: ScriptJob, backend: str | None, style: OutputStyle) -> int:
    """Run a job that was checked on a backend, or on the default one; return the exit code.

    Raises ArgumentError for an unknown backend, or a stand-in for torch.cuda where there are GPUs, and BackendError if
    the backend cannot run here.
    """
    _check_gpus(job)
    name, trouble = (backend, "") if backend else backends.default(job.mpiexec)
    start, output = backends.runner(name), RankOutput(style, job.ranks)
    many = "1 rank" if job.ranks == 1 else f"{job.ranks} ranks"
    output.say(f"smp-run: {Path(job.script).name} on {many} ({name}): starting")
    if trouble:
        output.say(f"smp-run: the ranks are no MPI job: {trouble}")
    for note in _notes(job, 1 if name == "sim" else job.ranks):
        output.say(note)
    return start(job, output)


def _check_gpus(job: ScriptJob) -> None:
    """Raise ArgumentError if the ranks would be refused the stand-in for torch.cuda, because they have GPUs."""
    found = gpus.count(job.environment) if job.cpu else 0
    if found and gpus.torch_finds_some(job.environment):
        raise ArgumentError(
            f"smp-run: --cpu: this machine has {found} GPUs, so nothing stands in for torch.cuda; {gpus.REMEDY}"
        )


def _notes(job: ScriptJob, processes: int) -> Iterator[str]:
    """Lines about a job of which so many processes are on this machine, for the user to know before it starts."""
    if processes > cores():
        yield f"smp-run: {processes} ranks share {cores()} cores: steps take longer than on a core for each rank"
    found = gpus.count(job.environment)
    if found and not job.cpu:
        yield f"smp-run: this machine has {found} GPUs, and models train on the CPU; {gpus.REMEDY}"
    if job.cpu is not False:
        where = "" if job.cpu else " if there is no GPU"
        yield f"smp-run: the script sees a stand-in for torch.cuda (--cpu){where}; it computes on the CPU"
    if job.hides_smp:
        yield (
            "smp-run: Hugging Face's libraries do not find SMP by these parameters: for scripts of Trainer add "
            "-p partitions=1, or the number that there is"
        )


def _ranks(given: int | None, parameters: dict[str, Any], launch: Launch | None) -> int:
    """The number of ranks. Raises ArgumentError if nothing says it, or if it contradicts the launcher."""
    if launch is not None:
        if given not in (None, launch.size):
            raise ArgumentError(
                f"smp-run: -n {given}: this process is rank {launch.rank} of {launch.size} of {launch.launcher.name} "
                "already. Leave out -n, or start smp-run outside of it"
            )
        return launch.size
    if given is not None:
        if given < 1:
            raise ArgumentError(f"smp-run: -n {given}: a world needs at least one rank")
        return given
    if not parameters:
        raise ArgumentError("smp-run: give the number of ranks by -n, or degrees by --config or -p")
    config = Config.parse(parameters)
    return (
        config.pipeline_parallel_degree
        * config.tensor_parallel_degree
        * config.sharded_data_parallel_degree
    )


def _config(file: str | None) -> tuple[Mapping[str, Any], Distribution | None]:
    """The parameters in a file, and the distribution if it holds one."""
    if file is None:
        return {}, None
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"smp-run: --config {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ArgumentError(f"smp-run: --config {file} is not UTF-8: {error}") from None
    found = _object(text, f"--config {file}")
    if not found.keys() & {"smdistributed", "mpi"}:
        return found, None
    distribution = Distribution.read(found, f"--config {file}: distribution")
    return distribution.parameters, distribution


def _parameters(file: Mapping[str, Any], given: Sequence[str]) -> dict[str, Any]:
    """The parameters of the environment, of a file and of options; the later ones win."""
    found: dict[str, Any] = {}
    if os.environ.get(PARAMETERS):
        found.update(_object(os.environ[PARAMETERS], f"environment variable {PARAMETERS}"))
    found.update(file)
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise ArgumentError(f"smp-run: -p {each}: write KEY=VALUE")
        found[key] = _value(value)
    return found


def _channels(given: Sequence[str]) -> dict[str, str]:
    """The environment variables that tell a script of its channels."""
    folders = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not equals or not name:
            raise ArgumentError(f"smp-run: --channel {each}: write NAME=DIR")
        folders[name] = local_folder(folder, f"--channel {name}")
    if not folders:
        return {}
    found = {f"SM_CHANNEL_{name.upper()}": folder for name, folder in folders.items()}
    return {**found, "SM_CHANNELS": json.dumps(sorted(folders))}


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} must hold a JSON object, not {type(found).__name__}")
    return found


def _value(text: str) -> Any:
    """A value as JSON or Python writes it; any other text is a str."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return text
