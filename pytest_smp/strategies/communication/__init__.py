"""Communication programs: random, valid by construction, or with one fault; printed as code."""

from pytest_smp.strategies.communication.coverage import Cell, all_cells, cells
from pytest_smp.strategies.communication.drawing import programs, sample
from pytest_smp.strategies.communication.faults import (
    FAULTS,
    RACES,
    InvalidProgram,
    ProgramFault,
    Score,
    Truth,
    invalid_programs,
    sample_invalid,
)
from pytest_smp.strategies.communication.program import Program
from pytest_smp.strategies.communication.steps import Lie, Step

__all__ = [
    "FAULTS",
    "RACES",
    "Cell",
    "InvalidProgram",
    "Lie",
    "Program",
    "ProgramFault",
    "Score",
    "Step",
    "Truth",
    "all_cells",
    "cells",
    "invalid_programs",
    "programs",
    "sample",
    "sample_invalid",
]
