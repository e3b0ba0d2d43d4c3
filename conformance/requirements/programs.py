"""The requirements that single calls do not show: many of them, in one program."""

from __future__ import annotations

from conformance.requirements.registry import Capability, Level, Requirement

PROGRAMS = (
    Requirement(
        "PROG-VALUES",
        "In a program of objects and tensors, collectives and messages, synchronous and asynchronous, "
        "over overlapping groups, every rank holds after each call or wait what that call gives it.",
        "API 1.6 and the torch.distributed docs of each call",
        Level.L1,
        frozenset({Capability.PROCESS_GROUPS}),
    ),
    Requirement(
        "PROG-LAYOUTS",
        "The same of programs whose tensors are views with strides and offsets, of which nothing "
        "beside the view is written; sums of bool among their reductions.",
        "API 1.6 and the torch.distributed docs of each call",
        Level.L1,
        frozenset({Capability.PROCESS_GROUPS, Capability.LAYOUTS}),
    ),
)
