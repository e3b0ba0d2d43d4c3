"""Bad arguments, objects that cannot travel, and sessions that are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session


@pytest.mark.parametrize(
    "call",
    [
        "smp.allgather(thing, smp.WORLD)",
        "smp.send(thing, 2, smp.RankType.WORLD_RANK)",
        "smp.broadcast(thing, smp.WORLD)",
    ],
    ids=["allgather", "send", "broadcast"],
)
def test_an_object_that_cannot_be_pickled_is_an_error_on_its_sender(
    session: Session, call: str
) -> None:
    receive = "smp.allgather(0, smp.WORLD)"
    if "allgather" not in call:
        receive = "smp.recv_from(1, smp.RankType.WORLD_RANK)"
    ended = session(
        f"""
        @pytest.mark.smp
        def test_x(smp):
            thing = {{"model": [1, {{"lock": threading.Lock()}}]}}
            if smp.rank() == 1:
                {call}
            {receive}

        @pytest.mark.smp
        def test_next(smp):
            assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1, 2, 3]
        """
    )
    assert ended.counts == {"failed": 1, "passed": 1}
    ended.shows(
        f">               {call}",
        "PayloadError: smp.",
        "cannot pickle ['model'][1]['lock'] (<unlocked _thread.lock object at",
        "raised by rank 1 of 4 ranks (sim)",
        "cancelled because of rank 1",
    )
    ended.hides_ours("deadlock")


def test_sixty_four_mebibytes_pass(session: Session) -> None:
    ended = session(
        """
        numbers = torch.arange(2**24, dtype=torch.float32)  # 64 MiB, every element another

        @pytest.mark.smp(ranks=2)
        def test_allgather(smp):
            first, second = smp.allgather(numbers + smp.rank(), smp.WORLD)
            assert torch.equal(first, numbers)
            assert torch.equal(second, numbers + 1)

        @pytest.mark.smp(ranks=2)
        def test_send(smp):
            if smp.rank() == 0:
                smp.send(bytearray(numbers.numpy()), 1, smp.RankType.WORLD_RANK)
            else:
                received = smp.recv_from(0, smp.RankType.WORLD_RANK)
                assert torch.equal(torch.frombuffer(received, dtype=torch.float32), numbers)
        """
    )
    assert ended.counts == {"passed": 2}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            "smp.send(1, 4, WORLD)",
            "smp.send: dest_rank=4 is out of range on world rank 1: WORLD_RANK runs from 0 to 3",
        ),
        ("smp.send(1, -1, WORLD)", "smp.send: dest_rank=-1 is out of range on world rank 1"),
        ("smp.recv_from(4, WORLD)", "smp.recv_from: src_rank=4 is out of range on world rank 1"),
        (
            "smp.recv_from(2, PP)",
            "smp.recv_from: src_rank=2 is out of range on world rank 1: PP_RANK runs from 0 to 1",
        ),
        (
            "smp.recv_from(1, WORLD)",
            "smp.recv_from: src_rank=1 (WORLD_RANK) is the caller itself on world rank 1",
        ),
        (
            "smp.send(1, smp.pp_rank(), PP)",
            "(PP_RANK) is the caller itself on world rank 1; a rank cannot send to or receive from itself",
        ),
        ("smp.recv_from('1', WORLD)", "smp.recv_from: src_rank must be an int, not '1'"),
        ("smp.recv_from(True, WORLD)", "smp.recv_from: src_rank must be an int, not True"),
        (
            "smp.recv_from(0, smp.WORLD)",
            "smp.recv_from: rank_type must be one of smp.RankType.WORLD_RANK",
        ),
        (
            "smp.barrier(smp.RankType.WORLD_RANK)",
            "smp.barrier: group must be one of smp.CommGroup.WORLD",
        ),
    ],
)
def test_a_rank_or_group_that_makes_no_sense(session: Session, call: str, text: str) -> None:
    ended = session(
        f"""
        @pytest.mark.smp(ranks=4, pipeline_parallel_degree=2)
        def test_x(smp):
            WORLD, PP = smp.RankType.WORLD_RANK, smp.RankType.PP_RANK
            if smp.rank() == 1:
                {call}
            smp.barrier()
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows(f">               {call}", text, "raised by rank 1 of 4 ranks (sim)")
    ended.hides_ours()


def test_a_rank_outside_a_torch_group_is_told_so_by_torch(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=3)
        def test_x():
            group = dist.new_group([0, 2])
            number = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(number, group=group)
            assert number.item() == [4, 2, 4][dist.get_rank()]
            if dist.get_rank() != 1:
                dist.destroy_process_group(group)
        """
    )
    assert ended.counts == {"passed": 1, "warnings": 1}
    ended.shows("Running all_reduce on global rank 1 which does not belong to the given group")


def test_a_torch_group_of_another_rank_is_refused(session: Session) -> None:
    ended = session(
        """
        handles = []

        @pytest.mark.smp(ranks=2)
        def test_x(smp):
            handles.append(dist.new_group([0, 1]))
            smp.barrier()
            dist.barrier(group=handles[0])
        """
    )
    assert ended.counts["failed"] == 1
    ended.shows(
        ">       dist.barrier(group=handles[0])",
        ": this process group belongs to rank 0",
        "raised by rank 1 of 2 ranks (sim)",
    )
    ended.hides_ours("deadlock")


def test_a_fixture_that_cannot_be_copied_is_named(session: Session) -> None:
    ended = session(
        """
        @pytest.fixture
        def weights():
            return [1, threading.Lock()]

        @pytest.mark.smp
        def test_x(smp, weights):
            print("a rank has run")

        @pytest.mark.smp
        def test_next(smp):
            smp.barrier()
        """
    )
    assert ended.counts == {"failed": 1, "passed": 1}
    ended.shows(
        "PayloadError: argument 'weights': cannot pickle [1] (<unlocked _thread.lock object",
        "A test's arguments, fixtures among them, are copied for every rank",
    )
    ended.hides_ours("a rank has run")


def test_an_argument_of_smp_world_that_cannot_be_copied_is_named(session: Session) -> None:
    ended = session(
        """
        def test_x(smp_world):
            smp_world.run(print, 1, threading.Lock())
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows(
        "smp_world.run(print, 1, threading.Lock())", "PayloadError: argument '1': cannot pickle"
    )
    ended.hides_ours()


