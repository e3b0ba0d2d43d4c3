"""Sessions that do other things too: nothing heavy without marked tests, and the user's own
torch.distributed beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smp_core.errors import BackendError

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session


def test_a_session_without_marked_tests_imports_nothing_heavy(session: Session) -> None:
    session.pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            names = ("torch", "numpy", "hypothesis", "pydantic", "cloudpickle", "smp_core.config")
            print("imported:", [name for name in names if name in sys.modules])
        """
    )
    ended = session.anew(
        "def test_x(): pass\ndef test_y(): assert False\n",
        "-p",
        "no:hypothesispytest",  # which imports Hypothesis by itself
        head="",
    )
    assert ended.counts == {"failed": 1, "passed": 1}
    ended.shows("imported: []")
    ended.hides("failures on ranks")


def test_the_users_own_process_groups_live_beside_the_ranks(session: Session) -> None:
    ended = session.apart(
        """
        hook, world = sys.excepthook, dist.distributed_c10d._world

        @pytest.mark.smp
        def test_first():
            dist.barrier()

        def test_a_group_that_lives_between_two_runs():
            assert (sys.excepthook, dist.distributed_c10d._world) == (hook, world)
            assert not dist.is_initialized()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            check(dist.group.WORLD)
            dist.destroy_process_group()

        @pytest.fixture(scope="module")
        def gloo(tmp_path_factory):
            store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            yield dist.group.WORLD
            dist.destroy_process_group()

        def check(group):
            assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("gloo", 0, 1)
            assert dist.group.WORLD is group
            numbers = torch.tensor([7])
            dist.all_reduce(numbers)
            assert numbers.item() == 7
            small = dist.new_group([0])
            dist.broadcast(numbers, 0, group=small)
            dist.destroy_process_group(small)

        def check_ranks():
            assert (dist.get_backend(), dist.get_world_size()) == ("sim", 3)
            numbers = torch.tensor([dist.get_rank()])
            dist.all_reduce(numbers)
            assert numbers.item() == 0 + 1 + 2

        def test_before(gloo):
            check(gloo)

        @pytest.mark.smp(ranks=3)
        def test_marked():
            check_ranks()

        def test_after(gloo):
            check(gloo)

        @pytest.mark.smp(ranks=3)
        def test_fails():
            check_ranks()
            if dist.get_rank():
                dist.barrier()

        def test_after_failure(gloo, smp_world):
            check(gloo)
            smp_world.run(check_ranks, ranks=3)
            check(gloo)
        """
    )
    assert ended.counts == {"failed": 1, "passed": 6}
    ended.shows("DeadlockError: deadlock: 2 of 3 ranks wait")


def test_a_hypothesis_that_keeps_its_context_elsewhere_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Private parts are used here; without them, draws on ranks would fail in the dark."""
    from hypothesis import control

    from pytest_smp import running

    monkeypatch.delattr(control, "_current_build_context")
    with pytest.raises(BackendError, match="this version of Hypothesis keeps its build context"):
        running._hypothesis_context()
