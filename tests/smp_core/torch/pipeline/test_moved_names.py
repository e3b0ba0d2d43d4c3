"""Documented names that have moved out of smp_core.torch.pipeline."""

import pytest

from smp_core.torch.execution import timeline


def test_the_timeline_is_found_at_its_old_address_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"use smp_core\.torch\.execution\.timeline"):
        from smp_core.torch.pipeline import timeline as old
    assert old is timeline


def test_the_replay_names_its_new_address():
    with pytest.raises(ImportError, match=r"use pytest_smp\.replay"):
        from smp_core.torch.pipeline import replay  # noqa: F401


def test_other_names_are_no_attributes():
    import smp_core.torch.pipeline as pipeline

    assert not hasattr(pipeline, "engine")
