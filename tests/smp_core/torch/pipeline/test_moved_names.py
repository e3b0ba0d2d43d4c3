"""Documented names that have moved out of smp_core.torch.pipeline."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from smp_core.torch.execution import timeline


def test_the_timeline_is_found_at_its_old_address_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"use smp_core\.torch\.execution\.timeline"):
        from smp_core.torch.pipeline import timeline as old
    assert old is timeline


def test_names_of_the_timeline_are_found_at_its_old_address_with_a_warning(monkeypatch):
    import smp_core.torch.pipeline as pipeline

    address = f"{pipeline.__name__}.timeline"
    monkeypatch.delitem(sys.modules, address, raising=False)
    try:
        old = importlib.import_module(address)
        with pytest.warns(
            DeprecationWarning, match="use smp_core.torch.execution.timeline"
        ) as told:
            from smp_core.torch.pipeline.timeline import violations
    finally:
        vars(pipeline).pop("timeline", None)  # by which an import binds it
        sys.modules.pop(address, None)
    assert violations is timeline.violations
    assert told[0].filename == __file__
    assert not hasattr(old, "nothing")


def test_the_replay_names_its_new_address():
    with pytest.raises(ImportError, match=r"use pytest_smp\.replay"):
        from smp_core.torch.pipeline import replay  # noqa: F401


def test_a_whole_module_that_version_0_1_pickled_loads_with_warnings() -> None:
    """Written by version 0.1: it names smp_core.torch.activations and smp_core.torch.pipeline.calls."""
    with pytest.warns(DeprecationWarning, match="has moved") as caught:
        module = torch.load(Path(__file__).parent / "module_of_0_1.pt", weights_only=False)
    assert {str(each.message).partition(".")[2].partition(":")[0] for each in caught} == {
        "torch.activations has moved",
        "torch.pipeline.calls has moved",
    }
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    module(x).sum().backward()
    assert module(x).tolist() == [[5.0, 11.0]]
    assert x.grad.tolist() == [[4.0, 6.0]]


def test_other_names_are_no_attributes():
    import smp_core.torch.pipeline as pipeline

    assert not hasattr(pipeline, "engine")
