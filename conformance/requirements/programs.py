"""The requirements that need many calls in one program."""

from __future__ import annotations

from conformance.requirements.registry import Capability, Level, Requirement

PROGRAMS = (
    Requirement(
        "PROG-VALUES",
        "In a program of objects and tensors, collectives and messages, synchronous and asynchronous calls, "
        "over overlapping groups, every rank holds the right result after each call or wait.",
        "API 1.6 and the torch.distributed docs of each call",
        Level.L1,
        frozenset({Capability.PROCESS_GROUPS}),
    ),
    Requirement(
        "PROG-LAYOUTS",
        "Every rank also holds the right results in programs whose tensors are views with strides and "
        "offsets, and no byte beside a view is written. The reductions include sums of bools.",
        "API 1.6 and the torch.distributed docs of each call",
        Level.L1,
        frozenset({Capability.PROCESS_GROUPS, Capability.LAYOUTS}),
    ),
)
