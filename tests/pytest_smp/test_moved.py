"""An import of a backend's name from its old address finds the name, with a warning."""

from __future__ import annotations

import importlib
import warnings

import pytest

from pytest_smp import moved
from pytest_smp.ranks import backends, capabilities, faults, protocols, torch_backends
from smp_core.transport import protocols as transport

moved.install()


@pytest.mark.parametrize(
    ("address", "name", "now"),
    [
        ("smp_core.backends", "open_backend", backends),
        ("smp_core.backends", "torch_backend", torch_backends),
        ("smp_core.backends.base", "Job", protocols),
        ("smp_core.backends.base", "Group", transport),
        ("smp_core.backends.capabilities", "Capabilities", capabilities),
        ("smp_core.backends.faults", "Claim", faults),
    ],
)
def test_an_old_address_leads_to_the_same_object(address, name, now):
    with pytest.warns(DeprecationWarning, match=rf"{name} is {now.__name__}\.{name} now"):
        assert getattr(importlib.import_module(address), name) is getattr(now, name)


@pytest.mark.parametrize(
    ("former", "today", "now"),
    [
        ("Host", "Executor", protocols),
        ("HostOptions", "ExecutorOptions", protocols),
        ("Recorder", "CallRecorder", transport),
        ("Seat", "RankEnvironment", transport),
    ],
)
def test_a_former_name_leads_to_the_object_of_todays_name(former, today, now):
    base = importlib.import_module("smp_core.backends.base")
    with pytest.warns(DeprecationWarning, match=rf"{former} is {now.__name__}\.{today} now"):
        assert getattr(base, former) is getattr(now, today)


def test_the_warning_names_the_file_that_imports():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from smp_core.backends import open_backend  # noqa: F401
        from smp_core.backends.base import Job  # noqa: F401
    assert caught
    assert {each.filename for each in caught} == {__file__}


def test_a_backend_forwards_open_host():
    sim = backends.BACKENDS["sim"]
    with pytest.warns(DeprecationWarning, match="use open_executor") as caught:
        assert sim.open_host is sim.open_executor
    assert caught[0].filename == __file__


def test_what_never_was_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        importlib.import_module("smp_core.backends").nothing  # noqa: B018


def test_other_modules_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("smp_core.backends.hosts")
