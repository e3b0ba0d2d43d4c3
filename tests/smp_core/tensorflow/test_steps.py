"""A step over a pipeline has the losses, outputs and weights of the unpartitioned model, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings

from conformance.cases.keras import KerasCase as Case
from conformance.cases.keras import keras_cases as cases
from conformance.cases.keras_script import DROPOUT, check, train

STEPS = 5


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_a_fixed_model(smp_world: Any, partitions: int, outer: bool) -> None:
    blocks = (
        ("dense", 0),
        ("batch norm", 1),
        (DROPOUT if outer else "dropout", 0),
        ("nested", 1),
        ("cond", 0),
        ("while", 1),
    )
    case = Case(
        tuple((kind, place % partitions) for kind, place in blocks),
        0,
        1 % partitions,
        True,
        0,
        partitions,
    )
    found = smp_world.run(
        train, "tensorflow", case, STEPS, outer, ranks=partitions, config=case.config()
    )
    check(case, found, STEPS, outer)


def test_a_loop_before_an_assignment_under_simple(smp_world: Any) -> None:
    # The gradient of the loop gives it further inputs; it and all that follows are the forward pass none the less.
    case = Case(
        (("while", 0), ("batch norm", 0)), 0, 0, False, 0, 1, pipeline="simple", optimizer="SGD"
    )
    found = smp_world.run(train, "tensorflow", case, STEPS, ranks=1, config=case.config())
    check(case, found, STEPS)


# Without shrinking, which would take minutes.
@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(case=cases())
def test_a_drawn_model(smp_world: Any, case: Case) -> None:
    found = smp_world.run(
        train, "tensorflow", case, STEPS, ranks=case.partitions, config=case.config()
    )
    check(case, found, STEPS)
