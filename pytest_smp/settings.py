"""The plugin's options: each a command-line flag, an ini key of the same name, a default, and a
check.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from pytest_smp import launch
from pytest_smp.ranks.backends import find_backend
from pytest_smp.ranks.schedule import Schedule
from smp_core.errors import SmpError


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The values in force for a session."""

    ranks: int  # at most this many ranks; the number for a test that does not give one
    backend: str
    timeout: float  # seconds for one run
    seed: int  # of every rank's random generators
    strict: bool  # a process group left over fails the run
    mpiexec: str = ""  # how an MPI job is started
    check: bool = True  # the board: mismatch and deadlock verdicts on rank processes
    explore: int = 0  # schedules that a marked test is run under; 0 is round-robin alone
    schedule: Schedule | None = None  # replayed in every run, or None: what the test says
    timeouts: str = "verdict"  # the effect of a wait's time-out on sim
    replicas: bool = False  # ranks that must be equal are compared after each optimizer's step
    require_ranks: bool = False  # a test for which there are too few ranks is an error, not a skip


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise ValueError
    return value


def _backend(text: str) -> str:
    find_backend(text)
    return text  # module:attribute is found again by it, not by the backend's own name


def _timeouts(text: str) -> str:
    if text not in ("verdict", "simulated"):
        raise ValueError
    return text


def _schedule(text: str) -> Schedule | None:
    return Schedule.parse(text) if text else None


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError
    return text.lower() in ("true", "1", "yes")


@dataclasses.dataclass(frozen=True, slots=True)
class _Option:
    name: str
    default: str
    convert: Callable[[str], Any]
    needs: str
    help: str
    otherwise: str = ""  # the meaning of an empty default, in words

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        return f"--smp-{self.name.replace('_', '-')}"


_OPTIONS = (
    _Option(
        "ranks",
        "8",
        _positive_int,
        "a whole number of at least 1",
        "number of ranks that a test may use",
    ),
    _Option("backend", "sim", _backend, "a backend's name", "what the ranks are made of"),
    _Option(
        "timeout",
        "60",
        _seconds,
        "a number of seconds above 0",
        "seconds that one run on the ranks may take",
    ),
    _Option(
        "seed",
        "0",
        _seed,
        "a whole number from 0 to 2**32 - 1",
        "seed of every rank's random generators",
    ),
    _Option(
        "explore",
        "0",
        _count,
        "a whole number",
        "run each marked test under so many drawn orders of turns; a property, each example (sim)",
    ),
    _Option(
        "schedule",
        "",
        _schedule,
        "a token that a failure printed",
        "replay this order of the ranks' turns in every run (sim)",
        otherwise="what the test says",
    ),
    _Option(
        "mpiexec",
        "",
        str,
        "a command",
        "the mpiexec that starts the ranks of the mpi backend; with arguments, if it needs others "
        "than we give",
        otherwise="the one beside this Python, or on the path",
    ),
    _Option(
        "check",
        "true",
        _flag,
        "true or false",
        "whether rank processes say what they call, so that mismatches and deadlocks are verdicts "
        "(true or false)",
    ),
    _Option(
        "strict", "false", _flag, "true or false", "fail a run that leaves a process group behind"
    ),
    _Option(
        "timeouts",
        "verdict",
        _timeouts,
        "verdict or simulated",
        "whether time-outs of waits fire on a simulated clock where ranks would be in a deadlock (sim)",
    ),
    _Option(
        "replicas",
        "false",
        _flag,
        "true or false",
        "compare replicas after each step of an optimizer: a difference fails the run",
    ),
    _Option(
        "require_ranks",
        "false",
        _flag,
        "true or false",
        "refuse a test that needs more ranks than there are, which is skipped otherwise",
    ),
)


def add_options(parser: pytest.Parser) -> None:
    """Declare flags and ini keys."""
    group = parser.getgroup("smp", "tests on ranks (pytest-smp)")
    for option in _OPTIONS:
        text = f"{option.help} (default: {option.default or option.otherwise})"
        extra: dict[str, Any] = {"metavar": option.name.upper()}
        if option.convert is _flag and option.default == "false":
            extra = {"action": "store_const", "const": "true"}
        group.addoption(option.flag, dest=f"smp_{option.name}", default=None, help=text, **extra)
        parser.addini(f"smp_{option.name}", text)


def read(config: pytest.Config) -> Settings:
    """The values in force. Raises pytest.UsageError for a bad one, before anything starts."""
    values = {}
    for option in _OPTIONS:
        given = config.getoption(f"smp_{option.name}")
        source = option.flag
        if given is None:
            given = str(config.getini(f"smp_{option.name}") or "")
            source = (
                f"smp_{option.name} in {config.inipath.name if config.inipath else 'the ini file'}"
            )
            given = given or _under_launcher(option.name) or option.default
        try:
            values[option.name] = option.convert(given)
        except SmpError as error:
            raise pytest.UsageError(f"{source}={given}: {error}") from None
        except ValueError:
            raise pytest.UsageError(f"{source}={given}: must be {option.needs}") from None
    size = launch.job_size()
    if size is not None and launch.is_external(values["backend"]):
        if values["ranks"] > size:
            raise pytest.UsageError(
                f"--smp-ranks={values['ranks']}: the launcher has started {size} ranks; start more, "
                "or ask for fewer"
            )
        if getattr(config.option, "numprocesses", None):
            raise pytest.UsageError("-n: a launcher's ranks serve one pytest; leave xdist out")
    return Settings(**values)


def _under_launcher(name: str) -> str:
    """The default of an option in a session that a launcher's job serves."""
    size = launch.job_size()
    return "" if size is None else {"backend": "external", "ranks": str(size)}.get(name, "")


def chosen(config: pytest.Config) -> bool:
    """Return whether the user set any of the options."""
    return any(
        config.getoption(f"smp_{option.name}") is not None or config.getini(f"smp_{option.name}")
        for option in _OPTIONS
    )