def test_smp_outside_a_rank_says_where_it_belongs(session: Session) -> None:
    ended = session(
        """
        @pytest.fixture
        def rank(smp):
            return smp.rank()

        @pytest.mark.smp
        def test_fixture(rank):
            pass

        def test_plain(smp):
            smp.barrier()

        def test_world_is_told_from_a_call(smp):
            assert smp.WORLD is api.WORLD
        """
    )
    assert ended.counts == {"errors": 1, "failed": 1, "passed": 1}
    for call in ("smp.rank", "smp.barrier"):
        assert (
            f"ThreadError: {call} was used outside a rank: fixtures and plain tests run once, in the controller"
            in ended.text
        )
    ended.shows("smp_world")


def test_a_name_that_the_api_lacks(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=1)
        def test_x(smp):
            smp.all_gather(1)
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("AttributeError", "all_gather")


# Interruption.


@pytest.mark.parametrize("rank", [0, 3])
def test_keyboard_interrupt_on_a_rank_ends_the_session(session: Session, rank: int) -> None:
    ended = session(
        f"""
        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() == {rank}:
                raise KeyboardInterrupt
            smp.barrier()

        def test_never(): pass
        """
    )
    assert ended.code == pytest.ExitCode.INTERRUPTED
    ended.shows("! KeyboardInterrupt", f"{session.line_of('raise Key')}: KeyboardInterrupt")
    ended.hides_ours("passed", "failed")


_INTERRUPTED = {
    "rank 0 computes, the others have not started": """
        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() == 0:
                tell()
                while True: pass
    """,
    "all but one wait": """
        @pytest.mark.smp
        def test_x(smp):
            if smp.rank() == 3:
                tell()
                while True: pass
            smp.barrier()
    """,
    "a rank sleeps on a lock": """
        @pytest.mark.smp
        def test_x(smp):
            smp.allgather(0, smp.WORLD)
            if smp.rank() == 2:
                lock = threading.Lock()
                lock.acquire()
                tell()
                lock.acquire()
            smp.barrier()
    """,
    "in an example": """
        @pytest.mark.smp
        @given(number=st.integers())
        def test_x(smp, number):
            smp.barrier()
            if smp.rank() == 1:
                tell()
                while True: pass
            smp.barrier()
    """,
}


@pytest.mark.parametrize("source", _INTERRUPTED.values(), ids=_INTERRUPTED)
def test_ctrl_c_ends_the_session_and_the_process(session: Session, source: str) -> None:
    ready, tell = os.pipe()
    source = textwrap.dedent(source).replace("tell()", f"os.write({tell}, b'.')")
    process = session.pytester.popen(
        session.command(f"{source}\ndef test_never(): pass\n"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        pass_fds=[tell],
    )
    os.close(tell)
    try:
        assert os.read(ready, 1) == b"."
        process.send_signal(signal.SIGINT)
        text = process.communicate()[0].decode()
    finally:
        process.kill()
        process.wait()
        os.close(ready)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, text
    assert "! KeyboardInterrupt !" in text
    assert "no tests ran" in text
    for word in ("Traceback", "Fatal", "INTERNALERROR", "passed", "failed"):
        assert word not in text


def test_an_example_that_one_rank_rejects_does_not_hide_the_failure_of_another(
    session: Session,
) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        @given(number=st.integers(0, 100))
        def test_x(smp, number):
            from hypothesis import assume

            assume(smp.rank() == 1 or number < 50)
            assert number < 70
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("raised by rank 1 of 2 ranks", "number=70")


def test_a_property_that_returns_something_does_not_pass(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=2)
        @given(number=st.integers())
        def test_x(smp, number):
            return number == 2
        """
    )
    assert ended.counts == {"failed": 1}
    ended.shows("FailedHealthCheck")


def test_smp_world_refuses_what_would_not_run(session: Session) -> None:
    ended = session(
        """
        async def coroutine():
            assert False

        def generator():
            yield

        @pytest.mark.parametrize("body", [coroutine, generator])
        def test_body(smp_world, body):
            with pytest.raises(ValueError, match="a rank runs a plain function"):
                smp_world.run(body, ranks=2)

        @pytest.mark.parametrize("timeout", [0, -1, "3", float("inf"), True])
        def test_timeout(smp_world, timeout):
            with pytest.raises(ValueError, match="must be seconds above 0"):
                smp_world.run(print, ranks=2, timeout=timeout)
        """
    )
    assert ended.counts == {"passed": 7}


def test_what_ranks_print_under_smp_world_is_shown(session: Session) -> None:
    ended = session(
        """
        def body():
            print("from a rank")
            assert False

        def test_x(smp_world):
            smp_world.run(body, ranks=2)
        """
    )
    ended.shows("--- rank 0, stdout", "from a rank", "--- rank 1, stdout")


def test_a_marker_put_on_after_collection_works(session: Session) -> None:
    session.pytester.makeconftest(
        """
        import pytest

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.smp(ranks=2))
        """
    )
    ended = session("def test_x(smp): assert smp.size() == 2")
    assert ended.counts == {"passed": 1}
