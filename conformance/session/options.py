"""The suite's options, each a command-line flag and an ini key of one name, and the self-test's flags.

This file imports nothing but pytest. Every session of every user of the distribution reads the file
alone, without importing its package (see pytest_smp/suite.py).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest


@dataclasses.dataclass(frozen=True, slots=True)
class SuiteOptions:
    """The values of the suite's options in a session; paths are absolute."""

    certify: bool  # whether anything left out is a failure: the gate of a CI
    expectations: Path | None  # the file of expected failures
    write_expectations: (
        Path | None
    )  # the file of expected failures to write, from the run's failures
    report: Path | None  # the JSON file to write the verdicts to
    engine: str  # the engine under test: a name, or module:attribute
    level: str  # the highest level whose requirements run: "L2", or "" for all
    smoke: bool  # whether the run is a rehearsal, with few examples of each property


_HELP = {
    "certify": "allow nothing skipped, deselected or stale; say which level is certified",
    "expectations": "the file of failures that are expected (TOML)",
    "write_expectations": "run everything and write the file of expected failures from what failed",
    "report": "write the verdicts to this file (JSON); in other sessions, those on tests on ranks",
    "engine": "what trains in the requirements of training: smp, ddp or module:attribute",
    "level": "run the requirements up to this level alone: L0, L1, ...",
    "smoke": "rehearse: at most three examples of each property; certifies nothing",
}
_FLAGS = {"certify", "smoke"}
_DEFAULTS = {"engine": "smp", "level": ""}  # of the options whose values are not files


def add_options(parser: pytest.Parser) -> None:
    """Declare the suite's flags and ini keys."""
    group = parser.getgroup("smp", "tests on ranks (pytest-smp)")
    for name, text in _HELP.items():
        flag = f"--smp-{name.replace('_', '-')}"
        told = f"conformance: {text}"
        if name in _FLAGS:
            group.addoption(flag, dest=f"smp_{name}", action="store_true", default=None, help=told)
            parser.addini(f"smp_{name}", told, type="bool", default=False)
        else:
            metavar = name.upper() if name in _DEFAULTS else "FILE"
            group.addoption(flag, dest=f"smp_{name}", default=None, metavar=metavar, help=told)
            parser.addini(f"smp_{name}", told, default=_DEFAULTS.get(name, ""))
    group.addoption(
        "--smp-selftest",
        action="store_true",
        help="plant bugs, and see whether the collected properties of `conformance` catch them",
    )
    group.addoption(
        "--smp-mutants",
        action="append",
        default=[],
        metavar="MODULE:ATTRIBUTE",
        help="more mutants for --smp-selftest: an iterable of conformance.mutants.protocol.Mutant",
    )
    group.addoption(
        "--smp-mutant",
        metavar="GLOB",
        help="try only the mutants of such a name, or none of them: !GLOB (--smp-selftest)",
    )


def given(config: pytest.Config) -> str:
    """The first flag on the command line that only the suite has, or the empty string."""
    names = (*(name for name in _HELP if name != "report"), "selftest", "mutants", "mutant")
    flags = (f"--smp-{name.replace('_', '-')}" for name in names if config.getoption(f"smp_{name}"))
    return next(flags, "")


def read(config: pytest.Config, *, ini: bool) -> SuiteOptions:
    """Read the options of a session. Raises pytest.UsageError for two that contradict each other.

    Without ``ini`` only the command line counts. A project's ini keys are meant for its sessions of the
    suite, and not for its other tests.
    """
    options = SuiteOptions(
        certify=bool(_value(config, "certify", ini)[0]),
        expectations=_path(config, "expectations", ini),
        write_expectations=_path(config, "write_expectations", ini),
        report=_path(config, "report", ini),
        engine=str(_value(config, "engine", ini)[0] or _DEFAULTS["engine"]),
        level=str(_value(config, "level", ini)[0] or ""),
        smoke=bool(_value(config, "smoke", ini)[0]),
    )
    if options.certify and options.write_expectations:
        raise pytest.UsageError(
            "--smp-certify and --smp-write-expectations: the first judges by the file of expected "
            "failures, the second changes it; use one of them"
        )
    for part in ("level", "smoke"):
        if getattr(options, part) and options.write_expectations:
            raise pytest.UsageError(
                f"--smp-{part} and --smp-write-expectations: what was not run, or hardly, would lose "
                "its entry; use one of them"
            )
    return options


def _value(config: pytest.Config, name: str, ini: bool) -> tuple[str | bool | None, Path]:
    """The value of an option, and the folder that a relative path in it starts from."""
    value = config.getoption(f"smp_{name}")
    if value is not None or not ini:
        return value, config.invocation_params.dir
    folder = config.inipath.parent if config.inipath else config.rootpath
    return config.getini(f"smp_{name}"), folder


def _path(config: pytest.Config, name: str, ini: bool) -> Path | None:
    value, folder = _value(config, name, ini)
    return folder / str(value) if value else None
