"""``--smp-timeouts=simulated``: where no rank can go on, the earliest time-out of a wait fires."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session

TESTS = """
    from datetime import timedelta

    def seconds(number):
        return timedelta(seconds=number)

    @pytest.mark.smp(ranks=2)
    def test_earliest_wait_first(smp):
        store = dist.distributed_c10d._get_default_store()
        if smp.rank() == 0:
            with pytest.raises(RuntimeError, match="Timed out waiting 40000ms for recv from rank 1"):
                dist.irecv(torch.ones(2), 1).wait(seconds(40))
            dist.send(torch.ones(1), 1)
        else:
            with pytest.raises(dist.DistStoreError, match="wait timeout after 30000ms, keys: /absent"):
                store.wait(["absent"], seconds(30))
            value = torch.zeros(1)
            dist.recv(value, 0)
            assert value.item() == 1.0

    @pytest.mark.smp(ranks=3)
    def test_recovery_from_a_lost_rank(smp):
        if smp.rank() == 2:
            return  # lost
        with pytest.raises(RuntimeError, match="Rank 2 failed to pass monitoredBarrier in 5000 ms"):
            dist.monitored_barrier(timeout=seconds(5))
        if smp.rank() == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.zeros(1), 0)

    @pytest.mark.smp(ranks=2)
    def test_time_out_of_all_waits(smp):
        dist.init_process_group("gloo", timeout=seconds(60))
        if smp.rank() == 0:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="Timed out waiting 60000ms for all_reduce"):
                    dist.all_reduce(torch.ones(2))

    @pytest.mark.smp(ranks=2)
    def test_late_rank_is_waited_for(smp):
        if smp.rank() == 0:
            dist.irecv(torch.ones(2), 1).wait(seconds(1))
        else:
            with pytest.raises(RuntimeError, match="absent"):
                dist.distributed_c10d._get_default_store().wait(["absent"], seconds(0.5))
            dist.send(torch.ones(2), 0)

    @pytest.mark.smp(ranks=2)
    def test_fails_without_a_time_out(smp):
        if smp.rank() == 0:
            dist.all_reduce(torch.ones(2))
"""


def test_time_outs_fire_on_the_simulated_clock(session: Session) -> None:
    ended = session(TESTS, "--smp-timeouts=simulated", ranks=3)
    assert ended.counts == {"passed": 4, "failed": 1}, ended.text
    ended.shows("DeadlockError: deadlock: 1 of 2 ranks wait")


def test_a_wait_that_cannot_end_is_a_verdict_otherwise(session: Session) -> None:
    ended = session(TESTS, ranks=3)
    assert ended.counts == {"failed": 5}
    ended = session(TESTS, "--smp-timeouts=never", ranks=3)
    ended.shows("--smp-timeouts=never: must be verdict or simulated")
