"""``torch:NAME``: which names there are, and what a backend that torch knows is given to work with."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import smp_core.torch as smp
from pytest_smp.ranks.backends import find_backend, open_backend
from pytest_smp.ranks.capabilities import Capabilities, Capability
from pytest_smp.ranks.protocols import ExecutorOptions, Job
from pytest_smp.ranks.torch_backends import torch_backend
from smp_core.errors import BackendError
from smp_core.transport import current_rank

RANKS = 3
TO = smp.RankType.WORLD_RANK
EXAMPLES = Path(__file__).parents[3] / "examples" / "thirdparty"


class Given:
    """The same arguments on every rank."""

    def __init__(self, *args):
        self._args = args

    def __call__(self, rank):
        return self._args, {}


def run(name: str, *bodies, args=()):
    """The values that the bodies return, one run each."""
    executor = open_backend(name, ExecutorOptions(ranks=RANKS))
    try:
        reports = [
            executor.open(RANKS).run(Job(body=body, arguments=Given(*args), timeout=20.0))
            for body in bodies
        ]
    finally:
        executor.close()
    assert [report.error for report in reports] == [None] * len(bodies)
    return [report.values for report in reports]


def _transport() -> str:
    return type(current_rank.current().fabric.objects).__name__


def _objects():
    rank = smp.rank()
    if rank == 1:
        smp.send("first", 0, TO)
        smp.send(b"", 0, TO)
        smp.broadcast("x" * 2000, smp.WORLD)
        return None
    got = [smp.recv_from(1, TO) for _ in range(3 if rank == 0 else 1)]
    return [each if len(each) < 10 else len(each) for each in got]


def _gathered():
    rank = smp.rank()
    smp.barrier()
    return [smp.allgather(each, smp.WORLD) for each in (rank, None, "ab" * 500 * rank)][:2]


EXPECTED = [[["first", b"", 2000], None, [2000]], [[[0, 1, 2], [None] * 3]] * 3]


def test_a_backend_without_messages_has_objects_over_the_store():
    """torch's fake group takes every message and delivers none."""
    transports, *values = run("torch:fake", _transport, _objects, _gathered)
    assert transports == ["StoreObjects"] * RANKS
    assert values == EXPECTED


def _sent(taken: Path) -> bool:
    if smp.rank() == 0:
        smp.send("x", 1, TO)
    elif smp.rank() == 1:
        time.sleep(0.1)  # a send that does not wait is over by then
        taken.touch()
        smp.recv_from(0, TO)
    else:
        return True
    return taken.exists()


def test_a_send_over_the_store_lasts_until_it_is_taken(tmp_path):
    assert run("torch:fake", _sent, args=(tmp_path / "taken",)) == [[True] * RANKS]


def test_a_backend_with_messages_has_objects_over_them():
    transports, *values = run("torch:gloo", _transport, _objects, _gathered)
    assert transports == ["GroupObjects"] * RANKS
    assert values == EXPECTED


def test_a_module_that_registers_it_is_imported_on_the_ranks(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    transports, *values = run("torch:inorder@inorder", _transport, _objects, _gathered)
    assert transports == ["GroupObjects"] * RANKS
    assert values == EXPECTED


def test_torchs_own_bring_what_is_known_of_them():
    assert find_backend("torch:gloo").capabilities == find_backend("gloo").capabilities
    assert find_backend("torch:gloo").expectations == "conformance:expected/gloo.toml"
    assert find_backend("torch:other").capabilities == Capabilities()


@pytest.mark.parametrize("name", ["torch:", "torch:x@", "torch:@module"])
def test_half_a_name_is_refused(name):
    with pytest.raises(BackendError, match=r"write torch:NAME, or torch:NAME@package\.module"):
        find_backend(name)


@pytest.mark.parametrize("name", ["torch:threaded", "torch:Threaded@some.module"])
def test_the_removed_name_says_what_to_take_instead(name):
    with pytest.raises(BackendError, match=rf"'{name}' was removed: .*=sim; .*=gloo"):
        find_backend(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch:nowhere", r"knows no backend 'nowhere'; it has .*gloo.*torch:nowhere@package"),
        ("torch:nowhere@json", r"knows no backend 'nowhere' after the import of json; it has"),
        ("torch:mpi", r"built without mpi; it has .*gloo"),
        ("torch:x@no_such_module", r"No module named 'no_such_module'"),
    ],
)
def test_a_name_that_torch_does_not_know_is_refused(name, text):
    with pytest.raises(BackendError, match=text):
        open_backend(name)


def test_a_backend_of_ones_own_says_what_it_is():
    claims = Capabilities(claims=frozenset({Capability.RANKS}))
    backend = torch_backend(
        "mine", summary="of mine", capabilities=claims, expectations="mine:expected.toml"
    )
    assert (backend.name, backend.summary) == ("mine", "of mine")
    assert (backend.capabilities, backend.expectations) == (claims, "mine:expected.toml")
    with pytest.raises(BackendError, match="knows no backend 'mine'"):
        backend.open_executor()
