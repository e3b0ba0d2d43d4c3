"""``smp.raises``: some ranks raise, and the others end by the consequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session

TESTS = """
    def load(smp, failing):
        if smp.rank() in failing:
            raise KeyError(f"shard {smp.rank()} is missing")
        smp.barrier()

    @pytest.mark.smp(ranks=3)
    def test_others_held_up(smp):
        with smp.raises(KeyError, match="shard 1", ranks=[1]) as info:
            load(smp, [1])
        assert smp.rank() == 1, "the others stay in the block"
        assert info.value.args == ("shard 1 is missing",)

    def test_world(smp_world, smp):
        def body(smp):
            with smp.raises(KeyError, ranks=[0]):
                load(smp, [0])
            return smp.rank()
        assert smp_world.run(body, smp, ranks=3) == [0, None, None]

    @pytest.mark.smp(ranks=3)
    def test_every_rank(smp):
        with smp.raises(KeyError, match="missing"):
            load(smp, range(3))
        smp.barrier()

    @pytest.mark.smp(ranks=3)
    def test_others_go_on(smp):
        with smp.raises(KeyError, ranks=[0, 2]):
            smp.barrier()
            if smp.rank() != 1:
                raise KeyError
        assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1, 2]

    @pytest.mark.smp(ranks=2, ddp=True)
    def test_step(smp):
        model = smp.DistributedModel(torch.nn.Linear(3, 1))
        @smp.step
        def train_step(model, x):
            if smp.rank() == 1:
                raise ValueError("bad batch")
            model.backward(model(x).sum())
        with smp.raises(ValueError, match="bad batch", ranks=[1]):
            train_step(model, torch.ones(4, 3))
        smp.barrier()

    # What follows fails.

    @pytest.mark.smp(ranks=3)
    def test_fails_other_rank(smp):
        with smp.raises(KeyError, ranks=[0]):
            load(smp, [0, 2])

    @pytest.mark.smp(ranks=3)
    def test_fails_nobody(smp):
        with smp.raises(KeyError, ranks=[0]):
            load(smp, [])

    @pytest.mark.smp(ranks=3)
    def test_fails_other_type(smp):
        with smp.raises(OSError, ranks=[0]):
            load(smp, [0])

    @pytest.mark.smp(ranks=3)
    def test_fails_other_text(smp):
        with smp.raises(KeyError, match="layer", ranks=[0]):
            load(smp, [0])

    @pytest.mark.smp(ranks=3)
    def test_fails_held_up_after_the_block(smp):
        with smp.raises(KeyError, ranks=[0]):
            if smp.rank() == 0:
                raise KeyError
        if smp.rank():
            smp.barrier()

    @pytest.mark.smp(ranks=3)
    def test_fails_by_a_deadlock_of_their_own(smp):
        with smp.raises(KeyError, ranks=[0]):
            if smp.rank() == 0:
                raise KeyError
            smp.recv_from(3 - smp.rank(), smp.RankType.WORLD_RANK)

    @pytest.mark.smp(ranks=3)
    def test_fails_before_all_have_raised(smp):
        with smp.raises(KeyError, ranks=[0, 2]):
            load(smp, [0])

    @pytest.mark.smp(ranks=2)
    def test_fails_rank(smp):
        with smp.raises(KeyError, ranks=[2]):
            pass
"""


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_ranks_that_raise_and_ranks_that_follow(session: Session, backend: str) -> None:
    ended = session(TESTS, f"--smp-backend={backend}", "-rfp", ranks=3)
    assert ended.counts == {"passed": 5, "failed": 8}, ended.text
    for name in ("others_held_up", "world", "every_rank", "others_go_on", "step"):
        ended.shows(f"PASSED test_it.py::test_{name}")
    for texts in (
        (
            "test_fails_other_rank",
            "KeyError: 'shard 2 is missing'",
            "smp.raises(KeyError, ranks=[0]): rank 2 raised what only rank 0 is to raise",
            "raised by rank 2 of 3 ranks",
        ),
        ("test_fails_nobody", "DID NOT RAISE", "raised by rank 0 of 3 ranks"),
        ("test_fails_other_type", "KeyError: 'shard 0 is missing'", "raised by rank 0"),
        ("test_fails_other_text", "Regex pattern did not match", "raised by rank 0"),
        ("test_fails_held_up_after_the_block", "DeadlockError: deadlock: 2 of 3 ranks wait"),
        ("test_fails_by_a_deadlock_of_their_own", "wait-for cycle: rank 1 -> rank 2 -> rank 1"),
        ("test_fails_before_all_have_raised", "DeadlockError: deadlock: 2 of 3 ranks wait"),
        ("test_fails_rank", "RankError: smp.raises: ranks=[2]: ranks are 0 to 1"),
    ):
        name, *shown = texts
        part = ended.end.partition(f"test_it.py::{name}\n")[2].partition("\ntest_it.py::")[0]
        for text in shown:
            assert " ".join(text.split()) in " ".join(part.split()), (name, text, part)
