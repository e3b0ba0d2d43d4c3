"""All hand-written mutants: this project's, and those that a session adds (``--smp-mutants``)."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from conformance.mutants import (
    clipping,
    collectives,
    configuration,
    errors,
    gradients,
    group_calls,
    groups,
    lifecycle,
    pipelines,
    precision,
    programs,
    rare,
    rounding,
    send_recv,
    sharded_checkpoints,
    sharded_gradients,
    sharded_parameters,
    sharding,
    steps,
    tensor_modules,
    tensor_parallel,
    tensorflow,
    traffic,
    training,
    transformers,
)
from conformance.mutants.protocol import Mutant, MutantError
from conformance.requirements.catalogue import REQUIREMENTS
from conformance.requirements.registry import RequirementError


def checked(*areas: Iterable[object]) -> tuple[Mutant, ...]:
    """Check the mutants of these areas, and return them in one tuple. Raises MutantError."""
    found: dict[str, Mutant] = {}
    for area in areas:
        for each in area:
            if not isinstance(each, Mutant):
                raise MutantError(f"{each!r} is no conformance.mutants.protocol.Mutant")
            if each.name in found:
                raise MutantError(f"two mutants are called {each.name!r}")
            try:
                REQUIREMENTS.named(each.requirement)
            except RequirementError as error:
                raise MutantError(f"mutant {each.name!r}: {error}") from None
            found[each.name] = each
    return tuple(found.values())


def load(where: str) -> Iterable[object]:
    """Import the mutants at ``module:attribute``, without checking them. Raises MutantError."""
    module_name, colon, attribute = where.partition(":")
    if not (module_name and colon and attribute):
        raise MutantError("must be module:attribute")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # any kind: importing runs the code of a third party
        raise MutantError(
            f"cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    try:
        mutants = getattr(module, attribute)
    except AttributeError:
        raise MutantError(f"module {module_name} has no attribute {attribute!r}") from None
    if not isinstance(mutants, Iterable) or isinstance(mutants, str | bytes):
        raise MutantError(f"{mutants!r} is no iterable of mutants")
    return mutants


MUTANTS: tuple[Mutant, ...] = checked(
    lifecycle.BUGS,
    configuration.BUGS,
    groups.BUGS,
    send_recv.BUGS,
    group_calls.BUGS,
    errors.BUGS,
    collectives.BUGS,
    rare.BUGS,
    traffic.BUGS,
    programs.BUGS,
    gradients.BUGS,
    pipelines.BUGS,
    training.BUGS,
    steps.BUGS,
    precision.BUGS,
    rounding.BUGS,
    sharding.BUGS,
    sharded_parameters.BUGS,
    sharded_gradients.BUGS,
    clipping.BUGS,
    sharded_checkpoints.BUGS,
    tensor_parallel.BUGS,
    tensor_modules.BUGS,
    transformers.BUGS,
    tensorflow.BUGS,
)
