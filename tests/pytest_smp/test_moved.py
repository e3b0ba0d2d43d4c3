"""What backends of others imported from its old address is found there, with a warning."""

from __future__ import annotations

import importlib

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


def test_what_never_was_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        importlib.import_module("smp_core.backends").nothing  # noqa: B018


def test_other_modules_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("smp_core.backends.hosts")
