"""Uneven numbers of batches end in a deadlock that names the rank, in each form of training."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_smp.ranks.protocols import VerdictKind
from tools.profiles import uneven

CASES = st.sampled_from([*uneven.FORMS]), st.integers(0, uneven.RANKS - 1), st.integers(1, 3)


@pytest.fixture(scope="module", params=["sim", "gloo", "smddp"])
def backend(request):
    with uneven.opened(request.param) as executor:
        yield request.param, executor


@given(*CASES)
@settings(max_examples=3, deadline=None)
def test_uneven_work_is_a_deadlock(backend, form, short, extra):
    name, executor = backend
    case = uneven.run(executor, name, form, short, extra)
    assert (case.verdict, case.named) == (VerdictKind.DEADLOCK, short), case.message


def test_the_table_tells_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setitem(uneven.FORMS, "DDP", lambda: lambda: None)
    assert uneven.main(["--backends", "sim", "--forms", "DDP"]) == 1
    assert "3 runs, 3 wrong" in capsys.readouterr().out
